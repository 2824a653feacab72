"""Implements a user-defined sparse optimizer: momentum that is scaled by one number per row."""

from dataclasses import dataclass
from typing import ClassVar

from sbpflow import RowBlock, SparseOptimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledMomentum(SparseOptimizer):
    """Uses velocity = momentum * velocity + gradient; a step is divided by the root of
    ``scale``.
    """

    name: str = "scaled_momentum"
    momentum: float = 0.9
    eps: float = 1e-3
    weight_decay: float = 0.0

    state: ClassVar = {"velocity": "element", "scale": "row"}
    kernels: ClassVar = {"numba": "tests.embedding.own_rule_loops:scaled_momentum"}

    def step(self, block: RowBlock) -> None:
        velocity = block.take("velocity").mul_(self.momentum).add_(block.grads)
        block.put("velocity", velocity)
        scale = block.take("scale").add_(block.mean_squares)
        block.put("scale", scale)
        block.subtract_quotient(velocity, (scale.sqrt() + self.eps).unsqueeze(1))
