"""Encodings: their names in texts, and two of another package's that the compiler takes as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.ir.dtype import dtype, f32, i8, u8
from dnnc.ir.encodings import Winograd, parse_encoding, register
from dnnc.ir.expr import E, Expr, cast, const, load, select
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.stmt import Buffer, Builder, Func, Kernel
from dnnc.ir.types import ROW_MAJOR, Dense, Encoding, TensorType, parse_layout, tensor

RNG = np.random.default_rng(0)


@register("scaled")
@dataclass(frozen=True)
class Scaled(Encoding):
    """Matrices of whole numbers in i8, with an f32 scale for each `block` of a row: two buffers, text `scaled4`."""

    size: int

    @classmethod
    def parse(cls, text: str) -> Scaled:
        return cls(int(text.removeprefix("scaled")))

    def __str__(self) -> str:
        return f"scaled{self.size}"

    def buffers(self, type: TensorType) -> tuple[TensorType, ...]:
        rows, columns = type.shape
        assert isinstance(columns, int)
        return tensor(i8, rows, columns), tensor(f32, rows, -(-columns // self.size))

    def load(self, memory: Sequence[Callable[..., Expr]], index: Sequence[E]) -> Expr:
        row, column = map(const, index)
        return cast(memory[0](row, column), f32) * memory[1](row, column // self.size)

    def pack(self, array: Any) -> tuple[Any, ...]:
        most = [np.abs(array[:, k : k + self.size]).max(1) for k in range(0, array.shape[1], self.size)]
        scales = np.stack(most, 1).astype(np.float32) / 127
        return np.rint(array / np.repeat(scales, self.size, 1)[:, : array.shape[1]]).astype(np.int8), scales


@register("signs")
@dataclass(frozen=True)
class Signs(Encoding):
    """Plus or minus one as an i8 in the order of a layout: one buffer of another type, text `signs 1 0`."""

    order: Dense

    @classmethod
    def parse(cls, text: str) -> Signs:
        return cls(Dense.parse(text.removeprefix("signs")))

    def __str__(self) -> str:
        return f"signs {self.order}"

    def buffers(self, type: TensorType) -> tuple[TensorType, ...]:
        return self.order.buffers(tensor(i8, *type.shape))

    def load(self, memory: Sequence[Callable[..., Expr]], index: Sequence[E]) -> Expr:
        return select(self.order.load(memory, index) > const(0, i8), const(1.0, f32), const(-1.0, f32))

    def pack(self, array: Any) -> tuple[Any, ...]:
        return self.order.pack(np.where(array > 0, 1, -1).astype(np.int8))


@pytest.mark.parametrize(
    "encoding",
    [
        Dense(parse_layout("0 1/16 2 3 1%16")),
        Winograd(4, parse_layout("2 3 0/16 1/16 1%16 0%16")),
        Scaled(4),
        Signs(Dense(parse_layout("1 0"))),
    ],
    ids=lambda e: type(e).__name__,
)
def test_encodings_have_a_text(encoding: Encoding) -> None:
    assert parse_encoding(str(encoding)) == encoding != ROW_MAJOR
    t = tensor(f32, 32, 32, 3, 3, encoding=encoding)
    assert str(t) == f'f32[32, 32, 3, 3] @ "{encoding}"'
    text = f"def f(*, w: {t} = const('0')):\n    return w\n".replace(" = const('0')", "")
    g = parse(text, constants={"w": np.zeros((32, 32, 3, 3), np.float32)})
    assert next(iter(g.constants)).type == t and str(t) in str(g)


def test_unknown_and_taken_names() -> None:
    with pytest.raises(ValueError, match="no encoding has the name 'unheard'"):
        parse_encoding("unheard 1 0")
    with pytest.raises(ValueError, match="cannot have the name 'winograd'"):
        register("winograd")(Scaled)


def test_an_encoding_of_two_buffers() -> None:
    """Its load gives in a kernel what its pack was given."""
    t = tensor(f32, 3, 10, encoding=Scaled(4))
    assert t.nbytes == 3 * 10 + 3 * 3 * 4 and [str(b) for b in t.buffers] == ["i8[3, 10]", "f32[3, 3]"]
    with pytest.raises(dnnc.InternalError, match="lies in 2 buffers"):
        _ = t.physical
    with pytest.raises(dnnc.InternalError, match="is not dense"):
        _ = t.layout
    array = RNG.standard_normal((3, 10)).astype(np.float32)
    codes, scales = t.encoding.pack(array)
    assert [a.shape for a in (codes, scales)] == [b.shape for b in t.buffers]
    memory = [Buffer(f"w{k}", b.dtype, tuple(map(const, b.shape))) for k, b in enumerate(t.buffers)]
    y, b = Buffer("y", f32, (const(3), const(10))), Builder()
    with b.loop("i", 3) as i, b.loop("j", 10) as j:
        b.store(y, (i, j), t.encoding.load([lambda *at, m=m: load(m, at) for m in memory], (i, j)))
    back = np.zeros((3, 10), np.float32)
    run_kernel(Kernel((Func("unpack", (*memory, y), b.block()),)), {"w0": codes, "w1": scales, "y": back})
    assert np.abs(back - array).max() <= scales.max() / 2


def test_a_model_with_an_encoding_of_another_package() -> None:
    """A constant in i8: kernels read it by `load`, the program holds what `pack` gives."""
    w = np.where(RNG.random((6, 5)) < 0.5, np.float32(-1), np.float32(1))
    text = 'def f(x: f32[4, 6], *, w: f32[6, 5] @ "signs 1 0"):\n    return relu(matmul(x, w))\n'
    f = dnnc.compile(parse(text, constants={"w": w}), opt_level=0, cache=False)
    x = RNG.standard_normal((4, 6)).astype(np.float32)
    np.testing.assert_allclose(f(x), np.maximum(x @ w, 0), rtol=1e-5, atol=1e-6)
    assert "i8[5, 6]" in f.source("operator")


@pytest.mark.parametrize(("bits", "text"), [(4, "packed 1/16 0/8 1%16 0%8"), (2, "packed 0 1/16 1%16")])
def test_codes_of_few_bits_share_words(bits: int, text: str) -> None:
    encoding, shape = parse_encoding(text), (11, 21)
    assert str(encoding) == text
    t = TensorType(dtype(f"u{bits}"), shape, encoding)
    codes = RNG.integers(0, 1 << bits, shape).astype(t.dtype.numpy)
    (words,) = encoding.pack(codes)
    assert words.shape == t.physical and words.dtype == np.uint32 and t.nbytes == words.nbytes
    buf = Buffer("w", t.buffer.dtype, tuple(map(const, words.shape)))
    b = Builder()
    out = Buffer("y", u8, tuple(map(const, shape)))
    with b.loop("i", shape[0]) as i, b.loop("j", shape[1]) as j:
        b.store(out, (i, j), encoding.load((lambda *at: load(buf, at),), (i, j)))
    y = np.zeros(shape, np.uint8)
    run_kernel(Kernel((Func("k", (buf, out), b.block()),)), {"w": words, "y": y})
    np.testing.assert_array_equal(y, codes.astype(np.uint8))
