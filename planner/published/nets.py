"""Code that the learned planners share: small networks, sums per device, and scaled features."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from sbpflow.planner.published.setting import NUM_FEATURES, Setting
from sbpflow.planner.search.problem import Floats

LOGARITHMIC = (1, 2, 3)  # rows, pooling, and size span several orders of magnitude


def mlp(*widths: int, last: bool = False) -> nn.Sequential:
    """Build linear layers with a ReLU between layers and, if ``last`` is true, after the last
    layer.
    """
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


@dataclass(frozen=True, slots=True)
class Scaling:
    """Means and standard deviations of the training tables' features. The bins are not scaled."""

    mean: Floats
    deviation: Floats

    @staticmethod
    def none() -> "Scaling":
        """Return a scaling that changes nothing."""
        return Scaling(np.zeros(NUM_FEATURES), np.ones(NUM_FEATURES))

    @staticmethod
    def of(settings: Sequence[Setting]) -> "Scaling":
        """Return the scaling for the tables of these tasks."""
        values = _logarithms(np.concatenate([setting.features for setting in settings]))
        mean, deviation = values.mean(0), values.std(0)
        mean[4:], deviation[4:] = 0.0, 1.0
        return Scaling(mean, np.maximum(deviation, 1e-6))

    def apply(self, features: Floats) -> Tensor:
        scaled = (_logarithms(features) - self.mean) / self.deviation
        return torch.from_numpy(scaled).float()


def _logarithms(features: Floats) -> Floats:
    values = features.copy()
    columns = list(LOGARITHMIC)
    values[:, columns] = np.log(np.maximum(values[:, columns], 1e-3))
    return values
