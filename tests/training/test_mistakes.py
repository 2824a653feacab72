"""Tests that user mistakes with train_wdl.py give one readable message, no traceback, and no
running rank.
"""

import json
import os
import re
import signal
import subprocess
import time
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

import train_wdl
from sbpflow.commands.explain import explain
from sbpflow.data.format.manifest import load_manifest, write_manifest
from sbpflow.data.format.npy import file_crc32
from sbpflow.errors import ConfigError, DataError, TrainingError
from sbpflow.models.wdl import WdlConfig, WideConfig
from sbpflow.run.model.spec import Fields
from tests.deadlines import Deadline, output_of
from tests.torchrun import torchrun

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs/scheme1.yaml")

MISTAKES = {
    "unknown key": (
        ["train.max_step=3"],
        "train.max_step: unknown key; did you mean train.max_steps",
    ),
    "wrong type": (["data.batch_size=many"], "data.batch_size: many (str) is not a whole number"),
    "unknown scheme": (["parallel.scheme=4"], "parallel.scheme: 4"),
    "no such data": (["data.path=nowhere"], "data.path: nowhere does not exist"),
    "absent cross": (
        ["model.wide.crosses=[[C1, C9]]"],
        "model.wide.crosses: the data has no cross C1xC9 (it has C1xC2, C3xC4); prepare "
        "the data again with --crosses C1xC9, let",
    ),
    "batch too small": (
        ["data.batch_size=3"],
        "3 is less than the number of ranks",
    ),
    "too few columns": (
        ["model.embedding_dim=3"],
        "S(1) needs at least one column for each of 4 ranks, but deep.C1 has 3",
    ),
    "pattern without table": (
        ["parallel.tables.deep.C77={sbp: B}"],
        "parallel.tables.deep.C77 matches no table",
    ),
    "rank outside": (
        ["parallel.tables.deep.C3={sbp: S(0), ranks: [0, 7]}"],
        "parallel.tables.deep.C3.ranks: [7] are not in a world of 4",
    ),
    "not an override": (["--", "seed"], "'seed' is not a setting; write key=value"),
}


@pytest.fixture
def four_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment of rank 0 of 4; mistakes must be found before ranks connect."""
    for key, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")  # nothing listens there, so continuing would fail


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_reported_before_ranks_connect(four_ranks, synth_set, name):
    words, expected = MISTAKES[name]
    with pytest.raises((ConfigError, DataError)) as caught:
        train_wdl.main(["--config", CONFIG, f"data.path={synth_set}", *words])
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("cross", "message"),
    [
        (("C1", "C99"), "C1xC99: C99 is not a sparse column of the data; choose from C1, C2, C3"),
        (("C2", "C1"), r"the data contains this cross as C1xC2, not as C2xC1; write \[C1, C2\]"),
        (
            ("C2", "C3"),
            "the data has no cross C2xC3 .*C1xC2.*; .* --crosses C2xC3",
        ),
    ],
)
def test_missing_crosses_explain_what_to_do(cross, message):
    config = WdlConfig(wide=WideConfig(crosses=(cross,)))
    with pytest.raises(ConfigError, match=message):
        config.spec(Fields.of(["I1"], {"C1": 5, "C2": 5, "C3": 5}, {"C1xC2": 9}))


def test_unknown_columns_of_crosses_are_reported_first():
    config = WdlConfig(wide=WideConfig(crosses=(("C1", "C3"), ("C1", "C99"))))
    with pytest.raises(ConfigError, match="C1xC99: C99 is not a sparse column"):
        config.spec(Fields.of(["I1"], {"C1": 5, "C2": 5, "C3": 5}))


def test_explain_needs_a_positive_world(synth_set):
    with pytest.raises(ConfigError, match="--ranks must be between 1 and 65536, got 0"):
        explain(["--config", CONFIG, "--ranks", "0", f"data.path={synth_set}"])
    with pytest.raises(ConfigError, match="--ranks must be between 1 and 65536, got 1000000000"):
        explain(["--config", CONFIG, "--ranks", "1000000000", f"data.path={synth_set}"])


def test_a_wrong_pair_of_torch_and_fbgemm_is_named(monkeypatch, four_ranks, synth_set):
    real = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda name: "1.9.0" if "fbgemm" in name else real(name)
    )
    with pytest.raises(ConfigError) as caught:
        train_wdl.main(["--config", CONFIG, f"data.path={synth_set}"])
    assert "fbgemm" in str(caught.value)
    assert "1.9.0" in str(caught.value)


class Run:
    """Runs train_wdl.py under torchrun with two ranks."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.process = subprocess.Popen(
            [
                *(*torchrun(folder), "train_wdl.py", "--config", CONFIG),
                "model.hidden=[16]",
                *words,
            ],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def end(self) -> str:
        text = output_of(self.process, 60)
        assert self.process.returncode != 0
        assert "sbpflow/runtime/processes/launch.py" not in text, text  # no traceback from sbpflow
        return text

    def ranks(self) -> list[int]:
        """Return the process IDs of the two ranks, in rank order."""
        found = {}
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        for pid in children.read_text().split():
            for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if entry.startswith(b"RANK="):
                    found[int(entry[5:])] = int(pid)
        return [found[rank] for rank in sorted(found)]


def training_run(synth_set: Path, folder: Path) -> Run:
    """Start a long run, and return it after a few steps."""
    run = Run(
        folder,
        *(f"data.path={synth_set}", f"run.dir={folder}"),
        *("train.epochs=10000", "train.log_every=1"),
    )
    metrics = folder / "metrics.jsonl"
    deadline = Deadline(60)
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert not deadline.over(), "the run made no step"
        assert run.process.poll() is None, run.process.communicate()[0]
        time.sleep(0.05)
    return run


@pytest.mark.alone  # under load, ranks may fail seconds apart; the message then names ranks
def test_two_ranks_report_a_mistake_once(synth_set, tmp_path):
    output = Run(tmp_path, f"data.path={synth_set}", "model.wide.crosses=[[C1, C9]]").end()
    assert output.count("error: ") == 1
    assert "error: model.wide.crosses: the data has no cross C1xC9" in output
    assert "[rank" not in output, "all ranks see it"
    codes = [line.split()[2] for line in output.splitlines() if "exitcode  :" in line]
    assert "2" in codes


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_run(synth_set, tmp_path):
    run = training_run(synth_set, tmp_path)
    os.kill(run.ranks()[1], signal.SIGKILL)
    output = run.end()
    assert output.count("error: ") == 1
    assert "error: rank 1 died" in output
    # The fault is reported by the broken transfer or by torchrun, whichever notices it first.
    told_by = r"\(([\w./]+, (all_to_all|all_gather|all_reduce): |SIGTERM\))"
    assert re.search(told_by, output), output


@pytest.mark.slow
def test_ctrl_c_ends_all_ranks_cleanly(synth_set, tmp_path):
    run = training_run(synth_set, tmp_path)
    pids = run.ranks()
    os.killpg(run.process.pid, signal.SIGINT)  # send it to all processes, as a terminal does
    output = run.end()
    assert "error: " not in output
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()


def test_a_nan_in_the_data_stops_the_run_with_step_and_field(synth_set, tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    content = json.loads((synth_set / "manifest.json").read_text())
    for path in synth_set.glob("**/*.npy"):
        target = folder / path.relative_to(synth_set)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(path.read_bytes())
    shard = content["splits"]["train"][0]
    words = np.load(folder / shard["file"])
    words[2000, 1 + 4] = np.float32("nan").view(np.int32)  # I5
    np.save(folder / shard["file"], words)
    shard["crc32"] = file_crc32(folder / shard["file"])
    write_manifest(folder, content)
    load_manifest(folder)
    words = [f"data.path={folder}", f"run.dir={tmp_path / 'run'}", "data.shuffle=none"]
    with pytest.raises(TrainingError, match=r"^step 2: the loss is nan; .*I5 \(1 rows\)"):
        train_wdl.main(["--config", CONFIG, "model.hidden=[16]", *words])
