"""Formats of one's own: codes and what they mean, in products that read codes, on the CPU and by the interpreters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.ir.dtype import f32, i32
from dnnc.ir.errors import InputError
from dnnc.ir.expr import Expr, cast, maximum, minimum
from dnnc.ir.loops.stmt import call


def levels(steps: float, low: float, high: float) -> Any:
    def encode(x: Expr) -> Expr:
        return cast(maximum(minimum(call("rint", x * steps), high), low) - low, i32)

    return encode, lambda q: (cast(q, f32) + low) * (1 / steps)


FORMATS = {
    "few": dnnc.storage_format("few", "u2", *levels(1.0, -1.0, 2.0)),
    "nibble": dnnc.storage_format("nibble", "u4", *levels(4.0, -8.0, 7.0)),
    "byte": dnnc.storage_format("byte", "u8", *levels(16.0, -128.0, 127.0)),
}
STEPS = {"few": (1, -1, 2), "nibble": (4, -8, 7), "byte": (16, -128, 127)}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_products_read_codes(name: str) -> None:
    f, (steps, low, high) = FORMATS[name], STEPS[name]
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((64, 48)).astype(np.float32), rng.integers(-2, 3, (3, 64)).astype(np.float32)
    s = rng.integers(1, 3, (4, 48)).astype(np.float32)
    plain = np.clip(np.rint(w * steps), low, high) / steps
    codes = np.asarray(f.encode(w))
    np.testing.assert_array_equal(codes, np.clip(np.rint(w * steps), low, high) - low)
    np.testing.assert_array_equal(np.asarray(f.decode(codes)), plain)
    want = x @ (plain * s.repeat(16, 0))
    for target in ("llvm -threads=1", "cuda-interpreted", "reference"):
        g = dnnc.compile(lambda x: x @ f.decode(codes, s, axis=0, block=16), inputs=[x], target=target)
        np.testing.assert_allclose(g(x), want, atol=1e-4)
        if target.startswith("llvm"):
            program, bits = g.report.programs[0], f.codes.bits
            assert len(program.kernels) == 1 and "decode" in program.kernels[0].name
            assert program.memory.constants <= codes.size * bits // 8 + s.nbytes + 128


@pytest.mark.slow
def test_codes_that_are_computed() -> None:
    f = FORMATS["nibble"]
    x, w = (np.random.default_rng(k).standard_normal((8, 8)).astype(np.float32) for k in (0, 1))
    y = np.asarray(dnnc.array.asarray(x) @ f.decode(f.encode(w)))
    np.testing.assert_allclose(y, x @ np.asarray(f.decode(f.encode(w))), atol=1e-5)


def test_what_is_no_format() -> None:
    with pytest.raises(InputError, match="codes are of u2, u4"):
        dnnc.storage_format("x", "f32", lambda x: x, lambda q: q)
    with pytest.raises(InputError, match="identifier"):
        dnnc.storage_format("1x", "u4", lambda x: x, lambda q: q)
    with pytest.raises(InputError, match="stored in u8, got codes of i32"):
        FORMATS["nibble"].decode(np.zeros((2, 2), np.int32))
