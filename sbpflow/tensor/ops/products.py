"""Computes linear layers on plain CPU tensors with the faster of torch's two libraries.

torch calls MKL for float32. On AMD CPUs, MKL uses its AVX2 kernels, and oneDNN, which is part of
torch as well, is faster if both matrices are stored by rows (``docs/decisions/engine.md``). The CPU
decides, not a measurement, because the libraries differ in the last bits: all ranks on equal CPUs,
and every start of a run, compute the same bits.
"""
# pyright: reportIncompatibleMethodOverride=false
# (torch declares forward and backward with arbitrary arguments; here, the arguments have names)

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sbpflow.tensor.autograd import Context

# oneDNN needs about 20 us per call, so small products use MKL.
_LEAST_PRODUCTS = 1 << 22
_LEAST_WIDTH = 16
# If an input is narrower, the gradient of the weight is computed transposed: for 4,096 x 13 x 64,
# the product then takes 0.11 instead of 0.27 ms (AMD EPYC).
_NARROW = 32


def linear_of_tensors(xs: Sequence[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``concat(xs, 1) @ weight.T + bias`` for x_i [b, k_i], weight [n, sum k_i], bias [n],
    without the concatenation.
    """
    return _Linear.apply(weight, bias, *xs)  # pyright: ignore[reportReturnType]


class _Linear(torch.autograd.Function):
    """Multiplies each input by its columns of the weight."""

    @staticmethod
    def forward(ctx: Context, weight: Tensor, bias: Tensor | None, *xs: Tensor) -> Tensor:
        columns = _columns(weight, xs)
        ctx.save_for_backward(*columns, *xs)
        # The product of the widest input, which includes the bias, comes first.
        first, *others = sorted(range(len(xs)), key=lambda n: -xs[n].shape[1])
        total = _product(xs[first], columns[first], bias)
        for n in others:
            total.addmm_(xs[n], columns[n].t())
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradient, saved = gradient.contiguous(), ctx.saved_tensors
        columns, xs = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        wants_weight, wants_bias, *wants_inputs = ctx.needs_input_grad
        parts = [_weight_gradient(gradient, x) for x in xs] if wants_weight else []
        return (
            (parts[0] if len(parts) == 1 else torch.cat(parts, 1)) if wants_weight else None,
            gradient.sum(0) if wants_bias else None,
            *(
                _product(gradient, column.t()) if wanted else None
                for column, wanted in zip(columns, wants_inputs, strict=True)
            ),
        )


def _columns(weight: Tensor, xs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the weight's columns for each input.

    They are contiguous, because a row stride such as 429 would make the products 20 % slower.
    """
    if len(xs) == 1:
        return [weight]
    return [part.contiguous() for part in weight.split([x.shape[1] for x in xs], 1)]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ weight.T + bias``."""
    rows, inputs, outputs = *x.shape, weight.shape[0]
    if (
        rows * inputs * outputs < _LEAST_PRODUCTS
        or min(inputs, outputs) < _LEAST_WIDTH
        or x.device.type != "cpu"
        or x.dtype != torch.float32
        or not onednn_is_faster()
    ):
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(
        x.contiguous(), weight.contiguous(), bias, "none", [], ""
    )


def _weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    if x.shape[1] < _NARROW:
        return (x.t() @ gradient).t()
    return gradient.t() @ x


@cache
def onednn_is_faster() -> bool:
    """Return whether oneDNN computes large float32 products faster than MKL on this CPU."""
    if not torch.backends.mkldnn.is_available() or not hasattr(
        torch.ops.mkldnn, "_linear_pointwise"
    ):
        return False
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and _vendor() == "AuthenticAMD"


def _vendor() -> str:
    """Return the CPU's vendor according to /proc/cpuinfo, or "" without this file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    vendors = [line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")]
    return vendors[0] if vendors else ""
