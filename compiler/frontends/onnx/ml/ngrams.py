"""TfIdfVectorizer as comparisons and sums, which run compiled. Strings become vocabulary numbers first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from dnnc.frontends.onnx.call import Call
from dnnc.frontends.onnx.tensors import Array
from dnnc.ir.dtype import f32, string
from dnnc.ir.errors import ModelError, count
from dnnc.ir.graph import Value

MODES = ("TF", "IDF", "TFIDF")


@dataclass(frozen=True)
class Grams:
    """The n-grams of one length: their items, int[count, n], and the output column of each."""

    items: Array
    columns: tuple[int, ...]

    @property
    def length(self) -> int:
        return int(self.items.shape[1])


def tfidf(c: Call) -> Any:
    """Count the pool's n-grams with up to `max_skip_count` skipped items; weights are by output column."""
    mode = c.text("mode")
    if mode not in MODES:
        raise ModelError(f"attribute mode must be one of {', '.join(MODES)}; got {mode!r}")
    columns = c.integers("ngram_indexes") or ()
    if not columns or min(columns) < 0:
        raise ModelError(f"attribute ngram_indexes must name a column of the output for each n-gram; got {columns[:8]}")
    x, pool = _numbers(c)
    grams = [
        g
        for g in _grams(c, pool, columns)
        if c.integer("min_gram_length", 1) <= g.length <= c.integer("max_gram_length", 1)
    ]
    rows = x if x.type.rank == 2 else c.b.reshape(x, shape=(1, *x.type.shape))
    width = max(columns) + 1
    counts = _counts(c, rows, grams, c.integer("max_skip_count"), int(pool.max(initial=-1)) + 1)
    y = _weighted(c, _by_column(c, counts, [k for g in grams for k in g.columns], width, rows), mode, width)
    return y if x.type.rank == 2 else c.b.reshape(y, shape=(width,))


def _numbers(c: Call) -> tuple[Value, Array]:
    """The input and the pool as integers."""
    words, numbers = c.texts("pool_strings"), c.integers("pool_int64s")
    x = c.x()
    if x.type.rank not in (1, 2):
        raise ModelError(f"the input must be a vector or a matrix; got {x.type}")
    if (x.type.dtype is string) != (words is not None) or (words is None) == (numbers is None):
        raise ModelError(
            f"an input {x.type} needs {'pool_strings' if x.type.dtype is string else 'pool_int64s'}, and that pool only"
        )
    if words is None:
        limits = np.iinfo(x.type.dtype.numpy)
        if any(not limits.min <= k < limits.max for k in numbers or ()):
            raise ModelError(f"attribute pool_int64s holds numbers that an input of {x.type.dtype} cannot have")
        return x, np.array(numbers, x.type.dtype.numpy)
    vocabulary = list(dict.fromkeys(words))
    place = {w: k for k, w in enumerate(vocabulary)}
    return c.b.string_index(x, c.b.constant(np.array(vocabulary, object))), np.array(
        [place[w] for w in words], np.int64
    )


def _grams(c: Call, pool: Array, columns: Sequence[int]) -> list[Grams]:
    starts = [*(c.integers("ngram_counts") or ()), len(pool)]
    out, taken = [], 0
    for n, (start, end) in enumerate(pairwise(starts), 1):
        if not 0 <= start <= end <= len(pool) or (end - start) % n:
            raise ModelError(
                f"attribute ngram_counts: the {n}-grams would be items {start} to {end} of a pool of {len(pool)}"
            )
        items = pool[start:end].reshape(-1, n)
        out.append(Grams(items, tuple(columns[taken : taken + len(items)])))
        taken += len(items)
    if taken != len(columns):
        raise ModelError(f"attribute ngram_indexes names {count(len(columns), 'column')}, the pool has {taken} n-grams")
    return [g for g in out if len(g.items)]


def _counts(c: Call, rows: Value, grams: Sequence[Grams], skips: int, absent: int) -> list[Value]:
    """f32[rows, n-grams] for each length. Padding items that no n-gram has make every window fit in its row."""
    b = c.b
    reach = max([(skips + 1) * (g.length - 1) for g in grams], default=0)
    n, size = rows.type.shape
    padded = b.pad(rows, b.constant(absent, dtype=rows.type.dtype), pads=(0, 0, 0, reach)) if reach else rows
    out = []
    for g in grams:
        total: Any = None
        for distance in range(1, skips + 2 if g.length > 1 else 2):
            hit: Any = None
            for k in range(g.length):
                part = b.slice(padded, starts=(0, k * distance), steps=(1, 1), shape=(n, size)) if reach else padded
                same = b.equal(b.reshape(part, shape=(n, size, 1)), b.constant(g.items[:, k].reshape(1, 1, -1)))
                hit = same if hit is None else b.logical_and(hit, same)
            found = b.reduce_sum(b.cast(hit, to=f32), axes=(1,))
            total = found if total is None else b.add(total, found)
        out.append(total)
    return out


def _by_column(c: Call, counts: Sequence[Value], columns: Sequence[int], width: int, rows: Value) -> Value:
    """f32[rows, width]: at each column the counts of its n-grams, added up."""
    b = c.b
    n = rows.type.shape[0]
    zero = b.expand(b.constant(np.zeros((1, 1), np.float32)), shape=(n, 1))
    every = b.concat(*counts, zero, axis=1) if counts else zero
    places: list[list[int]] = [[] for _ in range(width)]
    for k, column in enumerate(columns):
        places[column].append(k)
    total: Any = None
    for layer in range(max(1, *map(len, places))):
        index = np.array([p[layer] if layer < len(p) else len(columns) for p in places], np.int64)
        picked = b.gather(every, b.constant(index), axis=1)
        total = picked if total is None else b.add(total, picked)
    return total  # type: ignore[no-any-return]


def _weighted(c: Call, counts: Value, mode: str, width: int) -> Any:
    b = c.b
    if mode == "IDF":
        counts = b.cast(b.greater(counts, 0.0), to=f32)
    weights = c.numbers("weights")
    if mode == "TF" or weights is None:
        return counts
    if len(weights) < width:
        raise ModelError(f"attribute weights has {count(len(weights), 'number')} for {width} columns of the output")
    return b.mul(counts, b.constant(np.array(weights[:width], np.float32).reshape(1, -1)))


TEXT: dict[str, Callable[[Call], Any]] = {"TfIdfVectorizer": tfidf}
