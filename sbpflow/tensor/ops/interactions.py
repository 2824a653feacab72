"""Computes the dot products of all pairs of vectors in a row, or the sum of these products."""
# pyright: reportIncompatibleMethodOverride=false
# (torch declares forward and backward with arbitrary arguments; here, the arguments have names)

from functools import lru_cache

import torch
from torch import Tensor

from sbpflow.tensor.autograd import Context
from sbpflow.tensor.dispatch import Out, apply, check_floating, check_ndim
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.tensor.signature import make_rule


def dot_interaction(x: GlobalTensor, *, out: Out = None, id: str | None = None) -> GlobalTensor:
    """Compute dot products of all pairs of different vectors: [b, f, d] -> [b, f (f - 1) / 2].

    ``S(0) -> S(0), S(2) -> P, B -> B``

    Pairs are in the row order of the lower triangle: (1, 0), (2, 0), (2, 1), (3, 0) and so on, as
    in DLRM (facebookresearch/dlrm, dlrm_s_pytorch.py at 090956e).
    """
    _check("dot_interaction", x)
    rule = make_rule("dot_interaction", (("b", "f", "d"),), ("b", "p"), "b->b; d->P")
    fields = x.shape[1]
    shape = (x.shape[0], fields * (fields - 1) // 2)
    return apply(rule, [x], shape, lambda _, p: pair_products(p[0]), out=out, id=id)


def fm_interaction(x: GlobalTensor, *, out: Out = None, id: str | None = None) -> GlobalTensor:
    """Sum the dot products of all pairs of different vectors: x [b, f, d] -> [b, 1].

    ``S(0) -> S(0), S(2) -> P, B -> B``

    The result is half of (the square of the sum - the sum of the squares), summed over d (Rendle,
    Factorization Machines, ICDM 2010, lemma 3.1). Half-precision inputs are widened to float32,
    because the subtraction cancels digits; the result is then float32.
    """
    _check("fm_interaction", x)
    rule = make_rule("fm_interaction", (("b", "f", "d"),), ("b", "o"), "b->b; d->P")
    dtype = torch.float32 if x.dtype.itemsize < 4 else x.dtype
    shape = (x.shape[0], 1)
    return apply(
        rule, [x], shape, lambda _, p: pair_sum(p[0].to(dtype)), out=out, id=id, dtype=dtype
    )


def _check(op: str, x: GlobalTensor) -> None:
    check_ndim(op, "x [batch, vectors, width]", x, 3)
    check_floating(op, x)


def pair_sum(x: Tensor) -> Tensor:
    """Compute ``fm_interaction`` of a plain tensor, [b, f, d] -> [b, 1], in the dtype of ``x``."""
    return 0.5 * (x.sum(1).square() - x.square().sum(1)).sum(1, keepdim=True)


def pair_products(x: Tensor) -> Tensor:
    """Compute ``dot_interaction`` of a plain tensor: [b, f, d] -> [b, f (f - 1) / 2]."""
    return _PairProducts.apply(x)  # pyright: ignore[reportReturnType]


class _PairProducts(torch.autograd.Function):
    """Computes the products of all pairs. The backward pass is a single matrix product, where
    autograd would compute two products and a scatter.
    """

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        below, _ = _triangle(x.shape[1], x.device)
        return torch.bmm(x, x.transpose(1, 2)).flatten(1).index_select(1, below)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        rows, fields = x.shape[0], x.shape[1]
        _, places = _triangle(fields, x.device)
        padded = torch.cat([gradient, gradient.new_zeros(rows, 1)], 1)
        return torch.bmm(padded.index_select(1, places).view(rows, fields, fields), x)


@lru_cache(maxsize=64)
def _triangle(fields: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the position of each pair in a flat [f, f] matrix, and the index of the pair at each
    position.

    Positions on the diagonal have the index one past the last pair.
    """
    row, column = torch.tril_indices(fields, fields, -1, device=device)
    below = row * fields + column
    pairs = torch.arange(fields * (fields - 1) // 2, device=device)
    places = torch.full((fields, fields), len(pairs), device=device)
    places[row, column] = places[column, row] = pairs
    return below, places.flatten()
