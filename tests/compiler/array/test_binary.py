"""Products of signs by counts of bits: those of plain products, for any number of signs, on the CPU and a device."""

from __future__ import annotations

import numpy as np
import pytest

import dnnc
from dnnc.array.binary import binary_matmul, sign_words
from dnnc.backends.llvm.emit import emit_kernel
from dnnc.backends.llvm.features import parse_target
from dnnc.ir.errors import InputError
from dnnc.ir.loops.text import parse_kernel


@pytest.mark.slow
@pytest.mark.parametrize(("m", "k", "n"), [(1, 32, 16), (9, 70, 33), (20, 300, 5)])
def test_products_of_signs(m: int, k: int, n: int) -> None:
    rng = np.random.default_rng(k)
    x, w = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)
    words = np.ascontiguousarray(np.asarray(sign_words(np.ascontiguousarray(w.T))).T)
    want = np.sign(x).astype(np.int32) @ np.sign(w).astype(np.int32)
    for target in ("llvm -threads=2", "llvm -mcpu=x86-64-v3", "cuda-interpreted"):
        f = dnnc.compile(lambda x: binary_matmul(sign_words(x), words, k), inputs=[x], target=target)
        np.testing.assert_array_equal(f(x), want)


def test_bits_are_counted_by_an_instruction() -> None:
    k = parse_kernel("def k(a: u32[16], y: u32[16]):\n    y[0:+16] = popcount(a[0:+16])\n")
    assert "llvm.ctpop.v16i32" in emit_kernel(k, "k", parse_target("llvm -mcpu=znver4").feature_set)


def test_words_that_do_not_fit() -> None:
    words = np.zeros((3, 2), np.uint32)
    with pytest.raises(InputError, match=r"of 70 signs"):
        binary_matmul(words, words.T, 70)
