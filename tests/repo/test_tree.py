"""Tests rules for all files of the repository: dependencies, text, size, and packaging."""

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
OWN = {"sbpflow", "sbpflow.models", "sbpflow.data", "sbpflow.planner", "benchmarks", "tests"}
OWN |= {"train_wdl", "models", "data", "planner"}  # code must import the last three as sbpflow.NAME
# The packages of OWN that each folder may import. A __main__, sbpflow/commands, and sbpflow/api.py
# may import all.
MAY_IMPORT = {
    "sbpflow": {"sbpflow"},
    "models": {"sbpflow.models", "sbpflow"},
    "data": {"sbpflow.data", "sbpflow"},
    "planner": {"sbpflow.planner", "sbpflow", "sbpflow.models", "sbpflow.data"},
}
OUTSIDE = ("sbpflow.data", "sbpflow.models", "sbpflow.planner")
TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".jsonl", ".sh", ".cfg", ".txt", ""}


def tracked() -> list[Path]:
    """Return the files that git tracks or would add; without git, return all files in the tree."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode == 0:
        files = [ROOT / name for name in listing.stdout.split("\0") if name]
    else:
        skip = {".venv", ".git", "out", "runs", "build", "dist", ".demo"}
        files = [p for p in ROOT.rglob("*") if not skip & set(p.relative_to(ROOT).parts)]
    return sorted(path for path in files if path.is_file())


FILES = tracked()
PYTHON = [path for path in FILES if path.suffix == ".py"]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


class Source(NamedTuple):
    """What the tests need to know about a file, which is parsed and walked only once."""

    imports: frozenset[str]  # the packages of all imports, including imports inside functions
    long_functions: list[str]
    has_docstring: bool


@cache
def source(path: Path) -> Source:
    found, long_functions = set(), []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}:{node.lineno}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= 80:
            long_functions.append(f"{name(path)}:{node.lineno}: {node.name} has 80 lines or more")
    packages = frozenset(
        next((o for o in OUTSIDE if f"{module}.".startswith(f"{o}.")), module.split(".")[0])
        for module in found
    )
    return Source(packages, long_functions, bool(ast.get_docstring(tree)))


def test_the_file_lists_are_not_empty():
    names = {name(path) for path in FILES}
    assert {"pyproject.toml", "sbpflow/config/schema.py", "data/__init__.py", "README.md"} <= names
    assert len(PYTHON) > 20


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_dependencies_point_one_way(package):
    files = [path for path in PYTHON if path.relative_to(ROOT).parts[0] == package]
    assert files
    wrong = {
        name(path): sorted(extra)
        for path in files
        if path.name != "__main__.py"
        and path.parent.name != "commands"
        and name(path) != "sbpflow/api.py"
        and (extra := source(path).imports & OWN - MAY_IMPORT[package])
    }
    assert not wrong


def test_packages_are_imported_under_one_name():
    """Importing both ``data`` and ``sbpflow.data`` would define every class twice."""
    twice = {"data", "models", "planner"}
    assert [name(path) for path in PYTHON if source(path).imports & twice] == []


def test_the_list_of_packages_matches_the_folders():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    homes = {"sbpflow": "sbpflow"} | {home: of for of, home in settings["package-dir"].items()}
    found = {
        ".".join([package, *init.parent.relative_to(ROOT / home).parts])
        for home, package in homes.items()
        for init in (ROOT / home).rglob("__init__.py")
    }
    assert set(settings["packages"]) == found


# These modules need compilers, so they may be imported only where they are used.
COMPILED = (
    "compiled",
    "compiled_half",
    "dense_loops",
    "growing",
    "json_loops",
    "key_exchange",
    "mark_loops",
    "shared_loops",
    "slot_loops",
    "encoder_loops",
    "loops",
    "numba_rules",
    "numba_storage",
    "row_loops",
    "row_vectors",
    "score_loops",
    "text_loops",
    "triton_dropout",
    "triton_kernels",
    "triton_rules",
    "triton_storage",
)


def test_importing_sbpflow_imports_neither_dali_nor_fbgemm():
    modules = [
        name(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for path in PYTHON
        if path.relative_to(ROOT).parts[0] == "sbpflow" and path.name != "__main__.py"
        if not path.name.startswith("triton") or find_spec("triton")
    ]
    assert "sbpflow.runtime.processes.launch" in modules
    modules = [
        m
        for m in modules
        if m.rpartition(".")[2] not in COMPILED
        if not m.startswith("sbpflow.embedding.vocabulary.")
    ]
    code = (
        f"import importlib, sys\nfor m in {modules}: importlib.import_module(m)\n"
        "late = ('nvidia', 'fbgemm_gpu', 'numba', 'triton')\n"
        "print([m for m in sys.modules if m.split('.')[0] in late])"
    )
    assert run_python(code) == "[]"


def test_the_oldest_numpy_has_the_names_in_use():
    """NumPy 1.26, the oldest allowed, lacks these names, which NumPy 2 added."""
    added = "bool|long|ulong|astype|concat|isdtype|permute_dims|pow|bitwise_count|trapezoid|vecdot"
    found = [
        f"{name(path)}: {match[0]}"
        for path in PYTHON
        for match in re.finditer(rf"\bnp\.({added}|unique_\w+)\b", path.read_text())
    ]
    assert '"numpy>=1.26"' in (ROOT / "pyproject.toml").read_text()
    assert found == []


def test_the_launcher_does_not_import_torch():
    """A Ctrl-C or a broken torch must be handled by ``run_main``, so importing the launcher must
    not import torch.
    """
    assert (
        run_python("import sbpflow.runtime.processes.launch, sys; print('torch' in sys.modules)")
        == "False"
    )


def run_python(code: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_text_is_ascii_without_paths_of_a_machine():
    wrong = []
    for path in FILES:
        if path.suffix not in TEXT:
            continue
        text = path.read_bytes()
        if not text.isascii():
            lines = [n for n, line in enumerate(text.splitlines(), 1) if not line.isascii()]
            wrong.append(f"{name(path)}: not ASCII in lines {lines}")
        # KServe mounts every model at /mnt/models.
        machine = rb"(?<![\w.$}])/(?!mnt/models)(home|root|work|Users|mnt|opt)/\w+"
        if home := re.search(machine, text):
            wrong.append(f"{name(path)}: {home[0].decode()} is a path of one machine")
    assert wrong == []


def test_files_and_functions_are_not_too_long():
    wrong = []
    for path in PYTHON:
        text = path.read_text()
        if (count := len(text.splitlines())) > 500:  # aim for 400
            wrong.append(f"{name(path)}: {count} lines; past 500 a file holds two subjects")
        wrong += source(path).long_functions
        exempt = path.name == "__init__.py" or "tests" in path.relative_to(ROOT).parts
        if text.strip() and not exempt and not source(path).has_docstring:
            wrong.append(f"{name(path)}: start the file with a docstring on its responsibility")
    assert wrong == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Build a wheel from this tree, without network access."""
    folder = tmp_path_factory.mktemp("wheel")
    code = (
        "import sys; from setuptools import build_meta; "
        "print(build_meta.build_wheel(sys.argv[1], {'--build-option': []}))"
    )
    source = folder / "source"
    for path in FILES:
        target = source / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    built = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=source, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    (file,) = folder.glob("*.whl")
    return file


def test_the_wheel_has_all_packages_and_nothing_else(wheel):
    entries = zipfile.ZipFile(wheel).namelist()
    tops = {entry.split("/")[0] for entry in entries}
    assert all(top == "sbpflow" or re.fullmatch(r"sbpflow-.*\.dist-info", top) for top in tops)
    inside = [name(path) for path in FILES if path.suffix in (".py", ".json", ".typed")]
    expected = {file for file in inside if file.startswith("sbpflow/")}
    expected |= {
        f"sbpflow/{file}" for file in inside if file.startswith(("data/", "models/", "planner/"))
    }
    assert expected == {entry for entry in entries if entry.startswith("sbpflow/")}


def test_the_installed_package_runs_in_any_folder(wheel, tmp_path):
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "numpy.py").write_text("raise RuntimeError('a file of this folder was run')")
    zipfile.ZipFile(wheel).extractall(installed)
    words = ["synth", "--rows", "2000", "--vocab-scale", "0.001", "--output", "set"]
    code = (
        "import sys, sbpflow.data.stats as stats, sbpflow.__main__ as main\n"
        "print(stats.__file__)\n"
        f"sys.argv[1:] = {words}\n"
        "main.entry()"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, "PYTHONPATH": str(installed)},
        cwd=elsewhere,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == str(installed / "sbpflow" / "data" / "stats.py")
    assert (elsewhere / "set" / "manifest.json").is_file()


def test_extras_pin_matching_pairs():
    from sbpflow.runtime.compute.versions import FBGEMM_OF_TORCH, minor

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in ("cpu", "cuda"):
        pins = dict(pin.split("==") for pin in extras["optional-dependencies"][extra])
        fbgemm = pins["fbgemm-gpu-cpu" if extra == "cpu" else "fbgemm-gpu"]
        assert FBGEMM_OF_TORCH[minor(pins["torch"])] == minor(fbgemm)
