"""Check that a built documentation site works from disk, without network access.

    python .ci/check_site.py site

The check fails if a page loads a script, style sheet, font or image from another host, if an
internal link or image is broken, or if the search index is missing.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Browsers load the addresses in these attributes, and in `<link>` elements with these values of
# `rel`.
LOADED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "srcset")}
LINK_KINDS = {"stylesheet", "icon", "preload", "preconnect", "dns-prefetch"}
STYLE_URL = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""")


class Page(HTMLParser):
    """Collects a page's loaded resources, links, and link targets."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.places = {"", "top"}
        self.loads += STYLE_URL.findall(text)
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record an element's resources, link and targets."""
        given = {name: value or "" for name, value in attrs}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        self.loads += [given[name] for of, name in LOADED if of == tag and name in given]
        if tag == "link" and LINK_KINDS & set(given.get("rel", "").split()):
            self.loads.append(given.get("href", ""))
        elif tag == "a" and "href" in given:
            self.links.append(given["href"])


def is_remote(address: str) -> bool:
    """Return whether the address is on another host."""
    return address.startswith("//") or urlsplit(address).scheme in ("http", "https")


def faults(site: Path) -> list[str]:
    """Return the problems with the site, one line each."""
    found = [] if (site / "searchindex.js").is_file() else ["searchindex.js is missing"]
    for style in sorted(site.rglob("*.css")):
        for address in STYLE_URL.findall(style.read_text(encoding="utf-8")):
            found.append(f"{style.relative_to(site)}: loads {address}")
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    if not pages:
        found.append("no page")
    by_file = {path.resolve(): page for path, page in pages.items()}
    for path, page in pages.items():
        name = path.relative_to(site)
        found += [f"{name}: loads {address}" for address in page.loads if is_remote(address)]
        for address in [*page.loads, *page.links]:
            parts = urlsplit(address)
            if parts.scheme or address.startswith("//"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
            if not target.is_file():
                found.append(f"{name}: {address} is not a file of the site")
            elif target in by_file and unquote(parts.fragment) not in by_file[target].places:
                found.append(f"{name}: {address} is a link to a missing anchor")
    return found


if __name__ == "__main__":
    problems = faults(Path(sys.argv[1]))
    sys.exit("\n".join(problems) if problems else 0)
