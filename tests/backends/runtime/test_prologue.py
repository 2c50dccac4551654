"""The compiled part of a prologue computes what NumPy does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dnnc.backends.runtime import prologue
from dnnc.backends.runtime.prologue import Prologue
from dnnc.ir.encodings import parse_encoding
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.types import ROW_MAJOR, Dense, TensorType, parse_layout

Array = np.ndarray[Any, Any]
ENCODINGS = {
    "matrix": ("f32[3, 20]", "1/16 0 1%16"),
    "levels": ("f32[9, 35]", "0/4 1/8 0%4 1/2%4 1%2"),
    "filters": ("f32[20, 5, 3, 3]", "0/16 1/16 2 3 1%16 0%16"),
    "half": ("f16[20, 5, 3, 3]", "0 2 3 1/8 1%8"),
    "winograd2": ("f32[20, 5, 3, 3]", "winograd2 2 3 0/16 1/16 1%16 0%16"),
    "winograd4": ("f32[20, 5, 3, 3]", "winograd4 2 3 0/16 1/16 1%16 0%16"),
}


def interpreted(part: Graph) -> Any:
    return lambda arrays: run(part, arrays)


@pytest.mark.parametrize("name", ENCODINGS)
def test_nodes_pack_as_numpy_does(name: str) -> None:
    dtype, text = ENCODINGS[name]
    p = parse(f"def p(w: {dtype}):\n    return relu(w)\n")
    v, encoding = p.outputs[0], parse_encoding(text)
    t = TensorType(v.type.dtype, v.type.shape, encoding)
    w = np.random.default_rng(0).standard_normal(v.type.shape).astype(v.type.dtype.numpy)  # type: ignore[arg-type]
    want = Prologue(p, (t,)).run({"w": w})[0]
    part = p.copy()
    part.outputs = list(encoding.pack_nodes(Builder(part), part.outputs[0]) or ())
    (got,) = run(part, [w])
    assert [str(y.type) for y in part.outputs] == [str(t.buffer)] and got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=0, atol=0 if "winograd" not in name else 1e-6)


def test_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large arrays that kernels can compute, once for equal graphs; not what is read as it is given."""
    text = """
def p(w: f32[16, 8], s: f32[8], z: f32[4, 64]):
    t: f32[8, 16] = transpose(w, perm=(1, 0))
    u: f32[8] = mul(s, 2.0)
    return t, u, s, w, z
"""
    p = parse(text)
    lays = [parse_encoding("1/16 0 1%16"), ROW_MAJOR, ROW_MAJOR, ROW_MAJOR, parse_encoding("1 0")]
    types = tuple(TensorType(v.type.dtype, v.type.shape, e) for v, e in zip(p.outputs, lays))
    monkeypatch.setattr(prologue, "LEAST", 256)
    compiled: list[Graph] = []
    known: dict[str, Any] = {}

    def compile(part: Graph) -> Any:
        compiled.append(part)
        return interpreted(part)

    for _ in range(2):
        made = Prologue(p, types).compiled(compile, known)
    assert made.kernels is not None and len(compiled) == 1
    assert (made.kernels.inputs, made.kernels.numbers) == (("w", "z"), (0, 4))
    rng = np.random.default_rng(0)
    given = {v.name: rng.standard_normal(v.type.shape).astype(np.float32) for v in p.inputs}  # type: ignore[arg-type]
    table, want = made.run(given), Prologue(p, types).run(given)
    assert table[2] is given["s"] and table[3] is given["w"] and sorted(made.by_numpy(given)) == [1, 2, 3]
    for a, b in zip(table, want):
        np.testing.assert_array_equal(a, b)


def test_what_is_left_to_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host ops, encodings without nodes, and small arrays."""
    p = parse("def p(w: f32[64], k: i64):\n    return truncate(w, k, size=32), exp(w), exp(w), relu(k)\n")
    plain = tuple(v.type for v in p.outputs)
    shaped = TensorType(plain[1].dtype, (64,), Opaque(parse_layout("0/16 0%16")))
    monkeypatch.setattr(prologue, "LEAST", 64)
    made = Prologue(p, (*plain[:2], shaped, plain[3])).compiled(interpreted, {})
    assert made.kernels is not None and made.kernels.numbers == (1,) and made.kernels.inputs == ("w",)


class Opaque(Dense):
    """A layout that only NumPy packs."""

    def pack_nodes(self, b: Any, x: Any) -> None:
        return None
