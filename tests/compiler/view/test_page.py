"""The page: complete in itself, small, and without errors in a browser."""

from __future__ import annotations

import pickle
import re
import urllib.parse
from pathlib import Path

import numpy as np
import pytest
from command_line import dnnc as command
from command_line import dnnc_json
from pages import BROWSER, data, texts, visit

import dnnc
from dnnc.ir.errors import InputError
from dnnc.tools.sample_graphs import graph_of
from dnnc.view.collect import View, collect
from dnnc.view.page import TEXTS, html
from dnnc.view.scopes import numbered, tree

DIGITS = str(Path(__file__).resolve().parents[3] / "examples" / "digits.onnx")
GRAPH = "def g(x: f32[4, 8], *, w: f32[8, 16]):\n    return softmax(relu(matmul(x, w)))"


def test_the_page_loads_nothing_and_holds_what_was_collected(tmp_path: Path) -> None:
    f = dnnc.compile(graph_of(GRAPH), cache=False)
    f.report.html(tmp_path / "p.html", f.profile(np.zeros((4, 8), np.float32), repeats=2))
    page = (tmp_path / "p.html").read_text()
    assert len(page) < 1_000_000
    assert not re.search(r'<(script|link|img|iframe)[^>]+(src|href)="(?!data:)', page) and "default-src 'none'" in page
    found = data(page)
    assert [n["op"] for n in found["nodes"]] == ["matmul", "relu", "softmax"]
    assert any("define" in t for t in texts(page))


def test_titles_are_no_markup() -> None:
    view = collect(dnnc.compile(graph_of(GRAPH), cache=False), title="</title><script>alert(1)</script>")
    page = html(view)
    assert "<script>alert" not in page and data(page)["title"] == view.title


@pytest.mark.slow
def test_texts_that_do_not_fit_are_left_out() -> None:
    noise = [str(np.random.default_rng(k).integers(0, 1 << 62, 40_000).tolist()) for k in range(8)]
    view = View("m", "llvm", [], texts=noise, stages=["llvm"])
    view.kernels = [{"name": "k", "symbol": "s", "choice": "", "naive": k, "operator": k + 1} for k in range(0, 8, 2)]
    page = html(view)
    kept = texts(page)
    assert 0 < len(kept) < 8 and sum(map(len, kept)) < TEXTS * 2
    for k, row in zip(view.kernels, data(page)["kernels"]):
        for stage in ("naive", "operator"):
            assert row[stage] == -1 or kept[row[stage]] == noise[k[stage]]


def test_a_copy_of_a_report_has_no_page(tmp_path: Path) -> None:
    report = dnnc.compile(graph_of(GRAPH), cache=False).report
    copy = pickle.loads(pickle.dumps(report))
    assert copy == report
    with pytest.raises(InputError, match="without its executable"):
        copy.html(tmp_path / "p.html")
    with pytest.raises(InputError, match="cannot write the page"):
        report.html(tmp_path / "missing" / "p.html")


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = dnnc_json("view", DIGITS, "--dims", "N=1", "--onnx", "fused.onnx")
    assert said["page"] == "digits.html" and said["profiled"] and said["functions"] > 1
    assert data(Path("digits.html").read_text())["title"] == "digits"
    assert "without times: --no-profile" in command("view", DIGITS, "--dims", "N=1", "--no-profile")
    assert "expected a .html or .htm file" in command("view", DIGITS, "--dims", "N=1", "-o", "m.onnx", code=2)
    assert "--dims N=1" in command("view", DIGITS, code=1)


@pytest.mark.family("long")
@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
@pytest.mark.parametrize("place", ["", "#graph/nodes/nodes/1", "#kernels", "#memory", "#roofline", "#passes"])
def test_a_browser_shows_it_without_errors(place: str, tmp_path: Path) -> None:
    f = dnnc.compile(DIGITS, dims={"N": 2})
    f.report.html(tmp_path / "p.html", f.profile(np.zeros((2, 1, 8, 8), np.float32), repeats=2))
    for theme in ("light", "dark"):
        document, said = visit(tmp_path / "p.html", f"?theme={theme}{place}")
        assert 'data-ready="yes"' in document and f'data-theme="{theme}"' in document
        assert not said
    wanted = {"": "Longest kernel calls", "#graph/nodes/nodes/1": "Passes that changed it", "#kernels": "schedule",
              "#memory": "Arena", "#roofline": "FLOP per byte", "#passes": "canonicalize"}[place]  # fmt: skip
    assert wanted in document


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_ten_thousand_nodes(tmp_path: Path) -> None:
    view = View("many", "llvm", [("target", "llvm")])
    view.scopes, home = numbered(tree([()] * 10_000))
    for k in range(10_000):
        reads = [[k - 1, "4"], *([[k * 7 // 8, "4"]] if k % 3 == 0 else [])] if k > 1 else []
        row = {"op": "relu", "kind": "map", "name": f"n{k}", "line": f"v{k} = relu()", "made": [f"v{k}: f32[4]"]}
        view.nodes.append({**row, "loc": f"n{k}", "from": reads, "scope": home[k]})
    (tmp_path / "p.html").write_text(html(view))
    document, said = visit(tmp_path / "p.html", "#graph/nodes/nodes/7777")
    assert 'data-ready="yes"' in document and "n7777" in urllib.parse.unquote(document) and not said
