"""Check a built documentation site: it works from disk, without network.

    python .ci/check_site.py site

Fails if a page loads a script, style sheet, font or image from another host, if a link or image
inside the site leads nowhere, or if the index of the search is missing.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What a browser fetches by itself; <link> fetches for these values of rel only.
LOADED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "srcset")}
LINK_KINDS = {"stylesheet", "icon", "preload", "preconnect", "dns-prefetch"}
STYLE_URL = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""")


class Page(HTMLParser):
    """What one page loads and links to, and the places in it that links can name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.places = {"", "top"}
        self.loads += STYLE_URL.findall(text)
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called for each element."""
        given = {name: value or "" for name, value in attrs}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        self.loads += [given[name] for of, name in LOADED if of == tag and name in given]
        if tag == "link" and LINK_KINDS & set(given.get("rel", "").split()):
            self.loads.append(given.get("href", ""))
        elif tag == "a" and "href" in given:
            self.links.append(given["href"])


def is_remote(address: str) -> bool:
    """Whether a browser would ask another host for it."""
    return address.startswith("//") or urlsplit(address).scheme in ("http", "https")


def faults(site: Path) -> list[str]:
    """What is wrong with the site, one line each."""
    found = [] if (site / "searchindex.js").is_file() else ["searchindex.js: not there"]
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
                found.append(f"{name}: {address} is not in the site")
            elif target in by_file and unquote(parts.fragment) not in by_file[target].places:
                found.append(f"{name}: {address} names a place that its page does not have")
    return found


if __name__ == "__main__":
    problems = faults(Path(sys.argv[1]))
    sys.exit("\n".join(problems) if problems else 0)
