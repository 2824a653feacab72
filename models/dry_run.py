"""The conversions that the dense part of a model makes, found by running it without data.

Ops choose their signatures when they run, so the steps are recorded from a real forward and
backward over tensors without storage (torch's meta device), with no other rank there.
"""

from collections.abc import Mapping

import torch

from models.wdl import WdlSpec, WideDeep
from sbpflow.boxing.dry_run import DryBoxing
from sbpflow.boxing.plan import BoxingStep
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Split, balanced_sizes
from sbpflow.tensor import ops
from sbpflow.tensor.global_tensor import GlobalTensor


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
    boxing = DryBoxing(world.size)
    boxing.world.backend = backend
    model = WideDeep(spec, layouts, boxing, seed=0, dtype=dtype)
    sizes = balanced_sizes(batch_size, world.size)
    home = Layout(world, (Split(0),))

    def rows(width: int) -> GlobalTensor:
        part = torch.empty(sizes[0], width, dtype=dtype, device="meta")
        return GlobalTensor.from_local(part, home, (batch_size, width), boxing)

    vectors = {output.name: rows(output.width).requires_grad_() for output in spec.outputs}
    logits = model.logits(vectors, rows(spec.num_dense), training=False, seed=0)
    loss = ops.bce_with_logits(logits, rows(1))
    num_forward = len(boxing.trace)
    loss.backward()
    forward, backward = boxing.trace[:num_forward], boxing.trace[num_forward:]
    return tuple(s for s in forward if s.groups), tuple(s for s in backward if s.groups)
