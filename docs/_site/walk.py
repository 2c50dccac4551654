"""Visit every page of the built site in a headless browser: python docs/_site/walk.py site [--screenshots FOLDER]

Fails on errors in the console, requests that leave the site, links to pages or headings that do not exist, and words
that the search does not find. Where there is no browser it says so and checks nothing. The browser is Playwright's own
(`playwright install chromium`), or the Chromium or Chrome that is installed.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

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
        """Visit every page, then follow every link within the site, to its heading."""
        ids, links = {}, {}
        for path in sorted(self.site.rglob("*.html")):
            self.name = path.relative_to(self.site).as_posix()
            self.page.goto(self.base + self.name, wait_until="load")
            ids[self.name] = set(self.page.eval_on_selector_all("[id]", "all => all.map(e => e.id)"))
            links[self.name] = set(self.page.eval_on_selector_all("a[href]", "all => all.map(e => e.href)"))
        for self.name, found in links.items():
            for link in sorted(found):
                if not link.startswith(self.base):
                    continue
                parts = urlparse(link)
                target = unquote(parts.path.lstrip("/")) or "index.html"
                target += "index.html" if target.endswith("/") else ""
                heading = unquote(parts.fragment)
                if not (self.site / target).exists():
                    self.tell(f"dead link: {link}")
                elif heading and not heading.startswith("__") and heading not in ids.get(target, {heading}):
                    self.tell(f"no such heading: {link}")
        print(f"{len(links)} pages, {sum(map(len, links.values()))} links")

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


def main() -> int:
    """The number of problems, which are printed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("site", type=Path)
    parser.add_argument("--screenshots", type=Path)
    asked = parser.parse_args()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        print("not walked: Playwright is not installed (extra docs)")
        return 0
    with sync_playwright() as playwright, served(asked.site.resolve()) as base:
        browser = launched(playwright)
        if browser is None:
            print(f"not walked: there is no browser; `playwright install chromium`, or one of {', '.join(INSTALLED)}")
            return 0
        walk = Walk(browser, asked.site.resolve(), base)
        walk.pages()
        walk.search()
        if asked.screenshots:
            walk.screenshots(asked.screenshots, browser)
        browser.close()
    print("\n".join(walk.problems) or "no problems")
    return min(len(walk.problems), 1)


if __name__ == "__main__":
    sys.exit(main())
