"""Creates and connects the process groups of a run before its first step.

NCCL connects at a group's first collective, and connecting inside a step would block every rank.
Moreover, all ranks of a group must take part in its first call; inside a step, a rank with no rows
to exchange would skip it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.plan import plan_boxing
from sbpflow.boxing.step import BoxingStep
from sbpflow.embedding.exchange.base import GRADIENTS, VECTORS
from sbpflow.embedding.exchange.id_transfer import IDS
from sbpflow.embedding.plan.group_plan import Step
from sbpflow.run.planning.plan import RunPlan
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Partial, Split
from sbpflow.training.clipping import CHANNEL as DENSE

CONVERSIONS = "main"  # the channel that conversions inside a model use


@dataclass(frozen=True, slots=True)
class GroupUse:
    """A group of ranks that communicate on a channel. If ``pairs``, each rank sends directly to
    every other rank; otherwise the collectives use a ring or a tree.
    """

    ranks: tuple[int, ...]
    channel: str
    pairs: bool


def groups_of(plan: RunPlan) -> tuple[GroupUse, ...]:
    """Return the groups that a step uses, in the order in which all ranks create them.

    Groups are ordered by channel and then by first use in the plan, so the order is the same on all
    ranks.
    """
    tables, rows = plan.embeddings, plan.batch_size
    by_channel: dict[str, Sequence[Step]] = {
        IDS: tables.ahead_steps(rows),
        VECTORS: tables.forward_steps(rows),
        CONVERSIONS: (*plan.dense_forward, *plan.dense_backward),
        GRADIENTS: (*tables.steps(rows, "gradients"), *tables.update_steps(rows)),
        DENSE: (*plan.dense_gradients.steps, *plan.clip),
    }
    uses: dict[tuple[tuple[int, ...], str], bool] = {}
    for channel, steps in by_channel.items():
        for step in steps:
            pairs = not isinstance(step, BoxingStep) or step.collective == "all_to_all"
            for ranks in step.groups:
                if len(ranks) > 1:
                    key = (tuple(sorted(ranks)), channel)
                    uses[key] = uses.get(key, False) or pairs
    return tuple(GroupUse(ranks, channel, pairs) for (ranks, channel), pairs in uses.items())


def warm_up(plan: RunPlan, boxing: Boxing) -> None:
    """Run one small collective of each kind on every group of the plan, and wait for all of them.

    Every rank of the world must call this function. Raises PeerLostError if a rank does not
    respond.
    """
    world = boxing.world
    for use in groups_of(plan):
        line = Placement.of(world.device.type, use.ranks)
        size = len(use.ranks)
        conversions = [(Layout(line, (Partial(),)), Layout(line, (Broadcast(),)))]
        if use.pairs:
            conversions.append((Layout(line, (Split(0),)), Layout(line, (Split(1),))))
        for src, dst in conversions:
            whole, id = (size, size), f"start/{use.channel}"
            steps = plan_boxing(src, dst, whole, torch.float32, id=id)
            shape = src.part_shape(whole, world.rank)
            part = None if shape is None else torch.ones(shape, device=world.device)
            boxing.run(steps, part, use.channel)
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
