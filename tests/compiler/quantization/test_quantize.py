"""`dnnc.quantize` as a whole: each scheme and form against ONNX's reference, choices by time and error, bad models."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from small_models import images, model, residual, transformer

import dnnc
from dnnc.ir.errors import InputError
from dnnc.quantization import choice, entry
from dnnc.quantization.calibration import Running
from dnnc.quantization.data import Input, Samples, first_feeds
from dnnc.quantization.measure import Difference, Times
from dnnc.quantization.result import Quantized
from dnnc.quantization.simulation import Simulation

Array = np.ndarray[Any, Any]
EXAMPLES = Path(__file__).parents[3] / "examples"


def steps_off(q: Quantized, x: Array) -> float:
    """The share of outputs that are more than a 255th of their range off ONNX's reference."""
    onnx.checker.check_model(q.model, full_check=True)
    (want,) = ReferenceEvaluator(q.model).run(None, {"x": x})
    return float((np.abs(q.compile()(x) - want) > np.ptp(want) / 255).mean())


def operators(q: Quantized) -> Counter[str]:
    return Counter(n.op_type for n in q.model.graph.node)


@pytest.mark.family("long")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"measure": False}, 0.03),
        ({"method": "entropy", "bias_correction": True, "gptq": True}, 0.03),
        ({"method": "percentile", "activations": "int8"}, 0.04),
        ({"method": "minmax", "form": "operators"}, 0.03),
    ],
)
def test_integers(options: dict[str, Any], error: float) -> None:
    x = images()
    q = dnnc.quantize(residual(), x, **options)
    assert all(layer.scheme == "int8" for layer in q.layers) and q.samples == 16
    if options.get("measure", True):
        assert q.error is not None and q.error < error and q.agreement == 1
        assert q.before and q.after and all(layer.before for layer in q.layers)
    else:
        assert q.error is None and q.after is None
    assert steps_off(q, x) <= 0.001
    assert operators(q)["QuantizeLinear"] == (8 if "form" in options else 7)
    f = q.compile(dims={"N": 1})
    kernels = [k.name for k in f.report.programs[-1].kernels]
    assert not any(name in ("conv", "conv_relu", "matmul_add") for name in kernels), kernels


@pytest.mark.family("long")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "options", "error"),
    [
        ("int8", {"smooth": 0.5, "agreement": 0}, 0.03),
        ("w8a16", {}, 0.01),
        ("w8a16", {"block": 8}, 0.01),
        ("w4a16", {"gptq": True, "bias_correction": True}, 0.15),
        ("w4a16", {"form": "nbits", "block": 16}, 0.25),
        ("w8a16", {"form": "nbits"}, 0.01),
        ("fp8", {"agreement": 0}, 0.2),
    ],
)
def test_a_block_of_attention(scheme: str, options: dict[str, Any], error: float) -> None:
    x = np.random.default_rng(1).standard_normal((8, 6, 16)).astype(np.float32)
    q = dnnc.quantize(transformer(), x, scheme=scheme, **options)
    assert [layer.scheme for layer in q.layers] == [scheme, scheme, "float", scheme, "float", scheme]
    assert {layer.reason for layer in q.layers if layer.scheme == "float"} == {"both operands are activations"}
    assert q.error is not None and q.error < error
    if options.get("form") == "nbits":
        assert operators(q)["MatMulNBits"] == 4 and q.compile()(x).shape == x.shape
    else:
        assert steps_off(q, x) <= 0.001
    assert bool(q.notes) == ("smooth" in options)


@pytest.mark.slow
def test_smoothing_helps_channels_that_are_large() -> None:
    x = np.random.default_rng(1).standard_normal((8, 6, 16)).astype(np.float32)
    plain, smoothed = (dnnc.quantize(transformer(60), x, smooth=s, method="minmax").error for s in (None, 0.5))
    assert plain is not None and smoothed is not None and smoothed < plain


@pytest.mark.slow
def test_the_trained_digits_see_the_same() -> None:
    with np.load(EXAMPLES / "digits_samples.npz") as z:
        x = z["images"]
    q = dnnc.quantize(EXAMPLES / "digits.onnx", x, layer_errors=True)
    assert q.agreement == 1 and q.sizes[0] > 3.5 * q.sizes[1] and len(q.layers) == 4
    errors = [layer.error for layer in q.layers]
    assert all(e is not None and 0 < e < 0.02 for e in errors)
    assert "digits.onnx: 4 of 4 layers quantized" in str(q) and q.as_dict()["layers"][1]["scheme"] == "int8"


@pytest.mark.slow
def test_layers_have_more_bits_until_decisions_are_those_of_float() -> None:
    x = np.random.default_rng(3).standard_normal((96, 3, 8, 8)).astype(np.float32)
    x[:, 0] *= 40  # a channel that leaves the others few steps
    free, bound = (dnnc.quantize(residual(), x[:64], agreement=a) for a in (0, 0.995))
    assert {layer.scheme for layer in free.layers} == {"int8"} and not free.notes
    better = [layer for layer in bound.layers if layer.scheme != "int8"]
    assert better and "8 bits everywhere would change" in bound.notes[0]
    assert all("of the arg-maxes" in layer.reason for layer in better)
    f = dnnc.compile(residual())
    errors = [float(np.abs(q.compile()(x) - f(x)).max()) for q in (free, bound)]
    assert errors[1] < 0.6 * errors[0]
    assert (bound.compile()(x[64:]).argmax(1) == f(x[64:]).argmax(1)).all()


@pytest.mark.slow
def test_products_of_bytes_in_sixteen_bits() -> None:
    for m, x in ((residual(), images()), (transformer(), images().reshape(-1, 6, 16))):
        q = dnnc.quantize(m, x, scheme="int16")
        assert q.error is not None and q.error < 1e-4 and operators(q)["QuantizeLinear"] == 8
        assert all(layer.after for layer in q.layers if layer.scheme == "int16")


@pytest.mark.slow
def test_other_runtimes_read_the_same_numbers() -> None:
    x = images()
    for options in (
        {},
        {"scheme": "int16"},
        {"form": "operators"},
        {"scheme": "w4a16"},
        {"scheme": "w4a16", "form": "nbits"},
    ):
        q = dnnc.quantize(residual(), x, measure=False, **options)
        session = onnxruntime.InferenceSession(q.model.SerializeToString(), providers=["CPUExecutionProvider"])
        (got,), want = session.run(None, {"x": x}), q.compile()(x)
        assert (np.abs(got - want) <= np.ptp(want) / 255).mean() >= 0.999, options


# --- layers that stay float -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_layers_that_cannot_be_quantized_are_named() -> None:
    text = """agraph (float[N, 4] x) => (float[N, 4] y) {
        l = Log(x)
        a = MatMul(l, w1)
        b = MatMul(x, w2)
        s = Sigmoid(a)
        t = MatMul(s, w3)
        y = Add(t, b)
    }"""
    proto = model(text, w1=(4, 4), w2=(4, 4), w3=(4, 4))
    bad = np.eye(4, dtype=np.float32)
    bad[1, 2] = np.nan
    proto.graph.initializer[2].CopyFrom(numpy_helper.from_array(bad, "w3"))
    x = np.ones((3, 4), np.float32)
    x[1, 1] = 0
    q = dnnc.quantize(proto, x, measure=False)
    assert [(layer.scheme, layer.reason) for layer in q.layers] == [
        ("float", "1 value of l was NaN or infinite in calibration"),
        ("int8", ""),
        ("float", "1 of its weights are not finite"),
    ]
    dead = dnnc.quantize(proto, np.zeros_like(x), measure=False)
    assert dead.layers[1].reason == "x was 0 in all of the calibration, which tells no scale"
    kept = dnnc.quantize(proto, x, measure=False, keep="b")
    assert [layer.reason for layer in kept.layers][1] == "kept by 'b'"
    assert any("no layer can be quantized" in n for n in kept.notes)


@pytest.mark.slow
def test_constant_activations_and_weights_of_zeros() -> None:
    proto = residual()
    weights = {t.name: t for t in proto.graph.initializer}
    w1 = numpy_helper.to_array(weights["w1"]).copy()
    w1[2:5] = 0
    weights["w1"].CopyFrom(numpy_helper.from_array(w1, "w1"))
    q = dnnc.quantize(proto, np.ones((4, 3, 8, 8), np.float32))
    assert q.error is not None and q.error < 0.05
    assert steps_off(q, images()) <= 0.001


# --- auto -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[float, float]]:
    """Seconds of each layer in float and quantized, in place of what is measured."""
    told: dict[str, tuple[float, float]] = {}

    def timed(executable: Any, feed: Any, layers: Any, placement: Any = None) -> Times:
        fast = placement is not None
        return Times(1.0, {x.node: told.get(x.node, (2e-5, 1e-5))[fast] for x in layers})

    monkeypatch.setattr(choice, "timed", timed)
    return told


@pytest.mark.slow
def test_auto_leaves_what_gains_nothing_or_costs_too_much(times: dict[str, tuple[float, float]]) -> None:
    x = images()
    times["s"] = 1e-5, 1.2e-5
    times["a"] = 9e-5, 1e-5
    q = dnnc.quantize(residual(), x, scheme="auto", max_error=0.5)
    found = {layer.name: layer for layer in q.layers}
    assert [layer.scheme for layer in q.layers] == ["int8", "int8", "float", "int8"]
    assert found["s"].reason == "gains nothing: int8 12 us, float 10 us" and found["s"].error is None
    assert found["a"].won == pytest.approx(8e-5)
    assert q.error is not None and q.error <= 0.5

    errors = sorted(layer.error or 0.0 for layer in q.layers if layer.scheme != "float")
    budget = (errors[0] + errors[1]) / 2
    less = dnnc.quantize(residual(), x, scheme="auto", max_error=budget)
    assert 1 <= sum(layer.scheme == "int8" for layer in less.layers) < 3
    assert less.error is not None and less.error <= budget
    assert any(f"above {budget:g}" in layer.reason for layer in less.layers)

    none = dnnc.quantize(residual(), x, scheme="auto", max_error=0.0)
    assert all(layer.scheme == "float" for layer in none.layers) and none.error == 0


@pytest.mark.slow
def test_errors_of_layers_of_a_model_that_is_read_anew_for_each_call(times: dict[str, tuple[float, float]]) -> None:
    proto = model("""
        agraph (float[N, 8] x, int64[2] s) => (float[r, c] y) {
            h = MatMul(x, w)
            f = Reshape (h, s)
            g = Transpose <perm = [1, 0]> (f)
            k = MatMul(g, v)
            y = Relu(k)
        }""", w=(8, 6), v=(4, 5))  # fmt: skip
    x = np.random.default_rng(3).standard_normal((6, 4, 8)).astype(np.float32)
    feeds = [{"x": a, "s": np.array([4, 6])} for a in x]
    assert dnnc.compile(proto).variants == []
    for options in ({"scheme": "auto", "max_error": 0.5}, {"layer_errors": True, "agreement": 0}):
        q = dnnc.quantize(proto, feeds, **options)
        assert len(q.layers) == 2 and all(layer.scheme != "float" for layer in q.layers)
        assert all(layer.error is not None and 0 < layer.error < 0.1 for layer in q.layers)
        assert q.error is not None and 0 < q.error < 0.1


class Sums:
    """Errors of choices that are the roots of sums of squares, and how often one was asked for."""

    def __init__(self, errors: dict[str, float]) -> None:
        self.errors, self.asked = errors, 0

    def __call__(self, schemes: dict[str, str]) -> float:
        self.asked += 1
        return float(np.sqrt(sum(self.errors[n] ** 2 for n in schemes)))


@pytest.mark.parametrize("budget", [0.0, 0.02, 0.1, 9.0])
def test_a_choice_under_a_budget_takes_few_trials(budget: float) -> None:
    rng = np.random.default_rng(4)
    errors = {f"l{k}": float(10 ** rng.uniform(-4, -1)) for k in range(200)}
    order = sorted(errors, key=errors.__getitem__)
    chooser = object.__new__(choice._Chooser)
    chooser.budget, chooser.score, chooser.errors, chooser.reasons = budget, None, {}, {}
    chooser.errors = {(n, "int8"): e for n, e in errors.items()}
    chooser.c = SimpleNamespace(tell=lambda *_: None)  # type: ignore[assignment]
    chooser._cost = cost = Sums(errors)  # type: ignore[method-assign]
    taken = chooser._within_budget([(n, "int8") for n in order])
    assert cost(taken) <= budget and cost.asked <= choice.TRIALS + 1
    assert set(taken) | set(chooser.reasons) == set(errors)
    best = int(np.searchsorted(np.sqrt(np.cumsum([errors[n] ** 2 for n in order])), budget, side="right"))
    assert set(order[: max(best - 1, 0)]) <= set(taken)  # all that fit, but perhaps the last


@pytest.mark.slow
def test_auto_with_a_metric_and_schemes_of_weights(times: dict[str, tuple[float, float]]) -> None:
    x = np.random.default_rng(1).standard_normal((8, 6, 16)).astype(np.float32)
    want = dnnc.compile(transformer())(x)
    calls = []

    def metric(run: Any) -> float:
        calls.append(run(x).shape)
        return -float(np.abs(run(x=x) - want).max())

    q = dnnc.quantize(transformer(), x, scheme="auto", metric=metric, max_error=100.0)
    assert q.score is not None and q.score[0] > q.score[1] > -100 and len(calls) > 4
    assert Counter(layer.scheme for layer in q.layers)["float"] == 2
    schemes = {layer.scheme for layer in q.layers}
    assert schemes <= {"int8", "w8a16", "w4a16", "float"} and len(schemes) > 1
    with pytest.raises(InputError, match="the metric gave 'much'"):
        dnnc.quantize(transformer(), x, scheme="auto", metric=lambda run: "much")  # type: ignore[arg-type,return-value]
    with pytest.raises(InputError, match="the metric gave nan"):
        dnnc.quantize(transformer(), x, scheme="auto", metric=lambda run: float("nan"))


@pytest.mark.slow
def test_the_simulation_has_the_errors_of_the_written_model(monkeypatch: pytest.MonkeyPatch) -> None:
    work = entry._Work(residual(), images(), None, entry.QuantizeOptions(bias_correction=True), entry._silent)
    plan = entry.Plan(work.model, work.options, work._observe())
    feeds = first_feeds(work.samples)
    plain = Running(work.model.proto, work.samples, {})
    want = [plain.outputs(f) for f in feeds]
    simulation = Simulation(plan, work.layers, "int8", work.samples, feeds, want, entry._silent)
    for some in ([], [0], [1, 3], [0, 1, 2, 3]):
        schemes = {work.layers[k].node: "int8" for k in some}
        real, d = Running(entry.written(plan, work.layers, schemes), work.samples, {}), Difference()
        for f, w in zip(feeds, want):
            d.add(real.outputs(f), w)
        assert simulation.difference(schemes).error == pytest.approx(d.error, rel=0.1, abs=1e-6)


# --- the rest ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_samples_of_many_sizes_share_a_program() -> None:
    text = "agraph (float[N, S, 4] x) => (float[N, S, 4] y) { y = MatMul(x, w) }"
    rng = np.random.default_rng(0)
    data = [rng.standard_normal((1, n, 4)).astype(np.float32) for n in (3, 5, 7, 9, 4)]
    q = dnnc.quantize(model(text, w=(4, 4)), data)
    assert q.samples == 5 and q.error is not None and q.error < 0.02
    ids = Input("x", np.dtype(np.float32), ("N", "S", 4))
    assert len(Samples([ids], data).shapes) == 5


@pytest.mark.slow
def test_functions_and_saved_models(tmp_path: Path) -> None:
    w = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)

    def f(x: Any) -> Any:
        return x @ dnnc.array.asarray(w)

    x = np.random.default_rng(1).standard_normal((10, 6)).astype(np.float32)
    q = dnnc.quantize(f, x, inputs=[dnnc.Spec(("N", 6))])
    assert q.error is not None and q.error < 0.02
    q.save(tmp_path / "f.onnx")
    q.save(tmp_path / "f.dnnc")
    assert np.array_equal(dnnc.compile(tmp_path / "f.onnx")(x), dnnc.load(tmp_path / "f.dnnc")(x))
    with pytest.raises(InputError, match=r"written as \.onnx"):
        q.save(tmp_path / "f.txt")
    said: list[str] = []
    dnnc.quantize(f, x, inputs=[dnnc.Spec(("N", 6))], progress=lambda stage, done, of: said.append(stage))
    assert {"calibrate", "compare outputs", "time kernels"} <= set(said)


@pytest.mark.slow
def test_a_batch_of_minus_one_and_a_slice_of_everything() -> None:
    """Some exporters write an open size as -1; a layer may read what a node without effect returns."""
    text = """
      agraph (float[N, 3, 8, 8] x) => (float[N, 4, 6, 6] y) {
        s = Slice(x, first, last, axes)
        y = Conv(s, w)
      }"""
    proto = model(text, w=(4, 3, 3, 3))
    numbers = {"first": [0, 0], "last": [2**62, 2**62], "axes": [2, 3]}
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(np.array(v, np.int64), n) for n, v in numbers.items())
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    outputs = len(proto.graph.output)
    x = images(5)
    q = dnnc.quantize(proto, [x, {"x": x[:1]}], agreement=0)
    assert [layer.scheme for layer in q.layers] == ["int8"] and q.samples == 6
    assert q.error is not None and q.error < 0.02
    assert len(q.model.graph.output) == outputs


@pytest.mark.slow
def test_sizes_that_each_call_decides() -> None:
    """Whether a doubled half is as large as the whole depends on the size: the model is read again for each shape."""
    text = """
      agraph (float[N, 3, H, W] x) => (float[N, 4, H, W] y) {
        half = Conv<pads = [1, 1, 1, 1], strides = [2, 2]>(x, w)
        twice = Resize(half, , scales)
        whole = Conv<pads = [1, 1, 1, 1]>(x, v)
        sum = Add(twice, whole)
        y = Conv(sum, u)
      }"""
    proto = model(text, w=(4, 3, 3, 3), v=(4, 3, 3, 3), u=(4, 4, 1, 1))
    proto.graph.initializer.append(numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "scales"))
    before = proto.SerializeToString()
    x = images(3)
    q = dnnc.quantize(proto, [x[..., :6, :], x], agreement=0)
    assert [layer.scheme for layer in q.layers] == ["int8"] * 3 and q.error is not None and q.error < 0.03
    assert proto.SerializeToString() == before
