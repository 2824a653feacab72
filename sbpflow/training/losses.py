"""Modifies row losses in training: positive class weight, label smoothing, focal loss.

Evaluations are not affected and report the plain logloss of the predictions.
"""

from sbpflow.config.train_options import LossConfig
from sbpflow.tensor import ops
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.training.dense_part import DensePart

PLAIN = LossConfig()


def row_losses(
    model: DensePart, logits: GlobalTensor, labels: GlobalTensor, config: LossConfig
) -> GlobalTensor:
    """Return the configured loss of each row, given logits and 0/1 labels ([batch, 1] each)."""
    weight, smoothing, gamma = config.positive_weight, config.label_smoothing, config.focal_gamma
    targets = ops.smooth_labels(labels, smoothing) if smoothing else labels
    losses = model.row_losses(logits, targets)
    if gamma:
        losses = ops.mul(losses, ops.focal_weights(logits, labels, gamma), id="loss.focal")
    if weight != 1.0:
        losses = ops.mul(losses, ops.class_weights(labels, weight), id="loss.positive_weight")
    return losses
