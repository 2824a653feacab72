"""Tests that after kills at random times, prepare still produces the same set, and reading still
delivers each row once.
"""

import json
import multiprocessing
import random
import shutil
import time

import pytest

from tests.data import victims
from tests.data.conftest import make_set
from tests.data.rows import folder_bytes, run_prepare, text_rows, write_rows
from tests.quick import quick


@pytest.fixture(scope="module")
def run_killed():
    """Return a function that runs another function in a process and kills the process; it returns
    False if the process ended first.

    The process is killed after ``seconds``, or as soon as ``when()`` is true.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.data.victims"])

    def run(function, arguments, seconds, when=None):
        ready = context.Event()
        process = context.Process(target=function, args=(ready, *arguments))
        process.start()
        assert ready.wait(60)
        deadline = time.monotonic() + seconds
        while when is not None and not when() and process.is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.join(0 if when is not None else seconds)
        if process.is_alive():
            process.kill()
            process.join()
            return True
        assert process.exitcode == 0
        return False

    return run


@pytest.mark.alone
@pytest.mark.parametrize("kills", [4, pytest.param(10, marks=pytest.mark.slow)])
def test_prepare_killed_at_random_moments_gives_the_identical_set(tmp_path, run_killed, kills):
    source = write_rows(tmp_path / "rows.tsv", text_rows(2500))
    began = time.monotonic()
    assert not run_killed(victims.prepares, (source, tmp_path / "clean"), 60)
    whole = time.monotonic() - began
    clean = folder_bytes(tmp_path / "clean")
    rng = random.Random(1)
    work, killed, with_work = tmp_path / "set.work", 0, 0
    while killed < kills:
        seconds = rng.uniform(0.05, 0.6) * whole
        killed += run_killed(victims.prepares, (source, tmp_path / "set"), seconds)
        with_work += work.exists()
        if (tmp_path / "set").exists():
            assert folder_bytes(tmp_path / "set") == clean
            shutil.rmtree(tmp_path / "set")
    assert not run_killed(victims.prepares, (source, tmp_path / "set"), 60)
    assert with_work >= kills // 2
    assert folder_bytes(tmp_path / "set") == clean
    assert not work.exists()


@pytest.mark.slow
def test_an_unfinished_run_is_not_mixed_with_one_of_other_options(tmp_path, run_killed):
    source = write_rows(tmp_path / "rows.tsv", text_rows(2500))
    encoded = tmp_path / "set.work" / "encoded"

    def has_encoded() -> bool:
        return encoded.exists() and any(encoded.iterdir())

    assert run_killed(victims.prepares, (source, tmp_path / "set"), 60, has_encoded)
    assert has_encoded()
    run_prepare(tmp_path / "set", source, min_count=9)
    run_prepare(tmp_path / "clean", source, min_count=9)
    assert folder_bytes(tmp_path / "set") == folder_bytes(tmp_path / "clean")


@pytest.mark.parametrize("seed", quick([1, 2], lambda n: n == 0))
def test_a_read_killed_at_any_step_delivers_every_row_once(tmp_path, run_killed, seed):
    make_set(tmp_path / "set", 20_000)
    rng, state_file = random.Random(seed), tmp_path / "state.json"
    worlds = iter([1, 3, 2, 4, 1, 2])
    killed = 0
    for world_size in worlds:
        arguments = (tmp_path / "set", state_file, world_size)
        killed += run_killed(victims.reads, arguments, rng.uniform(0.02, 0.2))
    run_killed(victims.reads, (tmp_path / "set", state_file, 2), 60)
    assert killed >= 1
    assert sorted(json.loads(state_file.read_text())["seen"]) == list(range(20_000))
