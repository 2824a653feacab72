"""Computes sums, maxima, and means over dims of a global tensor. Reducing a split dim gives P."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sbpflow.boxing.copies import neutral
from sbpflow.errors import SbpError
from sbpflow.tensor.dispatch import (
    Out,
    apply,
    check_floating,
    checked_dims,
    letters_for,
)
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.tensor.signature import make_rule


def reduce_sum(
    x: GlobalTensor,
    dims: int | Sequence[int] | None = None,
    *,
    keepdim: bool = False,
    out: Out = None,
    id: str | None = None,
) -> GlobalTensor:
    """Sum over ``dims`` (default: all). Along a split dim, each rank sums its piece, so the result
    is P.

    ``S(kept) -> S(kept), S(summed) -> P, B -> B, P -> P``

    Integers are summed in int64, as in torch.
    """
    chosen = checked_dims(x, dims, "reduce_sum")
    dtype = x.dtype if x.dtype.is_floating_point or x.dtype.is_complex else torch.int64

    def kernel(part: Tensor) -> Tensor:
        return part.sum(chosen, keepdim=keepdim, dtype=dtype) if chosen else part.to(dtype)

    return _reduce("reduce_sum", "P", "P->P", kernel, x, chosen, keepdim, out, id, dtype)


def reduce_max(
    x: GlobalTensor,
    dims: int | Sequence[int] | None = None,
    *,
    keepdim: bool = False,
    out: Out = None,
    id: str | None = None,
) -> GlobalTensor:
    """Compute the maximum over ``dims`` (default: all). Reducing a split dim gives P(max).

    ``S(kept) -> S(kept), S(reduced) -> P(max), B -> B``

    If P does not support the dtype (for example, bool), the tensor is first converted to B, or to a
    split of a kept dim.

    Equal maxima within a part share the gradient evenly, as in torch's ``amax``. If several parts
    have the same maximum, the first of these parts gets the gradient.
    """
    chosen = checked_dims(x, dims, "reduce_max")
    if x.dtype.is_complex:
        raise SbpError(
            f"reduce_max: {x!r} is complex, and complex numbers have no order; use a "
            "real dtype such as torch.float32"
        )
    if empty := [n for n in chosen if x.shape[n] == 0]:
        raise SbpError(f"reduce_max: {x!r} has no elements along {empty}, so it has no maximum")

    def kernel(part: Tensor) -> Tensor:
        if not chosen:
            return part
        if part.numel() or all(part.shape[n] for n in chosen):
            return part.amax(chosen, keepdim=keepdim)
        # The maximum of an empty piece is the lowest value of the dtype. Adding the sum of the
        # empty part keeps the part in the autograd graph.
        return part.sum(chosen, keepdim=keepdim).to(part.dtype) + neutral("max", part.dtype)

    return _reduce("reduce_max", "P(max)", "", kernel, x, chosen, keepdim, out, id)


def reduce_mean(
    x: GlobalTensor,
    dims: int | Sequence[int] | None = None,
    *,
    keepdim: bool = False,
    out: Out = None,
    id: str | None = None,
) -> GlobalTensor:
    """Compute the mean over ``dims`` (default: all): the sum divided by the global count.

    ``S(kept) -> S(kept), S(averaged) -> P, B -> B, P -> P``

    Uneven parts are weighted correctly. Half-precision inputs are summed and divided in float32 to
    avoid overflow, and then rounded to the dtype of ``x``.
    """
    check_floating("reduce_mean", x)
    chosen = checked_dims(x, dims, "reduce_mean")
    count = math.prod(x.shape[dim] for dim in chosen)
    share = 1.0 / count if count else math.nan
    dtype = torch.float32 if x.dtype.itemsize < 4 else x.dtype

    def kernel(part: Tensor) -> Tensor:
        total = part.sum(chosen, keepdim=keepdim, dtype=dtype) if chosen else part.to(dtype)
        return (total * share).to(part.dtype)

    return _reduce("reduce_mean", "P", "P->P", kernel, x, chosen, keepdim, out, id)


def _reduce(
    op: str,
    reduced: str,
    more: str,
    kernel: Callable[[Tensor], Tensor],
    x: GlobalTensor,
    chosen: Sequence[int],
    keepdim: bool,
    out: Out,
    id: str | None,
    dtype: torch.dtype | None = None,
) -> GlobalTensor:
    """Apply ``kernel`` with S(i) -> S(i) for kept dims and S(i) -> ``reduced`` for the ``chosen``
    dims.
    """
    letters = letters_for(x.ndim)
    signatures = "".join(f"{a}->{reduced if n in chosen else a};" for n, a in enumerate(letters))
    remaining = [n for n in range(x.ndim) if keepdim or n not in chosen]
    output = tuple("" if n in chosen else letters[n] for n in remaining)
    shape = tuple(1 if n in chosen else x.shape[n] for n in remaining)
    op_rule = make_rule(op, (letters,), output, signatures + more)
    return apply(op_rule, [x], shape, lambda _, p: kernel(p[0]), out=out, id=id, dtype=dtype)
