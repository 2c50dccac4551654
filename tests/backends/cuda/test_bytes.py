"""Products of bytes: exact sums by warp instructions, warp groups and dp4a, interpreted and compiled; QDQ models."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.backends.cuda.emit import emit_module
from dnnc.backends.cuda.nvrtc import compile_cuda
from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.contraction import gemv, mma, wgmma
from dnnc.ir.dtype import f32, i32
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.stmt import Kernel
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.ir.types import tensor
from dnnc.passes.base import PassContext
from dnnc.passes.lower.nests import Lowered, lower
from dnnc.passes.planning.fuse import plan_fusion
from dnnc.passes.rewrites.decompose import decompose
from dnnc.passes.schedule.problem import Problem, classify

H200 = GpuTarget()
MMA = {"bm": 32, "bn": 32, "down": 1, "across": 2, "bk": 32, "stages": 3, "slices": 1}
WGMMA = {"bm": 64, "bn": 128, "stages": 2, "group": 8, "split": 1, "resident": 1}
RNG = np.random.default_rng(0)


def problem(text: str) -> tuple[Graph, Lowered, Problem]:
    """The one group of a graph, lowered."""
    g = parse(text)
    decompose(g, PassContext())
    (group,) = plan_fusion(g).groups
    low = lower(g, group.nodes, group.outputs)
    return g, low, classify(group.nodes, low)


def drawn(shape: tuple[int, ...], t: Any) -> Any:
    a = RNG.standard_normal(shape) if t.is_float else RNG.integers(*t.range, shape, endpoint=True)
    return np.asarray(a).astype(t.numpy)


def check(module: ModuleType, text: str, knobs: dict[str, int | str] | None, steps: int = 0) -> Kernel:
    """Interpret a kernel of operands in the whole range of their types; how many steps a result may be off."""
    g, low, p = problem(text)
    kernel = verify_kernel(module.apply(p, knobs or dict(module.candidates(p, H200)[0]), H200))
    shown = show_kernel(kernel)
    assert show_kernel(parse_kernel(shown)) == shown
    values = {v: drawn(tuple(map(int, v.type.shape)), v.type.dtype) for v in g.inputs}  # type: ignore[arg-type]
    out = g.outputs[0].type
    result = np.full(out.buffer.shape, 99).astype(out.dtype.numpy)  # type: ignore[arg-type]
    stored = {v: np.ascontiguousarray(v.type.encoding.pack(a)[0]) for v, a in values.items()}
    run_kernel(kernel, {b.name: stored.get(v, result) for v, b in zip(low.params, kernel.entry.buffers)})
    (want,) = run(g, list(values.values()), "float64")
    gap = result.astype(np.float64) - out.encoding.pack(np.asarray(want))[0].astype(np.float64)
    assert np.abs(gap).max() <= steps
    return kernel


def matmul(m: int, k: int, n: int, a: str = "u8", b: str = "i8", turned: bool = False) -> str:
    w, y = (f"{n}, {k}", "transpose(w, perm=(1, 0))") if turned else (f"{k}, {n}", "w")
    return f"def g(x: {a}[{m}, {k}], w: {b}[{w}]):\n    y: i32[{m}, {n}] = matmul(x, {y}, out_dtype=i32)\n    return y"


def requantized(m: int, k: int, n: int) -> str:
    return (
        f"def g(x: u8[{m}, {k}], w: i8[{n}, {k}], c: f32[{n}]):\n"
        f"    y: u8[{m}, {n}] = cast(round(clip(mul(cast(matmul(x, transpose(w, perm=(1, 0)), out_dtype=i32), to=f32),"
        " mul(c, 0.001)), low=0.0, high=255.0)), to=u8)\n    return y"
    )


CONV = """def g(x: u8[2, 3, 9, 8], w: i8[24, 3, 3, 3]):
    return conv(x, w, pads=(1, 1, 1, 1), strides=(2, 2), out_dtype=i32)"""
LAST = """def g(x: u8[2, 32, 7, 7] @ "0 2 3 1", w: i8[64, 32, 3, 3] @ "0 2 3 1"):
    y: i32[2, 64, 7, 7] @ "0 2 3 1" = conv(x, w, pads=(1, 1, 1, 1), out_dtype=i32)
    return y"""


@pytest.mark.family("choices")
@pytest.mark.parametrize(
    "text, knobs",
    [
        (matmul(32, 64, 64), MMA),
        (matmul(37, 27, 41, "i8", "u8"), MMA),
        (matmul(32, 192, 64, turned=True), {**MMA, "slices": 2}),
        (matmul(32, 192, 64, turned=True), {**MMA, "split": 2}),
        (CONV, MMA),
    ],
)
def test_warp_instructions(text: str, knobs: dict[str, int | str]) -> None:
    check(mma, text, knobs)


@pytest.mark.family("choices")
@pytest.mark.parametrize("m, a, b", [(1, "u8", "i8"), (3, "i8", "i8"), (2, "u8", "u8")])
def test_few_rows(m: int, a: str, b: str) -> None:
    kernel = check(gemv, matmul(m, 512, 48, a, b, True), None)
    assert ("dot4" in show_kernel(kernel)) == (b == "i8")


@pytest.mark.slow
@pytest.mark.family("choices")
@pytest.mark.parametrize(
    "text, more",
    [
        (matmul(64, 256, 128, turned=True), {}),
        (matmul(100, 208, 144, "i8", turned=True), {}),
        (matmul(64, 512, 128, turned=True), {"split": 2}),
        (requantized(100, 208, 144), {}),
        (LAST, {"bn": 64}),
    ],
)
def test_warp_groups(text: str, more: dict[str, int | str]) -> None:
    check(wgmma, text, {**WGMMA, **more}, steps=int("round" in text))


def test_warp_groups_take_bytes_along_the_sum_alone() -> None:
    assert wgmma.candidates(problem(matmul(64, 256, 128, turned=True))[2], H200)
    assert not wgmma.candidates(problem(matmul(64, 256, 128))[2], H200)
    found = wgmma.candidates(problem(requantized(1024, 1024, 1024))[2], H200)
    assert found and all(dict(k)["bn"] != 64 or dict(k)["split"] != 1 for k in found)  # a row of 64 bytes is no box


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_compiled(arch: str) -> None:
    target = GpuTarget(arch, shared_bytes=163 << 10) if arch == "sm_80" else H200
    kernels = []
    for module, text in (
        (mma, requantized(1024, 1024, 1024)),
        (gemv, matmul(3, 512, 48, turned=True)),
        (wgmma, requantized(1024, 1024, 1024)),
    ):
        p = problem(text)[2]
        kernels += [(module.apply(p, dict(k), target), k) for k in module.candidates(p, target)[:1]]
    code = compile_cuda(emit_module([(k, f"k_{i}") for i, (k, _) in enumerate(kernels)], target), arch)
    assert code.spills == 0 and code.local_bytes == 0, code.log


def qdq(channels: int, images: bool) -> Graph:
    """x -> quantized convolution (or product) -> ReLU -> quantized product, in pairs of q and dq."""
    g = Graph("g")
    b = Builder(g)
    rng = np.random.default_rng(3)
    shape = (2, channels, 6, 6) if images else (16, channels)
    v: Any = g.add_input("x", tensor(f32, *shape))

    def byte_pair(x: Any, scale: float, zero: int) -> Any:
        s, z = b.constant(np.float32(scale)), b.constant(np.uint8(zero))
        return b.dequantize_linear(b.quantize_linear(x, s, z), s, z)

    def weights(*shape: int, axis: int) -> Any:
        w = b.constant(rng.integers(-127, 128, shape).astype(np.int8))
        return b.dequantize_linear(w, b.constant(rng.random(shape[axis], np.float32) * 0.01 + 0.001), axis=axis)

    v = byte_pair(v, 0.03, 120)
    if images:
        v = b.conv(v, weights(20, channels, 3, 3, axis=0), pads=(1, 1, 1, 1))
        v = b.reshape(b.transpose(byte_pair(b.relu(v), 0.05, 0), perm=(0, 2, 3, 1)), shape=(72, 20))
        channels = 20
    g.outputs = [b.matmul(v, weights(channels, 24, axis=1))]
    return g


@pytest.mark.slow
@pytest.mark.parametrize("channels, images", [(32, True), (7, True), (40, False)])
def test_quantized_models_are_products_of_bytes(channels: int, images: bool) -> None:
    """Convolutions with channels last, in rows that are padded to whole vectors; the numbers of the CPU's kernels."""
    g = qdq(channels, images)
    x = np.random.default_rng(1).standard_normal(tuple(map(int, g.inputs[0].type.shape))).astype(np.float32)  # type: ignore[arg-type]
    f = dnnc.compile(g, target="cuda-interpreted", cache=False)
    (want,) = run(qdq(channels, images), [x], "float64")
    got = f(x)
    step = 0.05 * 0.011 * 127  # of the requantized result, times the largest weight
    assert np.abs(got - want).max() <= (2 * step if images else 1e-4)
    text = f.source("operator")
    assert "i32" in text and ("mma_m16n8k32" in text or "wgmma" in text or "dot4" in text)
    assert i32.name in text
