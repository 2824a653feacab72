"""Tests that every subcommand of an installed wheel runs outside the checkout."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
import torch
import yaml

from sbpflow.__main__ import COMMANDS
from tests.deadlines import run
from tests.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGE = Page("docs/tutorial.md")
TABLES = {
    "batch_size": 256,
    "tables": [
        {"name": name, "rows": 1000, "dim": 8, "ids_per_sample": 1, "zipf": {"s": 1.05, "q": 2.0}}
        for name in ("C1", "C2")
    ],
}
# Commands in the order in which a user runs them; `plan --measure` runs `measure` on its ranks.
STEPS = """
schema clicks.csv
prepare --input clicks.csv --schema schema.yaml --output clicks
stats clicks
verify clicks
encode --like clicks --input tomorrow.csv --output tomorrow
synth --rows 3000 --vocab-scale 0.001 --output generated
doctor
explain --config run.yaml --ranks 2
train -n 2 --config run.yaml
train --config run.yaml model={name: own_module:OwnModel} run.dir=own
checkpoint ls run/checkpoints
checkpoint verify run/checkpoints
predict --checkpoint run --input tomorrow.csv --output scores.parquet
export --checkpoint run --output model --pt2
embeddings run --table deep.user --output users.parquet
report run own
calibrate --ranks 2 --quick --seconds 10 --output profile.json
plan --tables tables.json --profile profile.json --output plan.yaml
plan --tables tables.json --profile profile.json --output plan.yaml --measure 1
explain-plan --tables tables.json --profile profile.json --plan plan.yaml
compare --tables tables.json --profile profile.json --planners size random
clusters --tables tables.json --profile h100-dgx --ranks 8
""".strip().splitlines()


def test_every_subcommand_is_run():
    assert {step.split()[0] for step in STEPS} | {"measure", "serve", "embedding-server"} == set(
        COMMANDS
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Return the ``sbpflow`` command of a fresh environment with the wheel and its requirements."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    for name in ("sbpflow", "data", "models", "planner"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    succeed([*build, "--wheel-dir", str(folder), str(source)], 120)
    shutil.rmtree(source)
    # Use this environment's build of torch, because the default package index offers only a CUDA
    # build.
    (folder / "constraints.txt").write_text(f"torch=={torch.__version__}\n")
    succeed([sys.executable, "-m", "venv", str(folder / "venv")], 120)
    (wheel,) = folder.glob("*.whl")
    pip = [str(folder / "venv/bin/pip"), "install", "--quiet"]
    succeed([*pip, "--constraint", str(folder / "constraints.txt"), str(wheel)], 600)
    return folder / "venv" / "bin" / "sbpflow"


def succeed(command: list[str], seconds: float, cwd: Path | None = None) -> str:
    """Run a command without this checkout on its path and return its output."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done: subprocess.CompletedProcess[str] = run(
        command, seconds, cwd=cwd, env={**env, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.slow
def test_every_subcommand_works_in_an_installed_package(installed, tmp_path):
    PAGE.save_files(tmp_path)
    succeed([sys.executable, "make_clicks.py"], 60, tmp_path)
    shutil.copy(ROOT / "examples" / "own_module.py", tmp_path)
    tree = yaml.safe_load(PAGE.files["clicks.yaml"])
    tree |= {"run": {"dir": "run"}, "data": {"path": "clicks", "batch_size": 1024}}
    tree["train"] |= {"epochs": 1}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    (tmp_path / "tables.json").write_text(json.dumps(TABLES))
    for step in STEPS:
        words = step.replace("{name: ", "{name:\0").split()
        command = [str(installed), *(word.replace("\0", " ") for word in words)]
        output = succeed(command, 300, tmp_path)
        assert str(ROOT) not in output, step
    where = [str(installed.parent / "python"), "-c", "import sbpflow.data; print(sbpflow.data)"]
    assert str(installed.parents[1]) in succeed(where, 60, tmp_path)
    assert pl.read_parquet(tmp_path / "scores.parquet").columns == ["visit", "score"]
    assert pl.read_parquet(tmp_path / "users.parquet").columns == ["user", "vector"]
    refused = run([str(installed), "serve", "model"], 60, cwd=tmp_path)
    assert refused.returncode == 2
    assert "pip install 'sbpflow[serve]'" in refused.stderr  # not required by the wheel
    for name in ("run/report.html", "model/model.pt2", "plan.yaml", "tomorrow/manifest.json"):
        assert (tmp_path / name).is_file(), name
