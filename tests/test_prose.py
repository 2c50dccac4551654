"""The prose of pages and public docstrings: the rules of `support.prose`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import dnnc
import dnnc.nn.functional
from support.prose import complaints, of_docstring, sentences

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Sentences that break a rule, on pages that were written before there were rules. These numbers may only fall.
LEFT: dict[str, int] = {"docs/pruning.md": 1}


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_pages_follow_the_style(path: Path) -> None:
    found = complaints(path.read_text())
    left = LEFT.get(path.relative_to(ROOT).as_posix(), 0)
    assert len(found) <= left, "\n".join(f"{path.name}:{line}: {rule}: {text}" for line, rule, text in found)
    assert len(found) > left - 3, f"lower the number in LEFT: {len(found)}"


@pytest.mark.parametrize(
    "text",
    [
        "What kernels read is packed.",
        "Who wants numbers passes them in.",
        "This is an op of one's own.",
        "Sizes that the data tells are fresh dims.",
        "The graph is read, then the plan is made, then the code is written.",
        "a " * 26 + "word.",
    ],
)
def test_rules_are_noticed(text: str) -> None:
    assert complaints(text)


def test_code_tables_and_lists_are_divided() -> None:
    text = "# Title\n\nOne `x.y` here. Two.\n\n```python\nwhat.is(this)\n```\n\n"
    text += "- three\n- four\n  more\n\n| five | six |\n|---|---|\n"
    assert [s.text for s in sentences(text) if s.text.strip("-")] == [
        "One CODE here.",
        "Two.",
        "three",
        "four more",
        "five",
        "six",
    ]


# --- messages ---------------------------------------------------------------------------------------------------------


def test_messages_count_in_the_singular_too() -> None:
    """`count(n, "node")` of dnnc.ir.errors says `1 node`; an f-string with a number before a plural says `1 nodes`."""
    plural = re.compile(r"\{len\([^{}]*\)\} (?!bytes\b|ways\b|types\b)[a-z]+s\b")
    code = (p for d in ("compiler", "ir", "passes", "backends", "autotune") for p in sorted((ROOT / d).rglob("*.py")))
    assert not [f"{p.relative_to(ROOT)}: {m[0]}" for p in code for m in plural.finditer(p.read_text())]


# --- docstrings of public names ---------------------------------------------------------------------------------------

PACKAGES = [dnnc, dnnc.array, dnnc.array.fft, dnnc.array.linalg, dnnc.nn, dnnc.nn.functional, dnnc.optim]
LEFT_IN_DOCSTRINGS = 0  # may only fall


def public() -> Iterator[tuple[str, str]]:
    """(name, docstring) of the functions and classes of the reference, and of the classes' public methods."""
    for package in PACKAGES:
        for name in getattr(package, "__all__", None) or dir(package):
            thing = getattr(package, name)
            if name.startswith("_") or not (inspect.isclass(thing) or inspect.isroutine(thing)):
                continue
            yield f"{package.__name__}.{name}", inspect.getdoc(thing) or ""
            for method in vars(thing).values() if inspect.isclass(thing) and "dnnc" in thing.__module__ else ():
                if inspect.isfunction(method) and not method.__name__.startswith("_"):
                    yield f"{package.__name__}.{name}.{method.__name__}", inspect.getdoc(method) or "-"


@pytest.mark.slow
def test_public_names_have_docstrings() -> None:
    assert not [name for name, text in public() if not text]


@pytest.mark.slow
def test_docstrings_follow_the_style() -> None:
    told = {name: complaints(of_docstring(text)) for name, text in public()}
    lines = [f"{name}: {rule}: {text}" for name, found in told.items() for _, rule, text in found]
    assert len(lines) <= LEFT_IN_DOCSTRINGS, "\n".join(lines)


def test_layers_have_the_signature_of_their_function() -> None:
    assert list(inspect.signature(dnnc.nn.AvgPool2d).parameters)[:3] == ["kernel_size", "stride", "padding"]
    assert "key" not in inspect.signature(dnnc.nn.Dropout).parameters
