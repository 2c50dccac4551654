"""Broadcasting over symbolic dims, binding dims to sizes, and specialising graphs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dnnc.ir.dtype import f32
from dnnc.ir.errors import InputError, ShapeError
from dnnc.ir.expr import dim, var
from dnnc.ir.graph import Graph
from dnnc.ir.graph.text import parse
from dnnc.ir.graph.verify import verify
from dnnc.ir.op import OpDef
from dnnc.ir.shapes import bind_dims, broadcast_shapes, normalize_axes, normalize_axis, specialise
from dnnc.ir.types import tensor

Ops = dict[str, OpDef]
N, M = dim("N"), dim("M")

shapes = st.lists(st.sampled_from([0, 1, 2, 3]), max_size=4).map(tuple)


@pytest.mark.slow
@given(st.lists(shapes, min_size=1, max_size=3))
def test_broadcast_as_numpy(given_shapes: list[tuple[int, ...]]) -> None:
    try:
        want = np.broadcast_shapes(*given_shapes)
    except ValueError:
        with pytest.raises(ShapeError, match="do not broadcast"):
            broadcast_shapes(*given_shapes)
        return
    assert broadcast_shapes(*given_shapes) == want


def test_broadcast_of_symbolic_dims() -> None:
    assert broadcast_shapes((N, 1), (1, M), (N, M)) == (N, M)
    assert broadcast_shapes((2 * N + 1,), (1 + N + N,)) == (2 * N + 1,)
    assert broadcast_shapes() == () and broadcast_shapes((), (N,)) == (N,)
    with pytest.raises(
        ShapeError, match=r"shapes \[N, 3\] and \[M, 3\] do not broadcast: N against M; they are not known to be equal"
    ):
        broadcast_shapes((N, 3), (M, 3))
    with pytest.raises(ShapeError, match=r"8 against N"):
        broadcast_shapes((8,), (N,))
    with pytest.raises(ShapeError, match=r"2 against 3$"):
        broadcast_shapes((2,), (3,))


def test_axes() -> None:
    assert [normalize_axis(a, 3) for a in (-3, -1, 0, 2)] == [0, 2, 0, 2]
    assert normalize_axes((-1, 0), 3) == (2, 0)
    for axis, rank in ((3, 3), (-4, 3), (0, 0)):
        with pytest.raises(ShapeError, match=f"axis {axis}"):
            normalize_axis(axis, rank)
    with pytest.raises(ShapeError, match="twice"):
        normalize_axes((1, -1), 2)


# --- binding ----------------------------------------------------------------------------------------------------------


def _graph(*shapes: tuple[object, ...]) -> Graph:
    g = Graph("f")
    for k, s in enumerate(shapes):
        g.add_input(f"x{k}", tensor(f32, *s))  # type: ignore[arg-type]
    return g


def test_bind_dims() -> None:
    assert bind_dims(_graph((N, 3), (M, N)), [(5, 3), (2, 5)]) == {N: 5, M: 2}
    assert bind_dims(_graph((2 * N + 1,), (N + M, M)), [(7,), (5, 2)]) == {N: 3, M: 2}
    assert bind_dims(_graph((4 * N,)), [(8,)]) == {N: 2}
    assert bind_dims(_graph((N,)), [(4,)], {M: 3, N: 4}) == {N: 4, M: 3}


LIMITED = dim("B", 1, 64, 8)
INNER = var("L", lo=0, hi=4 * N)


@pytest.mark.parametrize(
    "given_shapes, sizes, message",
    [
        ([(N, 3)], [(5, 4)], r"x0: axis 1 of f32\[N, 3\] must be 3, got 4 in shape \[5, 4\]"),
        ([(N,), (N,)], [(5,), (6,)], r"x1: axis 0 of f32\[N\] must be 5 = N with N=5, got 6"),
        ([(N,), (2 * N + 1,)], [(5,), (6,)], r"x1: axis 0 of f32\[2\*N \+ 1\] must be 11 = 2\*N \+ 1 with N=5, got 6"),
        ([(4 * N,)], [(6,)], r"x0: the size 6 of 4\*N does not tell N"),
        ([(N + M,)], [(6,)], r"does not tell M, N"),
        ([(N, 3)], [(5,)], r"input x0: expected f32\[N, 3\] \(rank 2\), got an array of shape \[5\]"),
        ([(N,)], [], "graph f has 1 input"),
        ([(LIMITED,)], [(12,)], r"dim B of f32\[B\] must be at least 1, at most 64, divisible by 8; got 12"),
        ([(LIMITED,)], [(72,)], r"at most 64"),
        ([(N,)], [(0,)], r"dim N of f32\[N\] must be at least 1; got 0"),
        ([(2 * LIMITED,)], [(8,)], r"divisible by 8; got 4"),
        ([(N,), (INNER,)], [(2,), (9,)], r"dim L of f32\[L\] must be at least 0, at most 8; got 9"),
    ],
)
def test_shapes_that_do_not_fit(
    given_shapes: list[tuple[object, ...]], sizes: list[tuple[int, ...]], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        bind_dims(_graph(*given_shapes), sizes)


# --- specialising -----------------------------------------------------------------------------------------------------

TEXT = """\
N: dim[1, 64, 8]
K: dim[0, 2*N]
def f(x: f32[N, M], *, c: f32[9] = const("sha256:KEY")):
    def body(h: f32[N, M]):
        e: f32[N, M] = exp(h)
        return e
    y: f32[N, M] = repeat(x, body=body, times=2)
    z: f32[N, M] = note(y, dims=(N, K, 2*N))
    (a, b) = topk(z, k=2*N) @ (f32[N, 2*N], i64[N, 2*N])
    return z, c, a
"""


def test_specialise(ops: Ops) -> None:
    big = np.arange(9, dtype=np.float32)
    g = parse(TEXT.replace(' = const("sha256:KEY")', ""), {"c": big}, ops)
    before = str(g)
    s = specialise(g, {"N": 16})
    verify(s)
    assert str(s).startswith("K: dim[0, 32]\ndef f(x: f32[16, M], *, c:")
    assert "z: f32[16, M] = note(y, dims=(16, K, 32))" in str(s)
    assert "e: f32[16, M] = exp(h)" in str(s) and "(a, b) = topk(z, k=32) @ (f32[16, 32], i64[16, 32])" in str(s)
    assert all(np.shares_memory(a, big) for a in s.constants.values())
    assert str(g) == before
    fixed = specialise(specialise(g, {"N": 16}), {"M": 4, "K": 0})
    verify(fixed)
    assert not fixed.dims and fixed.structural_hash() == specialise(g, {"N": 16, "M": 4, "K": 0}).structural_hash()


def test_specialise_refuses(ops: Ops) -> None:
    g = parse(TEXT.replace(' = const("sha256:KEY")', " = [0, 1, 2, 3, 4, 5, 6, 7, 8]"), ops=ops)
    with pytest.raises(InputError, match="graph f has no symbolic dim 'Q'; it has N, K, M"):
        specialise(g, {"Q": 1})
    with pytest.raises(
        InputError, match=r"dim N of f32\[N, M\] must be at least 1, at most 64, divisible by 8; got 12"
    ):
        specialise(g, {"N": 12})
    with pytest.raises(InputError, match="at most 16; got 17"):
        specialise(g, {"N": 8, "K": 17})
