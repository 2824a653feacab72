"""The conversions that the dense part of a model makes, found by running it without data.

Ops choose their signatures when they run, so the steps are recorded from a real forward and
backward over tensors without storage (torch's meta device), with no other rank there.
"""

from collections.abc import Mapping

import torch

from sbpflow.boxing.dry_run import DryBoxing
from sbpflow.boxing.step import BoxingStep
from sbpflow.run.model import Fields, ModelSpec
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Split, balanced_sizes
from sbpflow.tensor import ops
from sbpflow.tensor.global_tensor import GlobalTensor


def dense_steps(
    spec: ModelSpec,
    fields: Fields,
    layouts: Mapping[str, Layout],
    world: Placement,
    *,
    dtype: torch.dtype,
    backend: str,
    batch_size: int,
) -> tuple[tuple[BoxingStep, ...], tuple[BoxingStep, ...]]:
    """(forward, backward) steps of the dense part for a global batch, as rank 0 plans them."""
    boxing = DryBoxing(world.size)
    boxing.world.backend = backend
    part = spec.build(layouts, boxing, seed=0, dtype=dtype)
    sizes = balanced_sizes(batch_size, world.size)
    home = Layout(world, (Split(0),))

    def rows(width: int) -> GlobalTensor:
        local = torch.empty(sizes[0], width, dtype=dtype, device="meta")
        return GlobalTensor.from_local(local, home, (batch_size, width), boxing)

    vectors = {output.name: rows(output.width).requires_grad_() for output in spec.outputs}
    logits = part.forward(vectors, rows(len(fields.dense)), training=False, seed=0)
    loss = ops.reduce_mean(part.row_losses(logits, rows(1)), id="loss")
    num_forward = len(boxing.trace)
    loss.backward()
    forward, backward = boxing.trace[:num_forward], boxing.trace[num_forward:]
    return tuple(s for s in forward if s.groups), tuple(s for s in backward if s.groups)
