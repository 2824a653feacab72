"""The configuration: what can be set, its defaults, and how a YAML file becomes one frozen value.

Facts that need no world are checked here; those that need the tables or the world size are in
``config.checks``. Nothing is clamped, and no key is ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Protocol

from sbpflow.config.checkpoint_options import CheckpointConfig
from sbpflow.config.parse import Example, Tagged, Untagged
from sbpflow.config.table_rules import (
    ParallelConfig,
)
from sbpflow.config.train_options import (
    ClipConfig,
    DenseScheduleConfig,
    LossConfig,
    PlateauConfig,
    ScheduleConfig,
    SparseScheduleConfig,
    StopConfig,
)
from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.embedding.rules.ftrl import Ftrl
from sbpflow.embedding.rules.registry import known_rules
from sbpflow.embedding.rules.rowwise_adagrad import RowwiseAdagrad
from sbpflow.errors import ConfigError
from sbpflow.runtime.ranges import Beta, NonNegative, Range, Rate

Count = Annotated[int, Range(low=1)]


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
    batch_size: Annotated[int, Range(low=1, below=2**31)] = 16384
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
class TableChanges:
    """What tables have otherwise than the patterns before it, or ``optimizer.sparse``, say.

    They start with values of U(-initial_range, initial_range).
    """

    name: Literal["same"] = "same"
    lr: Annotated[Rate | None, Example(0.01)] = None
    weight_decay: Annotated[NonNegative | None, Example(0.0)] = None
    initial_range: Annotated[NonNegative | None, Example(0.05)] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseSgd:
    """``momentum`` as torch.optim.SGD has it; ``nesterov`` looks ahead along it."""

    name: Literal["sgd"] = "sgd"
    lr: Rate = 0.1
    momentum: Beta = 0.0
    nesterov: bool = False
    weight_decay: NonNegative = 0.0

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise ConfigError(
                "optimizer.dense.nesterov: true without momentum looks ahead along nothing; for "
                "example momentum: 0.9"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseAdagrad:
    name: Literal["adagrad"] = "adagrad"
    lr: Rate = 0.01
    eps: Rate = 1e-10
    initial_accumulator: NonNegative = 0.0
    weight_decay: NonNegative = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RmsProp:
    """Root mean square of gradients, with ``momentum`` of its steps."""

    name: Literal["rmsprop"] = "rmsprop"
    lr: Rate = 1e-3
    alpha: Beta = 0.99
    eps: Rate = 1e-8
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


TableOptimizer = TableChanges | SparseOptimizer
DenseOptimizer = DenseSgd | Adam | AdamW | DenseAdagrad | RmsProp


def table_optimizers(name: object = None) -> Mapping[str, type[TableOptimizer]]:
    """What an entry of ``optimizer.tables`` may be, as ``known_rules``."""
    return {"same": TableChanges, **known_rules(name)}


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """``sparse`` updates the tables' touched rows, ``dense`` everything else.

    ``tables`` maps patterns of table names to optimizers in place of ``sparse``; the last pattern
    that matches a table wins. An entry without ``name`` changes what it gives and nothing else.
    ``dense_schedule`` and ``sparse_schedule`` replace ``schedule`` for their part. ``clip`` scales
    gradients by their global norm.
    """

    sparse: Annotated[SparseOptimizer, Tagged(known_rules)] = field(default_factory=RowwiseAdagrad)
    tables: Annotated[
        Mapping[str, Annotated[TableOptimizer, Tagged(table_optimizers)]],
        Example({"*.C1": Ftrl()}),
        Untagged("same"),
    ] = field(default_factory=dict[str, TableOptimizer])
    dense: DenseOptimizer = field(default_factory=Adam)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    dense_schedule: Annotated[DenseScheduleConfig | None, Example({"warmup_steps": 1000})] = None
    sparse_schedule: Annotated[SparseScheduleConfig | None, Example({"warmup_steps": 1000})] = None
    clip: Annotated[ClipConfig | None, Example({"norm": 10.0})] = None

    @property
    def of_dense(self) -> ScheduleConfig:
        """The schedule of the dense part."""
        return self.dense_schedule or self.schedule

    @property
    def of_tables(self) -> ScheduleConfig:
        """The schedule of the tables."""
        return self.sparse_schedule or self.schedule

    def __post_init__(self) -> None:
        if self.of_tables.changes:
            self.refuse_one_rate(self.of_tables.key)

    def refuse_one_rate(self, key: str) -> None:
        """ConfigError if ``key`` changes the rate of tables whose rule takes no other."""
        by_table = {f"tables.{pattern}": chosen for pattern, chosen in self.tables.items()}
        for owner, chosen in {"sparse": self.sparse, **by_table}.items():
            if isinstance(chosen, SparseOptimizer) and chosen.one_rate:
                raise ConfigError(
                    f"{key}: {chosen.name} {chosen.one_rate}, so it has no schedule; remove "
                    f"{key}, or use for example optimizer.{owner}.name: adagrad"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Length of a run and what it reports; ``eval_every: 0`` evaluates at the end only.

    A step is one update from ``accumulate`` batches: that many times the rows, as one batch.
    ``eval_rows`` are scored of val on the way, the first ones; the end scores all. Up to
    ``exact_auc_rows`` rows the AUC is exact, of more it comes from a histogram with its bound of
    error. ``slices`` names columns of ids by whose values AUC is shown as well. ``profile`` are the
    first and the last step of a Chrome trace. ``lookahead`` is how many batches ahead of the one
    being trained their ids are exchanged; it changes no result, and ``auto`` is 1 as long as all
    rows are in the device's memory.
    """

    epochs: Count = 1
    accumulate: Count = 1
    lookahead: Annotated[int, Range(low=0, high=1024)] | Literal["auto"] = 1
    max_steps: Annotated[Count | None, Example(100)] = None
    eval_every: Annotated[int, Range(low=0)] = 1000
    eval_rows: Annotated[Count | None, Example(1_000_000)] = None
    exact_auc_rows: Annotated[int, Range(low=0)] = 20_000_000
    slices: Annotated[tuple[str, ...], Example(("C1",))] = ()
    stop: Annotated[StopConfig | None, Example({"metric": "auc", "patience": 2})] = None
    plateau: Annotated[PlateauConfig | None, Example({"factor": 0.1})] = None
    loss: LossConfig = field(default_factory=LossConfig)
    profile: Annotated[tuple[Count, Count] | None, Example((10, 15))] = None
    log_every: Count = 100
    progress: bool = True

    @property
    def num_ahead(self) -> int:
        """``lookahead`` as a number."""
        return 1 if self.lookahead == "auto" else self.lookahead

    def __post_init__(self) -> None:
        for key, given in (("stop", self.stop), ("plateau", self.plateau)):
            if given is not None and not self.eval_every:
                raise ConfigError(
                    f"train.{key}: watches val, which eval_every: 0 scores at the end only; for "
                    "example train.eval_every: 1000"
                )
        if self.profile is not None and self.profile[1] < self.profile[0]:
            raise ConfigError(
                f"train.profile: {list(self.profile)} ends before it begins; for example "
                f"[{self.profile[1]}, {self.profile[0]}]"
            )


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

    def __post_init__(self) -> None:
        every, scored = self.checkpoint.every, self.train.eval_every
        if self.checkpoint.keep_best and (not every or not scored or scored % every):
            fit = -(-scored // every) * every if every and scored else every or 1000
            raise ConfigError(
                f"checkpoint.keep_best: keeps what val scored best, which is scored every {scored} "
                f"steps (train.eval_every) and saved every {every} (checkpoint.every): each that "
                f"is scored must be saved, for example train.eval_every: {fit}"
                + ("" if every else " and checkpoint.every: 1000")
            )
        if self.parallel.cuda_graph and self.train.accumulate > 1:
            raise ConfigError(
                f"parallel.cuda_graph: true beside train.accumulate: {self.train.accumulate}; a "
                "graph holds the gradients of one batch: use train.accumulate=1 and a larger "
                "data.batch_size, or leave cuda_graph out"
            )
        if self.train.plateau is not None:
            self.optimizer.refuse_one_rate("train.plateau")
