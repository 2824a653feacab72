"""Defines the configuration: every key, its default, and the checks that need only the
configuration.

``config.checks`` performs the checks that need the tables or the world size. Values are never
clamped, and unknown keys are rejected.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Protocol

from sbpflow.config.checkpoint_options import CheckpointConfig, ExportConfig
from sbpflow.config.data_cache import DataCache
from sbpflow.config.metrics import Metric
from sbpflow.config.model_tables import InitialRange
from sbpflow.config.parse import Tagged
from sbpflow.config.table_rules import ParallelConfig
from sbpflow.config.train_options import (
    ClipConfig,
    DenseScheduleConfig,
    LossConfig,
    PlateauConfig,
    PrometheusConfig,
    ScheduleConfig,
    SparseScheduleConfig,
    StopConfig,
    TrackerName,
)
from sbpflow.embedding.plan.out_of_range import OutOfRangeKey
from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.embedding.rules.ftrl import Ftrl
from sbpflow.embedding.rules.registry import known_rules
from sbpflow.embedding.rules.rowwise_adagrad import RowwiseAdagrad
from sbpflow.errors import ConfigError
from sbpflow.runtime.fields.keys import Example, Key
from sbpflow.runtime.fields.ranges import (
    Accumulator,
    Beta,
    Betas,
    Count,
    Epsilon,
    Float32,
    LearningRate,
    NonNegative,
    Range,
    Rate,
)
from sbpflow.runtime.files.remote_path import AnyPath


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Sets the folder for a run's files and the seed of all random numbers."""

    dir: Annotated[
        Path, Key("execution", "Folder for the metrics, report, and checkpoints of the run.")
    ] = Path("runs/train")
    seed: Annotated[
        int,
        Range(low=0, below=2**63),
        Key("results", "Random seed for initial values, row order, dropout, and rounding."),
    ] = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Configures which prepared set is read, and how."""

    path: Annotated[
        AnyPath | None,
        Example("out/criteo"),
        Key(
            "execution",
            "Folder of the prepared set, or a URL such as s3://bucket/set. When a run resumes, "
            "the folder may have moved, but the rows must be the same.",
        ),
    ] = None
    cache: DataCache = field(default_factory=DataCache)
    loader: Annotated[
        Literal["auto", "dali", "memmap"],
        Key(
            "execution",
            "How the set is read. auto uses DALI if it is installed, and memmap otherwise; "
            "both return identical batches.",
        ),
    ] = "auto"
    batch_size: Annotated[
        int,
        Range(low=1, below=2**31),
        Key("results", "Number of rows per batch, over all ranks."),
    ] = 16384
    shuffle: Annotated[
        Literal["runs", "blocks", "rows", "none"],
        Key(
            "results",
            "What is shuffled in an epoch: runs of 16 rows, blocks of 4,096 rows, single rows, "
            "or nothing (none).",
        ),
    ] = "runs"
    tail: Annotated[
        Literal["keep", "drop"],
        Key("results", "Whether to train on a short last batch (keep) or skip it (drop)."),
    ] = "keep"
    out_of_range: OutOfRangeKey = "error"


class ModelGroup(Protocol):
    """The interface of the ``model`` group, a frozen dataclass in a model's module, selected by
    ``name``.

    ``run.model.ModelConfig`` describes the other attributes; the known models are passed to
    ``load_config``.
    """

    @property
    def name(self) -> str:
        """Return the value of ``name`` that selects this class."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TableChanges:
    """Overrides, in an entry without ``name``, settings from earlier patterns or from
    ``optimizer.sparse``.
    """

    name: Literal["same"] = "same"
    lr: Annotated[Rate | None, Example(0.01), Key("results", "Learning rate.")] = None
    weight_decay: Annotated[
        NonNegative | None,
        Example(0.0),
        Key("results", "Weight decay, as defined by the optimizer."),
    ] = None
    initial_range: InitialRange = None


L2 = Annotated[
    Float32, Key("results", "L2 penalty: weight_decay * weight is added to the gradient.")
]
Momentum = Annotated[
    Beta, Key("results", "Fraction of the previous step that is added to the next step.")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseSgd:
    """Configures torch.optim.SGD; the keys are the optimizer's arguments."""

    name: Literal["sgd"] = "sgd"
    lr: LearningRate = 0.1
    momentum: Momentum = 0.0
    nesterov: Annotated[
        bool, Key("results", "Use Nesterov momentum, which needs momentum above 0.")
    ] = False
    weight_decay: L2 = 0.0

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise ConfigError(
                "optimizer.dense.nesterov: true has no effect without momentum; use, for example, "
                "momentum: 0.9"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseAdagrad:
    """Configures torch.optim.Adagrad; the keys are the optimizer's arguments, except that
    ``initial_accumulator`` is torch's ``initial_accumulator_value``.
    """

    name: Literal["adagrad"] = "adagrad"
    lr: LearningRate = 0.01
    eps: Epsilon = 1e-10
    initial_accumulator: Accumulator = 0.0
    weight_decay: L2 = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RmsProp:
    """Configures torch.optim.RMSprop; the keys are the optimizer's arguments."""

    name: Literal["rmsprop"] = "rmsprop"
    lr: LearningRate = 1e-3
    alpha: Annotated[Beta, Key("results", "Decay rate of the average of squared gradients.")] = 0.99
    eps: Epsilon = 1e-8
    momentum: Momentum = 0.0
    weight_decay: L2 = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam:
    """Configures torch.optim.Adam; the keys are the optimizer's arguments."""

    name: Literal["adam"] = "adam"
    lr: LearningRate = 1e-3
    betas: Betas = (0.9, 0.999)
    eps: Epsilon = 1e-8
    weight_decay: L2 = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW:
    """Configures torch.optim.AdamW; the keys are the optimizer's arguments."""

    name: Literal["adamw"] = "adamw"
    lr: LearningRate = 1e-3
    betas: Betas = (0.9, 0.999)
    eps: Epsilon = 1e-8
    weight_decay: Annotated[
        NonNegative,
        Key("results", "Each step first multiplies the weights by 1 - lr * weight_decay."),
    ] = 0.01


TableOptimizer = TableChanges | SparseOptimizer
DenseOptimizer = DenseSgd | Adam | AdamW | DenseAdagrad | RmsProp


def table_optimizers(name: object = None) -> Mapping[str, type[TableOptimizer]]:
    """Return the possible classes of an ``optimizer.tables`` entry; see ``known_rules``."""
    return {"same": TableChanges, **known_rules(name)}


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """Sets the optimizers of the tables and the dense part, their schedules, and clipping."""

    sparse: Annotated[
        SparseOptimizer,
        Tagged(known_rules),
        Key(
            "results",
            "Optimizer of the tables, or package.module:Class. It changes only the rows "
            "that a batch uses.",
        ),
    ] = field(default_factory=RowwiseAdagrad)
    tables: Annotated[
        Mapping[str, Annotated[TableOptimizer, Tagged(table_optimizers, default="same")]],
        Example({"*.C1": Ftrl()}),
        Key(
            "results",
            "Optimizers, by pattern of table names, used instead of optimizer.sparse; the last "
            "match wins.",
        ),
    ] = field(default_factory=dict[str, TableOptimizer])
    dense: Annotated[DenseOptimizer, Key("results", "Optimizer of the dense part.")] = field(
        default_factory=Adam
    )
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    dense_schedule: Annotated[DenseScheduleConfig | None, Example({"warmup_steps": 1000})] = None
    sparse_schedule: Annotated[SparseScheduleConfig | None, Example({"warmup_steps": 1000})] = None
    clip: Annotated[ClipConfig | None, Example({"norm": 10.0})] = None

    @property
    def of_dense(self) -> ScheduleConfig:
        """Return the schedule of the dense part."""
        return self.dense_schedule or self.schedule

    @property
    def of_tables(self) -> ScheduleConfig:
        """Return the schedule of the tables."""
        return self.sparse_schedule or self.schedule

    def __post_init__(self) -> None:
        if self.of_tables.changes:
            self.refuse_one_rate(self.of_tables.key)

    def refuse_one_rate(self, key: str) -> None:
        """Raise ConfigError if ``key`` changes the rate of an optimizer whose rate is fixed."""
        by_table = {f"tables.{pattern}": chosen for pattern, chosen in self.tables.items()}
        for owner, chosen in {"sparse": self.sparse, **by_table}.items():
            if isinstance(chosen, SparseOptimizer) and chosen.one_rate:
                raise ConfigError(
                    f"{key}: {chosen.name} {chosen.one_rate}, so its rate must not change; remove "
                    f"{key}, or use another optimizer such as optimizer.{owner}.name: adagrad"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Sets the length of a run, its evaluations, and its logging."""

    epochs: Annotated[Count, Key("execution", "Number of passes over the training rows.")] = 1
    accumulate: Annotated[
        Count,
        Key(
            "results",
            "Number of batches per step. The gradients are the same as for one large batch.",
        ),
    ] = 1
    lookahead: Annotated[
        Annotated[int, Range(low=0, high=1024)] | Literal["auto"],
        Key(
            "execution",
            "Number of batches whose IDs are exchanged in advance. auto is 64 with "
            "parallel.storage, 2 with early rows, and 1 otherwise.",
        ),
    ] = "auto"
    early_rows: Annotated[
        bool | Literal["auto"],
        Key(
            "execution",
            "On CPU, for tables with the exchange unique: send rows of a batch one batch "
            "early if the preceding batch does not use them. auto does this only if it is "
            "predicted to save time.",
        ),
    ] = "auto"
    late_gradients: Annotated[
        bool | Literal["auto"],
        Key(
            "execution",
            "For tables with early rows: if the next batch does not use a row, send the "
            "gradient of the row during the next step. auto does this only if it is "
            "predicted to save time.",
        ),
    ] = "auto"
    max_steps: Annotated[
        Count | None,
        Example(100),
        Key(
            "execution",
            "Number of steps after which the run ends, even within an epoch. train.epochs still "
            "limits the run.",
        ),
    ] = None
    eval_every: Annotated[
        int,
        Range(low=0),
        Key(
            "scores",
            "Number of steps between evaluations of val. With 0, the run evaluates only at "
            "its end.",
        ),
    ] = 1000
    eval_rows: Annotated[
        Count | None,
        Example(1_000_000),
        Key(
            "scores",
            "Number of rows of val to evaluate during training. At the end, a run evaluates"
            " all rows.",
        ),
    ] = None
    exact_auc_rows: Annotated[
        int,
        Range(low=0),
        Key(
            "scores",
            "Maximum number of rows for an exact AUC. Larger evaluations use a histogram.",
        ),
    ] = 20_000_000
    slices: Annotated[
        tuple[str, ...],
        Example(("C1",)),
        Key(
            "scores",
            "Columns of IDs. Evaluations also report metrics for the ten most frequent "
            "values of each column.",
        ),
    ] = ()
    stop: Annotated[StopConfig | None, Example({"metric": "auc", "patience": 2})] = None
    plateau: Annotated[PlateauConfig | None, Example({"factor": 0.1})] = None
    loss: LossConfig = field(default_factory=LossConfig)
    profile: Annotated[
        tuple[Count, Count] | None,
        Example((10, 15)),
        Key("execution", "First and last step of the recorded trace."),
    ] = None
    log_every: Annotated[Count, Key("execution", "Number of steps between log lines.")] = 100
    progress: Annotated[bool, Key("execution", "Show a progress bar.")] = True
    trackers: Annotated[
        tuple[TrackerName, ...],
        Example(("mlflow",)),
        Key("execution", "Trackers that also receive the steps and scores of metrics.jsonl."),
    ] = ()
    prometheus: Annotated[PrometheusConfig | None, Example({"port": 9464})] = None

    def __post_init__(self) -> None:
        for key, given in (("stop", self.stop), ("plateau", self.plateau)):
            if given is not None and not self.eval_every:
                raise ConfigError(
                    f"train.{key} needs evaluations of val during training, but eval_every is 0; "
                    "use, for example, train.eval_every: 1000"
                )
        if len(set(self.trackers)) < len(self.trackers):
            raise ConfigError(
                f"train.trackers: {list(self.trackers)} contains a tracker twice; use, for "
                f"example, {list(dict.fromkeys(self.trackers))}"
            )
        if self.profile is not None and self.profile[1] < self.profile[0]:
            raise ConfigError(
                f"train.profile: {list(self.profile)} ends before it begins; use, for example, "
                f"[{self.profile[1]}, {self.profile[0]}]"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The fully resolved configuration of a run; it is the same on all ranks."""

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: Annotated[
        ModelGroup, Key("results", "Model to train: a built-in model, or package.module:Class.")
    ]
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    export: Annotated[ExportConfig | None, Example({"dir": "out/model"})] = None

    @property
    def best_metric(self) -> Metric | None:
        """Return the val metric that selects the final weights, or ``None`` to use the last
        weights."""
        keep = self.checkpoint.keep_best
        if self.train.stop is not None:
            return self.train.stop.metric
        return "auc" if keep is True else keep or None

    @property
    def watched(self) -> dict[str, Metric]:
        """Return the val metrics that affect the run, by the key that names them."""
        train = self.train
        groups = {"train.stop.metric": train.stop, "train.plateau.metric": train.plateau}
        metrics: dict[str, Metric] = {}
        for key, group in groups.items():
            if group is not None:
                metrics[key] = group.metric
        if train.stop is None and self.best_metric is not None:
            metrics["checkpoint.keep_best"] = self.best_metric
        return metrics

    def __post_init__(self) -> None:
        if self.export is not None and not self.checkpoint.every:
            raise ConfigError(
                "export.dir: the run saves no checkpoints that it could export, because "
                "checkpoint.every is 0; use, for example, checkpoint.every: 1000"
            )
        if self.export is not None and self.export.deltas and not self.checkpoint.deltas:
            raise ConfigError(
                f"export.deltas is {self.export.deltas}, but checkpoint.deltas is 0, so the run "
                "does not know which rows have changed; use checkpoint.deltas: "
                f"{self.export.deltas}, or, to write only bundles, export.deltas: 0"
            )
        keep, stop = self.checkpoint.keep_best, self.train.stop
        if stop is not None and keep not in (True, False, stop.metric):
            raise ConfigError(
                f"checkpoint.keep_best is {keep}, but train.stop.metric is {stop.metric}; both "
                "must watch the same metric; use, for example, checkpoint.keep_best: true"
            )
        if self.best_metric is not None and not self.checkpoint.every:
            key = "checkpoint.keep_best" if stop is None else "train.stop"
            raise ConfigError(
                f"{key}: the run ends with its best weights, which it reads from a checkpoint, "
                "but checkpoint.every is 0, so no checkpoint is saved; use, for example, "
                f"checkpoint.every: 1000, or remove {key}"
            )
        if keep and not self.train.eval_every:
            raise ConfigError(
                "checkpoint.keep_best needs evaluations of val during training, but "
                "train.eval_every is 0; use, for example, train.eval_every: 1000"
            )
        if self.parallel.cuda_graph is True and self.train.accumulate > 1:
            raise ConfigError(
                "parallel.cuda_graph: true cannot be combined with train.accumulate: "
                f"{self.train.accumulate}, because a graph computes the gradients of one batch "
                "only; use train.accumulate=1 and a larger data.batch_size, or remove cuda_graph"
            )
        if self.train.plateau is not None:
            self.optimizer.refuse_one_rate("train.plateau")
