"""Tests that several processes compile a function only once."""

import fcntl
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")
compiled = pytest.importorskip("sbpflow.runtime.compute.compiled")
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys, time
import numpy as np
from sbpflow.embedding.vocabulary.requests import by_owner
print("ready", flush=True)
sys.stdin.readline()
by_owner(np.arange(3), np.zeros(1, np.int64))
print(sum(by_owner.stats.cache_misses.values()))
"""


@pytest.mark.slow
def test_one_process_compiles_and_the_others_load(tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, text=True,
                         stdin=pipe, stdout=pipe)
        for _ in range(3)
    ]  # fmt: skip
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    found = []
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        found.append(int(process.communicate()[0]))
        assert process.returncode == 0
    assert sorted(found) == [0, 0, 1]


def test_a_process_waits_only_once_for_a_limited_time(monkeypatch):
    monkeypatch.setattr(compiled, "MOST_WAIT_S", 0.5)

    @compiled.compiled
    def double(values):
        return values * 2

    @compiled.compiled
    def many(values):
        return double(double(double(values)))

    name = f"{double.__module__}.{double.__qualname__}.lock"
    with (compiled.numba_cache() / name).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        start = time.monotonic()
        assert double(np.ones(2)).tolist() == [2, 2]
        assert time.monotonic() - start > 0.5
        compiling = compiled.MOST_WAIT_S = 100.0
        for values in (np.ones(2), np.ones(2, np.float32), np.ones((2, 2))):
            assert (many(values) == 8).all()
        assert time.monotonic() - start < compiling


def test_threads_do_not_wait_for_each_other(tmp_path):
    """A thread may hold numba's lock and need a file lock whose owner waits for numba's lock."""
    lock = tmp_path / "x.lock"
    with compiled._locked(lock), ThreadPoolExecutor(1) as threads:

        def lock_again():
            with compiled._locked(lock):
                return True

        assert threads.submit(lock_again).result(timeout=20)
    assert lock not in compiled._HELD
