"""Check every page of the built site: python docs/_site/walk.py site [--screenshots FOLDER] [--no-browser]

Reads the pages: links to pages or headings that do not exist, files that are loaded from elsewhere or are missing, and
words that the search index does not hold, are problems. Then a headless browser visits them: errors in the console,
requests that leave the site, and words that the search does not find. Without a browser the second part is left out.
The browser is Playwright's own (`playwright install chromium`), or the Chromium or Chrome that is installed.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import json
import posixpath
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

INSTALLED = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WORDS = (
    "compile jit grad vmap tune quantize prune donate fork threads dynamic precision cache custom operator Winograd "
    "fusion Perfetto checkpoint optimizer sparse roofline artifact ONNX PyTorch CuPy Chainer TVM logging uninstall"
).split()
SHOWN = (
    "index", "start/install", "start/onnxruntime", "tuning", "api/dnnc", "operators", "results", "debugging",
    "troubleshooting", "custom_ops",
)  # fmt: skip
WAIT = 8000  # milliseconds that the search may take


def launched(playwright: Any) -> Any:
    """A browser; None where there is none."""
    from playwright.sync_api import Error

    paths = [None, *filter(None, map(shutil.which, INSTALLED))]
    for path in paths:
        try:
            return playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except Error:
            continue
    return None


@contextmanager
def served(site: Path) -> Iterator[str]:
    """The address of a folder, served by this process."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()


class Page(HTMLParser):
    """The headings and other anchors of a page, its links, and the files that it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.files: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.anchors |= {given[n] for n in ("id", "name") if given.get(n)}
        if tag == "a":
            self.links |= {given["href"]} if given.get("href") else set()
        elif tag in ("script", "img", "iframe", "source") and given.get("src"):
            self.files.add(given["src"])
        elif tag == "link" and given.get("rel") not in ("canonical", "next", "prev", "alternate"):
            self.files.add(given.get("href", ""))


def read(site: Path) -> tuple[dict[str, Page], list[str]]:
    """The pages of a site by their paths, and what is wrong with their links and files."""
    pages = {p.relative_to(site).as_posix(): Page(p.read_text()) for p in sorted(site.rglob("*.html"))}
    problems = []
    for name, page in pages.items():
        for link in sorted(page.links | page.files):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.files and parts.scheme != "data":
                    problems.append(f"{name}: loads {link}")
                continue
            place = (
                name if not parts.path else posixpath.normpath(posixpath.join("/", posixpath.dirname(name), parts.path))
            )
            target, heading = unquote(place).lstrip("/") or "index.html", unquote(parts.fragment)
            if (site / target).is_dir():
                target = posixpath.join(target, "index.html").removeprefix("./")
            if not (site / target).is_file():
                problems.append(f"{name}: dead link: {link}")
            elif heading and not heading.startswith("__") and target in pages and heading not in pages[target].anchors:
                problems.append(f"{name}: no such heading: {link}")
    return pages, problems


def unfound(site: Path) -> list[str]:
    """Words that the index of the search does not hold."""
    index = json.loads((site / "search" / "search_index.json").read_text())
    text = " ".join(f"{d['title']} {d['text']}" for d in index["docs"]).lower()
    return [w for w in WORDS if w.lower() not in text]


class Walk:
    """Problems of a site, found by a browser."""

    def __init__(self, browser: Any, site: Path, base: str) -> None:
        self.site, self.base, self.name = site, base, ""
        self.problems: dict[str, None] = {}
        self.page = browser.new_page(viewport={"width": 1300, "height": 900})
        self.page.on("console", lambda m: m.type in ("error", "warning") and self.tell(f"{m.type}: {m.text}"))
        self.page.on("pageerror", lambda e: self.tell(f"exception: {e}"))
        self.page.on("response", lambda r: r.status >= 400 and self.tell(f"status {r.status}: {r.url}"))
        self.page.on(
            "request", lambda r: r.url.startswith((base, "data:", "blob:")) or self.tell(f"leaves the site: {r.url}")
        )

    def tell(self, problem: str) -> None:
        self.problems[f"{self.name}: {problem[:200]}"] = None

    def pages(self) -> None:
        """Visit every page."""
        paths = sorted(self.site.rglob("*.html"))
        for path in paths:
            self.name = path.relative_to(self.site).as_posix()
            self.page.goto(self.base + self.name, wait_until="load")
        print(f"{len(paths)} pages visited")

    def search(self) -> None:
        """Type each word into the search."""
        from playwright.sync_api import Error

        self.name = "search"
        for word in WORDS:
            self.page.goto(self.base + "index.html")
            self.page.fill("input[name=query]", word)
            try:
                self.page.wait_for_selector(".md-search-result__item", state="attached", timeout=WAIT)
            except Error:
                self.tell(f"nothing is found for {word}")
        print(f"{len(WORDS)} words searched")

    def screenshots(self, folder: Path, browser: Any) -> None:
        """Pictures of ten pages, some of them dark."""
        folder.mkdir(parents=True, exist_ok=True)
        for k, name in enumerate(SHOWN):
            scheme = "dark" if k % 4 == 3 else "light"
            page = browser.new_page(viewport={"width": 1300, "height": 900}, color_scheme=scheme)  # nothing is stored
            page.goto(f"{self.base}{name}.html")
            page.wait_for_timeout(400)
            page.screenshot(path=str(folder / f"{name.replace('/', '_')}.png"))
            page.close()


def walked(site: Path, screenshots: Path | None) -> list[str]:
    """What a browser finds; a line on stdout where there is none."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        print("no browser: Playwright is not installed (extra docs); pages were read, not visited")
        return []
    with sync_playwright() as playwright, served(site) as base:
        browser = launched(playwright)
        if browser is None:
            print(
                "no browser: pages were read, not visited; `playwright install chromium`, or install one of "
                f"{', '.join(INSTALLED)}"
            )
            return []
        walk = Walk(browser, site, base)
        walk.pages()
        walk.search()
        if screenshots:
            walk.screenshots(screenshots, browser)
        browser.close()
    return list(walk.problems)


def main() -> int:
    """1 if there is a problem; all are printed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("site", type=Path)
    parser.add_argument("--screenshots", type=Path, metavar="FOLDER", help="pictures of ten pages")
    parser.add_argument("--no-browser", action="store_true", help="read the pages only")
    asked = parser.parse_args()
    site = asked.site.resolve()
    pages, problems = read(site)
    problems += [f"search: nothing holds {word}" for word in unfound(site)]
    print(f"{len(pages)} pages, {sum(len(p.links) for p in pages.values())} links, {len(WORDS)} words read")
    if not asked.no_browser:
        problems += walked(site, asked.screenshots)
    print("\n".join(problems) or "no problems")
    return min(len(problems), 1)


if __name__ == "__main__":
    sys.exit(main())
