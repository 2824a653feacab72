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
from sbpflow.tensor.ops.elementwise import nonlinear
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


def smooth_labels(labels: GlobalTensor, smoothing: float) -> GlobalTensor:
    """Labels 0 and 1 as smoothing / 2 and 1 - smoothing / 2.

    ``S(i) -> S(i), B -> B``
    """
    return nonlinear(
        "smooth_labels", lambda y: y * (1.0 - smoothing) + smoothing / 2.0, labels, id="smooth"
    )


def class_weights(labels: GlobalTensor, positive: float) -> GlobalTensor:
    """``positive`` for labels 1, and 1 for labels 0.

    ``S(i) -> S(i), B -> B``
    """
    return nonlinear(
        "class_weights", lambda y: 1.0 + y * (positive - 1.0), labels, id="class_weights"
    )


def focal_weights(
    logits: GlobalTensor, labels: GlobalTensor, gamma: float, *, id: str = "focal"
) -> GlobalTensor:
    """(1 - p) ** gamma, with p the chance that sigmoid(logits) gives to the label, 0 or 1.

    ``S(i) x S(i) -> S(i), B x B -> B``

    The factor of the focal loss: T.-Y. Lin et al., Focal loss for dense object detection, 2017,
    equation 4. Its gradient is taken, too.
    """
    check_tensors("focal_weights", logits, labels)
    check_floating("focal_weights", logits)
    letters = letters_for(logits.ndim)
    op_rule = cached_rule(
        "focal_weights", (letters, letters), letters, "".join(f"{a},{a}->{a};" for a in letters)
    )

    def kernel(_: Choice, parts: list[Tensor]) -> Tensor:
        margins = parts[0] * (2.0 * parts[1].to(parts[0].dtype) - 1.0)
        return (gamma * F.logsigmoid(-margins)).exp()

    return apply(op_rule, [logits, labels], logits.shape, kernel, id=id)
