"""What the learned planners share: small networks, sums per device, scaled features."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from sbpflow.planner.published.setting import NUM_FEATURES
from sbpflow.planner.search.problem import Floats

LOGARITHMIC = (1, 2, 3)  # rows, pooling, size: over several orders of magnitude


def mlp(*widths: int, last: bool = False) -> nn.Sequential:
    """Linear layers with ReLU between them, and after the last one if ``last``."""
    layers: list[nn.Module] = []
    for place, (width, following) in enumerate(pairwise(widths)):
        layers.append(nn.Linear(width, following))
        if last or place < len(widths) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def sums(latents: Tensor, devices: Tensor, size: int) -> Tensor:
    """[tables, width] summed by device: [size, width]."""
    return torch.zeros(size, latents.shape[1]).index_add(0, devices, latents)


@dataclass(frozen=True, slots=True)
class Scaling:
    """Mean and deviation of the training tables' features; bins and the like stay as they are."""

    mean: Floats
    deviation: Floats

    @staticmethod
    def none() -> "Scaling":
        """Nothing is scaled."""
        return Scaling(np.zeros(NUM_FEATURES), np.ones(NUM_FEATURES))

    @staticmethod
    def of(features: Floats) -> "Scaling":
        """From [tables, features] in the order of ``Setting.features``."""
        values = _logarithms(features)
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
