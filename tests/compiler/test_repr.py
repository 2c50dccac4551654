"""In a shell every public object shows itself in one short line that says what it is."""

from __future__ import annotations

import logging
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.backends.registry import open_backend
from dnnc.backends.runtime.codec import encode
from dnnc.ir.graph.text import parse
from dnnc.report.layout import Table
from dnnc.report.notebook import folded, html_of

MODEL = Path(__file__).parents[2] / "examples" / "digits.onnx"
WIDE = (
    "def wide("
    + ", ".join(f"a_name_that_is_long_{k}: f32[3]" for k in range(40))
    + "):\n    y = exp(a_name_that_is_long_0)\n    return y\n"
)


@dnnc.jit
def doubled(x: Any) -> Any:
    return x * 2


def objects() -> dict[str, tuple[Any, str]]:
    f = dnnc.compile(MODEL)
    x = np.zeros((1, 1, 8, 8), np.float32)
    f(x)
    doubled(x)
    return {
        "Executable": (f, "image float32[N, 1, 8, 8] -> logits float32[N, 10]"),
        "for all sizes": (dnnc.compile(MODEL, dims={"N": (1, 9)}), "llvm"),
        "CpuTarget": (dnnc.compile(MODEL).target, "CpuTarget(cpu="),
        "Reference": (dnnc.compile(MODEL, target="reference"), "Executable for reference"),
        "wide": (dnnc.compile(parse(WIDE), target="reference"), "a_name"),
        "Report": (f.report, "digits"),
        "Profile": (f.profile(x, repeats=10), "us a call"),
        "Graph": (f.graph, "9 nodes, (image: f32[N, 1, 8, 8]) -> logits: f32[N, 10]"),
        "wide graph": (parse(WIDE), "<Graph wide: 1 node,"),
        "Jitted": (doubled, "doubled(x"),
        "bound": (f.bind([x], [np.zeros((1, 10), np.float32)]), "1 input and 1 output"),
        "Spec": (dnnc.Spec(("n", 3)), "Spec("),
        "inputs": (f.inputs, "image"),
    }


@pytest.mark.slow
def test_reprs_are_one_short_line() -> None:
    for name, (x, part) in objects().items():
        text = repr(x)
        assert part in text and "\n" not in text and len(text) < 200 and " object at 0x" not in text, (name, text)


def test_targets_that_differ_have_other_keys() -> None:
    """Their short text may be the same; cached kernels must not be."""
    backend = open_backend("llvm -mcpu=haswell", 2)
    keys = {backend.target_key}
    for name, value in {"cpu": "x", "features": "+avx", "vector_bits": 128, "registers": 7, "l1": 9, "l2": 5}.items():
        keys.add(backend.like(encode(replace(backend.target, **{name: value}))).target_key)
    assert len(keys) == 7


@pytest.mark.slow
def test_a_search_and_a_benchmark() -> None:
    tuned = dnnc.tune(MODEL, budget=2, trials=1, dims={"N": 1})
    assert "6 tasks" in repr(tuned) and "\n" not in repr(tuned) and len(repr(tuned)) < 200
    assert "f32[1, 16, 8, 8]" in str(tuned) and "relu1" in str(tuned)
    assert "<td" in balanced(tuned._repr_html_())


def balanced(text: str) -> str:
    """HTML whose elements are closed in their order."""
    ends: list[str] = []

    class Elements(HTMLParser):
        def handle_starttag(self, tag: str, attrs: Any) -> None:
            ends.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert ends.pop() == tag

    parser = Elements()
    parser.feed(text)
    parser.close()
    assert not ends
    return text


@pytest.mark.slow
def test_notebooks_get_html() -> None:
    shown = {n: x for n, (x, _) in objects().items() if n not in ("CpuTarget", "Jitted", "Spec", "inputs", "bound")}
    shown["Array"] = dnnc.array.asarray([1.5, 2.0])
    for name, x in shown.items():
        text = balanced(x._repr_html_())
        assert len(text) < 100_000 and "<script" not in text, name
    assert "1.5" in shown["Array"]._repr_html_() and "float64" in shown["Array"]._repr_html_()
    assert "conv_relu" in shown["Executable"]._repr_html_() and "gemm(" in shown["Graph"]._repr_html_()


def test_names_in_html_are_text() -> None:
    table = Table("<b>", ("<i>", "n"), (("<u>", "1"),), frozenset(("n",)))
    text = balanced(html_of([table, Table("a line", (), (("<p>",),))]))
    assert "<b>" not in text and "<i>" not in text and "<u>" not in text and "&lt;u&gt;" in text
    assert "<a" not in folded("<a href=x>", "")


@pytest.mark.slow
def test_messages_of_the_logger(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.DEBUG, "dnnc")
    dnnc.compile(MODEL, dims={"N": 1}, cache=tmp_path)
    dnnc.compile(MODEL, dims={"N": 1}, cache=tmp_path)
    told = [(r.levelname, r.getMessage()) for r in caplog.records]
    assert ("INFO", "digits for llvm: loaded") == told[-1]
    assert any(level == "INFO" and "6 kernels, compiled, 0 of them from the cache" in m for level, m in told)
    assert any((level == "DEBUG" and "pass fuse" in m) or "pass cse" in m for level, m in told)
    caplog.clear()
    dnnc.compile(MODEL, dims={"N": 1}, cache="/dev/null/none")
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and "/dev/null/none" in r.getMessage()]


@pytest.mark.slow
def test_progress_takes_a_truth_value_or_a_function() -> None:
    stages: list[str] = []
    dnnc.compile(MODEL, lambda stage, done, of: stages.append(stage), dims={"N": 1}, cache=False)
    assert stages
    for given in (True, False, None):
        assert dnnc.compile(MODEL, progress=given, dims={"N": 1}).report.programs
    with pytest.raises(dnnc.InputError, match="progress"):
        dnnc.compile(MODEL, progress="yes")  # type: ignore[arg-type]
