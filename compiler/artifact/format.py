"""The file of a saved model: named sections with checksums, and a JSON manifest (`dnnc.artifact.manifest`).

    page 0      magic, format, size of the file, place of the manifest and its checksum; checksum of the page at its end
    page 1...   sections, one behind the other, each filled with zeros to whole pages of 4 KB, so that it can be mapped
    the rest    the manifest: {"sections": [[name, offset, size, checksum], ...], ...}, to the end of the file

Numbers in page 0 are little endian. Every byte of the file is under one checksum, so any damage is found; and there is
one way only in which sections can lie, so a place that is out of range or overlaps another is found too. Checksums
guard against damage, not against intent: who can write the file can write its checksums.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dnnc.backends.runtime.frames import cpu_count
from dnnc.ir.errors import ArtifactError, a_type
from dnnc.ir.files import replacing

MAGIC = b"\x89dnnc\r\n\x1a"  # no text begins so, and a transfer that rewrites line ends breaks it
FORMAT = 3
CODED = 4  # of files whose sections are coded; see `dnnc.artifact.compressed`
SUFFIX = ".dnnc"
PAGE = 4096
CHUNK = 4 << 20  # bytes that are hashed at once: large sections are hashed by several threads
MAX_THREADS = 8
_HEAD = struct.Struct(
    "<8sIIQQQ32s"
)  # magic, format, 0, size of the file, offset and size of the manifest, its checksum
_DIGEST = hashlib.sha256().digest_size
REMEDY = "copy the file again, or save the model again"


@dataclass(frozen=True)
class Section:
    """A stretch of the file: `size` bytes from `offset` on."""

    name: str
    offset: int
    size: int
    checksum: str

    @property
    def end(self) -> int:
        """Where the next one begins."""
        return self.offset + _pages(self.size)


@dataclass(frozen=True)
class Artifact:
    """An open file. Sections stay valid while referenced: they are the file, mapped read-only, not copies."""

    path: str
    manifest: Mapping[str, Any]
    sections: Mapping[str, Section]
    data: memoryview

    def section(self, name: str) -> memoryview:
        """The bytes of a section. ArtifactError if there is none of that name."""
        s = self.sections.get(name)
        if s is None:
            raise ArtifactError(
                f"{self.path}: the manifest names a section {name!r}, the file has "
                f"{', '.join(self.sections) or 'none'}; {REMEDY}"
            )
        return self.data[s.offset : s.offset + s.size]


# --- writing ----------------------------------------------------------------------------------------------------------


def write_artifact(
    path: str | os.PathLike[str] | BinaryIO, manifest: Mapping[str, Any], sections: Sequence[tuple[str, Any]]
) -> None:
    """Write a file at once: readers see the old file or the new one.

    Args:
        path: where; its folder must exist. Or an open file that can seek.
        manifest: plain JSON data, written in the order of its keys.
        sections: (name, bytes or contiguous buffer), in order.

    Raises:
        ArtifactError: the file cannot be written, or another kind of file has this name.
    """
    if not isinstance(path, (str, os.PathLike)):
        if not all(hasattr(path, name) for name in ("write", "seek")):
            raise ArtifactError(f"cannot save to {a_type(path)}: expected a path, or a binary file that can seek")
        write_to(path, manifest, sections)
        return
    target = Path(path)
    _check_replaceable(target)
    try:
        with replacing(target) as file:
            write_to(file, manifest, sections)
    except OSError as e:
        raise ArtifactError(
            f"cannot write {target}: {e.strerror or e}; choose a folder that exists, may be written and has room"
        ) from None


def _check_replaceable(target: Path) -> None:
    """Raise ArtifactError where saving would overwrite a file that is no saved model, or is not named .dnnc."""
    if target.is_dir():
        raise ArtifactError(f"cannot write {target}: it is a folder; give the path of a file, such as model.dnnc")
    if target.suffix != SUFFIX and target.exists() and target.stat().st_size and not is_artifact(target):
        raise ArtifactError(
            f"{target} exists and is not a saved model, so it is not replaced; choose another name, such as model.dnnc"
        )


def write_to(file: BinaryIO, manifest: Mapping[str, Any], sections: Sequence[tuple[str, Any]]) -> None:
    """Write the bytes of a saved model to an open file that can seek."""
    _write(file, manifest, [(name, memoryview(data).cast("B")) for name, data in sections])


def _write(file: BinaryIO, manifest: Mapping[str, Any], sections: Sequence[tuple[str, memoryview]]) -> None:
    file.write(bytes(PAGE))
    table = []
    at = PAGE
    with ThreadPoolExecutor(
        min(cpu_count(), MAX_THREADS)
    ) as pool:  # hashing takes as long as writing, and leaves the interpreter's lock free
        checksums = [pool.submit(checksum, data) for _, data in sections]
        for (name, data), found in zip(sections, checksums):
            file.write(data)
            file.write(bytes(_pages(data.nbytes) - data.nbytes))
            table.append([name, at, data.nbytes, found.result()])
            at += _pages(data.nbytes)
    text = json.dumps({"sections": table, **manifest}, separators=(",", ":"), allow_nan=False).encode()
    file.write(text)
    file.seek(0)
    file.write(_first_page(at + len(text), at, text, CODED if "coded" in manifest else FORMAT))


def _first_page(size: int, at: int, manifest: bytes, version: int) -> bytes:
    head = _HEAD.pack(MAGIC, version, 0, size, at, len(manifest), hashlib.sha256(manifest).digest())
    page = head + bytes(PAGE - _DIGEST - len(head))
    return page + hashlib.sha256(page).digest()


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def checksum(data: memoryview) -> str:
    """Hex SHA-256 of the SHA-256s of the chunks of a section that is filled with zeros to whole pages."""
    return _combined([_chunk_digest(data, k) for k in range(0, max(data.nbytes, 1), CHUNK)])


def _combined(digests: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _chunk_digest(data: memoryview, at: int) -> bytes:
    part = data[at : at + CHUNK]
    h = hashlib.sha256(part)
    h.update(bytes(_pages(part.nbytes) - part.nbytes))
    return h.digest()


# --- reading ----------------------------------------------------------------------------------------------------------


def is_artifact(path: str | os.PathLike[str]) -> bool:
    """Does the file begin as a saved model does? False where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def open_artifact(path: str | os.PathLike[str] | BinaryIO) -> Artifact:
    """Map a file or copy an open one, checking every byte. ArtifactError: where it fails, and what was expected."""
    if isinstance(path, (str, bytes, os.PathLike)):
        name = os.fsdecode(path)
        data = _mapped(name)
    elif hasattr(path, "read"):
        name = str(getattr(path, "name", "the given bytes"))
        data = _in_memory(name, path.read())
    else:
        raise ArtifactError(
            f"a saved model is given by its path or as a binary file, got {a_type(path)}; expected what `save` wrote"
        )
    _check_head(name, data)
    _, _, _, size, at, length, digest = _HEAD.unpack_from(data)
    if size != data.nbytes:
        raise ArtifactError(
            f"{name}: the file should have {size} bytes and has {data.nbytes}: it is truncated or was added to; "
            f"{REMEDY}"
        )
    if at % PAGE or at < PAGE or at + length != size:
        raise ArtifactError(
            f"{name}: the manifest should lie behind the sections, up to byte {size}, and is said to lie at {at} with "
            f"{length}; {REMEDY}"
        )
    manifest = _manifest(name, data[at:size], digest)
    sections = _sections(name, manifest.pop("sections", None), at)
    _check_sections(name, data, sections)
    return Artifact(name, manifest, {s.name: s for s in sections}, data)


def _mapped(name: str) -> memoryview:
    try:
        with open(name, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            _check_start(name, file.read(len(MAGIC)), size)
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as e:
        raise ArtifactError(
            f"cannot read {name}: {getattr(e, 'strerror', None) or e}; expected a file that `save` wrote"
        ) from None


def _in_memory(name: str, data: bytes) -> memoryview:
    """A copy that begins at a page, as a mapped file does: kernels read constants at aligned addresses."""
    if not isinstance(data, bytes):
        raise ArtifactError(f"{name} gives text; open the file as binary, 'rb'")
    _check_start(name, data[: len(MAGIC)], len(data))
    pages = mmap.mmap(-1, len(data))
    pages[:] = data
    return memoryview(pages).toreadonly()


def _check_start(name: str, start: bytes, size: int) -> None:
    if start != MAGIC:
        what = "it is empty" if not start else f"it begins with {start.hex(' ')}, not with {MAGIC.hex(' ')}"
        raise ArtifactError(f"{name} is not a saved model of dnnc: {what}; give an .onnx model to dnnc.compile instead")
    if size < PAGE:
        raise ArtifactError(
            f"{name}: {size} bytes are less than the first page of {PAGE}: the file is truncated; {REMEDY}"
        )


def _check_head(name: str, data: memoryview) -> None:
    body = PAGE - _DIGEST
    if hashlib.sha256(data[:body]).digest() != data[body:PAGE]:
        raise ArtifactError(f"{name}: the first page is damaged: its checksum is not the one that it holds; {REMEDY}")
    found = _HEAD.unpack_from(data)[1]
    if found not in (FORMAT, CODED):
        how = "update dnnc" if found > CODED else "save the model again with this version"
        raise ArtifactError(
            f"{name} has format {found}, this version of dnnc reads formats {FORMAT} and {CODED}: {how}"
        )


def _manifest(name: str, text: memoryview, digest: bytes) -> dict[str, Any]:
    if hashlib.sha256(text).digest() != digest:
        raise ArtifactError(f"{name}: the manifest is damaged: its checksum is not the one on the first page; {REMEDY}")
    try:
        manifest = json.loads(text.tobytes())
    except (ValueError, RecursionError) as e:
        raise ArtifactError(f"{name}: the manifest is no JSON: {e}; {REMEDY}") from None
    if not isinstance(manifest, dict):
        raise ArtifactError(f"{name}: the manifest should be a JSON object and is {a_type(manifest)}; {REMEDY}")
    return manifest


def _sections(name: str, table: Any, end: int) -> list[Section]:
    """The sections, which fill the file from page 1 to the manifest without a gap."""
    out: list[Section] = []
    at = PAGE
    for row in table if isinstance(table, list) else [table]:
        s = Section(*row) if isinstance(row, list) and [type(x) for x in row] == [str, int, int, str] else None
        if s is None or s.size < 0:
            raise ArtifactError(
                f"{name}: a section should be [name, offset, size, checksum] and is {str(row)[:100]}; {REMEDY}"
            )
        if s.offset != at or s.end > end or any(s.name == x.name for x in out):
            raise ArtifactError(
                f"{name}: section {s.name!r} of {s.size} bytes at {s.offset} does not lie where it should, from {at} "
                f"on and before {end}; {REMEDY}"
            )
        out.append(s)
        at = s.end
    if at != end:
        raise ArtifactError(
            f"{name}: the sections end at {at}, the manifest begins at {end}: there is something between them; {REMEDY}"
        )
    return out


def _check_sections(name: str, data: memoryview, sections: Sequence[Section]) -> None:
    """All checksums, on several threads where that pays: hashing leaves the interpreter's lock free."""
    parts = [(k, at) for k, s in enumerate(sections) for at in range(0, max(s.size, 1), CHUNK)]
    digests: dict[tuple[int, int], bytes] = {}

    def work(first: int, step: int) -> None:
        for k, at in parts[first::step]:
            s = sections[k]  # with what fills its last page
            digests[k, at] = hashlib.sha256(data[s.offset + at : min(s.offset + at + CHUNK, s.end)]).digest()

    count = min(cpu_count(), MAX_THREADS, sum(s.size for s in sections) // CHUNK + 1)
    threads = [threading.Thread(target=work, args=(k, count)) for k in range(1, count)]
    for t in threads:
        t.start()
    work(0, count)
    for t in threads:
        t.join()
    for k, s in enumerate(sections):
        got = _combined([digests[part] for part in parts if part[0] == k])
        if got != s.checksum:
            raise ArtifactError(
                f"{name}: section {s.name!r} is damaged: its checksum is {got[:16]}..., expected {s.checksum[:16]}...; "
                f"{REMEDY}"
            )
