"""Tests the errors that .ci/check_site.py finds in a built site."""

import runpy
from pathlib import Path

import pytest

CHECK = Path(__file__).resolve().parents[2] / ".ci" / "check_site.py"


@pytest.fixture
def site(tmp_path) -> Path:
    (tmp_path / "searchindex.js").touch()
    (tmp_path / "_static").mkdir()
    (tmp_path / "_static" / "style.css").write_text("a { background: url('data:image/png') }")
    head = '<link rel="stylesheet" href="_static/style.css">'
    link = '<a href="index.html#here">x</a> <a href="https://example.invalid">elsewhere</a>'
    (tmp_path / "index.html").write_text(f'{head}<p id="here">{link}</p>')
    return tmp_path


def faults(site: Path) -> list[str]:
    return runpy.run_path(str(CHECK))["faults"](site)


def test_a_site_that_needs_no_network_passes(site):
    assert faults(site) == []


@pytest.mark.parametrize(
    ("element", "fault"),
    [
        ('<script src="https://cdn.invalid/a.js"></script>', "loads https://cdn.invalid/a.js"),
        ('<script src="//cdn.invalid/a.js"></script>', "loads //cdn.invalid/a.js"),
        ('<link rel="preload" href="http://fonts.invalid/f">', "loads http://fonts.invalid/f"),
        ('<img src="https://badge.invalid/b.svg">', "loads https://badge.invalid/b.svg"),
        ("<style>@import 'https://css.invalid/c.css'</style>", "loads https://css.invalid/c.css"),
        ('<a href="gone.html">x</a>', "gone.html is not a file of the site"),
        ('<img src="gone.svg">', "gone.svg is not a file of the site"),
        ('<a href="#gone">x</a>', "#gone is a link to a missing anchor"),
        (
            '<a href="index.html#gone">x</a>',
            "index.html#gone is a link to a missing anchor",
        ),
    ],
)
def test_network_resources_and_dead_links_are_detected(site, element, fault):
    (site / "page.html").write_text(element)
    assert faults(site) == [f"page.html: {fault}"]


def test_a_font_in_a_style_sheet_is_detected(site):
    (site / "_static" / "style.css").write_text("@font-face { src: url(https://f.invalid/f) }")
    assert faults(site) == ["_static/style.css: loads https://f.invalid/f"]


def test_a_site_without_search_or_pages_is_found(site):
    (site / "searchindex.js").unlink()
    (site / "index.html").unlink()
    assert faults(site) == ["searchindex.js is missing", "no page"]
