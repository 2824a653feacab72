"""Finds the conversions of a model's dense part by running it without data. Ops choose their
signatures when they run, so a single process runs a forward and a backward pass of rank 0 and
records the steps. Small passes run on zeros, and large ones on tensors without storage (torch's
meta device).
"""

import math
from collections.abc import Mapping

import torch

from sbpflow.boxing.dry_run import DryBoxing
from sbpflow.boxing.plan import Conversion
from sbpflow.boxing.step import BoxingStep
from sbpflow.config.train_options import LossConfig
from sbpflow.run.model.spec import Fields, ModelSpec
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Split, balanced_sizes
from sbpflow.tensor import ops
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.training.dense_part import has_batch_norm
from sbpflow.training.losses import PLAIN, row_losses

# Up to these numbers, a pass on the CPU takes less time than importing torch's compiler, which is
# needed for operations on the meta device.
_MOST_PRODUCTS = 15_000_000_000
_MOST_VALUES = 2**25


def dense_steps(
    spec: ModelSpec,
    fields: Fields,
    layouts: Mapping[str, Layout],
    world: Placement,
    *,
    dtype: torch.dtype,
    batch_size: int,
    loss: LossConfig = PLAIN,
) -> tuple[tuple[BoxingStep, ...], tuple[BoxingStep, ...], tuple[Conversion, ...]]:
    """Return the forward and the backward steps of rank 0's dense part that communicate, in order,
    for a global batch of ``batch_size`` rows. Also return the conversions that the forward pass and
    the row losses request, each with its adjoint.
    """
    most_rows = balanced_sizes(batch_size, world.size)[0]
    boxing = DryBoxing(world.size, device=_device(spec, fields, world, most_rows))
    part = spec.build(layouts, boxing, seed=0, dtype=dtype)
    if has_batch_norm(part):
        batch_size = max(batch_size, 2)  # ``check_rows`` refuses one row with a better message
    sizes = balanced_sizes(batch_size, world.size)
    home = Layout(world, (Split(0),))

    def rows(width: int) -> GlobalTensor:
        local = torch.zeros(sizes[0], width, dtype=dtype, device=boxing.world.device)
        return GlobalTensor.from_local(local, home, (batch_size, width), boxing)

    vectors = {output.name: rows(output.width).requires_grad_() for output in spec.outputs}
    logits = part.forward(vectors, rows(len(fields.dense)), training=True, seed=0)
    losses = row_losses(part, logits, rows(1), loss)
    conversions = tuple(boxing.conversions)
    mean = ops.reduce_mean(losses, id="loss")
    num_forward = len(boxing.trace)
    mean.backward()
    passes = boxing.trace[:num_forward], boxing.trace[num_forward:]
    forward, backward = (tuple(step for step in steps if step.groups) for steps in passes)
    return forward, backward, conversions


def _device(spec: ModelSpec, fields: Fields, world: Placement, rows: int) -> str:
    """Return the device on which a pass of ``rows`` rows is faster."""
    if getattr(spec, "half", None) is not None:  # some CPUs compute slowly in half precision
        return "meta"
    values = rows * (len(fields.dense) + sum(output.width for output in spec.outputs))
    products = 3 * rows * sum(math.prod(each.shape) for each in spec.parameters.values())
    small = values <= _MOST_VALUES and products <= _MOST_PRODUCTS
    return "cpu" if small and world.device_type == "cpu" else "meta"
