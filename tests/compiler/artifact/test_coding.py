"""Coded sections: any words come back to the bit, files are small, damage is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.artifact.coding import Decoder, Patterns, coded_bytes, coded_words
from dnnc.artifact.compressed import expanded
from dnnc.artifact.format import Artifact, open_artifact, write_artifact
from dnnc.ir.errors import ArtifactError
from dnnc.ir.sparse import Sparse

RNG = np.random.default_rng(0)


def back(record: Any, streams: list[bytes], size: int) -> np.ndarray:
    out = np.zeros(size, np.uint8)
    assert Decoder(memoryview(b"".join(streams))).into(json.loads(json.dumps(record)), out).size == 0
    return out


def sparse(n: int, density: float, values: int) -> np.ndarray:
    table = RNG.standard_normal(values).astype(np.float32)
    return np.where(RNG.random(n) < density, table[RNG.integers(0, values, n)], np.float32(0))


@pytest.mark.parametrize("density", [0.0, 0.001, 0.1, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("values", [1, 2, 15, 16, 17, 256, 257, 5000])
def test_words_come_back(density: float, values: int) -> None:
    for n in (1, 7, 4097):
        w = sparse(n, density, values)
        assert (back(*coded_words(w.data), w.nbytes).view(np.float32) == w).all()


def test_special_floats_keep_their_bits() -> None:
    w = np.array([np.nan, -0.0, 0.0, np.inf, -np.inf, 1e-45, 3.0], np.float32)
    w[0:1].view(np.uint32)[:] |= 0x1234
    assert (back(*coded_words(w.data), w.nbytes) == w.view(np.uint8)).all()
    far = np.zeros(5000, np.float32)
    far[[0, 254, 509, 510, 766, 4999]] = 1.0  # distances on both sides of a byte
    assert (back(*coded_words(far.data), far.nbytes).view(np.float32) == far).all()


@pytest.mark.parametrize("data", [b"", b"a", b"abc" * 1000, RNG.bytes(999)])
def test_bytes_come_back(data: bytes) -> None:
    record, streams = coded_bytes(data)
    assert back(record, streams, len(data)).tobytes() == data and len(streams[0]) <= len(data)


def test_pruned_and_shared_weights_take_less_than_a_bit() -> None:
    w = sparse(200_000, 0.08, 15)
    _, streams = coded_words(w.data)
    entropy = -(0.92 * np.log2(0.92) + 0.08 * np.log2(0.08)) + 0.08 * np.log2(15)
    assert sum(map(len, streams)) * 8 / w.size < 1.03 * entropy + 0.005


@pytest.mark.parametrize("change", [
    lambda p: p.__setitem__(0, "w"), lambda p: p.__setitem__(1, 10**12), lambda p: p.__setitem__(1, -1),
    lambda p: p.__setitem__(2, 3), lambda p: p.__setitem__(3, 2), lambda p: p.__setitem__(4, 1),
    lambda p: p[5].pop(), lambda p: p[5][0].__setitem__(1, -4), lambda p: p[5][0].__setitem__(2, 7),
    lambda p: p[5][2].__setitem__(1, 10**6), lambda p: p.__setitem__(5, None), lambda p: p.clear(),
])  # fmt: skip
def test_wrong_records_are_errors(change: Any) -> None:
    w = sparse(1000, 0.1, 15)
    record, streams = coded_words(w.data)
    change(record)
    manifest = {"coded": [["a", w.nbytes, [record]], ["manifest", 2, [["bytes", [0, 2, 2]]]]]}
    file = Artifact("f", manifest, {"coded": open_section(streams)}, memoryview(b"".join([*streams, b"{}"])))
    with pytest.raises(ArtifactError, match="coded section is not what it should be"):
        expanded(file)


def open_section(streams: list[bytes]) -> Any:
    from dnnc.artifact.format import Section

    return Section("coded", 0, sum(map(len, streams)) + 2, "")


def test_a_file_of_another_tool(tmp_path: Path) -> None:
    write_artifact(tmp_path / "f", {"coded": "no"}, [("coded", b"")])
    with pytest.raises(ArtifactError, match="coded section"):
        expanded(open_artifact(tmp_path / "f"))


@pytest.mark.slow
def test_a_compressed_model(tmp_path: Path) -> None:
    p = dnnc.prune("examples/digits.onnx", sparsity=0.9, scope="lamp", bits=5, measure=False)
    f = p.compile(dims={"N": 12})
    x = np.load("examples/digits_samples.npz")["images"]
    want = f(x)
    f.save(tmp_path / "c.dnnc", compress=True)
    f.save(tmp_path / "s.dnnc", small=True)
    p.save(tmp_path / "p.dnnc", compress=True)
    g = dnnc.load(tmp_path / "c.dnnc")
    assert (g(x) == want).all() and (dnnc.load(tmp_path / "c.dnnc", code=False)(x) == want).all()
    sizes = [(tmp_path / n).stat().st_size for n in ("c.dnnc", "s.dnnc")]
    assert 5 * sizes[0] < sizes[1] and dnnc.load(tmp_path / "p.dnnc")(x).shape == (12, 10)
    g.save(tmp_path / "again.dnnc")
    assert (dnnc.load(tmp_path / "again.dnnc")(x) == want).all()
    data = bytearray((tmp_path / "c.dnnc").read_bytes())
    data[5000] ^= 1
    (tmp_path / "d.dnnc").write_bytes(data)
    with pytest.raises(ArtifactError, match="damaged"):
        dnnc.load(tmp_path / "d.dnnc")


def test_patterns_of_sparse_weights_are_stored_once() -> None:
    p = Sparse.of(sparse(64 * 64, 0.2, 5).reshape(64, 64), 0)
    text = f'def g(*, w: f32[64, 64] @ "{p}"):\n    y = neg(w @ "{p}")\n'.encode()
    table = Patterns()
    record, streams = table.coded_text(text)
    first, patterns = table.coded()
    assert len(patterns) == 1 and sum(map(len, streams)) < 150
    data = memoryview(b"".join([*patterns, *streams]))
    for head, ok in ((first, True), (["patterns", []], False)):
        decoder, out = Decoder(data), np.zeros(len(text), np.uint8)
        decoder.into(head, out)
        if ok:
            assert decoder.into(record, out).size == 0 and out.tobytes() == text
            continue
        with pytest.raises((ValueError, IndexError)):
            decoder.into(record, out)
    assert table.coded_text(b"a\0b")[0][0] == "bytes"
