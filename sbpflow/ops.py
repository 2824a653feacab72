"""Operators on global tensors: each picks its cheapest legal signature, boxes, and runs locally.

The rules are the table a reader scans; the kernels are plain torch on local parts, so autograd
through them gives gradients in the dual layouts without further code.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sbpflow.errors import SbpError
from sbpflow.global_tensor import GlobalTensor
from sbpflow.layout import Layout
from sbpflow.op_apply import (
    Out,
    apply,
    cached_rule,
    check_floating,
    check_list,
    check_ndim,
    check_same_dtype,
    check_tensors,
    checked_dim,
    choose,
    letters_for,
)
from sbpflow.op_gather import gather as gather
from sbpflow.op_reduce import reduce_max as reduce_max
from sbpflow.op_reduce import reduce_mean as reduce_mean
from sbpflow.op_reduce import reduce_sum as reduce_sum
from sbpflow.op_reshape import flatten as flatten
from sbpflow.op_reshape import reshape as reshape
from sbpflow.sbp import NdSbp, parse_nd_sbp
from sbpflow.signature import Choice, Operand, Rule, deduce

Kernel = Callable[..., Tensor]


def matmul(
    a: GlobalTensor, b: GlobalTensor, *, out: Out = None, id: str | None = None
) -> GlobalTensor:
    """``a [.., k] @ b [k, n]``, of one dtype."""
    check_ndim("matmul", "the first operand", a, 1, at_least=True)
    check_ndim("matmul", "the second operand", b, 2)
    check_same_dtype("matmul", [a, b])
    lead = letters_for(a.ndim - 1, "kn")
    signatures = "".join(f"{x},B->{x};" for x in lead) + "B,n->n; k,k->P; P,B->P; B,P->P"
    op_rule = cached_rule("matmul", ((*lead, "k"), ("k", "n")), (*lead, "n"), signatures)
    shape = (*a.shape[:-1], b.shape[-1])
    return apply(op_rule, [a, b], shape, lambda _, p: p[0] @ p[1], out=out, id=id)


def linear(
    x: GlobalTensor,
    weight: GlobalTensor,
    bias: GlobalTensor | None = None,
    *,
    out: Out = None,
    id: str = "linear",
) -> GlobalTensor:
    """``x [.., k] @ weight [n, k].T + bias [n]``, of one dtype.

    Without the bias, P comes out of x S(k), weight S(1). A bias never meets P: the product is
    brought to S or B first, or computed there, whichever sends less.
    """
    check_ndim("linear", "x", x, 1, at_least=True)
    check_ndim("linear", "weight", weight, 2)
    check_same_dtype("linear", [x, weight] if bias is None else [x, weight, bias])
    lead = letters_for(x.ndim - 1, "kn")
    splits = "".join(f"{a},B->{a};" for a in lead)
    plain = cached_rule(
        "linear",
        ((*lead, "k"), ("n", "k")),
        (*lead, "n"),
        splits + "B,n->n; k,k->P; P,B->P; B,P->P",
    )
    shape = (*x.shape[:-1], weight.shape[0])
    wanted = parse_nd_sbp(out) if isinstance(out, str) else out
    if bias is None:
        return apply(plain, [x, weight], shape, lambda _, p: F.linear(*p), out=wanted, id=id)
    splits = "".join(f"{a},B,B->{a};" for a in lead)
    fused = cached_rule(
        "linear", ((*lead, "k"), ("n", "k"), ("n",)), (*lead, "n"), splits + "B,n,n->n"
    )
    operands = [x, weight, bias]
    together = choose(fused, operands, wanted).total_bytes
    if together and _apart(plain, operands, shape, wanted) < together:
        y = apply(plain, [x, weight], shape, lambda _, p: F.linear(*p), id=id)
        return bias_add(y, bias, out=wanted, id=f"{id}.bias")
    return apply(fused, operands, shape, lambda _, p: F.linear(*p), out=wanted, id=id)


def _apart(
    plain: Rule, operands: list[GlobalTensor], shape: tuple[int, ...], out: NdSbp | None
) -> int:
    """Bytes if the product comes first and the bias is added to it, boxed."""
    x, weight, bias = operands
    product = choose(plain, [x, weight])
    then = deduce(
        _bias_rule(len(shape)),
        (Operand(product.output, shape, x.dtype), Operand(bias.layout, bias.shape, bias.dtype)),
        x.boxing.world.backend_of(x.layout),
        out,
    )
    return product.total_bytes + then.total_bytes


def bias_add(
    x: GlobalTensor, bias: GlobalTensor, *, out: Out = None, id: str | None = None
) -> GlobalTensor:
    """``x [.., n] + bias [n]``; P is not taken: every term would add the bias once more."""
    check_ndim("bias_add", "x", x, 1, at_least=True)
    check_same_dtype("bias_add", [x, bias])
    return apply(_bias_rule(x.ndim), [x, bias], x.shape, lambda _, p: p[0] + p[1], out=out, id=id)


def _bias_rule(ndim: int) -> Rule:
    lead = letters_for(ndim - 1, "n")
    signatures = "".join(f"{a},B->{a};" for a in lead) + "n,n->n"
    return cached_rule("bias_add", ((*lead, "n"), ("n",)), (*lead, "n"), signatures)


def relu(x: GlobalTensor, *, out: Out = None, id: str | None = None) -> GlobalTensor:
    """Elementwise; not linear, so P is not taken."""
    return nonlinear("relu", torch.relu, x, out=out, id=id)


def nonlinear(
    op: str,
    kernel: Callable[[Tensor], Tensor],
    x: GlobalTensor,
    *,
    out: Out = None,
    id: str | None = None,
) -> GlobalTensor:
    """Any elementwise function of one tensor: S(i) -> S(i), B -> B."""
    check_tensors(op, x)
    return apply(_elementwise(op, x.ndim), [x], x.shape, lambda _, p: kernel(p[0]), out=out, id=id)


def _elementwise(op: str, ndim: int, more: str = "") -> Rule:
    """S(i) -> S(i), B -> B, and ``more``."""
    dims = letters_for(ndim)
    return cached_rule(op, (dims,), dims, "".join(f"{a}->{a};" for a in dims) + more)


def cast(
    x: GlobalTensor, dtype: torch.dtype, *, out: Out = None, id: str | None = None
) -> GlobalTensor:
    """``x`` as ``dtype``. P passes where no term can lose anything, as from float32 to float64."""
    check_tensors("cast", x)
    _check_dtype(dtype)
    widens = x.dtype.is_floating_point and torch.promote_types(x.dtype, dtype) == dtype
    op_rule = _elementwise("cast", x.ndim, "P->P" if widens else "")
    return apply(op_rule, [x], x.shape, lambda _, p: p[0].to(dtype), out=out, id=id, dtype=dtype)


def _check_dtype(given: object) -> None:
    if not isinstance(given, torch.dtype):
        raise SbpError(f"cast: dtype {given!r} is no torch.dtype; use for example torch.float64")


def dropout(
    x: GlobalTensor, p: float, seed: int, *, training: bool = True, id: str | None = None
) -> GlobalTensor:
    """Zero elements with probability ``p`` and scale the rest by 1 / (1 - p).

    The mask is drawn from ``seed`` and the position of the part, so ranks that hold the same data
    draw the same mask. Pass another seed at every call.
    """
    if not 0.0 <= p < 1.0:
        raise SbpError(f"dropout: p is {p}; it must be at least 0 and less than 1")
    check_floating("dropout", x)
    if not training or p == 0.0:
        return x

    def kernel(choice: Choice, parts: list[Tensor]) -> Tensor:
        if parts[0].is_meta:  # a dry run has no values to drop
            return parts[0] * 1.0
        start = _starts(choice.output, x.shape, x.boxing.world.rank)
        generator = torch.Generator(parts[0].device)
        generator.manual_seed(hash((seed, start)) & 0x7FFF_FFFF_FFFF_FFFF)
        keep = torch.empty_like(parts[0]).bernoulli_(1.0 - p, generator=generator)
        return parts[0] * keep.div_(1.0 - p)

    return apply(_elementwise("dropout", x.ndim), [x], x.shape, kernel, id=id)


def add(
    a: GlobalTensor, b: GlobalTensor, *, out: Out = None, id: str | None = None
) -> GlobalTensor:
    """``a + b``, of one dtype, dims of size 1 broadcast; linear in both, so P + P -> P."""
    return _binary("add", torch.add, a, b, "P,P->P", out, id)


def mul(
    a: GlobalTensor, b: GlobalTensor, *, out: Out = None, id: str | None = None
) -> GlobalTensor:
    """``a * b``, of one dtype, dims of size 1 broadcast; linear in each, so P x B -> P."""
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
    op_rule = cached_rule(op, tuple(dims), letters, splits + linear_part)
    return apply(op_rule, [a, b], shape, lambda _, p: kernel(*p), out=out, id=id)


def _broadcast(op: str, a: GlobalTensor, b: GlobalTensor) -> tuple[int, ...]:
    ndim = max(a.ndim, b.ndim)
    pairs = list(zip(*((1,) * (ndim - x.ndim) + x.shape for x in (a, b)), strict=True))
    for dim, (m, n) in enumerate(pairs):
        if m != n and 1 not in (m, n):
            raise SbpError(
                f"{op}: {list(a.shape)} and {list(b.shape)} do not broadcast: counted from the "
                f"back, dim {dim - ndim} is {m} and {n}; lengths must be equal, or one of them 1"
            )
    return tuple(n if m == 1 else m for m, n in pairs)


def scale(x: GlobalTensor, factor: float, *, id: str | None = None) -> GlobalTensor:
    """``x * factor``; linear, so every layout passes. A fraction needs a floating dtype."""
    check_tensors("scale", x)
    if isinstance(factor, GlobalTensor | Tensor):
        raise SbpError("scale: the factor is a tensor, not a number; ops.mul multiplies tensors")
    if isinstance(factor, float):
        check_floating("scale", x)
    return apply(
        _elementwise("scale", x.ndim, "P->P"), [x], x.shape, lambda _, p: p[0] * factor, id=id
    )


def concat(
    tensors: Sequence[GlobalTensor], dim: int, *, out: Out = None, id: str | None = None
) -> GlobalTensor:
    """Join along ``dim``, which no operand may be split along; P if all are P."""
    check_list("concat", tensors, "dim")
    first = tensors[0]
    dim = checked_dim(first, dim, "concat")
    check_same_dtype("concat", tensors)
    for n, x in enumerate(tensors):
        if x.ndim != first.ndim or _without(x.shape, dim) != _without(first.shape, dim):
            raise SbpError(
                f"concat: tensor {n} is {list(x.shape)}, tensor 0 {list(first.shape)}; they may "
                f"differ along dim {dim} only"
            )
    letters = letters_for(first.ndim)
    free = [letter for n, letter in enumerate(letters) if n != dim]
    signatures = "".join(",".join([a] * len(tensors)) + f"->{a};" for a in free)
    signatures += ",".join(["P"] * len(tensors)) + "->P"
    # Along ``dim`` the operands have lengths of their own: a letter each.
    others = letters_for(len(tensors), "".join(letters))
    dims = tuple((*letters[:dim], others[n], *letters[dim + 1 :]) for n in range(len(tensors)))
    op_rule = cached_rule("concat", dims, letters, signatures)
    shape = (*first.shape[:dim], sum(x.shape[dim] for x in tensors), *first.shape[dim + 1 :])
    return apply(op_rule, tensors, shape, lambda _, p: torch.cat(p, dim), out=out, id=id)


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def bce_with_logits(
    logits: GlobalTensor,
    labels: GlobalTensor,
    *,
    reduction: str = "mean",
    id: str = "bce",
) -> GlobalTensor:
    """Binary cross entropy; ``reduction`` "none", "sum" or "mean" over the full tensor.

    The mean divides by the global count, so uneven parts are weighted right; it comes out as P if
    the logits are split. Labels may be of another dtype; they are taken as that of the logits.
    """
    if reduction not in ("none", "sum", "mean"):
        raise SbpError(f"bce_with_logits: reduction {reduction!r}; use none, sum or mean")
    check_tensors("bce_with_logits", logits, labels)
    check_floating("bce_with_logits", logits)
    letters = letters_for(logits.ndim)
    op_rule = cached_rule(
        "bce_with_logits", (letters, letters), letters, "".join(f"{a},{a}->{a};" for a in letters)
    )

    def kernel(_: Choice, parts: list[Tensor]) -> Tensor:
        target = parts[1].to(parts[0].dtype)
        return F.binary_cross_entropy_with_logits(parts[0], target, reduction="none")

    loss = apply(op_rule, [logits, labels], logits.shape, kernel, id=id)
    if reduction == "none":
        return loss
    reduce = reduce_sum if reduction == "sum" else reduce_mean
    return reduce(loss, id=f"{id}.{reduction}")


def _starts(layout: Layout, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return tuple(extent.start for extent in layout.part_slices(shape, rank) or ())
