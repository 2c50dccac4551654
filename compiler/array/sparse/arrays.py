"""Sparse arrays, by SciPy's names: rows (CSR), coordinates (COO), rows of blocks (BSR); compressed blocks (CSB).

The values, `data`, are an array of `dnnc.array`; the structure is checked once, when an array is made, and does not
change. Columns of a row are sorted, and duplicates are added up.
"""

from __future__ import annotations

import builtins
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar, overload

import numpy as np

from dnnc.array.core import Array, array_of, cast, from_buffer
from dnnc.array.creation import asarray
from dnnc.array.devices import HOST
from dnnc.array.errors import TypeInputError, ValueInputError
from dnnc.array.manipulation import broadcast_to, concat, matrix_transpose, reshape, result_type
from dnnc.array.operators import NUMBERS
from dnnc.array.promotion import kind_of
from dnnc.array.sparse import bsr, products
from dnnc.array.sparse.conversions import blocked, is_sparse, of_blocks, of_scipy, shape_of, taken
from dnnc.array.sparse.csb import Blocks
from dnnc.array.sparse.spgemm import multiplied
from dnnc.array.sparse.structure import Host, Structure, of_places
from dnnc.array.statistical import sum as sum_
from dnnc.ir.errors import InputError, a_type

Same = TypeVar("Same", bound="SparseArray")
S = TypeVar("S")
DENSE = (Array, np.ndarray, np.generic)
BORROWED = ("float32", "float64", "int32", "int64")


class SparseArray(ABC):
    """What sparse arrays share: shape, arithmetic, conversions. Make one by `csr_array`, `coo_array` ..."""

    __array_ufunc__ = None  # NumPy leaves operators to this class
    __hash__ = None  # type: ignore[assignment]
    format = ""
    data: Array

    # --- what it is ---------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""

    @property
    def ndim(self) -> int:
        return 2

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.data.dtype

    @property
    def device(self) -> str:
        return self.data.device

    @property
    def nnz(self) -> int:
        """The number of stored elements, zeros among them."""
        return self.data.size

    @property
    def size(self) -> int:
        """The same, as in SciPy."""
        return self.nnz

    def __repr__(self) -> str:
        m, k = self.shape
        return f"<{self.format}_array of shape ({m}, {k}), {self.nnz} stored elements of {self.dtype}>"

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]  # without its transpose

    def __bool__(self) -> bool:
        raise TypeInputError("a sparse array is neither true nor false; ask for its sum or its number of elements")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Host:
        raise TypeInputError("a sparse array does not become a dense one by itself; ask for toarray()")

    # --- formats ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def tocsr(self) -> csr_array:
        """The same elements in compressed rows."""

    def tocoo(self) -> coo_array:
        """The same elements by coordinates."""
        a = self.tocsr()
        return _made(coo_array, data=a.data, structure=a.structure)

    def tobsr(self, blocksize: tuple[int, int] = (1, 1)) -> bsr_array:
        """The blocks that hold stored elements; the others of a block are zeros.

        Args:
            blocksize: rows and columns of a block, which divide the shape.
        """
        a = self.tocsr()
        data, structure = blocked(a.data, a.structure, blocksize)
        return _made(bsr_array, data=data, structure=structure)

    def tocsb(self, blocksize: int | None = None) -> csb_array:
        """The same elements in compressed sparse blocks.

        Args:
            blocksize: as in `csb_array`.
        """
        return csb_array(self, blocksize=blocksize)

    def toarray(self) -> Array:
        """The matrix as a dense array."""
        a = self.tocsr()
        return products.dense(a.data, a.structure)

    todense = toarray

    def to_scipy(self) -> Any:
        """The array of `scipy.sparse` with the same elements, in the same format where SciPy has it, else by rows."""
        return self.tocsr().to_scipy()

    def with_data(self: Same, data: Any) -> Same:
        """Other values at the same places: `a.with_data(xp.exp(a.data))`.

        Args:
            data: of the shape of `a.data`.
        """
        made = asarray(data, device=self.device) if not isinstance(data, Array) else data
        if made.shape != self.data.shape:
            raise ValueInputError(f"with_data: expected shape {self.data.shape}, got {made.shape}")
        return _made(type(self), data=made, structure=self.structure)  # type: ignore[attr-defined]

    def astype(self: Same, dtype: Any) -> Same:
        """The same with values of another dtype."""
        return self.with_data(self.data.astype(dtype))

    def copy(self: Same) -> Same:
        """The array itself with values of its own."""
        return self.with_data(array_of(*self.data._parts))

    def to_device(self: Same, device: str) -> Same:
        """The same with values on another device."""
        return self.with_data(self.data.to_device(device))

    @property
    @abstractmethod
    def T(self) -> SparseArray:
        """The transpose. Its structure is computed once."""

    def transpose(self) -> SparseArray:
        """The transpose."""
        return self.T

    # --- products -----------------------------------------------------------------------------------------------------

    @overload
    def __matmul__(self, other: SparseArray) -> csr_array: ...
    @overload
    def __matmul__(self, other: Any) -> Array: ...
    def __matmul__(self, other: Any) -> Any:
        if isinstance(other, SparseArray):
            a, b = self.tocsr(), other.tocsr()
            data, structure = multiplied(a.data, a.structure, b.data, b.structure)
            return _made(csr_array, data=data, structure=structure)
        x = _factor(other, self)
        return NotImplemented if x is None else self._times(x)

    def _times(self, x: Array) -> Array:
        """The product with a vector or a matrix."""
        a = self.tocsr()
        return products.matmul(a.data, a.structure, x)

    def __rmatmul__(self, other: Any) -> Array:
        x = _factor(other, self)
        if x is None:
            return NotImplemented
        if x.ndim == 1:
            return self.T._times(x)
        if x.ndim != 2 or x.shape[1] != self.shape[0]:
            raise ValueInputError(f"matmul: {x.shape} and {self.shape} do not fit")
        return matrix_transpose(self.T._times(matrix_transpose(x)))

    dot = __matmul__

    # --- element by element -------------------------------------------------------------------------------------------

    def __mul__(self, other: Any) -> SparseArray:
        """Products of elements. A dense operand is broadcast; where nothing is stored, the result is zero."""
        return self._elements(other, lambda x, y: x * y, "multiply")  # type: ignore[no-any-return]

    __rmul__ = __mul__
    multiply = __mul__

    def __truediv__(self, other: Any) -> SparseArray:
        """Quotients of stored elements by numbers or a dense array."""
        if isinstance(other, SparseArray):
            raise TypeInputError("divide: expected a number or a dense array as divisor, got a sparse array")
        return self._elements(other, lambda x, y: x / y, "divide")  # type: ignore[no-any-return]

    def _elements(self, other: Any, f: Callable[[Any, Any], Array], name: str) -> Any:
        if isinstance(other, NUMBERS):
            return self.with_data(f(self.data, other))
        a = self.tocsr()
        if isinstance(other, SparseArray):
            return _common(a, other.tocsr(), f, name)
        x = _operand(other, self)
        if x is None:
            return NotImplemented
        return _made(csr_array, data=f(a.data, _at_places(x, a.structure, name)), structure=a.structure)

    @overload
    def __add__(self, other: SparseArray) -> SparseArray: ...
    @overload
    def __add__(self, other: Any) -> Array: ...
    def __add__(self, other: Any) -> Any:
        """The sum: sparse with a sparse array, dense with a dense one."""
        if isinstance(other, NUMBERS) and other == 0:
            return self
        if isinstance(other, SparseArray):
            return _joined(self.tocsr(), other.tocsr())
        if isinstance(other, NUMBERS):
            raise TypeInputError("add: a number is added to stored elements only by with_data; toarray() gives a dense")
        x = _operand(other, self)
        if x is None:
            return NotImplemented
        a, dtype = self.tocsr(), result_type(self.data, x)
        return products.dense(cast(a.data, dtype), a.structure, cast(broadcast_to(x, self.shape), dtype))

    __radd__ = __add__

    def __neg__(self: Same) -> Same:
        return self.with_data(-self.data)

    def __sub__(self, other: Any) -> Any:
        return self + (-other)

    def __rsub__(self, other: Any) -> Any:
        return (-self) + other

    # --- reductions ---------------------------------------------------------------------------------------------------

    def sum(self, axis: int | None = None) -> Array:
        """The sum of all elements, of each column (axis 0) or of each row (axis 1)."""
        if axis is None:
            return sum_(self.data)
        if axis not in (0, 1, -1, -2):
            raise ValueInputError(f"sum: expected axis 0, 1 or None, got {axis}")
        a = self.tocsr() if axis % 2 else self.tocsr().T
        return products.sum_rows(a.data, a.structure)

    def mean(self, axis: int | None = None) -> Array:
        """The mean over all elements, stored or not, over rows (axis 0) or columns (axis 1)."""
        n = self.shape[0] * self.shape[1] if axis is None else self.shape[axis]
        a = self if kind_of(self.dtype) in "fc" else self.astype(np.float64)
        return a.sum(axis) / (n or float("nan"))


@dataclass(init=False, repr=False, eq=False)
class csr_array(SparseArray):
    """A sparse matrix in compressed rows.

    Args:
        arg1: a dense or sparse array, of NumPy, SciPy or dnnc; `(data, (row, col))`; `(data, indices, indptr)`; or a
            shape, for a matrix without stored elements. Of a dense array everything but zeros is stored.
        shape: of the matrix; by default as small as the indices allow.
        dtype: of the values.
        copy: copies the values; indices are copied always.
        device: of the values, by default that of `data`.

    Raises:
        InputError: indices are outside of the matrix, row pointers fall, or lengths do not fit.
    """

    data: Array
    structure: Structure
    format = "csr"

    def __init__(self, arg1: Any, shape: Any = None, dtype: Any = None, copy: bool = False, device: Any = None) -> None:
        self.data, self.structure = taken(arg1, shape_of(shape), dtype, copy, device)

    @property
    def shape(self) -> tuple[int, int]:
        return self.structure.shape

    @property
    def indptr(self) -> Host:
        """Where the rows begin, and the number of stored elements."""
        return self.structure.starts

    @property
    def indices(self) -> Host:
        """The column of each stored element."""
        return self.structure.columns

    def tocsr(self) -> csr_array:
        return self

    @property
    def T(self) -> csr_array:
        held: tuple[Any, Any] | None = self.__dict__.get("_turned")  # of these values: they may have been written to
        if held is None or held[0] is not self.data._parts:
            data, structure = products.transposed(self.data, self.structure), self.structure.transposed
            held = self.data._parts, _made(csr_array, data=data, structure=structure)
            if products.at_hand(self.data):
                self._turned = held
        return held[1]

    def to_scipy(self) -> Any:
        return _scipy().csr_array((self.data.numpy(), self.indices, self.indptr), shape=self.shape)


@dataclass(init=False, repr=False, eq=False)
class coo_array(SparseArray):
    """A sparse matrix by the rows and columns of its elements; arguments are those of `csr_array`."""

    data: Array
    structure: Structure
    format = "coo"

    def __init__(self, arg1: Any, shape: Any = None, dtype: Any = None, copy: bool = False, device: Any = None) -> None:
        self.data, self.structure = taken(arg1, shape_of(shape), dtype, copy, device)

    @property
    def shape(self) -> tuple[int, int]:
        return self.structure.shape

    @property
    def row(self) -> Host:
        """The row of each stored element."""
        return self.structure.rows

    @property
    def col(self) -> Host:
        """The column of each stored element."""
        return self.structure.columns

    @property
    def coords(self) -> tuple[Host, Host]:
        """Rows and columns."""
        return self.row, self.col

    def tocsr(self) -> csr_array:
        return _made(csr_array, data=self.data, structure=self.structure)

    def tocoo(self) -> coo_array:
        return self

    @property
    def T(self) -> coo_array:
        return self.tocsr().T.tocoo()

    def to_scipy(self) -> Any:
        return _scipy().coo_array((self.data.numpy(), self.coords), shape=self.shape)


@dataclass(init=False, repr=False, eq=False)
class bsr_array(SparseArray):
    """A sparse matrix of dense blocks of one size, in compressed rows of blocks.

    Args:
        arg1: as in `csr_array`; `(data, indices, indptr)` with blocks as data: [Z, R, C].
        blocksize: rows and columns of a block, which divide the shape; by default those of `data`, else (1, 1).
    """

    data: Array
    structure: Structure  # of the blocks
    format = "bsr"

    def __init__(
        self,
        arg1: Any,
        shape: Any = None,
        dtype: Any = None,
        copy: bool = False,
        blocksize: tuple[int, int] | None = None,
        device: Any = None,
    ) -> None:
        given = of_scipy(arg1)
        if getattr(given, "format", "") == "bsr" and not is_sparse(given):
            shape = given.shape if shape is None else shape
            given = given.data, given.indices, given.indptr
        if isinstance(given, tuple) and len(given) == 3 and np.ndim(given[0]) == 3:
            self.data, self.structure = of_blocks(given, shape_of(shape), dtype, device)
            if blocksize is not None and tuple(blocksize) != self.blocksize:
                raise ValueInputError(f"blocksize: expected that of the data, {self.blocksize}, got {blocksize}")
        elif isinstance(given, bsr_array) and blocksize in (None, given.blocksize):
            self.data, self.structure = given.data if dtype is None else given.data.astype(dtype), given.structure
        else:
            data, structure = taken(given, shape_of(shape), dtype, copy, device)
            self.data, self.structure = blocked(data, structure, blocksize or (1, 1))

    @property
    def blocksize(self) -> tuple[int, int]:
        """Rows and columns of a block."""
        return self.data.shape[1], self.data.shape[2]

    @property
    def shape(self) -> tuple[int, int]:
        (m, k), (r, c) = self.structure.shape, self.blocksize
        return m * r, k * c

    @property
    def indptr(self) -> Host:
        """Where the rows of blocks begin, and the number of blocks."""
        return self.structure.starts

    @property
    def indices(self) -> Host:
        """The column of each block, in blocks."""
        return self.structure.columns

    def tocsr(self) -> csr_array:
        whole, places = self.structure.of_blocks(*self.blocksize)
        data = products.gathered(reshape(self.data, (self.nnz,)), places)
        return _made(csr_array, data=data, structure=whole)

    def _times(self, x: Array) -> Array:
        made = bsr.product(self.data, self.structure, x)
        return super()._times(x) if made is None else made

    @property
    def T(self) -> bsr_array:
        data = products.transposed(self.data, self.structure)
        return _made(bsr_array, data=matrix_transpose(data), structure=self.structure.transposed)

    def to_scipy(self) -> Any:
        return _scipy().bsr_array((self.data.numpy(), self.indices, self.indptr), shape=self.shape)


@dataclass(init=False, repr=False, eq=False)
class csb_array(SparseArray):
    """A sparse matrix in compressed sparse blocks: products with vectors are as fast for its transpose as for itself,
    which shares its values.

    Args:
        arg1, shape, dtype, copy, device: as in `csr_array`.
        blocksize: rows and columns of a block, up to 65536; by default chosen by the elements. Up to 256, an element
            is stored with 2 bytes beside its value, above with 4.
    """

    data: Array  # block by block
    blocks: Blocks
    format = "csb"

    def __init__(
        self, arg1: Any, shape: Any = None, dtype: Any = None, copy: bool = False, blocksize: int | None = None,
        device: Any = None,
    ) -> None:  # fmt: skip
        data, structure = taken(arg1, shape_of(shape), dtype, copy, device)
        self.blocks = Blocks(structure, blocksize)
        self.data = products.gathered(data, self.blocks.order)

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks.shape

    @property
    def structure(self) -> Structure:
        """The same elements by rows."""
        return self.blocks.structure.transposed if self.blocks.turned else self.blocks.structure

    @property
    def blocksize(self) -> int:
        """Rows and columns of a block."""
        return self.blocks.side

    def with_data(self, data: Any) -> csb_array:
        made = self.tocsr().with_data(data)  # which checks them
        return _made(csb_array, data=made.data, blocks=self.blocks)

    def tocsr(self) -> csr_array:
        data = products.gathered(self.data, self.blocks.back)
        whole = _made(csr_array, data=data, structure=self.blocks.structure)
        return whole.T if self.blocks.turned else whole

    @property
    def T(self) -> csb_array:
        return _made(csb_array, data=self.data, blocks=self.blocks.transposed)

    def _times(self, x: Array) -> Array:
        made = self.blocks.product(self.data, x)
        return super()._times(x) if made is None else made


# --- made of others ---------------------------------------------------------------------------------------------------


def _made(kind: type[S], **fields: Any) -> S:
    """An array of parts that are right."""
    made = object.__new__(kind)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def _scipy() -> Any:
    import scipy.sparse  # an optional package

    return scipy.sparse


# --- two operands -----------------------------------------------------------------------------------------------------


def _operand(x: Any, beside: SparseArray) -> Array | None:
    """A dense operand as an array; None for what is none."""
    if isinstance(x, Array):
        return x
    if isinstance(x, (np.ndarray, np.generic, list)) or hasattr(x, "__dlpack__"):
        return asarray(x, device=beside.device if isinstance(x, (np.ndarray, np.generic, list)) else None)
    return None


def _factor(x: Any, beside: SparseArray) -> Array | None:
    """A factor of a product, not copied where the product is computed at once."""
    whole = isinstance(x, np.ndarray) and x.dtype.name in BORROWED and x.flags.c_contiguous
    return from_buffer(x, HOST) if whole and products.at_hand(beside.data) else _operand(x, beside)


def _at_places(x: Array, s: Structure, name: str) -> Array:
    """The elements of a dense array, broadcast to the matrix, at the stored places."""
    shape = (1,) * (2 - x.ndim) + x.shape
    if x.ndim > 2 or builtins.any(d not in (1, n) for d, n in zip(shape, s.shape)):
        raise ValueInputError(f"{name}: {x.shape} does not broadcast to {s.shape}")
    one_row, one_column = shape[0] == 1 != s.shape[0], shape[1] == 1 != s.shape[1]
    flat = reshape(x, (x.size,))
    if one_row and one_column:
        return flat
    if one_row or one_column:
        return products.taken(flat, s, "columns" if one_row else "rows")
    return reshape(products.taken(flat, s, "places"), (s.stored,))


def _same_shape(a: csr_array, b: csr_array, name: str) -> None:
    if a.shape != b.shape:
        raise ValueInputError(f"{name}: sparse arrays of shapes {a.shape} and {b.shape} do not fit")


def _common(a: csr_array, b: csr_array, f: Callable[[Any, Any], Array], name: str) -> csr_array:
    """What is stored in both."""
    _same_shape(a, b, name)
    if a.structure is b.structure:
        return _made(csr_array, data=f(a.data, b.data), structure=a.structure)
    places, p, q = np.intersect1d(
        a.structure.places[:, 0], b.structure.places[:, 0], assume_unique=True, return_indices=True
    )
    k = max(a.shape[1], 1)
    structure, _, _ = of_places(places // k, places % k, a.shape)
    x, y = products.gathered(a.data, p), products.gathered(b.data, q)
    return _made(csr_array, data=f(x, y), structure=structure)


def _joined(a: csr_array, b: csr_array) -> csr_array:
    """The sum of what is stored in either."""
    _same_shape(a, b, "add")
    if a.structure is b.structure:
        return _made(csr_array, data=a.data + b.data, structure=a.structure)
    rows, columns = (
        np.concatenate([x.astype(np.int64), y.astype(np.int64)])
        for x, y in ((a.structure.rows, b.structure.rows), (a.structure.columns, b.structure.columns))
    )
    structure, order, merged = of_places(rows, columns, a.shape)
    dtype = result_type(a.data, b.data)
    values = concat([cast(a.data, dtype), cast(b.data, dtype)])
    if merged is not None:
        values = products.merged(values, merged, order)
    elif order is not None:
        values = products.gathered(values, order)
    return _made(csr_array, data=values, structure=structure)


def sddmm(pattern: SparseArray, x: Any, y: Any) -> csr_array:
    """The elements of `x @ y` at the places that a sparse array stores, a sampled dense-dense product.

    Args:
        pattern: [M, K]; its values do not matter.
        x: [M, D]; y: [D, K].

    Returns:
        A sparse array with the structure of the pattern.
    """
    if not isinstance(pattern, SparseArray):
        raise TypeInputError(f"sddmm: expected a sparse array as pattern, got {a_type(pattern)}")
    a = pattern.tocsr()
    left, right = _operand(x, a), _operand(y, a)
    if left is None or right is None:
        raise InputError(f"sddmm: expected dense arrays, got {a_type(x)} and {a_type(y)}")
    return _made(csr_array, data=products.sampled(a.structure, left, right), structure=a.structure)
