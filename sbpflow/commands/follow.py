"""``sbpflow export --follow``: export the checkpoints of a run while it trains."""

import logging
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sbpflow.commands.saved_run import config_of_run, own_classes

if TYPE_CHECKING:
    from sbpflow.checkpoint.read import Checkpoint
    from sbpflow.config.schema import Config

LOG_FILE = "export.log"
_LOG = logging.getLogger(__name__)
_LOOK_S = 1.0
# The exporting process is not a rank, so it must not have the launcher's variables.
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")

Export = Callable[["Checkpoint"], Path | None]


def follow(args: Namespace) -> int:
    """Export new checkpoints until the run has finished, or the parent process has ended."""
    from sbpflow.checkpoint.commands import checkpoint_folder
    from sbpflow.checkpoint.run_file import read_run
    from sbpflow.errors import ConfigError
    from sbpflow.run.export.export import parse_rows

    parse_rows(args.rows)
    if not args.every_seconds >= 0 or args.deltas < 0:
        raise ConfigError(
            f"--every-seconds {args.every_seconds}, --deltas {args.deltas}: must be 0 or more; "
            "use, for example, --every-seconds 600 --deltas 24"
        )
    seen, due = "", time.monotonic()
    while True:
        folder = checkpoint_folder(args.follow)
        facts = read_run(folder)
        is_over = facts is not None and facts.status == "finished"
        if is_over or time.monotonic() >= due:
            before, seen = seen, _export_newest(folder, seen, args)
            if seen != before:
                due = time.monotonic() + args.every_seconds
        if is_over or (args.parent is not None and os.getppid() != args.parent):
            return 0
        time.sleep(_LOOK_S)


def _export_newest(folder: Path, seen: str, args: Namespace) -> str:
    """Export the newest checkpoint unless it is ``seen``; return what identifies it."""
    from sbpflow.checkpoint.folder import good_checkpoints
    from sbpflow.checkpoint.format import INDEX_FILE
    from sbpflow.commands.export import export_model
    from sbpflow.errors import CheckpointError
    from sbpflow.run.export.chain import export_next

    def write_base(checkpoint: "Checkpoint", target: Path) -> None:
        config = config_of_run(args, checkpoint)
        export_model(checkpoint, config, target, rows=args.rows, measured=False)

    try:
        checkpoint = next(good_checkpoints(folder), None)
        if checkpoint is None:
            return seen
        file = checkpoint.path / INDEX_FILE
        newest = f"{file} {file.stat().st_mtime_ns}"
        if newest != seen:
            written = export_next(checkpoint, args.output, args.deltas, write_base)
            if written is not None:
                print(f"{written}: weights of step {checkpoint.step}", flush=True)
        return newest
    except (CheckpointError, FileNotFoundError) as error:
        # The run may have removed the checkpoint meanwhile; then there is a newer one.
        _LOG.warning("%s; exporting the next checkpoint instead", error)
        return seen


@contextmanager
def exporting(config: "Config", checkpoints: Path, rank: int) -> Generator[None]:
    """Export the run's checkpoints in another process, as the group ``export`` says."""
    if config.export is None or rank:
        yield
        return
    log = config.run.dir / LOG_FILE
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER)}
    with log.open("ab") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "sbpflow", *_words(config, checkpoints)],
            env={**environment, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdout=sink,
            stderr=sink,
        )
    try:
        yield
    except BaseException:
        process.terminate()
        raise
    if code := process.wait():
        _LOG.error("export.dir: the export ended with exit code %d; see %s", code, log)


def _words(config: "Config", checkpoints: Path) -> list[str]:
    export = config.export
    if export is None:
        raise RuntimeError("nothing is exported")
    words = ["export", "--follow", str(checkpoints), "--output", str(export.dir)]
    words += ["--rows", export.rows, "--deltas", str(export.deltas)]
    words += ["--every-seconds", str(export.every_seconds), "--parent", str(os.getpid())]
    model, optimizers = own_classes(config)
    words += ["--model", model] if model else []
    return words + [word for name in optimizers for word in ("--optimizer", name)]
