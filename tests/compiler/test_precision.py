"""Half types end to end: models that have them, `precision=`, what is stored, how results are judged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.backends.llvm.features import parse_target
from dnnc.backends.runtime.link import ConstantBlock
from dnnc.ir.dtype import bf16, dtype, f16, f32
from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.tolerances import EPS, bound, reduced
from dnnc.tools.accuracy import as_stored, check_model, depth, first_difference, stored_type
from dnnc.tools.sample_graphs import graph_of
from support.fuzz import check
from support.passes import random_inputs
from support.random_graphs import random_graph

HALVES = {"float16": f16, "bfloat16": bf16}
NETS = {
    "convolutions": """\
def g(x: f32[2, 3, 18, 18], *, w: f32[32, 3, 3, 3], v: f32[48, 32, 3, 3], d: f32[48, 1, 3, 3], p: f32[24, 48, 1, 1],
    q: f32[24, 10]):
    a = relu(conv(x, w, pads=(1, 1, 1, 1), strides=(2, 2)))
    b = relu(conv(conv(a, v, pads=(1, 1, 1, 1)), d, pads=(1, 1, 1, 1), group=48))
    c = conv(b, p)
    return matmul(reduce_mean(add(c, sigmoid(c)), axes=(2, 3)), q), softmax(max_pool(a, kernel=(2, 2), strides=(2, 2)))
""",
    "attention": """\
def g(x: f32[2, 33, 64], m: f32[33, 33], *, s: f32[64], w: f32[64, 64], v: f32[64, 64], u: f32[64, 200],
    t: f32[200, 64]):
    n = layer_norm(x, s)
    h = transpose(reshape(matmul(n, w), shape=(2, 33, 4, 16)), perm=(0, 2, 1, 3))
    k = transpose(reshape(matmul(n, v), shape=(2, 33, 4, 16)), perm=(0, 2, 3, 1))
    a = matmul(softmax(add(matmul(h, k), m)), h)
    o = add(x, matmul(reshape(transpose(a, perm=(0, 2, 1, 3)), shape=(2, 33, 64)), w))
    return add(o, matmul(gelu(matmul(rms_norm(o, s), u)), t))
""",
}


def in_type(text: str, t: str) -> Graph:
    """The network with all its floats in one type."""
    weights = {v.name: a.astype(dtype(t).numpy) for v, a in graph_of(text).constants.items()}
    return parse(text.replace("f32[", f"{t}["), weights)


def outputs(f: Any, inputs: list[Any]) -> list[Any]:
    got = f(*inputs)
    return list(got) if isinstance(got, tuple) else [got]


@pytest.mark.slow
@pytest.mark.family("cases")
@pytest.mark.parametrize("to", HALVES)
@pytest.mark.parametrize("name", NETS)
def test_a_float32_model_in_half(name: str, to: str) -> None:
    g = in_type(NETS[name], "f32")
    f, full = (dnnc.compile(g, cache=False, precision=p, threads=2) for p in (to, None))
    inputs = random_inputs(g)
    got, want = outputs(f, inputs), run(g, inputs, "float64")
    assert first_difference(g, inputs, got, to) is None
    for a, b in zip(got, want):
        error = np.abs(a - b).max()
        assert a.dtype == np.float32 and EPS[str(HALVES[to])] / 64 * np.abs(b).max() < error <= reduced(
            HALVES[to].name, depth(g), b
        )
    small, large = (x.report.programs[-1].memory for x in (f, full))
    assert small.constants < 0.56 * large.constants and small.arena < large.arena


@pytest.mark.slow
@pytest.mark.family("cases")
@pytest.mark.parametrize("t", ["f16", "bf16"])
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("asked", [None, "float32"])
def test_models_that_are_half(name: str, t: str, asked: str | None) -> None:
    g = in_type(NETS[name], t)
    inputs = [a.astype(v.type.dtype.numpy) for a, v in zip(random_inputs(in_type(NETS[name], "f32")), g.inputs)]
    f = dnnc.compile(g, cache=False, precision=asked)
    got = outputs(f, inputs)
    assert first_difference(g, inputs, got, asked) is None
    if asked == "float32":  # each output is rounded once
        for a, b in zip(got, run(g, inputs, "float64")):
            assert np.abs(a.astype(np.float64) - b).max() <= 0.51 * EPS[t] * np.abs(b).max()


@pytest.mark.parametrize("t", ["f16", "bf16"])
def test_sums_are_float32(t: str) -> None:
    """Sums of 4096 ones: in f16 they would end at 2048, in bf16 at 256."""
    text = (
        f"def g(x: {t}[3, 4096], *, w: {t}[4096, 32]):\n    return matmul(x, w), reduce_sum(x, axes=(1,)), softmax(x)"
    )
    g = parse(text, {"w": np.ones((4096, 32), dtype(t).numpy)})
    y, s, p = dnnc.compile(g, cache=False)(np.ones((3, 4096), dtype(t).numpy))
    assert (y == 4096).all() and (s == 4096).all() and (p == 1 / 4096).all()


@pytest.mark.slow
@pytest.mark.parametrize("t", ["f16", "bf16"])
def test_what_is_broadcast_is_widened_ahead(t: str) -> None:
    """The inner loop of a contraction reads the rows' operand as float32."""
    pairs = parse_target("llvm").rates.pairs > 0  # of bfloat16, which are not widened
    target = "llvm -mattr=-avx512bf16" if pairs else "llvm"
    shapes = {
        "matmul(x, w)": ("64, 96", "96, 64"),
        "conv(x, w, pads=(1, 1, 1, 1))": ("1, 32, 20, 20", "32, 32, 3, 3"),
        "conv(x, w, strides=(2, 2))": ("1, 32, 20, 20", "32, 32, 1, 1"),
    }
    for e, (x, w) in shapes.items():
        g = in_type(f"def g(x: f32[{x}], *, w: f32[{w}]):\n    return {e}", t)
        (text,) = (
            s.text
            for s in dnnc.compile(g, cache=False, target=target).programs[0].scheduled.steps
            if s.group.kind == "contraction"
        )
        inner = [line for line in text.splitlines() if "= fma(" in line]
        assert inner and all("fma(x0_" in line and line.count("cast_f32") == 1 for line in inner), text


def test_reference_target_stores_as_asked() -> None:
    g = in_type(NETS["attention"], "f32")
    inputs = random_inputs(g)
    exact = outputs(dnnc.compile(g, target="reference"), inputs)[0]
    rounded = outputs(dnnc.compile(g, target="reference", precision="bfloat16"), inputs)[0]
    assert rounded.dtype == np.float32
    assert 1e-4 < np.abs(rounded - exact).max() / np.abs(exact).max() < 0.1


def test_what_leaves_the_range_of_f16_is_infinite_where_it_is_stored() -> None:
    """Rows and columns of `a` are read by two kernels, so that memory holds it."""
    g = parse(
        "def g(x: f32[2, 2], *, w: f32[2, 2]):\n    a = mul(x, w)\n    return relu(a), transpose(a, perm=(1, 0))",
        {"w": np.full((2, 2), 300.0, np.float32)},
    )
    x = np.array([[1.0, 300.0], [-300.0, 0.0]], np.float32)
    assert dnnc.compile(g, cache=False, precision="float16")(x)[1].tolist() == [[300.0, -np.inf], [np.inf, 0.0]]
    assert dnnc.compile(g, cache=False, precision="bfloat16")(x)[1].tolist() == [[300.0, -90112.0], [90112.0, 0.0]]


def test_the_report_names_constants_that_stay_float32() -> None:
    g = parse(
        "def g(x: f32[4], *, big: f32[4]):\n    return softmax(add(x, big))",
        {"big": np.array([0, -1e9, 0, 0], np.float32)},
    )
    report = dnnc.compile(g, cache=False, precision="float16").report
    (note,) = (n for r in report.programs[-1].passes for n in r.notes)
    assert note.startswith("big overflows f16: add ") and note in report.to_json()


# --- judging ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("to", HALVES)
def test_verify_model_has_the_reduced_contract(to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    g = in_type(NETS["convolutions"], "f32")
    dnnc.compile(g, cache=False, precision=to, verify="model")

    usual = ConstantBlock.block

    def spoiled(constants: ConstantBlock) -> Any:
        block = usual(constants)
        block.view(HALVES[to].numpy)[:] = 0.01
        return block

    with monkeypatch.context() as m:
        m.setattr(ConstantBlock, "block", spoiled)
        with pytest.raises(dnnc.AccuracyError, match=f"the bound for {HALVES[to]} is"):
            dnnc.compile(g, cache=False, precision=to, verify="model")


def test_judged_by_the_type_that_values_are_stored_in() -> None:
    g = in_type(NETS["attention"], "f32")
    inputs = random_inputs(g)
    want = run(g, inputs, "float64")[0]
    off = (want + 4 * EPS["f16"] * np.abs(want).max()).astype(np.float32)
    assert first_difference(g, inputs, [off]) is not None
    assert first_difference(g, inputs, [off], "float32") is not None
    assert (
        first_difference(g, inputs, [off], "bfloat16") is None and first_difference(g, inputs, [off], "float16") is None
    )
    worse = (want + 0.5 * np.abs(want).max()).astype(np.float32)
    assert all(first_difference(g, inputs, [worse], to) is not None for to in HALVES)
    with pytest.raises(dnnc.AccuracyError):
        check_model(lambda *_: worse, g, {}, ["y"], "bfloat16")


def test_stored_type_and_depth() -> None:
    g = in_type(NETS["attention"], "f32")
    assert stored_type(g, None) is None and stored_type(g, "tf32") is None and stored_type(g, "bfloat16") is bf16
    assert (
        stored_type(in_type(NETS["attention"], "f16"), None) is f16
        and stored_type(as_stored(g, "float16"), None) is f16
    )
    assert (
        depth(g) == 13
    )  # norm, 2 products, mask, softmax, 2 products, sum, norm, product, gelu, product, sum; what moves does not count


def test_bounds() -> None:
    ones = np.ones(8)
    assert bound(f16, 1024, ones) < 5 * EPS["f16"] and bound(bf16, 10**6, ones) < 5 * EPS["bf16"]  # sums are float32
    assert bound(f32, 1024, ones) == 32 * 2.0**-23 * 32
    assert reduced("f16", 16, 2 * ones) == 2 * 3 * 4 * 2.0**-10
    assert bound(f16, 1, np.zeros(3)) == pytest.approx(2.0**-14 * (4 * 2.0**-10 + 32 * 2.0**-23))


@pytest.mark.family("random")
@pytest.mark.slow
@pytest.mark.parametrize("part", range(9))
def test_random_graphs(part: int, tmp_path: Any) -> None:
    for seed in range(part, 90, 9):
        g, arrays = random_graph(seed, 12)
        both = [
            to for k, to in enumerate(("float16", "bfloat16", "float32")) if k != seed // 3 % 3
        ]  # each with 60 graphs, 20 as they are
        for to in both:
            message = check(g, arrays, {"precision": to, "opt_level": 3 if seed % 3 else 0, "threads": 2}, tmp_path)
            assert message is None, f"seed {seed}, {to}: {message}\n{g}"
