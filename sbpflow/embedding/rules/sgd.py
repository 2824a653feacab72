"""Defines stochastic gradient descent, which needs no state."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from sbpflow.embedding.rules.base import RowBlock, RowDecay, SparseOptimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Sgd(SparseOptimizer):
    """Subtracts lr times the gradient from each row."""

    name: Literal["sgd"] = "sgd"
    weight_decay: RowDecay = 0.0

    built_into: ClassVar = ("numba", "fbgemm", "triton")

    def step(self, block: RowBlock) -> None:
        block.subtract(block.grads)
