"""Tests that the Python code in docs/sbp.md runs and prints the output shown there, and that the
page's tables are correct.
"""

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

from sbpflow.boxing.dry_run import DryBoxing
from sbpflow.boxing.plan import plan_boxing
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import parse_nd_sbp, parse_sbp
from sbpflow.tensor import dispatch, ops
from sbpflow.tensor.signature import describe
from tests.oracle import line_layout
from tests.sbp import test_ops

PAGE = Path(__file__).parents[2] / "docs" / "sbp.md"
BLOCK = re.compile(r"```python\n(.*?)```\n(?:```text\n(.*?)```)?", re.S)


def _run_page(world, blocks):
    """Return the output of each block on this rank; blocks share a namespace."""
    names = {"world": world}
    printed = []
    for number, block in enumerate(blocks):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(block, f"sbp.md block {number}", "exec"), names)
        printed.append(out.getvalue())
    return printed


def test_the_page_shows_the_output_of_its_code(ranks):
    found = BLOCK.findall(PAGE.read_text())
    assert len(found) >= 7
    printed = ranks(2, _run_page, [code for code, _ in found])[0]
    for (code, shown), real in zip(found, printed, strict=True):
        assert real == shown, f"this block prints something else:\n{code}"


def _rows(title):
    """Return the body of the first table under a heading, as lists of cells."""
    section = PAGE.read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("p", [2, 4])
def test_the_table_of_conversions_is_correct(p):
    rows = _rows("Conversions")
    assert len(rows) == 10
    size = 64 * 64 * 4
    formulas = {
        "0": 0,
        "(p-1)/p T": (p - 1) * size // p,
        "(p-1) T": (p - 1) * size,
        "2 (p-1) T": 2 * (p - 1) * size,
    }
    for src, dst, gloo, nccl, bytes_text, _ in rows:
        expected = formulas[bytes_text]
        for backend, collective in (("gloo", gloo), ("nccl", nccl)):
            layouts = [line_layout("cpu", p, parse_sbp(text)) for text in (src, dst)]
            steps = plan_boxing(*layouts, (64, 64), torch.float32, id="x", backend=backend)
            ran = [step.collective for step in steps if step.groups] or ["-"]
            assert ran == [collective], f"{src} -> {dst} on {backend}"
            assert sum(step.total_bytes for step in steps) == expected, f"{src} -> {dst}"


NAMES = {
    "linear with bias": "linear_bias",
    "relu, or any `nonlinear` function": "tanh",
    "concat along 1": "concat",
    "flatten [4, 3]": "flatten",
    "reshape [5, 4, 3] to [5, 12]": "reshape_merge",
    "reshape [5, 12] to [5, 4, 3]": "reshape_cut",
    "reduce_sum over 1": "reduce_sum",
    "gather(table, ids)": "gather",
    "bce_with_logits": "bce_none",
    "cross_network(x, [(w, b)]), weights B": "cross_network",
}
UNLIKE_TORCH = {  # ops that `test_ops.py` cannot compare with a plain float64 op
    "reduce_mean over 1": lambda x: ops.reduce_mean(x, [1]),
    "reduce_max over 1": lambda x: ops.reduce_max(x, [1]),
    "dropout": lambda x: ops.dropout(x, 0.5, 0),
    "cast to a wider dtype": lambda x: ops.cast(x, torch.float64),
    "cast to another dtype": lambda x: ops.cast(x, torch.float16),
}


def test_the_table_of_signatures_is_correct(monkeypatch):
    seen = []
    deduce = dispatch.deduce
    monkeypatch.setattr(dispatch, "deduce", lambda r, *a: (seen.append(r), deduce(r, *a))[1])
    rows = _rows("How ops choose layouts")
    assert rows
    for op, shown in rows:
        seen.clear()
        call, shapes_of = _call_of(op)
        everywhere = [parse_nd_sbp("B")] * len(test_ops.OPS[shapes_of][2])
        line = Placement.line("cpu", 2)
        call(*test_ops.dry_operands(shapes_of, everywhere, DryBoxing(2), line))
        all_b = "; " + ", ".join(["B"] * len(everywhere)) + " -> B"
        assert shown + all_b in [describe(rule) for rule in seen], op


def _call_of(op):
    """Return the function and the operand names for a row of the table."""
    if op in UNLIKE_TORCH:
        return UNLIKE_TORCH[op], "reduce_sum"
    name = NAMES.get(op, op)
    return test_ops.OPS[name][0], name
