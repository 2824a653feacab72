"""Sparse optimizers: one step on the rows a batch touched, and nothing else.

Values only: names, constants and the shapes of state. ``storage.optimizer_rules`` has the rules.
"""

import math
from dataclasses import dataclass
from typing import Literal

from sbpflow.errors import ConfigError

SparseName = Literal["sgd", "adagrad", "rowwise_adagrad", "lazy_adam", "ftrl"]
RowState = Literal["logical", "per_shard"]


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
