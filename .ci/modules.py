"""Write docs/modules.md: every module with the first paragraph of its docstring.

python .ci/modules.py
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    "sbpflow",
    "sbpflow/embedding",
    "sbpflow/training",
    "models",
    "data",
    "data/format",
    "data/prepare",
    "data/synth",
    "data/read",
    "benchmarks",
)
HEAD = """# Modules
What each is for, in its own words. `architecture.md` says how they fit.
`python .ci/modules.py` writes this page anew.
"""


def page() -> str:
    """The page as it should be."""
    parts = [HEAD]
    for folder in FOLDERS:
        parts.append(f"\n## {folder}/\n| module | what it is for |\n|---|---|\n")
        parts += [f"| `{name}` | {line} |\n" for name, line in _modules(ROOT / folder)]
    return "".join(parts)


def _modules(folder: Path) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            doc = ast.get_docstring(ast.parse(path.read_text())) or ""
            found.append(
                (path.name, doc.partition("\n\n")[0].replace("\n", " ").replace("|", "\\|"))
            )
    return found


if __name__ == "__main__":
    (ROOT / "docs" / "modules.md").write_text(page())
