"""Tests the commands in docs/serving.md, from a finished run to an answer, and the page's
manifest.
"""

import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml

from benchmarks.serving_tools import serving
from sbpflow.serving.scorer import load
from tests.data.tables import write_csv
from tests.pages import ROOT, follow
from tests.serving.bundles import good_rows

SECTION = (ROOT / "docs" / "serving.md").read_text().split("\n## Serve\n")[1].split("\n## ")[0]
COMMANDS = SECTION.split("```\n")[1].splitlines()


@pytest.mark.slow
def test_three_commands_lead_from_a_run_to_an_answer(exported, tmp_path):
    assert len(COMMANDS) == 3
    export, serve, curl = COMMANDS
    shutil.copytree(exported / "run", tmp_path / "runs" / "train")
    follow(export, tmp_path)
    text = write_csv(tmp_path / "rows.tsv", good_rows(9, seed=5)).read_text()
    program, command, folder = shlex.split(serve)
    assert (program, command) == ("sbpflow", "serve")
    with serving(tmp_path / folder) as server:
        address = "http://127.0.0.1:8000"  # the default
        assert address in curl
        words = shlex.split(curl.replace(address, f"http://127.0.0.1:{server.port}"))
        if shutil.which("curl") is None:
            pytest.skip("curl is not installed")
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    wanted = load(tmp_path / folder).score(text)
    assert np.float32(done.stdout.split()).tolist() == wanted.tolist()


def test_the_manifest_starts_the_server_with_paths_that_it_has():
    manifest = yaml.safe_load((ROOT / "examples" / "kserve.yaml").read_text())
    (container,) = manifest["spec"]["predictor"]["containers"]
    assert container["name"] == "kserve-container"
    assert container["command"] == ["sbpflow", "serve"]
    from sbpflow.commands.serve import _arguments, folders_of

    args = _arguments(container["args"])
    assert folders_of(args.models) == {"clicks": Path("/mnt/models")}
    (port,) = container["ports"]
    assert args.port == port["containerPort"]
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in SECTION
        assert container[probe]["httpGet"]["port"] == args.port
