"""Modifies row losses in training (positive class weight, label smoothing, focal loss), and runs
the backward pass.

Evaluations are not affected and report the plain logloss of the predictions.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from sbpflow.config.train_options import LossConfig
from sbpflow.errors import SbpError
from sbpflow.tensor import ops
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.training.dense_part import DensePart

PLAIN = LossConfig()


def row_losses(
    model: DensePart, logits: GlobalTensor, labels: GlobalTensor, config: LossConfig
) -> GlobalTensor:
    """Return the configured loss of each row, given logits and 0/1 labels ([batch, 1] each).

    Logits and losses of the model on other placements are converted to the layout of ``labels``.
    """
    weight, smoothing, gamma = config.positive_weight, config.label_smoothing, config.focal_gamma
    targets = ops.smooth_labels(labels, smoothing) if smoothing else labels
    _check_shape("forward", logits, labels)
    logits = _with_labels(logits, labels, "logits")
    losses = model.row_losses(logits, targets)
    _check_shape("row_losses", losses, labels)
    losses = _with_labels(losses, labels, "losses")
    if gamma:
        losses = ops.mul(losses, ops.focal_weights(logits, labels, gamma), id="loss.focal")
    if weight != 1.0:
        losses = ops.mul(losses, ops.class_weights(labels, weight), id="loss.positive_weight")
    return losses


def _check_shape(method: str, x: GlobalTensor, labels: GlobalTensor) -> None:
    """Raise SbpError if a method of the dense part does not return one value per row."""
    if x.shape != labels.shape:
        raise SbpError(
            f"the dense part: {method} returned a tensor of shape {list(x.shape)} for "
            f"{labels.shape[0]} rows; return one value per row, {list(labels.shape)}"
        )


def _with_labels(x: GlobalTensor, labels: GlobalTensor, id: str) -> GlobalTensor:
    """Return ``x`` on the placement of ``labels``, because ops need a common placement."""
    if x.layout.placement == labels.layout.placement:
        return x
    return x.to(labels.layout, id=id)


def backward(loss: GlobalTensor, vectors: Mapping[str, Tensor]) -> Tensor:
    """Run the backward pass from ``loss``; return this rank's loss term [1].

    ``vectors`` on which the loss does not depend get a gradient of zeros.
    """
    loss.backward()
    for vector in vectors.values():
        if vector.grad is None:
            vector.grad = torch.zeros_like(vector)
    return loss.detach().to("P", id="loss").part.reshape(1)
