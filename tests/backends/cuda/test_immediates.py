"""Products whose weights are a part of the code: the interpreter against float64, PTX through the assembler, choice."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.backends.cuda import immediate_rows, sparse_weights
from dnnc.backends.cuda.emit import emit_kernel
from dnnc.backends.cuda.nvrtc import compile_cuda
from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.contraction import immediates
from dnnc.ir.dtype import f32
from dnnc.ir.errors import VerifyError
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.stmt import ImmediateRows, Kernel, walk_stmts
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.ir.sparse import Sparse
from dnnc.ir.types import TensorType, tensor
from dnnc.passes.lower.nests import lower
from dnnc.passes.schedule.problem import Problem, classify
from dnnc.passes.schedule.state import replace_stmt

H200 = GpuTarget()
Array = Any


def problem(w: Array, x: tuple[int, ...], rows: int) -> Problem:
    """w @ x, or a convolution that keeps the size of an image."""
    g = Graph("g")
    a = g.add_input("x", tensor(f32, *x))
    v = g.add_input("w", TensorType(f32, w.shape, immediates.encoding_of(w, 0, rows)))
    near = w.shape[-1] // 2
    g.outputs = [Builder(g).matmul(v, a) if w.ndim == 2 else Builder(g).conv(a, v, pads=(near,) * 4)]
    nodes = list(g.nodes())
    return classify(nodes, lower(g, nodes, g.outputs), frozenset((v,)))


def result(p: Problem, kernel: Kernel, w: Array, x: Array) -> Array:
    """What the interpreter makes of a kernel."""
    encoding = next(v.type.encoding for v in p.lowered.params if v.name == "w")
    given = {"w": encoding.pack(w)[0], "x": x}
    names = [b.name for b in p.kernel.entry.buffers]
    arrays = {n: given[v.name] for n, v in zip(names, p.lowered.params[:-1])}
    arrays[names[-1]] = np.full(p.lowered.params[-1].type.physical, np.nan, np.float32)
    run_kernel(kernel, arrays)
    return arrays[names[-1]].reshape(p.lowered.params[-1].type.shape)


def expected(w: Array, x: Array) -> Array:
    """In float64; a weight of 0 has no term."""
    if w.ndim == 2:
        return np.stack([(r[r != 0, None].astype(np.float64) * x[r != 0]).sum(0) for r in w])
    near = w.shape[-1] // 2
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (near, near), (near, near)))
    return np.einsum("nchwyx,ocyx->nohw", np.lib.stride_tricks.sliding_window_view(padded, w.shape[2:], (2, 3)), w)


@pytest.mark.parametrize("number", range(8))
def test_random_kernels(number: int) -> None:
    """Sizes that nothing divides, windows; rows that are empty, full or alone; values that are not numbers; texts."""
    rng = np.random.default_rng([number, *os.environ["DNNC_TEST_SEED"].encode()])
    rows, terms, size = int(rng.integers(2, 70)), int(rng.integers(2, 30)), int(rng.choice([1, 3]))
    shape = (rows, terms) if number % 2 else (rows, int(rng.integers(2, 6)), size, size)
    w = np.where(rng.random(shape) < rng.random() ** 2, rng.standard_normal(shape), 0).astype(np.float32)
    w[rng.integers(rows, size=rows // 3)] = 0
    w[rng.integers(rows)] = 1
    where = (terms, int(rng.integers(2, 150))) if number % 2 else (2, shape[1], *map(int, rng.integers(3, 9, 2)))
    x = rng.standard_normal(where).astype(np.float32)
    if number == 1:
        w[0, 1], x[0, 0] = np.nan, np.inf
    p = problem(w, where, group := int(rng.choice([16, 32, 64])))
    knobs = dict(immediates.space(p, H200)[int(rng.integers(6))])
    kernel = verify_kernel(immediates.apply(p, knobs, H200))
    assert show_kernel(parse_kernel(show_kernel(kernel))) == show_kernel(kernel)
    with np.errstate(invalid="ignore"):
        got, want = result(p, kernel, w, x), expected(w, x)
    limit = 1e-5 * max(np.abs(want[np.isfinite(want)]).max(), 1e-30)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=limit, err_msg=str((shape, where, group, knobs)))


CASES = {
    "second factor": ("f32[33, 40]", "f32[40, 24]", "matmul(x, w)", 1),
    "first factor": ("f32[20, 50]", "f32[24, 20]", "matmul(w, x)", 0),
    "images": ("f32[2, 14, 5, 8]", "f32[18, 14, 1, 1]", "conv(x, w)", 0),
    "windows": ("f32[2, 5, 6, 8]", "f32[20, 5, 3, 3]", "conv(x, w, pads=(1, 1, 1, 1))", 0),
}


@pytest.mark.parametrize("case", CASES)
def test_programs(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an epilogue, as the compiler chooses and checks them; the report says so."""
    monkeypatch.setattr(sparse_weights, "CODE_OVER_GATHER", 0.0)
    monkeypatch.setattr(sparse_weights, "CODE_GAIN", 0.0)
    monkeypatch.setattr(sparse_weights, "best_bundles", lambda *_: (math.inf, None))
    rng, (x, w, op, axis) = np.random.default_rng(0), CASES[case]
    sizes = [tuple(map(int, re.findall(r"\d+", t[3:]))) for t in (x, w)]
    weights = np.where(rng.random(sizes[1]) < 0.15, rng.standard_normal(sizes[1]), 0).astype(np.float32)
    np.moveaxis(weights, axis, 0)[2] = 0
    g = parse(f"def g(x: {x}, *, w: {w}):\n    return relu({op})\n", {"w": weights})
    data = rng.standard_normal(sizes[0]).astype(np.float32)
    f = dnnc.compile(g, target="cuda-interpreted", cache=False)
    assert any(k.choice.startswith("immediates(") for k in f.report.programs[-1].kernels), f.report
    assert "in a piece of code" in str(f.report)
    rows, columns = (weights, data) if axis == 0 else (weights.T, data.T)
    want = np.maximum(expected(rows, columns), 0)
    np.testing.assert_allclose(f(data), want if axis == 0 else want.T, rtol=1e-5, atol=1e-5)


def test_elements_are_operands_of_instructions() -> None:
    """One multiply-add each, one load for each column that a group uses; assembled without memory of its own."""
    rng = np.random.default_rng(1)
    w = np.where(rng.random((40, 24)) < 0.2, rng.standard_normal((40, 24)), 0).astype(np.float32)
    p = problem(w, (24, 100), 32)
    kernel = immediates.apply(p, dict(immediates.candidates(p, H200)[0]), H200)
    text = emit_kernel(kernel, "kernel", H200)
    assert text.count("fma.rn.f32") == np.count_nonzero(w)
    assert text.count("ld.global.b32") == sum(int(w[k : k + 32].any(0).sum()) for k in (0, 32))
    assert all(f"0f{word:08X}" in text for word in w[w != 0].view(np.uint32).tolist())
    made = compile_cuda(text, "sm_90a")
    assert made.spills == made.local_bytes == 0


def test_columns_are_loaded_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(immediate_rows, "CHUNK", 2)
    w = np.eye(5, dtype=np.float32) + np.eye(5, k=1, dtype=np.float32)
    p = problem(w, (5, 40), 16)
    text = emit_kernel(immediates.apply(p, {"warps": 4, "tiles": 0}, H200), "kernel", H200)
    order = re.findall(r"(ld.global.b32|fma.rn.f32 %\d+,) x?(\d)", text)
    order = ["load" if kind.startswith("ld") else "add" for kind, _ in order]
    assert order[:5] == ["load"] * 4 + ["add"] and order.index("add") < len(order) - order[::-1].index("load")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": b""}, "0 bytes of values"),
        ({"rows": 64}, "sums"),
        ({"axis": 2}, "not as far from each other"),
        ({"args": ()}, "takes an address"),
    ],
)
def test_statements_that_are_refused(change: dict[str, Any], message: str) -> None:
    w = np.eye(20, 12, dtype=np.float32)
    p = problem(w, (12, 40), 16)
    kernel = immediates.apply(p, {"warps": 4, "tiles": 0}, H200)
    found = next(s for s in walk_stmts(kernel.entry.body) if isinstance(s, ImmediateRows))
    broken = kernel.with_body(replace_stmt(kernel.entry.body, found, lambda: (replace(found, **change),)))
    with pytest.raises(VerifyError, match=message):
        verify_kernel(broken)


def test_elements_are_a_part_of_the_encoding() -> None:
    rng = np.random.default_rng(2)
    w = np.where(rng.random((20, 6, 3, 3)) < 0.2, rng.standard_normal((20, 6, 3, 3)), 0).astype(np.float32)
    e = immediates.encoding_of(w, 0, 16)
    assert Sparse.parse(str(e)) == e and e.kind != immediates.encoding_of(2 * w, 0, 16).kind
    np.testing.assert_array_equal(e.held(np.ones_like(w)), w)  # a check has no other weights


def test_too_much_code() -> None:
    """Too many elements, in any group; too many loads in small groups."""
    dense = np.ones((256, immediates.MOST // 256 + 1), np.bool_)
    assert immediates.best(immediates.Work(1 << 16, 1, dense), H200)[0] == math.inf
    assert immediates.best(immediates.Work(1 << 16, 1, dense[:128]), H200)[0] < math.inf
    diagonal = immediates.Work(64, 1, np.tile(np.eye(64, dtype=np.bool_), (4, 127)))
    assert immediates.best(diagonal, H200)[1] == 128
