"""What a page holds, read back; and the page in a browser, where there is one."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

BROWSER = next((found for n in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(n))), None)


def part(page: str, name: str) -> str:
    found = re.search(rf'<script id="{name}"[^>]*>([^<]*)</script>', page)
    assert found, f"the page has no {name}"
    return found[1].strip()


def data(page: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(part(page, "data"))))


def texts(page: str) -> list[str]:
    return [gzip.decompress(base64.b64decode(t)).decode() for t in part(page, "texts").split("\n")]


def visit(page: Path, place: str = "") -> tuple[str, list[str]]:
    """The document after the scripts have run, and what the console said."""
    assert BROWSER is not None
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=9000",
        "--window-size=1400,900",
    ]
    command = [BROWSER, *options, "--enable-logging=stderr", "--dump-dom", f"{page.as_uri()}{place}"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return run.stdout, [line for line in run.stderr.splitlines() if "CONSOLE" in line]
