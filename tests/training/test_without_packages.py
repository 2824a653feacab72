"""Tests training, from raw rows to an AUC, without FBGEMM, numba, or DALI, as on macOS."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torchrun import torchrun

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs/scheme3.yaml")
# Python runs this file at startup; afterwards, these packages are neither importable nor listed as
# installed.
HIDE = """
from importlib import machinery, metadata

HIDDEN = ("fbgemm_gpu", "nvidia", "numba")
find_spec, version = machinery.PathFinder.find_spec, metadata.version


def find_others(name, path=None, target=None):
    return None if name.split(".")[0] in HIDDEN else find_spec(name, path, target)


def version_of_others(name):
    if name.startswith(("fbgemm", "nvidia", "numba")):
        raise metadata.PackageNotFoundError(name)
    return version(name)


machinery.PathFinder.find_spec = find_others
metadata.version = version_of_others
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide" / "sitecustomize.py").write_text(HIDE)
    path = os.pathsep.join([str(tmp_path / "hide"), str(ROOT)])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def start(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return start


@pytest.mark.slow
def test_everything_runs_with_torch_and_memory_maps(run, tmp_path):
    absent = run("-c", "import importlib.util as u; print(u.find_spec('fbgemm_gpu'))")
    assert absent.strip() == "None", "the packages are hidden"
    report = run("-m", "sbpflow", "doctor")
    assert "absent fbgemm" in report
    assert "absent dali" in report
    data, folder = tmp_path / "set", tmp_path / "run"
    run("-m", "data", "synth", "--rows", "4000", "--vocab-scale", "0.001", "--output", str(data))
    text = run(
        *torchrun(tmp_path)[1:],
        "train_wdl.py",
        *("--config", CONFIG, f"data.path={data}", f"run.dir={folder}", "model.hidden=[16]"),
        *("data.batch_size=500", "optimizer.sparse.name=rowwise_adagrad"),
    )
    assert text.count("data.loader: auto selects memmap (DALI is not installed)") == 1
    assert "FBGEMM is not installed" in (folder / "start.txt").read_text()
    final = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0.4 < final["auc"] < 1
