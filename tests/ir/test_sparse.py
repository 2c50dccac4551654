"""Patterns of sparse matrices, and constants that are stored by them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from dnnc.ir.bundles import Bundles
from dnnc.ir.dtype import f32
from dnnc.ir.encodings import parse_encoding
from dnnc.ir.expr import const, load
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.stmt import Buffer, Builder, Func, Kernel
from dnnc.ir.sparse import Pattern, Sparse
from dnnc.ir.types import Encoding, TensorType

RNG = np.random.default_rng(0)


def pruned(*shape: int, density: float = 0.2) -> Any:
    return np.where(RNG.random(shape) < density, RNG.standard_normal(shape), 0).astype(np.float32)


CASES = [
    ((5, 40), 0, 1, 1, 1), ((40, 5), 1, 1, 1, 1), ((6, 7, 3, 3), 0, 1, 1, 1), ((9, 37), 0, 4, 1, 1),
    ((37, 10), 1, 4, 4, 1), ((8, 33), 0, 8, 8, 1), ((27, 20), 0, 1, 1, 12), ((20, 24), 1, 1, 1, 24),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "axis", "height", "width", "group"), CASES)
def test_every_element_is_found(shape: tuple[int, ...], axis: int, height: int, width: int, group: int) -> None:
    w = pruned(*shape)
    w[(0,) * w.ndim] = 1.5
    check(w, Sparse.of(w, axis, height, width, group))


@pytest.mark.parametrize("rows", ["some", "none", "one"])
@pytest.mark.parametrize(
    ("shape", "axis", "height", "depth"),
    [((5, 40), 0, 4, 16), ((40, 5), 1, 2, 40), ((6, 7, 3, 3), 0, 8, 32), ((37, 10), 1, 16, 8)],
)
def test_every_element_of_bundles_is_found(
    shape: tuple[int, ...], axis: int, height: int, depth: int, rows: str
) -> None:
    w = pruned(*shape)
    if rows != "some":
        w[...] = 0
    if rows == "one":
        np.moveaxis(w, axis, 0)[1] = 1.5
    encoding = Bundles.of(w, axis, height, depth)
    check(w, encoding)
    other = RNG.standard_normal(shape).astype(np.float32)
    np.testing.assert_array_equal(encoding.held(other), np.where(w != 0, other, 0))
    for n in range(0, encoding.count, height):  # neighbours have rows of about the same length
        assert (np.diff(encoding.lengths[encoding.order[n : n + height]].sum(-1)) <= 0).all()


def check(w: Any, encoding: Encoding) -> None:
    """Elements of a constant are found by expressions, the encoding by its text."""
    shape = w.shape
    assert parse_encoding(str(encoding)) == encoding
    t = TensorType(f32, shape, encoding)
    (words,) = encoding.pack(w)
    assert words.shape == t.physical and words.dtype == np.uint32 and t.nbytes == words.nbytes
    flat, flat_shape = Buffer("w", t.buffer.dtype, (const(len(words)),)), tuple(map(const, shape))
    b, out = Builder(), Buffer("y", f32, flat_shape)
    with ExitStack() as loops:
        at = [loops.enter_context(b.loop(f"i{k}", n)) for k, n in enumerate(shape)]
        b.store(out, tuple(at), encoding.load((lambda *i: load(flat, i),), at))
    y = np.full(shape, np.nan, np.float32)
    run_kernel(Kernel((Func("k", (flat, out), b.block()),)), {"w": words, "y": y})
    np.testing.assert_array_equal(y, w)


def test_an_array_is_held_at_the_places_of_the_pattern() -> None:
    w, other = pruned(6, 8), RNG.standard_normal((6, 8)).astype(np.float32)
    np.testing.assert_array_equal(Sparse.of(w, 0).held(other), np.where(w != 0, other, 0))
    np.testing.assert_array_equal(Sparse.of(w, 1).held(other), np.where(w != 0, other, 0))


def test_rows_of_a_pattern() -> None:
    p = Pattern.of(np.array([[0, 2, 0], [0, 0, 0], [np.nan, 0, -1]], np.float32))
    assert p.starts.tolist() == [0, 1, 1, 3] and p.places[1].tolist() == [1, 0, 2] and p.count == 3
    assert Pattern.of(np.zeros((2, 3), np.float32)).count == 0
