"""`dnnc.prune` and `dnnc.explore_pruning`: what becomes of models, what is measured, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from small_models import images, model, residual, transformer

import dnnc
from dnnc.frontends.onnx.reader import initial_arrays
from dnnc.ir.errors import InputError, UnsupportedError

PLAIN: dict[str, Any] = {"measure": False}
NET = """
  agraph (float[N, 6] x) => (float[N, 5] y) {
    a = Gemm(x, w1, b1)
    r = Relu(a)
    s = Gemm(r, w2, b2)
    t = Relu(s)
    y = Gemm(t, w3)
  }
"""


def net() -> onnx.ModelProto:
    return model(NET, w1=(6, 16), b1=(16,), w2=(16, 24), b2=(24,), w3=(24, 5))


def weights(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}


@pytest.mark.parametrize("method, scope", [
    ("magnitude", "layer"), ("magnitude", "global"), ("magnitude", "lamp"), ("random", "layer"), ("random", "global"),
])  # fmt: skip
def test_shares_of_weights(method: str, scope: str) -> None:
    p = dnnc.prune(net(), sparsity=0.75, method=method, scope=scope, **PLAIN)
    assert p.sparsity == pytest.approx(0.75, abs=0.01) and p.error is None and p.samples == 0
    before, after = weights(net()), weights(p.model)
    for n in ("w1", "w2", "w3"):
        assert ((after[n] == 0) | (after[n] == before[n])).all()
        if scope == "layer":
            assert (after[n] == 0).mean() == 0.75
    assert all((after[n] == before[n]).all() for n in ("b1", "b2"))
    assert p.weights == (600, 150) and p.operations == (600, 150)


def test_files_with_sparse_initializers(tmp_path: Path) -> None:
    """Written, read by dnnc and others, pruned again and trained on; negative zeros stay."""
    made = model(NET, w1=(6, 80), b1=(80,), w2=(80, 90), b2=(90,), w3=(90, 5))
    p = dnnc.prune(made, sparsity={"a": 0.2, "?": 0.9}, **PLAIN)
    after = weights(p.model)
    after["w2"] = np.where(np.arange(80)[:, None] == 3, np.float32(-0.0), after["w2"])
    next(t for t in p.model.graph.initializer if t.name == "w2").CopyFrom(numpy_helper.from_array(after["w2"], "w2"))
    p.save(tmp_path / "dense.onnx")
    p.save(tmp_path / "sparse.onnx", compress=True)
    read = onnx.load(tmp_path / "sparse.onnx")
    assert {t.values.name for t in read.graph.sparse_initializer} == {"w2", "w3"}
    assert 3 * (tmp_path / "sparse.onnx").stat().st_size < 2 * (tmp_path / "dense.onnx").stat().st_size
    onnx.checker.check_model(read)
    x = np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32)
    want = dnnc.compile(p.model, dims={"N": 3})(x)
    session = onnxruntime.InferenceSession(read.SerializeToString())
    np.testing.assert_allclose(session.run(None, {"x": x})[0], want, rtol=1e-5, atol=1e-5)
    bound = dnnc.compile(tmp_path / "sparse.onnx", dims={"N": 3}, parameters=True)
    for f in (dnnc.compile(tmp_path / "sparse.onnx", dims={"N": 3}), bound):
        np.testing.assert_allclose(f(x), want, rtol=1e-5, atol=1e-5)
    again = dnnc.prune(tmp_path / "sparse.onnx", sparsity=0.9, **PLAIN)
    assert [x.name for x in again.layers] == ["a", "s", "y"] and not again.model.graph.sparse_initializer
    assert (weights(again.model)["w2"] == after["w2"]).all()
    assert (initial_arrays(read.graph, None)["w2"].view(np.int32) == after["w2"].view(np.int32)).all()
    module = dnnc.nn.from_onnx(tmp_path / "sparse.onnx")
    assert {n: w.shape for n, w in module.named_parameters()} == {n: w.shape for n, w in after.items()}


def test_shares_by_patterns_and_what_stays() -> None:
    p = dnnc.prune(net(), sparsity={"a": 0.25, "?": 0.5}, keep=["s"], **PLAIN)
    assert [round(x.density, 2) for x in p.layers] == [0.75, 1.0, 0.5]
    assert [x.reason for x in p.layers] == ["", "kept by 's'", ""]
    p = dnnc.prune(net(), sparsity={"a": 0.25}, **PLAIN)
    assert [x.reason for x in p.layers][1:] == ["no pattern of the sparsities fits it"] * 2


def test_two_of_four_and_blocks() -> None:
    p = dnnc.prune(residual(), method="2:4", **PLAIN)
    assert {x.name: x.reason for x in p.layers} == {
        "a": "3 input channels: no four to choose from", "c": "depthwise: few weights, and nothing to gain", "s": "",
        "logits": "",
    }  # fmt: skip
    w = weights(p.model)["w3"].reshape(8, 2, 4)
    assert ((w != 0).sum(-1) == 2).all()
    p = dnnc.prune(residual(), method="block", block="4x4", sparsity=0.5, **PLAIN)
    blocks = (weights(p.model)["w3"].reshape(2, 4, 2, 4) != 0).all((1, 3))
    assert blocks.sum() == 2


def test_reports() -> None:
    p = dnnc.prune(net(), method="structured", **PLAIN)
    assert json.loads(p.to_json())["layers"][0]["density"] == 0.5
    assert "the output y needs all of its output channels" in str(p)
    assert "2 of 3 layers pruned" in p.text() and repr(p).startswith("<Pruned agraph: structured")
    assert p.sizes[1] < 0.5 * p.sizes[0]
    heads = dnnc.prune(transformer(), method="structured", **PLAIN)
    assert "3 of 6 layers pruned" in str(heads) and heads.operations[1] == 0.5 * heads.operations[0]
    nothing = dnnc.prune(transformer(), method="structured", keep=["q", "k", "v"], **PLAIN)
    assert "no channels could be removed" in str(nothing) and nothing.sparsity == 0


@pytest.mark.parametrize("options, message", [
    (dict(sparsity=1.0), "nothing would be left"),
    (dict(sparsity=-0.1), "expected a number from 0 to 1"),
    (dict(sparsity=float("nan")), "expected a number from 0 to 1"),
    (dict(sparsity={"zz*": 0.5}), "sparsity: no layer fits 'zz\\*'; layers are a, s, y"),
    (dict(sparsity={"a": 0.5}, scope="global"), "scope=\"layer\""),
    (dict(method="2:4", sparsity=0.5), "exactly half"),
    (dict(method="2:5"), "expected one of magnitude"),
    (dict(method="block", block="8"), "expected output and input channels"),
    (dict(method="block", block=(0, 8)), "at least 1"),
    (dict(candidates=2), "structured"),
    (dict(scope="lamp", method="random"), "compares magnitudes"),
    (dict(method="structured", candidates=2), "candidates are compared by their errors"),
    (dict(keep="zz"), "keep: no layer fits"),
    (dict(layer_errors=1), "expected True or False"),
])  # fmt: skip
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dnnc.prune(net(), measure=False, **options)


def test_models_that_cannot_be_pruned() -> None:
    half = net()
    for t in half.graph.initializer:
        t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(t).astype(np.float16), t.name))
    with pytest.raises((UnsupportedError, dnnc.DnncError)):
        dnnc.prune(half, **PLAIN)
    bad = net()
    w = weights(bad)["w1"].copy()
    w[0, 0] = np.nan
    bad.graph.initializer[0].CopyFrom(numpy_helper.from_array(w, "w1"))
    p = dnnc.prune(bad, **PLAIN)
    assert p.layers[0].reason == "1 of its weights are not finite" and p.layers[0].density == 1
    with pytest.raises(InputError, match="errors are measured on data"):
        dnnc.explore_pruning(net())


@pytest.mark.slow
def test_errors_and_times_are_measured() -> None:
    x = np.random.default_rng(0).standard_normal((32, 6)).astype(np.float32)
    p = dnnc.prune(net(), x, sparsity=0.5, layer_errors=True, metric=lambda f: float(f(x).std()))
    assert p.error and 0 < p.error < 1 and p.agreement is not None and p.score and p.before and p.after
    want, got = (dnnc.compile(m)(x) for m in (net(), p.model))
    assert p.error == pytest.approx(np.sqrt(((got - want) ** 2).sum() / (want**2).sum()), rel=1e-3)
    assert all(layer.error and layer.error > 0 for layer in p.layers)
    assert dnnc.prune(net(), x, sparsity=0.0).error == 0.0
    no_data = dnnc.prune(net(), sparsity=0.5)
    assert no_data.error is None and no_data.after


@pytest.mark.slow
def test_the_best_of_random_candidates() -> None:
    x = images(32)
    plain = dnnc.prune(residual(), x, method="structured", multiple=1)
    best = dnnc.prune(residual(), x, method="structured", multiple=1, candidates=6, seed=1)
    assert best.agreement >= plain.agreement and "of 7 candidates" in " ".join(best.notes)
    by_metric = dnnc.prune(
        residual(), x, method="structured", multiple=1, candidates=3, metric=lambda f: -float(np.abs(f(x)).max())
    )
    assert by_metric.score is not None


@pytest.mark.slow
def test_a_pruned_model_is_trained_on() -> None:
    p = dnnc.prune(residual(), method="structured", **PLAIN)
    module = dnnc.nn.from_onnx(p.model)
    step = dnnc.train_step(lambda m, x: (m(x) ** 2).mean(), dnnc.optim.SGD(lr=0.1), module)
    losses = [float(step(images(4))) for _ in range(5)]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_an_exploration() -> None:
    e = dnnc.explore_pruning(residual(), images(8), sparsities=(0.5, 0.9), methods=("magnitude", "2:4", "structured"))
    assert [(p.method, p.sparsity) for p in e.points] == [
        ("none", 0.0), ("magnitude", 0.5), ("magnitude", 0.9), ("2:4", 0.5), ("structured", 0.5), ("structured", 0.9),
    ]  # fmt: skip
    assert e.points[0].error == 0 and e.points[1].error < e.points[2].error
    assert e.points[1].density == pytest.approx(0.5, abs=0.01) and all(p.seconds for p in e.points)
    assert [x.name for x in e.layers] == ["a", "s", "logits"] and all(x.errors[0] < x.errors[1] for x in e.layers)
    assert "sensitivity" not in str(e) and "90%" in str(e) and json.loads(e.to_json())["points"][0]["method"] == "none"
