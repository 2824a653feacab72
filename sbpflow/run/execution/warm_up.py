"""The process groups of a run, made and connected before its first step.

NCCL connects at a group's first collective. Inside a step that would wait for every rank in the
middle of others' transfers; and where pairs of ranks pass rows directly, a rank that has none would
stay out of a first call that all must make.
"""

from collections.abc import Iterator, Sequence
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

CONVERSIONS = "main"  # the channel of those inside a model


@dataclass(frozen=True, slots=True)
class GroupUse:
    """Ranks that talk on a channel; ``pairs``: each with each other one, not in a ring or tree."""

    ranks: tuple[int, ...]
    channel: str
    pairs: bool


def groups_of(plan: RunPlan) -> tuple[GroupUse, ...]:
    """The groups that the moves of a step use, in the order in which all ranks make them.

    That order is of the plan, which all ranks have alike: by channel, then by first use.
    """
    tables, rows = plan.embeddings, plan.batch_size
    by_channel: dict[str, Sequence[Step]] = {
        IDS: tables.ahead_steps(rows),
        VECTORS: tables.forward_steps(rows),
        CONVERSIONS: (*plan.dense_forward, *plan.dense_backward),
        GRADIENTS: (*tables.push_steps(rows), *tables.update_steps(rows)),
        DENSE: (*plan.dense_gradients.steps, *plan.clip),
    }
    found: dict[tuple[tuple[int, ...], str], bool] = {}
    for channel, steps in by_channel.items():
        for step in steps:
            pairs = not isinstance(step, BoxingStep) or step.collective == "all_to_all"
            for ranks in _groups(step):
                key = (tuple(sorted(ranks)), channel)
                found[key] = found.get(key, False) or pairs
    return tuple(GroupUse(ranks, channel, pairs) for (ranks, channel), pairs in found.items())


def _groups(step: Step) -> Iterator[tuple[int, ...]]:
    yield from (ranks for ranks in step.groups if len(ranks) > 1)


def warm_up(plan: RunPlan, boxing: Boxing) -> None:
    """One small collective of each kind on every group of the plan, and a wait for all of them.

    Every rank of the world calls it; PeerLostError where one does not answer.
    """
    world = boxing.world
    for use in groups_of(plan):
        line = Placement.of(world.device.type, use.ranks)
        size = len(use.ranks)
        asked = [(Layout(line, (Partial(),)), Layout(line, (Broadcast(),)))]
        if use.pairs:
            asked.append((Layout(line, (Split(0),)), Layout(line, (Split(1),))))
        for src, dst in asked:
            steps = plan_boxing(
                src,
                dst,
                (size, size),
                torch.float32,
                id=f"start/{use.channel}",
                backend=world.backend,
            )
            mine = src.part_shape((size, size), world.rank)
            part = None if mine is None else torch.ones(mine, device=world.device)
            boxing.run(steps, part, use.channel)
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
