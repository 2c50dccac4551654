"""Sizes that are names: what they compute and decide, one program for all of them, and what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dnnc
import dnnc.array as xp
from dnnc.array.sizes import Size, common, differ, same
from dnnc.compile_graph import open_dims
from dnnc.frontends.trace import Spec, trace
from dnnc.ir import te
from dnnc.ir.errors import InputError, ShapeError
from dnnc.ir.expr import dim
from dnnc.ir.graph.interp import run
from dnnc.options import CompileOptions
from support.devices import compile_interpreted

RNG = np.random.default_rng(61)
N, M = Size(dim("n")), Size(dim("m"))
W = RNG.standard_normal((3, 4)).astype(np.float32)


# --- sizes by themselves ----------------------------------------------------------------------------------------------


def test_sizes_compute() -> None:
    assert (N + 2) - N == 2 and type((N + 2) - N) is int and 3 * N - N == 2 * N and N * M == M * N
    assert (
        str((2 * N + 6) // 2) == "n + 3"
        and (6 * N) % 3 == 0
        and str(1 - N) == "-n + 1"
        and str(N + np.int64(1)) == "n + 1"
    )
    assert -N + N == 0 and +N is N and {N: 1}[Size(dim("n"))] == 1 and f"{N + 1}" == "n + 1"


def test_sizes_decide_what_holds_for_all() -> None:
    assert (
        N > 0
        and N >= 1
        and N != 0
        and not N < 1
        and not N <= 0
        and N + 1 > N
        and bool(N)
        and N == Size(dim("n"))
        and N + 2 != 1
    )
    assert same(N + 1, 1 + N) and not same(N, 1) and differ(N, 0) and not differ(N, M) and not differ(N, 1)
    assert common([(N, 3), (3,), (1, 1)]) == (N, 3) and common([(N,), (M,)]) is None and common([(N,), (3,)]) is None


@pytest.mark.family("shapes")
@pytest.mark.parametrize(
    "ask",
    [
        lambda: N == 1, lambda: N != M, lambda: N > 1, lambda: N < M, lambda: bool(N - 1), lambda: N % 2 == 0,
        lambda: int(N), lambda: float(N),
        lambda: list(range(N)), lambda: [1, 2][N], lambda: max(N, 3), lambda: 7 // (N - 1), lambda: N / 2,
        lambda: 3.0 / N,  # type: ignore[arg-type, index]
    ],
)  # fmt: skip
def test_what_depends_on_the_size_is_an_error(ask: Callable[[], Any]) -> None:
    with pytest.raises(InputError, match=r"is not known|is no size|must be positive"):
        ask()


# --- one program ------------------------------------------------------------------------------------------------------


def many(x: Any, w: Any) -> Any:
    n = x.shape[0]
    h = x @ w
    y = xp.reshape(xp.concat([h, h * n], axis=0), (2 * n * 4,))
    return {
        "sum": xp.sum(h, axis=0) / n,
        "range": y + xp.arange(n * 8),
        "zeros": xp.zeros((n, 2), dtype=h.dtype) + h[:, :2],
        "ends": (h[:-1], h[2:], h[::-1], h[-1], h[0], h[::2]),
        "mean": xp.mean(h, axis=0),
        "max": (xp.max(h), xp.argmax(h, axis=0), xp.var(h, axis=0)),
        "open": xp.reshape(h, (-1, 2)),
        "index": xp.take(h, xp.asarray([0, -1]), axis=0),
        "outer": xp.expand_dims(h[:, 0], axis=1) * h[:, 1] + xp.eye(n, dtype=h.dtype),
        "tile": xp.stack([h, xp.broadcast_to(h[0], h.shape)], axis=1),
    }


def expected(x: Any) -> Any:
    n, h = len(x), x @ W
    return [
        h.sum(0) / n, np.concatenate([h, h * n]).reshape(-1) + np.arange(8 * n), h[:, :2], h[:-1], h[2:], h[::-1],
        h[-1], h[0], h[::2], h.mean(0),
        h.max(), h.argmax(0), h.var(0), h.reshape(-1, 2), h[[0, -1]], h[:, :1] * h[:, 1] + np.eye(n),
        np.stack([h, np.broadcast_to(h[0], h.shape)], 1),
    ]  # fmt: skip


@pytest.mark.slow
def test_a_program_for_all_sizes() -> None:
    f = dnnc.compile(many, inputs=[Spec(("n", 3)), Spec((3, 4))], threads=1)
    assert [s.shape for s in f.inputs] == [("n", 3), (3, 4)]
    for n in (5, 9, 4, 70):
        x = RNG.standard_normal((n, 3)).astype(np.float32)
        for got, want in zip(f(x, W), expected(x)):
            assert got.shape == want.shape
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert len(f.programs) == 1
    with pytest.raises(InputError, match=r"dim n of f32\[n, 3\] must be at least 1.*got 0"):
        f(np.zeros((0, 3), np.float32), W)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_same_by_the_interpreter(n: int) -> None:
    g = trace(many, Spec(("n", 3)), Spec((3, 4)))
    x = RNG.standard_normal((n, 3)).astype(np.float32)
    for got, want in zip(run(g, [x, W]), expected(x)):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_on_a_device() -> None:
    g = trace(
        lambda x: (x / x.shape[0] + xp.arange(x.shape[0], dtype=x.dtype)[:, None], xp.sum(x[1:] - x[:-1], axis=0)),
        Spec(("n", 4)),
    )
    names = [v.name for v in g.inputs], [v.name for v in g.outputs]
    f = compile_interpreted(g, names, open_dims(CompileOptions(target="cuda"), g))
    for n in (5, 2):
        x = RNG.standard_normal((n, 4)).astype(np.float32)
        for got, want in zip(f(x), (x / n + np.arange(n)[:, None], x[-1] - x[0])):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_sizes_that_follow_from_others() -> None:
    f = dnnc.compile(lambda x, y: xp.concat([x, x, x[:1]]) * y, inputs=[Spec(("n",)), Spec(("2*n + 1",))], threads=1)
    x = np.arange(3, dtype=np.float32)
    np.testing.assert_array_equal(f(x, np.ones(7, np.float32)), [0, 1, 2, 0, 1, 2, 0])
    with pytest.raises(InputError, match=r"axis 0 of f32\[2\*n \+ 1\] must be 7 = 2\*n \+ 1 with n=3, got 6"):
        f(x, np.ones(6, np.float32))
    fixed = dnnc.compile(lambda x: xp.sum(x) / x.shape[0], inputs=[Spec(("n",))], dims={"n": 3}, threads=1)
    assert fixed(x) == 1 and fixed.inputs[0].shape == (3,)


@pytest.mark.slow
def test_jit_with_names() -> None:
    @dnnc.jit(dynamic={"x": {0: "n"}, "p.w": {0: "n", -1: "k"}}, threads=1)
    def f(x: Any, p: dict[str, Any]) -> Any:
        return (
            xp.exp(x - xp.max(x, axis=0)).T @ p["w"],
            xp.sort(x[:, 0]),
            x * x.shape[0],
            xp.var(x, axis=0, correction=1),
        )

    for n, k in ((3, 2), (7, 5), (20, 2)):
        x, w = RNG.standard_normal((n, 3)), RNG.standard_normal((n, k))
        for got, want in zip(f(x, {"w": w}), (np.exp(x - x.max(0)).T @ w, np.sort(x[:, 0]), x * n, x.var(0, ddof=1))):
            np.testing.assert_allclose(np.asarray(got), want, rtol=1e-9, atol=1e-9)
    assert f.traces == 1
    with pytest.raises(InputError, match=r"n is 3, but axis 0 of p\.w is 4"):
        f(np.ones((3, 3)), {"w": np.ones((4, 2))})
    with pytest.raises(InputError, match=r"called without an array p\.w; there are x, p\.v"):
        f(np.ones((3, 3)), {"v": np.ones((3, 2))})
    with pytest.raises(InputError, match="no axis 2"):
        dnnc.jit(lambda x: x, dynamic={"x": {2: "n"}})(np.ones(3))
    with pytest.raises(InputError, match="has no argument y"):
        dnnc.jit(lambda x: x, dynamic={"y": {0: "n"}})


@pytest.mark.slow
def test_no_elements_are_a_program_of_their_own() -> None:
    f = dnnc.jit(lambda x: xp.sum(x) + x.shape[0], dynamic={"x": {0: "n"}}, threads=1)
    assert [float(f(np.ones(n))) for n in (0, 2, 3)] == [0, 4, 6] and f.traces == 2


@pytest.mark.slow
def test_control_flow_vmap_complex_numbers_and_ops_of_ones_own() -> None:
    double = dnnc.custom_op("shift", lambda x: te.compute(x.dims, x.dtype, lambda i: x[x.dims[0] - 1 - i] * 2))

    @dnnc.jit(dynamic={"x": {0: "b", 1: "n"}, "z": {0: "n"}}, threads=1)
    def f(x: Any, z: Any) -> Any:
        last = dnnc.scan(lambda s, v: (s + v, s), xp.zeros(x.shape[1]), x)[1]
        grown = dnnc.while_loop(lambda s: s[1] < 3, lambda s: (s[0] + x.shape[1], s[1] + 1), (x, 0))[0]
        return (
            last,
            grown,
            dnnc.vmap(double)(x),
            z * z.shape[0] + xp.sum(z),
            dnnc.cond(z.shape[0] > xp.sum(x), lambda: x + 1, lambda: x),
        )

    for b, n in ((3, 4), (2, 6)):
        x, z = RNG.standard_normal((b, n)), RNG.standard_normal(n) + 1j * RNG.standard_normal(n)
        want = np.cumsum(x, 0) - x, x + 3 * n, 2 * x[:, ::-1], z * n + z.sum(), x + 1 if n > x.sum() else x
        for got, w in zip(f(x, z), want):
            np.testing.assert_allclose(np.asarray(got), w, rtol=1e-9, atol=1e-9)
    assert f.traces == 1


# --- what is refused --------------------------------------------------------------------------------------------------


def branches(x: Any) -> Any:
    return x if x.shape[0] > 3 else -x


def loops(x: Any) -> Any:
    return [x for _ in range(x.shape[0])]


def unites(x: Any, y: Any) -> Any:
    return x + y


def multiplies(x: Any, y: Any) -> Any:
    return x.T @ y


def indexes(x: Any) -> Any:
    return x[5]


def reshapes(x: Any) -> Any:
    return xp.reshape(x, (7, -1))


def eliminates(x: Any) -> Any:
    return xp.linalg.det(x @ x.T)


@pytest.mark.family("shapes")
@pytest.mark.parametrize(
    ("fn", "error", "message"),
    [
        (branches, InputError, "n > 3 is not known"),
        (loops, InputError, "the number n is not known"),
        (unites, ShapeError, r"n against m; they are not known to be equal"),
        (multiplies, InputError, r"\(3, n\) and \(m, 3\) do not fit"),
        (indexes, InputError, "n > 5 is not known"),
        (reshapes, ShapeError, r"3\*n elements against"),
        (eliminates, ShapeError, "square matrices of known size"),
    ],
)
def test_errors_name_the_size_and_the_line(fn: Any, error: type[Exception], message: str) -> None:
    line = inspect.getsourcelines(fn)[1] + 1
    with pytest.raises(error, match=f"^{__file__}:{line}: .*{message}"):
        trace(fn, *[Spec((n, 3)) for n in ("n", "m")][: len(inspect.signature(fn).parameters)])


def test_specs_check_themselves() -> None:
    assert Spec(("n", "n + 0")).shape[0] is Spec(("n", "n + 0")).shape[1] and Spec(("2 + 1",)).shape == (3,)
    for bad in ("", "n +", "n.m", "f32", "f(n)", "n ** 2", "1.5"):
        with pytest.raises(InputError, match="is no size"):
            Spec((bad,))
    with pytest.raises(InputError, match="or names"):
        Spec((1.5,))
    kept: list[Any] = []
    trace(lambda x: kept.append(xp.zeros(x.shape)), Spec(("n",)))
    with pytest.raises(InputError, match="has none yet"):
        np.asarray(kept[0])
