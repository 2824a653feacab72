"""Defines Adagrad with one state value per row: the sum of the row's mean squared gradients."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from sbpflow.embedding.rules.base import RowBlock, RowDecay, SparseOptimizer
from sbpflow.runtime.fields.keys import Key
from sbpflow.runtime.fields.ranges import Accumulator, Epsilon


@dataclass(frozen=True, kw_only=True, slots=True)
class RowwiseAdagrad(SparseOptimizer):
    """Implements Adagrad with one state value per row.

    The mean square is over all columns of the row. With ``row_state: per_shard``, the mean square
    is only over the columns on a rank. Ranks then need not sum their squared gradients, but results
    depend on the layout.
    """

    name: Literal["rowwise_adagrad"] = "rowwise_adagrad"
    eps: Epsilon = 1e-8
    initial_accumulator: Accumulator = 0.0
    weight_decay: RowDecay = 0.0
    row_state: Annotated[
        Literal["logical", "per_shard"],
        Key(
            "results",
            "Keep one state value per row, or one per row and column shard, as TorchRec does.",
        ),
    ] = "logical"

    state: ClassVar = {"sum": "row"}
    built_into: ClassVar = ("numba", "fbgemm", "triton")

    @property
    def shares_row_state(self) -> bool:
        return self.row_state == "logical"

    def initial_state(self, name: str) -> float:
        return self.initial_accumulator

    def step(self, block: RowBlock) -> None:
        total = block.take("sum").add_(block.mean_squares)
        block.put("sum", total)
        scale = total.sqrt_().add_(self.eps).reciprocal_().mul_(-block.numbers.rate)
        block.weights.addcmul_(block.grads, scale.unsqueeze(1))
