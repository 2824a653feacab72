"""Runs the ranks of ``sbpflow.fit`` in separate processes and shows their progress and errors."""

import os
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from sbpflow.commands import fit_rank
from sbpflow.config.load import dump_config
from sbpflow.config.schema import Config
from sbpflow.run.report.events import Event, check_event, time_of
from sbpflow.runtime.files.json_file import JsonError, parse_json, read_end
from sbpflow.runtime.files.run_folder import METRICS_FILE
from sbpflow.runtime.processes.launch import EXIT_INTERRUPT
from sbpflow.runtime.processes.start_ranks import start_ranks
from sbpflow.runtime.ranks.rank_errors import error_of_ranks
from sbpflow.training.progress import Progress

_READ_BYTES = 1 << 20  # more than the events of a log interval


def train_ranks(config: Config, ranks: int, folder: Path) -> None:
    """Train on ``ranks`` processes and show their progress; raise the ranks' error.

    The ranks exchange files with this process through ``folder``. An interrupt is forwarded to the
    ranks, which may save the run; KeyboardInterrupt is raised afterwards.
    """
    (folder / fit_rank.CONFIG_FILE).write_text(dump_config(config), encoding="utf-8")
    # The ranks must find the modules that this process can import.
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with _progress(config):
        code = start_ranks(
            [str(folder)], ranks, "ranks", module=fit_rank.__name__, environment=path
        )
    if code == EXIT_INTERRUPT:
        raise KeyboardInterrupt
    if code:
        raise error_of_ranks(folder, ranks, code)


@contextmanager
def _progress(config: Config) -> Generator[None]:
    """Show the progress that the rank processes write to their run folder."""
    began, ended = datetime.now(UTC), threading.Event()

    def follow() -> None:
        progress, shown, is_over = None, 0, False
        while not is_over:
            is_over = ended.wait(0.5)
            event = _last_step(config.run.dir / METRICS_FILE, began)
            if event is not None and event["step"] > shown:
                if progress is None:  # a resumed run does not begin at step 1
                    shown, bar, total = event["step"] - 1, config.train.progress, event["last_step"]
                    progress = Progress(total, visible=True, bar=bar, first_step=shown)
                for step in range(shown + 1, event["step"] + 1):
                    progress.advance(step)
                shown = event["step"]
                progress.interval(shown, event["loss"], event["samples_per_s"] or float("nan"), {})
        if progress is not None:
            progress.close()

    thread = threading.Thread(target=follow, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _last_step(file: Path, since: datetime) -> Event | None:
    """Return the last step event written after the time ``since``; read only the file's end."""
    try:
        lines = read_end(file, _READ_BYTES).splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            event = check_event(parse_json(line))
        except JsonError:  # the first and the last line may be incomplete
            continue
        if event["event"] == "step" or time_of(event) < since:
            return event if time_of(event) >= since else None
    return None
