"""Tests that prepare writes the same bytes on every engine, even if workers die or hang."""

import gzip
import os
import signal
import tempfile
import time
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from sbpflow.data import engine_backends
from sbpflow.data.__main__ import main
from sbpflow.data.engine import Engine, EngineOptions, Home, open_engine
from sbpflow.data.engine_backends import ENGINES, Threads
from sbpflow.data.prepare.options import PrepareOptions
from sbpflow.data.prepare.prepare import prepare
from sbpflow.data.prepare.split import parse_split
from sbpflow.errors import ConfigError, DataError
from sbpflow.runtime.compute.malloc import KEEP_FREED_MEMORY
from tests.data.engine_runs import (
    PHASES,
    deaths,
    kill_in_every_phase,
    options_of,
    write_tables,
)
from tests.data.engine_tasks import (
    dies_in_the_middle_of_its_result,
    fails,
    fails_unexpectedly,
    process_of,
    returns_a_lock,
    sleeps,
    surroundings,
)
from tests.data.rows import folder_bytes, genuine_rows


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    return write_tables(tmp_path_factory.mktemp("tables"))


@pytest.fixture(scope="module")
def clean(tables, tmp_path_factory):
    return folder_bytes(prepare(options_of(tables, tmp_path_factory.mktemp("clean") / "set")).path)


@pytest.fixture(scope="module")
def criteo():
    """Return options to prepare genuine rows in a temporary folder, and the bytes of the set."""
    with tempfile.TemporaryDirectory() as folder:
        with gzip.open(genuine_rows()) as file:
            lines = file.readlines()
        (Path(folder) / "rows").mkdir()
        for day in range(4):
            part = lines[day * len(lines) // 4 : (day + 1) * len(lines) // 4]
            (Path(folder) / "rows" / f"day_{day}").write_bytes(b"".join(part))
        options = PrepareOptions(
            inputs=(Path(folder) / "rows",),
            output=Path(folder) / "threads",
            transform="standardise",
            piece_bytes=1 << 22,
        )
        yield options, folder_bytes(prepare(options).path)


@pytest.fixture
def phases(tmp_path_factory, monkeypatch):
    """Let a worker of each phase die in its task; return a function that lists these phases."""
    return kill_in_every_phase(monkeypatch, tmp_path_factory.mktemp("killed"))


def check_kills(engine, phases, caplog):
    assert phases() == list(PHASES)
    if engine != "dask":  # Dask's scheduler repeats tasks without a message
        assert deaths(caplog) >= len(PHASES)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["processes", "ray", "dask"])
def test_a_worker_killed_in_every_phase_does_not_change_the_set(
    tables, clean, tmp_path, phases, monkeypatch, caplog, engine
):
    needs(engine)
    # Create several groups and ranges, so that these phases have several tasks.
    monkeypatch.setattr("sbpflow.data.prepare.count._GROUP_ROWS", (40, 40))
    prepare(options_of(tables, tmp_path / "set", engine))
    check_kills(engine, phases, caplog)
    assert folder_bytes(tmp_path / "set") == clean
    assert os.listdir(tmp_path) == ["set"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["processes", "ray", "dask"])
def test_a_worker_killed_in_every_phase_does_not_change_a_set_of_genuine_rows(
    criteo, phases, monkeypatch, caplog, engine
):
    needs(engine)
    options, expected = criteo
    monkeypatch.setattr("sbpflow.data.prepare.count._GROUP_ROWS", (1 << 13, 1 << 14))
    output, started = options.output.with_name(engine), EngineOptions(engine, wait_s=120)
    prepare(replace(options, output=output, engine=started))
    check_kills(engine, phases, caplog)
    assert folder_bytes(output) == expected


def needs(engine):
    if engine != "processes":
        pytest.importorskip({"ray": "ray", "dask": "distributed"}[engine])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ray", "dask"])
def test_workers_started_here_share_the_cpus_and_keep_freed_memory(engine):
    needs(engine)
    number = os.cpu_count()
    with open_engine(EngineOptions(engine, wait_s=120), number) as started:
        found = set(started.run(surroundings, range(4)))
    assert found == {("1", KEEP_FREED_MEMORY["MALLOC_TRIM_THRESHOLD_"], os.nice(0))}


@pytest.mark.slow
def test_a_dask_cluster_leaves_no_folder(tmp_path, monkeypatch):
    needs("dask")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with open_engine(EngineOptions("dask", wait_s=120), 1) as engine:
        assert list(engine.run(str, [1])) == ["1"]
        (folder,) = tmp_path.iterdir()
        assert list(folder.iterdir()), "the workers use it"
    assert list(tmp_path.iterdir()) == []


def test_the_temporary_directory_of_dask_is_created(tmp_path, monkeypatch):
    parent = tmp_path / "not" / "made"
    dask = Mock(**{"get.return_value": str(parent), "set.return_value": nullcontext()})
    monkeypatch.setattr(engine_backends, "_required", lambda *names: dask)
    with open_engine(EngineOptions("dask"), 1):
        (folder,) = parent.iterdir()
        assert dask.set.call_args.args[0]["temporary-directory"] == str(folder)
    assert list(parent.iterdir()) == []


@pytest.mark.few(1)
@pytest.mark.parametrize("split", ["ratio:0.6,0.2,0.2", "file:val=day_3*,test=day_4*"])
def test_the_set_does_not_depend_on_workers_and_groups(tables, tmp_path, monkeypatch, split):
    rule = {"split": parse_split(split)}
    prepare(options_of(tables, tmp_path / "one", workers=1, **rule))
    monkeypatch.setattr("sbpflow.data.prepare.count._GROUP_ROWS", (30, 30))
    monkeypatch.setattr("sbpflow.data.prepare.distinct.RANGE_VALUES", 9)
    monkeypatch.setattr("sbpflow.data.prepare.distinct._SAMPLED", 2)
    prepare(options_of(tables, tmp_path / "many", workers=5, **rule))
    assert folder_bytes(tmp_path / "many") == folder_bytes(tmp_path / "one")


@pytest.mark.slow
def test_a_killed_driver_continues_on_another_engine(tables, clean, tmp_path, monkeypatch):
    class KilledError(Exception):
        pass

    real, runs = Engine.run, []

    def run(self, function, items):
        runs.append(function.func.__name__)
        for number, result in enumerate(real(self, function, items)):
            if number == 2 and runs[-1] == "_encode" and runs[0] != "resumed":
                raise KilledError
            yield result

    monkeypatch.setattr(Engine, "run", run)
    with pytest.raises(KilledError):
        prepare(options_of(tables, tmp_path / "set", workers=1))
    runs[:] = ["resumed"]
    prepare(options_of(tables, tmp_path / "set", "processes", workers=2))
    assert "_count_group" not in runs
    assert folder_bytes(tmp_path / "set") == clean


def test_workers_that_prepared_an_earlier_set_use_the_new_one(tables, clean, tmp_path, monkeypatch):
    """Threads that keep their caches stand for a Dask cluster's workers, which outlive commands."""
    monkeypatch.setattr("sbpflow.data.engine.Cached.clear", lambda self: None)
    prepare(options_of(tables, tmp_path / "set", seed=8))
    prepare(options_of(tables, tmp_path / "set", overwrite=True))
    assert folder_bytes(tmp_path / "set") == clean


def test_the_partial_file_of_a_late_copy_of_a_task_is_removed(tables, clean, tmp_path, monkeypatch):
    def verify_while_a_copy_writes(job, *, key):
        (key[0] / "train-000000.npy.0.partial").touch()

    monkeypatch.setattr("sbpflow.data.prepare.prepare._verify", verify_while_a_copy_writes)
    prepare(options_of(tables, tmp_path / "set"))
    assert folder_bytes(tmp_path / "set") == clean


@pytest.mark.slow
def test_encoding_and_growing_run_on_processes(tables, tmp_path):
    prepare(options_of(tables, tmp_path / "old", spare=0.2))
    for words in (["encode"], ["prepare", "--grow", "--split", "time:1,0,0"]):
        words += ["--like", tmp_path / "old", "--input", tables / "day_0.csv", tables / "day_4.csv"]
        words = [*map(str, words), "--max-bad-fraction", "0.1", "--workers", "2", "--output"]
        for engine in ("threads", "processes"):
            assert main([*words, str(tmp_path / words[0] / engine), "--engine", engine]) == 0
        sets = [folder_bytes(tmp_path / words[0] / name) for name in ("threads", "processes")]
        assert sets[0] == sets[1]


class Elsewhere(Threads):
    """Runs calls in another folder, like the workers of a running cluster."""

    shares_memory = False

    def submit(self, function, *arguments):
        future, here = Future(), os.getcwd()
        os.chdir("/")
        try:
            future.set_result(function(*arguments))
        finally:
            os.chdir(here)
        return future


def test_relative_paths_are_those_of_the_command(tables, clean, tmp_path, monkeypatch):
    monkeypatch.setitem(ENGINES, "processes", Elsewhere)
    monkeypatch.chdir(tmp_path)
    options = options_of(tables, Path("set"), "processes")
    inputs = tuple(Path(os.path.relpath(path)) for path in options.inputs)
    prepare(replace(options, inputs=inputs))
    assert folder_bytes(tmp_path / "set") == clean
    words = ["--like", "set", "--input", str(inputs[0]), "--max-bad-fraction", "0.1"]
    assert main(["encode", *words, "--output", "new", "--engine", "processes"]) == 0


def test_the_former_option_part_is_rejected_with_its_replacement(tmp_path, capsys):
    words = ["--input", "a.tsv", "--output", str(tmp_path / "set"), "--part", "1/3"]
    assert main(["prepare", *words]) == 2
    assert "run one command with --engine ray or --engine dask" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (EngineOptions("spark"), "'spark' is unknown; use one of threads, processes, ray, dask"),
        (
            EngineOptions("threads", "auto"),
            "needs an engine with a cluster; use, for example, --engine ray",
        ),
        (EngineOptions("threads", wait_s=0), "--wait must be above 0, got 0; use, for example, 30"),
    ],
)
def test_invalid_engines_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        options.check()


class FakeBackend:
    """Completes calls with outcomes that the test chooses; ``answers`` maps items to lists of
    outcomes.
    """

    shares_memory, is_cluster, can_lose, lost = True, True, True, (ConnectionError,)

    def __init__(self, answers, num_workers=2):
        self.answers, self.number, self.submitted = answers, num_workers, []

    def num_workers(self):
        return self.number

    def submit(self, function, *arguments):
        item, future = arguments[-1], Future()
        self.submitted.append(item)
        outcomes = self.answers.get(item, [])
        outcome = outcomes.pop(0) if outcomes else (item, None)
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        elif outcome != "stuck":
            future.set_result(outcome)
        return future

    def cancel(self, futures):
        for future in futures:
            future.cancel()

    def state(self):
        return "2 workers"


def run_on(backend, items, wait_s=60.0):
    return list(Engine(EngineOptions("ray", wait_s=wait_s), backend).run(str, items))


def test_lost_tasks_are_repeated_and_results_have_the_order_of_the_items():
    lost = [ConnectionError(), ConnectionError()]
    assert run_on(FakeBackend({3: lost}), range(6)) == list(range(6))
    with pytest.raises(DataError, match="workers died in all 5 attempts at one task"):
        run_on(FakeBackend({3: [ConnectionError()] * 9}), range(6))


def test_a_stuck_cluster_ends_with_a_message(monkeypatch):
    monkeypatch.setattr("sbpflow.data.engine._POLL_S", 0.01)
    monkeypatch.setattr("sbpflow.data.engine._END_S", 0.1)
    with pytest.raises(
        DataError, match=r"no task has finished within 0.001\d* min \(waiting tasks: 1"
    ):
        run_on(FakeBackend({4: ["stuck", "stuck"]}), range(6), wait_s=0.1)


def test_a_straggler_is_repeated_on_an_idle_worker(monkeypatch):
    monkeypatch.setattr("sbpflow.data.engine._POLL_S", 0.01)
    monkeypatch.setattr("sbpflow.data.engine._SLOW_S", 0.05)
    backend = FakeBackend({4: ["stuck"]})
    assert run_on(backend, range(6)) == list(range(6))
    assert backend.submitted.count(4) == 2


def test_processes_return_errors_and_check_their_home(tmp_path):
    (tmp_path / "plan").write_text("abc")
    home = Home.of(tmp_path / "plan")
    with open_engine(EngineOptions("processes", wait_s=60), 1) as engine:
        engine.home = home
        assert list(engine.run(str, [1, 2])) == ["1", "2"]
        with pytest.raises(DataError, match="item 3\n  second line"):
            list(engine.run(fails, [3]))
    (tmp_path / "plan").write_text("other")
    with open_engine(EngineOptions("threads"), 1) as engine:
        engine.home = home
        with pytest.raises(ConfigError, match=r"sees different content in .*plan; use a folder"):
            list(engine.run(str, [1]))
        engine.home = Home((("sbpflow", "0.0.1"), *home.versions[1:]), home.mark, home.text)
        with pytest.raises(ConfigError, match=r"has sbpflow .*, but this process has 0\.0\.1"):
            list(engine.run(str, [1]))


def test_a_process_that_dies_while_it_is_idle_is_replaced(caplog):
    with open_engine(EngineOptions("processes", wait_s=120), 1) as engine:
        (first,) = engine.run(process_of, [1])
        os.kill(first, signal.SIGKILL)
        (second,) = engine.run(process_of, [1])
    assert second != first
    assert deaths(caplog) == 1


def test_a_process_that_dies_in_the_middle_of_its_result_is_noticed_at_once(tmp_path, caplog):
    function = partial(dies_in_the_middle_of_its_result, dead=tmp_path / "dead")
    began = time.monotonic()
    with open_engine(EngineOptions("processes", wait_s=120), 2) as engine:
        results = list(engine.run(function, range(6)))
    assert time.monotonic() - began < 60
    assert results == [bytes([item]) * (1 << 20) for item in range(6)]
    assert deaths(caplog) == 1, "the task of the dead process, and no other, is repeated"


def test_unexpected_errors_in_a_process_are_raised_with_their_traceback():
    with open_engine(EngineOptions("processes", wait_s=120), 1) as engine:
        with pytest.raises(RuntimeError, match=r"a result cannot be returned: .*lock"):
            list(engine.run(returns_a_lock, [1]))
        with pytest.raises(ValueError, match="7") as raised:
            list(engine.run(fails_unexpectedly, [7]))
    assert "in fails_unexpectedly" in raised.value.__notes__[0]


def test_a_stuck_process_ends_with_a_message(monkeypatch):
    monkeypatch.setattr("sbpflow.data.engine._END_S", 0.1)
    began = time.monotonic()
    with (
        pytest.raises(DataError, match=r"no task has finished within .* --wait MINUTES"),
        open_engine(EngineOptions("processes", wait_s=0.5), 1) as engine,
    ):
        list(engine.run(partial(sleeps), [1]))
    assert time.monotonic() - began < 60
