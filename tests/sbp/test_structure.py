"""Tests that the SBP layer does not refer to embeddings, keep module state, or hide collectives."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from sbpflow.tensor import ops

ROOT = Path(__file__).parents[2]
ROOMS = ["sbp", "boxing", "runtime", "tensor"]
BESIDE = {  # these are not part of a run
    "runtime/compute/doctor",
    "runtime/compute/versions",
    "runtime/processes/launch",
}
LAYER = [
    name
    for room in ROOMS
    for path in sorted((ROOT / "sbpflow" / room).rglob("*.py"))
    if (name := str(path.relative_to(ROOT / "sbpflow").with_suffix(""))) not in BESIDE
]
# Modules of plain values: they must not need `torch.distributed` or any tensor.
PURE = ["sbp.sbp", "sbp.placement", "sbp.layout", "errors"]
COLLECTIVES = {"all_to_all_single", "all_reduce", "all_gather_single", "reduce_scatter_single",
               "all_gather", "broadcast", "reduce", "scatter", "gather", "isend", "irecv",
               "all_gather_object", "broadcast_object_list", "all_gather_into_tensor"}  # fmt: skip


SOURCES = {name: (ROOT / "sbpflow" / f"{name}.py").read_text() for name in LAYER}
TREES = {name: ast.parse(source) for name, source in SOURCES.items()}


def _imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_the_sbp_layer_has_no_other_dependencies():
    for name, tree in TREES.items():
        for module in _imports(tree):
            if module.startswith("sbpflow."):
                part = module.removeprefix("sbpflow.")
                assert part.split(".")[0] in [*ROOMS, "errors"], f"{name} imports {module}"
            assert module.split(".")[0] not in ("fbgemm_gpu", "nvidia")


def test_collectives_are_called_in_one_place():
    allowed = {
        "boxing/collectives": {"all_to_all_single", "all_reduce"},
        "runtime/ranks/world": {"all_reduce"},
    }
    for name, tree in TREES.items():
        called = {
            node.func.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "dist"
        } & COLLECTIVES
        assert called <= allowed.get(name, set()), f"{name} calls {called}"


def test_sizes_of_files_and_functions():
    for name, tree in TREES.items():
        assert len(SOURCES[name].splitlines()) <= 400, name
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 80, f"{name}.{node.name} is too long"


def test_public_modules_and_functions_have_docstrings():
    for name, tree in TREES.items():
        assert ast.get_docstring(tree), name
        scopes = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
        for node in (node for scope in scopes for node in scope.body):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                exempt = node.name in ("forward", "backward") or _is_property(node)
                assert exempt or ast.get_docstring(node), f"{name}.{node.name} has no docstring"


@pytest.mark.parametrize("op", ops.__all__)
def test_every_op_has_its_diagram(op):
    """Each op has a line with its layouts, such as ``S(i) -> S(i), B -> B``."""
    lines = (getattr(ops, op).__doc__ or "").splitlines()
    assert any("->" in line and line.strip().startswith("``") for line in lines), op


def _is_property(node):
    return any(getattr(d, "id", "") in ("property", "cached_property") for d in node.decorator_list)


def test_values_do_not_import_torch():
    """Layouts must work without importing torch, for example to check a configuration."""
    names = ", ".join(f"sbpflow.{name}" for name in PURE)
    code = f"import sys, {names}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "False"
