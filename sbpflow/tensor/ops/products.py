"""Computes linear layers on plain tensors with the faster of torch's two libraries for CPUs.

torch calls MKL for float32. On AMD CPUs, MKL uses its AVX2 kernels, and oneDNN, which is part of
torch as well, is faster for large products (``docs/decisions/engine.md``). The CPU decides, not a
measurement, because the libraries differ in the last bits: on equal CPUs, all ranks and all starts
of a run compute the same bits for products of the same shape.
"""
# pyright: reportIncompatibleMethodOverride=false
# (torch declares forward and backward with arbitrary arguments; here, the arguments have names)

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

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
    if len(xs) == 1:
        return linear(xs[0], weight, bias)
    widths = [x.shape[1] for x in xs]
    # Make the columns contiguous: a row stride such as 429 would make the products 20 % slower.
    columns = [part.contiguous() for part in weight.split(widths, 1)]
    narrow, *wider = sorted(range(len(xs)), key=lambda n: widths[n])
    if not _uses_onednn(xs[wider[-1]], columns[wider[-1]]):
        # The widest input comes last, so that the largest product is fused with an addition.
        total = F.linear(xs[narrow], columns[narrow], bias)
        for n in wider:
            total = torch.addmm(total, xs[n], columns[n].t())
        return total
    total = linear(xs[narrow], columns[narrow], bias)
    for n in wider:
        total = total + linear(xs[n], columns[n], None)
    return total


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``x @ weight.T + bias`` for x [.., k], weight [n, k], bias [n]."""
    if _is_plain(x) and onednn_is_faster():
        return _Linear.apply(x, weight, bias)  # pyright: ignore[reportReturnType]
    return F.linear(x, weight, bias)


class _Linear(torch.autograd.Function):
    """``F.linear`` of float32 matrices, with the faster library for every product. Its second
    derivatives are computed as those of ``F.linear``.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _product(x, weight, bias)

    @staticmethod
    def setup_context(
        ctx: Context, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor
    ) -> None:
        """Keep the inputs that the wanted gradients need."""
        x, weight, _ = inputs
        wants_input, wants_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if wants_weight else None, weight if wants_input else None)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        bias_gradient = gradient.sum(0) if ctx.needs_input_grad[2] else None
        if torch.is_grad_enabled():  # these gradients will be differentiated
            return (
                None if weight is None else gradient @ weight,
                None if x is None else gradient.t() @ x,
                bias_gradient,
            )
        return (
            None if weight is None else _product(gradient, weight.t()),
            None if x is None else _weight_gradient(gradient, x),
            bias_gradient,
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not _uses_onednn(x, weight):
        return F.linear(x, weight, bias)
    if bias is not None:
        bias = bias.contiguous()
    return torch.ops.mkldnn._linear_pointwise(
        x.contiguous(), weight.contiguous(), bias, "none", [], ""
    )


def _weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    if x.shape[1] < _NARROW:
        return (x.t() @ gradient).t()
    return gradient.t() @ x


def _is_plain(x: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.ndim == 2
        and not torch.is_autocast_enabled("cpu")
    )


def _uses_onednn(x: Tensor, weight: Tensor) -> bool:
    outputs, inputs = weight.shape
    return (
        x.shape[0] * inputs * outputs >= _LEAST_PRODUCTS
        and min(inputs, outputs) >= _LEAST_WIDTH
        and _is_plain(x)
        and onednn_is_faster()
    )


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
