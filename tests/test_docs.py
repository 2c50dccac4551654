"""The Python blocks of the documents run: all blocks of one document in one namespace, in their order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text: str) -> list[tuple[int, str]]:
    """(line of its first statement, code) of every block that is marked `python`."""
    return [(text.count("\n", 0, m.start(1)) + 1, m[1]) for m in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S)]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.stem)
def test_blocks_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    namespace: dict[str, Any] = {"__name__": "__docs__"}
    for line, code in blocks(path.read_text()):
        exec(compile("\n" * (line - 1) + code, str(path), "exec"), namespace)


def test_links_lead_somewhere() -> None:
    bad = []
    for path in DOCUMENTS:
        prose = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)#\s]+)", prose):
            if "://" not in target and not (path.parent / target).exists():
                bad.append(f"{path.name}: {target}")
    assert not bad
