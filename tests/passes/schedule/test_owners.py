"""Scatters by all schedules of both targets, interpreted with its checks for races and bounds, against NumPy in the
order of the updates.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates import templates as gpu_templates
from dnnc.backends.llvm.features import parse_target
from dnnc.backends.llvm.templates import templates as cpu_templates
from dnnc.ir import te
from dnnc.ir.dtype import BY_NAME, f32, i64
from dnnc.ir.errors import VerifyError
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run as reference
from dnnc.ir.graph.show import show_graph
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.stmt import Kernel, call
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.ir.op import Trait
from dnnc.ir.ops.index import REDUCTIONS
from dnnc.ir.shapes import specialise
from dnnc.ir.te.syntax import show_op
from dnnc.ir.types import TensorType
from dnnc.passes.lower.expand import decompose
from dnnc.passes.lower.nests import lower
from dnnc.passes.lower.scatter import Scattered
from dnnc.passes.planning.fuse import plan_fusion
from dnnc.passes.planning.inplace import find_inplace
from dnnc.passes.schedule import row_segments
from dnnc.passes.schedule.problem import Problem, Template, classify
from dnnc.passes.schedule.state import Schedule

Array = Any
DTYPES = ("f32", "f64", "i8", "i64", "u16", "f16")


def graph(rng: np.random.Generator, reduction: str, dtype: str) -> Graph:
    """A scatter of random form: any rank, axis, width of index and number of updates, none among them."""
    g, b = Graph("g"), None
    rank = int(rng.integers(1, 4))
    shape = tuple(int(n) for n in rng.integers(1, 9, rank))
    t = BY_NAME[dtype]
    x = g.add_input("x", TensorType(t, shape))
    b = Builder(g)
    kind = BY_NAME[str(rng.choice(["i64", "i32"]))]
    if rng.random() < 0.5:
        axis = int(rng.integers(rank))
        sizes = tuple(
            int(rng.integers(0, 20)) if k == axis else int(rng.integers(1, n + 1)) for k, n in enumerate(shape)
        )
        at, u = g.add_input("at", TensorType(kind, sizes)), g.add_input("u", TensorType(t, sizes))
        y = b.scatter_elements(
            x, at, b.neg(u) if t.is_float and rng.random() < 0.5 else u, axis=axis, reduction=reduction
        )
    else:
        width = int(rng.integers(1, rank + 1))
        lead = tuple(int(n) for n in rng.integers(0, 7, int(rng.integers(0, 3))))
        at, u = (
            g.add_input("at", TensorType(kind, (*lead, width))),
            g.add_input("u", TensorType(t, (*lead, *shape[width:]))),
        )
        y = b.scatter_nd(b.abs(x) if t.is_float and rng.random() < 0.5 else x, at, u, reduction=reduction)
    g.outputs = [y]
    return g


def operands(rng: np.random.Generator, g: Graph) -> list[Array]:
    """Small whole numbers, whose sums are exact in every type, and indices of the smallest axis, negative ones too."""
    x = g.inputs[0]
    least = min(int(n) for n in x.type.shape)
    out = []
    for v in g.inputs:
        low, high = (-least, least) if v.name == "at" else (0, 3) if v.type.dtype.kind == "u" else (-2, 3)
        out.append(rng.integers(low, high, v.type.shape).astype(v.type.dtype.numpy))
    return out


def run(problem: Problem, kernel: Kernel, given: dict[str, Array]) -> Array:
    values = zip(problem.lowered.params, kernel.entry.buffers)
    args = {
        b.name: np.ascontiguousarray(given[v.name]).copy()
        if v.name in given
        else np.zeros(v.type.shape, v.type.dtype.numpy)
        for v, b in values
    }
    run_kernel(kernel, args, threads=3)
    written = problem.form
    assert written is not None
    return args[written.out.name]


def schedules(problem: Problem) -> list[tuple[str, Kernel]]:
    every: list[tuple[str, Template]] = [("cpu", t) for t in cpu_templates(parse_target("llvm"))] + [
        ("gpu", t) for t in gpu_templates(GpuTarget(sms=2))
    ]
    made = [
        (f"{where} {t.name} {k}", t.apply(problem, dict(k)))
        for where, t in every
        if t.name == "scatter"
        for k in t.space(problem)
    ]
    for what, kernel in made:
        assert show_kernel(parse_kernel(show_kernel(kernel))) == show_kernel(kernel), what
    return [(what, verify_kernel(decompose(k, ()))) for what, k in made]


def check(seed: int, reduction: str, dtype: str) -> int:
    rng = np.random.default_rng(seed)
    g = graph(rng, reduction, dtype)
    given = operands(rng, g)
    want = reference(g, given, "float64")[0]
    nodes = list(g.nodes())
    problem = classify(nodes, lower(g, nodes, g.outputs))
    named = {v.name: a for v, a in zip(g.inputs, given)}
    every = [("naive", verify_kernel(problem.kernel)), *schedules(problem)]
    for what, kernel in every:
        np.testing.assert_array_equal(
            run(problem, kernel, named).reshape(want.shape),
            want.astype(g.outputs[0].type.dtype.numpy),
            f"{what} {seed} {g}",
        )
    return len(every)


@pytest.mark.slow
@pytest.mark.family("random")
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_scatters(reduction: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dnnc.backends.llvm.templates.scatter.SERIAL_BELOW", 0)
    assert sum(check(seed, reduction, dtype) for seed in range(3)) > 6


@pytest.mark.slow
@pytest.mark.family("random")
@pytest.mark.parametrize("seed", range(100, 140))
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_many_random_scatters(reduction: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dnnc.backends.llvm.templates.scatter.SERIAL_BELOW", 0)
    check(seed, reduction, DTYPES[seed % len(DTYPES)])


@pytest.mark.slow
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.family("cases")
@pytest.mark.parametrize("dtype", ("f32", "i32", "f16"))
@pytest.mark.parametrize(
    "rows,updates,width", [(5, 20, 40), (3, 9, 33), (1, 200, 36), (5, 1, 50), (9, 300, 3), (2, 70, 1)]
)
def test_segments_of_rows(rows: int, updates: int, width: int, reduction: str, dtype: str) -> None:
    """Rows with none, one and many updates: within a group's part, over the ends of parts, over several rounds; updates
    in any order, and by row.
    """
    rng = np.random.default_rng(rows)
    g = parse(
        f"def g(x: {dtype}[{rows}, {width}], at: i64[{updates}, 1], u: {dtype}[{updates}, {width}]):\n"
        f"    y = scatter_nd(x, at, u, reduction='{reduction}')\n    return y"
    )
    numbers = (1, 2) if reduction == "mul" else (-2, 3)  # exact in every type
    given = {v.name: rng.integers(*numbers, v.type.shape).astype(v.type.dtype.numpy) for v in g.inputs}
    skewed = np.where(rng.random((updates, 1)) < 0.5, rng.integers(-rows, rows, (updates, 1)), rows // 2)
    given["at"] = (np.sort(skewed % rows, axis=0) if dtype == "i32" else skewed).astype(np.int64)
    want = reference(g, list(given.values()), "float64")[0]
    problem = classify(list(g.nodes()), lower(g, list(g.nodes()), g.outputs))
    form, schedule = problem.form, Schedule(problem.kernel)
    assert isinstance(form, Scattered)
    for shares, threads, per, slabs in ((1, 64, 1, 1), (2, 64, 4, 1), (9, 32, 1, 2), (2, 128, 2, 1)):
        schedule.body = row_segments.by_blocks(form, shares, threads, per, min(slabs, width))
        kernel = verify_kernel(decompose(schedule.done(), ()))
        np.testing.assert_array_equal(run(problem, kernel, given), want, f"{shares} {per}")


SYMBOLIC = "N: dim[1, 1000]\nE: dim[0, 1000]\nB: dim[1, 64]\ndef g({}):\n    y = {}\n    return y"
RUNTIME = [
    ("h: f32[N, 24], at: i64[E, 1], v: f32[E, 24]", "scatter_nd(h, at, v, reduction='add')"),
    ("h: f32[N], at: i64[E], v: f32[E]", "scatter_elements(h, at, v, reduction='max')"),
    ("h: f32[B, N, 8], at: i64[B, E, 8], v: f32[B, E, 8]", "scatter_elements(h, at, v, axis=1)"),
    ("h: f32[B, N], at: i64[E, 2], v: f32[E]", "scatter_nd(h, at, v, reduction='mul')"),
    ("h: f32[N, B], at: i64[E, 1], v: f32[E, B]", "scatter_nd(h, at, v, reduction='add')"),
]


@pytest.mark.slow
@pytest.mark.parametrize("inputs,call", RUNTIME)
@pytest.mark.parametrize("sizes", ({"N": 7, "E": 30, "B": 3}, {"N": 1, "E": 0, "B": 1}))
def test_sizes_known_at_run_time_only(
    inputs: str, call: str, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every schedule for all sizes is proved, and right for some."""
    monkeypatch.setattr("dnnc.backends.llvm.templates.scatter.SERIAL_BELOW", 0)
    g = parse(SYMBOLIC.format(inputs, call))
    nodes = list(g.nodes())
    problem = classify(nodes, lower(g, nodes, g.outputs))
    fixed = specialise(g, sizes)
    rng = np.random.default_rng(0)
    given = operands(rng, fixed)
    want = reference(fixed, given, "float64")[0]
    named = {v.name: a for v, a in zip(g.inputs, given)}
    target = parse_target("llvm -threads=2")
    template = next(t for t in cpu_templates(target) if t.name == "scatter")
    cuts = {
        dict(k)["cut"]: verify_kernel(decompose(template.apply(problem, dict(k)), ())) for k in template.space(problem)
    }
    assert {-1, -2} <= set(cuts)
    for kernel in cuts.values():
        values = zip(problem.lowered.params, kernel.entry.buffers)
        args = {
            b.name: named[v.name].copy() if v.name in named else np.zeros(want.shape, np.float32) for v, b in values
        }
        scalars = {v.name: sizes[v.name] for v in kernel.entry.scalars}
        run_kernel(kernel, {**args, **scalars}, threads=2)
        np.testing.assert_array_equal(args["y"].reshape(want.shape), want)


def test_races_and_bounds_are_noticed() -> None:
    """Shares that overlap, and an update whose place nothing checks."""
    race = """
def k(at: i64[8], u: f32[8], y: f32[4]):
    for p in parallel(2):
        for r in range(8):
            row: i64 = guard(at[r], 0, 4)
            if 2*p <= row:
                y[row] = y[row] + u[r]
"""
    kernel = verify_kernel(parse_kernel(race))
    args = {"at": np.full(8, 3), "u": np.ones(8, np.float32), "y": np.zeros(4, np.float32)}
    with pytest.raises(VerifyError, match=r"race|iteration"):
        run_kernel(kernel, args)
    loose = race.replace("guard(at[r], 0, 4)", "at[r]")
    with pytest.raises(VerifyError, match="cannot show"):
        verify_kernel(parse_kernel(loose))


MODELS = {
    "elements": "def g(x: f32[40, 30], at: i64[{n}, 30], u: f32[{n}, 30]):\n    y = scatter_elements(x, at, u, "
    "reduction='{how}')\n    return y",
    "rows": "def g(x: f32[40, 30], at: i64[{n}, 1], u: f32[{n}, 30]):\n    y = scatter_nd(x, at, u, "
    "reduction='{how}')\n    return y",
    "message": "def g(x: f32[40, 30], at: i64[{n}, 1], s: i64[{n}], u: f32[{n}, 1]):\n    m = gather(x, s)\n    v = "
    "mul(m, u)\n    z = mul(x, 0.5)\n"
    "    y = scatter_nd(z, at, v, reduction='{how}')\n    return y",
}


@pytest.mark.parametrize("model", MODELS)
def test_no_updates(model: str) -> None:
    """A result that is large, and nothing to put into it."""
    g = parse(MODELS[model].format(n=0, how="add").replace("[40, 30]", "[4000, 30]"))
    x, *others = [np.ones(v.type.shape, v.type.dtype.numpy) for v in g.inputs]
    np.testing.assert_array_equal(dnnc.compile(g)(x, *others), x * 0.5 if model == "message" else x)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("how", ("none", "add", "max"))
def test_compiled(model: str, how: str) -> None:
    """The whole way: a kernel checked when it is compiled, the producers of updates in it, the same bits on one thread
    and on two, errors.
    """
    g = parse(MODELS[model].format(n=900, how=how))
    rng = np.random.default_rng(1)
    shapes = {v.name: v.type.shape for v in g.inputs}
    given = [
        rng.integers(-40, 40, s) if name in ("at", "s") else rng.standard_normal(s).astype(np.float32)
        for name, s in shapes.items()
    ]
    want = reference(g, given, "float64")[0]
    found = [dnnc.compile(g.copy(), target=f"llvm -threads={n}")(*given) for n in (1, 2)]
    np.testing.assert_allclose(found[0], want, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(found[0], found[1])
    given[1][5] = 40
    with pytest.raises(dnnc.DnncError, match="ind"):
        dnnc.compile(g)(*given)


def test_one_kernel_for_a_message() -> None:
    g = parse(MODELS["message"].format(n=900, how="add"))
    assert [len(x.nodes) for x in plan_fusion(g).groups] == [4]


def test_donated_memory_is_updated_in_place() -> None:
    g = parse("def g(x: f32[40, 30], at: i64[9, 1], u: f32[9, 30]):\n    y = scatter_nd(x, at, u)\n    return y")
    nodes = list(g.nodes())
    low = lower(g, nodes, g.outputs, {g.outputs[0]: g.inputs[0]})
    assert isinstance(low.form, Scattered) and low.form.initial is None
    other = parse(
        "def g(x: f32[40, 30], at: i64[9, 1], s: i64[9]):\n    u = gather(x, s)\n    y = scatter_nd(x, at, u)\n    "
        "return y"
    )
    other.donated[0] = 0
    assert not find_inplace(other, plan_fusion(other))  # the updates are read from it
    g.donated[0] = 0
    assert list(find_inplace(g, plan_fusion(g)).values()) == [g.inputs[0]]


def test_definitions_with_updates_are_read_back() -> None:
    x, at = te.placeholder("x", f32, (4, 3)), te.placeholder("at", i64, (5,))
    made = te.scatter(
        (4, 3),
        (5, 3),
        f32,
        "sum",
        lambda i, j: x[i, j],
        lambda r, j: (call("guard", at[r], 0, 4), j),
        lambda r, j: x[0, j] * 2.0,
    )
    text = show_op("op", [x, at], [made])
    assert "scatter(sum, x0[i0, i1], (guard(x1[r0], 0, 4), r1, )" in text
    g = parse(text + "def g(x: f32[4, 3], at: i64[5]):\n    y = op(x, at)\n    return y")
    assert show_graph(parse(show_graph(g))) == show_graph(g)
    got = dnnc.compile(g)(np.ones((4, 3), np.float32), np.array([0, 0, 1, 3, 3]))
    assert got[:, 0].tolist() == [5, 3, 1, 5]


def test_a_scatter_is_a_result() -> None:
    x, at = te.placeholder("x", f32, (4,)), te.placeholder("at", i64, (5,))
    made = te.scatter((4,), (5,), f32, "last", lambda i: x[i], lambda r: (call("guard", at[r], 0, 4),), lambda r: x[0])
    with pytest.raises(dnnc.DnncError, match="op of its own"):
        te.form([x, at], [te.compute((4,), f32, lambda i: made[i] + 1.0)])
    assert te.form([x, at], [made]) == {Trait.SCATTER}
