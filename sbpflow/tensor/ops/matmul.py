"""Computes matrix products, adds biases, and applies linear layers to one or more inputs."""

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from sbpflow.errors import SbpError
from sbpflow.sbp.sbp import NdSbp, Split, parse_nd_sbp
from sbpflow.tensor.dispatch import (
    Out,
    apply,
    check_list,
    check_ndim,
    check_numbers,
    check_same_dtype,
    choose,
    letters_for,
)
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.tensor.ops import products
from sbpflow.tensor.ops.shapes import concat
from sbpflow.tensor.signature import Choice, Operand, Rule, deduce, make_rule

ALIGNED_COLUMNS = 8  # cuBLAS uses tensor cores efficiently only if rows are multiples of 16 bytes


def linear_of_parts(
    xs: Sequence[GlobalTensor],
    weight: GlobalTensor,
    bias: GlobalTensor | None = None,
    *,
    id: str = "linear",
) -> GlobalTensor:
    """Compute ``concat(xs, 1) @ weight.T + bias`` for x_i [b, k_i], weight [n, sum k_i], bias [n].

    ``xs x weight x bias: S(0) x B x B -> S(0), B x S(0) x S(0) -> S(1)``

    On CPU, the inputs are not concatenated: that would cost a copy in each direction, and the
    product that computes the gradient takes twice as long for an odd width such as 429 as for 416.
    On CUDA, the inputs are concatenated and padded to a multiple of 8 columns, because narrow
    products and unaligned rows do not use the tensor cores in half precision. If the weight is
    split along its columns, or if ``bias`` is None (so that the result may be P), the op is
    ``concat`` followed by ``linear``.
    """
    check_list("linear_of_parts", xs, "weight, bias")
    for n, x in enumerate(xs):
        check_ndim("linear_of_parts", f"input {n}", x, 2)
    check_ndim("linear_of_parts", "weight", weight, 2)
    check_same_dtype("linear_of_parts", [*xs, weight, *(() if bias is None else (bias,))])
    check_numbers("linear_of_parts", weight)
    widths = [x.shape[1] for x in xs]
    if sum(widths) != weight.shape[1]:
        raise SbpError(
            f"linear_of_parts: inputs of widths {widths} need a weight with {sum(widths)} "
            f"columns, got {weight!r}"
        )
    split = any(isinstance(sbp, Split) and sbp.dim == 1 for sbp in weight.layout.nd_sbp)
    if len(xs) == 1 or split or bias is None:
        joined = xs[0] if len(xs) == 1 else concat(xs, 1, id=f"{id}.concat")
        return linear(joined, weight, bias, id=id)

    def kernel(_: Choice, parts: list[Tensor]) -> Tensor:
        *inputs, rows, offset = parts
        if rows.is_cuda:
            return _aligned_linear(inputs, rows, offset)
        return products.linear_of_tensors(inputs, rows, offset)

    shape = (xs[0].shape[0], weight.shape[0])
    return apply(_rule_of_parts(len(xs)), [*xs, weight, bias], shape, kernel, id=id)


@lru_cache(maxsize=64)
def _rule_of_parts(count: int) -> Rule:
    """Return the rule of ``linear_of_parts`` for ``count`` inputs."""
    inner = letters_for(count + 1, "bn")
    dims = (*(("b", k) for k in inner[:count]), ("n", inner[count]), ("n",))
    signatures = ",".join(["b"] * count) + ",B,B->b;" + ",".join(["B"] * count) + ",n,n->n"
    return make_rule("linear_of_parts", dims, ("b", "n"), signatures)


def _aligned_linear(inputs: list[Tensor], rows: Tensor, offset: Tensor) -> Tensor:
    """Concatenate the inputs, pad their rows to a multiple of ``ALIGNED_COLUMNS`` (16 bytes in half
    precision), and compute one product.
    """
    missing = -rows.shape[1] % ALIGNED_COLUMNS
    if missing:
        inputs = [*inputs, inputs[0].new_zeros(inputs[0].shape[0], missing)]
        rows = F.pad(rows, (0, missing))
    return F.linear(torch.cat(inputs, 1), rows, offset)


def matmul(
    a: GlobalTensor, b: GlobalTensor, *, out: Out = None, id: str | None = None
) -> GlobalTensor:
    """Compute ``a [.., k] @ b [k, n]`` for operands of the same dtype.

    ``S(i) x B -> S(i), B x S(1) -> S(last), S(last) x S(0) -> P, P x B -> P, B x P -> P``
    """
    check_ndim("matmul", "the first operand", a, 1, at_least=True)
    check_ndim("matmul", "the second operand", b, 2)
    check_same_dtype("matmul", [a, b])
    check_numbers("matmul", a)
    lead = letters_for(a.ndim - 1, "kn")
    signatures = "".join(f"{x},B->{x};" for x in lead) + "B,n->n; k,k->P; P,B->P; B,P->P"
    op_rule = make_rule("matmul", ((*lead, "k"), ("k", "n")), (*lead, "n"), signatures)
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
    """Compute ``x [.., k] @ weight [n, k].T + bias [n]`` for operands of the same dtype.

    ``S(i) x B -> S(i), B x S(0) -> S(last), S(last) x S(1) -> P, P x B -> P, B x P -> P``

    The result can be P only without a bias. With a bias, either the product is converted to S or B
    before the bias is added, or the operands are converted before the product, whichever sends
    less.
    """
    check_ndim("linear", "x", x, 1, at_least=True)
    check_ndim("linear", "weight", weight, 2)
    check_same_dtype("linear", [x, weight] if bias is None else [x, weight, bias])
    check_numbers("linear", x)
    plain, fused = _linear_rules(x.ndim)
    shape = (*x.shape[:-1], weight.shape[0])
    requested = parse_nd_sbp(out) if isinstance(out, str) else out
    if bias is None:
        return apply(plain, [x, weight], shape, _linear_kernel, out=requested, id=id)
    operands = [x, weight, bias]
    fused_bytes = choose(fused, operands, requested).total_bytes
    if fused_bytes and _separate_bytes(plain, operands, shape, requested) < fused_bytes:
        y = apply(plain, [x, weight], shape, _linear_kernel, id=id)
        return bias_add(y, bias, out=requested, id=f"{id}.bias")
    return apply(fused, operands, shape, _linear_kernel, out=requested, id=id)


@lru_cache(maxsize=64)
def _linear_rules(ndim: int) -> tuple[Rule, Rule]:
    """Return the rules of ``linear`` without and with a bias, for an input with ``ndim`` dims."""
    lead = letters_for(ndim - 1, "kn")
    dims, output = ((*lead, "k"), ("n", "k")), (*lead, "n")
    plain = "".join(f"{a},B->{a};" for a in lead) + "B,n->n; k,k->P; P,B->P; B,P->P"
    fused = "".join(f"{a},B,B->{a};" for a in lead) + "B,n,n->n"
    return (
        make_rule("linear", dims, output, plain),
        make_rule("linear", (*dims, ("n",)), output, fused),
    )


def _linear_kernel(_: Choice, parts: list[Tensor]) -> Tensor:
    x, weight, bias = parts if len(parts) == 3 else (*parts, None)
    return products.linear(x, weight, bias)


def _separate_bytes(
    plain: Rule, operands: list[GlobalTensor], shape: tuple[int, ...], out: NdSbp | None
) -> int:
    """Return the bytes that conversions send if the bias is added in a separate op after the
    product.
    """
    x, weight, bias = operands
    product = choose(plain, [x, weight])
    addition = deduce(
        _bias_rule(len(shape)),
        (Operand(product.output, shape, x.dtype), Operand(bias.layout, bias.shape, bias.dtype)),
        out,
    )
    return product.total_bytes + addition.total_bytes


def bias_add(
    x: GlobalTensor, bias: GlobalTensor, *, out: Out = None, id: str | None = None
) -> GlobalTensor:
    """Compute ``x [.., n] + bias [n]``. P is not legal for ``x``, because every term would add the
    bias.

    ``S(i) x B -> S(i), S(last) x S(0) -> S(last), B x B -> B``
    """
    check_ndim("bias_add", "x", x, 1, at_least=True)
    check_same_dtype("bias_add", [x, bias])
    return apply(_bias_rule(x.ndim), [x, bias], x.shape, lambda _, p: p[0] + p[1], out=out, id=id)


def _bias_rule(ndim: int) -> Rule:
    lead = letters_for(ndim - 1, "n")
    signatures = "".join(f"{a},B->{a};" for a in lead) + "n,n->n"
    return make_rule("bias_add", ((*lead, "n"), ("n",)), (*lead, "n"), signatures)
