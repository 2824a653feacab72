"""Sphinx configuration of the documentation site. ``make docs`` builds the site offline."""

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import sbpflow

project = "sbpflow"
author = "the sbpflow authors"
release = version = sbpflow.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["pictures", "static"]
language = "en"
highlight_language = "none"  # for blocks without a language

# Links to headings of levels 1 to 3 work: page.md#some-heading.
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["narrow.css"]
html_title = "sbpflow"
html_theme_options = {"navigation_with_keys": True}
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
# Search summaries need to fetch pages, but browsers block these requests on file:// pages.
html_show_search_summary = False
html_search_scorer = str(ROOT / "docs" / "search_scorer.js")

# These files in the repository root are also pages of the site. Other linked files, such as
# benchmark records, are copied into the site.
TOP_FILES = re.compile(r"\]\((?:\.\./)+(CHANGELOG|CONTRIBUTING|SECURITY)\.md\b")


def link_to_top_files(app: Sphinx, page: str, source: list[str]) -> None:
    """Redirect links to SECURITY.md and the other root files to their pages in the site."""
    source[0] = TOP_FILES.sub(lambda found: f"](/{found[1].lower()}.md", source[0])


def name_source_file(
    app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    """Add the source file to each class and function of the API reference."""
    if what in ("class", "exception", "function"):
        module = sys.modules[str(getattr(value, "__module__", None))]
        file = Path(str(module.__file__)).resolve().relative_to(ROOT)
        lines += ["", f"Source: ``{file}``"]


def setup(app: Sphinx) -> None:
    """Connect the event handlers."""
    app.connect("source-read", link_to_top_files)
    app.connect("autodoc-process-docstring", name_source_file)
