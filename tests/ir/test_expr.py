"""The index simplifier: expressions against brute force, expected normal forms, soundness of proofs."""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dnnc.ir.bounds import bounds, nonneg
from dnnc.ir.dtype import boolean, f32
from dnnc.ir.expr import (
    MAX_KEY,
    Const,
    Expr,
    Op,
    Var,
    const,
    dim,
    fma,
    free,
    maximum,
    minimum,
    op,
    rebuild,
    select,
    sort_key,
    substitute,
    unwrap,
    value,
    var,
)

pytestmark = pytest.mark.family("cases")

# Each variable with its values: k has a symbolic bound, d is divisible by 4, N and M are dims.
A, J, D = var("i", lo=0, hi=5), var("j", lo=-3, hi=4), var("d", lo=0, hi=12, div=4)
N, M = dim("N", 1, 4), dim("M", 2, 3)
K = var("k", lo=0, hi=N - 1)
VARS = (A, J, D, N, M, K)

Meaning = Callable[[dict[Var, int]], int]


@dataclass(frozen=True)
class Pair:
    """An expression as the constructors made it, what it means, and the variables that the meaning reads."""

    expr: Expr
    meaning: Meaning
    used: frozenset[Var]


def _values(v: Var) -> range:
    return {A: range(0, 6), J: range(-3, 5), D: range(0, 13, 4), N: range(1, 5), M: range(2, 4), K: range(0, 4)}[v]


def _points(used: Iterable[Var]) -> list[dict[Var, int]]:
    """All assignments that keep k < N, of the variables used and those in their bounds."""
    vs = sorted({*used} | ({N} if K in used else set()), key=lambda v: v.name)
    points = [dict(zip(vs, p)) for p in itertools.product(*map(_values, vs))]
    return [p for p in points if K not in p or p[K] < p[N]]


def _leaf(v: Var) -> Pair:
    return Pair(v, lambda env: env[v], frozenset({v}))


def _number(n: int) -> Pair:
    return Pair(const(n), lambda env: n, frozenset())


_MEANING: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "//": lambda a, b: a // b, "%": lambda a,
    b: a % b,
    "min": min, "max": max, "<": lambda a, b: int(a < b), "<=": lambda a, b: int(a <= b), "==": lambda a,
    b: int(a == b),
    "!=": lambda a, b: int(a != b),
}  # fmt: skip


def _apply(name: str, a: Pair, b: Pair) -> Pair:
    f = _MEANING[name]
    return Pair(op(name, a.expr, b.expr), lambda env: f(a.meaning(env), b.meaning(env)), a.used | b.used)


def _choose(c: Pair, a: Pair, b: Pair) -> Pair:
    e = select(c.expr, a.expr, b.expr)
    return Pair(e, lambda env: a.meaning(env) if c.meaning(env) else b.meaning(env), a.used | b.used | c.used)


leaves = st.one_of(st.sampled_from(VARS).map(_leaf), st.integers(-9, 9).map(_number))
divisors = st.one_of(
    st.integers(1, 8).map(_number),
    st.sampled_from((N, M)).map(_leaf),
    st.just(_apply("*", _leaf(N), _leaf(M))),
    st.just(_apply("+", _leaf(N), _leaf(M))),
)


def _grow(inner: st.SearchStrategy[Pair]) -> st.SearchStrategy[Pair]:
    compare = st.builds(_apply, st.sampled_from(("<", "<=", "==", "!=")), inner, inner)
    return st.one_of(
        st.builds(_apply, st.sampled_from(("+", "-", "*", "min", "max")), inner, inner),
        st.builds(_apply, st.sampled_from(("//", "%")), inner, divisors),
        st.builds(_choose, compare, inner, inner),
    )


expressions = st.recursive(leaves, _grow, max_leaves=6).filter(lambda p: len(p.used) <= 4)
conditions = st.builds(_apply, st.sampled_from(("<", "<=", "==", "!=")), expressions, expressions).filter(
    lambda p: len(p.used) <= 4
)


def _run(e: Expr, env: dict[Var, int]) -> int:
    """Evaluate without the simplifier's rules: a direct walk over the nodes."""
    if isinstance(e, Const):
        return int(e.value)
    if isinstance(e, Var):
        return env[e]
    if isinstance(e, Op):
        args = [_run(a, env) for a in e.args]
        if e.name == "select":
            return args[1] if args[0] else args[2]
        return _MEANING[e.name](*args)
    if hasattr(e, "factors"):
        r = 1
        for f in e.factors:
            r *= _run(f, env)
        return r
    return e.const + sum(c * _run(t, env) for t, c in e.terms)  # type: ignore[attr-defined]


@pytest.mark.slow
@given(expressions)
@settings(max_examples=150, deadline=None)
def test_simplified_equals_meaning(pair: Pair) -> None:
    for env in _points(pair.used)[:1500]:
        assert _run(pair.expr, env) == pair.meaning(env), (pair.expr, env)


@pytest.mark.slow
@given(conditions)
@settings(max_examples=100, deadline=None)
def test_comparisons_that_fold_are_right(pair: Pair) -> None:
    for env in _points(pair.used)[:1500]:
        assert _run(pair.expr, env) == pair.meaning(env), (pair.expr, env)


@pytest.mark.slow
@given(expressions)
@settings(max_examples=100, deadline=None)
def test_bounds_hold(pair: Pair) -> None:
    lo, hi = bounds(pair.expr)
    for env in _points(pair.used)[:1500]:
        got = _run(pair.expr, env)
        assert (lo is None or lo <= got) and (hi is None or got <= hi), (pair.expr, lo, hi, env)


@pytest.mark.slow
@given(expressions, st.lists(conditions, max_size=2))
@settings(max_examples=150, deadline=None)
def test_nonneg_is_sound(pair: Pair, facts: list[Pair]) -> None:
    """What is proved holds at every point where the facts hold."""
    e = pair.expr
    known = tuple(f.expr for f in facts if isinstance(f.expr, Op))
    if not nonneg(e, known):
        return
    used = frozenset().union(free(e), *map(free, known))
    for env in _points(used)[:3000]:
        if all(_run(f, env) for f in known):
            assert _run(e, env) >= 0, (e, known, env)


def test_quotients_of_a_window_are_shown_to_be_inside() -> None:
    """A block of 16 channels at c + r - 1, where that is known not to be negative."""
    c, r, n = var("c", lo=0, hi=63), var("r", lo=0, hi=2), var("n", lo=1)
    at = c + r - 1
    assert nonneg(at // 16, (const(0) <= at,)) and not nonneg(at // 16)
    assert nonneg((at + 2 * n) // n - 2, (const(0) <= at,)) and not nonneg((at + 2 * n) // n - 3, (const(0) <= at,))
    assert nonneg(at // 16 * 3 + 5, (const(-16) <= at,)) and not nonneg(at // 16 * 3 + 2, (const(-16) <= at,))


def test_rows_of_an_open_width_are_shown_to_be_inside() -> None:
    """Row 14 + r of 16 rows of n vectors, where r is a number and n is a size: they are factors of one product."""
    n = var("n", lo=1, hi=4000)
    r, column = var("r", lo=0, hi=1), var("c", lo=0, hi=n - 1)
    left = 256 * n - (16 * column + 16 * (r * n) + 224 * n + 16)
    assert nonneg(left) and not nonneg(left - 1)
    assert not nonneg(left - 16 * (r * n))


def test_the_group_of_a_masked_lane_is_shown_to_be_inside() -> None:
    """Lane l of block b of 8 channels in groups of 4, r within the group: the lanes past the 8 are masked."""
    lane, b, r = var("l", lo=0, hi=15), var("b", lo=0, hi=0), var("r", lo=0, hi=3)
    assert nonneg(7 - (lane // 4 * 4 + r + 16 * b), (lane < 8 - 16 * b,)) and not nonneg(
        6 - (lane // 4 * 4 + r + 16 * b), (lane < 8 - 16 * b,)
    )


@pytest.mark.slow
@given(expressions, st.sampled_from(VARS), st.integers(-3, 12))
@settings(max_examples=100, deadline=None)
def test_substitute_is_evaluation(pair: Pair, v: Var, n: int) -> None:
    if v is N or v is K or n not in _values(v):
        return  # k's bound mentions N
    e = substitute(pair.expr, {v: const(n)})
    assert v not in free(e)
    for env in _points(pair.used | {v})[:1500]:
        if env[v] == n:
            assert _run(e, env) == pair.meaning(env)


@pytest.mark.slow
@given(expressions)
@settings(max_examples=100, deadline=None)
def test_rebuilding_changes_nothing(pair: Pair) -> None:
    """A normal form is a fixed point: text that is read back gives the very same node."""

    def again(e: Expr) -> Expr:
        return rebuild(e, again)

    assert again(pair.expr) is pair.expr, (pair.expr, again(pair.expr))


@pytest.mark.parametrize(
    "expr, text",
    [
        (A + A, "2*i"),
        (A - A, "0"),
        ((A + 1) * (J - 2), "-2*i + i*j + j - 2"),
        (3 * (A + J) - 3 * J, "3*i"),
        ((8 * A + 4 * J) // 4, "2*i + j"),
        ((8 * A + 3) // 4, "2*i"),
        ((8 * A + 3) % 4, "3"),
        (A % 8, "i"),
        (A // 8, "0"),
        ((D + A) % 4, "i % 4"),
        ((A // 2) // 3, "0"),
        ((J // 2) // 3, "j // 6"),
        ((J % 12) % 4, "j % 4"),
        (4 * (J // 4) + J % 4, "j"),
        (8 * ((J // 4) % 2) + 2 * (J % 4), "2*(j % 8)"),
        ((N * A + K) // N, "i"),
        ((N * A + K) % N, "k"),
        ((N * M) // M, "N"),
        ((768 * N * M) // (64 * N * M), "12"),
        ((100 * N * M) // (64 * N * M), "1"),
        ((100 * N * M) % (64 * N * M), "36*(M*N)"),
        ((768 * N * M + 64 * M) // (64 * N * M), "M // (M*N) + 12"),
        ((12 * N + 12 * M) // (2 * N + 2 * M), "6"),
        (N * (J // N) + J % N, "j"),
        (minimum(A, 7), "i"),
        (maximum(A, J + 12), "j + 12"),
        (minimum(K, N - 1), "k"),
        (K < N, "True"),
        (N <= K, "False"),
        (A < 3, "i < 3"),
        (select(A < 9, J, K), "j"),
        (select(A < 3, J, J), "j"),
        ((-1) // const(4), "-1"),
        (const(7) % 4, "3"),
    ],
)  # fmt: skip
def test_normal_forms(expr: Expr, text: str) -> None:
    assert repr(expr) == text


@pytest.mark.slow
@pytest.mark.parametrize(
    "divisor",
    [lambda b, s, z: 64 * b * s, lambda b, s, z: 6 * b, lambda b, s, z: 4 * b * s + 4 * b, lambda b, s, z: 3 * s + b],
)
def test_divisors_with_coefficients_by_brute_force(divisor: Callable[[Any, Any, Any], Any]) -> None:
    """Sums of multiples of such a divisor's terms, and of others, divided by it, for all sizes."""
    sizes = dim("B", 1, 3), dim("S", 1, 4), dim("Z", 1, 3)
    by, cancelled = divisor(*sizes), 0
    for c in itertools.product((0, 4, 64, 100), (0, 1, -3, 12, 768), (-2, 0, 5)):
        for dividend in (
            lambda b, s, z, c=c: c[0] * b * s * z + c[1] * b * s + c[2],
            lambda b, s, z, c=c: c[1] * divisor(b, s, z) + c[0] * s + c[2],
        ):
            a = dividend(*sizes)
            q, r = a // by, a % by
            cancelled += not isinstance(q, Op)
            for point in itertools.product(range(1, 4), range(1, 5), range(1, 4)):
                env = dict(zip(sizes, map(const, point)))
                want = divmod(dividend(*point), divisor(*point))
                assert (value(substitute(q, env)), value(substitute(r, env))) == want, (a, by, point)
    assert cancelled >= 5  # else the rules under test were never applied


def test_equal_expressions_are_one_object() -> None:
    assert (A + J) * 2 is 2 * J + A * 2
    assert dim("N", 1, 4) is N and dim("N", 1, 5) is not N
    assert const(0.0, f32) is not const(-0.0, f32)
    assert const(True, boolean) is not const(1)
    assert value(A - A + 7) == 7 and unwrap(N - N) == 0 and unwrap(N) is N


def test_floats_are_not_rearranged() -> None:
    x, y = var("x", f32), var("y", f32)
    assert repr((x + y) - y) == "x + y - y"
    assert repr(fma(x, y, 1.0)) == "fma(x, y, 1.0)"


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="only positive divisors"):
        A // 0
    with pytest.raises(TypeError, match="not known at compile time"):
        bool(A < 3)
    with pytest.raises(TypeError, match="pickled as text"):
        pickle.dumps(A)


def test_interning_is_safe_across_threads() -> None:
    made: list[list[Expr]] = [[] for _ in range(4)]

    def work(out: list[Expr]) -> None:
        out.extend((A * n + J * (n + 1)) // (n + 2) for n in range(300))

    threads = [threading.Thread(target=work, args=(out,)) for out in made]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(x is y for other in made[1:] for x, y in zip(made[0], other, strict=True))


# --- the order of terms -----------------------------------------------------------------------------------------------

FED_BACK = """
from dnnc.ir.expr import maximum, sort_key, var
x, y = var("x", lo=0, hi=9), var("y", lo=0, hi=9)
e = x
for k in range(40):  # each step uses the one before it four times
    e = maximum(e // 2 + y * k, e % 7) + maximum(e, y)
print(sort_key(e))
"""


@pytest.mark.slow
def test_sort_keys_are_bounded_and_the_same_in_every_process() -> None:
    keys = {
        subprocess.run(
            [sys.executable, "-c", FED_BACK],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(keys) == 1 and len(keys.pop()) <= MAX_KEY + 1


def test_long_sort_keys_tell_expressions_apart() -> None:
    names = [var(f"a_rather_long_name_of_a_variable_{k}", lo=0, hi=9) for k in range(12)]
    sums = [op("min", sum(names, const(0)), names[k] * names[k + 1]) for k in range(10)]
    keys = [sort_key(e) for e in sums]
    assert len(set(keys)) == len(keys) and max(map(len, keys)) <= MAX_KEY
    assert (sums[3] + sums[7]) is (sums[7] + sums[3])
