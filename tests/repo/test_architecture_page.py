"""Tests that every file and code name on the pages for maintainers exists in the stated place."""

import re
from pathlib import Path

from tests.repo.test_tree import FILES, PYTHON, name

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
EXTENDING = (DOCS / "extending.md").read_text()
PAGE = "\n".join(
    [(DOCS / "architecture.md").read_text(), EXTENDING, (DOCS / "where.md").read_text()]
)
CODE = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", PAGE, flags=re.DOTALL | re.MULTILINE))
PATHS = sorted({word for word in CODE if re.fullmatch(r"[\w.]+(/[\w.]*)+", word)})
NAMES = sorted({word for word in CODE if re.fullmatch(r"_?[A-Za-z]\w*(\.\w+)*", word)} - {"T"})
# `sbpflow/a.py`, `Name`, `other_name`
PLACES = re.findall(r"`([\w/]+\.py)`((?:, `[\w.]+`)+)", PAGE)
# | `Type` | `sbpflow/a.py` | and: `Type` (`sbpflow/a.py`)
TYPES = re.findall(r"`([\w.]+)` \|? ?\(?`([\w/]+\.py)`", PAGE)
DECIDED = [(file, word) for file, words in PLACES for word in re.findall(r"`([\w.]+)`", words)]
DECIDED += [(file, word) for word, file in TYPES]
KEYS = (ROOT / "docs" / "configuration.md").read_text()


def defines(text: str, word: str) -> bool:
    """Return whether Python code has a class, function, variable or field of that name."""
    last = re.escape(word.split(".")[-1])
    return bool(re.search(rf"(def|class) {last}\b|^ *(self\.)?{last}\b[^\n]*( = |: )", text, re.M))


def test_the_page_has_paths_and_names_to_check():
    assert len(PATHS) >= 80
    assert len(NAMES) >= 80
    assert len(DECIDED) >= 60


def test_every_file_and_folder_on_the_page_is_there():
    assert [path for path in PATHS if not (ROOT / path).exists()] == []


def test_a_name_is_in_the_file_that_the_page_gives():
    for file, word in DECIDED:
        assert defines((ROOT / file).read_text(), word), f"{file} has no {word}"


def test_every_name_on_the_page_exists_in_the_code():
    """A name on the page may also be a key, a key's value, a folder, or a command."""
    tops = ("sbpflow", "data", "models", "planner")
    sources = {path: path.read_text() for path in PYTHON if name(path).split("/")[0] in tops}
    known = {part for path in sources for part in path.relative_to(ROOT).parts[:-1]}
    known |= {path.name for path in FILES}

    def exists(word: str) -> bool:
        last = word.split(".")[-1]  # a search for this part first is faster than the patterns
        texts = (text for text in sources.values() if last in text)
        quoted = rf"[\"']{re.escape(word)}[\"']"
        return (
            word in known
            or f"{word}`" in KEYS
            or any(defines(text, word) or re.search(quoted, text) for text in texts)
        )

    assert [word for word in NAMES if not exists(word)] == []


def test_the_page_shows_where_to_add_every_kind_of_part():
    parts = re.findall(r"^\* \*\*(.+?)\*\*", EXTENDING, re.M)
    assert len(parts) >= 10
    for line in EXTENDING.split("\n* ")[1:]:
        assert re.search(r"`[\w/.]+/[\w/.]+`", line), line
