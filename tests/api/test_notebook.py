"""Tests that examples/movies.ipynb runs as shown, and that a notebook's kernel survives failures
and interrupts.
"""

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "movies.ipynb"
WIDGET = "application/vnd.jupyter.widget-view+json"


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    """Return the output of the code cells."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs]
    return [output.text for output in outputs if output.output_type == "stream"]


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)]


@pytest.mark.slow
def test_the_notebook_runs_and_gives_the_saved_outputs(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    shown = nbformat.read(NOTEBOOK, 4)
    counts = [cell.execution_count for cell in shown.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "executed from top to bottom"
    notebook = nbformat.read(NOTEBOOK, 4)
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
    for text, expected in zip(printed(notebook), printed(shown), strict=True):
        assert re.sub(r"[\d.]+", "", text) == re.sub(r"[\d.]+", "", expected)
        assert numbers(text) == pytest.approx(numbers(expected), rel=0.05)
    widgets = notebook.metadata.widgets["application/vnd.jupyter.widget-state+json"].state
    texts = [str(widget.state.get("value", "")) for widget in widgets.values()]
    assert any("282/282" in text for text in texts), "the bar of training reached its end"


SETUP = """
import sys, numpy as np, polars as pl, sbpflow
from dataclasses import dataclass
from sbpflow.models.dlrm import DlrmConfig

@dataclass(frozen=True, kw_only=True)
class Mine(DlrmConfig):
    name: str = "mine"

rng = np.random.default_rng(0)
item = rng.integers(20, size=2000)
table = pl.DataFrame({"item": item, "price": rng.random(2000), "label": (item > 9).astype(int)})

def fit(folder, epochs=2, ranks=1, name="dlrm", **more):
    return sbpflow.fit(
        {"data": {"batch_size": 100, "loader": "memmap"}}, data=table, ranks=ranks,
        schema={"label": "label", "dense": ["price"], "sparse": {"item": "integer"}},
        model={"name": name, "embedding_dim": 4, "bottom": [4], "top": [4]},
        parallel={"kernel": "torch"}, train={"epochs": epochs, "log_every": 5},
        run={"dir": folder}, **more,
    )
"""


class Kernel:
    """Starts a kernel as a notebook does; ``run`` returns the error, or "", and the outputs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manager, self.client = start_new_kernel(cwd=str(folder))

    def run(self, code: str, *, interrupt_after: str = "") -> tuple[str, list[dict]]:
        """Run a cell; interrupt the kernel once the run in the folder ``interrupt_after``, if any,
        has logged a step.
        """
        outputs: list[dict] = []
        if interrupt_after:
            file = self.folder / interrupt_after / "metrics.jsonl"
            threading.Thread(target=self._interrupt, args=(file,), daemon=True).start()
        reply = self.client.execute_interactive(code, timeout=300, output_hook=outputs.append)
        content = reply["content"]
        error = f"{content['ename']}: {content['evalue']}" if content["status"] == "error" else ""
        return error, [output["content"] for output in outputs]

    def _interrupt(self, file: Path) -> None:
        while '"step"' not in (file.read_text() if file.exists() else ""):
            time.sleep(0.05)
        self.manager.interrupt_kernel()


@pytest.fixture
def kernel(tmp_path, monkeypatch) -> Iterator[Kernel]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    kernel = Kernel(tmp_path)
    error, _ = kernel.run(SETUP)
    assert error == ""
    yield kernel
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=True)


def auc(kernel: Kernel, call: str) -> float:
    """Return the test AUC of the run that ``call`` returns."""
    error, outputs = kernel.run(f"print('AUC', {call}.result['auc'])")
    assert error == ""
    (line,) = [output["text"] for output in outputs if "AUC" in output.get("text", "")]
    return numbers(line)[0]


@pytest.mark.slow
def test_a_kernel_survives_failures_and_interrupts(kernel):
    error, _ = kernel.run("fit('bad', epochs=0)")
    assert error.startswith("ConfigError: train.epochs must be ")
    error, _ = kernel.run("fit('alone', epochs=10_000)", interrupt_after="alone")
    assert error.startswith("KeyboardInterrupt")
    assert auc(kernel, "fit('after')") > 0.9
    assert auc(kernel, "fit('own', name='__main__:Mine')") > 0.9
    error, _ = kernel.run("sbpflow.load('alone').predict(table)")
    assert error == "", "the interrupt saved the run"


@pytest.mark.slow
def test_a_kernel_survives_failures_and_interrupts_of_ranks(kernel):
    error, _ = kernel.run("fit('own', name='__main__:Mine', ranks=2)")
    assert error.startswith("ConfigError: ranks is 2, but __main__:Mine is defined in this note")
    error, _ = kernel.run("fit('two', epochs=10_000, ranks=2)", interrupt_after="two")
    assert error.startswith("KeyboardInterrupt")
    call = "pl.DataFrame(sbpflow.load('two').predict(table)).height"
    assert kernel.run(f"assert {call} == 2000")[0] == ""
    error, outputs = kernel.run("run = fit('after', ranks=2)")
    assert error == ""
    assert [output for output in outputs if output.get("name") == "stderr"] == []
    bars = [output["data"]["text/plain"] for output in outputs if WIDGET in output.get("data", {})]
    assert any("/32" in bar for bar in bars), bars  # it may begin at a later step
    assert auc(kernel, "run") > 0.9
    assert json.loads((kernel.folder / "after/metrics.jsonl").read_text().splitlines()[-1])
