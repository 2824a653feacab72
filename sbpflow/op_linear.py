"""A linear layer of several inputs side by side, without putting them side by side first."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sbpflow import ops
from sbpflow.errors import SbpError
from sbpflow.global_tensor import GlobalTensor
from sbpflow.op_apply import (
    apply,
    cached_rule,
    check_list,
    check_ndim,
    check_same_dtype,
    letters_for,
)
from sbpflow.sbp import Split
from sbpflow.signature import Choice


def linear_of_parts(
    xs: Sequence[GlobalTensor],
    weight: GlobalTensor,
    bias: GlobalTensor | None = None,
    *,
    id: str = "linear",
) -> GlobalTensor:
    """``concat(xs, 1) @ weight.T + bias``: each ``xs`` [b, k_i], weight [n, sum of k_i], bias [n].

    The concatenation is not made: on CPU it costs a copy each way, and a width such as 429 makes
    the product of its gradient twice as slow as one of 416 does. Where the weight is split along
    its inputs the concatenation is made, for the parts then do not meet their inputs; so it is
    without a bias, for P may then come out.
    """
    check_list("linear_of_parts", xs, "weight, bias")
    for n, x in enumerate(xs):
        check_ndim("linear_of_parts", f"input {n}", x, 2)
    check_ndim("linear_of_parts", "weight", weight, 2)
    check_same_dtype("linear_of_parts", [*xs, weight, *(() if bias is None else (bias,))])
    widths = [x.shape[1] for x in xs]
    if sum(widths) != weight.shape[1]:
        raise SbpError(
            f"linear_of_parts: inputs of widths {widths} need a weight of {sum(widths)} columns, "
            f"not {weight!r}"
        )
    split = any(isinstance(sbp, Split) and sbp.dim == 1 for sbp in weight.layout.nd_sbp)
    if len(xs) == 1 or split or bias is None:
        whole = xs[0] if len(xs) == 1 else ops.concat(xs, 1, id=f"{id}.concat")
        return ops.linear(whole, weight, bias, id=id)
    inner = letters_for(len(xs) + 1, "bn")
    count = len(xs)
    signatures = ",".join(["b"] * count) + ",B,B->b;" + ",".join(["B"] * count) + ",n,n->n"
    rule = cached_rule(
        "linear_of_parts",
        (*(("b", k) for k in inner[:count]), ("n", inner[count]), ("n",)),
        ("b", "n"),
        signatures,
    )

    def kernel(_: Choice, parts: list[Tensor]) -> Tensor:
        *inputs, rows, offset = parts
        # Copied, for rows of a stride such as 429 make every product a fifth slower.
        columns = [part.contiguous() for part in rows.split(widths, 1)]
        # The widest last: the others' products are small, and it adds itself to them.
        order = sorted(range(count), key=lambda n: widths[n])
        total = F.linear(inputs[order[0]], columns[order[0]], offset)
        for n in order[1:]:
            total = torch.addmm(total, inputs[n], columns[n].t())
        return total

    shape = (xs[0].shape[0], weight.shape[0])
    return apply(rule, [*xs, weight, bias], shape, kernel, id=id)
