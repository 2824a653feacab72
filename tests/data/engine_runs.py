"""Prepares a table on an engine, and kills one of its workers in every phase."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from sbpflow.data.engine import Engine, EngineOptions
from sbpflow.data.prepare.options import PrepareOptions
from sbpflow.data.prepare.schema_file import read_schema
from sbpflow.data.prepare.split import parse_split
from tests.data.tables import SCHEMA, table, write_csv

FILES, ROWS = 5, 60
PHASES = (
    *("fetch_table", "_stage", "_count_group", "merge_range"),
    *("_build", "_fit_group", "_encode", "_verify"),
)


def write_tables(folder: Path) -> Path:
    """Write five files with every kind of column, of which the last is longer, and their schema."""
    rows = table(FILES * ROWS + 40, seed=3)
    for number in range(FILES):
        stop = (number + 1) * ROWS + 40 * (number == FILES - 1)
        write_csv(folder / f"day_{number}.csv", rows[number * ROWS : stop])
    (folder / "schema.yaml").write_text(SCHEMA)
    return folder


def options_of(folder: Path, output: Path, engine: str = "threads", **more) -> PrepareOptions:
    """Return the options to prepare the tables in small pieces."""
    settings = {"schema": read_schema(folder / "schema.yaml"), "crosses": (), "spare": 0.3}
    settings |= {"split": parse_split("time:0.7,0.1,0.2"), "keep_strings": True}
    settings |= {"max_bad_fraction": 0.1, "piece_bytes": 1 << 12}
    return PrepareOptions(
        inputs=tuple(sorted(folder.glob("day_*.csv"))),
        output=output,
        engine=EngineOptions(engine, wait_s=120.0),
        **{**settings, **more},
    )


def workers(engine: str) -> list[int]:
    """Return the engine's worker processes that this process started."""
    listed = subprocess.run(
        ["ps", "-wweo", "pid=,ppid=,args="], check=True, capture_output=True, text=True
    )
    lines = [line.split(None, 2) for line in listed.stdout.splitlines()]
    parents = {int(pid): int(parent) for pid, parent, *_ in lines}

    def is_ours(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    name = {"processes": "spawn_main", "dask": "spawn_main", "ray": "ray::_apply"}[engine]
    return [int(pid) for pid, _, *args in lines if args and name in args[0] and is_ours(int(pid))]


def kill_in_every_phase(monkeypatch, folder: Path) -> Callable[[], list[str]]:
    """Let a worker of each phase die in its task; return a function that lists these phases.

    A dying worker leaves a file with the name of its phase in ``folder``.
    """
    real = Engine.run

    def run(self, function, items):
        flag = folder / function.func.__name__
        return real(self, partial(dies_in_its_task, function=function, flag=flag), items)

    monkeypatch.setattr(Engine, "run", run)
    return lambda: [name for name in PHASES if (folder / name).exists()]


def dies_in_its_task(item: object, *, function: Callable[[object], object], flag: Path) -> object:
    """Run a task. The first task kills its process before its first file is complete, so that a
    partial file remains. A first task that writes no files kills its process before it returns its
    result.
    """
    try:
        flag.touch(exist_ok=False)
    except FileExistsError:
        return function(item)
    sys.addaudithook(lambda event, _: die() if event == "os.rename" else None)
    function(item)
    return die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def deaths(caplog) -> int:
    """Return the number of warnings about dead workers; each means that a task is repeated."""
    messages = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    return sum("a worker died" in message for message in messages)
