"""Clips gradients in any layout by their global norm.

The gradients are derivatives of the mean loss over the global batch. Before the norm is computed,
row gradients are summed over the batch, and dense gradients are reduced over the ranks. Each
element counts once, even if several ranks store copies. The norm does not depend on the layout or
the number of ranks, except for the rounding of a float64 sum. The scale factor is the same as in
torch.nn.utils.clip_grad_norm_.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sbpflow.boxing.executor import Boxing
from sbpflow.boxing.plan import plan_boxing
from sbpflow.boxing.step import BoxingStep
from sbpflow.config.train_options import ClipConfig
from sbpflow.embedding.collection import EmbeddingCollection
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast, Partial
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.tensor.gradient_sync import CHANNEL

_EPSILON = 1e-6  # added to the norm before the limit is divided by the norm, as in torch


def clip_steps(
    config: ClipConfig, layouts: Sequence[Layout], world: Placement
) -> tuple[BoxingStep, ...]:
    """Return the boxing steps that sum the ranks' float64 sums of squares over all ranks (P -> B).

    ``layouts`` are the layouts of the dense parameters. If every rank stores all gradients, the
    result is empty.
    """
    whole = Layout(world, (Broadcast(),))
    if not config.rows and all(layout == whole for layout in layouts):
        return ()
    terms = Layout(world, (Partial(),))
    return plan_boxing(terms, whole, (1,), torch.float64, id="clip/bwd/norm")


def _counts_part(layout: Layout, rank: int) -> bool:
    """Return whether ``rank`` adds its part of a gradient to the norm.

    Among ranks with copies of the same part, only the first one does.
    """
    coordinates = layout.placement.coord(rank)
    return coordinates is not None and all(
        coordinate == 0
        for coordinate, sbp in zip(coordinates, layout.nd_sbp, strict=True)
        if isinstance(sbp, Broadcast)
    )


class Clipper:
    """Scales the gradients of a step; ``steps`` is the result of ``clip_steps``."""

    def __init__(
        self,
        config: ClipConfig,
        parameters: Mapping[str, GlobalTensor],
        embeddings: EmbeddingCollection,
        boxing: Boxing,
        steps: tuple[BoxingStep, ...],
    ) -> None:
        self._config = config
        self._parameters = list(parameters.values())
        self._embeddings = embeddings
        self._boxing = boxing
        self._steps = steps
        rank = boxing.world.rank
        self._counted = [
            parameter
            for parameter in self._parameters
            if not steps or _counts_part(parameter.layout, rank)
        ]

    def clip(self) -> Tensor:
        """Scale the gradients; return the norm before scaling (0-d float64) on every rank."""
        norm = self._squares().sqrt()
        factor = (self._config.norm / (norm + _EPSILON)).clamp(max=1.0)
        if not norm.is_cuda and float(factor) == 1.0:
            return norm
        for parameter in self._parameters:
            if parameter.part.grad is not None:
                parameter.part.grad.mul_(factor.to(parameter.part.grad.dtype))
        if self._config.rows:
            self._embeddings.scale_gradients(factor)
        return norm

    def _squares(self) -> Tensor:
        device = self._boxing.world.device
        total = torch.zeros(1, dtype=torch.float64, device=device)
        for parameter in self._counted:
            if parameter.part.grad is not None:
                total += parameter.part.grad.to(torch.float64).square().sum()
        if self._config.rows:
            total += self._embeddings.gradient_squares()
        if self._steps:
            summed = self._boxing.run(self._steps, total, CHANNEL)
            if summed is None:
                raise RuntimeError("this rank did not receive the sum of the squared gradients")
            total = summed
        return total.squeeze(0)
