"""Tests that the page on CUDA decisions lists the kernels' actual loads, stores, and bytes."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    ROOT / "sbpflow" / "embedding" / "storage" / "triton_kernels.py",
    ROOT / "sbpflow" / "embedding" / "storage" / "triton_rules.py",
    ROOT / "sbpflow" / "tensor" / "ops" / "triton_dropout.py",
)
ROWS = re.compile(r"^\| `(\w+)`(?:, ([^|]*?))? \| (\d+) \| (\d+) \| (\d+)", re.MULTILINE)
IDS, UNIQUE, WIDTH = 26 * 16384, 318_728, 16
HIDDEN = 16384 * 1024  # elements in the output of one hidden layer
# The bytes of state that an optimizer reads and writes per row.
STATE = {"SGD": 0, "Adagrad": 128, "rowwise Adagrad": 8, "lazy Adam": 256, "FTRL": 256}


def accesses() -> dict[str, tuple[int, int]]:
    """Return (loads, stores) of each function, including the functions it calls."""
    parsed = [node for source in SOURCES for node in ast.parse(source.read_text()).body]
    functions = [node for node in parsed if isinstance(node, ast.FunctionDef)]
    counts: dict[str, tuple[int, int]] = {}
    for function in functions:  # functions are defined after the functions that they call
        calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
        names = [call.attr for call in calls if isinstance(call, ast.Attribute)]
        inner = [counts[c.id] for c in calls if isinstance(c, ast.Name) and c.id in counts]
        counts[function.name] = (
            names.count("load") + sum(loads for loads, _ in inner),
            names.count("store") + sum(stores for _, stores in inner),
        )
    return counts


def expected_bytes(kernel: str, variant: str) -> int:
    row = 4 * WIDTH
    if kernel == "lookup":
        return IDS * (8 + row + row)
    if kernel == "drop":
        return HIDDEN * (4 + 4)
    if kernel == "sum_long_runs":
        return IDS * 8
    sums = IDS * (8 + 8 + row)  # for each id: bounds of a run, source, and gradient
    if kernel == "sum_runs":
        return sums + IDS * row
    rule, _, half = variant.partition(", ")
    weights = 2 * (row // 2 if half else row)
    return sums + IDS * 8 + UNIQUE * (weights + STATE[rule])


def test_page_matches_the_operations_of_the_kernels():
    page = (ROOT / "docs" / "decisions" / "gpu.md").read_text()
    counted, found = accesses(), ROWS.findall(page)
    kernels = {"lookup", "sum_long_runs", "sum_runs", "update", "drop"}
    assert {kernel for kernel, *_ in found} == kernels
    for kernel, variant, loads, stores, megabytes in found:
        parts = [counted[kernel]]
        if kernel == "update":  # add the accesses of the optimizer's step function
            parts.append(counted["_" + variant.partition(", ")[0].lower().replace(" ", "_")])
        assert (int(loads), int(stores)) == tuple(map(sum, zip(*parts, strict=True))), kernel
        assert int(megabytes) == round(expected_bytes(kernel, variant) / 1e6), (kernel, variant)
