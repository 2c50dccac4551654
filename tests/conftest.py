"""What all tests share: golden files, the GPU tier, and the count of skipped tests."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

SKIPS_ALLOWED = 0  # may only fall; a test that cannot run somewhere belongs to a tier (slow, gpu) instead


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew instead of comparing with it")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`golden(text)` compares with tests/golden/<test module>/<test>.txt; `golden(text, "b")` is a second file of the same test."""
    path = Path(request.path)
    name = re.sub(r"[^\w.=-]+", "_", request.node.name).strip("_")
    folder = Path(__file__).parent / "golden" / path.relative_to(Path(__file__).parent).with_suffix("")

    def check(text: str, part: str = "") -> None:
        file = folder / f"{name}{'.' + part if part else ''}.txt"
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        assert file.exists(), f"there is no {file}; `pytest --update-golden` writes it"
        assert text == file.read_text(), f"differs from {file}; if that is meant, `pytest --update-golden` and read the diff"

    return check


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = len(reporter.stats.get("skipped", [])) if reporter else 0
    if skipped > SKIPS_ALLOWED and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = len(terminalreporter.stats.get("skipped", []))
    if skipped:
        terminalreporter.write_line(f"skipped: {skipped}, allowed: {SKIPS_ALLOWED}")
