"""What all tests share: golden files, the tiers, the count of skipped tests, and what keeps a run short."""

from __future__ import annotations

import datetime
import functools
import gc
import os
import random
import re
import sys
import zlib
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from dnnc.cli import YOUNG

# Workers, and the processes that tests start, find compiled modules (pytest's rewritten ones too), whatever the shell
# says.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# One worker for each core is enough: the threads of NumPy's and of XGBoost's libraries would only wait for one another.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

# Processes that tests start import dnnc and `support` as the tests do, whatever folder they run in.
_folders = [Path(__file__).parent, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(str(Path(p).resolve()) for p in _folders))

# A kernel that needs a lesser schedule than the first choice is a mistake of the compiler.
os.environ["DNNC_STRICT"] = "1"

SKIPS_ALLOWED = 0  # may only fall; a test that cannot run somewhere belongs to a tier (slow, gpu) instead

# Generated cases belong to families. Of each test of a family the fast tier takes the first share of the cases, but one
# at least; the slow tier takes the second share, `make thorough` the rest. The seed decides which cases these are.
FAMILIES = {
    "samples": (1 / 56, 1 / 44),  # of op records and of operators
    "random": (1 / 42, 1 / 36),  # graphs, programs, geometries
    "choices": (1 / 48, 1 / 36),  # schedules out of spaces
    "shapes": (1 / 32, 1 / 30),  # sizes, axes, layouts
    "cases": (1 / 24, 1 / 22),  # combinations of dtypes and attributes
    "long": (0, 1 / 2),  # chosen cases that take seconds each, all of them slow
    "kernels": (1 / 5, 4 / 5),  # chosen cases that take some tenths of a second each
}
# Workers inherit it. Its default gives all runs of a day the same cases.
SEED = os.environ.setdefault("DNNC_TEST_SEED", datetime.date.today().isoformat())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden anew instead of comparing with it"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`golden(text)` compares with tests/golden/<module>/<test>.txt; `golden(text, "b")` is a second file."""
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
        assert text == file.read_text(), (
            f"differs from {file}; if that is meant, `pytest --update-golden` and read the diff"
        )

    return check


@pytest.fixture(autouse=True)
def numbers(request: pytest.FixtureRequest) -> None:
    """A test draws the same numbers from its module's generator, whichever tests ran before it."""
    import numpy as np  # it must find the variables above

    for name in {"rng", "RNG"} & vars(request.module).keys():
        setattr(request.module, name, np.random.default_rng(zlib.crc32(request.node.nodeid.encode())))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What collecting makes stays until the end: no garbage collection goes through it, then or later. Compilers make
    next to no garbage: they are not to look for it as often as Python would have them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(YOUNG, 20, 50)
        gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis draws some numbers from the sources of all loaded modules, which it reads for that: 3 s of each worker
    in a fresh clone. The fast tier does without these numbers.
    """
    if "not slow" in config.option.markexpr:
        from hypothesis.internal.conjecture import providers

        if hasattr(providers, "_get_local_constants") and hasattr(providers, "_local_constants"):
            providers._get_local_constants = lambda: providers._local_constants


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A module all of whose tests `-m` leaves out is not even imported: some of them load large packages."""
    asked = config.option.markexpr
    if collection_path.suffix != ".py" or not re.fullmatch(r"(not )?\w+( and (not )?\w+)*", asked):
        return None
    shared = re.search(r"^pytestmark = .*$", collection_path.read_text(), re.M)
    marks = set(re.findall(r"mark\.(\w+)", shared[0])) if shared else set()
    return True if marks & set(re.findall(r"not (\w+)", asked)) else None


def tier_marks(rank: int, cases: int, family: str) -> list[pytest.MarkDecorator]:
    """The marks of the case that a seed puts at this rank of all cases of a test."""
    fast, slow = FAMILIES[family]
    marks = [pytest.mark.slow] if rank >= fast * cases else []
    return [*marks, pytest.mark.thorough] if rank >= (fast + slow) * cases else marks


@pytest.hookimpl(trylast=True)  # when all cases of the test are there
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Mark the cases of families with their tiers. What `-m` leaves out becomes no items: most of the cases."""
    test, cases = metafunc.definition, metafunc._calls
    if family := test.get_closest_marker("family"):
        order = list(range(len(cases)))
        random.Random(f"{SEED} {test.nodeid}").shuffle(order)
        for rank, k in enumerate(order):
            cases[k].marks.extend(m.mark for m in tier_marks(rank, len(cases), family.args[0]))
    if not metafunc.config.option.markexpr:
        return
    asked = Expression.compile(metafunc.config.option.markexpr)
    shared = {m.name for m in test.iter_markers()}
    wanted = functools.cache(lambda own: asked.evaluate(lambda name, /, **_: name in shared or name in own))
    metafunc._calls = [c for c in cases if wanted(frozenset(m.name for m in c.marks))] or cases[:1]


def pytest_itemcollected(item: pytest.Item) -> None:
    """A test of a family that has one case."""
    family = item.get_closest_marker("family")
    if family is not None and not hasattr(item, "callspec"):
        for mark in tier_marks(0, 1, family.args[0]):
            item.add_marker(mark)


def pytest_sessionstart(session: pytest.Session) -> None:
    if reporter := session.config.pluginmanager.get_plugin("terminalreporter"):
        reporter.write_line(f"sampled cases: DNNC_TEST_SEED={SEED}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = len(reporter.stats.get("skipped", [])) if reporter else 0
    if skipped > SKIPS_ALLOWED and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(f"DNNC_TEST_SEED={SEED} gives the same cases")
    skipped = len(terminalreporter.stats.get("skipped", []))
    if skipped:
        terminalreporter.write_line(f"skipped: {skipped}, allowed: {SKIPS_ALLOWED}")
