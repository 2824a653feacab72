"""The configuration: what can be set, its defaults, and how a YAML file becomes one frozen value.

Facts that need no world are checked here; those that need the tables or the world size are in
``config_layout.check``. Nothing is clamped, and no key is ignored.
"""

import difflib
import hashlib
import json
import tempfile
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import yaml

from sbpflow.config_layout import (
    ParallelConfig,
    Shape,
    TableLayoutConfig,
    TableRule,
    resolve_table_layouts,
)
from sbpflow.config_parse import Example, Range, build, plain, show
from sbpflow.errors import ConfigError

Count = Annotated[int, Range(low=1)]
Rate = Annotated[float, Range(above=0)]
NonNegative = Annotated[float, Range(low=0)]
Beta = Annotated[float, Range(low=0, below=1)]

HOW_TO_MAKE_DATA = (
    "make a set with `python -m data prepare --input train.tsv --output DIR` "
    "or `python -m data synth --rows 300000 --output DIR`"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Where a run writes, and the seed everything random derives from."""

    dir: Path = Path("runs/wdl")
    seed: Annotated[int, Range(low=0, below=2**63)] = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """A prepared set and how it is read; ``batch_size`` is over all ranks.

    ``out_of_range`` says what becomes of an id its table has no row for: clamp takes the nearest
    row, hash one that depends on the id alone; the end of a run counts them.
    """

    path: Annotated[Path | None, Example("out/criteo")] = None
    loader: Literal["dali", "memmap"] = "dali"
    batch_size: Count = 16384
    shuffle: Literal["runs", "blocks", "rows", "none"] = "runs"
    tail: Literal["keep", "drop"] = "keep"
    out_of_range: Literal["error", "clamp", "hash"] = "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class WideConfig:
    """The wide part: one weight per value of each cross of columns."""

    crosses: Annotated[tuple[tuple[str, ...], ...], Example((("C1", "C2"),))] = (
        ("C1", "C2"),
        ("C3", "C4"),
    )

    def __post_init__(self) -> None:
        for index, cross in enumerate(self.crosses):
            key = f"model.wide.crosses[{index}]"
            if len(cross) != 2 or len(set(cross)) != len(cross):
                raise ConfigError(
                    f"{key}: {list(cross)} is not a cross; name two different columns, "
                    "for example [C1, C2]"
                )
            if cross in self.crosses[:index]:
                raise ConfigError(f"{key}: {list(cross)} is there twice; remove one of them")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape of the model; ``deep: false`` trains the wide part alone."""

    name: Literal["wdl"] = "wdl"
    deep: bool = True
    embedding_dim: Count = 16
    hidden: Annotated[tuple[Count, ...], Example((400, 400))] = (1024, 1024)
    dropout: Annotated[float, Range(low=0, below=1)] = 0.5
    wide: WideConfig = field(default_factory=WideConfig)

    def __post_init__(self) -> None:
        if not self.deep and not self.wide.crosses:
            raise ConfigError(
                "model.deep: false leaves nothing to train, model.wide.crosses is empty; "
                "for example model.wide.crosses: [[C1, C2]]"
            )
        if self.deep and not self.hidden:
            raise ConfigError("model.hidden: [] has no layer; for example hidden: [400, 400]")


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

    ``wide`` updates the tables of the wide part in place of ``sparse``.
    """

    sparse: SparseOptimizer = field(default_factory=RowwiseAdagrad)
    wide: Annotated[SparseOptimizer | None, Example(Ftrl())] = None
    dense: DenseOptimizer = field(default_factory=Adam)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    def __post_init__(self) -> None:
        changes = self.schedule.warmup_steps or self.schedule.decay_steps is not None
        for key, chosen in (("sparse", self.sparse), ("wide", self.wide)):
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
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply ``key=value`` overrides in order, check, and freeze."""
    tree = _read_yaml(Path(path))
    for override in overrides:
        _apply(tree, override)
    return build(Config, tree)


def dump_config(config: Config) -> str:
    """The resolved config as YAML; ``load_config`` of it gives an equal value."""
    return yaml.safe_dump(plain(config), sort_keys=False, default_flow_style=None, width=100)


def config_hash(config: Config) -> str:
    """Equal on two ranks exactly if their configs are; order of ``parallel.tables`` counts."""
    return hashlib.sha256(json.dumps(plain(config)).encode()).hexdigest()


def config_facts(config: Config) -> dict[str, str]:
    """Dotted keys and their values as YAML on one line; what ``config_hash`` sees, key by key.

    An entry of ``parallel.tables`` and ``parallel.dense`` is a key, and so is their order, which
    decides where two patterns match.
    """
    facts = dict(_flat("", plain(config)))
    for key in ("tables", "dense"):
        facts[f"parallel.{key} (order)"] = show(list(getattr(config.parallel, key)))
    return facts


def _flat(key: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, item in cast("dict[str, object]", value).items():
            yield from _flat(f"{key}.{name}" if key else name, item)
    elif value is not None:  # which is as good as not given
        yield key, show(value)


def check(
    config: Config, tables: Mapping[str, Shape], world_size: int, device_type: str = "cpu"
) -> dict[str, TableLayoutConfig]:
    """What needs the world size or the tables (name -> (rows, dim)); gives the tables' layouts.

    Call it on every rank before any process group exists.
    """
    if config.data.batch_size < world_size:
        raise ConfigError(
            f"data.batch_size: {config.data.batch_size} rows for {world_size} ranks leave ranks "
            f"without any; for example data.batch_size: {world_size}"
        )
    return resolve_table_layouts(config.parallel, tables, world_size, device_type)


def run_dir(config: Config) -> Path:
    """``run.dir``, made if need be; ConfigError where nothing can be written."""
    folder = config.run.dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = (error.strerror or "cannot be used").lower()
        raise ConfigError(
            f"run.dir: {folder} cannot be written to ({reason}); for example run.dir=runs/wdl"
        ) from error
    return folder


def data_path(config: Config) -> Path:
    """``data.path``, which a run needs; ConfigError where it is not given or not a folder."""
    path = config.data.path
    if path is None:
        raise ConfigError(f"data.path: not given, for example data.path=DIR; {HOW_TO_MAKE_DATA}")
    if problem := data_folder_problem(path):
        raise ConfigError(problem)
    return path


def data_folder_problem(folder: Path) -> str | None:
    """Why a prepared set cannot be read from ``folder``, and what to do; None if it is a folder."""
    if folder.is_dir():
        return None
    what = "is not a folder" if folder.exists() else "does not exist"
    return f"data.path: {folder} {what}; {HOW_TO_MAKE_DATA}"


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML keeps the last of two equal keys; here that is a mistake to report."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                line = key_node.start_mark.line + 1
                raise ConfigError(f"line {line}: key {key!r} is there twice; remove one of them")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        folder = path if path.is_dir() else path.parent
        known = sorted(str(file) for file in folder.glob("*.yaml"))
        near = difflib.get_close_matches(str(path), known, 3, cutoff=0.5) or known[:5]
        raise ConfigError(f"--config: {path} {what}{_use(near)}")
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeyLoader)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {_one_line(error)}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds {type(tree).__name__}, not groups such as 'run: {{...}}'")
    return tree


def _apply(tree: dict[str, Any], override: str) -> None:
    """Write one ``key=value`` into the raw tree; ``build`` judges key and value later."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip(". "):
        raise ConfigError(f"{override!r}: not an override; write key=value, such as run.seed=7")
    try:
        value = yaml.load(text, _UniqueKeyLoader)
    except (yaml.YAMLError, ConfigError) as error:
        raise ConfigError(f"{key}: {text!r} is not a YAML value: {_one_line(error)}") from error
    path = _split_key(key.strip())
    node = tree
    for depth, name in enumerate(path[:-1]):
        child = node.setdefault(name, {})
        if child is None:
            child = node[name] = {}
        if not isinstance(child, dict):
            owner = ".".join(path[: depth + 1])
            raise ConfigError(f"{key}: {owner} is the value {child!r}, it has no keys of its own")
        node = child
    node.pop(path[-1], None)  # so that a new pattern of parallel.tables comes last, and wins
    node[path[-1]] = value


def _split_key(key: str) -> list[str]:
    """Patterns of names hold dots: all after ``parallel.tables.`` is one, less a rule's own key."""
    if key.startswith("parallel.dense."):
        return ["parallel", "dense", key.removeprefix("parallel.dense.")]
    prefix = "parallel.tables."
    if not key.startswith(prefix):
        return key.split(".")
    pattern, _, last = key.removeprefix(prefix).rpartition(".")
    if pattern and last in TableRule.__dataclass_fields__:
        return ["parallel", "tables", pattern, last]
    return ["parallel", "tables", key.removeprefix(prefix)]


def _use(paths: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(paths)}?" if paths else ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
