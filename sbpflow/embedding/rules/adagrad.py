"""Defines Adagrad (J. Duchi et al., 2011) with ``eps`` outside the root, as in FBGEMM and torch."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from sbpflow.embedding.rules.base import RowBlock, RowDecay, SparseOptimizer
from sbpflow.runtime.fields.ranges import Accumulator, Epsilon


@dataclass(frozen=True, kw_only=True, slots=True)
class Adagrad(SparseOptimizer):
    """Implements Adagrad; ``sum`` accumulates squared gradients, starting at
    ``initial_accumulator``.
    """

    name: Literal["adagrad"] = "adagrad"
    eps: Epsilon = 1e-8
    initial_accumulator: Accumulator = 0.0
    weight_decay: RowDecay = 0.0

    state: ClassVar = {"sum": "element"}
    built_into: ClassVar = ("numba", "fbgemm", "triton")

    def initial_state(self, name: str) -> float:
        return self.initial_accumulator

    def step(self, block: RowBlock) -> None:
        total = block.take("sum").addcmul_(block.grads, block.grads)
        block.put("sum", total)
        block.subtract_quotient(block.grads, total.sqrt_().add_(self.eps))
