"""Code that the learned planners share: small networks, sums per device, and scaled features."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from sbpflow.planner.published.setting import NUM_FEATURES, Setting
from sbpflow.planner.search.problem import Floats

LOGARITHMIC = (1, 2, 3)  # rows, pooling, and size span several orders of magnitude


def mlp(*widths: int, last: bool = False) -> nn.Sequential:
    """Build linear layers with a ReLU between layers and, with ``last``, after the last layer."""
    layers: list[nn.Module] = []
    for place, (width, following) in enumerate(pairwise(widths)):
        layers.append(nn.Linear(width, following))
        if last or place < len(widths) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def sums(latents: Tensor, devices: Tensor, size: int) -> Tensor:
    """Sum [tables, width] by device; return [size, width]."""
    return torch.zeros(size, latents.shape[1]).index_add(0, devices, latents)


def descend(
    optimizer: torch.optim.Optimizer, loss: Tensor, *, most_gradient: float | None = None
) -> None:
    """Take one optimizer step on the loss, with the gradient norm clipped to ``most_gradient``."""
    optimizer.zero_grad()
    loss.backward()
    if most_gradient is not None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, most_gradient)
    optimizer.step()


class Scaling(nn.Module):
    """Scales features by the means and standard deviations of the tables of ``settings``; without
    ``settings``, and for the bins, values are not scaled.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, settings: Sequence[Setting]) -> None:
        super().__init__()
        mean, deviation = np.zeros(NUM_FEATURES), np.ones(NUM_FEATURES)
        if settings:
            values = _logarithms(np.concatenate([setting.features for setting in settings]))[:, :4]
            mean[:4], deviation[:4] = values.mean(0), np.maximum(values.std(0), 1e-6)
        self.register_buffer("mean", torch.from_numpy(mean))
        self.register_buffer("deviation", torch.from_numpy(deviation))

    def forward(self, features: Floats) -> Tensor:
        """Return the scaled features as float32."""
        return ((torch.from_numpy(_logarithms(features)) - self.mean) / self.deviation).float()


def _logarithms(features: Floats) -> Floats:
    values = features.copy()
    columns = list(LOGARITHMIC)
    values[:, columns] = np.log(np.maximum(values[:, columns], 1e-3))
    return values
