"""``sbpflow export --follow``: export the checkpoints of a run while it trains."""

import logging
import os
import re
import subprocess
import sys
import time
import uuid
from argparse import Namespace
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from sbpflow.commands.saved_run import config_of_run, own_classes
from sbpflow.errors import ConfigError
from sbpflow.runtime.files.file_lock import HeldError, hold, sign
from sbpflow.runtime.files.remote_path import RemotePath
from sbpflow.runtime.files.run_folder import CHECKPOINTS_FOLDER

if TYPE_CHECKING:
    from sbpflow.checkpoint.format import Index
    from sbpflow.checkpoint.read import Checkpoint
    from sbpflow.config.schema import Config
    from sbpflow.run.export.chain import WriteBase
    from sbpflow.runtime.files.remote_path import AnyPath

LOG_FILE, LOCK_FILE = "export.log", ".export.lock"
_LOG = logging.getLogger(__name__)
_LOOK_S = 1.0
# The exporting process is not a rank, so it must not inherit the launcher's variables.
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")


def follow(args: Namespace) -> int:
    """Export new checkpoints until the run finishes or the parent process ends."""
    from sbpflow.checkpoint.commands import checkpoint_folder
    from sbpflow.commands.export import export_model
    from sbpflow.run.export.export import parse_rows

    def write_base(checkpoint: "Checkpoint", target: Path) -> None:
        export_model(
            checkpoint,
            config_of_run(args, checkpoint),
            target,
            rows=args.rows,
            pt2=args.pt2,
            compiled=args.compile,
            onnx=args.onnx,
            measured=False,
            has_spare_rows=True,
        )

    parse_rows(args.rows)
    inside = args.follow / CHECKPOINTS_FOLDER
    run = args.follow.parent if args.follow.name == CHECKPOINTS_FOLDER else args.follow
    check_output("--output", args.output, run, (checkpoint_folder(args.follow), inside))
    with exports_in(args.output) as (output, publish), _only_export(args):
        _follow(args, output, publish, write_base)
    return 0


@contextmanager
def _only_export(args: Namespace) -> Generator[None]:
    """Lock a local output, because exports remove the bundles and unfinished files of others. The
    exporter of a run waits for another one, which may belong to a killed start of the run.
    """
    if isinstance(args.output, RemotePath):
        yield
        return
    args.output.mkdir(parents=True, exist_ok=True)
    is_first = True
    while True:
        try:
            file = hold(args.output / LOCK_FILE)
            break
        except HeldError as error:
            text = f"--output: another export{error} is writing {args.output}"
            if args.parent is None or os.getppid() != args.parent or _is_over(args.follow):
                raise ConfigError(
                    f"{text}; wait until it ends, or use another folder, such as {args.output}-2"
                ) from None
            if is_first:
                print(f"waiting: {text}", flush=True)
            is_first = False
        time.sleep(_LOOK_S)
    with file:
        sign(file)
        yield


def _is_over(run: "AnyPath") -> bool:
    from sbpflow.checkpoint.commands import checkpoint_folder
    from sbpflow.checkpoint.run_file import read_run

    facts = read_run(checkpoint_folder(run))
    return facts is not None and facts.status == "finished"


def _follow(
    args: Namespace, output: Path, publish: Callable[[], None], write_base: "WriteBase"
) -> None:
    from sbpflow.checkpoint.commands import checkpoint_folder
    from sbpflow.run.export.chain import export_newest

    seen, due, unpublished = "", time.monotonic(), ""
    known: dict[str, Index] = {}
    # An exporter that a run has started can start before the run creates its folder.
    if args.parent is None and not args.follow.exists():
        print(f"waiting for {args.follow}, which does not exist yet", flush=True)
    while True:
        is_over = False
        try:
            folder, is_over = checkpoint_folder(args.follow), _is_over(args.follow)
            if is_over or time.monotonic() >= due:
                newest, written = export_newest(
                    folder, seen, output, args.deltas, write_base, is_over=is_over, known=known
                )
                if unpublished := written or unpublished:
                    publish()
                    print(f"{time.strftime('%H:%M:%S')} {unpublished}", flush=True)
                    unpublished = ""
                if newest != seen:
                    seen, due = newest, time.monotonic() + args.every_seconds
                    known = {}  # otherwise, it would grow with each checkpoint
        except BrokenPipeError:  # of stdout; ``until_nobody_reads`` ends the command
            raise
        except OSError as error:  # of a full disk or of an object store, for example
            if is_over:
                raise
            _LOG.warning("%s; trying again in %g s", error, args.every_seconds)
            due = time.monotonic() + args.every_seconds
        if is_over or (args.parent is not None and os.getppid() != args.parent):
            return
        time.sleep(_LOOK_S)


@contextmanager
def exports_in(output: "AnyPath") -> Generator[tuple[Path, Callable[[], None]]]:
    """Yield a local folder for exports, and a function to call after each export.

    For a URL, the function uploads the exports. The folder is then temporary, so each new process
    starts with a new bundle.
    """
    if not isinstance(output, RemotePath):
        yield output, lambda: None
        return
    from sbpflow.run.export.bundle import BUNDLE_FILES
    from sbpflow.runtime.files.upload import upload
    from sbpflow.serving.deltas import BUNDLE_FILE, DELTA_FILE, DELTAS_FOLDER

    owned = re.compile(rf"step-\d+(\.old)?/({BUNDLE_FILES.pattern}|{DELTAS_FOLDER}/.+)")
    done: dict[str, tuple[int, int]] = {}
    with TemporaryDirectory(prefix="sbpflow-") as name:
        folder, last = Path(name), (BUNDLE_FILE, DELTA_FILE)

        def publish() -> None:
            stamps = _stamps(folder)
            # A rewritten bundle has the names, and often the sizes, of the files that it replaces.
            unchanged = [name for name, stamp in stamps.items() if done.get(name) == stamp]
            upload(folder, output, owned=owned, last=last, done=unchanged)
            done.clear()
            done.update(stamps)

        yield folder, publish


def _stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the inode and modification time of each file below ``folder``."""
    facts = {path: path.stat() for path in folder.rglob("*") if path.is_file()}
    return {
        str(path.relative_to(folder)): (stat.st_ino, stat.st_mtime_ns)
        for path, stat in facts.items()
    }


def check_output(
    key: str, folder: "AnyPath", run: "AnyPath", checkpoints: "Sequence[AnyPath]"
) -> None:
    """Raise ConfigError if ``folder`` is the run folder ``run`` or one of the folders
    ``checkpoints``, contains checkpoints, or is itself a bundle: exports would replace checkpoints
    or be taken for checkpoints, or servers would load only that bundle. Also raise ConfigError if
    ``folder`` cannot be written to.
    """
    from sbpflow.checkpoint.folder import list_checkpoints
    from sbpflow.checkpoint.format import INDEX_FILE
    from sbpflow.serving.deltas import BUNDLE_FILE

    is_own = folder.resolve() in [path.resolve() for path in checkpoints]
    if is_own or any((path / INDEX_FILE).is_file() for path in list_checkpoints(folder)):
        raise ConfigError(
            f"{key}: {folder} is a folder of checkpoints, which the step-N exports would replace; "
            f"use another folder, such as {folder}-live"
        )
    if folder.resolve() == run.resolve():
        raise ConfigError(
            f"{key}: {folder} is the run folder, in which the step-N exports would be taken for "
            f"checkpoints; use another folder, such as {folder / 'live'}"
        )
    if (folder / BUNDLE_FILE).is_file():
        raise ConfigError(
            f"{key}: {folder} is itself a bundle, and servers would not load the step-N exports "
            f"written to it; use another folder, such as {folder}-live"
        )
    _check_writable(key, folder)


def _check_writable(key: str, folder: "AnyPath") -> None:
    """Raise ConfigError if files cannot be written to ``folder``, for example because a bucket does
    not exist. After the start, an exporter would only log such errors, and try again.
    """
    from sbpflow.config.checks import writable_folder

    if isinstance(folder, Path):
        writable_folder(key, folder, "out/live")
        return
    file = folder / f".{uuid.uuid4().hex}"
    try:
        file.write_bytes(b"test")
        file.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{key}: {error}; use a URL that you can write to, or a local folder"
        ) from error


@contextmanager
def exporting(config: "Config", checkpoints: "AnyPath", rank: int) -> Generator[None]:
    """Export the run's checkpoints in a separate process, as the ``export`` group configures."""
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


def _words(config: "Config", checkpoints: "AnyPath") -> list[str]:
    export = config.export
    if export is None:
        raise RuntimeError("no export is configured")
    words = ["export", "--follow", str(checkpoints), "--output", str(export.dir)]
    words += ["--rows", export.rows, "--deltas", str(export.deltas)]
    words += ["--every-seconds", str(export.every_seconds), "--parent", str(os.getpid())]
    model, optimizers = own_classes(config)
    words += ["--model", model] if model else []
    return words + [word for name in optimizers for word in ("--optimizer", name)]
