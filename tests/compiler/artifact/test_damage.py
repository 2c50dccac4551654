"""Files that are damaged or of other kinds: each is refused with a reason."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from saved_models import MODELS, linear

import dnnc
from dnnc.artifact.format import FORMAT, MAGIC, PAGE
from dnnc.executable import Executable
from dnnc.tools.sample_graphs import graph_of


def test_flipped_bits_and_truncation_are_found(path: Path) -> None:
    dnnc.compile(graph_of(MODELS["views"])).save(path)
    data = path.read_bytes()
    rng = np.random.default_rng(1)
    for at in rng.integers(0, len(data), 150).tolist():
        broken = bytearray(data)
        broken[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(broken)
        with pytest.raises(dnnc.ArtifactError, match=r"model\.dnnc"):
            dnnc.load(path)
    for size in rng.integers(0, len(data), 20).tolist():
        path.write_bytes(data[:size])
        with pytest.raises(dnnc.ArtifactError, match=r"model\.dnnc"):
            dnnc.load(path)


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    """Another manifest, with checksums that fit."""
    data = path.read_bytes()
    at = struct.unpack_from("<8sIIQQQ32s", data)[4]
    manifest = json.loads(data[at:])
    change(manifest)
    text = json.dumps(manifest).encode()
    head = struct.pack("<8sIIQQQ32s", MAGIC, FORMAT, 0, at + len(text), at, len(text), hashlib.sha256(text).digest())
    page = head + bytes(PAGE - 32 - len(head))
    path.write_bytes(page + hashlib.sha256(page).digest() + data[PAGE:at] + text)


def setter(*keys: Any) -> Callable[[Any], None]:
    """Sets the last of the keys, at the place that those before lead to."""
    *path, last, value = keys

    def change(m: Any) -> None:
        for k in path:
            m = m[k]
        m[last] = value

    return change


PROGRAM = ("programs", 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("kind"), "the whole: expected an object with code_version, constants, .*, got an object with"),
        (
            setter("kind", "tree"),
            "a model of kind 'tree', expected programs, graph, onnx; update dnnc",
        ),
        (setter("inputs", {}), "inputs: expected a list, got an object"),
        (setter("inputs", ["x", 3]), r"inputs\[1\]: expected text, got 3"),
        (setter("inputs", []), "the signature is not what it should be"),
        (setter("input_types", "def g(x: f32[2, 3):"), r"the types of the inputs is not what it should be: line 1"),
        (setter("input_types", "def g(x" + "(" * 300), "the types of the inputs"),
        (setter("options", {"dims": 7}), "the options in the manifest"),
        (setter("options", {"numerics": "lax"}), "the options in the manifest .*numerics='lax'"),
        (setter("options", {"other": 1}), "the options in the manifest"),
        (
            setter(
                "machine",
                "avx2",
            ),
            r"machine: expected an object, got",
        ),
        (setter(*PROGRAM, "sizes", [1 << 70]), r"programs\[0\].sizes\[0\]: expected a 64-bit integer"),
        (setter(*PROGRAM, "calls", 0, "kernel", 99), "a call is not what it should be: it is of kernel 99"),
        (
            setter(*PROGRAM, "calls", 0, "kernel", True),
            r"programs\[0\].calls\[0\].kernel: expected a 64-bit integer, got True",
        ),
        (setter(*PROGRAM, "calls", 0, "dims", [0]), "a call is not what it should be"),
        (setter(*PROGRAM, "calls", 0, "args", [["arena", 77, 0, 0, 0]]), "it reads arena 77, of which there are"),
        (setter(*PROGRAM, "calls", 0, "args", [["moon", 0, 0, 0, 0]]), "it reads moon 0, of which there are 0"),
        (
            setter(*PROGRAM, "code", "entry", [0, 1 << 60]),
            "names bytes 0 to 1152921504606846976 of section 'objects', which has",
        ),
        (setter(*PROGRAM, "code", "entry", [-4, 8]), "names bytes -4 to 4 of section 'objects'"),
        (
            setter(*PROGRAM, "code", "entry", [8, 0]),
            "section 'objects' is not what it should be: not a 64-bit little-endian ELF object",
        ),
        (setter(*PROGRAM, "code", "entry", [0]), r"entry.*: expected a list of 2, got \[0\]"),
        (setter(*PROGRAM, "constants", "moon"), "names a section 'moon', the file has"),
        (setter(*PROGRAM, "types", "def g(a: f32): return"), "the types of a program is not what it should be"),
        (setter(*PROGRAM, "lives", []), "the types of a program is not what it should be"),
        (setter(*PROGRAM, "outputs", -3), "the types of a program is not what it should be"),
        (
            setter(*PROGRAM, "kernels", 0, "flops", None),
            r"programs\[0\].kernels\[0\].flops: expected a 64-bit integer, got None",
        ),
        (setter(*PROGRAM, "code", "entry", [16, 64]), "section 'objects' is not what it should be"),
    ],
)
def test_manifests_that_are_not_what_they_should_be(
    change: Callable[[Any], Any], message: str, net: Executable, path: Path
) -> None:
    net.save(path)
    rewrite(path, change)
    with pytest.raises(dnnc.ArtifactError, match=rf"model\.dnnc: .*{message}"):
        dnnc.load(path)


def test_a_graph_that_is_not_what_it_should_be(net: Executable, path: Path) -> None:
    for change, message in [
        (setter("constants", 0, "dtype", "f33"), r"a constant f33\[.*\] in section"),
        (setter("constants", 0, "shape", [1, 2]), r"a constant f32\[1, 2\] in section"),
        (setter("constants", []), "the graph is not what it should be: .*the data of constant w"),
    ]:
        net.save(path)
        rewrite(path, change)
        g = dnnc.load(path)  # the graph is not read
        with pytest.raises(dnnc.ArtifactError, match=message):
            print(g.graph)
        with pytest.raises(dnnc.ArtifactError, match=message):
            dnnc.load(path, code=False)


def test_files_of_other_kinds(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(linear(4).SerializeToString())
    with pytest.raises(
        dnnc.ArtifactError,
        match=r"m\.onnx is not a saved model of dnnc: .*; give an \.onnx model to dnnc\.compile instead",
    ):
        dnnc.load(tmp_path / "m.onnx")
    with pytest.raises(dnnc.ArtifactError, match="cannot write"):
        dnnc.compile(linear(4)).save(tmp_path / "no" / "m.dnnc")
