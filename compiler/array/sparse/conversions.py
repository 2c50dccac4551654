"""What users give as sparse arrays, as values and a structure: dense arrays, arrays of SciPy, indices and values."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np

from dnnc.array.core import Array, array_of
from dnnc.array.creation import asarray, zeros
from dnnc.array.errors import TypeInputError, ValueInputError
from dnnc.array.manipulation import concat, reshape
from dnnc.array.promotion import kind_of
from dnnc.array.sparse import products
from dnnc.array.sparse.structure import Structure, of_places, of_rows
from dnnc.ir.errors import a_type

Parts = tuple[Array, Structure]


def is_sparse(x: Any) -> bool:
    """Is it a sparse array of dnnc?"""
    return isinstance(getattr(x, "structure", None), Structure)


def of_scipy(x: Any) -> Any:
    """An array of SciPy as dnnc takes it: by rows where that is no BSR."""
    if hasattr(x, "tocsr") and not is_sparse(x) and x.format not in ("csr", "bsr"):
        return x.tocoo()
    return x


def shape_of(shape: Any) -> tuple[int, int] | None:
    if shape is None:
        return None
    ok = isinstance(shape, (tuple, list)) and len(shape) == 2 and builtins.all(_is_size(n) for n in shape)
    if not ok:
        raise ValueInputError(f"shape: expected two sizes that are not negative, got {shape!r}")
    return int(shape[0]), int(shape[1])


def _is_size(n: Any) -> bool:
    return isinstance(n, (int, np.integer)) and not isinstance(n, bool) and int(n) >= 0


def taken(given: Any, shape: tuple[int, int] | None, dtype: Any, copy: bool, device: Any) -> Parts:
    """What a user gives, in compressed rows."""
    given = of_scipy(given)
    if is_sparse(given):
        a = given.tocsr()
        if shape not in (None, a.shape):
            raise ValueInputError(f"shape: expected that of the array, {a.shape}, got {shape}")
        data = a.data if dtype is None else a.data.astype(dtype)
        return array_of(*data._parts) if copy else data, a.structure
    if hasattr(given, "tocsr"):
        shape = shape or tuple(given.shape)
        if given.format == "bsr":
            given = given.tocsr()
        given = (
            (given.data, given.indices, given.indptr)
            if given.format == "csr"
            else (given.data, (given.coords[-2], given.coords[-1]))
        )
    if isinstance(given, (tuple, list)) and len(given) == 2 and builtins.all(map(_is_size, given)):
        m, k = int(given[0]), int(given[1])
        if shape not in (None, (m, k)):
            raise ValueInputError(f"shape: {shape} differs from the first argument, {given}")
        empty = Structure((m, k), np.zeros(m + 1, np.int64), np.zeros(0, np.int64))
        return zeros((0,), dtype=dtype or np.float64, device=device), empty
    if isinstance(given, tuple) and len(given) == 3:
        data, indices, indptr = given
        structure, order, merged = of_rows(indptr, indices, shape)
        count = len(np.asarray(indices))
    elif isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], (tuple, list)) and len(given[1]) == 2:
        data, (row, col) = given
        structure, order, merged = of_places(row, col, shape)
        count = len(np.asarray(row))
    else:
        return _of_dense(given, shape, dtype, device)
    values = _values(data, dtype, device)
    if values.shape != (count,):
        raise ValueInputError(f"data: expected {count} values, one for each index, got shape {values.shape}")
    if merged is not None:
        values = products.merged(values, merged, order)
    elif order is not None:
        values = products.gathered(values, order)
    return values, structure


def _values(data: Any, dtype: Any, device: Any) -> Array:
    values = asarray(data, dtype=dtype, device=device)
    if kind_of(values.dtype) == "c":
        raise TypeInputError(f"data: expected real numbers, got {values.dtype}; give real and imaginary parts apart")
    if kind_of(values.dtype) == "b":
        raise TypeInputError("data: expected numbers, got bool; give a dtype, such as float32")
    return values


def _of_dense(given: Any, shape: tuple[int, int] | None, dtype: Any, device: Any) -> Parts:
    """Everything of a dense array but zeros. NaN is no zero."""
    try:
        a = given.numpy() if isinstance(given, Array) else np.asarray(given)
    except (TypeError, ValueError) as e:
        raise TypeInputError(f"cannot make a sparse array of {a_type(given)}: {e}") from None
    if a.ndim != 2 or a.dtype.kind in "OUS":
        raise ValueInputError(
            "expected a matrix, a sparse array, (data, (row, col)), (data, indices, indptr) or a shape; got "
            f"{a_type(given)}" + (f" of shape {a.shape}" if a.ndim else "")
        )
    if shape not in (None, a.shape):
        raise ValueInputError(f"shape: expected that of the array, {a.shape}, got {shape}")
    rows, columns = np.nonzero(a)
    structure, _, _ = of_places(rows, columns, (a.shape[0], a.shape[1]))
    where = getattr(given, "device", None) if isinstance(given, Array) else None
    if isinstance(given, Array):  # its elements, so that gradients reach it
        flat = reshape(given if dtype is None else given.astype(dtype), (a.size,))
        values = products.gathered(flat, structure.value("places", given.device))
        return reshape(values, (structure.stored,)), structure
    return _values(a[rows, columns], dtype, device or where), structure


def of_blocks(given: tuple[Any, ...], shape: tuple[int, int] | None, dtype: Any, device: Any) -> Parts:
    data, indices, indptr = given
    values = _values(data, dtype, device)
    (_, r, c), count = values.shape, len(np.asarray(indices))
    if 0 in (r, c):
        raise ValueInputError(f"data: blocks need rows and columns, got shape {values.shape}")
    if values.shape[0] != count:
        raise ValueInputError(f"data: expected {count} blocks, one for each index, got shape {values.shape}")
    if shape is not None and (shape[0] % r or shape[1] % c):
        raise ValueInputError(f"shape: blocks of {r} x {c} do not divide {shape}")
    blocks = None if shape is None else (shape[0] // r, shape[1] // c)
    structure, order, merged = of_rows(indptr, indices, blocks)
    if merged is not None:
        values = products.merged(values, merged, order)
    elif order is not None:
        values = products.gathered(values, order)
    return values, structure


def blocked(data: Array, s: Structure, blocksize: Any) -> Parts:
    """The blocks that hold elements."""
    size = shape_of(blocksize)
    m, k = s.shape
    if size is None or 0 in size or m % size[0] or k % size[1]:
        raise ValueInputError(f"blocksize: expected rows and columns that divide {s.shape}, got {blocksize!r}")
    r, c = size
    high, wide = s.rows.astype(np.int64) // r, s.columns.astype(np.int64) // c
    keys, block = np.unique(high * max(k // c, 1) + wide, return_inverse=True)
    blocks, _, _ = of_places(keys // max(k // c, 1), keys % max(k // c, 1), (m // r, k // c))
    n = len(keys)
    places = (block.reshape(-1) * r + s.rows % r) * c + s.columns % c
    source = np.full(n * r * c, s.stored)
    source[places] = np.arange(s.stored)
    padded = concat([data, zeros((1,), dtype=data.dtype, device=data.device)])
    return reshape(products.gathered(padded, source), (n, r, c)), blocks
