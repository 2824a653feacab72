"""What a run leaves to read: log lines, metrics.jsonl, TensorBoard, and the two summaries.

Only rank 0 writes files; the others hold a writer that does nothing. No training logic here.
"""

import json
import logging
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from tqdm import tqdm

from sbpflow.config import Config, dump_config
from sbpflow.versions import summary as version_summary

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)

Event = Literal["step", "eval", "final"]
Value = float | int | str | None
METRICS_FILE = "metrics.jsonl"


class _BesideTheBar(logging.Handler):
    """Writes to stderr without tearing a progress bar that is on screen."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


def setup_logging(rank: int) -> None:
    """Rank in every line; rank 0 tells all from INFO up, the others only warnings."""
    handler = _BesideTheBar()
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(message)s", "%H:%M:%S")
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO if rank == 0 else logging.WARNING)


class MetricsWriter:
    """``run.dir/metrics.jsonl``, one JSON object per line, and TensorBoard where installed.

    A file of an earlier run becomes metrics.previous.jsonl; ``append`` goes on with it instead.
    """

    def __init__(self, folder: Path, *, rank: int, append: bool = False) -> None:
        self._file = None
        self._board: SummaryWriter | None = None
        if rank != 0:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS_FILE
        if path.exists() and not append:
            path.replace(path.with_name("metrics.previous.jsonl"))
        self._file = path.open("a", encoding="ascii")
        self._board = _tensorboard(folder / "tensorboard")

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()

    def write(self, event: Event, values: Mapping[str, Value]) -> None:
        """One line, on disk when this returns; NaN and infinity are written as null.

        ``values`` names its own ``step`` (or ``steps``, in the final event), TensorBoard's x axis.
        """
        if self._file is None:
            return
        finite = {name: _finite(value) for name, value in values.items()}
        self._file.write(json.dumps({"event": event, **finite}, allow_nan=False) + "\n")
        self._file.flush()
        step = finite.get("step", finite.get("steps"))
        for name, value in finite.items():
            if self._board is not None and name != "step" and isinstance(value, int | float):
                self._board.add_scalar(f"{event}/{name}", value, step)


def _finite(value: Value) -> Value:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tensorboard(folder: Path) -> "SummaryWriter | None":
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.info("TensorBoard is not installed; metrics go to %s only", METRICS_FILE)
        return None
    return SummaryWriter(str(folder))


def start_summary(
    config: Config, *, world_size: int, devices: Iterable[str], sections: Mapping[str, str]
) -> str:
    """What is about to run: resolved config, versions, devices, then the caller's sections.

    ``sections`` maps a title (layouts, kernels, memory per rank) to its lines.
    """
    versions = "\n".join(f"{name} {version}" for name, version in version_summary().items())
    ranks = "\n".join(f"rank {rank}: {device}" for rank, device in enumerate(devices))
    blocks = {
        "config": dump_config(config),
        "versions": versions,
        f"devices, {world_size} ranks": ranks,
        **sections,
    }
    return "\n".join(_block(title, body) for title, body in blocks.items())


def end_summary(values: Mapping[str, Value], files: Iterable[Path]) -> str:
    """The figures of the ``final`` event, and where the files of the run are."""
    width = max((len(name) for name in values), default=0)
    figures = "\n".join(f"{name:<{width}}  {_show(value)}" for name, value in values.items())
    written = "\n".join(str(path) for path in files)
    return "\n".join([_block("result", figures), _block("files", written)])


def _block(title: str, body: str) -> str:
    return "\n".join([f"{title}:", *(f"  {line}" for line in body.rstrip().splitlines())])


def _show(value: Value) -> str:
    if value is None:
        return "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
