"""The container of saved models: sections come back, every damaged byte is found, bad tables are refused."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dnnc.artifact.format as artifact
from dnnc.artifact.format import CHUNK, CODED, FORMAT, MAGIC, PAGE, checksum, is_artifact, open_artifact, write_artifact
from dnnc.ir.errors import ArtifactError

SECTIONS = [
    ("text", b"abc"),
    ("empty", b""),
    ("page", bytes(range(256)) * 16),
    ("array", np.arange(3000, dtype=np.float32)),
]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "m.dnnc"
    write_artifact(path, {"a": [1, {"b": "ä"}]}, SECTIONS)
    return path


def rewritten(path: Path, change: Callable[[dict[str, Any]], Any], format: int = FORMAT) -> None:
    """The file with another manifest, all checksums of the head made to fit."""
    data = path.read_bytes()
    at = struct.unpack_from("<8sIIQQQ32s", data)[4]
    manifest = json.loads(data[at:])
    changed = change(manifest)
    text = changed if isinstance(changed, bytes) else json.dumps(manifest if changed is None else changed).encode()
    head = struct.pack("<8sIIQQQ32s", MAGIC, format, 0, at + len(text), at, len(text), hashlib.sha256(text).digest())
    page = head + bytes(PAGE - 32 - len(head))
    path.write_bytes(page + hashlib.sha256(page).digest() + data[PAGE:at] + text)


# --- what comes back --------------------------------------------------------------------------------------------------


def test_sections_and_manifest_come_back(saved: Path) -> None:
    a = open_artifact(saved)
    assert a.manifest == {"a": [1, {"b": "ä"}]}
    assert list(a.sections) == ["text", "empty", "page", "array"]
    for name, data in SECTIONS:
        assert bytes(a.section(name)) == bytes(data)
        assert a.sections[name].offset % PAGE == 0
    assert is_artifact(saved) and not is_artifact(saved.parent / "none")


def test_sections_are_the_file_itself_and_read_only(saved: Path) -> None:
    x = np.frombuffer(open_artifact(saved).section("array"), np.float32)  # keeps the mapping alive
    assert x.ctypes.data % 64 == 0 and not x.flags.writeable and x[2999] == 2999
    saved.unlink()
    assert x.sum() == np.arange(3000).sum()


def test_the_same_content_is_the_same_file(saved: Path, tmp_path: Path) -> None:
    write_artifact(tmp_path / "again", {"a": [1, {"b": "ä"}]}, SECTIONS)
    assert (tmp_path / "again").read_bytes() == saved.read_bytes()


@pytest.mark.slow
def test_large_sections_are_hashed_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.arange(2 * CHUNK // 8 + 77, dtype=np.int64)
    write_artifact(tmp_path / "big", {}, [("small", b"x"), ("big", data)])
    for threads in (1, 3):
        monkeypatch.setattr(artifact, "cpu_count", lambda n=threads: n)
        assert bytes(open_artifact(tmp_path / "big").section("big")) == data.tobytes()
    padded = data.tobytes() + bytes(-data.nbytes % PAGE)
    digests = b"".join(hashlib.sha256(padded[k : k + CHUNK]).digest() for k in range(0, len(padded), CHUNK))
    assert checksum(data.data.cast("B")) == hashlib.sha256(digests).hexdigest() and len(digests) == 3 * 32


def test_a_section_that_is_not_there(saved: Path) -> None:
    with pytest.raises(ArtifactError, match="names a section 'code', the file has text, empty, page, array"):
        open_artifact(saved).section("code")


# --- writing ----------------------------------------------------------------------------------------------------------


def test_a_write_that_fails_leaves_the_old_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(os, "fsync", full)
        with pytest.raises(ArtifactError, match=r"cannot write .*m\.dnnc: No space left on device"):
            write_artifact(saved, {}, [("text", b"new")])
    assert saved.read_bytes() == before and os.listdir(saved.parent) == ["m.dnnc"]
    write_artifact(saved, {}, [("text", b"new")])
    assert bytes(open_artifact(saved).section("text")) == b"new" and os.listdir(saved.parent) == ["m.dnnc"]


def test_a_file_in_use_may_be_replaced(saved: Path) -> None:
    old = open_artifact(saved)
    write_artifact(saved, {}, [("text", b"new")])
    assert bytes(old.section("text")) == b"abc"


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"cannot write .*no.m\.dnnc: No such file or directory; choose a folder"):
        write_artifact(tmp_path / "no" / "m.dnnc", {}, [])


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_any_flipped_bit_is_found(saved: Path) -> None:
    data = saved.read_bytes()
    rng = np.random.default_rng(0)
    places = {*range(64), PAGE - 1, PAGE, len(data) - 1, *rng.integers(0, len(data), 400).tolist()}
    for at in sorted(places):
        broken = bytearray(data)
        broken[at] ^= 1 << (at % 8)
        saved.write_bytes(broken)
        with pytest.raises(ArtifactError, match=r"m\.dnnc.*(damaged|not a saved model)"):
            open_artifact(saved)


def test_any_truncation_is_found(saved: Path) -> None:
    data = saved.read_bytes()
    for size in (0, 1, 7, 8, 63, 64, 4095, 4096, 4097, *range(5000, len(data), 1511), len(data) - 1):
        saved.write_bytes(data[:size])
        with pytest.raises(ArtifactError, match=r"m\.dnnc.*(truncated|not a saved model)"):
            open_artifact(saved)
    saved.write_bytes(data + b"\0")
    with pytest.raises(ArtifactError, match=f"should have {len(data)} bytes and has {len(data) + 1}"):
        open_artifact(saved)


def test_what_is_damaged_is_named(saved: Path) -> None:
    data = saved.read_bytes()
    section = open_artifact(saved).sections["page"]
    for at, what in (
        (100, "the first page is damaged"),
        (section.offset + 5, "section 'page' is damaged"),
        (len(data) - 3, "the manifest is damaged"),
    ):
        broken = bytearray(data)
        broken[at] ^= 255
        saved.write_bytes(broken)
        with pytest.raises(ArtifactError, match=f"{what}.*; copy the file again, or save the model again"):
            open_artifact(saved)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a saved model of dnnc: it is empty"),
        (
            b"\x08\x07onnx",
            "it begins with 08 07 6f 6e 6e 78, not with 89 64 6e 6e 63 0d 0a 1a; give an .onnx model to dnnc.compile "
            "instead",
        ),
        (MAGIC.replace(b"\r\n", b"\n") + bytes(5000), "not a saved model"),
        (MAGIC + bytes(5000), "the first page is damaged"),
    ],
)
def test_other_files(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "m").write_bytes(content)
    with pytest.raises(ArtifactError, match=message):
        open_artifact(tmp_path / "m")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"cannot read .*none: No such file"):
        open_artifact(tmp_path / "none")
    with pytest.raises(ArtifactError, match=r"cannot read .*: Is a directory"):
        open_artifact(tmp_path)


def test_other_formats(saved: Path) -> None:
    rewritten(saved, lambda m: None, CODED + 1)
    with pytest.raises(
        ArtifactError,
        match=f"has format {CODED + 1}, this version of dnnc reads formats {FORMAT} and {CODED}: upd",
    ):
        open_artifact(saved)
    rewritten(saved, lambda m: None)
    assert list(open_artifact(saved).sections) == ["text", "empty", "page", "array"]


# --- tables that fit their checksums and are wrong --------------------------------------------------------------------


def test_places_of_sections(saved: Path) -> None:
    original = saved.read_bytes()

    def move(k: int, field: int, by: int) -> Callable[[dict[str, Any]], None]:
        def change(m: dict[str, Any]) -> None:
            m["sections"][k][field] += by

        return change

    for change, message in [
        (move(0, 1, PAGE), "section 'text' of 3 bytes at 8192 does not lie where it should, from 4096 on"),
        (move(2, 1, -PAGE), "section 'page' of 4096 bytes at 4096"),  # overlaps
        (move(3, 2, 1 << 62), "section 'array'"),  # out of range
        (move(3, 2, 10**30), "section 'array'"),
        (move(3, 2, -PAGE), "the sections end at 20480, the manifest begins at 24576: there is something between them"),
        (move(0, 2, -4), r"should be \[name, offset, size, checksum\] and is"),
        (lambda m: m["sections"].append(m["sections"][1]), "section 'empty'"),
        (lambda m: m["sections"].__delitem__(3), "there is something between them"),
    ]:
        saved.write_bytes(original)
        rewritten(saved, change)
        with pytest.raises(ArtifactError, match=message):
            open_artifact(saved)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (b"[" * 100_000, "the manifest is no JSON"),
        (b"{", "the manifest is no JSON"),
        (b"\xff\xfe", "the manifest is no JSON"),
        (b'{"sections": ' + b"9" * 5000 + b"}", "the manifest is no JSON"),
        (b"[1, 2]", "should be a JSON object and is a list"),
        (b"{}", r"should be \[name, offset, size, checksum\] and is None"),
        (b'{"sections": {"a": 1}}', "and is {'a': 1}"),
        (b'{"sections": [["a", 4096.0, 0, ""]]}', "4096.0"),
        (b'{"sections": [["a", true, 0, ""]]}', "True"),
        (b'{"sections": [7]}', "and is 7"),
    ],
)
def test_manifests_of_another_kind(saved: Path, manifest: bytes, message: str) -> None:
    rewritten(saved, lambda m: manifest)
    with pytest.raises(ArtifactError, match=message):
        open_artifact(saved)
