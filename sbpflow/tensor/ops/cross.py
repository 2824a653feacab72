"""Computes the cross network of DCN-V2, whose layers are ``start * (W x + b) + x``."""

# pyright: reportIncompatibleMethodOverride=false
# (torch declares forward and backward with arbitrary arguments; here, the arguments have names)

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sbpflow.errors import SbpError
from sbpflow.sbp.sbp import Broadcast
from sbpflow.tensor.autograd import Context
from sbpflow.tensor.dispatch import apply, cached_rule, check_ndim, check_same_dtype, letters_for
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.tensor.ops.elementwise import add, cast, mul
from sbpflow.tensor.ops.matmul import linear
from sbpflow.tensor.signature import Choice

# Rows are processed in blocks whose tensors fit into a core's 2 MB cache. Blocks have at least
# ``_MIN_ROWS`` rows, because smaller blocks would read the weights too often.
_BLOCK_BYTES, _MIN_ROWS = 1 << 19, 256


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
    rule = cached_rule("cross_network", tuple(operands), ("b", "k"), signature)
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
        product = narrow(x, f"{name}.input")
        for weight in first:
            product = linear(product, weight, id=f"{name}.v")
        product = linear(product, last, bias, id=f"{name}.w")
        if half is not None:
            product = cast(product, x.dtype, id=f"{name}.widen")
        x = add(mul(start, product, id=f"{name}.mul"), x, id=f"{name}.add")
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
        xs = [torch.empty_like(start) for _ in counts]
        products = [torch.empty_like(start, dtype=dtype) for _ in counts]
        inner = [start.new_empty(len(start), layer[0].shape[0], dtype=dtype) for layer in layers]
        for rows in _blocks(start):
            x = first = start[rows]
            for n, (*lower, upper, bias) in enumerate(layers):
                entering = x.to(dtype)
                if lower:
                    entering = torch.mm(entering, lower[0].t(), out=inner[n][rows])
                product = torch.addmm(bias, entering, upper.t(), out=products[n][rows])
                x = torch.addcmul(x, first, product.to(x.dtype), out=xs[n][rows])
        ctx.save_for_backward(start, *weights, *xs[:-1], *products, *inner)
        ctx.counts, ctx.dtype = counts, dtype
        return xs[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        depth, saved = len(ctx.counts), list(ctx.saved_tensors)
        start, weights = saved[0], saved[1 : 1 + sum(ctx.counts)]
        xs = [start, *saved[-3 * depth + 1 : -2 * depth]]
        products, inner = saved[-2 * depth : -depth], saved[-depth:]
        layers = _by_layer(ctx.counts, [weight.to(ctx.dtype) for weight in weights])
        weight_grads = [torch.zeros_like(weight) for weight in weights]
        layer_grads = _by_layer(ctx.counts, weight_grads)
        start_grad = torch.zeros_like(start)
        for rows in _blocks(start):
            first, g, total = start[rows], gradient[rows].clone(), start_grad[rows]
            for n in reversed(range(depth)):
                total.addcmul_(g, products[n][rows].to(g.dtype))
                product_grad = (g * first).to(ctx.dtype)
                (*lower, upper, _), (*lower_grad, upper_grad, bias_grad) = layers[n], layer_grads[n]
                bias_grad += product_grad.sum(0)
                entering = xs[n][rows].to(ctx.dtype)
                if lower:
                    _add_product(upper_grad, product_grad.t(), inner[n][rows])
                    product_grad = product_grad @ upper
                    upper, upper_grad = lower[0], lower_grad[0]
                _add_product(upper_grad, product_grad.t(), entering)
                _add_product(g, product_grad, upper)
            total += g
        return (None, None, start_grad, *weight_grads)


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


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute ``total += a @ b``, adding in the dtype of ``total`` even if ``a`` and ``b`` have a
    narrower dtype.
    """
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
