"""Defines fixtures for all tests: ranks on gloo, on NCCL, and on rehearsed CUDA devices, a small
generated set, and a folder in memory.
"""

import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankPool

try:
    from hypothesis import settings
except ImportError:  # a GPU machine may lack hypothesis
    pass
else:  # no deadline, because tests are slow on a busy machine
    settings.register_profile("suite", deadline=None)
    settings.load_profile("suite")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs with SIGINT ignored, and processes started by tests would
    # inherit this.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    # Triton reads this variable at its first import; its kernels then run in Python on CPU tensors.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    """Collect tests without garbage collection, which would scan the thousands of tests again and
    again. With several workers, compile kernels once for all workers while they collect tests.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None and getattr(config.option, "numprocesses", None):
        if find_spec("numba"):
            subprocess.Popen([sys.executable, "-m", "tests.warm_up"], cwd=config.rootpath)
        return
    gc.disable()
    if worker is not None:
        _import_own_part(config, int(worker["workerid"][2:]), worker["workercount"])


def _import_own_part(config: pytest.Config, number: int, count: int) -> None:
    """Import every ``count``-th test file of the given folders before tests are collected.

    In a new checkout, pytest rewrites the assertions of each test file when it is imported, which
    takes half of the time of collecting the tests. Without this function, every worker would
    rewrite all files.
    """
    folders = [config.invocation_params.dir / arg for arg in config.args]
    paths = sorted(path for folder in folders for path in folder.rglob("test_*.py"))
    for path in paths[number::count]:
        try:
            import_module(".".join(path.relative_to(config.rootpath).with_suffix("").parts))
        except (ImportError, pytest.skip.Exception):  # reported when the file is collected
            pass


@pytest.hookimpl(tryfirst=True)  # before pytest selects the tests of -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of a test marked ``few(n)`` as slow, except n of them."""
    tests: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        few = item.get_closest_marker("few")
        if few and not item.get_closest_marker("slow"):
            tests.setdefault((item.nodeid.split("[")[0], few.args[0]), []).append(item)
    for (_, n), cases in tests.items():
        kept = _various(cases, n)
        for case in cases:
            if case not in kept:
                case.add_marker("slow")


def _various(cases: Sequence[Any], n: int) -> list[Any]:
    """Return n cases, each with as many values as possible that the cases before do not have; of
    equal ones, the last.
    """
    values = {case: {(k, repr(v)) for k, v in case.callspec.params.items()} for case in cases}
    chosen: list[Any] = []
    while len(chosen) < min(n, len(cases)):
        known = set().union(*(values[case] for case in chosen))
        left = [case for case in reversed(cases) if case not in chosen]
        chosen.append(max(left, key=lambda case: len(values[case] - known)))
    return chosen


def pytest_collection_finish() -> None:
    """Exempt the thousands of collected tests from garbage collection."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    needs_gpu = item.get_closest_marker("gpu") or item.get_closest_marker("nccl")
    if needs_gpu and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; torch sees none")


def _pools(folder_of: Any, device: str) -> Iterator[Callable[..., list[Any]]]:
    pools: dict[int, RankPool] = {}

    def run(
        world_size: int, fn: Callable[..., Any], *args: Any, checked: bool = False
    ) -> list[Any]:
        if world_size not in pools:
            folder = folder_of.mktemp(f"ranks-{device}-{world_size}")
            pools[world_size] = RankPool(world_size, folder, device)
        return pools[world_size].run(fn, *args, checked=checked)

    yield run
    for pool in pools.values():
        pool.stop()


@pytest.fixture(scope="session", autouse=True)
def _logs_of_torchrun(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Set the folder for the logs of torchrun; by default, it would leave a folder in TMPDIR."""
    os.environ["PET_LOG_DIR"] = str(tmp_path_factory.mktemp("torchrun"))


@pytest.fixture(autouse=True)
def _no_groups_left() -> Iterator[None]:
    """Destroy process groups, as the launcher does for a program that ends with an error."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def _cpu_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    yield from _pools(tmp_path_factory, "cpu")


@pytest.fixture
def ranks(
    request: pytest.FixtureRequest, _cpu_ranks: Callable[..., list[Any]]
) -> Callable[..., list[Any]]:
    """Return ``ranks(world_size, fn, *args)``, which runs ``fn(world, *args)`` on every rank, on
    CPU and gloo, and returns the ranks' results.

    All tests reuse the processes. Checked mode is on only in tests marked ``checked``.
    """
    return partial(_cpu_ranks, checked=request.node.get_closest_marker("checked") is not None)


@pytest.fixture(scope="session")
def nccl_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    """Like ``ranks``, but on CUDA and NCCL; for tests marked ``nccl``."""
    yield from _pools(tmp_path_factory, "cuda")


@pytest.fixture(scope="session")
def rehearsed_ranks(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., list[Any]]]:
    """Like ``nccl_ranks``, but without a GPU: tensors and rules come from ``tests/rehearsal``."""
    from tests.rehearsal.task import perform

    for run in _pools(tmp_path_factory, "rehearsed"):

        def rehearse(
            world_size: int, fn: Callable[..., Any], *args: Any, run: Any = run
        ) -> list[Any]:
            return run(world_size, perform, fn, *args)

        yield rehearse


@pytest.fixture(scope="session")
def synth_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return 6,000 generated rows with small vocabularies and the default crosses."""
    from sbpflow.data.__main__ import main

    folder = tmp_path_factory.mktemp("synth") / "set"
    words = ["synth", "--rows", "6000", "--vocab-scale", "0.0005", "--output", str(folder)]
    assert main(words) == 0
    return folder


@pytest.fixture
def memory() -> Iterator[Path]:
    """Yield a folder, in memory if possible, because syncing every save to a disk would be slow."""
    shared = Path("/dev/shm")  # noqa: S108  (made unique below)
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        yield Path(folder)
