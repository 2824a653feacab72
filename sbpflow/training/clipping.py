"""Clipping by the global norm: one norm over gradients that lie on the ranks in any layout.

The norm is of the mean loss over the whole batch, every element counted once wherever copies or
parts of it are: a row of a table with its gradient summed over the batch, a dense parameter after
its gradient has come back. So it does not depend on the layout or the number of ranks, up to the
order of a float64 sum. The factor is that of torch.nn.utils.clip_grad_norm_.
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

CHANNEL = "dense"
_TINY = 1e-6  # added to the norm, as torch does


def clip_steps(
    config: ClipConfig, layouts: Sequence[Layout], world: Placement, backend: str
) -> tuple[BoxingStep, ...]:
    """What adds up the squares of all ranks, one float64; nothing where every rank has them all.

    ``layouts`` are those of the dense parameters. P -> B over the world, in the move ``clip``.
    """
    whole = Layout(world, (Broadcast(),))
    if not config.rows and all(layout == whole for layout in layouts):
        return ()
    terms = Layout(world, (Partial(),))
    return plan_boxing(terms, whole, (1,), torch.float64, id="clip/bwd/norm", backend=backend)


def counts_here(layout: Layout, rank: int) -> bool:
    """Whether ``rank`` is the one of those with equal parts that counts its own."""
    coordinates = layout.placement.coord(rank)
    return coordinates is not None and all(
        place == 0
        for place, sbp in zip(coordinates, layout.nd_sbp, strict=True)
        if isinstance(sbp, Broadcast)
    )


class Clipper:
    """Scales the gradients of a step; ``steps`` is what ``clip_steps`` planned."""

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
            if not steps or counts_here(parameter.layout, rank)
        ]

    def clip(self) -> Tensor:
        """Scale every gradient that is in the norm; the norm before, 0-d float64, on every rank."""
        norm = self._squares().sqrt()
        factor = (self._config.norm / (norm + _TINY)).clamp(max=1.0)
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
                raise RuntimeError("the norm of the gradients did not come back")
            total = summed
        return total.squeeze(0)
