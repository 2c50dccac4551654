"""`dnnc.storage_format`: a format of one's own for stored numbers, by two expressions, that every kernel reads.

In: what a number becomes when it is stored (a code), and what a code means. Out: a `StorageFormat`, whose `encode` and
`decode` work on arrays, traced functions and models. `decode` is never computed into memory by itself where a product
reads it: codes are decoded in registers. Codes of 2 and 4 bits are decoded by a table, and constants share words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dnnc.array.core import Array, array_of
from dnnc.array.creation import asarray
from dnnc.array.custom import CustomOp
from dnnc.array.lazy import apply
from dnnc.ir import te
from dnnc.ir.dtype import BY_NAME, DType, f32, i32
from dnnc.ir.errors import InputError
from dnnc.ir.expr import Expr, cast, const, load, show
from dnnc.ir.loops.stmt import Buffer
from dnnc.ir.ops.decode import meanings

CODES = ("u2", "u4", "u8", "i8")
FEW_BITS = 4  # of codes whose meanings are a table


class StorageFormat:
    """Numbers as codes; see `storage_format`."""

    def __init__(self, name: str, codes: DType, encode: Callable[[Expr], Expr], decode: Callable[[Expr], Expr]) -> None:
        self.name, self.codes = name, codes

        def stored(x: te.Tensor) -> te.Tensor:
            return te.compute(x.dims, codes.computed, lambda *i: cast(encode(cast(x[i], f32)), codes.computed))

        self._encode = CustomOp(f"{name}_encode", stored, None, None)
        self._value = show(decode(load(Buffer("q", i32, (const(1),)), (0,))))
        low, high = codes.range
        few = codes.bits <= FEW_BITS
        every = meanings(self._value, low, high)  # fails here, where an expression is none of numbers
        self._attrs: dict[str, Any] = {"table": every} if few else {"value": self._value}

    def encode(self, x: Any) -> Array:
        """The codes of an array, each in a byte."""
        made: Array = self._encode(x)
        return made

    def decode(self, codes: Any, scale: Any = None, *, axis: int = -1, block: int = 0) -> Array:
        """What codes mean, in float32.

        Args:
            codes: what `encode` gives.
            scale: an array with an axis for each of the codes' that multiplies what they mean: of size 1, of their
                size, or along `axis` a number for each `block` of codes.
        """
        q = asarray(codes)._parts[0]
        if q.type.dtype is not self.codes.computed:
            raise InputError(f"{self.name} is stored in {self.codes.computed}, got codes of {q.type.dtype}")
        q = q if self.codes.bits == 8 else apply("cast", q, to=self.codes)
        operands = [q, *([] if scale is None else [asarray(scale)._parts[0]])]
        return array_of(apply("decode", *operands, dtype=f32, axis=axis, block=block or 1, **self._attrs))

    def __repr__(self) -> str:
        return f"StorageFormat({self.name}, {self.codes}: {self._value})"


def storage_format(
    name: str, codes: str, encode: Callable[[Expr], Expr], decode: Callable[[Expr], Expr]
) -> StorageFormat:
    """A custom storage format of numbers.

    Args:
        name: an identifier.
        codes: the type of a code: "u2", "u4", "u8" or "i8".
        encode: takes a number as an expression in f32 and gives its code, an integer in the range of the codes.
        decode: maps a code, an expression in i32, to its number, in f32.

    Raises:
        InputError: the name is no identifier, or there are no codes of that type.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise InputError(f"storage_format: a name is an identifier, got {name!r}")
    if codes not in CODES:
        raise InputError(f"storage_format: codes are of {', '.join(CODES)}, got {codes!r}")
    return StorageFormat(name, BY_NAME[codes], encode, decode)
