"""The parts of a quantization by themselves: ranges, rounding, samples, placement, options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from small_models import images, model, residual, transformer

import dnnc
from dnnc.ir.errors import InputError, ModelError, UnsupportedError
from dnnc.quantization import ranges
from dnnc.quantization.agreement import _apart, allowed, too_dear
from dnnc.quantization.calibration import Observed, columns
from dnnc.quantization.data import Input, Samples, samples
from dnnc.quantization.decisions import Decisions
from dnnc.quantization.layers import Layer, found_layers
from dnnc.quantization.measure import Difference, Times
from dnnc.quantization.onnx_graph import opened
from dnnc.quantization.placement import placed
from dnnc.quantization.plan import unusable
from dnnc.quantization.ranges import Histogram, chosen_range, grid
from dnnc.quantization.rounding import corrected_bias, gptq, nearest, scales_of
from dnnc.quantization.smoothing import smooth, smoothable

RNG = np.random.default_rng(0)
IMAGE = Input("x", np.dtype(np.float32), ("N", 3, 8, 8))


# --- decisions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probabilities", [False, True])
@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_changed_decisions_are_expected_from_few_rows(noise: float, probabilities: bool) -> None:
    rng = np.random.default_rng(1)
    logits = 2 * rng.standard_normal((20000, 10))
    moved = logits + noise * rng.standard_normal(logits.shape)
    if probabilities:
        logits, moved = (np.exp(a) / np.exp(a).sum(1, keepdims=True) for a in (logits, moved))
    changed = (logits.argmax(1) != moved.argmax(1)).mean()
    for k in (0, 100):
        few = Decisions()
        few.add([moved[k : k + 48]], [logits[k : k + 48]])
        assert few.changed is not None and 0.4 * changed < few.changed < 2.5 * changed
    same = Decisions()
    same.add([logits], [logits])
    assert same.changed == same.noise == 0


def test_more_bits_cost_no_large_gain_and_few_rows_are_doubted() -> None:
    layers, alone = {"a": 4.0, "b": 4.0}, {"a": 9.0}
    for plain, in_bytes, improved, dear in (
        (Times(10, layers), 3, 5, True),
        (Times(10, layers), 3, 3.5, False),  # most of the gain is left
        (Times(10, layers), 7, 9.9, False),  # a small gain
        (Times(10, alone), 3, 9, False),  # one layer is the model
    ):
        assert too_dear(plain, Times(in_bytes, {}), Times(improved, {})) == dear
    assert allowed(None, 24) < 0.0025 < allowed(None, 600) < allowed(0.98, 600) < 0.02


def test_rows_without_a_decision() -> None:
    d = Decisions()
    d.add([np.ones((9, 1)), np.zeros((9, 3))], [np.ones((9, 1)), np.zeros((9, 3))])  # no second number; all the same
    assert d.changed is None
    d.add([np.full((9, 3), np.nan)], [np.arange(27.0).reshape(9, 3)])
    assert d.changed is not None and d.changed > 0.1


def test_samples_that_give_ranges_are_not_those_that_are_judged() -> None:
    feeds = [{"x": np.full((6, 1), k), "y": np.arange(3)} for k in range(9)]
    inputs = [Input("x", np.dtype(np.int64), ("N", 1)), Input("y", np.dtype(np.int64), (3,))]
    fit, judged = _apart(inputs, feeds)
    assert [f["x"][0, 0] for f in fit] == [0, 2, 4, 6, 8] and [f["x"][0, 0] for f in judged] == [1, 3, 5, 7]
    one = [{"x": np.arange(5).reshape(5, 1), "y": np.arange(3)}]
    fit, judged = _apart(inputs, one)
    assert fit[0]["x"].ravel().tolist() == [0, 2, 4] and judged[0]["x"].ravel().tolist() == [1, 3]
    assert fit[0]["y"] is judged[0]["y"] is one[0]["y"]


# --- ranges -----------------------------------------------------------------------------------------------------------


def histogram(*parts: Any) -> Histogram:
    h = Histogram()
    for p in parts:
        h.add(np.asarray(p, np.float32))
    return h


def test_a_histogram_grows_and_keeps_its_counts() -> None:
    small, large = RNG.standard_normal(1000), 50 * RNG.standard_normal(1000)
    h = histogram(small, np.zeros(7), large)
    assert h.count == 2007 and h.zeros == 7 and h.counts.sum() == 2000
    assert h.limit >= np.abs(large).max() and (h.low, h.high) == pytest.approx((large.min(), large.max()))
    inside = np.abs(np.concatenate([small, large])) < h.limit / 2
    half = ranges.HALF // 2
    assert h.counts[half:-half].sum() == pytest.approx(inside.sum(), abs=4)


def test_large_arrays_are_thinned_but_their_ends_are_exact() -> None:
    a = RNG.standard_normal(ranges.MOST * 3).astype(np.float32)
    a[12345] = -99
    h = histogram(a)
    assert h.low == -99 and ranges.MOST // 2 < h.counts.sum() < a.size / 2


def test_histograms_of_different_ranges_join() -> None:
    a, b = histogram(RNG.uniform(-1, 1, 500)), histogram(RNG.uniform(0, 30, 500), [0])
    both = a.joined(b)
    assert both.counts.sum() == 1000 and both.high == b.high and both.low == a.low and both.zeros == 1


def test_numbers_that_are_not_finite_are_counted_apart() -> None:
    h = histogram([1.0, np.nan, -2.0, np.inf])
    assert h.bad == 2 and (h.low, h.high) == (-2, 1) and h.count == 2


@pytest.mark.parametrize("method", ["minmax", "percentile", "mse", "entropy"])
def test_ranges_of_a_distribution_with_an_outlier(method: str) -> None:
    x = RNG.standard_normal(100_000)
    low, high = chosen_range(histogram(x, [40.0]), method, 99.9)
    want = {"minmax": (40, 40), "percentile": (3.0, 3.6), "mse": (7, 40), "entropy": (7, 40)}[method]
    assert want[0] <= high <= want[1] and low < -2.5
    assert low >= x.min() - 1e-6


def test_the_least_square_error_beats_the_whole_range() -> None:
    x = RNG.laplace(size=50_000).astype(np.float32)
    errors = {
        m: ((grid(*chosen_range(histogram(x), m, 99.99), "uint8").rounded(x) - x) ** 2).mean()
        for m in ("mse", "minmax")
    }
    assert errors["mse"] < errors["minmax"]


def test_zero_is_a_number_of_each_grid_and_constants_have_one() -> None:
    for low, high in ((-1.3, 4.1), (2.0, 3.0), (-5.0, -1.0), (0.0, 0.0)):
        for kind in ("uint8", "int8"):
            g = grid(low, high, kind)
            assert g.rounded(np.zeros(1))[0] == 0 and g.scale > 0
            assert abs(g.rounded(np.array([high]))[0] - high) <= g.scale
    assert chosen_range(histogram(np.zeros(9)), "mse", 99) == (0, 0) and grid(0, 0, "uint8").scale == 1


# --- rounding ---------------------------------------------------------------------------------------------------------


def test_gptq_makes_the_error_of_sums_smaller() -> None:
    x = (RNG.standard_normal((64, 16)) @ RNG.standard_normal((16, 500))).astype(np.float32)  # correlated channels
    x += 0.1 * RNG.standard_normal(x.shape).astype(np.float32)
    w = RNG.standard_normal((20, 64)).astype(np.float32)
    for block in (0, 16):
        scales = scales_of(w, 4, block)
        plain, better = nearest(w, scales, 4, block), gptq(w, scales, 4, block, x @ x.T)
        worse, error = (((r.values - w) @ x).std() for r in (plain, better))
        assert error < 0.7 * worse and np.abs(better.q).max() <= 8


def test_channels_of_zeros_and_dead_inputs() -> None:
    w = RNG.standard_normal((4, 8)).astype(np.float32)
    w[2] = 0
    r = nearest(w, scales_of(w, 8, 0), 8, 0)
    assert r.scales[2] == 1 and not r.values[2].any() and np.abs(r.values - w).max() <= r.scales.max() / 2 + 1e-7
    products = np.zeros((8, 8))
    assert np.isfinite(gptq(w, scales_of(w, 8, 0), 8, 0, products).values).all()


def test_a_large_bias_widens_the_scale_until_it_fits() -> None:
    w, bias = np.full((1, 4), 1e-6, np.float32), np.array([1e3], np.float32)
    scale = scales_of(w, 8, 0, bias, 0.01)
    assert abs(bias[0] / (scale[0, 0] * 0.01)) <= 1 << 30


def test_bias_correction_restores_the_mean() -> None:
    for group in (1, 2):
        w = RNG.standard_normal((6, 4 // group * 9)).astype(np.float32)
        rounded = nearest(w, scales_of(w, 4, 0), 4, 0).values
        means = RNG.uniform(1, 2, 4)
        bias = corrected_bias(None, w, rounded, means, group)
        x = np.repeat(means.reshape(group, -1), 9, axis=1)  # constant channels
        for k in range(6):
            of = x[k // (6 // group)]
            assert rounded[k] @ of + bias[k] == pytest.approx(w[k] @ of, abs=1e-4)


@pytest.mark.slow
def test_columns_are_what_filters_multiply() -> None:
    x, w = RNG.standard_normal((2, 3, 7, 6)).astype(np.float32), RNG.standard_normal((4, 3, 3, 2)).astype(np.float32)
    n = onnx.helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 0, 1, 1], strides=[2, 1], dilations=[1, 2])
    graph = onnx.helper.make_graph(
        [n], "g", [onnx.helper.make_tensor_value_info("x", 1, x.shape)],
        [onnx.helper.make_empty_tensor_value_info("y")], [onnx.numpy_helper.from_array(w, "w")],
    )  # fmt: skip
    (want,) = ReferenceEvaluator(onnx.helper.make_model(graph)).run(None, {"x": x})
    got = w.reshape(4, -1) @ columns(x, Layer("n", "Conv", "x", "y", "w", 0), n, w.shape)
    assert np.allclose(got.reshape(4, 2, *want.shape[2:]).swapaxes(0, 1), want, atol=1e-5)


# --- samples ----------------------------------------------------------------------------------------------------------


def test_samples_come_as_arrays_files_and_folders(tmp_path: Path) -> None:
    a = images(19)
    np.save(tmp_path / "b.npy", a[:3])
    np.savez(tmp_path / "a.npz", x=a[3:])
    assert [f["x"].shape[0] for f in samples(a, [IMAGE])] == [8, 8, 3]
    assert [f["x"].shape[0] for f in samples(tmp_path, [IMAGE])] == [8, 8, 3]
    assert [f["x"].shape for f in samples([a[0], {"x": a[:2]}], [IMAGE])] == [(1, 3, 8, 8), (2, 3, 8, 8)]
    assert samples(a, [IMAGE], 10).rows == 10 and samples(tmp_path / "b.npy", [IMAGE]).rows == 3
    fixed = Input("x", np.dtype(np.float32), (4, 3, 8, 8))
    assert len(samples(a, [fixed])) == 4  # the last three fill no call
    assert samples(a.astype(np.float64), [fixed]).rows == 16
    assert len(samples(None, [fixed], random=True)) > 1
    assert [f["x"].shape[0] for f in samples((a[k : k + 2] for k in (0, 2)), [IMAGE])] == [2, 2]
    sequence = Input("x", np.dtype(np.float32), (3, 8, 8))  # no axis counts its samples
    assert [f["x"].shape for f in samples(a[:5], [sequence])] == [(3, 8, 8)] * 5


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "needs data"),
        ([], "list is empty"),
        ("nowhere", "no calibration data at"),
        (np.zeros((2, 3, 8, 9), np.float32), r"shape \[2, 3, 8, 9\]"),
        (np.zeros((2, 3, 8, 8), np.uint8), "the array is uint8, and the model takes float32"),
        (np.full((2, 3, 8, 8), np.nan, np.float32), "384 of the 384 numbers of x are NaN"),
        ({"y": np.zeros(3)}, "no array for x; there are y"),
        (np.zeros((0, 3, 8, 8), np.float32), "no samples"),
        (iter(()), "the tuple_iterator is empty"),
        (["text"], "is no .npy or .npz file"),
        (3.0, r"shape \[\]"),
    ],
)
def test_bad_data(data: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        samples(data, [IMAGE])
    with pytest.raises(InputError, match="no inputs"):
        samples(data, [])


def test_bad_folders(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="it is empty"):
        samples(tmp_path, [IMAGE])
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(InputError, match=r"no \.npy and no \.npz files; it has \.txt"):
        samples(tmp_path, [IMAGE])
    (tmp_path / "a.npy").write_text("no array")
    with pytest.raises(InputError, match=r"a\.npy is no \.npy or \.npz file"):
        samples(tmp_path, [IMAGE])
    with pytest.raises(InputError, match="both"):
        samples(images(), [IMAGE], random=True)


def test_several_inputs_keep_their_rows_together() -> None:
    ids, mask = Input("ids", np.dtype(np.int64), ("N", 5)), Input("mask", np.dtype(np.int64), (5, 5))
    feeds = list(Samples([ids, mask], [{"ids": np.ones((9, 5), np.int32), "mask": np.ones((5, 5), int)}]))
    assert [f["ids"].shape for f in feeds] == [(8, 5), (1, 5)] and feeds[1]["mask"].shape == (5, 5)
    other = Input("other", np.dtype(np.int64), ("N", 5))
    with pytest.raises(InputError, match="different numbers of samples: ids 9, other 17"):
        Samples([ids, other], [{"ids": np.ones((9, 5), int), "other": np.ones((17, 5), int)}])


# --- models -----------------------------------------------------------------------------------------------------------


def test_which_values_become_bytes() -> None:
    m = opened(residual())
    layers, _ = found_layers(m)
    p = placed(m, layers)
    # the sum of c, which stays in registers, and s, which is computed last: c is stored, so it is bytes
    assert set(p.readers) == {"x", "r", "p", "c", "u", "m", "f"}
    assert p.same == {"p": "r", "f": "m"}
    nodes = {n.name: n.op_type for n in m.graph.node}
    assert {nodes[n] for n in p.readers["c"]} == {"Add"} and {nodes[n] for n in p.readers["p"]} == {"Conv"}
    behind = placed(m, layers, behind=True)
    assert {"s", "c", "r"} <= set(behind.readers)
    assert not placed(m, []).readers


def test_a_residual_that_stays_float_reads_floats() -> None:
    m = opened(transformer())
    layers, kept = found_layers(m)
    assert [k.reason for k in kept] == ["both operands are activations"] * 2
    p = placed(m, layers)
    assert set(p.readers) == {"n", "o"}


@pytest.mark.slow
def test_batch_normalizations_are_folded_and_constants_found() -> None:
    text = """agraph (float[1, 2, 4, 4] x) => (float[1, 3, 4, 4] y) {
        t = Transpose<perm = [1, 0, 2, 3]>(w)
        c = Conv(x, t)
        n = BatchNormalization(c, s, b, m, v)
        y = Relu(n)
    }"""
    proto = model(text, w=(2, 3, 1, 1), s=(3,), b=(3,), m=(3,), v=(3,))
    v = next(t for t in proto.graph.initializer if t.name == "v")
    v.CopyFrom(onnx.numpy_helper.from_array(np.array([1, 2, 3], np.float32), "v"))
    made = opened(proto).proto
    assert [n.op_type for n in made.graph.node] == ["Conv", "Relu"]
    x = RNG.standard_normal((1, 2, 4, 4)).astype(np.float32)
    want, got = (ReferenceEvaluator(m).run(None, {"x": x})[0] for m in (proto, made))
    assert np.allclose(got, want, atol=1e-5)


CONSTANTS = {
    "a factor for each channel": "v = Mul(w, s)",
    "a transposed sum of products": "p = MatMul(w, w) a = Add(p, w) v = Transpose<perm = [1, 0]>(a)",
    "a normalized weight": "q = ReduceL2<keepdims = 1>(w) d = Div(w, q) v = Mul(d, s)",
    "a selection": "c = Less(w, s) n = Neg(w) v = Where(c, w, n)",
    "two results": "v, r = Split<axis = 0, num_outputs = 2>(w)",
    "rows of a table": "i = Constant<value_ints = [3, 1, 1, 0]>() v = Gather(w, i)",
    "its own shape": "n = Shape(w) i = Constant<value_ints = [1]>() e = Expand(i, n) f = CastLike(e, w) v = Add(f, w)",
}


@pytest.mark.parametrize("case", CONSTANTS)
def test_what_depends_on_constants_alone_is_a_weight(case: str) -> None:
    rows = 2 if case == "two results" else 4
    proto = model(
        f"agraph (float[N, {rows}] x) => (float[N, 4] y, float[N, 4] z) {{ {CONSTANTS[case]} "
        f"y = MatMul(x, v) u = Softmax(v) z = MatMul(x, u) }}",
        w=(4, 4),
        s=(4,),
    )
    m = opened(proto)
    assert [n.op_type for n in m.graph.node] == ["MatMul", "MatMul"]
    layers, kept = found_layers(m)
    assert len(layers) == 2 and not kept
    x = RNG.standard_normal((3, rows)).astype(np.float32)
    want, got = (ReferenceEvaluator(p).run(None, {"x": x}) for p in (proto, m.proto))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_constants_that_stay() -> None:
    """Random numbers, results of the model, and what would make the file large."""
    proto = model(
        """agraph (float[N, 4] x) => (float[N, 4] y, float[4, 4] v, float[600, 600] h) {
            v = Mul(w, w)
            r = RandomNormalLike(w)
            a = Mul(r, r)
            u = Add(v, w)
            n = Constant<value_ints = [600, 600]>()
            large = Expand(one, n)
            s = ReduceSum<keepdims = 0>(large)
            p = MatMul(x, u)
            q = MatMul(p, a)
            k = ReduceMax<keepdims = 0>(x)
            h = Add(large, k)
            y = Add(q, s)
        }""",
        w=(4, 4),
        one=(1,),
    )
    m = opened(proto)
    kinds = ["Mul", "RandomNormalLike", "Mul", "Expand", "MatMul", "MatMul", "ReduceMax", "Add", "Add"]
    assert [n.op_type for n in m.graph.node] == kinds
    layers, kept = found_layers(m)
    assert [x.y for x in layers] == ["p"] and [k.reason for k in kept] == ["both operands are activations"]
    assert m.proto.ByteSize() < 2000


def test_smoothing_keeps_what_is_computed() -> None:
    proto, x = transformer(60), RNG.standard_normal((2, 6, 16)).astype(np.float32)
    m = opened(proto)
    layers, _ = found_layers(m)
    groups = smoothable(m, layers)
    assert [len(g) for g in groups.values()] == [3]
    n = np.abs(RNG.standard_normal(16)) + np.where(np.isin(np.arange(16), (3, 7)), 150, 2)
    smooth(m, groups, {"n": n}, 0.5)
    want, got = (ReferenceEvaluator(p).run(None, {"x": x})[0] for p in (proto, m.proto))
    assert np.allclose(got, want, atol=1e-3)
    g = m.constants[next(k for k in m.constants if k.startswith("g"))]
    assert g[3] / g[0] < 20  # it was 60


@pytest.mark.slow
def test_models_that_are_refused() -> None:
    quantized = model(
        "agraph (float[N, 4] x) => (float[N, 4] y) { q = QuantizeLinear(x, s) y = DequantizeLinear(q, s) }", s=()
    )
    with pytest.raises(InputError, match="quantized already"):
        dnnc.quantize(quantized, np.ones((2, 4), np.float32))
    half = model("agraph (float16[N, 4] x) => (float16[N, 4] y) { y = MatMul(x, w) }", w=(4, 4))
    w = half.graph.initializer[0]
    w.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(w).astype(np.float16), "w"))
    with pytest.raises(UnsupportedError, match="float16; quantize the float32 model"):
        dnnc.quantize(half, np.ones((2, 4), np.float16))
    old = residual()
    old.opset_import[0].version = 9
    old.graph.node[0].domain = "custom"
    with pytest.raises(ModelError, match="opset 9; to change it, opset 13 is needed"):
        dnnc.quantize(old, images())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "int7"}, "scheme='int7': expected one of int8"),
        ({"method": "max"}, "method='max'"),
        ({"percentile": 3}, "percentile=3: expected a number from 50 to 100"),
        ({"smooth": 2.0}, "smooth=2.0"),
        ({"form": "nbits"}, "MatMulNBits"),
        ({"scheme": "w4a16", "form": "nbits", "block": 24}, "blocks of 16, 32"),
        ({"scheme": "w8a16", "form": "operators"}, "8-bit activations"),
        ({"scheme": "fp8", "gptq": True}, "gptq rounds weights to integers"),
        ({"agreement": 1.5}, "agreement=1.5: expected a number from 0 to 1"),
        ({"agreement": 0.9, "scheme": "auto"}, "agreement is measured"),
        ({"max_error": 0.1}, "max_error says what scheme=.auto. may cost"),
        ({"scheme": "auto", "measure": False}, "chooses by what it measures"),
        ({"keep": ("nothing*",)}, "no layer fits 'nothing\\*'; layers are"),
        ({"gptq": 1}, "gptq=1: expected True or False"),
        ({"samples": 0}, "samples=0"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dnnc.quantize(residual(), images(2), **options)


def test_differences_of_outputs() -> None:
    d = Difference()
    d.add([np.array([[1.0, 2.0], [4.0, 3.0]])], [np.array([[1.0, 2.0], [3.0, 4.0]])])
    assert d.agreement == 0.5 and d.error == pytest.approx(np.sqrt(2 / 30))
    d.add([np.array([np.nan])], [np.array([1.0])])
    assert d.error == np.inf
    places = Difference()
    places.add([np.array([3, 1, 2, 2])], [np.array([3, 0, 2, 2])])
    assert places.agreement == 0.75 and places.error == 0.5


BODY = """<ir_version: 10, opset_import: ["" : 21]>
agraph (float[N, 4] x, bool c) => (float[N, 4] y) <float[4, 4] w, float[4, 4] small> {
    t = MatMul (x, small)
    y = If (c) <then_branch = g () => (float[N, 4] a) { a = MatMul (t, w) },
                else_branch = h () => (float[N, 4] b) { b = Gemm (t, w) }>
}"""


def test_layers_that_stay_float_are_named() -> None:
    proto = onnx.parser.parse_model(BODY)
    for name, scale in (("w", 1.0), ("small", 1e-30)):
        array = (np.ones((4, 4)) * scale).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    layers, kept = found_layers(opened(proto))
    assert not layers and [(k.node, k.reason) for k in kept] == [
        ("t", "its weights are at most 1e-30, too small for a scale"),
        ("y", "2 layers of its body: loops and branches stay float"),
    ]
    layer, tiny = Layer("n", "MatMul", "x", "y", "w", 1), Histogram()
    tiny.add(np.full(4, 1e-36, np.float32))
    assert "too small for a scale" in unusable([layer], Observed({"x": tiny}))["n"]
