"""vmap: the same as a loop in Python and a stack, for functions of arrays, trees, control flow, and nests; every op of
the IR has a way.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import dnnc
import dnnc.array as xp
from dnnc.array.lazy import placeholder
from dnnc.frontends.trace import Spec, trace, vmap
from dnnc.frontends.trace.batch import Operand
from dnnc.frontends.trace.batching import Batcher
from dnnc.frontends.trace.regions import Region
from dnnc.ir.errors import InputError, ShapeError, UnsupportedError
from dnnc.ir.graph import Graph
from dnnc.ir.graph.attributes import complete
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.op import OpDef, Sample
from dnnc.ir.ops import OPS
from dnnc.ir.ops.common import draw
from dnnc.ir.types import TensorType
from support.devices import compile_interpreted

RNG = np.random.default_rng(41)
ROWS = 3
X, W, N = RNG.standard_normal((5, 4)), RNG.standard_normal((4, 3)), np.array([0, 4, 2, 3, 1])
# what runs on the host, by itself or within its decomposition, has no rows
REFUSED = {
    "string_equal", "string_concat", "string_match", "string_index", "string_rank", "string_split", "string_normalize",
    "to_string", "from_string",
    "nonzero", "compress", "unique", "non_max_suppression", "truncate", "view", "measure", "decode_image",
}  # fmt: skip
# control flow has tests below; passes alone make recurrences; functions are in test_gradients.py
WITHOUT_SAMPLES = {"loop", "cond", "recurrence", "call", "checkpoint", "custom_vjp"}


# --- every op ---------------------------------------------------------------------------------------------------------


def of_op(op: OpDef, s: Sample, which: tuple[bool, ...], seed: int) -> None:
    """The op on stacks against the op on each row, by the interpreter."""
    attrs = complete(op, dict(s.attrs))
    draws = [draw(s, seed + k) for k in range(ROWS)]
    args = [np.stack([d[k] for d in draws]) if w else draws[0][k] for k, w in enumerate(which)]
    given = [placeholder(TensorType(t.dtype, (ROWS, *t.shape)) if w else t) for t, w in zip(s.inputs, which)]
    made = Batcher(ROWS).node(op, [Operand(x, w) for x, w in zip(given, which)], attrs, ())
    got = run(Region("many", given, [f"x{k}" for k in range(len(given))]).finish([m.given for m in made]), args)
    one = Graph("one")
    node = Builder(one).node(op, [one.add_input(f"x{k}", t) for k, t in enumerate(s.inputs)], attrs)
    one.outputs = list(node.outputs)
    rows = [run(one, [a[k] if w else a for a, w in zip(args, which)]) for k in range(ROWS)]
    for y, *ws in zip(got, *rows):
        want = np.stack(ws)
        assert y.shape == want.shape and y.dtype == want.dtype
        small = y.dtype.itemsize < 4
        np.testing.assert_allclose(
            y.astype(np.float64), want.astype(np.float64), rtol=2e-2 if small else 1e-5, atol=1e-2 if small else 1e-5
        )


@pytest.mark.family("cases")
@pytest.mark.parametrize("family", sorted({name[0] for name in OPS}))
def test_every_op_has_a_way_or_an_error(family: str) -> None:
    for name, op in OPS.items():
        samples = [s for s in op.samples if s.inputs][:4]
        if name[0] != family or name in WITHOUT_SAMPLES:
            continue
        for k, s in enumerate(samples):
            some = np.random.default_rng(zlib.crc32(f"{name}{k}".encode())).integers(0, 2, len(s.inputs)).astype(bool)
            for which in {(True,) * len(s.inputs), tuple(map(bool, some))}:
                if name in REFUSED and any(which):
                    with pytest.raises(UnsupportedError, match=name):
                        of_op(op, s, which, k)
                elif any(which):
                    of_op(op, s, which, k)


@pytest.mark.slow
def test_expressions_with_one_more_axis_run_natively() -> None:
    """What goes by its tensor expression, which the interpreter above does not look at: the kernel check compares it
    with the rows' reference.
    """
    x, w = RNG.standard_normal((3, 2, 4, 6, 6), np.float32), RNG.standard_normal((3, 5, 4, 3, 3), np.float32)
    for name, arrays, attrs in (
        ("conv", (x, w), {}),
        ("one_hot", (N, np.stack([np.zeros(5), N]).T.copy()), {"depth": 5}),
    ):
        given = [placeholder(TensorType(dnnc.ir.dtype.from_numpy(a.dtype), a.shape)) for a in arrays]
        made = Batcher(len(arrays[0])).node(
            OPS[name], [Operand(p, True) for p in given], complete(OPS[name], attrs), ()
        )
        g = Region("many", given, ["x", "y"]).finish([m.given for m in made])
        assert [n.op.name for n in g.nodes()] == [f"each_11_{name}"]
        np.testing.assert_allclose(dnnc.compile(g, threads=1)(*arrays), run(g, arrays)[0], rtol=1e-4, atol=1e-4)


# --- functions --------------------------------------------------------------------------------------------------------


def rows_of(fn: Callable[..., Any], args: tuple[Any, ...], axes: tuple[int | None, ...]) -> list[np.ndarray[Any, Any]]:
    """A loop in Python."""
    n = next(a.shape[k] for a, k in zip(args, axes) if k is not None)
    made = [fn(*(xp.asarray(a if k is None else np.take(a, j, k)) for a, k in zip(args, axes))) for j in range(n)]
    many = [m if isinstance(m, tuple) else (m,) for m in made]
    return [np.stack([np.asarray(y) for y in ys]) for ys in zip(*many)]


def check(fn: Callable[..., Any], args: tuple[Any, ...], axes: tuple[int | None, ...]) -> None:
    graph = trace(vmap(fn, axes), *args)
    assert all(n.op.name != "loop" for n in graph.nodes())
    given = [a.view(np.float64).reshape(*a.shape, 2) if a.dtype.kind == "c" else a for a in args]
    for y, want in zip(run(graph, given), rows_of(fn, args, axes)):
        y = y.view(np.complex128)[..., 0] if want.dtype.kind == "c" else y
        assert y.dtype == want.dtype
        np.testing.assert_allclose(y, want, rtol=1e-9, atol=1e-9)


C = X[:, :3] + 1j * X[:, 1:]
S = RNG.standard_normal((5, 3, 3))


@pytest.mark.family("cases")
@pytest.mark.parametrize(
    ("fn", "args", "axes"),
    [
        (lambda x, w: xp.tanh(x @ w) + xp.mean(x), (X, W), (0, None)),
        (lambda w, x: w.T @ x, (W, X), (None, 0)),
        (lambda x, y: x @ y, (S[:3], S[1:4]), (2, 0)),
        (lambda x, y: x[0] @ y, (S[:3], S[1:4]), (0, 1)),
        (lambda x, y: (x - y[:, None]) * x.shape[0], (S, X[:, :3]), (1, 1)),
        (lambda x, k: (x[k], xp.take(xp.asarray(W), xp.stack([k, k - 1]), axis=0), x[xp.stack([k, k])]), (X, N % 4),
        (0, 0)),
        (lambda s, k: (s[k % 3], s[:, k % 3], s[k % 3, 1]), (S, N), (0, 0)),
        (lambda x: (xp.sort(x), xp.argsort(x, descending=True), xp.argmax(x), xp.cumulative_sum(x)), (X,), (1,)),
        (lambda s: (xp.linalg.det(s), xp.linalg.inv(s), xp.linalg.trace(s), xp.triu(s), s.T, xp.linalg.matrix_norm(s)),
        (S,), (0,)),
        (lambda s, x: xp.linalg.solve(s, x), (S, X[:, :3]), (0, 0)),
        (lambda x: (xp.fft.fft(x), xp.fft.irfft(xp.fft.rfft(x)), xp.fft.fftshift(x)), (X,), (0,)),
        (lambda z: (xp.exp(z) * z, xp.abs(z), xp.sum(z)), (C,), (1,)),
        (lambda x: (xp.concat([x, xp.zeros(2), x[::-1]]), xp.tile(x, (2, 2)), xp.roll(x, 1), xp.stack([x, x], axis=-1)),
        (X,), (0,)),
        (lambda x: (xp.var(x, correction=1), xp.max(x), xp.prod(x), xp.any(x > 1), xp.clip(x, 0, 1)), (X,), (-1,)),
        (lambda s: (xp.reshape(s, (9,)), xp.moveaxis(s, 0, 1), xp.expand_dims(s, axis=1),
        xp.broadcast_to(s, (2, 3, 3))), (S[:3],), (1,)),
        (lambda x, y: (xp.searchsorted(xp.sort(x), y), xp.isin(x, y), xp.where(x > y[0], x, y)), (X, X * 2), (0, 0)),
    ],
)  # fmt: skip
def test_functions_against_a_loop(fn: Any, args: Any, axes: Any) -> None:
    check(fn, args, axes)


@pytest.mark.family("random")
@pytest.mark.parametrize("seed", range(6))
def test_random_shapes_and_axes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rank, rows = int(rng.integers(1, 4)), int(rng.integers(1, 5))
    shape = [int(d) for d in rng.integers(1, 5, rank)]
    some = [d if rng.random() < 0.6 else 1 for d in shape[rng.integers(0, rank) :]]  # broadcasts against the first
    along, order = int(rng.integers(0, rank)), rng.permutation(rank).tolist()

    def f(x: Any, y: Any) -> Any:
        z = xp.permute_dims(xp.cumulative_sum(x * y - x, axis=along), order)
        tail = xp.reshape(z, (-1,))[:: -1 if rank % 2 else 1]
        return (
            z,
            xp.max(z, axis=along),
            xp.mean(tail) * y,
            xp.flip(x, axis=-1),
            xp.sort(z, axis=along, descending=True),
            tail[: z.size // 2 + 1],
        )

    axes = int(rng.integers(-rank - 1, rank + 1)), None if rng.random() < 0.3 else int(rng.integers(0, len(some) + 1))
    sizes = [
        s if a is None else [*s[: a % (len(s) + 1)], rows, *s[a % (len(s) + 1) :]] for s, a in zip((shape, some), axes)
    ]
    check(f, tuple(rng.standard_normal(s) for s in sizes), axes)


def test_writing() -> None:
    def f(x: Any, k: Any, v: Any) -> Any:
        x[k] = v
        x[1:3] += 1.0
        x[x > 1.5] = 0.0
        return x

    check(f, (X, N % 4, X[:, 0].copy()), (0, 0, 0))


def test_runs_by_itself_and_compiled() -> None:
    def f(x: Any, w: Any) -> Any:
        return xp.exp(x) @ w

    for g in (
        vmap(f, (1, None), 1),
        dnnc.jit(vmap(f, (1, None), 1), threads=1),
        vmap(dnnc.jit(f, threads=1), (1, None), 1),
    ):
        np.testing.assert_allclose(np.asarray(g(X.T.copy(), W)), (np.exp(X) @ W).T, rtol=1e-12)


def test_one_product_for_all_rows() -> None:
    g = trace(vmap(lambda x, w: x @ w, (0, None)), Spec((64, 4)), Spec((4, 3)))
    (node,) = (n for n in g.nodes() if n.op.name == "matmul")
    assert [str(v.type) for v in node.inputs if v is not None] == ["f32[64, 4]", "f32[4, 3]"]
    g = trace(vmap(lambda w, x: w @ x, (None, 0)), Spec((3, 4)), Spec((64, 4)))
    (node,) = (n for n in g.nodes() if n.op.name == "matmul")
    assert str(node.output.type) == "f32[64, 3]"


def test_nests_and_trees() -> None:
    class Pair(NamedTuple):
        a: Any
        b: Any

    def f(p: Any, t: Any, scale: float) -> Any:
        return {"y": p.a * t["w"] + p.b * scale, "n": p.a.shape[0], "b": p.b}

    made = vmap(f, in_axes=(Pair(1, None), {"w": 0}, None), out_axes={"y": -1, "n": 0, "b": None})(
        Pair(X, X[:, 0]), {"w": X[0]}, 2.0
    )
    np.testing.assert_allclose(np.asarray(made["y"]), X * X[0] + 2 * X[:, :1])
    assert made["n"].tolist() == [5] * 4 and made["b"].shape == (5,)
    pairs = vmap(vmap(lambda a, b: xp.sum((a - b) ** 2), (None, 0)), (0, None))(X, X)
    np.testing.assert_allclose(np.asarray(pairs), ((X[:, None] - X[None]) ** 2).sum(-1))
    many = vmap(lambda x, *, y: x + y)(X, y=X[:, 0])
    np.testing.assert_allclose(np.asarray(many), X + X[:, :1])


def test_kernels_of_ones_own() -> None:
    kernel = dnnc.elementwise_kernel("T x, T y", "T z", "z = x > y ? x * y : x - y")
    norm = dnnc.reduction_kernel("T x", "T y", "x * x", "a + b", "y = sqrt(a)", "0")
    check(lambda x, y: (kernel(x, y), norm(x)), (X, X[::-1].copy()), (0, 0))


def test_no_rows() -> None:
    assert vmap(lambda x: xp.sum(xp.sort(x)))(np.zeros((0, 4))).shape == (0,)


# --- control flow -----------------------------------------------------------------------------------------------------


def both(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """The results natively, and of the trace by the interpreter."""
    made = vmap(fn)(*args)
    g = trace(vmap(fn), *args)
    given = [a.view(np.float64).reshape(*a.shape, 2) if a.dtype.kind == "c" else a for a in args]
    return [[np.asarray(y) for y in (made if isinstance(made, tuple) else (made,))], run(g, given)]


@pytest.mark.slow
def test_loops_end_for_each_row_by_itself() -> None:
    def f(c: Any) -> Any:
        step = lambda s: {"z": s["z"] * s["z"] + c, "k": s["k"] + 1}  # noqa: E731
        return dnnc.while_loop(lambda s: (s["k"] < 30) & (xp.abs(s["z"]) <= 2), step, {"z": c * 0, "k": 0})["k"]

    def one(c: complex) -> int:
        z, k = 0j, 0
        while k < 30 and abs(z) <= 2:
            z, k = z * z + c, k + 1
        return k

    c = RNG.standard_normal((4, 3)) + 1j * RNG.standard_normal((4, 3))
    want = np.vectorize(one)(c)
    assert len(np.unique(want)) > 2
    for (got,) in both(vmap(f), c):
        np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_rows_that_are_done_do_nothing_wrong() -> None:
    """The last index of a row that is done, and that of a row that never ran, lie outside."""

    def f(x: Any, n: Any) -> Any:
        return dnnc.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] + x[s[0]]), (0, 0.0))[1]

    n = np.array([0, 4, 2, 3, 1])
    for (got,) in both(f, X, n):
        np.testing.assert_allclose(got, [x[:k].sum() for x, k in zip(X, n)])


def test_a_loop_of_which_rows_decide_nothing_has_one_end() -> None:
    def f(x: Any) -> Any:
        return dnnc.while_loop(lambda s: s[1] < 3, lambda s: (s[0] * x, s[1] + 1), (x, 0))

    for y, k in both(f, X):
        np.testing.assert_allclose(y, X**4)
        np.testing.assert_array_equal(k, [3] * 5)
    (loop,) = (n for n in trace(vmap(f), Spec((5, 4))).nodes() if n.op.name == "loop")
    assert [str(v.type) for v in loop.outputs] == ["f32[5, 4]", "i64"]


def test_branches() -> None:
    def f(x: Any, n: Any) -> Any:
        y = dnnc.cond(xp.sum(x) > 0, lambda v: (xp.exp(v), 1), lambda v: (v - N[0], 2), x)
        return (*y, dnnc.cond(n < 4, lambda: x[n], lambda: xp.max(x)))  # x[4] lies outside: this one runs row by row

    up = X.sum(1) > 0
    assert up.any() and not up.all()
    for y, k, z in both(f, X, N):
        np.testing.assert_allclose(y, np.where(up[:, None], np.exp(X), X - N[0]))
        np.testing.assert_array_equal(k, np.where(up, 1, 2))
        np.testing.assert_allclose(z, [x[n] if n < 4 else x.max() for x, n in zip(X, N)])


def test_a_branch_of_which_rows_decide_nothing_stays_one() -> None:
    def f(x: Any, w: Any) -> Any:
        return dnnc.cond(w[0, 0] > 0, lambda: x[0] * w, lambda: w)

    g = trace(vmap(f, (0, None)), Spec((5, 4)), Spec((4, 3)))
    (node,) = (n for n in g.nodes() if n.op.name == "cond")
    assert str(node.output.type) == "f32[5, 4, 3]"
    x, w = X.astype(np.float32), W.astype(np.float32)
    for sign in (1, -1):
        u = sign * np.abs(w)
        np.testing.assert_allclose(run(g, [x, u])[0], x[:, :1, None] * u if sign > 0 else np.stack([u] * 5), rtol=1e-6)


def test_scans() -> None:
    def f(x: Any, s: Any) -> Any:
        return dnnc.scan(lambda s, v: (s + v, s * v), s, x)

    back = lambda x: dnnc.scan(lambda s, v: (s + v, s), 0.0, x, reverse=True)[1]  # noqa: E731
    for total, rows in both(f, X, X[:, 0].copy()):
        before = np.cumsum(X, 1) - X + X[:, :1]
        np.testing.assert_allclose(total, X.sum(1) + X[:, 0])
        np.testing.assert_allclose(rows, before * X)
    for (rows,) in both(back, X):
        np.testing.assert_allclose(rows, np.cumsum(X[:, ::-1], 1)[:, ::-1] - X, atol=1e-12)


@pytest.mark.slow
def test_control_flow_within_control_flow() -> None:
    def f(x: Any, n: Any) -> Any:
        def body(s: Any) -> Any:
            inner = dnnc.while_loop(lambda t: t < s[1], lambda t: t * 2 + 1, s[0])
            return dnnc.cond(inner > 5, lambda: inner - s[0], lambda: inner + s[0]), s[1] + 1

        return dnnc.while_loop(lambda s: s[1] < n, body, (xp.astype(x, xp.int64), 0))[0]

    def one(x: int, n: int) -> int:
        k = 0
        while k < n:
            t = x
            while t < k:
                t = t * 2 + 1
            x, k = (t - x if t > 5 else t + x), k + 1
        return x

    x, n = np.array([1.0, 0.0, 3.0, 2.0]), np.array([6, 3, 0, 5])
    want = [one(int(a), int(b)) for a, b in zip(x, n)]
    for (got,) in both(f, x, n):
        np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_on_a_device() -> None:
    def f(x: Any, n: Any, w: Any) -> Any:
        total = dnnc.while_loop(
            lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] + x[s[0]]), (0, xp.zeros((), dtype=x.dtype))
        )[1]
        return xp.tanh(x @ w), total

    x, n, w = X.astype(np.float32), np.array([0, 4, 2, 3, 1]), W.astype(np.float32)
    g = trace(vmap(f, (0, 0, None)), x, n, w)
    names = [v.name for v in g.inputs], [v.name for v in g.outputs]
    y, total = compile_interpreted(g, names)(x, n, w)
    np.testing.assert_allclose(y, np.tanh(x @ w), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(total, [v[:k].sum() for v, k in zip(x, n)], rtol=1e-5, atol=1e-6)


# --- errors -----------------------------------------------------------------------------------------------------------


def looks(x: Any) -> Any:
    return x if xp.sum(x) > 0 else -x


def misfits(x: Any) -> Any:
    return x + xp.zeros(7)


def test_errors_name_the_line() -> None:
    first = inspect.getsourcelines(looks)[1]
    with pytest.raises(InputError, match=f"{__file__}:{first + 1}: bool\\(\\) needs"):
        vmap(looks)(X)
    first = inspect.getsourcelines(misfits)[1]
    with pytest.raises(ShapeError, match=f"{__file__}:{first + 1}: add"):
        vmap(misfits)(X)


@pytest.mark.family("shapes")
@pytest.mark.parametrize(
    ("args", "axes", "message"),
    [
        ((X, W), 0, "sizes along the mapped axes differ: argument 0: 5, argument 1: 4"),
        ((X, W), (0, 2), "axis 2 of argument 1, which has 2 axes"),
        ((X, W), (None, None), "no argument has an axis"),
        ((X, W), (0,), "has 1 axis for 2 positional arguments"),
        ((X, {"w": W}), (0, {"v": 0}), "in_axes.1 has axes for v, there are w"),
        ((X, W), (0, "rows"), "expected an axis or None"),
    ],
)
def test_axes_that_do_not_fit(args: Any, axes: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        vmap(lambda *a: a[0], axes)(*args)


def test_results_that_do_not_fit() -> None:
    with pytest.raises(InputError, match="out_axes=None"):
        vmap(lambda x: x, out_axes=None)(X)
    with pytest.raises(InputError, match="axis 2 of a result with 2 axes"):
        vmap(lambda x: x, out_axes=2)(X)


def hosted(x: Any) -> Any:
    return xp.unique_values(x)


def test_what_the_host_computes_needs_contents() -> None:
    with pytest.raises(InputError, match=r"unique_values\(\) needs the contents"):
        vmap(hosted)(X)
