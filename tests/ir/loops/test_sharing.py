"""Names for what a statement computes several times: where they stand; they change nothing; text is short."""

from __future__ import annotations

import numpy as np

from dnnc.ir.expr import Expr
from dnnc.ir.loops.sharing import LIMIT, tree_size, with_names
from dnnc.ir.loops.stmt import Builder, Func, Kernel, Let, walk_stmts
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel


def squares(times: int) -> Kernel:
    """y = f(f(...f(x))), f(v) = v * v + v: the tree doubles twice at each step."""
    source = parse_kernel("def f(x: f32[8], y: f32[8]):\n    for i in range(8):\n        y[i] = x[i]\n")
    x, y = source.entry.buffers
    b = Builder()
    with b.loop("i", 8) as i:
        v: Expr = x[i]
        for _ in range(times):
            v = v * v + v
        b.store(y, (i,), v)
    return Kernel((Func("f", source.entry.params, b.block()),))


def test_short_expressions_keep_their_form() -> None:
    k = squares(3)
    assert with_names(k.entry) is k.entry


def test_long_ones_get_names() -> None:
    k = squares(40)
    named = with_names(k.entry)
    lets = [s for s in walk_stmts(named.body) if isinstance(s, Let)]
    assert 30 < len(lets) < 90 and len({s.var.name for s in lets}) == len(lets)
    assert tree_size(lets[-1].value, {}) < LIMIT


def test_text_is_short_and_reads_back() -> None:
    k = squares(40)
    text = show_kernel(k)
    assert len(text) < 6000
    again = verify_kernel(parse_kernel(text))
    assert show_kernel(again) == text
    assert show_kernel(Kernel((with_names(k.entry),))) == text


def test_names_compute_the_same() -> None:
    x = np.linspace(0.0, 0.01, 8, dtype=np.float32)
    expected = x.copy()
    for _ in range(12):
        expected = expected * expected + expected
    values: dict[str, np.ndarray] = {}
    k = parse_kernel(show_kernel(squares(12)))
    for s in walk_stmts(k.entry.body):
        if isinstance(s, Let):
            values[s.var.name] = _value(s.value, x, values)
        elif hasattr(s, "value"):
            np.testing.assert_allclose(_value(s.value, x, values), expected, rtol=1e-5)
            break
    assert values


def _value(e: Expr, x: np.ndarray, values: dict[str, np.ndarray]) -> np.ndarray:
    from dnnc.ir.expr import Load, Op, Var

    if isinstance(e, Var):
        return values[e.name]
    if isinstance(e, Load):
        return x
    assert isinstance(e, Op)
    a, b = (_value(c, x, values) for c in e.args)
    return a * b if e.name == "*" else a + b
