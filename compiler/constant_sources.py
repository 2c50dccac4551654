"""What the constants of a program are of those of its model, so that weights are not kept twice.

A source names constants of the model by their content hash: one of them as a view (other axes, a part of it), in
another dtype, or several side by side. It is found by comparing elements, whatever passes did to get there. What is
none of these is kept, by its content.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np

from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.ir.dtype import BY_NAME, DType, from_numpy
from dnnc.ir.graph import Graph
from dnnc.ir.graph.constant_text import from_bytes, to_bytes
from dnnc.ir.graph.show import every_node

Array = np.ndarray[Any, Any]
INSIDE = 1 << 14  # bytes up to which elements lie in the entry itself
PROBED = 32  # elements that are compared before all are
MOST_AXES = 4  # of constants whose axes are permuted


@dataclass(frozen=True)
class Piece:
    """A view of a constant of the model: its content hash and dtype; shape, byte offset and strides."""

    digest: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """Elements of a constant.

    pieces: of the model, side by side along `axis`; none where these are kept:
    key: in the entry of the cache with this key, or if that is empty
    inside: (offset, bytes) in the entry of the program.
    """

    pieces: tuple[Piece, ...] = ()
    axis: int = 0
    key: str = ""
    inside: tuple[int, int] = (0, 0)


def model_constants(graph: Graph) -> Iterator[tuple[str, Array]]:
    """The numeric constants of a graph and its subgraphs by content hash."""
    for g in (graph, *(s for n in every_node(graph) for s in n.subgraphs())):
        yield from ((g.digest(v), a) for v, a in g.constants.items() if a.dtype.kind != "O" and a.size)


class Sources:
    """Finds the sources of a program's constants.

    Attributes:
        inside: what lies in the entry of the program.
        kept: what lies in entries of its own, by their keys: uint8[n].
        too_much: True where that is more than the limit; nothing is of use then.
    """

    def __init__(self, graph: Graph, limit: int = 1 << 62) -> None:
        """`limit`: bytes that may lie in entries of their own."""
        found = {digest: a for digest, a in model_constants(graph) if a.nbytes > INSIDE and a.flags.c_contiguous}
        self._model = sorted(found.items(), key=lambda item: item[1].ctypes.data)
        self._starts = [a.ctypes.data for _, a in self._model]
        self._by_sizes: dict[tuple[int, ...], list[tuple[str, Array]]] = {}
        for digest, a in self._model:
            self._by_sizes.setdefault(_sizes(a.shape), []).append((digest, a))
        self.inside = bytearray()
        self.kept: dict[str, Array] = {}
        self._left = limit

    @property
    def too_much(self) -> bool:
        return self._left < 0

    def of(self, a: Array, dtype: DType) -> Source:
        """The source of an array."""
        if a.nbytes > INSIDE and dtype.kind != "s":
            piece = self._view(a) or self._equal(a)
            if piece is not None:
                return Source((piece,))
            for axis in range(a.ndim):
                pieces = self._side_by_side(a, axis)
                if pieces:
                    return Source(pieces, axis)
        data = to_bytes(a, dtype)
        if data.nbytes <= INSIDE:
            at = len(self.inside)
            self.inside += data.tobytes()
            return Source(inside=(at, data.nbytes))
        if self._left >= 0:
            key = hashlib.sha256(b"constant\0" + hashlib.sha256(data.data).digest()).hexdigest()
            self._left -= 0 if key in self.kept else data.nbytes
            self.kept[key] = data
            return Source(key=key)
        return Source()

    def _view(self, a: Array) -> Piece | None:
        """An array that lies in the memory of a constant of its dtype."""
        spans = [(n - 1) * s for n, s in zip(a.shape, a.strides)]
        first, last = (a.ctypes.data + sum(pick(s, 0) for s in spans) for pick in (min, max))
        k = bisect_right(self._starts, first) - 1
        if k < 0:
            return None
        digest, whole = self._model[k]
        inside = last + a.itemsize <= whole.ctypes.data + whole.nbytes
        return _piece(digest, whole, a) if inside and a.dtype == whole.dtype else None

    def _equal(self, a: Array) -> Piece | None:
        """An array with the elements of a constant, in any order of axes."""
        for digest, whole in self._like(a.shape, a):
            for v in _permuted(whole, a.shape):
                if _same(a, v):
                    return _piece(digest, whole, v)
        return None

    def _side_by_side(self, a: Array, axis: int) -> tuple[Piece, ...]:
        """Constants that make up an array along an axis; none where a part is of no constant."""
        pieces: list[Piece] = []
        at = 0
        while at < a.shape[axis]:
            found = self._begins(a[(slice(None),) * axis + (slice(at, None),)], axis)
            if found is None:
                return ()
            pieces.append(found)
            at += found.shape[axis]
        return tuple(pieces)

    def _begins(self, a: Array, axis: int) -> Piece | None:
        """A constant that an array begins with along an axis."""
        row = a.size // a.shape[axis]
        for n in sorted({whole.size // row for _, whole in self._model}):
            if 0 < n <= a.shape[axis]:
                piece = self._equal(a[(slice(None),) * axis + (slice(0, n),)])
                if piece is not None:
                    return piece
        return None

    def _like(self, shape: tuple[int, ...], a: Array) -> Sequence[tuple[str, Array]]:
        """The constants that may have the elements of an array of a shape."""
        return [m for m in self._by_sizes.get(_sizes(shape), ()) if _comparable(a, m[1])]


def _sizes(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(n for n in shape if n != 1))


def _piece(digest: str, whole: Array, view: Array) -> Piece:
    at = view.ctypes.data - whole.ctypes.data
    return Piece(digest, from_numpy(whole.dtype).name, view.shape, at, view.strides)


def _comparable(a: Array, b: Array) -> bool:
    """Of one dtype, or floats of two."""
    return (a.dtype == b.dtype and a.dtype.itemsize <= 8) or (_is_float(a) and _is_float(b))


def _is_float(a: Array) -> bool:
    return bool(a.dtype.kind == "f" or a.dtype.name == "bfloat16")


def _permuted(a: Array, shape: tuple[int, ...]) -> Iterator[Array]:
    """An array with its axes in all orders that give a shape."""
    core, wanted = a.squeeze(), tuple(n for n in shape if n != 1)
    if core.ndim <= MOST_AXES:
        views = (core.transpose(order) for order in permutations(range(core.ndim)))
        yield from (v.reshape(shape) for v in views if v.shape == wanted)


def _same(a: Array, b: Array) -> bool:
    """Are two arrays of one shape equal bit by bit, `b` in the dtype of `a`?"""
    at = np.unravel_index(np.linspace(0, a.size - 1, min(PROBED, a.size)).astype(np.int64), a.shape)
    return _bits(a[at], b[at]) and _bits(a, b)


def _bits(a: Array, b: Array) -> bool:
    with np.errstate(all="ignore"):
        cast = b if b.dtype == a.dtype else b.astype(a.dtype)
    words = f"u{a.dtype.itemsize}"
    return bool(np.array_equal(a.view(words), cast.view(words)))


def elements(
    s: Source, dtype: DType, shape: tuple[int, ...], model: Mapping[str, Array], inside: bytes, cache: KernelCache
) -> Array:
    """The array of a source. KeyError, ValueError: some of it is gone.

    Args:
        s: the source.
        dtype: of the array.
        shape: of the array.
        model: constants by content hash.
        inside: what lies in the entry of the program.
        cache: has the other entries.
    """
    if not s.pieces:
        at, n = s.inside
        data = cache.get(s.key) if s.key else inside[at : at + n]
        if data is None:
            raise KeyError(s.key)
        return from_bytes(data, dtype, shape)
    parts = [_view_of(model[p.digest], p).astype(dtype.numpy, copy=False) for p in s.pieces]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, s.axis)


def _view_of(a: Array, p: Piece) -> Array:
    whole = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
    return np.ndarray(p.shape, BY_NAME[p.dtype].numpy, whole.data, p.offset, p.strides)
