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
    of 2 n float64 numbers adds up the sums and the sums of squares of all ranks, and another
    all-reduce, in the backward pass, adds up their gradients. ``running_mean`` and ``running_var``
    ([n], with layout B) are updated in place with ``momentum``; ``running_var`` uses the variance
    with divisor b - 1. Evaluation uses these running statistics and does not communicate. The
    result equals that of torch's BatchNorm1d in one process. Raise SbpError for a training batch of
    one row, or in a 16-bit dtype.
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
            f"batch_norm: running statistics exceed the range or precision of {x.dtype}; convert "
            "the operands with ops.cast, for example to torch.float32"
        )
    if x.shape[0] == 1:
        raise SbpError(
            "batch_norm: a batch of one row has no variance; train on batches of two or more "
            "rows (for example, use data.tail: drop to skip a short last batch)"
        )
    # E[x^2] - E[x]^2 loses most digits to cancellation if the mean is large. The running mean is
    # therefore first subtracted from x. The sums are float64, because in the first steps, the
    # running mean is still far from the mean.
    center = GlobalTensor(
        running_mean.part.clone(), running_mean.layout, running_mean.shape, x.boxing
    )
    by_rows = make_rule("batch_norm.sums", (("b", "n"), ("n",)), ("two", "n"), "b,B->P; n,n->n")
    x = x.to(choose(by_rows, [x, center]).inputs[0], id=f"{id}.0")
    shape = (2, x.shape[1])
    sums = apply(by_rows, [x, center], shape, _sums, id=f"{id}.sums", dtype=torch.float64)
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
        variance *= rows / (rows - 1)
        for running, value in ((running_mean, mean), (running_var, variance)):
            running.part.lerp_(value.to(running.dtype), momentum)
    return y


def _check_operands(op: str, x: GlobalTensor, *vectors: GlobalTensor) -> None:
    check_same_dtype(op, [x, *vectors])
    check_floating(op, x)


def _sums(_: Choice, parts: list[Tensor]) -> Tensor:
    """Sum x - center and (x - center)^2 over the rows: x [b, n], center [n] -> [2, n] float64."""
    # Sums about a value near this rank's mean are precise in the dtype of x. They are then turned
    # into sums about ``center``, so that only tensors [n] need float64, which is slow.
    x, center = parts
    rows = x.shape[0]
    near = x.detach().sum(0) / max(rows, 1)
    apart = x - near
    sums, squares = apart.sum(0).double(), apart.square().sum(0).double()
    offset = near.double() - center.double()
    return torch.stack([sums + rows * offset, squares + 2 * offset * sums + rows * offset.square()])


def _moments(sums: Tensor, center: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the mean and variance ([n] float64), computed from the result of ``_sums``."""
    offset = sums[0] / rows
    return center + offset, (sums[1] / rows - offset.square()).clamp_min(0.0)


def _scaled(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    # x - mean is computed first, because x * scale - mean * scale would lose digits if the mean is
    # large. The mean is rounded to the dtype of x, and the difference is added to the bias.
    scale = weight * (variance + eps).rsqrt()
    center = mean.detach().to(x.dtype)
    offset = bias - (mean - center) * scale
    return torch.addcmul(offset.to(x.dtype), x - center, scale.to(x.dtype))


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
