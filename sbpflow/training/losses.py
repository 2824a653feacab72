"""What training makes of a model's loss of each row: weights of a class, smoothed labels, focus.

Evaluations do not see it: they show the plain logloss of the predictions.
"""

from sbpflow.config.train_options import LossConfig
from sbpflow.tensor import ops
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.training.dense_part import DensePart

PLAIN = LossConfig()


def row_losses(
    model: DensePart, logits: GlobalTensor, labels: GlobalTensor, config: LossConfig
) -> GlobalTensor:
    """[batch, 1] from logits and labels [batch, 1], as ``config`` says; labels are 0 or 1."""
    weight, smoothing, gamma = config.positive_weight, config.label_smoothing, config.focal_gamma
    given = labels
    if smoothing:
        given = ops.smooth_labels(labels, smoothing)
    losses = model.row_losses(logits, given)
    if gamma:
        losses = ops.mul(losses, ops.focal_weights(logits, labels, gamma), id="loss.focal")
    if weight != 1.0:
        losses = ops.mul(losses, ops.class_weights(labels, weight), id="loss.positive_weight")
    return losses
