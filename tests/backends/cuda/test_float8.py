"""Products of 8-bit floats on tensor cores: interpreted, compiled, and as what QDQ models become."""

from __future__ import annotations

import numpy as np
import pytest
from test_bytes import H200, WGMMA, drawn, problem

import dnnc
from dnnc.backends.cuda.emit import emit_module
from dnnc.backends.cuda.nvrtc import compile_cuda
from dnnc.backends.cuda.templates.contraction import wgmma
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.verify import verify_kernel

RNG = np.random.default_rng(0)


def matmul(m: int, k: int, n: int, a: str = "f8e4m3fn", b: str = "f8e4m3fn") -> str:
    return (
        f"def g(x: {a}[{m}, {k}], w: {b}[{n}, {k}], s: f32[{n}]):\n"
        f"    y: f16[{m}, {n}] = cast(mul(matmul(x, transpose(w, perm=(1, 0)), out_dtype=f32), s), to=f16)\n"
        "    return y"
    )


@pytest.mark.slow
@pytest.mark.family("choices")
@pytest.mark.parametrize(
    ("text", "more"),
    [
        (matmul(64, 128, 128), {}),
        (matmul(100, 1168, 144, b="f8e5m2"), {}),  # sums of whole and of some steps are added
        (matmul(40, 1152, 208), {"bn": 176}),  # the last piece of a tile's results overlaps the one before it
        (matmul(64, 2560, 128, a="f8e5m2"), {"split": 2}),
    ],
)
def test_warp_groups(text: str, more: dict[str, int | str]) -> None:
    g, low, p = problem(text)
    kernel = verify_kernel(wgmma.apply(p, {**WGMMA, **more}, H200))
    values = {v: drawn(tuple(map(int, v.type.shape)), v.type.dtype) for v in g.inputs}  # type: ignore[arg-type]
    result = np.full(g.outputs[0].type.shape, 99, np.float16)  # type: ignore[arg-type]
    run_kernel(kernel, {b.name: values.get(v, result) for v, b in zip(low.params, kernel.entry.buffers)})
    (want,) = run(g, list(values.values()), "float64")
    np.testing.assert_allclose(result.astype(np.float64), want.astype(np.float64), rtol=2e-3, atol=2e-2)


def test_sums_that_lie_in_registers_twice_have_narrow_tiles() -> None:
    found = wgmma.candidates(problem(matmul(4096, 4096, 4096))[2], H200)
    assert found and all(dict(k)["bn"] <= 192 for k in found)
    assert dict(wgmma.candidates(problem(matmul(4096, 768, 4096))[2], H200)[0])["bn"] == 256  # these are not
    assert dict(wgmma.candidates(problem(matmul(512, 4096, 11008))[2], H200)[0])["bn"] == 176  # 252 tiles, two waves


@pytest.mark.slow
def test_compiled() -> None:
    p = problem(matmul(1024, 1024, 1024))[2]
    kernels = [(wgmma.apply(p, dict(k), H200), f"k_{i}") for i, k in enumerate(wgmma.candidates(p, H200)[:3])]
    code = compile_cuda(emit_module(kernels, H200), "sm_90a")
    assert code.spills == 0 and code.local_bytes == 0, code.log


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])
def test_conversions_compile(arch: str) -> None:
    """By instructions where there are some; those that clip need no comparison behind a clip."""
    g = parse(
        "def g(x: f32[64], q: f8e5m2[64]):\n"
        "    a = cast(x, to=f8e4m3fn, saturate=False); b = cast(x, to=f8e4m3fn); c = cast(q, to=f32)\n"
        "    return a, b, c"
    )
    f = dnnc.compile(g, target=f"cuda -arch={arch}", cache=False)
    text = "".join(f.source("cuda", kernel=str(k)) for k in range(len(f.report.programs[0].kernels)))
    assert all((word in text) == (arch == "sm_89") for word in ("down_f8e4m3fn", "clip_f8e4m3fn", "up_f8e5m2"))
