"""Computes linear layers on plain tensors with the faster of torch's two libraries for CPUs.

torch calls MKL for float32. On AMD CPUs, MKL uses its AVX2 kernels, and oneDNN, which is part of
torch as well, is faster for large products on CPUs with AVX-512 (``docs/decisions/engine.md``). For
gradients of weights, oneDNN must copy both operands, so it is faster only on CPUs with 512-bit FMA
units; on other CPUs, it computes the gradients of narrow layers as those of a convolution, without
copies. On AMD CPUs without AVX-512, oneDNN is faster only for large inputs and few results per row,
and MKL is slower if the results of a row do not start at a multiple of 32 bytes, so such results
get padding. The CPU decides, not a measurement, because the libraries differ in the last bits: on
equal CPUs, all ranks and all starts of a run compute the same bits for products of the same shape.
"""
# pyright: reportIncompatibleMethodOverride=false
# (torch declares forward and backward with arbitrary arguments; here, the arguments have names)

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from sbpflow.runtime.compute.cpu import cpu_facts
from sbpflow.tensor.autograd import Context

# oneDNN needs about 20 us per call, so small products use MKL.
_LEAST_PRODUCTS = 1 << 22
_LEAST_GRADIENT_PRODUCTS = 1 << 23
_LEAST_WIDTH = 16
_ALIGNED = 8  # float32 values in 32 bytes
_LEAST_NARROW_INPUT, _MOST_NARROW_OUTPUTS = 1 << 20, 128
# Rows are copied in blocks: larger copies are slower, because the allocator returns them to the
# system each time.
_COPIED_BYTES, _LEAST_ROWS = 8 << 20, 256
# A gradient is computed as that of a convolution from images of this many rows, if there are enough
# images, and the number of outputs is a multiple of oneDNN's blocks.
_IMAGE_ROWS, _LEAST_IMAGES, _OUTPUT_BLOCK = 256, 16, 16


def linear_of_tensors(xs: Sequence[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``concat(xs, 1) @ weight.T + bias`` for x_i [b, k_i], weight [n, sum k_i], bias [n],
    without the concatenation.
    """
    if len(xs) == 1:
        return linear(xs[0], weight, bias)
    widths = [x.shape[1] for x in xs]
    # Make the columns contiguous: a row stride such as 429 would make the products 20 % slower.
    columns = [part.contiguous() for part in weight.split(widths, 1)]
    order = sorted(range(len(xs)), key=lambda n: widths[n])
    widest, outputs = xs[order[-1]], weight.shape[0]
    if _uses_onednn(widest, outputs) or _needs_padding(widest, outputs):
        parts = [tensors[n] for tensors in (xs, columns) for n in reversed(order)]
        return _Linear.apply(bias, *parts)  # pyright: ignore[reportReturnType]
    # The widest input comes last, so that the largest product is fused with an addition.
    total = F.linear(xs[order[0]], columns[order[0]], bias)
    for n in order[1:]:
        total = torch.addmm(total, xs[n], columns[n].t())
    return total


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``x @ weight.T + bias`` for x [.., k], weight [n, k], bias [n]. The rows of a result
    may have padding.
    """
    outputs, inputs = weight.shape
    is_wide = onednn_is_faster() and outputs > inputs  # see ``add_weight_gradient``
    is_large = _is_large(x, outputs) and (onednn_is_faster() or mkl_has_slow_shapes())
    if _is_plain(x) and (is_wide or is_large):
        return _Linear.apply(bias, x, weight)  # pyright: ignore[reportReturnType]
    return F.linear(x, weight, bias)


class _Linear(torch.autograd.Function):
    """``linear_of_tensors`` for float32 matrices, with the faster way for every product. The first
    input is the widest. Second derivatives are computed as those of ``F.linear``.
    """

    @staticmethod
    def forward(ctx: Context, bias: Tensor | None, *parts: Tensor) -> Tensor:
        xs, weights = parts[: len(parts) // 2], parts[len(parts) // 2 :]
        wanted = ctx.needs_input_grad[1:]
        want_inputs, want_weights = wanted[: len(xs)], wanted[len(xs) :]
        ctx.save_for_backward(
            *(x if want else None for x, want in zip(xs, want_weights, strict=True)),
            *(weight if want else None for weight, want in zip(weights, want_inputs, strict=True)),
        )
        total = product(xs[0], weights[0], bias)
        for x, weight in zip(xs[1:], weights[1:], strict=True):
            add_product(total, x, weight)
        return total

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        xs, weights = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        differentiated = torch.is_grad_enabled()  # these gradients will be differentiated

        def of_input(weight: Tensor) -> Tensor:
            return gradient @ weight if differentiated else product(gradient, weight.t())

        def of_weight(x: Tensor) -> Tensor:
            return gradient.t() @ x if differentiated else _weight_gradient(gradient, x)

        return (
            gradient.sum(0) if ctx.needs_input_grad[0] else None,
            *(None if weight is None else of_input(weight) for weight in weights),
            *(None if x is None else of_weight(x) for x in xs),
        )


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ weight.T + bias``, like ``linear``, but without gradients."""
    outputs = weight.shape[0]
    if _needs_padding(x, outputs):
        out = padded(x, outputs)
        if bias is None:
            return torch.mm(x, weight.t(), out=out)
        return torch.addmm(bias, x, weight.t(), out=out)
    if not _uses_onednn(x, outputs):
        return F.linear(x, weight, bias)
    if bias is not None:
        bias = bias.contiguous()
    return torch.ops.mkldnn._linear_pointwise(
        x.contiguous(), weight.contiguous(), bias, "none", [], ""
    )


def padded(x: Tensor, outputs: int) -> Tensor:
    """Return a new tensor for a product of x [b, k] with ``outputs`` results per row ([b, outputs],
    not initialized), whose rows have padding if that makes the product faster.
    """
    width = outputs + -outputs % _ALIGNED if _needs_padding(x, outputs) else outputs
    return x.new_empty_strided((x.shape[0], outputs), (width, 1))


def _weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """Compute ``gradient.T @ x`` for gradient [b, n] and x [b, k] of the same dtype."""
    outputs, inputs = gradient.shape[1], x.shape[1]
    if _is_convolution(x, outputs):
        return _convolution_gradient(gradient, x)
    if _is_swapped(x, outputs):
        return _weight_gradient(x, gradient).t()
    if not _uses_onednn_gradient(x, outputs):
        return gradient.t() @ x
    total = x.new_zeros(outputs, inputs)
    add_weight_gradient(total, gradient, x)
    return total


def _convolution_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """Compute ``gradient.T @ x``, for most rows as the gradient of a 1 x 1 convolution of images
    with k channels.
    """
    whole = x.shape[0] - x.shape[0] % _IMAGE_ROWS

    def images(tensor: Tensor) -> Tensor:
        blocks = tensor[:whole].contiguous().view(-1, _IMAGE_ROWS, 1, tensor.shape[1])
        return blocks.permute(0, 3, 1, 2)  # torch's order of dims; channels stay last in memory

    outputs, inputs = gradient.shape[1], x.shape[1]
    like = x.new_empty(1).expand(outputs, inputs, 1, 1)  # only its shape and dtype matter
    ones, zeros = (1, 1), (0, 0)  # strides and dilations; padding
    wanted = (False, True, False)  # the gradients of the input, the weight, and the bias
    total = torch.ops.aten.convolution_backward(
        images(gradient), images(x), like, None, ones, zeros, ones, False, zeros, 1, wanted
    )[1].view(outputs, inputs)
    return total.addmm_(gradient[whole:].t(), x[whole:]) if whole < x.shape[0] else total


def add_product(total: Tensor, x: Tensor, weight: Tensor) -> None:
    """Compute ``total += x @ weight.T``, adding in the dtype of ``total`` even if the others have a
    narrower dtype.
    """
    if x.dtype == total.dtype and not _uses_onednn(x, weight.shape[0]):
        total.addmm_(x, weight.t())
    else:
        total += product(x, weight)


def add_weight_gradient(total: Tensor, gradient: Tensor, x: Tensor) -> None:
    """Compute ``total += gradient.T @ x`` for gradient [b, n] and x [b, k], adding in the dtype of
    ``total``.
    """
    outputs, inputs = total.shape
    if _is_convolution(x, outputs) or _is_swapped(x, outputs):
        total += _weight_gradient(gradient, x)
    elif _uses_onednn_gradient(x, outputs):
        like = x.new_empty(outputs, inputs)  # only its shape and dtype matter
        size = max(_COPIED_BYTES // (x.itemsize * (outputs + inputs)), _LEAST_ROWS)
        for part, block in zip(gradient.split(size), x.split(size), strict=True):
            total += torch.ops.aten.mkldnn_linear_backward_weights(
                part.to_mkldnn(), block.to_mkldnn(), like, False
            )[0]
    elif x.dtype == total.dtype:
        total.addmm_(gradient.t(), x)
    else:
        total += gradient.t() @ x


def _is_plain(x: Tensor) -> bool:
    """Return whether x is a float32 matrix on CPU, to which autocast does not apply."""
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.ndim == 2
        and not torch.is_autocast_enabled("cpu")
    )


def _is_large(x: Tensor, outputs: int, least: int = _LEAST_PRODUCTS) -> bool:
    """Return whether a product of x [b, k] with ``outputs`` results per row, or with a gradient [b,
    outputs], has at least ``least`` terms.
    """
    return x.numel() * outputs >= least and min(x.shape[-1], outputs) >= _LEAST_WIDTH


def _is_narrow(values: int, outputs: int) -> bool:
    """Return whether MKL would spend much of the time of a product with ``outputs`` results per row
    on copying an input of ``values`` values.
    """
    return values >= _LEAST_NARROW_INPUT and outputs <= _MOST_NARROW_OUTPUTS


def _is_convolution(x: Tensor, outputs: int) -> bool:
    """Return whether oneDNN computes the gradient of a weight [outputs, k] faster as that of a
    convolution, for an input x [b, k].
    """
    return (
        onednn_is_faster()
        and not onednn_gradients_are_faster()
        and x.shape[0] >= _LEAST_IMAGES * _IMAGE_ROWS
        and outputs % _OUTPUT_BLOCK == 0
        and _is_narrow(x.numel(), outputs)
        and _uses_onednn(x, outputs)
    )


def _is_swapped(x: Tensor, outputs: int) -> bool:
    """Return whether the gradient of a weight [outputs, k] for x [b, k] is computed transposed.

    The wider operand then comes second: for 4,096 x 13 x 64, MKL takes 0.11 instead of 0.27 ms (AMD
    EPYC).
    """
    return outputs > x.shape[1] and x.device.type == "cpu"


def _uses_onednn_gradient(x: Tensor, outputs: int) -> bool:
    return _uses_onednn(x, outputs, _LEAST_GRADIENT_PRODUCTS) and onednn_gradients_are_faster()


def _uses_onednn(x: Tensor, outputs: int, least: int = _LEAST_PRODUCTS) -> bool:
    if not _is_large(x, outputs, least) or not _is_plain(x):
        return False
    return onednn_is_faster() or (
        _is_narrow(x.numel(), outputs) and mkl_has_slow_shapes() and _has_onednn()
    )


def _needs_padding(x: Tensor, outputs: int) -> bool:
    """Return whether MKL computes the product, and is faster if results have padding."""
    return (
        outputs % _ALIGNED != 0
        and _is_plain(x)
        and _is_large(x, outputs)
        and mkl_has_slow_shapes()
        and not _uses_onednn(x, outputs)
    )


def _is_amd(capability: str) -> bool:
    amd = cpu_facts().get("vendor_id") == "AuthenticAMD"
    return amd and torch.backends.cpu.get_cpu_capability() == capability


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@cache
def mkl_has_slow_shapes() -> bool:
    """Return whether, on this CPU, MKL is slow for large float32 products if x is large and results
    are narrow, or if the rows of a result are not aligned.
    """
    return torch.backends.mkl.is_available() and _is_amd("AVX2")


@cache
def onednn_is_faster() -> bool:
    """Return whether oneDNN computes all large float32 products faster than MKL on this CPU."""
    return _has_onednn() and _is_amd("AVX512")


@cache
def onednn_gradients_are_faster() -> bool:
    """Return whether oneDNN computes large gradients of weights faster than MKL, with its copies:
    on AMD server CPUs of family 26 (Zen 5) and later. Zen 4 splits 512-bit operations into halves.
    """
    return onednn_is_faster() and int(cpu_facts().get("cpu family", "0")) >= 26
