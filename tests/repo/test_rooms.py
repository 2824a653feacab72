"""Tests the rules for folders: which files call collectives, which names are public, and that
nothing refers to models.
"""

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import sbpflow

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "sbpflow").rglob("*.py"))
MODELS = re.compile(
    r"(?i)(?<![a-z])(wdl|wide|deep|dlrm|deepfm|dcn(v2)?|tower|mlp|crosses)(?![a-z])"
)
COLLECTIVES = set(
    "all_to_all all_to_all_single all_reduce all_gather all_gather_into_tensor reduce_scatter "
    "reduce_scatter_tensor broadcast reduce scatter gather send recv isend irecv batch_isend_irecv "
    "all_gather_object broadcast_object_list gather_object barrier".split()
)
# Files that may call collectives: those for conversions, for messages, for rows whose number
# depends on the batch, and for the headers of checked mode.
CALLERS = {
    "boxing/collectives.py": {"all_to_all_single", "all_reduce"},
    "boxing/pairs.py": {"batch_isend_irecv"},
    "embedding/exchange/all_to_all.py": {"all_to_all_single"},
    "runtime/ranks/world.py": {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"},
}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT / "sbpflow"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Parse a file, and return all nodes of its tree; walking it for each test would be slow."""
    return list(ast.walk(ast.parse(path.read_text())))


def strings(nodes: list[ast.AST]) -> list[tuple[int, str]]:
    """Return every string in a file except docstrings."""
    docs = {
        id(node.body[0].value)
        for node in nodes
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    docs |= {
        id(node.value)
        for node in nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return [
        (node.lineno, node.value)
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
    ]


def test_no_string_names_a_model_or_a_part_of_one():
    found = [
        f"{name(path)}:{line}: {text}"
        for path in FILES
        for line, text in strings(nodes(path))
        if MODELS.search(text)
    ]
    assert found == []


def test_no_key_of_the_configuration_names_a_part_of_a_model():
    keys = [
        item.target.id
        for file in ("schema.py", "table_rules.py")
        for node in ast.parse((ROOT / "sbpflow" / "config" / file).read_text()).body
        if isinstance(node, ast.ClassDef)
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    ]
    assert len(keys) > 40
    assert [key for key in keys if MODELS.search(key)] == []


def test_collectives_are_called_only_in_the_listed_files():
    called = {
        (name(path), node.func.attr)
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ("dist", "distributed", "c10d")
        and node.func.attr in COLLECTIVES
    }
    assert called <= {(file, call) for file, calls in CALLERS.items() for call in calls}


# These files parse JSON that comes from other ranks or that they have just written.
MESSAGES = set(
    "sbpflow/runtime/processes/exit_messages.py sbpflow/runtime/processes/startup.py "
    "sbpflow/runtime/ranks/hosts.py sbpflow/boxing/agreement.py "
    "sbpflow/checkpoint/attempt.py sbpflow/run/saved/checkpoints.py".split()
)


def test_json_and_yaml_files_are_each_read_in_one_place():
    """Files must be read through ``runtime/files/json_file.py`` and ``config/yaml_text.py``, which
    check limits and raise readable errors."""
    found = {"json": set[str](), "yaml": set[str]()}
    for package in ("sbpflow", "models", "data", "planner"):
        for path in (ROOT / package).rglob("*.py"):
            for node in nodes(path):
                if (
                    isinstance(node, ast.Attribute)
                    and node.attr in ("load", "loads", "safe_load")
                    and isinstance(node.value, ast.Name)
                    and node.value.id in found
                ):
                    found[node.value.id].add(str(path.relative_to(ROOT)))
    # Bundles read their JSON without the rest of sbpflow.
    bundles = {"sbpflow/serving/row_store.py", "sbpflow/serving/scorer.py"}
    # The server parses requests without a Python call for each number.
    requests = {"sbpflow/serving/bodies.py"}
    assert found["json"] == {*MESSAGES, *bundles, *requests, "sbpflow/runtime/files/json_file.py"}
    assert found["yaml"] == {"sbpflow/config/yaml_text.py"}


def test_torch_distributed_has_no_other_name():
    """Under another name, calls to collectives would go unnoticed."""
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name == "torch.distributed":
                        assert alias.asname == "dist", name(path)
            if isinstance(node, ast.ImportFrom) and node.module == "torch.distributed":
                assert not {alias.name for alias in node.names} & COLLECTIVES, name(path)


def test_public_names_are_few_lazy_and_documented():
    assert sorted(sbpflow.__all__) == sbpflow.__all__
    assert 20 <= len(sbpflow.__all__) <= 45
    for public in sbpflow.__all__:
        assert getattr(sbpflow, public).__doc__, public
    with pytest.raises(AttributeError, match="no attribute 'World2'"):
        sbpflow.World2  # noqa: B018
    code = (
        "import sys, sbpflow; dir(sbpflow)\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'fbgemm_gpu', 'nvidia')])"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def order(folder: Path, *, but: set[str]) -> list[str]:
    """Return a room's folders, each after the folders from which it imports; fail if no such order
    exists.
    """
    prefix = ".".join(folder.relative_to(ROOT).parts) + "."
    below: dict[str, set[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        room = path.relative_to(folder).parts[0]
        if room.endswith(".py"):
            continue
        below.setdefault(room, set())
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(prefix):
                other = (node.module or "").removeprefix(prefix).split(".")[0]
                if other not in (room, *but):
                    below[room].add(other)
    done: list[str] = []
    rooms = set(below) | set().union(*below.values())
    while rooms:
        free = {room for room in rooms if below.get(room, set()) <= set(done)}
        assert free, {room: sorted(below[room] - set(done)) for room in rooms}
        done += sorted(free)
        rooms -= free
    return done


def import_edges() -> set[tuple[str, str]]:
    """Return the pairs (part of ``sbpflow/``, part from which it imports).

    Parts are rooms, modules next to rooms, and ``sbpflow`` itself for names imported from the
    package. Imports for type checkers count. data, models and planner are outside ``sbpflow/`` and
    not included. ``api`` is not included, because it composes all parts, and no part imports
    ``api``.
    """
    found: set[tuple[str, str]] = set()
    for path in FILES:
        part = Path(name(path)).parts[0].removesuffix(".py")
        for node in nodes(path):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for package, *inside in (module.split(".") for module in modules):
                other = inside[0] if inside else package
                if package == "sbpflow" and other not in (part, "data", "models", "planner"):
                    found.add((part, other))
    assert {part for part, other in found if other == "api"} == {"__init__"}
    return {edge for edge in found if "api" not in edge}


def layers(edges: set[tuple[str, str]]) -> list[set[str]]:
    """Assign each part to the first layer above its imports; fail on a cycle."""
    rest, found = {part for edge in edges for part in edge}, list[set[str]]()
    while rest:
        layer = {part for part in rest if not any((part, other) in edges for other in rest)}
        assert layer, f"a cycle among {sorted(rest)}"
        found.append(layer)
        rest -= layer
    return found


def test_layers_are_counted():
    edges = {("a", "b"), ("b", "c"), ("a", "c"), ("d", "c")}
    assert layers(edges) == [{"c"}, {"b", "d"}, {"a"}]
    with pytest.raises(AssertionError, match=r"a cycle among \['a', 'b', 'd'\]"):
        layers({*edges, ("b", "d"), ("d", "a")})


def test_the_rooms_have_no_more_layers_and_edges_than_before():
    """Commit d4baee1 had 10 layers and 56 edges; ``serving``, which is newer, adds five edges."""
    edges = import_edges()
    assert len(edges) <= 56, sorted(edges)
    assert len(layers(edges)) <= 10, layers(edges)


def test_rooms_import_downwards_only():
    """Neither two folders nor two parts of a large folder may import each other, even
    indirectly."""
    rooms = order(ROOT / "sbpflow", but={"errors", "data", "models", "planner"})
    assert rooms[:3] == ["costs", "runtime", "sbp"]
    assert rooms[-2:] == ["run", "commands"]
    for large in ("runtime", "run"):
        assert len(order(ROOT / "sbpflow" / large, but=set())) == 6
    inside = order(ROOT / "sbpflow" / "embedding", but=set())
    assert [room for room in inside if room != "state"] == [
        "rules",
        "plan",
        "storage",
        "cache",
        "ids",
        "vocabulary",
        "exchange",
    ]
