"""The configuration: what can be set, its defaults, and how a YAML file becomes one frozen value.

Facts that need no world are checked here; those that need the tables or the world size are in
``config.checks``. Nothing is clamped, and no key is ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Protocol, get_args

from sbpflow.config.checkpoint_options import CheckpointConfig
from sbpflow.config.parse import Example, Range
from sbpflow.config.table_rules import (
    ParallelConfig,
)
from sbpflow.errors import ConfigError

Count = Annotated[int, Range(low=1)]
Rate = Annotated[float, Range(above=0)]
NonNegative = Annotated[float, Range(low=0)]
Beta = Annotated[float, Range(low=0, below=1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Where a run writes, and the seed everything random derives from."""

    dir: Path = Path("runs/train")
    seed: Annotated[int, Range(low=0, below=2**63)] = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """A prepared set and how it is read; ``batch_size`` is over all ranks.

    ``out_of_range`` says what becomes of an id its table has no row for: clamp takes the nearest
    row, hash one that depends on the id alone; the end of a run counts them. ``loader`` auto is
    DALI where it is installed, else memmap: their batches are equal bit by bit.
    """

    path: Annotated[Path | None, Example("out/criteo")] = None
    loader: Literal["auto", "dali", "memmap"] = "auto"
    batch_size: Count = 16384
    shuffle: Literal["runs", "blocks", "rows", "none"] = "runs"
    tail: Literal["keep", "drop"] = "keep"
    out_of_range: Literal["error", "clamp", "hash"] = "error"


class ModelGroup(Protocol):
    """The ``model`` group: a frozen dataclass tagged by ``name``, of a model's own module.

    ``run.model.ModelConfig`` says what else it has. Which there are is told to ``load_config``.
    """

    @property
    def name(self) -> str:
        """The tag."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseSgd:
    """``weight_decay``, here and below, shrinks the touched rows by lr * weight_decay a step."""

    name: Literal["sgd"] = "sgd"
    lr: Rate = 0.05
    weight_decay: NonNegative = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Adagrad:
    name: Literal["adagrad"] = "adagrad"
    lr: Rate = 0.05
    eps: Rate = 1e-8
    initial_accumulator: NonNegative = 0.0
    weight_decay: NonNegative = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RowwiseAdagrad:
    """One state number per row; ``row_state: per_shard`` keeps one per row and column shard."""

    name: Literal["rowwise_adagrad"] = "rowwise_adagrad"
    lr: Rate = 0.05
    eps: Rate = 1e-8
    initial_accumulator: NonNegative = 0.0
    weight_decay: NonNegative = 0.0
    row_state: Literal["logical", "per_shard"] = "logical"


@dataclass(frozen=True, kw_only=True, slots=True)
class LazyAdam:
    """Adam over the rows of a batch only; the others keep value and state."""

    name: Literal["lazy_adam"] = "lazy_adam"
    lr: Rate = 1e-3
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Rate = 1e-8
    weight_decay: NonNegative = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ftrl:
    """FTRL-Proximal, for sparse weights: ``l1`` sets small ones to 0, ``l2`` shrinks all."""

    name: Literal["ftrl"] = "ftrl"
    lr: Rate = 0.05
    beta: NonNegative = 1.0
    l1: NonNegative = 0.0
    l2: NonNegative = 0.0
    initial_accumulator: NonNegative = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseSgd:
    name: Literal["sgd"] = "sgd"
    lr: Rate = 0.1
    momentum: Beta = 0.0
    weight_decay: NonNegative = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam:
    name: Literal["adam"] = "adam"
    lr: Rate = 1e-3
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Rate = 1e-8
    weight_decay: NonNegative = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW:
    name: Literal["adamw"] = "adamw"
    lr: Rate = 1e-3
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Rate = 1e-8
    weight_decay: NonNegative = 0.01


SparseOptimizer = SparseSgd | Adagrad | RowwiseAdagrad | LazyAdam | Ftrl
SPARSE_OPTIMIZERS: tuple[type[SparseOptimizer], ...] = get_args(SparseOptimizer)
DenseOptimizer = DenseSgd | Adam | AdamW


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """Learning rates over a run, as a factor of ``lr``; steps are the optimizer's.

    Linear rise over ``warmup_steps``; from ``decay_start`` to ``decay_start + decay_steps`` a fall
    to ``end_factor`` as (1 - progress) ** ``power``. Without ``decay_steps`` there is no fall.
    """

    warmup_steps: Annotated[int, Range(low=0)] = 0
    decay_start: Annotated[int, Range(low=0)] = 0
    decay_steps: Annotated[Count | None, Example(10000)] = None
    power: Rate = 1.0
    end_factor: Annotated[float, Range(low=0, high=1)] = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.end_factor <= 1.0:
            raise ConfigError(
                f"optimizer.schedule.end_factor: {self.end_factor} is no end of a fall from 1; use "
                "0 to 1, for example end_factor: 0.1"
            )
        fall = {"decay_start": 0, "power": 1.0, "end_factor": 0.0}
        for key, default in fall.items():
            if self.decay_steps is None and getattr(self, key) != default:
                raise ConfigError(
                    f"optimizer.schedule.{key}: {getattr(self, key)} without decay_steps changes "
                    "nothing; for example decay_steps: 10000"
                )
        if self.decay_steps is not None and self.decay_start < self.warmup_steps:
            raise ConfigError(
                f"optimizer.schedule.decay_start: {self.decay_start} is before the end of the "
                f"warm-up; use {self.warmup_steps} or more"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """``sparse`` updates the tables' touched rows, ``dense`` everything else.

    ``tables`` maps patterns of table names to optimizers in place of ``sparse``; the last pattern
    that matches a table wins.
    """

    sparse: SparseOptimizer = field(default_factory=RowwiseAdagrad)
    tables: Annotated[Mapping[str, SparseOptimizer], Example({"*.C1": Ftrl()})] = field(
        default_factory=dict[str, SparseOptimizer]
    )
    dense: DenseOptimizer = field(default_factory=Adam)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    def __post_init__(self) -> None:
        changes = self.schedule.warmup_steps or self.schedule.decay_steps is not None
        by_table = {f"tables.{pattern}": chosen for pattern, chosen in self.tables.items()}
        for key, chosen in {"sparse": self.sparse, **by_table}.items():
            if changes and isinstance(chosen, Ftrl):
                raise ConfigError(
                    "optimizer.schedule: ftrl keeps sums of steps at one rate, so it has no "
                    "schedule; remove optimizer.schedule, or use for example "
                    f"optimizer.{key}.name: adagrad"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Length of a run and what it reports; ``eval_every: 0`` evaluates at the end only.

    A step is one update from ``accumulate`` batches: that many times the rows, as one batch.
    """

    epochs: Count = 1
    accumulate: Count = 1
    max_steps: Annotated[Count | None, Example(100)] = None
    eval_every: Annotated[int, Range(low=0)] = 1000
    log_every: Count = 100
    progress: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """One run, fully resolved: the same value on every rank."""

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelGroup
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
