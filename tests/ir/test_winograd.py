"""Weights for Winograd's convolution: the transform, its inverse as an expression, the encoding's text."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.backends.runtime.link import pack
from dnnc.ir import winograd
from dnnc.ir.dtype import f32
from dnnc.ir.encodings import Winograd, parse_encoding
from dnnc.ir.expr import Expr, const, load
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.stmt import Buffer, Builder, Func, Kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.ir.types import parse_layout, tensor

RNG = np.random.default_rng(0)
# B^T and A^T of F(2, 3) and F(4, 3), as Lavin and Gray give them
INTO = {
    2: [[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]],
    4: [
        [4, 0, -5, 0, 1, 0],
        [0, -4, -4, 1, 1, 0],
        [0, 4, -4, -1, 1, 0],
        [0, -2, -1, 2, 1, 0],
        [0, 2, -1, -2, 1, 0],
        [0, 4, 0, -5, 0, 1],
    ],
}
BACK = {
    2: [[1, 1, 1, 0], [0, 1, -1, -1]],
    4: [[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]],
}


@pytest.mark.parametrize("tile", winograd.TILES)
def test_products_of_points_are_the_convolution(tile: int) -> None:
    into, back = np.array(INTO[tile], float), np.array(BACK[tile], float)
    d, g = RNG.standard_normal((tile + 2, tile + 2)), RNG.standard_normal((1, 1, 3, 3))
    got = back @ (winograd.weights(g, tile)[0, 0] * (into @ d @ into.T)) @ back.T
    want = [[(d[i : i + 3, j : j + 3] * g[0, 0]).sum() for j in range(tile)] for i in range(tile)]
    assert np.allclose(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("tile", winograd.TILES)
def test_taps_come_back_out_of_points(tile: int) -> None:
    n = winograd.points(tile)
    u, y = (Buffer(name, f32, (const(k), const(k))) for name, k in (("u", n), ("y", 3)))
    b = Builder()
    with b.loop("i", 3) as i, b.loop("j", 3) as j:

        def at(row: Expr, column: Expr) -> Expr:
            return load(u, (row, column))

        b.store(y, (i, j), winograd.tap(at, tile, i, j))
    kernel = verify_kernel(Kernel((Func("taps", (u, y), b.block()),)))
    g, found = RNG.standard_normal((1, 1, 3, 3)), np.zeros((3, 3), np.float32)
    run_kernel(kernel, {"u": np.ascontiguousarray(winograd.weights(g, tile)[0, 0], np.float32), "y": found})
    assert np.allclose(found, g[0, 0], rtol=0, atol=2e-6)


@pytest.mark.parametrize("tile", winograd.TILES)
def test_packed_weights_lie_as_the_encoding_says(tile: int) -> None:
    encoding = parse_encoding(f"winograd{tile} 2 3 0/16 1/16 1%16 0%16")
    assert encoding == Winograd(tile, parse_layout("2 3 0/16 1/16 1%16 0%16"))
    assert parse_encoding(str(encoding)) == encoding
    t, n = tensor(f32, 20, 40, 3, 3, encoding=encoding), tile + 2
    assert t.physical == (n, n, 2, 3, 16, 16) and t.nbytes == n * n * 2 * 3 * 16 * 16 * 4
    w = RNG.standard_normal((20, 40, 3, 3)).astype(np.float32)
    packed, u = pack(w, t), winograd.weights(w, tile)
    assert packed.shape == t.physical and packed.dtype == np.float32
    for o, c, p, q in ((0, 0, 0, 0), (19, 39, 1, n - 1), (16, 17, n - 1, 2)):
        assert packed[p, q, o // 16, c // 16, c % 16, o % 16] == u[o, c, p, q]
    assert (
        not packed[:, :, 1, :, :, 4:].any() and not packed[:, :, :, 2, 8:].any()
    )  # what pads 20 and 40 to whole blocks
