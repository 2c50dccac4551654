"""Integer expressions as C++: the text is evaluated with numbers that know their width, and compared with the IR; no
32-bit sum overflows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dnnc.backends.cuda import index
from dnnc.backends.cuda.emit import FuncEmitter, Unit
from dnnc.backends.cuda.target import GpuTarget
from dnnc.ir.dtype import i64
from dnnc.ir.expr import Expr, Var, const, maximum, minimum, select, substitute, value, var
from dnnc.ir.loops.stmt import Func, Kernel


@dataclass(frozen=True)
class C:
    """A C++ integer of a width; `~` stands for the cast to i64."""

    n: int
    bits: int = 32

    def of(self, n: int, o: Any = None) -> C:
        bits = max(self.bits, o.bits if isinstance(o, C) else 32)
        assert -(1 << (bits - 1)) <= n < 1 << (bits - 1), f"{n} overflows {bits} bits"
        return C(n, bits)

    def __invert__(self) -> C:
        return C(self.n, 64)

    def __neg__(self) -> C:
        return self.of(-self.n)

    def __add__(self, o: Any) -> C:
        return self.of(self.n + number(o), o)

    def __radd__(self, o: int) -> C:
        return self.of(o + self.n)

    def __sub__(self, o: Any) -> C:
        return self.of(self.n - number(o), o)

    def __rsub__(self, o: int) -> C:
        return self.of(o - self.n)

    def __mul__(self, o: Any) -> C:
        return self.of(self.n * number(o), o)

    def __rmul__(self, o: int) -> C:
        return self.of(o * self.n)

    def __rshift__(self, o: int) -> C:
        return self.of(self.n >> o)

    def __and__(self, o: Any) -> C:
        return self.of(self.n & number(o), o)

    def __xor__(self, o: Any) -> C:
        return self.of(self.n ^ number(o), o)

    def __lt__(self, o: Any) -> bool:
        return self.n < number(o)


def number(x: Any) -> int:
    return x.n if isinstance(x, C) else int(x)


def both(f: Any) -> Any:
    """A helper of two operands, which must have the width that the prelude's overloads can tell."""
    return lambda a, b: C(f(number(a), number(b)), max(x.bits if isinstance(x, C) else 32 for x in (a, b)))


HELPERS = {
    "udiv": both(lambda a, b: a // b),
    "umod": both(lambda a, b: a % b),
    "floordiv": both(lambda a, b: a // b),
    "floorrem": both(lambda a, b: a % b),
    "min": both(min),
    "max": both(max),
    "wide": lambda n: C(n, 64),
}


def emitter(*params: Var) -> FuncEmitter:
    func = Func("k", params, ())
    em = FuncEmitter(func, Unit(Kernel((func,)), "k", GpuTarget()))
    em.values = {p: p.name for p in params}
    return em


def evaluate(text: str, env: dict[str, C]) -> int:
    text = re.sub(r"(\d+)LL", r"wide(\1)", text.replace("(i64)", "~"))
    text = re.sub(r"(.*) \? (.*) : (.*)", r"(\2) if (\1) else (\3)", text)
    return number(eval(text, {**HELPERS, **env}))


VARS = [var("i", i64, 0, 1000), var("j", i64, -50, 70_000), var("k", i64, 0, 3_000_000_000), var("m", i64, 1, 40)]


def expressions() -> st.SearchStrategy[Expr]:
    leaves = st.one_of(st.sampled_from(VARS), st.integers(-100_000, 100_000).map(const))

    def more(e: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
        divisors = st.sampled_from([const(n) for n in (2, 3, 8, 24, 1000)] + [VARS[3]])
        return st.one_of(
            st.tuples(e, e).map(lambda p: p[0] + p[1]),
            st.tuples(e, e).map(lambda p: p[0] - p[1]),
            st.tuples(e, st.integers(-70_000, 70_000)).map(lambda p: p[0] * p[1]),
            st.tuples(e, st.sampled_from(VARS)).map(lambda p: p[0] * p[1]),
            st.tuples(e, divisors).map(lambda p: p[0] // p[1]),
            st.tuples(e, divisors).map(lambda p: p[0] % p[1]),
            st.tuples(e, e).map(lambda p: minimum(p[0], p[1])),
            st.tuples(e, e).map(lambda p: maximum(p[0], p[1])),
        )

    return st.recursive(leaves, more, max_leaves=6)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(expressions(), st.data())
def test_text_means_the_expression_and_never_overflows(e: Expr, data: st.DataObject) -> None:
    reach = index.reach(e)
    if reach is None or reach >= 1 << 62 or isinstance(e, Var):
        return
    at = {v: data.draw(st.integers(int(v.lo), int(v.hi))) for v in VARS}  # type: ignore[arg-type]
    env = {v.name: C(n, 32 if index.narrow(v) else 64) for v, n in at.items()}
    assert evaluate(emitter(*VARS).text(e), env) == value(substitute(e, {v: const(n) for v, n in at.items()}))


i, j, k, m = VARS
CASES = [
    (4 * i + m - 3, "4*i + m - 3"),
    (7 - i, "7 - i"),
    (j // 8, "j >> 3"),
    (i % 16 * 2, "2*(i & 15)"),
    (i // 7, "udiv(i, 7)"),
    ((i - 5) // 7, "udiv(i + 2, 7) - 1"),
    (k // 7, "udiv(k, 7)"),
    ((i + k) % 3, "umod((i64)i + k, 3)"),
    (k * 4 + i, "(i64)i + 4LL*k"),
    (j * j, "(i64)j*j"),
    (i * m, "i*m"),
    (minimum(i, m), "min(i, m)"),
    (minimum(i, k), "min((i64)i, k)"),
    (select(i < 3, i, m), "i < 3 ? i : m"),
]


@pytest.mark.parametrize("e,text", CASES, ids=[t for _, t in CASES])
def test_spelling(e: Expr, text: str) -> None:
    assert emitter(*VARS).text(e) == text


def test_data_without_bounds_wraps() -> None:
    x, y = var("x"), var("y")
    em = emitter(x, y)
    assert em.text(x * 3 - y) == "(i64)(3ull*(u64)x - (u64)y)"
    assert em.text(x * y) == "(i64)((u64)x*(u64)y)"
    assert em.text(x // 7) == "floordiv(x, 7LL)" and em.text(x % 7) == "floorrem(x, 7LL)"


@pytest.mark.parametrize(
    "e,want",
    [
        (8 * i + 16, 8),
        (8 * i + 12, 4),
        (const(0), 0),
        (6 * i * m, 6),
        (minimum(8 * i, const(12)), 4),
        ((4 * i) % 24, 4),
        (k // 8, 1),
    ],
    ids=repr,
)
def test_divisors(e: Expr, want: int) -> None:
    assert index.divisor(e, {}) == want


def test_a_divisor_is_known_through_a_name() -> None:
    assert index.divisor(i + 8, {i: 4}) == 4
