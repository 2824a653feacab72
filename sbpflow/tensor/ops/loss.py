"""Computes the binary cross entropy of global tensors, and its row weights and smoothed labels."""

import torch.nn.functional as F
from torch import Tensor

from sbpflow.errors import SbpError
from sbpflow.tensor.dispatch import apply, check_floating, check_tensors
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.tensor.ops.elementwise import elementwise_rule_of_two, nonlinear
from sbpflow.tensor.ops.reductions import reduce_mean, reduce_sum
from sbpflow.tensor.signature import Choice


def bce_with_logits(
    logits: GlobalTensor,
    labels: GlobalTensor,
    *,
    reduction: str = "mean",
    id: str = "bce",
) -> GlobalTensor:
    """Compute the binary cross entropy. ``reduction`` is "none", "sum", or "mean"; sums and means
    are over the full tensor.

    ``S(i) x S(i) -> S(i), B x B -> B; reduced, S(i) -> P and B -> B``

    The mean is the sum divided by the global number of elements, so uneven parts are weighted
    correctly. The sum or mean of a split loss is P. Labels are converted to the dtype of the
    logits.
    """
    if reduction not in ("none", "sum", "mean"):
        raise SbpError(f"bce_with_logits: reduction must be none, sum, or mean, got {reduction!r}")
    check_tensors("bce_with_logits", logits, labels)
    check_floating("bce_with_logits", logits)

    def kernel(_: Choice, parts: list[Tensor]) -> Tensor:
        target = parts[1].to(parts[0].dtype)
        return F.binary_cross_entropy_with_logits(parts[0], target, reduction="none")

    rule = elementwise_rule_of_two("bce_with_logits", logits.ndim)
    loss = apply(rule, [logits, labels], logits.shape, kernel, id=id)
    if reduction == "none":
        return loss
    reduce = reduce_sum if reduction == "sum" else reduce_mean
    return reduce(loss, id=f"{id}.{reduction}")


def smooth_labels(labels: GlobalTensor, smoothing: float) -> GlobalTensor:
    """Return ``labels`` with 0 replaced by smoothing / 2, and 1 replaced by 1 - smoothing / 2.

    ``S(i) -> S(i), B -> B``
    """
    return nonlinear(
        "smooth_labels", lambda y: y * (1.0 - smoothing) + smoothing / 2.0, labels, id="smooth"
    )


def class_weights(labels: GlobalTensor, positive: float) -> GlobalTensor:
    """Return the weight ``positive`` for label 1, and 1 for label 0.

    ``S(i) -> S(i), B -> B``
    """
    return nonlinear(
        "class_weights", lambda y: 1.0 + y * (positive - 1.0), labels, id="class_weights"
    )


def focal_weights(
    logits: GlobalTensor, labels: GlobalTensor, gamma: float, *, id: str = "focal"
) -> GlobalTensor:
    """Return (1 - p) ** gamma, where p is the predicted probability of the label (0 or 1).

    ``S(i) x S(i) -> S(i), B x B -> B``

    These weights are the modulating factor of the focal loss (Lin et al., Focal loss for dense
    object detection, 2017, equation 4), and they are differentiable.
    """
    check_tensors("focal_weights", logits, labels)
    check_floating("focal_weights", logits)

    def kernel(_: Choice, parts: list[Tensor]) -> Tensor:
        margins = parts[0] * (2.0 * parts[1].to(parts[0].dtype) - 1.0)
        return (gamma * F.logsigmoid(-margins)).exp()

    rule = elementwise_rule_of_two("focal_weights", logits.ndim)
    return apply(rule, [logits, labels], logits.shape, kernel, id=id)
