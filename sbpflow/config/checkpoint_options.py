"""Defines the ``checkpoint`` group: where and how often a run is saved, and how it resumes."""

from dataclasses import dataclass
from typing import Annotated, Literal

from sbpflow.config.metrics import Metric
from sbpflow.config.parse import PathOr
from sbpflow.runtime.fields.keys import Example, Key
from sbpflow.runtime.fields.ranges import Count, Range
from sbpflow.runtime.files.remote_path import AnyPath


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Specifies when a run is saved, which checkpoints are kept, and from which one it resumes.

    ``resume: auto`` resumes an unfinished run in ``dir`` from its newest valid checkpoint; the run
    fails if any key that affects results has changed. ``never`` always starts from the beginning
    and moves existing checkpoints aside. A path starts a new run from the checkpoint at that path;
    if that run is interrupted, the same command resumes it.
    """

    dir: Annotated[
        AnyPath | None,
        Example("runs/train/checkpoints"),
        Key(
            "execution",
            "Checkpoint folder, which all ranks must share, or a URL such as "
            "s3://bucket/run. The default is checkpoints/ in run.dir.",
        ),
    ] = None
    every: Annotated[
        int,
        Range(low=0),
        Key(
            "execution",
            "Number of steps between checkpoints. The last step is also saved. 0 disables "
            "checkpoints.",
        ),
    ] = 1000
    deltas: Annotated[
        int,
        Range(low=0, high=256),  # chains are read recursively, and Python limits recursion
        Key(
            "execution",
            "Number of deltas after each full checkpoint. A delta contains only the changed "
            "rows and the dense part.",
        ),
    ] = 0
    keep: Annotated[Count, Key("execution", "How many of the newest checkpoints to keep.")] = 3
    keep_best: Annotated[
        bool | Metric,
        Key(
            "execution",
            "Keep the checkpoint with the best value of a metric on val, and end the run with "
            "the weights of this checkpoint. With true, the metric is train.stop.metric if "
            "train.stop is set, and AUC otherwise. train.stop implies keep_best.",
        ),
    ] = False
    background: Annotated[
        bool, Key("execution", "Continue training while a checkpoint is written.")
    ] = True
    resume: Annotated[
        str,
        PathOr(("auto", "never"), urls=True),
        Key("execution", "Whether to resume: auto, never, or the path of a checkpoint."),
    ] = "auto"
    on_signal: Annotated[
        Literal["save", "end"],
        Key(
            "execution",
            "What a run does on the first Ctrl-C or SIGTERM: save a checkpoint and end, or "
            "only end. A second signal ends the run at once, except for a second SIGTERM "
            "within 5 s.",
        ),
    ] = "save"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportConfig:
    """Exports the run's checkpoints during training, as bundles and their deltas."""

    dir: Annotated[
        AnyPath,
        Example("out/model"),
        Key("execution", "Folder or URL for bundles and their deltas."),
    ]
    every_seconds: Annotated[
        float, Range(low=0), Key("execution", "Minimum time between two exports, in seconds.")
    ] = 600.0
    deltas: Annotated[
        int,
        Range(low=0),
        Key(
            "execution",
            "Number of deltas after each bundle. With 0, only bundles are written; other values "
            "need checkpoint.deltas above 0.",
        ),
    ] = 24
    rows: Annotated[
        Literal["as_trained", "float16", "int8"],
        Key("execution", "Number format of the exported table rows."),
    ] = "as_trained"
