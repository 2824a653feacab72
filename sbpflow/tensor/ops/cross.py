"""Computes the cross network of DCN-V2, whose layers are ``start * (W x + b) + x``."""

# pyright: reportIncompatibleMethodOverride=false
# (torch declares forward and backward with arbitrary arguments; here, the arguments have names)

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sbpflow.errors import SbpError
from sbpflow.sbp.sbp import Broadcast
from sbpflow.tensor.autograd import Context
from sbpflow.tensor.dispatch import apply, check_ndim, check_numbers, check_same_dtype, letters_for
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.tensor.ops.elementwise import add, cast, mul
from sbpflow.tensor.ops.matmul import linear
from sbpflow.tensor.ops.products import add_product, add_weight_gradient, padded, product
from sbpflow.tensor.signature import Choice, make_rule

# Rows are processed in blocks, of which a tensor takes up to ``_BLOCK_BYTES`` (measured on an AMD
# EPYC: 512 KiB is slower with oneDNN and as fast with MKL). Blocks have at least ``_MIN_ROWS``
# rows, because smaller blocks would read the weights too often.
_BLOCK_BYTES, _MIN_ROWS = 1 << 21, 512


def cross_network(
    x: GlobalTensor,
    layers: Sequence[Sequence[GlobalTensor]],
    *,
    half: torch.dtype | None = None,
    id: str = "cross",
) -> GlobalTensor:
    """Apply layers ``x -> start * (W x + b) + x`` to x [b, n], where ``start`` is the input of the
    first layer.

    ``x x weights: S(0) x B -> S(0), B x B -> B``

    A layer has W [n, n] and b [n], or V [r, n], W [n, r] and b [n] for a product W V of rank r
    (Wang et al., DCN V2, WWW 2021). ``half`` is the dtype of the products if it differs from the
    dtype of ``x``. On CPU, each block of rows goes through all layers before the next block starts,
    in the forward and backward passes: otherwise, reading and writing [b, n] for every layer would
    take half of the time. If a weight is not B, each layer is computed as separate ops with their
    own conversions.
    """
    check_ndim("cross_network", "x", x, 2)
    weights = [weight for layer in layers for weight in layer]
    check_same_dtype("cross_network", [x, *weights])
    check_numbers("cross_network", x)
    _check_layers(x, layers)
    if not layers:
        return x
    if any(not isinstance(sbp, Broadcast) for w in weights for sbp in w.layout.nd_sbp):
        return _layer_by_layer(x, layers, half, id)
    operands = [("b", "k")]
    for layer, rank in zip(layers, letters_for(len(layers), "bk"), strict=True):
        low = [(rank, "k"), ("k", rank), ("k",)]
        operands += low if len(layer) == len(low) else [("k", rank), ("k",)]
    signature = ",".join(["b"] + ["B"] * len(weights)) + "->b"
    rule = make_rule("cross_network", tuple(operands), ("b", "k"), signature)
    counts = tuple(len(layer) for layer in layers)

    def kernel(_: Choice, parts: list[Tensor]) -> Tensor:
        return _Cross.apply(counts, half, *parts)  # pyright: ignore[reportReturnType]

    return apply(rule, [x, *weights], x.shape, kernel, id=id)


def _check_layers(x: GlobalTensor, layers: Sequence[Sequence[GlobalTensor]]) -> None:
    width = x.shape[1]
    for number, layer in enumerate(layers):
        shapes = [list(weight.shape) for weight in layer]
        rank = layer[0].shape[0] if layer else 0
        full, low = [[width, width], [width]], [[rank, width], [width, rank], [width]]
        if shapes not in (full, low):
            raise SbpError(
                f"cross_network: the weights of layer {number} have shapes {shapes}, but x has "
                f"{width} columns; use shapes {full}, or {low} with any rank in place of {rank}"
            )


def _layer_by_layer(
    x: GlobalTensor, layers: Sequence[Sequence[GlobalTensor]], half: torch.dtype | None, id: str
) -> GlobalTensor:
    def narrow(tensor: GlobalTensor, name: str) -> GlobalTensor:
        return tensor if half is None else cast(tensor, half, id=f"{name}.cast")

    start = x
    for number, layer in enumerate(layers):
        name = f"{id}.{number}"
        *first, last, bias = (narrow(weight, f"{name}.{n}") for n, weight in enumerate(layer))
        moved = narrow(x, f"{name}.input")
        for weight in first:
            moved = linear(moved, weight, id=f"{name}.v")
        moved = linear(moved, last, bias, id=f"{name}.w")
        if half is not None:
            moved = cast(moved, x.dtype, id=f"{name}.widen")
        x = add(mul(start, moved, id=f"{name}.mul"), x, id=f"{name}.add")
    return x


class _Cross(torch.autograd.Function):
    """Applies all layers to a local x [b, n], block by block. ``counts`` contains the number of
    weights of each layer.
    """

    @staticmethod
    def forward(
        ctx: Context,
        counts: tuple[int, ...],
        half: torch.dtype | None,
        start: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        dtype = half or start.dtype
        layers = _by_layer(counts, [weight.to(dtype) for weight in weights])
        out, kept = torch.empty_like(start), list[Tensor]()
        with _no_autocast(start.device.type):
            for rows in _blocks(start):
                x = first = start[rows]
                for *lower, upper, bias in layers:
                    entering = x.to(dtype)
                    inner = product(entering, lower[0]) if lower else entering
                    moved = product(inner, upper, bias)
                    x = torch.addcmul(x, first, moved.to(x.dtype))
                    kept += [entering, inner, moved]
                out[rows] = x
        ctx.save_for_backward(start, *weights, *kept)
        ctx.counts, ctx.dtype = counts, dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        start, *saved = ctx.saved_tensors
        count = sum(ctx.counts)
        weights, kept = saved[:count], saved[count:]
        # Transpose the weights once instead of in every block.
        turned = [weight.to(ctx.dtype).t().contiguous() for weight in weights]
        layers = _by_layer(ctx.counts, turned)
        weight_grads = [torch.zeros_like(weight) for weight in weights]
        layer_grads = _by_layer(ctx.counts, weight_grads)
        start_grad = torch.zeros_like(start)
        for rows in reversed(_blocks(start)):
            first, total = start[rows], start_grad[rows]
            g = padded(first, first.shape[1]).copy_(gradient[rows])
            for layer, layer_grad in zip(reversed(layers), reversed(layer_grads), strict=True):
                (*lower, upper, _), (*lower_grad, upper_grad, bias_grad) = layer, layer_grad
                moved, inner, entering = kept.pop(), kept.pop(), kept.pop()
                total.addcmul_(g, moved.to(g.dtype))
                moved_grad = (g * first).to(ctx.dtype)
                bias_grad += moved_grad.sum(0)
                if lower:
                    add_weight_gradient(upper_grad, moved_grad, inner)
                    moved_grad = product(moved_grad, upper)
                    upper, upper_grad = lower[0], lower_grad[0]
                add_weight_gradient(upper_grad, moved_grad, entering)
                add_product(g, moved_grad, upper)
            total += g
        return (None, None, start_grad, *weight_grads)


def _no_autocast(device_type: str) -> AbstractContextManager[object]:
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()  # the meta device of a dry run


def _by_layer(counts: Sequence[int], weights: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    ends = [sum(counts[: n + 1]) for n in range(len(counts))]
    return [weights[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _blocks(x: Tensor) -> list[slice]:
    """Return the blocks of rows. On CUDA, there is a single block, because a kernel uses the whole
    device.
    """
    size = max(_MIN_ROWS, _BLOCK_BYTES // (x.shape[1] * x.itemsize))
    size = size if x.device.type == "cpu" else len(x)
    return [slice(first, first + size) for first in range(0, len(x), max(size, 1))]
