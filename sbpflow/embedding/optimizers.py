"""Sparse optimizers: one step on the rows a batch touched, and nothing else.

Each rule gets unique rows with their summed gradients, in the dtype they are computed with. State
belongs to the logical row: rowwise Adagrad keeps one number per row, the mean of squares over the
table's full width, whatever part of the columns is stored here (unless ``row_state`` says
otherwise). ``eps`` stands outside the root, as
in FBGEMM and torch.optim.Adagrad.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sbpflow.errors import ConfigError

SparseName = Literal["sgd", "adagrad", "rowwise_adagrad", "lazy_adam", "ftrl"]
RowState = Literal["logical", "per_shard"]
SumOverColumns = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseOptimizer:
    """Which rule updates embedding rows, and its constants.

    ``weight_decay`` shrinks each touched row by lr * weight_decay before the rule (decoupled, as
    AdamW); ``l1``, ``l2`` and ``beta`` are FTRL's. With ``row_state="per_shard"`` rowwise Adagrad
    keeps a number per row and column shard, as TorchRec does: nothing is added up over ranks, and
    results depend on the layout. Raises ConfigError for a constant out of range.
    """

    name: SparseName
    lr: float
    eps: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.999)
    initial_accumulator: float = 0.0
    weight_decay: float = 0.0
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 0.0
    row_state: RowState = "logical"

    def __post_init__(self) -> None:
        if self.name not in _STATES:
            raise ConfigError(f"sparse optimizer {self.name!r}; use {', '.join(_STATES)}")
        _check_constants(self)
        if self.row_state != "logical" and self.name != "rowwise_adagrad":
            raise ConfigError(
                f"sparse optimizer {self.name}: row_state {self.row_state!r} is for "
                "rowwise_adagrad; leave it out"
            )
        if self.name == "ftrl" and self.weight_decay:
            raise ConfigError("sparse optimizer ftrl: takes l2 in place of weight_decay")

    @property
    def state_names(self) -> tuple[str, ...]:
        return _STATES[self.name]

    @property
    def shares_row_state(self) -> bool:
        """Whether ranks that hold different columns of a row need one another's gradients."""
        return self.name == "rowwise_adagrad" and self.row_state == "logical"

    def state_shape(self, rows: int, width: int) -> tuple[int, ...]:
        """[rows] for rowwise state, [rows, width] for elementwise."""
        return (rows,) if self.name == "rowwise_adagrad" else (rows, width)

    def initial_state(self, name: str) -> float:
        """What a state starts with."""
        return self.initial_accumulator if name == "sum" else 0.0

    def state_elements_per_row(self, dim: int) -> int:
        """State numbers per logical row of ``dim`` columns."""
        return len(self.state_names) * (1 if self.name == "rowwise_adagrad" else dim)


def _check_constants(optimizer: SparseOptimizer) -> None:
    """Also of the rules that do not use them: a constant is never taken and ignored when wrong."""

    def refuse(key: str, rule: str) -> ConfigError:
        value = getattr(optimizer, key)
        return ConfigError(f"sparse optimizer {optimizer.name}: {key} {value}; use {rule}")

    if not 0.0 < optimizer.lr < math.inf:
        raise refuse("lr", "a finite number above 0, for example lr=0.05")
    examples = {"eps": 1e-8, "initial_accumulator": 0.1, "weight_decay": 0.0}
    for key, example in {**examples, "l1": 0.0, "l2": 0.0, "beta": 1.0}.items():
        if not 0.0 <= getattr(optimizer, key) < math.inf:
            raise refuse(key, f"a finite number of 0 or more, for example {key}={example}")
    if len(optimizer.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in optimizer.betas):
        raise refuse(
            "betas", "two numbers of at least 0 and below 1, for example betas=(0.9, 0.999)"
        )


_STATES: dict[SparseName, tuple[str, ...]] = {
    "sgd": (),
    "adagrad": ("sum",),
    "rowwise_adagrad": ("sum",),
    "lazy_adam": ("exp_avg", "exp_avg_sq"),
    "ftrl": ("sum", "linear"),
}


@dataclass(slots=True, kw_only=True)
class RowBlock:
    """What one step works on: this rank's columns of some rows.

    A rule changes ``weights`` in place and writes ``state`` back through the storage's tensors.
    """

    weights: Tensor  # [touched, width], a copy of the rows in the dtype of the arithmetic
    state: dict[str, Tensor]  # whole, of the storage
    rows: Tensor  # [touched] int64, unique
    grads: Tensor  # [touched, width], summed over the batch
    lr: float
    num_steps: int  # of the job, this one included
    squares: Tensor | None = None  # [touched] of rowwise rules, over the table's full width


def apply_step(optimizer: SparseOptimizer, block: RowBlock) -> None:
    """Change ``block.weights`` and the state of its rows by one step."""
    if optimizer.weight_decay:
        block.weights.mul_(1.0 - block.lr * optimizer.weight_decay)
    _RULES[optimizer.name](optimizer, block)


def row_squares(grads: Tensor) -> Tensor:
    """[touched]: each row's sum of squares over the columns that are here."""
    return torch.mv(grads * grads, grads.new_full((grads.shape[1],), 1.0))


def _sgd(optimizer: SparseOptimizer, block: RowBlock) -> None:
    block.weights.add_(block.grads, alpha=-block.lr)


def _adagrad(optimizer: SparseOptimizer, block: RowBlock) -> None:
    total = block.state["sum"].index_select(0, block.rows).addcmul_(block.grads, block.grads)
    block.state["sum"].index_copy_(0, block.rows, total)
    block.weights.addcdiv_(block.grads, total.sqrt_().add_(optimizer.eps), value=-block.lr)


def _rowwise_adagrad(optimizer: SparseOptimizer, block: RowBlock) -> None:
    if block.squares is None:
        raise RuntimeError("a rowwise rule needs the rows' squares")
    total = block.state["sum"].index_select(0, block.rows).add_(block.squares)
    block.state["sum"].index_copy_(0, block.rows, total)
    scale = total.sqrt_().add_(optimizer.eps).reciprocal_().mul_(-block.lr)
    block.weights.addcmul_(block.grads, scale.unsqueeze(1))


def _lazy_adam(optimizer: SparseOptimizer, block: RowBlock) -> None:
    # Bias correction by the job's step count, as TensorFlow's LazyAdam and torch's SparseAdam.
    beta1, beta2 = optimizer.betas
    mean = block.state["exp_avg"].index_select(0, block.rows).lerp_(block.grads, 1.0 - beta1)
    block.state["exp_avg"].index_copy_(0, block.rows, mean)
    square = block.state["exp_avg_sq"].index_select(0, block.rows).mul_(beta2)
    square.addcmul_(block.grads, block.grads, value=1.0 - beta2)
    block.state["exp_avg_sq"].index_copy_(0, block.rows, square)
    correction = math.sqrt(1.0 - beta2**block.num_steps)
    denominator = square.sqrt_().div_(correction).add_(optimizer.eps)
    block.weights.addcdiv_(mean, denominator, value=-block.lr / (1.0 - beta1**block.num_steps))


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
