"""Defines elementwise operators on global tensors: activations, casts, sums and products."""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from sbpflow.errors import SbpError
from sbpflow.tensor.dispatch import (
    Out,
    apply,
    check_floating,
    check_same_dtype,
    check_tensors,
    letters_for,
)
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.tensor.signature import Rule, make_rule

Kernel = Callable[..., Tensor]


def relu(x: GlobalTensor, *, out: Out = None, id: str | None = None) -> GlobalTensor:
    """Apply ReLU elementwise. P is not legal, because ReLU is not linear.

    ``S(i) -> S(i), B -> B``
    """
    check_tensors("relu", x)
    if x.dtype == torch.bool or x.dtype.is_complex:
        raise SbpError(
            f"relu: {x!r} does not have a real dtype; use a dtype such as torch.float32 "
            "(ops.cast(x, torch.float32) for bool)"
        )
    return nonlinear("relu", torch.relu, x, out=out, id=id)


def nonlinear(
    op: str,
    kernel: Callable[[Tensor], Tensor],
    x: GlobalTensor,
    *,
    out: Out = None,
    id: str | None = None,
) -> GlobalTensor:
    """Apply any elementwise function to one tensor.

    ``S(i) -> S(i), B -> B``
    """
    check_tensors(op, x)
    return apply(
        elementwise_rule(op, x.ndim), [x], x.shape, lambda _, p: kernel(p[0]), out=out, id=id
    )


@lru_cache(maxsize=1024)
def elementwise_rule(op: str, ndim: int, more: str = "") -> Rule:
    """Return the rule with the signatures S(i) -> S(i), B -> B, and those in ``more``."""
    dims = letters_for(ndim)
    return make_rule(op, (dims,), dims, "".join(f"{a}->{a};" for a in dims) + more)


@lru_cache(maxsize=1024)
def elementwise_rule_of_two(op: str, ndim: int) -> Rule:
    """Return the rule S(i) x S(i) -> S(i), B x B -> B for operands of equal shapes."""
    dims = letters_for(ndim)
    return make_rule(op, (dims, dims), dims, "".join(f"{a},{a}->{a};" for a in dims))


def cast(
    x: GlobalTensor, dtype: torch.dtype, *, out: Out = None, id: str | None = None
) -> GlobalTensor:
    """Convert ``x`` to ``dtype``. P is legal if the conversion is exact, such as float32 to
    float64.

    ``S(i) -> S(i), B -> B; widening also P -> P``
    """
    check_tensors("cast", x)
    if not isinstance(dtype, torch.dtype):  # pyright: ignore[reportUnnecessaryIsInstance] -- users
        raise SbpError(f"cast: dtype must be a torch.dtype, such as torch.float64, got {dtype!r}")
    widens = x.dtype.is_floating_point and torch.promote_types(x.dtype, dtype) == dtype
    op_rule = elementwise_rule("cast", x.ndim, "P->P" if widens else "")
    return apply(op_rule, [x], x.shape, lambda _, p: p[0].to(dtype), out=out, id=id, dtype=dtype)


def add(
    a: GlobalTensor, b: GlobalTensor, *, out: Out = None, id: str | None = None
) -> GlobalTensor:
    """Compute ``a + b`` for operands of the same dtype; dims of size 1 broadcast.

    ``S(i) x S(i) -> S(i), B x B -> B, P x P -> P; with a dim of size 1 also S(i) x B -> S(i)``
    """
    return _binary("add", torch.add, a, b, "P,P->P", out, id)


def mul(
    a: GlobalTensor, b: GlobalTensor, *, out: Out = None, id: str | None = None
) -> GlobalTensor:
    """Compute ``a * b`` for operands of the same dtype; dims of size 1 broadcast.

    ``S(i) x S(i) -> S(i), B x B -> B, P x B -> P, B x P -> P; with a dim of size 1 also S(i) x B ->
    S(i)``
    """
    return _binary("mul", torch.mul, a, b, "P,B->P; B,P->P", out, id)


def _binary(
    op: str,
    kernel: Kernel,
    a: GlobalTensor,
    b: GlobalTensor,
    linear_part: str,
    out: Out,
    id: str | None,
) -> GlobalTensor:
    check_same_dtype(op, [a, b])
    shape = _broadcast(op, a, b)
    letters = letters_for(len(shape))
    dims = [
        tuple(
            letter if size == full else ""
            for letter, size, full in zip(
                letters[len(shape) - x.ndim :], x.shape, shape[len(shape) - x.ndim :], strict=True
            )
        )
        for x in (a, b)
    ]
    splits = "".join(
        ",".join(letter if letter in own else "B" for own in dims) + f"->{letter};"
        for letter in letters
    )
    op_rule = make_rule(op, tuple(dims), letters, splits + linear_part)
    return apply(op_rule, [a, b], shape, lambda _, p: kernel(*p), out=out, id=id)


def _broadcast(op: str, a: GlobalTensor, b: GlobalTensor) -> tuple[int, ...]:
    ndim = max(a.ndim, b.ndim)
    pairs = list(zip(*((1,) * (ndim - x.ndim) + x.shape for x in (a, b)), strict=True))
    for dim, (m, n) in enumerate(pairs):
        if m != n and 1 not in (m, n):
            raise SbpError(
                f"{op}: {list(a.shape)} and {list(b.shape)} do not broadcast: dim {dim - ndim} has "
                f"lengths {m} and {n}; the lengths must be equal, or one length must be 1"
            )
    return tuple(n if m == 1 else m for m, n in pairs)


def scale(x: GlobalTensor, factor: float, *, id: str | None = None) -> GlobalTensor:
    """Return ``x * factor`` in the layout of ``x``; a float factor needs a floating dtype.

    ``S(i) -> S(i), B -> B, P -> P``
    """
    check_tensors("scale", x)
    if isinstance(factor, GlobalTensor | Tensor):
        raise SbpError("scale: the factor must be a number, not a tensor; use ops.mul for tensors")
    if isinstance(factor, float):
        check_floating("scale", x)
    return apply(
        elementwise_rule("scale", x.ndim, "P->P"), [x], x.shape, lambda _, p: p[0] * factor, id=id
    )
