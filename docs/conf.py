"""How Sphinx builds the documentation site. ``make docs`` runs it, strictly and without network."""

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
exclude_patterns = ["pictures"]
language = "en"
highlight_language = "none"  # of blocks that name none: commands, and what they print

# Headings down to the third level can be linked to: page.md#some-heading.
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "sbpflow"
html_theme_options = {"navigation_with_keys": True}
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
# Extracts in search results would be fetched page by page, which browsers refuse on file:// pages.
html_show_search_summary = False
html_search_scorer = str(ROOT / "docs" / "search_scorer.js")

# Files at the top of the repository that are pages of the site, too. Other files there that a page
# links to, such as records of benchmarks, are copied into the site.
TOP_FILES = re.compile(r"\]\((?:\.\./)+(CHANGELOG|CONTRIBUTING|SECURITY)\.md\b")


def link_to_top_files(app: Sphinx, page: str, source: list[str]) -> None:
    """Links to SECURITY.md and the like lead to their pages in the site."""
    source[0] = TOP_FILES.sub(lambda found: f"](/{found[1].lower()}.md", source[0])


def name_source_file(
    app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    """Each class and function of the API reference says which file it is in."""
    if what in ("class", "exception", "function"):
        module = sys.modules[str(getattr(value, "__module__", None))]
        file = Path(str(module.__file__)).resolve().relative_to(ROOT)
        lines += ["", f"Source: ``{file}``"]


def setup(app: Sphinx) -> None:
    """Sphinx calls this once."""
    app.connect("source-read", link_to_top_files)
    app.connect("autodoc-process-docstring", name_source_file)
