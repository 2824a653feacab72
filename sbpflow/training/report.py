"""Writes the output of a run: log lines, metrics.jsonl, start.txt, tracker events, and a summary.

Only rank 0 writes files; on other ranks, writers do nothing.
"""

import errno
import io
import json
import logging
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import Literal

from tqdm.auto import tqdm

from sbpflow.config.load import dump_config
from sbpflow.config.metrics import METRICS
from sbpflow.config.schema import Config
from sbpflow.runtime.compute.versions import summary as version_summary
from sbpflow.runtime.files.run_folder import (
    BOARD_FOLDER,
    CHECKPOINTS_FOLDER,
    METRICS_FILE,
    PLAN_FILE,
    RUN_FILES,
    START_FILE,
    TRACE_FILE,
    set_aside,
)
from sbpflow.training.learning_rate import rate_factor
from sbpflow.training.loop import Result
from sbpflow.training.metrics import Evaluation
from sbpflow.training.progress import Progress
from sbpflow.training.rank_watch import RankTimes
from sbpflow.training.trackers import Tracker, close_trackers

logger = logging.getLogger(__name__)

Event = Literal["step", "ranks", "eval", "slice", "calibration", "final"]
Value = float | int | str | list[float] | list[int] | None
_NOT_SHOWN = ("move_", "growth.")


class _ProgressBarHandler(logging.Handler):
    """Writes to stderr without garbling a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stderr)
        except OSError as error:
            # The terminal of a run in the background was closed. tqdm's bars ignore this, too.
            if error.errno != errno.EIO:
                raise


def setup_logging(rank: int, level: int = logging.INFO) -> None:
    """Set up logging with the rank in every line. On rank 0, project packages log at ``level``; all
    other loggers use WARNING.

    The root logger stays at WARNING because FBGEMM logs its constructor arguments there at INFO.
    """
    handler = _ProgressBarHandler()
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(message)s", "%H:%M:%S")
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    for package in ("sbpflow", "models", "data", "planner"):
        logging.getLogger(package).setLevel(level if rank == 0 else logging.WARNING)


class MetricsWriter:
    """Writes ``run.dir/metrics.jsonl``, one JSON object per line.

    Files of an earlier run are moved to a folder ``previous-N``. If the run resumes, ``resumed``
    contains the step of the checkpoint and the length of metrics.jsonl at that step. The file is
    truncated to this length, and new lines are appended. If no line ends at this length, or the
    file is shorter but complete, it belongs to another run (run.dir has changed), and is moved.
    """

    def __init__(self, folder: Path, *, rank: int, resumed: tuple[int, int] | None = None) -> None:
        self._file = None
        if rank != 0:
            return
        folder.mkdir(parents=True, exist_ok=True)
        names = [*RUN_FILES, *(path.name for path in folder.glob(TRACE_FILE.format(rank="*")))]
        is_other = resumed and _is_of_another_run(folder / METRICS_FILE, resumed[1])
        if is_other:
            names.remove(CHECKPOINTS_FOLDER)  # it may contain the run's checkpoints
        earlier = set_aside(folder, names) if resumed is None or is_other else None
        if earlier is not None:
            logger.info("moved the files of an earlier run from %s to %s", folder, earlier)
        self._file = (folder / METRICS_FILE).open("a", encoding="ascii")
        if resumed is not None:
            _cut(self._file, resumed[1])

    @property
    def length(self) -> int:
        """Return the length of metrics.jsonl in bytes, or 0 on ranks that do not write the file."""
        return self._file.tell() if self._file is not None else 0

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, event: Event, values: Mapping[str, Value]) -> None:
        """Write one line with the current time, and flush the file. NaN and infinity become
        null.
        """
        if self._file is None:
            return
        finite = {name: _finite(value) for name, value in values.items()}
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._file.write(
            json.dumps({"event": event, "time": now, **finite}, allow_nan=False) + "\n"
        )
        self._file.flush()


def _is_of_another_run(path: Path, length: int) -> bool:
    """Return whether the file has ``length`` bytes or more, but no line ends at this length, or has
    fewer bytes, but is complete: a run writes its ``final`` event after its last checkpoint.
    """
    if length == 0 or not path.is_file():
        return False
    with path.open("rb") as file:
        file.seek(length - 1)
        if end := file.read(1):
            return end != b"\n"
        file.seek(0)
        return any(line.startswith(b'{"event": "final"') for line in file)


def _cut(file: TextIOWrapper, length: int) -> None:
    """Truncate the file to ``length`` bytes, which removes the lines written after the
    checkpoint. If the file is shorter, only an incomplete last line is removed, so that the next
    line does not continue it.
    """
    size = file.seek(0, io.SEEK_END)
    if size < length:
        logger.warning(
            "%s has %d bytes, but had %d at the checkpoint; lines are missing",
            file.name,
            size,
            length,
        )
        length = Path(file.name).read_bytes().rfind(b"\n") + 1
    file.truncate(length)
    file.seek(length)


def _finite(value: Value) -> Value:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Report:
    """A ``Reporter`` that writes to the log, metrics.jsonl, the trackers and the terminal.

    A report is a context manager. On ranks other than 0, its methods do nothing, so callers need
    not check their rank.
    """

    def __init__(
        self,
        config: Config,
        *,
        rank: int,
        num_steps: int,
        devices: Sequence[str],
        sections: Mapping[str, str],
        best: tuple[float, float] | None = None,
        resumed: tuple[int, int] | None = None,
        trackers: Callable[[int | None], Sequence[Tracker]] | None = None,
    ) -> None:
        """Log a short start summary and write the full summary to START_FILE.

        * ``devices``: one name per rank.
        * ``sections``: lines of text by title, such as "layouts", "kernels" and "memory per rank".
        * ``best``: the best possible (AUC, logloss), known only for generated data.
        * ``resumed``: see ``MetricsWriter``.
        * ``trackers``: a function that opens the trackers on rank 0, given the step at which the
          run resumes.
        """
        self._folder, self._rank, self._best = config.run.dir, rank, best
        self._trackers: Sequence[Tracker] = ()
        first_step = resumed[0] if resumed else None
        with ExitStack() as opened:  # closes what is open if the rest of the start fails
            self._metrics = MetricsWriter(self._folder, rank=rank, resumed=resumed)
            opened.callback(self._metrics.close)
            if trackers is not None and rank == 0:  # files of earlier runs have been moved by now
                self._trackers = trackers(first_step)
            opened.push(self._close_trackers)
            if rank == 0:
                summary = _start_summary(config, devices, sections)
                (self._folder / START_FILE).write_text(summary + "\n", encoding="utf-8")
                logger.info("%s", _start_lines(config, devices, num_steps))
            optimizer = config.optimizer
            self._rates = {
                "lr_sparse": (optimizer.sparse.lr, rate_factor(optimizer.of_tables)),
                "lr_dense": (optimizer.dense.lr, rate_factor(optimizer.of_dense)),
            }
            self._progress = Progress(
                num_steps, visible=rank == 0, bar=config.train.progress, first_step=first_step or 0
            )
            opened.callback(self._progress.close)
            self._opened = opened.pop_all()

    def __enter__(self) -> "Report":
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._opened.__exit__(error_type, error, traceback)

    def _close_trackers(self, error: type[BaseException] | None, *_: object) -> None:
        close_trackers(self._trackers, error)

    @property
    def metrics_bytes(self) -> int:
        """Return the current length of metrics.jsonl in bytes, for checkpoints."""
        return self._metrics.length

    def keep(self, name: str, text: str) -> None:
        """On rank 0, write ``text`` to the file ``name`` in the run folder."""
        if self._rank == 0:
            (self._folder / name).write_text(text, encoding="ascii")

    def advance(self, step: int, loss: float) -> None:
        """Record the end of a step."""
        self._progress.advance(step)

    def step(
        self,
        step: int,
        loss: float,
        samples_per_s: float,
        extra: Mapping[str, float],
    ) -> None:
        """Report a log interval. In ``extra``, the names of times end in ``_ms``.

        The times of moves (``move_*``) and the metrics of growing fields (``growth.*``) are written
        to metrics.jsonl but not logged.
        """
        scale = extra.get("lr_scale", 1.0)
        rates = {name: lr * factor(step) * scale for name, (lr, factor) in self._rates.items()}
        values = {"step": step, "loss": loss, "samples_per_s": samples_per_s, **extra, **rates}
        shown = {name: value for name, value in extra.items() if not name.startswith(_NOT_SHOWN)}
        self._progress.interval(step, loss, samples_per_s, shown)
        progress = self._progress
        values |= {"last_step": progress.num_steps, "eta_s": progress.eta_s(step)}
        self._write("step", step, values)

    def ranks(self, times: RankTimes) -> None:
        """Write each rank's times of a log interval to metrics.jsonl."""
        lists = {"step": times.step_ms, "data": times.data_ms, "wait": times.wait_ms}
        values = {f"rank_{name}_ms": [round(ms, 4) for ms in by] for name, by in lists.items()}
        slow = times.slow_rank
        named = {} if slow is None else {"slow_rank": slow, "slow_host": times.hosts[slow]}
        self._metrics.write("ranks", {"step": times.step, **values, **named})

    def evaluation(self, split: str, step: int, evaluation: Evaluation) -> None:
        """Report a scored split."""
        logger.info("step %d, %s: %s", step, split, describe_evaluation(evaluation))
        rows = {"step": step, "split": split, "num_rows": evaluation.num_rows}
        self._write("eval", step, {**rows, **figures_of(evaluation)}, name=split)
        if evaluation.calibration:
            bins = evaluation.calibration
            table = {
                "rows": [group.num_rows for group in bins],
                "predicted": [group.predicted for group in bins],
                "observed": [group.observed for group in bins],
            }
            self._metrics.write("calibration", {"step": step, "split": split, **table})
        for part in evaluation.slices:
            self._metrics.write("slice", {"step": step, "split": split, **asdict(part)})

    def final(
        self,
        result: Result,
        notes: Mapping[str, str] | None = None,
        peak_memory_bytes: Sequence[int] = (),
    ) -> None:
        """Write the ``final`` event, with the peak memory of each rank, and log the end summary,
        with ``notes`` by title.
        """
        test = result.test
        values: dict[str, Value] = {
            "val_auc": result.val.auc if result.val else None,
            "auc": test.auc if test else None,
            "logloss": test.logloss if test else None,
            "samples_per_s": result.samples_per_s,
            "steps": result.steps,
        }
        if test:
            values |= {k: v for k, v in figures_of(test).items() if k not in values}
        if result.best_step is not None:
            values["best_step"] = result.best_step
        for name, evaluation in (("last_val", result.last_val), ("last", result.last_test)):
            if evaluation is not None:
                values |= {f"{name}_{m}": getattr(evaluation, m) for m in ("auc", "logloss")}
        if self._best is not None:
            values |= {"best_auc": self._best[0], "best_logloss": self._best[1]}
        self._progress.close()
        if peak_memory_bytes:
            values["peak_memory_bytes"] = list(peak_memory_bytes)
        self._write("final", result.steps, values)
        files = [self._folder / name for name in (METRICS_FILE, BOARD_FOLDER, PLAN_FILE)]
        written = [str(path) for path in files if path.exists()]
        logger.info("%s", _end_summary(values, written, {**result.notes, **(notes or {})}))

    def _write(
        self, event: Event, step: int, values: Mapping[str, Value], name: str | None = None
    ) -> None:
        """Write an event to metrics.jsonl, and log its numbers to the trackers as ``name/KEY``."""
        self._metrics.write(event, values)
        numbers = {
            f"{name or event}/{key}": value
            for key, value in values.items()
            if isinstance(value, int | float) and math.isfinite(value)
            if key not in ("step", "last_step")
        }
        for tracker in self._trackers:
            tracker.log(step, numbers)


def figures_of(evaluation: Evaluation) -> dict[str, float | int | None]:
    """Return the metrics by name. Metrics that are None are omitted, except AUC and logloss."""
    values = {name: getattr(evaluation, name) for name in METRICS}
    values |= {
        "calibration": evaluation.calibration_ratio,
        "predicted": evaluation.predicted,
        "positives": evaluation.positives,
        "auc_error": evaluation.auc_error,
    }
    required = ("auc", "logloss")
    return {name: v for name, v in values.items() if v is not None or name in required}


def describe_evaluation(evaluation: Evaluation) -> str:
    """Return one line of text for the evaluation, and another one for each sliced column."""
    figures, parts = figures_of(evaluation), list[str]()
    for name, kind in METRICS.items():
        if name in figures:
            parts.append(f"{kind.label} {_show(figures[name])}")
    if evaluation.no_auc:
        parts[0] += f" ({evaluation.no_auc})"
    if evaluation.auc_error is not None:
        parts[0] += f" (from a histogram, error at most {evaluation.auc_error:.1e})"
    if evaluation.predicted is not None:
        ratio = _show(evaluation.calibration_ratio)
        parts.append(
            f"calibration {ratio} (predicted {evaluation.predicted:,.1f} of "
            f"{evaluation.positives:,} positives)"
        )
    parts.append(f"{evaluation.num_rows} rows")
    within = "".join(
        f"\n  AUC within {part.column}: {_show(part.auc)}, the row-weighted mean over the values "
        f"that have both classes ({part.num_rows:,} rows)"
        for part in evaluation.slices
        if part.value is None
    )
    return ", ".join(parts) + within


def _start_lines(config: Config, devices: Sequence[str], num_steps: int) -> str:
    """Return a four-line summary, which is short enough to remain on the screen with the first
    step.
    """
    kinds = "; ".join(f"{count} x {name}" for name, count in Counter(devices).items())
    several = "s" if len(devices) > 1 else ""
    versions = version_summary()
    return (
        f"start: {config.model.name} on {len(devices)} rank{several} ({kinds})\n"
        f"  {num_steps:,} steps of {config.data.batch_size * config.train.accumulate:,} rows "
        f"from {config.data.path}, seed {config.run.seed}\n"
        f"  python {versions['python']}, torch {versions['torch']}\n"
        f"  configuration, versions and plan: {config.run.dir / START_FILE}"
    )


def _start_summary(config: Config, devices: Sequence[str], sections: Mapping[str, str]) -> str:
    """Return START_FILE's text: configuration, versions, devices, and the caller's sections."""
    blocks = {
        "config": dump_config(config),
        "versions": "\n".join(f"{name} {version}" for name, version in version_summary().items()),
        "devices": "\n".join(f"rank {rank}: {device}" for rank, device in enumerate(devices)),
        **sections,
    }
    return "\n".join(_block(title, body) for title, body in blocks.items())


def _end_summary(
    values: Mapping[str, Value], files: Sequence[str], notes: Mapping[str, str]
) -> str:
    """Return the lines of the end summary: the values of the ``final`` event, the notes, and the
    run's files."""
    width = max(len(name) for name in values)
    figures = "\n".join(f"{name:<{width}}  {_show(value)}" for name, value in values.items())
    blocks = {"result": figures, **notes, "files": "\n".join(files)}
    return "end\n" + "\n".join(_block(title, body) for title, body in blocks.items())


def _block(title: str, body: str) -> str:
    return "\n".join([f"{title}:", *(f"  {line}" for line in body.rstrip().splitlines())])


def _show(value: Value) -> str:
    if value is None:
        return "none"
    if isinstance(value, list):
        return ", ".join(_show(item) for item in value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)
