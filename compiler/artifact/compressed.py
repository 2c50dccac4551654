"""Saved models with coded sections: one section "coded" has the streams of all of them, the manifest says of what.

    "coded": [[name, bytes, [piece, ...]], ...]      pieces are those of `dnnc.artifact.coding`, in order

What a manifest has otherwise is the section "manifest". Patterns of sparse weights, which several texts have, come
first, in a section without bytes. Reading expands all sections into memory, each from a page on,
as they would lie in the file. Constants of 4 bytes a number are coded as words, all else as bytes.
"""

from __future__ import annotations

import io
import json
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

import numpy as np

from dnnc.artifact.coding import WORD, Decoder, Patterns, coded_bytes, coded_words, stored_bytes
from dnnc.artifact.format import PAGE, REMEDY, Artifact, Section, open_artifact, write_artifact
from dnnc.artifact.manifest import SavedModel
from dnnc.backends.runtime.codec import decode
from dnnc.ir.dtype import BY_NAME
from dnnc.ir.errors import ArtifactError

LEAST = 256  # bytes of a constant that is a piece by itself
MOST_THREADS = 8  # that decode sections
LARGE = 32 << 10  # bytes of a kernel's code that are left out
ONE, MANIFEST, PATTERNS = "coded", "manifest", "patterns"
TEXTS = ("model", "graphs", "operator")  # sections that name the patterns of sparse weights


def write_compressed(path: str | os.PathLike[str] | BinaryIO, plain: io.BytesIO) -> None:
    """Write a saved model with coded sections. `plain`: the same without."""
    plain.seek(0)
    file = open_artifact(plain)
    model = decode(SavedModel, dict(file.manifest))
    words: dict[str, list[tuple[int, int]]] = {}
    for c in model.constants:
        if BY_NAME[c.dtype].bytes == WORD and c.place[1] >= LEAST:
            words.setdefault(c.section, []).append(c.place)
    manifest, gone = _without_large_code(file.manifest)
    table: list[Any] = []
    streams: list[bytes] = []
    patterns = Patterns()
    for name, s in file.sections.items():
        data, pieces = file.section(name), []
        if name == "objects" and gone:
            data = _blank(data, gone)
        for kind, at, size in _pieces(s.size, sorted(set(words.get(name, ())))):
            record, made = (patterns.coded_text if name in TEXTS else kind)(data[at : at + size])
            pieces.append(record)
            streams += made
        table.append([name, s.size, pieces])
    rest = json.dumps(manifest, separators=(",", ":")).encode()
    record, made = coded_bytes(rest)
    table.append([MANIFEST, len(rest), [record]])
    record, first = patterns.coded()
    table.insert(0, [PATTERNS, 0, [record]])
    write_artifact(path, {ONE: table}, [(ONE, b"".join([*first, *streams, *made]))])


def _without_large_code(manifest: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """The manifest without code that is as large as if it held weights (straight-line code of sparse products), which
    loading generates again; and where that code lies.
    """
    programs = [dict(p) for p in manifest["programs"]]
    gone = []
    for p in programs:
        gone += [(at, size) for at, size in p["code"].values() if size > LARGE]
        p["code"] = {symbol: place for symbol, place in p["code"].items() if place[1] <= LARGE}
    return {**manifest, "programs": programs}, gone


def _blank(data: memoryview, places: Sequence[tuple[int, int]]) -> memoryview:
    """A copy with zeros at some places."""
    out = bytearray(data)
    for at, size in places:
        out[at : at + size] = bytes(size)
    return memoryview(out)


def _pieces(size: int, places: Sequence[tuple[int, int]]) -> Iterator[tuple[Any, int, int]]:
    """How to code each part of a section, its offset and its bytes."""
    at = 0
    for start, n in places:
        if start < at:
            continue  # within one that was there
        if start > at:
            yield coded_bytes, at, start - at
        yield coded_words, start, n
        at = start + n
    if at < size or not size:
        yield coded_bytes, at, size - at


def expanded(file: Artifact) -> Artifact:
    """A file with its sections as they were before coding. ArtifactError where they cannot be had."""
    if ONE not in file.manifest:
        return file
    try:
        rows = [(str(name), int(size), list(pieces)) for name, size, pieces in file.manifest[ONE]]
        sections, at = {}, 0
        for name, size, _ in rows:
            if size < 0 or name in sections:
                raise ValueError(f"section {name!r} of {size} bytes")
            sections[name] = Section(name, at, size, "")
            at += -(-size // PAGE) * PAGE
        memory = mmap.mmap(-1, max(at, PAGE))
        out = np.frombuffer(memory, np.uint8)
        data, begins = file.section(ONE), [0]
        for _, _, pieces in rows:
            begins.append(begins[-1] + sum(map(stored_bytes, pieces)))
        patterns: Sequence[bytes] = ()

        def fill(row: int) -> Decoder:
            name, size, pieces = rows[row]
            decoder = Decoder(data, begins[row], patterns)
            left = out[sections[name].offset : sections[name].offset + size]
            try:
                for piece in pieces:
                    left = decoder.into(piece, left)
            except StopIteration:
                raise ValueError(f"section {name!r} lacks a stream") from None
            if left.size:
                raise ValueError(f"section {name!r} lacks {left.size} of its {size} bytes")
            return decoder

        first = [k for k, (name, _, _) in enumerate(rows) if name == PATTERNS]
        for k in first:
            patterns = fill(k).patterns
        with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_THREADS)) as pool:  # zlib and NumPy let others run
            list(pool.map(fill, [k for k in range(len(rows)) if k not in first]))
        rest = sections.pop(MANIFEST)
        sections.pop(PATTERNS, None)
        manifest = json.loads(out[rest.offset : rest.offset + rest.size].tobytes())
        if not isinstance(manifest, dict):
            raise ValueError("its manifest is no JSON object")
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, MemoryError, OSError, StopIteration) as e:
        raise ArtifactError(f"{file.path}: a coded section is not what it should be: {e}; {REMEDY}") from None
    return Artifact(file.path, manifest, sections, memoryview(memory).toreadonly())
