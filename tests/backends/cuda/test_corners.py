"""The CUDA templates at the corners of their knobs, compiled for an old and a new architecture: no spills, no local
memory, registers for a block.

`attention`, `patch` and `wgmma` have such tests beside what else is tested of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dnnc.backends.cuda.emit import emit_kernel, launch_of
from dnnc.backends.cuda.nvrtc import compile_many
from dnnc.backends.cuda.target import FACTS
from dnnc.backends.cuda.templates import templates
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.stmt import Kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.passes.base import PassContext
from dnnc.passes.lower.nests import lower
from dnnc.passes.planning.fuse import plan_fusion
from dnnc.passes.rewrites.decompose import decompose
from dnnc.passes.schedule.problem import Problem, classify

ARCHS = ("sm_80", "sm_90a")
ELSEWHERE = {
    "attention",
    "segments",
    "sparse",
    "sparse_blocks",
    "sparse_gather",
    "two_of_four",
    "two_of_four_rows",
    "decoded",
    "wgmma",
    "gemv_norm",
    "immediates",
    "patch",
    "recurrence",
}
Knobs = dict[str, int | str]


def matmul(m: int, k: int, n: int, t: str = "f32") -> str:
    return f"def g(x: {t}[{m}, {k}], w: {t}[{k}, {n}]):\n    return matmul(x, w)"


def dense(m: int, k: int, n: int, t: str = "f32") -> str:
    return (
        f"def g(x: {t}[{m}, {k}], w: {t}[{k}, {n}], c: {t}[{n}], r: {t}[{m}, {n}]):\n"
        "    return add(gelu(add(matmul(x, w), c)), r)"
    )


def turned(m: int, k: int, n: int, t: str = "f32") -> str:
    return f"def g(w: {t}[{k}, {m}], x: {t}[{k}, {n}]):\n    return matmul(transpose(w, perm=(1, 0)), x)"


def conv(x: str, w: str, attrs: str, t: str = "f32") -> str:
    return f"def g(x: {t}[{x}], w: {t}[{w}]):\n    return conv(x, w, {attrs})"


def depthwise(x: str, w: str, attrs: str, t: str = "f32") -> str:
    """Channels last."""
    return f"""def g(x: {t}[{x}] @ "0 2 3 1", w: {t}[{w}] @ "1 2 3 0"):
    y: {t}[{x}] @ "0 2 3 1" = conv(x, w, group={w.split(",")[0]}, {attrs})
    return y"""


def op(call: str, *inputs: str) -> str:
    return f"def g({', '.join(f'x{k}: {t}' for k, t in enumerate(inputs))}):\n    return {call}"


def simt(bm: int, bn: int, tm: int, tn: int, bk: int = 16, stages: int = 3, slices: int = 1, split: int = 1) -> Knobs:
    return {"bm": bm, "bn": bn, "tm": tm, "tn": tn, "bk": bk, "stages": stages, "slices": slices, "split": split}


def mma(bm: int, bn: int, down: int, across: int, bk: int, stages: int, slices: int = 1, split: int = 1) -> Knobs:
    return {
        "bm": bm,
        "bn": bn,
        "down": down,
        "across": across,
        "bk": bk,
        "stages": stages,
        "slices": slices,
        "split": split,
    }


LAST = 'def g(x: {0}[{1}] @ "0 2 3 1"):\n    y: {0}[{2}] @ "0 2 3 1" = {3}\n    return y'
PADDED = "pads=(1, 1, 1, 1)"
BOTH_ENDS = ("gemv", "map", "reduce")  # of the candidates; the first one alone of other templates
# template -> (graph, knobs or None for candidates); a sum split over a cluster needs the new architecture
CORNERS: dict[str, list[tuple[str, Knobs | None]]] = {
    "simt": [
        (dense(4096, 4096, 4096), simt(128, 128, 16, 8)),
        (turned(1024, 1024, 1024), simt(128, 128, 8, 8, stages=4)),
        (matmul(4096, 4096, 4096), simt(64, 64, 8, 8)),  # the assembler would spill for the sake of one block more
        (matmul(512, 515, 333), simt(64, 64, 8, 4, slices=4)),
        (matmul(512, 512, 512, "f64"), simt(64, 64, 4, 4, bk=8, stages=2)),
        (conv("1, 64, 56, 56", "64, 64, 3, 3", PADDED), None),
        (conv("1, 3, 224, 224", "64, 3, 7, 7", "pads=(3, 3, 3, 3), strides=(2, 2)"), simt(64, 128, 8, 8)),
        (dense(128, 3072, 768), simt(64, 64, 8, 8, slices=2, split=8)),
        (conv("1, 512, 7, 7", "512, 512, 3, 3", PADDED), simt(32, 64, 8, 8, slices=4, split=4)),
    ],
    "mma": [
        (matmul(4096, 4096, 4096, "bf16"), None),
        (turned(1024, 1024, 1024, "f16"), mma(128, 128, 2, 2, 32, 4)),
        (matmul(100, 515, 333, "f16"), mma(64, 32, 2, 2, 64, 3, slices=2)),
        (matmul(500, 512, 48, "f16"), mma(128, 48, 4, 1, 32, 4, slices=2)),
        (matmul(500, 512, 96, "bf16"), mma(128, 96, 2, 2, 64, 3)),
        (conv("32, 64, 56, 56", "64, 64, 3, 3", PADDED, "f16"), mma(128, 256, 2, 4, 32, 4)),
        (dense(128, 3072, 768, "f16"), mma(64, 64, 2, 2, 32, 4, slices=2, split=4)),
    ],
    "tf32": [
        (dense(4096, 4096, 4096), None),
        (conv("8, 64, 56, 56", "64, 64, 3, 3", PADDED), mma(128, 64, 2, 2, 32, 3)),
        (dense(128, 3072, 768), mma(64, 64, 2, 2, 32, 3, split=8)),
    ],
    "tf32x3": [
        (dense(4096, 4096, 4096), mma(64, 128, 2, 2, 32, 3)),
        (turned(1000, 100, 1000), mma(32, 64, 1, 2, 32, 3)),
        (dense(100, 1000, 1000), mma(32, 64, 2, 2, 32, 4, slices=2, split=2)),
        (conv("8, 64, 56, 56", "64, 64, 3, 3", PADDED), mma(64, 64, 2, 2, 16, 4)),
    ],
    "gemv": [
        (matmul(1, 768, 3072, "f16"), None),
        (matmul(50257, 768, 1, "f16"), None),
        (matmul(50257, 768, 1), None),
        (matmul(4096, 4097, 4), None),
        (op("sigmoid(conv(x0, x1))", "f32[1, 20, 1, 1]", "f32[480, 20, 1, 1]"), None),
    ],
    "window": [
        (depthwise("32, 384, 14, 14", "384, 1, 7, 7", "pads=(3, 3, 3, 3)", "f16"), None),
        (depthwise("32, 96, 56, 56", "96, 1, 3, 3", PADDED), None),
        (
            LAST.format(
                "bf16",
                "32, 64, 112, 112",
                "32, 64, 56, 56",
                "max_pool(x, kernel=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1))",
            ),
            None,
        ),
    ],
    "map": [(op("gelu(x0)", "f16[300003]"), None), (op("transpose(x0, perm=(1, 0))", "f16[100, 70]"), None)],
    "sequence": [(op("cumsum(x0, axis=1)", "f64[4, 300]"), None)],
    "reduce": [
        (op("softmax(x0)", "f16[512, 4096]"), None),
        (op("reduce_sum(x0, axes=(0,))", "f32[1000, 70]"), None),
        (op("reduce_max(x0, axes=(1,))", "i8[7, 333]"), None),
    ],
    "scatter": [
        (op("scatter_nd(x0, x1, x2, reduction='add')", "f32[100, 48]", "i64[300, 1]", "f32[300, 48]"), None),
        (op("scatter_elements(x0, x1, x2, axis=0)", "f16[50, 7]", "i32[9, 7]", "f16[9, 7]"), None),
        (op("scatter_nd(x0, x1, x2, reduction='add')", "f32[4096, 128]", "i64[32768, 1]", "f32[32768, 128]"), None),
    ],
    "threads": [(op("softmax(x0)", "f16[512, 100]"), None)],
}


def problems(text: str) -> Iterator[Problem]:
    g = parse(text)
    decompose(g, PassContext())
    for group in plan_fusion(g).groups:
        yield classify(group.nodes, lower(g, group.nodes, group.outputs))


def kernels(name: str, arch: str) -> dict[str, Kernel]:
    """By a symbol, the kernels of a template's corners that the architecture has."""
    (template,) = (t for t in templates(FACTS[arch], rounded=True) if t.name == name)
    out: dict[str, Kernel] = {}
    for text, knobs in CORNERS[name]:
        for p in problems(text):
            found = [dict(k) for k in template.candidates(p)]
            wanted = [knobs] if knobs is not None else found[:1] + (found[1:][-1:] if name in BOTH_ENDS else [])
            for k in wanted:
                if not found or (k.get("split", 1) != 1 and not FACTS[arch].has_tma):
                    continue
                out[f"{name}_{len(out)}"] = verify_kernel(template.apply(p, k))
    return out


@pytest.mark.slow
@pytest.mark.family("choices")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", CORNERS)
def test_corners_compile(name: str, arch: str) -> None:
    target, made = FACTS[arch], kernels(name, arch)
    assert made
    for symbol, c in compile_many({s: (emit_kernel(k, s, target), arch) for s, k in made.items()}).items():
        assert c.spills == 0 and c.local_bytes == 0, f"{symbol}: {c.log}"
        assert c.registers * launch_of(made[symbol]).block[0] <= target.registers


def test_every_template_has_corners() -> None:
    assert {t.name for t in templates(FACTS["sm_90a"], rounded=True)} - ELSEWHERE == CORNERS.keys()
