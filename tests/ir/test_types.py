"""Dtypes, layouts and tensor types."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dnnc.ir.dtype import ALL, BY_NAME, DType, bf16, boolean, dtype, f16, f32, from_numpy, i8, i64, string, u8
from dnnc.ir.expr import dim, unwrap
from dnnc.ir.types import Dense, Layout, Part, TensorType, parse_layout, product, tensor

# --- dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", ALL, ids=str)
def test_dtype_and_numpy_agree(t: DType) -> None:
    assert dtype(t.name) is t and from_numpy(t.numpy) is t
    if t is not string:
        assert t.numpy.itemsize == t.bytes
    assert t.computed.computed is t.computed


def test_compute_and_storage_forms() -> None:
    assert f16.computed is bf16.computed is f32 and BY_NAME["i4"].computed is i8 and f32.computed is f32
    assert boolean.storage == "u8" and BY_NAME["u4"].storage == "u8" and BY_NAME["u4"].bytes == 1


@pytest.mark.parametrize("name", [n for n, t in BY_NAME.items() if t.is_int])
def test_integer_ranges(name: str) -> None:
    t = BY_NAME[name]
    assert t.range == ((0, 2**t.bits - 1) if name[0] == "u" else (-(2 ** (t.bits - 1)), 2 ** (t.bits - 1) - 1))
    assert [int(x) for x in np.array(t.range, object).astype(t.numpy)] == list(t.range)


def test_unknown_dtypes() -> None:
    with pytest.raises(KeyError):
        dtype("f33")
    with pytest.raises(TypeError, match="no type for NumPy's datetime64"):
        from_numpy("datetime64[s]")
    assert from_numpy(np.array(["a", "bc"]).dtype) is string and boolean.range == (0, 1)


# --- layouts ----------------------------------------------------------------------------------------------------------

LAYOUTS = [
    ("0 1/16 2 3 1%16", (2, 40, 3, 5)),
    ("1 0", (3, 4)),
    ("0/4 1/8 0%4 1%8", (9, 16)),
    ("0/6 0/2%3 0%2", (13,)),
    ("0 2 3 1", (1, 5, 4, 3)),
]


@pytest.mark.parametrize("text, shape", LAYOUTS)
def test_layout_index_is_a_bijection(text: str, shape: tuple[int, ...]) -> None:
    """Every logical element has its own place inside the physical shape, and `logical` finds the way back."""
    layout = parse_layout(text)
    assert str(layout) == text
    physical = layout.shape(shape)
    seen = set()
    for i in itertools.product(*map(range, shape)):
        p = tuple(unwrap(x) for x in layout.index(i))
        assert all(0 <= x < n for x, n in zip(p, physical, strict=True))
        assert tuple(unwrap(x) for x in layout.logical(p)) == i
        seen.add(p)
    assert len(seen) == product(shape)
    assert layout.padded(shape) == (product(physical) > product(shape))  # type: ignore[operator]


def test_layouts_of_symbolic_shapes() -> None:
    n, c = dim("N"), dim("C", 16, 256, 16)
    layout = parse_layout("0 1/16 1%16")
    assert str(tensor(f32, n, c, encoding=Dense(layout))) == 'f32[N, C] @ "0 1/16 1%16"'
    assert repr(layout.shape((n, c))) == "(N, (C + 15) // 16, 16)"
    assert not layout.padded((n, c)) and layout.padded((n, n)) and layout.padded((n, 17))
    assert layout.block(1) == 16 and layout.block(0) == 1


def test_layout_parts() -> None:
    assert parse_layout("0 1/16 1%16") == Layout((Part(0), Part(1, 16), Part(1, 1, 16)))


@pytest.mark.parametrize("text", ["a", "0 1%x", "0/1/2"])
def test_bad_layouts(text: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        parse_layout(text)


# --- tensor types -----------------------------------------------------------------------------------------------------


def test_tensor_types() -> None:
    n = dim("N")
    t = tensor(i64, n, 4)
    assert (str(t), t.rank, t.static, repr(t.size), repr(t.nbytes)) == ("i64[N, 4]", 2, False, "4*N", "32*N")
    assert str(tensor(u8)) == "u8" and tensor(u8).size == 1 and tensor(f32, 0, 3).nbytes == 0
    assert tensor(f32, 2, 3) == TensorType(f32, (2, 3)) != tensor(f32, 2, 3, encoding=Dense(parse_layout("1 0")))
    assert tensor(f32, n - n + 2).shape == (2,) and tensor(f32, n) == tensor(f32, dim("N")) != tensor(f32, dim("N", 2))
    assert len({tensor(f32, n), tensor(f32, dim("N"))}) == 1


def test_padded_bytes_count() -> None:
    assert tensor(f32, 1, 20, 2, 2, encoding=Dense(parse_layout("0 1/16 2 3 1%16"))).nbytes == 32 * 4 * 4
    assert tensor(BY_NAME["i4"], 3).nbytes == 3
