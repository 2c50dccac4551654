"""`dnnc prune`: files, tables within 80 columns, pages, messages."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
from command_line import dnnc, dnnc_json
from small_models import images, residual

from dnnc.cli.prune import shares
from dnnc.pruning.result import Exploration, Point, Pruned, PrunedLayer, Sensitivity
from dnnc.report.layout import fitted
from dnnc.report.lines import Line, chart, ticks
from dnnc.report.pruned import exploration_html, exploration_tables, html, tables


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(residual(), "m.onnx")
    np.save("x.npy", images(4))
    return tmp_path


def result() -> Pruned:
    layers = (
        PrunedLayer("/backbone/stage.3/block.1/conv2/Conv", "Conv", (8, 4), 1000, 100, 1.5e-4, 4.1e-5, 0.0123),
        PrunedLayer("head", "Gemm", (4, 4), 16, 16, 1e-6, 1e-6, reason="kept by 'head'"),
    )
    return Pruned(
        onnx.ModelProto(), "magnitude", "layer", layers, 64, 0.0213, 0.998, (0.91, 0.9), 3e-3, 1.2e-3,
        (20 << 20, 6 << 20), (2_000_000, 200_000), ("a note",), True, "<m>.onnx",
    )  # fmt: skip


def exploration() -> Exploration:
    points = (
        Point("none", 0.0, 1.0, 2e-3, 0.0), Point("magnitude", 0.5, 0.5, 2e-3, 0.1, 0.99),
        Point("magnitude", 0.9, 0.1, 1e-3, 0.4, 0.9), Point("2:4", 0.5, 0.5, 2.1e-3, 0.2, 0.95),
    )  # fmt: skip
    layer = Sensitivity("conv<1>", "Conv", 1000, (0.001, 0.5), 1e-4, (1.1e-4, 4e-5))
    return Exploration(points, (0.5, 0.9), (layer,), 16, ("a note",))


def test_tables_fit_80_columns() -> None:
    for t in (*tables(result()), *exploration_tables(exploration())):
        assert all(len(line) <= 80 for line in fitted(t, 80))
    layers, whole, *rest = tables(result())
    assert "10.0%" in "\n".join(fitted(layers, 80)) and "RANDOM" in rest[-1].title
    assert ("multiplications per sample", "2 M -> 200 K, 10.0%") in whole.rows
    points, _, times, _ = exploration_tables(exploration())
    assert "2.00 x" in "\n".join(fitted(points, 80)) and times.rows == (("conv<1>", "100 us", "110 us", "40 us"),)


def test_pages_need_nothing_and_have_both_themes() -> None:
    for page in (html(result()), exploration_html(exploration())):
        assert "http" not in page and "<script" not in page and "prefers-color-scheme: dark" in page
    assert "&lt;m&gt;.onnx" in html(result()) and "kept by &#39;head&#39;" in html(result())
    page = exploration_html(exploration())
    assert page.count("<polyline") == 2 and "conv&lt;1&gt;" in page and 'style="--shade: 0.9' in page
    assert 'gain" style="--shade: 0.0">110 us' in page and 'gain" style="--shade: 0.6">40 us' in page
    plots = re.findall('<svg viewBox="0 0 520.*?</svg>', page)
    assert len(plots) == 2 and all(ElementTree.fromstring(p) is not None for p in plots)


def test_charts() -> None:
    assert ticks(1.0) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0]) and ticks(0.0) == [0.0, 1.0]
    assert all(t[-1] >= v and len(t) <= 7 for v in (0.013, 0.97, 1.01, 37, 5000) for t in [ticks(v)])
    assert "<polyline" not in chart("y", "x", [Line("a", [(0.5, 1.0)]), Line("b", [])])


def test_shares_of_the_command_line() -> None:
    assert shares([]) is None and shares(["0.8"]) == 0.8
    assert shares(["0.8", "a=b=0.5"]) == {"a=b": 0.5, "*": 0.8}


@pytest.mark.slow
def test_a_model_is_written_with_its_page(here: Path) -> None:
    out = dnnc("prune", "m.onnx", "--data", "x.npy", "--html", "r.html", "--layer-errors", "--sparsity", "0.8")
    assert "3 of 4 layers pruned" in out and "m.pruned.onnx:" in out and "report: r.html" in out
    assert (here / "r.html").read_text().count('class="paid"') == 5  # and the key
    said = dnnc_json(
        "prune", "m.onnx", "--method", "structured", "-o", "q.dnnc", "--no-measure", "--multiple", "4", "--keep", "s"
    )
    assert said["path"] == "q.dnnc" and said["error"] is None
    assert "float32[4, 5]" in dnnc("run", "q.dnnc", "--input", "x=x.npy")


@pytest.mark.slow
def test_an_exploration_is_shown(here: Path) -> None:
    out = dnnc(
        "prune", "m.onnx", "--data", "x.npy", "--explore", "--methods", "magnitude,block", "--sparsities", "0.5, 0.9",
        "--html", "e.html",
    )  # fmt: skip
    assert out.count("magnitude  ") == 2 and "report: e.html" in out and "<svg" in Path("e.html").read_text()
    assert not Path("m.pruned.onnx").exists()


@pytest.mark.slow
def test_mistakes(here: Path) -> None:
    Path("m.pruned.onnx").write_text("precious")
    out = " ".join(dnnc("prune", "m.onnx", code=2).replace("│", " ").split())
    assert "m.pruned.onnx exists" in out and Path("m.pruned.onnx").read_text() == "precious"
    assert "expected a share" in dnnc("prune", "m.onnx", "--sparsity", "90", "--force", code=2)
    assert "did you mean 2:4" in dnnc("prune", "m.onnx", "--method", "2:3", code=2)
    assert "only with --explore" in dnnc("prune", "m.onnx", "--methods", "block", code=2)
    assert "writes no model" in dnnc("prune", "m.onnx", "--explore", "-o", "a.onnx", code=2)
    assert "errors are measured on data" in dnnc("prune", "m.onnx", "--explore", code=1)
