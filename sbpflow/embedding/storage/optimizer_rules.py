"""The sparse rules: one step on unique rows with their summed gradients.

State belongs to the logical row: rowwise Adagrad keeps one number per row, the mean of squares over
the table's full width, whatever part of the columns is stored here. ``eps`` stands outside the
root, as in FBGEMM and torch.optim.Adagrad.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sbpflow.embedding.plan.optimizer import SparseName, SparseOptimizer
from sbpflow.embedding.storage.step_numbers import StepNumbers

SumOverColumns = Callable[[Tensor], Tensor]


@dataclass(slots=True, kw_only=True)
class RowBlock:
    """What one step works on: this rank's columns of some rows.

    A rule changes ``weights`` in place and writes ``state`` back through the storage's tensors.
    """

    weights: Tensor  # [touched, width], a copy of the rows in the dtype of the arithmetic
    state: dict[str, Tensor]  # whole, of the storage
    rows: Tensor  # [touched] int64, unique
    grads: Tensor  # [touched, width], summed over the batch
    numbers: StepNumbers
    squares: Tensor | None = None  # [touched] of rowwise rules, over the table's full width


def apply_step(optimizer: SparseOptimizer, block: RowBlock) -> None:
    """Change ``block.weights`` and the state of its rows by one step."""
    if optimizer.weight_decay:
        block.weights.mul_(block.numbers.decay)
    _RULES[optimizer.name](optimizer, block)


def row_squares(grads: Tensor) -> Tensor:
    """[touched]: each row's sum of squares over the columns that are here.

    Not as a product with ones: BLAS works on blocks of rows, so that the last bit of a row would
    depend on which rows stand around it.
    """
    return (grads * grads).sum(1)


def _subtract(weights: Tensor, values: Tensor, rate: float | Tensor) -> None:
    """weights -= rate * values."""
    if isinstance(rate, Tensor):
        weights.addcmul_(values, rate, value=-1.0)
    else:
        weights.add_(values, alpha=-rate)


def _subtract_quotient(
    weights: Tensor, values: Tensor, divisors: Tensor, rate: float | Tensor
) -> None:
    """weights -= rate * (values / divisors)."""
    if isinstance(rate, Tensor):
        weights.addcmul_(values / divisors, rate, value=-1.0)
    else:
        weights.addcdiv_(values, divisors, value=-rate)


def _sgd(optimizer: SparseOptimizer, block: RowBlock) -> None:
    _subtract(block.weights, block.grads, block.numbers.rate)


def _adagrad(optimizer: SparseOptimizer, block: RowBlock) -> None:
    total = block.state["sum"].index_select(0, block.rows).addcmul_(block.grads, block.grads)
    block.state["sum"].index_copy_(0, block.rows, total)
    root = total.sqrt_().add_(optimizer.eps)
    _subtract_quotient(block.weights, block.grads, root, block.numbers.rate)


def _rowwise_adagrad(optimizer: SparseOptimizer, block: RowBlock) -> None:
    if block.squares is None:
        raise RuntimeError("a rowwise rule needs the rows' squares")
    total = block.state["sum"].index_select(0, block.rows).add_(block.squares)
    block.state["sum"].index_copy_(0, block.rows, total)
    scale = total.sqrt_().add_(optimizer.eps).reciprocal_().mul_(-block.numbers.rate)
    block.weights.addcmul_(block.grads, scale.unsqueeze(1))


def _lazy_adam(optimizer: SparseOptimizer, block: RowBlock) -> None:
    beta1, beta2 = optimizer.betas
    mean = block.state["exp_avg"].index_select(0, block.rows).lerp_(block.grads, 1.0 - beta1)
    block.state["exp_avg"].index_copy_(0, block.rows, mean)
    square = block.state["exp_avg_sq"].index_select(0, block.rows).mul_(beta2)
    square.addcmul_(block.grads, block.grads, value=1.0 - beta2)
    block.state["exp_avg_sq"].index_copy_(0, block.rows, square)
    denominator = square.sqrt_().div_(block.numbers.root).add_(optimizer.eps)
    _subtract_quotient(block.weights, mean, denominator, block.numbers.rate)


def _ftrl(optimizer: SparseOptimizer, block: RowBlock) -> None:
    """FTRL-Proximal per coordinate: McMahan et al., KDD 2013, algorithm 1.

    A row keeps its starting values until it is touched, as in TensorFlow's Ftrl. The rate is the
    optimizer's throughout: ``linear`` is a sum of steps at it, and a weight follows from that sum.
    """
    old = block.state["sum"].index_select(0, block.rows)
    total = old.addcmul(block.grads, block.grads)
    block.state["sum"].index_copy_(0, block.rows, total)
    root = total.sqrt_()
    linear = block.state["linear"].index_select(0, block.rows).add_(block.grads)
    linear.addcmul_((root - old.sqrt_()).div_(optimizer.lr), block.weights, value=-1.0)
    block.state["linear"].index_copy_(0, block.rows, linear)
    beyond = linear - linear.clamp(-optimizer.l1, optimizer.l1)
    curvature = root.add_(optimizer.beta).div_(optimizer.lr).add_(optimizer.l2)
    # Nothing seen yet and no l1 leaves 0 / 0: such a coordinate stays at 0.
    block.weights.copy_(torch.where(beyond == 0, 0.0, -beyond / curvature))


_RULES: dict[SparseName, Callable[[SparseOptimizer, RowBlock], None]] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "lazy_adam": _lazy_adam,
    "ftrl": _ftrl,
}
