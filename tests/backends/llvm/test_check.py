"""The kernel check: what is right passes, every planted bug is caught, and the message says where."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kernels import TARGET, graphs, program
from native_check import one_node

from dnnc.backends import check as gate
from dnnc.backends.check import COLUMNS, POINTS, sample_points
from dnnc.backends.check_cost import FEWEST, sampled, unchecked
from dnnc.backends.llvm.check import check_kernel
from dnnc.backends.llvm.compile import compile_text, load_objects
from dnnc.backends.llvm.emit import emit_kernel
from dnnc.driver import compile
from dnnc.ir.errors import AccuracyError, InputError
from dnnc.ir.expr import Const, Expr, Load, Op, const, load, op, rebuild
from dnnc.ir.graph import Graph, Value
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.stmt import Block, For, Kernel, Store, map_stmt
from dnnc.passes.planning.program import Scheduled, ScheduledGraph
from support.times import in_a_quiet_round, quiet

GRAPHS = graphs()


def check(p: ScheduledGraph, change: Callable[[Kernel], Kernel] = lambda k: k, only: str = "") -> None:
    for step in p.steps:
        if only in step.kernel.name:
            kernel = change(step.kernel)
            changed = replace(step, scheduled=Scheduled.of(kernel, step.choice), make=lambda kernel=kernel: kernel)
            loaded = load_objects(
                [compile_text(emit_kernel(changed.kernel, "k_t", TARGET.feature_set), TARGET.cpu, TARGET.features)]
            )
            check_kernel(p.graph, changed, loaded.address("k_t"))


@pytest.mark.family("cases")
@pytest.mark.parametrize("name", GRAPHS)
def test_right_kernels_pass(name: str) -> None:
    check(program(GRAPHS[name]))


# --- planted bugs -----------------------------------------------------------------------------------------------------


def rewritten(
    expr: Callable[[Expr], Expr] = lambda e: e, stmt: Callable[[Any], Any] = lambda s: s
) -> Callable[[Kernel], Kernel]:
    """A kernel with every expression (bottom up) and every statement changed."""

    def fe(e: Expr) -> Expr:
        return expr(rebuild(e, fe))

    def fb(b: Block) -> Block:
        return tuple(x for s in b for x in [stmt(map_stmt(s, fe, fb))] if x is not None)

    return lambda k: k.with_body(fb(k.entry.body))


def output_stores(s: Any) -> bool:
    return isinstance(s, Store) and s.buf.space == "global"


def drop_stores() -> Callable[[Kernel], Kernel]:
    return rewritten(stmt=lambda s: None if output_stores(s) else s)


def last_iteration_missing() -> Callable[[Kernel], Kernel]:
    seen: list[str] = []

    def stmt(s: Any) -> Any:
        if (
            isinstance(s, For)
            and s.kind in ("range", "parallel")
            and not seen
            and isinstance(s.hi, Const)
            and s.hi.value > 1
        ):
            seen.append(s.var.name)
            return For(s.var, s.lo, s.hi - 1, s.kind, s.body)
        return s

    return rewritten(stmt=stmt)


def shifted_input() -> Callable[[Kernel], Kernel]:
    """One input is read one place further along its second last axis, within its bounds."""

    def expr(e: Expr) -> Expr:
        if isinstance(e, Load) and e.buf.name == "x0" and len(e.idx) > 1 and e.idx[-2].lanes == 1:
            k = len(e.idx) - 2
            return load(e.buf, (*e.idx[:k], op("min", e.idx[k] + 1, e.buf.shape[k] - 1), e.idx[-1]), e.lanes, e.limit)
        return e

    return rewritten(expr)


def wrong_constant() -> Callable[[Kernel], Kernel]:
    """Polynomial coefficients that are off by a hundredth."""
    return rewritten(
        lambda e: (
            const(e.value * 1.01, e.dtype)
            if isinstance(e, Const) and e.dtype.is_float and 0.1 < abs(e.value) < 0.4
            else e
        )
    )


def missing_tail() -> Callable[[Kernel], Kernel]:
    """Stores with a limit are dropped where they are not whole vectors."""
    return rewritten(
        stmt=lambda s: (
            Store(s.buf, s.idx, s.value, s.lanes, s.limit // s.lanes * s.lanes)
            if output_stores(s) and s.limit is not None
            else s
        )
    )


def unmasked_tail() -> Callable[[Kernel], Kernel]:
    return rewritten(
        stmt=lambda s: Store(s.buf, s.idx, s.value, s.lanes) if output_stores(s) and s.limit is not None else s
    )


def wrong_start() -> Callable[[Kernel], Kernel]:
    """An accumulator that starts at a half (of a sum) or at 0 (of a maximum)."""

    def stmt(s: Any) -> Any:
        if isinstance(s, Store) and s.buf.space == "register" and isinstance(s.value, Const):
            return Store(s.buf, s.idx, const(0.5 if s.value.value == 0 else 0.0, s.value.dtype), s.lanes, s.limit)
        return s

    return rewritten(stmt=stmt)


def swapped_operation() -> Callable[[Kernel], Kernel]:
    return rewritten(
        lambda e: op("-", *e.args) if isinstance(e, Op) and e.name == "+" and e.dtype.is_float and e.lanes > 1 else e
    )


BUGS: list[tuple[str, str, Callable[[Kernel], Kernel], str]] = [
    *((name, "drop_stores", drop_stores(), "reference says|padding") for name in GRAPHS),
    ("conv", "last_iteration", last_iteration_missing(), "the float64 reference says"),
    ("matmul", "last_iteration", last_iteration_missing(), "the float64 reference says"),
    ("max_pool", "last_iteration", last_iteration_missing(), "the float64 reference says"),
    ("add", "last_iteration", last_iteration_missing(), "the float64 reference says"),
    ("conv", "shifted", shifted_input(), "the float64 reference says"),
    ("matmul", "shifted", shifted_input(), "the float64 reference says"),
    ("softmax", "shifted", shifted_input(), "the float64 reference says"),
    ("gelu_add", "constant", wrong_constant(), "the float64 reference says"),
    ("softmax", "constant", wrong_constant(), "the float64 reference says"),
    ("add", "missing_tail", missing_tail(), "the float64 reference says"),
    ("matmul", "missing_tail", missing_tail(), "the float64 reference says"),
    ("add", "unmasked_tail", unmasked_tail(), "writes outside of"),
    ("conv", "start", wrong_start(), "the float64 reference says"),
    ("reduce_sum", "start", wrong_start(), "the float64 reference says"),
    ("add", "minus", swapped_operation(), "the float64 reference says"),
    ("reduce_sum", "minus", swapped_operation(), "the float64 reference says"),
]


@pytest.mark.family("cases")
@pytest.mark.parametrize(
    "name,bug,change,message", BUGS, ids=lambda v: v if isinstance(v, str) and " " not in v else ""
)
def test_planted_bugs_are_caught(name: str, bug: str, change: Callable[[Kernel], Kernel], message: str) -> None:
    with pytest.raises(AccuracyError, match=message):
        check(program(GRAPHS[name]), change, only=next(GRAPHS[name].nodes()).op.name.removesuffix("_transpose"))


@pytest.mark.parametrize("wrong", ["y0", "y1", "y2"])
def test_every_output_is_checked(wrong: str) -> None:
    p = program(
        parse(
            """
def g(x: f32[40, 60]):
    m = reduce_mean(x, axes=(1,), keepdims=True)
    y = sub(x, m)
    return y, reduce_max(y, axes=(1,), keepdims=True), m"""
        )
    )
    (step,) = p.kernels
    assert len(step.group.outputs) == 3
    check(p)
    name = step.group.outputs[int(wrong[1])].name
    shifted = rewritten(stmt=lambda s: replace(s, value=s.value + 1.0) if is_store_to(s, wrong) else s)
    with pytest.raises(AccuracyError, match=f"output .* of {name} is"):
        check(p, shifted)


def is_store_to(s: Any, name: str) -> bool:
    return isinstance(s, Store) and s.buf.name == name


def test_the_tail_of_gelu_is_measured_by_its_operand() -> None:
    """gelu(-8) = -5e-15 is a difference of numbers near 8; no larger output beside it gives the scale."""
    text = "def f(x: f32[1], *, c: f32[1] = [-8.0]):\n    y: f32[1] = gelu(add(mul(x, 0.001), c))\n    return y\n"
    f = compile(parse(text), target="llvm", threads=1, cache=False)
    assert abs(float(f(np.float32([0.5]))[0])) < 8 * 2**-22


@pytest.mark.family("cases")
@pytest.mark.parametrize(
    "value",
    [
        "reduce_mean(mean_variance_norm(x, axes=(1,)), axes=(1,))",
        "reduce_sum(sub(x, reduce_mean(x, axes=(1,), keepdims=True)), axes=(1,))",
        "sub(reduce_sum(softmax(x), axes=(1,)), 1.0)",
        "reduce_log_sum_exp(log_softmax(x), axes=(1,))",
    ],
)
@pytest.mark.parametrize("numerics", ["standard", "strict"])
def test_what_is_zero_but_for_roundings_is_measured_by_what_is_summed(value: str, numerics: str) -> None:
    g = parse(f"def g(x: f32[9, 300]):\n    return {value}")
    assert len(compile(g, cache=False, numerics=numerics).programs[0].scheduled.steps) == 1  # checked, and not refused


def test_padding_lanes_must_be_zero() -> None:
    p = program(one_node("conv", ["f32 1 3 8 8", "f32 24 3 3 3"]))
    spoil = rewritten(stmt=lambda s: Store(s.buf, s.idx, s.value + 1.0, s.lanes, s.limit) if output_stores(s) else s)
    assert any(not s.group.outputs[0].type.row_major for s in p.steps)
    with pytest.raises(AccuracyError, match=r"padding|reference says"):
        check(p, spoil, only="conv")


def test_indices_are_drawn_from_their_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    original = gate.draw

    def spy(rng: Any, graph: Graph, v: Value, *rest: Any) -> Any:
        a = original(rng, graph, v, *rest)
        drawn.append(a)
        return a

    monkeypatch.setattr(gate, "draw", spy)
    check(program(one_node("gather", ["f32 500 24", "i64 300"], axis=0)))
    indices = next(a for a in drawn if a.dtype == np.int64)
    assert indices.min() < -300 and indices.max() > 300 and indices.min() >= -500 and indices.max() < 500


@pytest.mark.family("shapes")
@pytest.mark.parametrize("shape", [(), (7,), (100000,), (3, 5), (1, 64, 56, 56), (1, 2048, 7, 7), (2, 3, 1, 5, 2, 7)])
def test_points_cover_the_ends_of_every_axis(shape: tuple[int, ...]) -> None:
    for axis in range(-1, max(len(shape) - 1, 0)):
        points = sample_points(np.random.default_rng(0), shape, axis)
        assert len(points) <= 2 * POINTS + 40 * COLUMNS and points.shape[1] == len(shape)
        for k, n in enumerate(shape):
            assert points[:, k].min() == 0 and points[:, k].max() == n - 1
    assert len(sample_points(np.random.default_rng(0), (3, 0, 2))) == 0


@pytest.mark.parametrize("target", ["llvm", "reference"])
@pytest.mark.parametrize("level", [0, 3])
def test_wrong_constant_indices_are_an_error_of_the_model(target: str, level: int) -> None:
    text = (
        "def g(x: f32[4], *, i: i64[4] = [0, 5, 10, {n}], z: f32[16] = {z}):\n"
        "    return scatter_elements(z, i, x, axis=0)"
    )
    x = np.arange(1, 5, dtype=np.float32)
    for n in (15, -16):
        y = compile(parse(text.format(n=n, z=[0.0] * 16)), target=target, opt_level=level, cache=False)(x)
        assert y[n] == 4 and y[5] == 2
    for n in (16, -17, 1 << 40):
        with pytest.raises(
            InputError,
            match=r"scatter_elements.*index .*lies outside of its axis|lies outside of its axis.*in scatter_elements",
        ):
            compile(parse(text.format(n=n, z=[0.0] * 16)), target=target, opt_level=level, cache=False)(x)


@pytest.mark.parametrize("target", ["llvm", "reference"])
@pytest.mark.parametrize("rows", ["1", "N"])
@pytest.mark.parametrize("op", ["gather(x, i)", "gather_elements(x, expand(unsqueeze(i, axes=(1,)), shape=(2, 3)))"])
def test_indices_into_an_axis_of_one_element_are_checked(op: str, rows: str, target: str) -> None:
    text = f"def g(x: f32[{rows}, 3], i: i64[2]):\n    y = {op}\n    return y"
    text = f"N: dim[1, 9]\n{text}" if rows == "N" else text
    f, x = compile(parse(text), target=target, cache=False), np.arange(3, dtype=np.float32)[None]
    for i in ([0, 0], [0, -1]):
        np.testing.assert_array_equal(f(x, np.array(i)), np.concatenate([x, x]))
    for i in ([0, 1], [-2, 0], [1 << 40, 0]):
        with pytest.raises(InputError, match="outside of its axis"):
            f(x, np.array(i))


@pytest.mark.parametrize("level", [0, 3])
def test_wrong_constant_indices_of_a_branch_are_an_error_where_it_runs(level: int) -> None:
    g = parse(
        "N: dim[1, 9]\n"
        "def g(x: f32[N, 3], c: bool):\n"
        "    def then(x: f32[N, 3], *, i: i64[2] = [-7, 4]):\n"
        "        y: f32[2, 3] = gather(x, i)\n"
        "        return y\n"
        "    def other(x: f32[N, 3]):\n"
        "        s = reduce_sum(x, axes=(0,), keepdims=True)\n"
        "        y: f32[2, 3] = expand(s, shape=(2, 3))\n"
        "        return y\n"
        "    y: f32[2, 3] = cond(c, x, then=then, other=other)\n"
        "    return y"
    )
    f = compile(g, opt_level=level, cache=False)
    for rows in (8, 1, 3):
        x = np.arange(3 * rows, dtype=np.float32).reshape(rows, 3)
        np.testing.assert_array_equal(f(x, np.array(False)), np.stack([x.sum(0)] * 2))
        if rows == 8:
            np.testing.assert_array_equal(f(x, np.array(True)), x[[-7, 4]])
            continue
        with pytest.raises(InputError, match="outside of its axis"):
            f(x, np.array(True))


@pytest.mark.slow
@pytest.mark.family("shapes")
@pytest.mark.parametrize(
    "op",
    [
        "scatter_elements(x, i, z, axis=0)",
        "gather(x, i, axis=0)",
        "gather_elements(x, i, axis=0)",
        "scatter_elements(x, i, z, reduction='add')",
    ],
)
@pytest.mark.parametrize("level", [0, 3])
def test_sizes_that_a_check_makes_up_suit_constant_indices(op: str, level: int) -> None:
    """Who has an index of 271 has an axis that long, whatever its type says."""
    dims = {"N": (0, 660)}
    for i in ([271], [-300], [3, 650]):
        g = parse(
            f"N: dim[0, 660]\ndef g(x: f32[N], z: f32[{len(i)}], *, i: i64[{len(i)}] = {i}):\n    y = {op}\n    return "
            "y"
        )
        x, z = np.arange(660, dtype=np.float32), np.ones(len(i), np.float32)
        np.testing.assert_array_equal(
            compile(g, opt_level=level, cache=False, dims=dims)(x, z), compile(g, target="reference")(x, z)
        )
        with pytest.raises(InputError, match="lies outside of its axis"):
            compile(g, opt_level=level, cache=False, dims=dims)(x[:20], z)


# --- kernels that are too long ----------------------------------------------------------------------------------------

LONG = (
    "def g(x: f32[1, 1], y: f32[1, 3]):\n    a = expand(x, shape=({n}, {n}))\n"
    "    return reduce_sum(a, axes=(0, 1)), exp(y)"
)


@in_a_quiet_round
def test_a_kernel_that_is_too_long_is_not_checked_and_the_report_says_so() -> None:
    start = time.monotonic()
    f = compile(parse(LONG.format(n=10**6)), cache=False)
    quiet(time.monotonic() - start < 20)
    (note,) = [n for p in f.report.programs for x in p.passes if x.name == "kernel check" for n in x.notes]
    assert note == "kernel expand_reduce_sum was not checked: a reference of it would take an array of 1e+12 elements"
    assert "was not checked" in str(f.report)
    assert not [
        x
        for p in compile(parse(LONG.format(n=10)), cache=False).report.programs
        for x in p.passes
        if x.name == "kernel check"
    ]


def test_steps_are_counted() -> None:
    f = compile(parse("def g(x: f32[64, 33], y: f32[33, 64]):\n    return matmul(x, y)"), cache=False, opt_level=0)
    (step,) = f.programs[-1].scheduled.kernels
    assert unchecked(step, {}) is None
    assert (unchecked(step, {}, 64 * 33) or "").startswith("it runs ")
    assert unchecked(step, {}, 64 * 64 * 33 * 8) is None


def test_long_reductions_have_fewer_points() -> None:
    assert [sampled(POINTS, n) for n in (1, 100_000, 1 << 20, 1 << 40)] == [POINTS, POINTS, 256, FEWEST]
    for n in (FEWEST, 256, POINTS):
        points = sample_points(np.random.default_rng(0), (1000, 1000), wanted=n)
        assert 0.9 * n <= len(points) <= 2 * n + 300
        assert {(0, 0), (999, 999)} <= {tuple(p) for p in points.tolist()}


@pytest.mark.slow
def test_large_operands_take_no_memory_and_their_rows_differ() -> None:
    g = parse(
        "def f(x: f32[1, 40000], *, w: f32[40000, 512]):\n    return matmul(x, w)",
        {"w": np.zeros((40000, 512), np.float32)},
    )
    w = gate.draw(np.random.default_rng(0), g, next(v for v in g.constants if v.name == "w"), {})
    span = sum((n - 1) * step for n, step in zip(w.shape, w.strides)) + w.itemsize
    assert w.shape == (40000, 512) and span < w.nbytes // 50
    assert len(np.unique(w[::997, 0])) > 35 and not np.array_equal(w[0], w[1]) and np.abs(w).max() <= 1


@pytest.mark.slow
def test_a_product_of_large_weights_is_checked() -> None:
    rng = np.random.default_rng(5)
    w = rng.standard_normal((4100, 4104), np.float32)
    p = program(parse("def f(x: f32[1, 4100], *, w: f32[4100, 4104]):\n    return matmul(x, w)", {"w": w}))
    check(p)


# --- ill-conditioned values -------------------------------------------------------------------------------------------

ILL_CONDITIONED = {
    "overflow": "def g(x: f32[9, 40], m: f32[9, 40]):\n    return add(x, mul(sub(1.0, m), -3.4e38))",
    "overflow matmul": "def g(x: f32[9, 40], m: f32[9, 9], *, w: f32[40, 9]):\n    return add(mul(matmul(x, w), 0.1), "
    "mul(sub(1.0, m), -3.4e38))",
    "softmax of huge": "def g(x: f32[9, 40], m: f32[9, 40]):\n    return softmax(add(x, mul(sub(1.0, m), -3.4e38)))",
    "nearly equal": "def g(a: f32[9, 1], b: f32[9, 40], *, s: f32[40], t: f32[40]):\n    return layer_norm(sub(add(a, "
    "b), b), s, t)",
    "nearly equal mvn": "def g(a: f32[9, 1], b: f32[9, 40]):\n    return mean_variance_norm(sub(add(a, b), b), "
    "axes=(1,))",
    "argmax": "def g(a: f32[9, 1], b: f32[9, 40]):\n    return argmax(sub(add(a, b), b), axis=1)",
    "argmin": "def g(a: f32[9, 40], b: f32[9, 40]):\n    return argmin(abs(sub(add(a, b), add(b, a))), axis=1)",
    "argmin prod": "def g(a: f32[9, 40], b: f32[9, 40]):\n    return argmin(abs(sub(mul(a, 3.0), add(a, add(a, a)))), "
    "axis=1)",
    "argmax round": "def g(a: f32[9, 40]):\n    return argmax(round(mul(a, 5.5)), axis=1)",
    "floor": "def g(a: f32[9, 40], b: f32[9, 40]):\n    return floor(mul(sub(add(a, b), b), div(1.0, a)))",
    "compare": "def g(a: f32[9, 40], b: f32[9, 40]):\n    return less(sub(add(a, b), b), a)",
    "cast": "def g(a: f32[9, 40], b: f32[9, 40]):\n    return cast(mul(div(sub(add(a, b), b), a), 7.0), to=i32)",
    "quantize": "def g(x: f32[9, 40], *, w: f32[40, 9]):\n    return cast(round(mul(matmul(x, w), 1000.5)), to=i32)",
    "sum zero div": "def g(a: f32[9, 40], b: f32[9, 40]):\n    return div(a, sub(reduce_sum(add(a, b), axes=(1,), "
    "keepdims=True), reduce_sum(add(b, a), axes=(1,), keepdims=True)))",
    "norm of equal": "def g(a: f32[9, 1]):\n    return mean_variance_norm(expand(mul(a, 1.1), shape=(9, 40)), "
    "axes=(1,))",
    "mean of square minus": "def g(a: f32[9, 40]):\n    return sqrt(relu(sub(reduce_mean(mul(add(a, 100.0), add(a, "
    "100.0)), axes=(1,)), mul(reduce_mean(add(a, 100.0), axes=(1,)), reduce_mean(add(a, "
    "100.0), axes=(1,))))))",
}


@pytest.mark.family("cases")
@pytest.mark.parametrize("numerics", ["standard", "strict"])
@pytest.mark.parametrize("name", ILL_CONDITIONED)
def test_right_kernels_of_ill_conditioned_values_pass(name: str, numerics: str) -> None:
    """Masks that overflow, norms of nearly equal numbers, ties, steps of functions: roundings decide, and a right
    kernel is not refused.
    """
    rng = np.random.default_rng(0)
    constants = {k: rng.standard_normal(s).astype(np.float32) for k, s in (("w", (40, 9)), ("s", (40,)), ("t", (40,)))}
    text = ILL_CONDITIONED[name]
    g = parse(text, {k: a for k, a in constants.items() if f" {k}: f32" in text.partition("*")[2]})
    compile(g, cache=False, numerics=numerics)


@pytest.mark.parametrize(
    "name,change",
    [
        *(
            (name, drop_stores)
            for name in ("overflow", "argmax", "argmax round", "compare", "floor", "quantize", "nearly equal")
        ),
        *((name, last_iteration_missing) for name in ("overflow", "floor", "quantize", "nearly equal")),
    ],
)
def test_wrong_kernels_of_ill_conditioned_values_are_refused(
    name: str, change: Callable[[], Callable[[Kernel], Kernel]]
) -> None:
    text = ILL_CONDITIONED[name]
    rng = np.random.default_rng(0)
    constants = {k: rng.standard_normal(s).astype(np.float32) for k, s in (("w", (40, 9)), ("s", (40,)), ("t", (40,)))}
    p = program(parse(text, {k: a for k, a in constants.items() if f" {k}: f32" in text.partition("*")[2]}))
    with pytest.raises(AccuracyError):
        check(p, change())


CHAINS = (
    "sub(add({}, b), b)",
    "mul({}, 3.0)",
    "add({}, a)",
    "relu({})",
    "sub({}, reduce_mean({}, axes=(1,), keepdims=True))",
    "tanh({})",
)
ENDS = (
    "layer_norm({}, s, t)",
    "softmax(mul({}, 1e4))",
    "argmax({}, axis=1)",
    "floor(mul({}, 8.0))",
    "mean_variance_norm({}, axes=(1,))",
)


@pytest.mark.family("cases")
@pytest.mark.parametrize("seed", range(12))
def test_chains_that_cancel_pass(seed: int) -> None:
    rng = np.random.default_rng(seed)
    value = "sub(add(a, b), b)"
    for k in rng.integers(len(CHAINS), size=3):
        value = CHAINS[k].format(*[value] * CHAINS[k].count("{}"))
    value = ENDS[seed % len(ENDS)].format(value)
    text = f"def g(a: f32[9, 1], b: f32[9, 40], *, s: f32[40], t: f32[40]):\n    return {value}"
    compile(parse(text, {k: rng.standard_normal(40).astype(np.float32) for k in "st"}), cache=False)
