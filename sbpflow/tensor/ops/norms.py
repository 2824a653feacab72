"""Normalizes over the global batch or over each row, with the same result for any number of
ranks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sbpflow.errors import SbpError
from sbpflow.sbp.sbp import Broadcast, Partial
from sbpflow.tensor.dispatch import (
    apply,
    check_floating,
    check_ndim,
    check_same_dtype,
    choose,
    letters_for,
)
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.tensor.signature import Choice, make_rule


def layer_norm(
    x: GlobalTensor,
    weight: GlobalTensor,
    bias: GlobalTensor,
    *,
    eps: float = 1e-5,
    id: str | None = None,
) -> GlobalTensor:
    """Normalize each row of x [.., n] to mean 0 and variance 1, multiply by weight [n], and add
    bias [n].

    ``S(i) x B x B -> S(i) for i other than the last, B x B x B -> B``
    """
    check_ndim("layer_norm", "x", x, 1, at_least=True)
    _check_operands("layer_norm", x, weight, bias)
    lead = letters_for(x.ndim - 1, "n")
    rule = make_rule(
        "layer_norm",
        ((*lead, "n"), ("n",), ("n",)),
        (*lead, "n"),
        "".join(f"{a},B,B->{a};" for a in lead),
    )

    def kernel(_: Choice, parts: list[Tensor]) -> Tensor:
        rows, scale, offset = parts
        return F.layer_norm(rows, (x.shape[-1],), scale, offset, eps)

    return apply(rule, [x, weight, bias], x.shape, kernel, id=id)


def batch_norm(
    x: GlobalTensor,
    weight: GlobalTensor,
    bias: GlobalTensor,
    running_mean: GlobalTensor,
    running_var: GlobalTensor,
    *,
    training: bool,
    momentum: float = 0.1,
    eps: float = 1e-5,
    id: str = "batch_norm",
) -> GlobalTensor:
    """Normalize each column of x [b, n] to mean 0 and variance 1, multiply by weight [n], and add
    bias [n].

    ``S(0) x B x B -> P [2, n] -> B -> S(0), S(1) x S(0) x S(0) -> S(1), B x B x B -> B``

    In training, the statistics are over all b rows of the global batch. With S(0), one all-reduce
    of 2 n numbers adds up the sums and the sums of squares of all ranks, and another all-reduce, in
    the backward pass, adds up their gradients. ``running_mean`` and ``running_var`` ([n], with
    layout B) are updated in place with ``momentum``; ``running_var`` uses the variance with divisor
    b - 1. Evaluation uses these running statistics and does not communicate. The result equals that
    of torch's BatchNorm1d in one process. Raise SbpError for a training batch of one row,
    or in a 16-bit dtype.
    """
    check_ndim("batch_norm", "x", x, 2)
    _check_operands("batch_norm", x, weight, bias, running_mean, running_var)
    for name, buffer in (("running_mean", running_mean), ("running_var", running_var)):
        if any(sbp != Broadcast() for sbp in buffer.layout.nd_sbp):
            raise SbpError(f"batch_norm: {name} must have layout B, got {buffer!r}")
    if not training:
        return _by_running(x, weight, bias, running_mean, running_var, eps, id)
    if x.dtype.itemsize < 4:
        raise SbpError(
            f"batch_norm: sums of squares over a batch exceed the range or precision of {x.dtype}; "
            "convert the operands with ops.cast, for example to torch.float32"
        )
    if x.shape[0] == 1:
        raise SbpError(
            "batch_norm: a batch of one row has no variance; train on batches of two or more "
            "rows (for example, use data.tail: drop to skip a short last batch)"
        )
    # The running mean is first subtracted from x, because E[x^2] - E[x]^2 loses most digits to
    # cancellation if the mean is large.
    center = GlobalTensor(
        running_mean.part.clone(), running_mean.layout, running_mean.shape, x.boxing
    )
    by_rows = make_rule("batch_norm.sums", (("b", "n"), ("n",)), ("two", "n"), "b,B->P; n,n->n")
    x = x.to(choose(by_rows, [x, center]).inputs[0], id=f"{id}.0")
    sums = apply(by_rows, [x, center], (2, x.shape[1]), _sums, id=f"{id}.sums")
    summed = tuple(Broadcast() if isinstance(sbp, Partial) else sbp for sbp in sums.layout.nd_sbp)
    sums = sums.to(summed, id=f"{id}.moments")
    normalized = make_rule(
        "batch_norm",
        (("b", "n"), ("two", "n"), ("n",), ("n",), ("n",)),
        ("b", "n"),
        "b,B,B,B,B->b; n,n,n,n,n->n",
    )
    rows = x.shape[0]

    def kernel(_: Choice, parts: list[Tensor]) -> Tensor:
        part, part_sums, part_center, scale, offset = parts
        mean, variance = _moments(part_sums, part_center, rows)
        return _scaled(part, mean, variance, scale, offset, eps)

    y = apply(normalized, [x, sums, center, weight, bias], x.shape, kernel, id=id)
    all_sums = sums.detach().to((Broadcast(),) * x.layout.placement.ndim, id=f"{id}.running")
    if x.boxing.world.rank in x.layout.placement:
        mean, variance = _moments(all_sums.part, center.part, rows)
        running_mean.part.lerp_(mean, momentum)
        running_var.part.lerp_(variance * (rows / (rows - 1)), momentum)
    return y


def _check_operands(op: str, x: GlobalTensor, *vectors: GlobalTensor) -> None:
    check_same_dtype(op, [x, *vectors])
    check_floating(op, x)


def _sums(_: Choice, parts: list[Tensor]) -> Tensor:
    """Sum x - center and (x - center)^2 over the rows: x [b, n], center [n] -> [2, n]."""
    centered = parts[0] - parts[1]
    return torch.stack([centered.sum(0), centered.square().sum(0)])


def _moments(sums: Tensor, center: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the mean and variance [n], computed from the result of ``_sums``."""
    offset = sums[0] / rows
    return center + offset, (sums[1] / rows - offset.square()).clamp_min(0.0)


def _scaled(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    scale = weight * (variance + eps).rsqrt()
    return torch.addcmul(bias - mean * scale, x, scale)


def _by_running(
    x: GlobalTensor,
    weight: GlobalTensor,
    bias: GlobalTensor,
    running_mean: GlobalTensor,
    running_var: GlobalTensor,
    eps: float,
    id: str,
) -> GlobalTensor:
    """Normalize with the running statistics."""
    rule = make_rule(
        "batch_norm.running",
        (("b", "n"), *((("n",),) * 4)),
        ("b", "n"),
        "b,B,B,B,B->b; n,n,n,n,n->n",
    )

    def kernel(_: Choice, parts: list[Tensor]) -> Tensor:
        part, mean, variance, scale, offset = parts
        return _scaled(part, mean, variance, scale, offset, eps)

    return apply(rule, [x, running_mean, running_var, weight, bias], x.shape, kernel, id=id)
