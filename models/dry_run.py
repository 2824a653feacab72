"""The conversions that the dense part of a model makes, found by running it without data.

Ops choose their signatures when they run, so the steps are recorded from a real forward and
backward over tensors without storage (torch's meta device), with no other rank there.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from models.wdl import WdlSpec, WideDeep
from sbpflow import ops
from sbpflow.boxing import Boxing
from sbpflow.boxing_plan import BoxingStep
from sbpflow.dist import World
from sbpflow.global_tensor import GlobalTensor
from sbpflow.layout import Layout
from sbpflow.placement import Placement
from sbpflow.sbp import Split, balanced_sizes


class RecordingBoxing(Boxing):
    """Writes steps down and answers with empty parts of the right shape."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.steps: list[BoxingStep] = []

    def run(
        self,
        steps: Sequence[BoxingStep],
        part: Tensor | None,
        channel: str = "main",
        *,
        donate: bool = False,
    ) -> Tensor | None:
        """Record, and make the last step's part."""
        self.steps += [step for step in steps if step.groups]
        if not steps:
            return part
        shape = steps[-1].dst.part_shape(steps[-1].shape, self.world.rank)
        if shape is None:
            return None
        return torch.empty(shape, dtype=steps[-1].dtype, device=self.world.device)


def dense_steps(
    spec: WdlSpec,
    layouts: Mapping[str, Layout],
    world: Placement,
    *,
    dtype: torch.dtype,
    backend: str,
    batch_size: int,
) -> tuple[tuple[BoxingStep, ...], tuple[BoxingStep, ...]]:
    """(forward, backward) steps of the dense part for a global batch, as rank 0 plans them."""
    stand_in = World(0, world.size, torch.device("meta"))
    stand_in.backend = backend
    boxing = RecordingBoxing(stand_in)
    model = WideDeep(spec, layouts, boxing, seed=0, dtype=dtype)
    sizes = balanced_sizes(batch_size, world.size)
    home = Layout(world, (Split(0),))

    def rows(width: int) -> GlobalTensor:
        part = torch.empty(sizes[0], width, dtype=dtype, device="meta")
        return GlobalTensor.from_local(part, home, (batch_size, width), boxing)

    vectors = {output.name: rows(output.width).requires_grad_() for output in spec.outputs}
    logits = model.logits(vectors, rows(spec.num_dense), training=False, seed=0)
    loss = ops.bce_with_logits(logits, rows(1))
    num_forward = len(boxing.steps)
    loss.backward()
    return tuple(boxing.steps[:num_forward]), tuple(boxing.steps[num_forward:])
