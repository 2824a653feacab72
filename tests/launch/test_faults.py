"""Tests that disk and memory faults give one clear message and an exit code, and that saved files
survive.
"""

import ast
import contextlib
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sbpflow.checkpoint.folder import good_checkpoints, partial_folder, publish
from sbpflow.checkpoint.format import Index, SavedTensor, whole_of
from sbpflow.checkpoint.write import Part, write_parts
from sbpflow.config.checks import run_dir
from sbpflow.config.schema import Config, RunConfig
from sbpflow.data import open_loader
from sbpflow.errors import CheckpointError, ConfigError, DataError
from sbpflow.models.wdl import WdlConfig
from sbpflow.runtime.processes.launch import classify
from sbpflow.training.report import MetricsWriter
from tests.data.conftest import make_set
from tests.deadlines import run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator["Disk"]:
    """Yield an 8 MiB disk; only root can create such a disk."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("a small disk needs root and the program mount")
    made = Disk(tmp_path / "disk")
    yield made
    subprocess.run(["umount", "--lazy", str(made.folder)], check=True)


class Disk:
    """A mounted in-memory file system."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self._mount("-t", "tmpfs", "-o", "size=8m", "tmpfs")

    def make_read_only(self) -> None:
        self._mount("-o", "remount,ro")

    def _mount(self, *words: str) -> None:
        done = subprocess.run(["mount", *words, str(self.folder)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")


def save(folder: Path, step: int, num_bytes: int) -> Path:
    partial = partial_folder(folder, step, "ab")
    partial.mkdir()
    values = torch.full((num_bytes // 64, 16), float(step))
    ((_, piece),) = write_parts(
        partial / "rank-0.bin",
        [Part(name="t", place=whole_of(tuple(values.shape)), values=values)],
    )
    saved = SavedTensor(shape=tuple(values.shape), dtype=values.dtype, pieces=(piece,))
    index = Index(step=step, run="r", tensors={"t": saved}, files={"rank-0.bin": num_bytes})
    return publish(folder, partial, index)


def test_a_full_checkpoint_disk_is_reported_and_the_last_checkpoint_is_kept(disk):
    save(disk.folder, 1, 5 << 20)
    with pytest.raises(CheckpointError, match=r"rank-0\.bin cannot be written \(no space left"):
        save(disk.folder, 2, 5 << 20)
    (left,) = good_checkpoints(disk.folder)
    left.verify()
    assert left.step == 1


def test_a_full_metrics_disk_gives_one_message(disk):
    writer = MetricsWriter(disk.folder, rank=0)
    (disk.folder / "filler").write_bytes(bytes(7 << 20))
    line = {"step": 1, "loss": 0.5, "text": "x" * 1000}
    with pytest.raises(OSError, match="No space left on device") as caught:
        all(writer.write("step", line) is None for _ in range(100_000))
    with contextlib.suppress(OSError):
        writer.close()
    reason, code = classify(caught.value)
    assert reason.text.startswith("no space left on device: free some space where this run writes")
    assert (reason.kind, code) == ("mistake", 2)


def test_a_read_only_folder_is_rejected_at_the_start(disk):
    disk.make_read_only()
    config = Config(model=WdlConfig(), run=RunConfig(dir=disk.folder / "run"))
    with pytest.raises(ConfigError, match=r"run\.dir: .* is not writable \(read-only file"):
        run_dir(config)


def test_a_folder_that_becomes_read_only_keeps_its_checkpoints(disk):
    save(disk.folder, 1, 1 << 20)
    disk.make_read_only()
    with pytest.raises(OSError, match="Read-only file system") as caught:
        save(disk.folder, 2, 1 << 20)
    assert classify(caught.value)[1] == 2
    (left,) = good_checkpoints(disk.folder)
    left.verify()


OUT_OF_MEMORY = """
    import resource
    from sbpflow.runtime.processes.launch import run_main

    def main():
        import torch
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
        torch.empty(16 << 30, dtype=torch.uint8)

    run_main(main)
"""


def test_a_failed_allocation_gives_one_message_with_remedies(tmp_path):
    done = script(tmp_path, OUT_OF_MEMORY)
    assert done.returncode == 2
    assert "error: out of memory: you tried to allocate 17179869184 bytes" in done.stderr
    assert "; RLIMIT_AS limits this process to 8.59 GB; `sbpflow explain`" in done.stderr
    assert "`sbpflow explain` prints the memory that each rank needs" in done.stderr
    assert "Traceback" not in done.stderr


CUT_SHORT = """
    import os, sys
    import numpy as np
    from sbpflow.data.format.npy import map_array, write_array
    from pathlib import Path

    path = Path(sys.argv[1]) / "a.npy"
    write_array(path, np.zeros(1 << 20, dtype=np.int32))
    rows = map_array(path, "<i4", (1 << 20,))
    print(rows[-1], flush=True)
    os.truncate(path, 4096)
    print(rows[-1], flush=True)
"""


def test_a_shard_truncated_while_it_is_read_ends_the_rank_by_sigbus(tmp_path):
    done = script(tmp_path, CUT_SHORT, str(tmp_path))
    assert done.stdout.split() == ["0"]
    assert done.returncode == -7  # SIGBUS; the other ranks report the rank's number


def script(folder: Path, source: str, *words: str) -> subprocess.CompletedProcess[str]:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(source))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return run([sys.executable, str(path), *words], 60, env=env)


def test_no_wait_depends_on_the_clock_of_the_day():
    """Setting the system clock during a run must not affect deadlines.

    Only modules that report the time of day may read the clock.
    """
    reports = {"run/execution/node_checks.py", "training/prometheus.py"}
    asked = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "sbpflow").rglob("*.py"))
        if str(path.relative_to(ROOT / "sbpflow")) not in reports
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in {("time", "time"), ("time", "time_ns")}
    ]
    assert asked == []


def test_a_missing_shard_is_named_before_the_first_step(tmp_path):
    manifest = make_set(tmp_path / "set", 50)
    shard = tmp_path / "set" / manifest.shards("train")[0].file
    shard.unlink()
    with pytest.raises(DataError, match="No such file") as caught:
        open_loader(manifest, batch_size=10, backend="memmap").epoch(0)
    assert str(shard) in str(caught.value)
