"""From a model to an executable: what may be compiled, what the machine code holds, and how long the passes take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest

import dnnc
from dnnc.backends.llvm.compile import ALLOWED_SYMBOLS, load_objects
from dnnc.backends.llvm.elf import symbols_of
from dnnc.ir.dtype import f32
from dnnc.ir.expr import dim
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.stmt import walk_stmts
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.ir.types import tensor
from dnnc.passes.base import PassContext, PassManager
from dnnc.passes.pipelines import PASSES
from dnnc.passes.planning.fuse import plan_fusion
from dnnc.passes.planning.inplace import find_inplace
from dnnc.passes.planning.memory_plan import plan_memory
from dnnc.tools.sample_graphs import graph_of
from support.times import growth

NET = """def g(x: f32[2, 3, 12, 12], i: i64[4], *, w: f32[24, 3, 3, 3], b: f32[24], v: f32[24, 24, 3, 3],
    d: f32[24, 1, 3, 3], m: f32[24, 33], e: f32[9, 33]):
    a = relu(conv(x, w, b, pads=(1, 1, 1, 1)))
    c = add(conv(conv(a, d, group=24, pads=(1, 1, 1, 1)), v, pads=(1, 1, 1, 1)), a)
    p = max_pool(c, kernel=(2, 2), strides=(2, 2))
    h = gelu(matmul(reduce_mean(p, axes=(2, 3)), m))
    t = gather(e, i, axis=0)
    return softmax(matmul(h, transpose(t, perm=(1, 0)))), argmax(h, axis=1), cast(cumsum(t, axis=1), to=f16)"""


# --- what is taken ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (42, {}, dnnc.InputError, "cannot compile an int: expected a path"),
        (None, {}, dnnc.InputError, "cannot compile a NoneType"),
        ("no/such/model.onnx", {}, dnnc.ModelError, "no/such/model.onnx"),
        (b"no protobuf", {}, dnnc.ModelError, "(?i)model"),
        (NET, {"target": "cuda:64"}, dnnc.TargetError, "no CUDA device 64"),
        (NET, {"target": "llvm -mcpu=z80"}, dnnc.TargetError, "z80"),
        (NET, {"opt_levle": 1}, dnnc.InputError, "did you mean opt_level"),
        (NET, {"outputs": ["cc"]}, dnnc.InputError, "no value 'cc'; did you mean c"),
        (NET, {"dims": {"N": 3}}, dnnc.InputError, "no symbolic dim 'N'; it has none"),
    ],
)
def test_refused(model: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dnnc.compile(graph_of(model) if model == NET else model, cache=False, **options)


@pytest.mark.slow
def test_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    f = dnnc.compile(graph_of(NET), cache=tmp_path, progress=lambda *news: told.append(news))
    kernels = len({s.text for s in f.programs[0].scheduled.steps})
    for stage in ("compile", "check"):
        assert [n for n in told if n[0] == stage] == [(stage, k, kernels) for k in range(1, kernels + 1)]
    told.clear()
    dnnc.compile(graph_of(NET), cache=tmp_path, progress=lambda *news: told.append(news))
    assert told == []


@pytest.mark.slow
def test_the_model_stays_as_it_is() -> None:
    g = graph_of(NET)
    before, constants = str(g), {v.name: a.copy() for v, a in g.constants.items()}
    dnnc.compile(g, cache=False, outputs=["p"])
    assert str(g) == before
    assert all(np.array_equal(constants[v.name], a) for v, a in g.constants.items())


SYMBOLIC = """<ir_version: 9, opset_import: ["": 18]>
g (float[N, 3] x) => (float[N, 3] y) <float[3] w = {1, 2, 3}> { y = Mul(x, w) }"""
DATA_DEPENDENT = """<ir_version: 9, opset_import: ["": 18]>
g (float[N, 3] x) => (float[M, 3] y) <float[3] w = {1, 2, 3}> {
    c = ReduceMax<keepdims = 0>(x, axes) k = NonZero(c) i = Squeeze(k) z = Gather(x, i) y = Mul(z, w)
}""".replace("w = {1, 2, 3}>", "w = {1, 2, 3}, int64[1] axes = {1}>")


@pytest.mark.slow
@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize("text", [SYMBOLIC, DATA_DEPENDENT])
def test_a_model_that_changes_later_does_not_change_the_program(text: str, as_bytes: bool, tmp_path: Path) -> None:
    """A new size is compiled from the model as it was."""
    model = onnx.parser.parse_model(text)
    given: Any = bytearray(model.SerializeToString()) if as_bytes else model
    f = dnnc.compile(given, cache=False)
    x = np.ones((2, 3), np.float32)
    assert f(x).tolist() == [[1, 2, 3]] * 2
    if as_bytes:
        given[:] = bytes(len(given))
    else:
        model.graph.node[-1].op_type = "Add"
        model.graph.initializer[0].float_data[:] = [7, 7, 7]
    assert f(np.ones((5, 3), np.float32)).tolist() == [[1, 2, 3]] * 5
    f.save(tmp_path / "m.dnnc")
    assert dnnc.load(tmp_path / "m.dnnc")(np.ones((6, 3), np.float32)).tolist() == [[1, 2, 3]] * 6


@pytest.mark.parametrize("bounds", [{}, {"M": (1, 9)}, {"M": 3}])
@pytest.mark.parametrize("shape", ["N", "3"])
def test_a_dim_that_no_type_has(shape: str, bounds: dict[str, Any]) -> None:
    """No array of a call tells its size, and nothing depends on it."""
    g = parse(f"def g(x: f32[{shape}]):\n    y = exp(x)\n    return y\n")
    g.declare(dim("M"))
    f = dnnc.compile(g, dims=bounds, cache=False)
    assert f(np.zeros(3, np.float32)).tolist() == [1, 1, 1] and "exp" in str(f.report)
    assert "M" in g.dims


# --- what comes out ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1, 3])
def test_every_native_function_has_a_kernel_and_nothing_else_is_called(
    level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects: list[bytes] = []

    def load(objs: Any) -> Any:
        objects[:] = objs
        return load_objects(objs)

    monkeypatch.setattr("dnnc.backends.llvm.code.load_objects", load)
    f = dnnc.compile(graph_of(NET), cache=False, opt_level=level)
    (native,) = f.programs
    kernels = {native.symbols[s.text] for s in native.scheduled.steps}
    defined, undefined = (set().union(*sets) for sets in zip(*map(symbols_of, objects)))
    assert defined == set(native.loaded.kernels) == kernels | {"entry"}
    assert undefined - kernels <= ALLOWED_SYMBOLS
    assert set(native.texts) == defined


@pytest.mark.slow
def test_kernels_print_parse_and_verify() -> None:
    (native,) = dnnc.compile(graph_of(NET), cache=False).programs
    for s in native.scheduled.steps:
        assert show_kernel(s.kernel) == s.text == show_kernel(verify_kernel(parse_kernel(s.text)))
        assert sum(1 for f in s.kernel.funcs for _ in walk_stmts(f.body)) <= 300


@pytest.mark.slow
def test_equal_groups_are_one_kernel() -> None:
    text = """def g(x: f32[1, 16, 8, 8], *, a: f32[16, 16, 3, 3], b: f32[16, 16, 3, 3], c: f32[16, 16, 3, 3]):
    y = relu(conv(x, a, pads=(1, 1, 1, 1)))
    z = relu(conv(y, b, pads=(1, 1, 1, 1)))
    return relu(conv(z, c, pads=(1, 1, 1, 1)))"""
    (native,) = dnnc.compile(graph_of(text), cache=False).programs
    convs = [s for s in native.scheduled.steps if "conv" in s.kernel.name]
    assert len(convs) == 3 and len({s.text for s in convs}) == 1


@pytest.mark.slow
def test_strict_numerics_are_the_same_for_any_thread_count() -> None:
    g = parse("def g(x: f32[64, 300], y: f32[300, 40]):\n    return softmax(matmul(x, y)), reduce_sum(x, axes=(0, 1))")
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(s).astype(np.float32) for s in ((64, 300), (300, 40))]
    runs = [dnnc.compile(g, cache=False, numerics="strict", threads=t)(*inputs) for t in (1, 2, 2)]
    for got in runs[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(got, runs[0]))


# --- time of the passes -----------------------------------------------------------------------------------------------


def chain(nodes: int) -> Graph:
    """Convolutions with residuals, and a row of matrix products and softmax now and then."""
    rng = np.random.default_rng(0)
    g = Graph("chain")
    b = Builder(g)
    x = g.add_input("x", tensor(f32, 1, 16, 6, 6))
    while len(g) < nodes:
        w, bias, m = (rng.standard_normal(s).astype(np.float32) for s in ((16, 16, 1, 1), (16,), (36, 36)))
        x = b.add(x, b.mul(b.relu(b.conv(x, w, bias)), 0.5))
        if len(g) % 50 < 5:
            rows = b.softmax(b.add(b.matmul(b.reshape(x, shape=(16, 36)), m), 1.0))
            x = b.reshape(rows, shape=(1, 16, 6, 6))
    g.outputs = [x]
    return g


def passes(g: Graph) -> None:
    PassManager().run(g, PASSES, PassContext())
    plan = plan_fusion(g)
    plan_memory(g, plan, find_inplace(g, plan)).offsets({})


@pytest.mark.slow
def test_passes_take_linear_time() -> None:
    small, large = growth(chain, passes, 1500, 3000, 2.3)
    assert small < 3
    assert large < 2.3 * small, f"{small:.2f} s for 1,500 nodes, {large:.2f} s for 3,000"
