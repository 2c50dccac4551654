"""Codes for sections of a small file: zeros, repeated values and frequent bytes take few bits. Nothing is lost.

A piece is either bytes, or words of 32 bits (floats by their bits):

    bytes    one stream
    words    where words are not zero: a bit for each word, or a byte for the distance to each; the different words, if
             they are few; for each word that is not zero its place among them in 4 or 8 bits, or the word itself

    text     one stream, in which numbers stand for patterns of sparse weights
    patterns what they stand for: ahead of all text, each of them once

A stream is stored as it is or deflated (zlib), whichever is smaller; distances and places by Huffman's code alone.
"""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Plain = list[Any]  # numbers and lists of them, as JSON has them
WORD = 4
FEW = 256  # different words that have places of a byte; 16 have places of half a byte
SPARSE = 1 / 32  # share of zeros from which on a bit for each word is worth it
RARE = 1 / 4  # share of other words up to which distances are smaller than bits
FAR = 255  # a step of this many words to no word
DENSE, BITS, DISTANCES = range(3)  # how it is said where words are not zero
SAMPLE = 1 << 20  # bytes that decide how a long stream is deflated
STRATEGIES = (zlib.Z_DEFAULT_STRATEGY, zlib.Z_HUFFMAN_ONLY)


PATTERN = re.compile(rb'(?<= )[A-Za-z0-9+/]{40,}={0,2}(?=")')  # of sparse weights, at the end of their encoding
MARK = re.compile(rb"\0([0-9]+)\0")  # the number of one


class Patterns:
    """The patterns of sparse weights in texts: the graphs and kernels of a program have the same ones."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}

    def coded_text(self, data: Any) -> tuple[Plain, list[bytes]]:
        """The record and the stream of a piece of text."""
        text = bytes(data)
        if b"\0" in text:
            return coded_bytes(data)
        head, stream = _stream(memoryview(PATTERN.sub(self._number, text)))
        return ["text", head], [stream]

    def coded(self) -> tuple[Plain, list[bytes]]:
        """The record and the stream of all patterns: they are deflated already."""
        found = [base64.b64decode(p) for p in self._numbers]
        return ["patterns", [len(p) for p in found]], found

    def _number(self, m: re.Match[bytes]) -> bytes:
        if base64.b64encode(base64.b64decode(m[0])) != m[0]:
            return m[0]
        return b"\0%d\0" % self._numbers.setdefault(m[0], len(self._numbers))


def coded_bytes(data: Any) -> tuple[Plain, list[bytes]]:
    """The record and the stream of a piece of bytes."""
    head, stream = _stream(memoryview(data).cast("B"))
    return ["bytes", head], [stream]


def coded_words(data: Any) -> tuple[Plain, list[bytes]]:
    """The record and the streams of a piece of whole words."""
    words = np.frombuffer(data, "<u4")
    used = words != 0
    count = int(np.count_nonzero(used))
    form = DENSE if words.size - count <= SPARSE * words.size else BITS if count > RARE * words.size else DISTANCES
    values = words[used] if form != DENSE else words
    different = _few(values)
    heads, streams = [], []

    def add(array: Array) -> None:
        head, stream = _stream(np.ascontiguousarray(array).data.cast("B"))
        heads.append(head)
        streams.append(stream)

    if form == BITS:
        add(np.packbits(used))
    elif form == DISTANCES:
        add(_distances(np.flatnonzero(used)))
    if different is None:
        add(values)
    else:
        places = np.searchsorted(different, values).astype(np.uint8)
        add(different)
        add(_halves(places) if different.size <= 16 else places)
    return ["words", words.size, values.size, 0 if different is None else different.size, form, heads], streams


def stored_bytes(piece: Plain) -> int:
    """What the streams of a piece take."""
    if piece[0] == "patterns":
        return sum(map(int, piece[1]))
    return sum(int(h[1]) for h in (piece[1:2] if piece[0] in ("bytes", "text") else piece[-1]))


class Decoder:
    """Reads pieces that were coded one behind the other. ValueError where a record does not fit the streams.

    Args:
        data: all streams.
        at: where the first one begins.
        patterns: what numbers in texts stand for.
    """

    def __init__(self, data: memoryview, at: int = 0, patterns: Sequence[bytes] = ()) -> None:
        self._data, self._at = data, at
        self.patterns = patterns

    def into(self, piece: Plain, out: Array) -> Array:
        """Write a piece to the begin of `out`, uint8[n] of zeros; what is left of it."""
        if piece[0] == "patterns":
            self.patterns = [base64.b64encode(self._stream((0, n, n)).tobytes()) for n in map(int, piece[1])]
            return out
        if piece[0] in ("bytes", "text"):
            part = self._stream(piece[1])
            if piece[0] == "text":
                text = MARK.sub(lambda m: self.patterns[int(m[1])], part.tobytes())
                part = np.frombuffer(text, np.uint8)
            if part.size > out.size:
                raise ValueError(f"a piece of {part.size} bytes, where {out.size} are expected")
            out[: part.size] = part
            return out[part.size :]
        if piece[0] != "words":
            raise ValueError(f"a piece of the kind {piece[0]!r}")
        _, total, count, different, form, heads = piece
        if not 0 <= WORD * total <= out.size:
            raise ValueError(f"a piece of {total} words, where {out.size} bytes are expected")
        words = out[: WORD * total].view("<u4")
        heads = iter(heads)
        steps = self._stream(next(heads)) if form != DENSE else None
        values = self._values(count, different, heads)
        if steps is None:
            words[:] = values
        else:
            at = _places(steps) if form == DISTANCES else np.flatnonzero(np.unpackbits(steps).view(bool))
            if at.size != count or (count and not at[-1] < total):
                raise ValueError(f"{at.size} words up to {at[-1] if at.size else 0}, expected {count} of {total}")
            words[at] = values
        return out[WORD * total :]

    def _stream(self, head: Sequence[int]) -> Array:
        deflated, stored, size = (int(x) for x in head)
        part = self._data[self._at : self._at + max(stored, 0)]
        if size < 0 or part.nbytes != stored:
            raise ValueError(f"a stream of {stored} bytes at {self._at}, where {self._data.nbytes} are")
        self._at += stored
        if not deflated:
            return np.frombuffer(part, np.uint8)
        z = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            out = z.decompress(part, size or 1)
        except zlib.error as e:
            raise ValueError(str(e)) from None
        if len(out) != size:
            raise ValueError(f"a stream gives {len(out)} bytes, expected {size}")
        return np.frombuffer(out, np.uint8)

    def _values(self, count: int, different: int, heads: Iterator[Sequence[int]]) -> Array:
        """The words that are not zero."""
        if not different:
            values = self._stream(next(heads)).view("<u4")
        else:
            table, places = self._stream(next(heads)).view("<u4"), self._stream(next(heads))
            if table.size != different or different > FEW:
                raise ValueError(f"a table of {table.size} words, expected {different}")
            if different > 16:
                values = np.resize(table, FEW)[places]
            else:  # two places a byte: a table of pairs
                both, pairs = np.resize(table, 16), np.empty((FEW, 2), "<u4")
                pairs[:, 0], pairs[:, 1] = both[np.arange(FEW) & 15], both[np.arange(FEW) >> 4]
                values = pairs.view("<u8").reshape(-1)[places].view("<u4")[:count]
        if values.size != count:
            raise ValueError(f"{values.size} words, expected {count}")
        return values


def _distances(at: Array) -> Array:
    """Ascending places as steps: b < 255 goes b + 1 words on to the next one, 255 goes 255 words on to none."""
    gaps = np.diff(at, prepend=-1) - 1
    far = gaps // FAR
    out = np.full(at.size + int(far.sum()), FAR, np.uint8)
    out[np.arange(at.size) + np.cumsum(far)] = gaps % FAR
    return out


def _places(steps: Array) -> Array:
    """The inverse of `_distances`."""
    to_one = steps != FAR
    at = np.cumsum(steps + to_one.astype(np.int64)) - 1
    return at if to_one.all() else at[to_one]


def _few(values: Array) -> Array | None:
    """The different words, ascending, where they are few."""
    for sample in (values[:: max(values.size // 4096, 1)], values):
        found = np.unique(sample)
        if found.size > FEW:
            return None
    return found if found.size else None


def _halves(places: Array) -> Array:
    """Two numbers below 16 in each byte, the first in the lower half."""
    even = np.append(places, np.zeros(places.size % 2, np.uint8))
    halves: Array = even[0::2] | (even[1::2] << 4)
    return halves


def _stream(data: memoryview) -> tuple[list[int], bytes]:
    """[deflated?, bytes stored, bytes], and what is stored."""
    sample = data[:SAMPLE]
    best = min(STRATEGIES, key=lambda s: len(_deflated(sample, s)))
    out = _deflated(data, best)
    if len(out) >= data.nbytes:
        return [0, data.nbytes, data.nbytes], data.tobytes()
    return [1, len(out), data.nbytes], out


def _deflated(data: memoryview, strategy: int) -> bytes:
    z = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, 9, strategy)
    return z.compress(data) + z.flush()
