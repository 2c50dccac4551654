"""`dnnc quantize`: files, tables within 80 columns, the page, messages."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import dnnc, dnnc_json
from small_models import images, residual

from dnnc.quantization.result import LayerResult, Quantized
from dnnc.report.layout import fitted
from dnnc.report.quantized import html, tables

METRIC = "import numpy as np\ndef metric(model):\n    return float(model(np.load('x.npy')).std())\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(residual(), "m.onnx")
    np.save("x.npy", images(4))
    return tmp_path


def result() -> Quantized:
    layers = (
        LayerResult("/backbone/stage.3/block.1/conv2/Conv", "Conv", "int8", 1.5e-4, 4.1e-5, 0.0123),
        LayerResult("head", "Gemm", "float", 1e-6, 2e-6, 0.5, reason="gains nothing: int8 2 us, float 1 us"),
    )
    return Quantized(
        onnx.ModelProto(), "auto", layers, 64, 0.0213, 0.998, (0.91, 0.9), 3e-3, 1.2e-3, (20 << 20, 6 << 20),
        ("a note",), True, "<m>.onnx",
    )  # fmt: skip


def test_tables_fit_80_columns() -> None:
    layers, whole, *rest = tables(result())
    for t in (layers, whole):
        assert all(len(line) <= 80 for line in fitted(t, 80))
    text = "\n".join(fitted(layers, 80))
    assert "150 us" in text and "109 us" in text and "gains nothing" in text
    assert ("metric", "0.91 -> 0.9") in whole.rows and "RANDOM" in rest[-1].title


def test_the_page_needs_nothing_and_has_both_themes() -> None:
    page = html(result())
    assert "http" not in page and "<script" not in page and "prefers-color-scheme: dark" in page
    assert "&lt;m&gt;.onnx" in page and "gains nothing: int8 2 us, float 1 us" in page and "109 us" in page
    assert re.search(r'class="after" style="width: 27\.33%', page)
    plain = html(Quantized(onnx.ModelProto(), "int8", (LayerResult("a", "Conv", "int8"),), 1))
    assert "time in float" not in plain and "reason" not in plain


@pytest.mark.slow
def test_a_model_is_written_with_its_page(here: Path) -> None:
    out = dnnc(
        "quantize", "m.onnx", "--data", "x.npy", "--html", "r.html", "--layer-errors", "--gptq", "--smooth", "0.5"
    )
    assert "4 of 4 layers quantized (int8), 4 samples" in out and "m.int8.onnx:" in out and "report: r.html" in out
    assert (here / "r.html").read_text().count('class="paid"') == 5  # and the key
    said = dnnc_json(
        "quantize", "m.onnx", "--data", "x.npy", "-o", "q.dnnc", "--no-measure", "--keep", "a", "--activations", "int8",
        "--method", "percentile", "--percentile", "99.9", "--bias-correction", "--samples", "2", "--form", "operators",
    )  # fmt: skip
    assert said["path"] == "q.dnnc" and said["samples"] == 2 and said["layers"][0]["reason"] == "kept by 'a'"
    assert "float32[4, 5]" in dnnc("run", "q.dnnc", "--input", "x=x.npy")
    assert json.loads(json.dumps(said)) == said


@pytest.mark.slow
def test_weights_and_a_metric(here: Path) -> None:
    Path("metric.py").write_text(METRIC)
    out = dnnc("quantize", "m.onnx", "--data", "x.npy", "--scheme", "w4a16", "--block", "16", "--no-measure")
    assert "only weights of products" in out and "m.w4a16.onnx" in out
    said = dnnc_json(
        "quantize",
        "m.onnx",
        "--data",
        ".",
        "--scheme",
        "auto",
        "--metric",
        "metric.py",
        "--max-error",
        "9",
        "-o",
        "a.onnx",
    )
    assert len(said["score"]) == 2 and said["error"] < 1


@pytest.mark.slow
def test_mistakes(here: Path) -> None:
    assert "calibration needs data" in dnnc("quantize", "m.onnx", code=1)
    Path("m.int8.onnx").write_text("precious")
    out = " ".join(dnnc("quantize", "m.onnx", "--data", "x.npy", code=2).replace("│", " ").split())
    assert "m.int8.onnx exists" in out and "--force" in out and Path("m.int8.onnx").read_text() == "precious"
    assert "read by this command" in dnnc("quantize", "m.onnx", "--data", "x.npy", "-o", "m.onnx", "--force", code=2)
    assert "did you mean w8a16" in dnnc("quantize", "m.onnx", "--scheme", "w8a", code=2)
    auto = ("quantize", "m.onnx", "--data", "x.npy", "--scheme", "auto", "--metric")
    assert "there is no script none.py" in dnnc(*auto, "none.py", code=1)
    Path("bad.py").write_text("1 / 0")
    assert "bad.py failed when it was read: ZeroDivisionError" in dnnc(*auto, "bad.py", code=1)
    Path("empty.py").write_text("metric = 3")
    assert "has an int of that name" in dnnc(*auto, "empty.py", code=1)
    Path("fails.py").write_text("def metric(model):\n    return {}['accuracy']")
    assert "metric of fails.py failed at line 2: KeyError: 'accuracy'" in dnnc(*auto, "fails.py", code=1)


@pytest.mark.slow
def test_random_numbers_are_warned_of(here: Path) -> None:
    out = dnnc("quantize", "m.onnx", "--random", "--no-measure", "--dims", "N=2")
    assert out.count("RANDOM") == 2
    q = onnx.load("m.int8.onnx")
    assert sum(n.op_type == "QuantizeLinear" for n in q.graph.node) == 7
