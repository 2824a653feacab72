"""Tests that links between pages have targets and that every page is part of the documentation
site.
"""

import re
from pathlib import Path

import pytest

from tests.repo.test_tree import FILES, name

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [path for path in FILES if path.suffix == ".md"]
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"|^```\{image\} (\S+)", re.M)
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```", re.M | re.S)


def prose(path: Path) -> str:
    """Return the page without code blocks; directives such as ``{image}`` are kept."""
    kept, fence = [], None
    for line in path.read_text().splitlines():
        opens = re.match(r" *(```+)(.*)", line)
        if opens and fence is None:
            fence = opens[2]
        elif opens:
            fence = None
            continue
        if fence is None or fence.startswith("{"):
            kept.append(line)
    return "\n".join(kept)


def places(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST make them."""
    heads = re.findall(r"^#{1,6} (.+)$", prose(path), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def broken(path: Path, text: str) -> list[str]:
    """Return the links in ``text``, a page at ``path``, that have no target."""
    found = []
    for link in ("".join(groups) for groups in LINK.findall(text)):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, place = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists():
            found.append(f"{link}: no such file")
        elif place and target.suffix == ".md" and place not in places(target):
            found.append(f"{link}: no such heading")
    return found


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_the_links_of_a_page_lead_somewhere(path):
    assert broken(path, prose(path)) == []


@pytest.mark.parametrize(
    ("link", "fault"),
    [
        ("[a](nowhere.md)", "nowhere.md: no such file"),
        ("[a](install.md#no-place)", "install.md#no-place: no such heading"),
        ("```{image} pictures/none.svg\n```", "pictures/none.svg: no such file"),
        ('<img src="none.svg">', "none.svg: no such file"),
        ("[a](install.md) [b](install.md#gpus) [c](https://a.invalid/x)", None),
    ],
)
def test_broken_links_are_detected(link, fault):
    assert broken(DOCS / "index.md", link) == ([fault] if fault else [])


def test_every_page_appears_once_in_the_site():
    listed = []
    for path in DOCS.rglob("index.md"):
        for body in TOCTREE.findall(path.read_text()):
            entries = [line for line in body.splitlines() if line and not line.startswith(":")]
            for entry in entries:
                found = sorted(path.parent.glob(f"{entry}.md"))
                assert found, f"{name(path)}: {entry} is not there"
                listed += found
    pages = [path for path in PAGES if DOCS in path.parents and path != DOCS / "index.md"]
    assert sorted(listed) == pages
