"""Losses of global tensors."""

import torch.nn.functional as F
from torch import Tensor

from sbpflow.errors import SbpError
from sbpflow.tensor.dispatch import (
    apply,
    cached_rule,
    check_floating,
    check_tensors,
    letters_for,
)
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.tensor.ops.reductions import reduce_mean, reduce_sum
from sbpflow.tensor.signature import Choice


def bce_with_logits(
    logits: GlobalTensor,
    labels: GlobalTensor,
    *,
    reduction: str = "mean",
    id: str = "bce",
) -> GlobalTensor:
    """Binary cross entropy; ``reduction`` "none", "sum" or "mean" over the full tensor.

    ``S(i) x S(i) -> S(i), B x B -> B; reduced, S(i) -> P and B -> B``

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
