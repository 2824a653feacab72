"""Write docs/modules.md: every module with the first paragraph of its docstring.

python .ci/modules.py
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("sbpflow", "models", "data", "planner", "benchmarks")
HEAD = """# Modules
What each is for, in its own words. `architecture.md` says how they fit.
`python .ci/modules.py` writes this page anew.
"""


def page() -> str:
    """The page as it should be."""
    parts = [HEAD]
    for folder in _folders():
        modules = _modules(ROOT / folder)
        if modules:
            parts.append(f"\n## {folder}/\n{_doc(ROOT / folder / '__init__.py')}\n\n")
            parts.append("| module | what it is for |\n|---|---|\n")
            parts += [f"| `{name}` | {line} |\n" for name, line in modules]
    return "".join(parts)


def _folders() -> list[str]:
    """Every package and the packages inside it, in the order of a listing."""
    return [
        str(path.parent.relative_to(ROOT))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("__init__.py"))
    ]


def _doc(path: Path) -> str:
    """The first paragraph of a file's docstring, as one line of a table."""
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    return doc.partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def _modules(folder: Path) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            found.append((path.name, _doc(path)))
    return found


if __name__ == "__main__":
    (ROOT / "docs" / "modules.md").write_text(page())
