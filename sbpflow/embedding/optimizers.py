"""Sparse optimizers: one step on the rows a batch touched, and nothing else.

Each rule gets unique rows with their summed gradients. State belongs to the logical row: rowwise
Adagrad keeps one number per row, the mean of squares over the table's full width, whatever part of
the columns is stored here. ``eps`` stands outside the root, as in FBGEMM and torch.optim.Adagrad.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

SparseName = Literal["sgd", "adagrad", "rowwise_adagrad", "lazy_adam"]
SumOverColumns = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseOptimizer:
    """Which rule updates embedding rows, and its constants (learning rate per step of the job)."""

    name: SparseName
    lr: float
    eps: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.999)
    initial_accumulator: float = 0.0

    @property
    def state_names(self) -> tuple[str, ...]:
        return _STATES[self.name]

    def state_shape(self, rows: int, width: int) -> tuple[int, ...]:
        """[rows] for rowwise state, [rows, width] for elementwise."""
        return (rows,) if self.name == "rowwise_adagrad" else (rows, width)

    def state_elements_per_row(self, dim: int) -> int:
        """State numbers per logical row of ``dim`` columns."""
        return len(self.state_names) * (1 if self.name == "rowwise_adagrad" else dim)


_STATES: dict[SparseName, tuple[str, ...]] = {
    "sgd": (),
    "adagrad": ("sum",),
    "rowwise_adagrad": ("sum",),
    "lazy_adam": ("exp_avg", "exp_avg_sq"),
}


@dataclass(slots=True, kw_only=True)
class RowBlock:
    """What one step works on: this rank's columns of some rows, and where they are stored."""

    weights: Tensor  # [rows, width]
    state: dict[str, Tensor]
    rows: Tensor  # [touched] int64, unique
    grads: Tensor  # [touched, width], summed over the batch
    dim: int  # columns of the logical table
    sum_over_columns: SumOverColumns | None  # adds [touched] over the ranks that share the rows


def apply_step(optimizer: SparseOptimizer, block: RowBlock, num_steps: int) -> None:
    """Update the block's rows in place; ``num_steps`` counts this step (1 for the first).

    Raises nothing for zero touched rows, but still takes part in ``sum_over_columns``.
    """
    _RULES[optimizer.name](optimizer, block, num_steps)


def _sgd(optimizer: SparseOptimizer, block: RowBlock, num_steps: int) -> None:
    rows = block.weights.index_select(0, block.rows)
    block.weights.index_copy_(0, block.rows, rows.add_(block.grads, alpha=-optimizer.lr))


def _adagrad(optimizer: SparseOptimizer, block: RowBlock, num_steps: int) -> None:
    total = block.state["sum"].index_select(0, block.rows).addcmul_(block.grads, block.grads)
    block.state["sum"].index_copy_(0, block.rows, total)
    rows = block.weights.index_select(0, block.rows)
    rows.addcdiv_(block.grads, total.sqrt_().add_(optimizer.eps), value=-optimizer.lr)
    block.weights.index_copy_(0, block.rows, rows)


def _rowwise_adagrad(optimizer: SparseOptimizer, block: RowBlock, num_steps: int) -> None:
    squares = torch.mv(block.grads.square(), block.grads.new_full((block.grads.shape[1],), 1.0))
    if block.sum_over_columns is not None:
        squares = block.sum_over_columns(squares)
    total = block.state["sum"].index_select(0, block.rows).add_(squares, alpha=1.0 / block.dim)
    block.state["sum"].index_copy_(0, block.rows, total)
    scale = total.sqrt_().add_(optimizer.eps).reciprocal_().mul_(-optimizer.lr)
    rows = block.weights.index_select(0, block.rows)
    block.weights.index_copy_(0, block.rows, rows.addcmul_(block.grads, scale.unsqueeze(1)))


def _lazy_adam(optimizer: SparseOptimizer, block: RowBlock, num_steps: int) -> None:
    # Bias correction by the job's step count, as TensorFlow's LazyAdam and torch's SparseAdam.
    beta1, beta2 = optimizer.betas
    mean = block.state["exp_avg"].index_select(0, block.rows).lerp_(block.grads, 1.0 - beta1)
    block.state["exp_avg"].index_copy_(0, block.rows, mean)
    square = block.state["exp_avg_sq"].index_select(0, block.rows).mul_(beta2)
    square.addcmul_(block.grads, block.grads, value=1.0 - beta2)
    block.state["exp_avg_sq"].index_copy_(0, block.rows, square)
    denominator = square.sqrt_().div_(math.sqrt(1.0 - beta2**num_steps)).add_(optimizer.eps)
    rows = block.weights.index_select(0, block.rows)
    rows.addcdiv_(mean, denominator, value=-optimizer.lr / (1.0 - beta1**num_steps))
    block.weights.index_copy_(0, block.rows, rows)


_RULES: dict[SparseName, Callable[[SparseOptimizer, RowBlock, int], None]] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "lazy_adam": _lazy_adam,
}
