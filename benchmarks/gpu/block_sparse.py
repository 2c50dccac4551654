"""Products of block-sparse weights in float16 on one GPU: every kernel is checked, then timed beside dense kernels.

    python benchmarks/gpu/block_sparse.py [--sparsity 0.8,0.9,0.95] [--blocks 32,64] [--candidates N] [--out FOLDER]
                                          [--workers N] [--emit-only]

y[P, M] = x[P, K] @ w[K, M], products of transformers with P of 128, 512 and 2048 tokens and larger ones. Of square
blocks of w so many are zeros, chosen at random. Rivals: `torch.mm` (cuBLAS) and the kernel that is chosen for dense
weights. Errors are relative to the largest element of the product in float64. Times are microseconds of one call in a
CUDA graph, medians of replays; all operands stay in the L2 cache if they fit. Tables are markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from dnnc.backends.cuda import block_weights
from dnnc.backends.cuda.emit import emit_kernel, launch_of
from dnnc.backends.cuda.nvrtc import Compiled, compile_cuda
from dnnc.backends.cuda.spelling import supported
from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates import overlapped, templates
from dnnc.backends.cuda.templates.contraction import sparse_blocks
from dnnc.ir.blocks import Blocks
from dnnc.ir.dtype import f16
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.types import Part, TensorType, dense, tensor
from dnnc.passes.lower.expand import decompose
from dnnc.passes.lower.nests import lower
from dnnc.passes.schedule.problem import Problem, classify

MATRICES = [(768, 768), (3072, 768), (768, 3072), (1024, 4096), (4096, 1024), (4096, 4096)]  # M, K
TOKENS = (128, 512, 2048)
LARGE = [(8192, 4096, 4096), (2048, 11264, 4096), (2048, 4096, 11264)]  # P, M, K
TOLERANCE = 4e-3
REPLAYS = 9
TARGET = GpuTarget()


@dataclass(frozen=True)
class Case:
    p: int
    m: int
    k: int
    size: int = 0
    sparsity: float = 0.0


@dataclass(frozen=True)
class Made:
    """A kernel; `cycles`: what the model expects; `gain`: over the dense kernel by the model."""

    choice: str
    code: Compiled
    launch: Any
    params: tuple[str, ...]
    order: tuple[str, ...]
    cycles: float
    gain: float


def weights(c: Case) -> Any:
    """float16 [K, M]; the same numbers for all blocks."""
    rng = np.random.default_rng([c.m, c.k, c.size, round(1000 * c.sparsity)])
    w = rng.standard_normal((c.k, c.m), np.float32).astype(np.float16)
    if c.size:
        keep = rng.random((c.k // c.size, c.m // c.size)) >= c.sparsity
        w *= keep.repeat(c.size, 0).repeat(c.size, 1)
    return w


def problem_of(c: Case, encoding: Any) -> Problem:
    g = Graph("product")
    x, w = g.add_input("x", tensor(f16, c.p, c.k)), g.add_input("w", TensorType(f16, (c.k, c.m), encoding))
    g.outputs = [Builder(g).matmul(x, w)]
    nodes = list(g.nodes())
    return classify(nodes, lower(g, nodes, g.outputs))


def build(c: Case, candidates: int) -> list[Made]:
    """The dense kernel of a shape, or the best kernels of blocks by estimate."""
    cycles = block_weights.dense_cycles(c.p, c.k, c.m, f16, TARGET)
    p = problem_of(c, Blocks.of(weights(c), 1, c.size) if c.size else dense_of())
    if not c.size:
        t, knobs = next((t, found[0]) for t in templates(TARGET) if (found := t.candidates(p)))
        return [made(p, f"{t.name}{knobs}", t.apply(p, dict(knobs)), cycles, 1.0)]
    out, found = [], sparse_blocks.product_of(p)
    assert found is not None
    shapes = sorted(sparse_blocks.shapes(found.work, TARGET), key=lambda s: sparse_blocks.cycles(found.work, s, TARGET))
    for s in shapes[:candidates]:
        expected = sparse_blocks.cycles(found.work, s, TARGET)
        kernel = overlapped(sparse_blocks.apply(p, dict(sparse_blocks.knobs_of(s)), TARGET))
        choice = ", ".join(f"{k}={v}" for k, v in sparse_blocks.knobs_of(s))
        out.append(made(p, choice, kernel, expected, cycles / expected))
    return out


def dense_of() -> Any:
    """Constant matrices lie with their terms innermost."""

    return dense(Part(1), Part(0))


def made(p: Problem, choice: str, kernel: Any, cycles: float, gain: float) -> Made:
    kernel = decompose(kernel, supported("standard"))
    code = compile_cuda(emit_kernel(kernel, "kernel", TARGET), TARGET.arch)
    names = tuple(b.name for b in p.kernel.entry.params)
    return Made(choice, code, launch_of(kernel), names, tuple(v.name for v in p.lowered.params[:-1]), cycles, gain)


def timed(found: dict[Case, list[Made]]) -> list[dict[str, Any]]:
    """A row for each kernel: microseconds, error, and those of the rivals."""
    import torch
    from single import graph_of, microseconds

    from dnnc.backends.cuda.device import open_device

    device, rows = open_device(), []
    status = torch.zeros(4, dtype=torch.int32, device="cuda")
    plain = {(c.p, c.m, c.k): kernels[0] for c, kernels in found.items() if not c.size}
    for c, kernels in found.items():
        if not c.size:
            continue
        torch.manual_seed(0)
        x, array = torch.randn(c.p, c.k, device="cuda", dtype=torch.float16), weights(c)
        w = torch.from_numpy(array).cuda()
        want, y = x.double() @ w.double(), torch.empty(c.p, c.m, device="cuda", dtype=torch.float16)
        packed = torch.from_numpy(Blocks.of(array, 1, c.size).pack(array)[0]).cuda()
        graphs: dict[str, Any] = {"cublas": graph_of(lambda k: torch.mm(x, w, out=y), 1)}
        keep, errors = [], []
        for n, m in enumerate([*kernels, plain[c.p, c.m, c.k]]):
            function = device.load(m.code.cubin, "kernel", m.launch, list(m.params), False)
            data = packed if n < len(kernels) else w.t().contiguous()
            out = torch.full(want.shape, float("nan"), device="cuda", dtype=torch.float16)
            keep.append((function, data, out))

            def call(k: int, function: Any = function, m: Made = m, data: Any = data, out: Any = out) -> None:
                operands = [x if name == "x" else data for name in m.order]
                addresses = [t.data_ptr() for t in (*operands, out, status)]
                device.launch(function, m.launch, addresses, torch.cuda.current_stream().cuda_stream)

            call(0)
            torch.cuda.synchronize()
            gap = float((out.double() - want).abs().max() / want.abs().max())
            errors.append(gap if gap == gap else float("inf"))
            graphs[f"ours{n}"] = graph_of(call, 1)
        us = dict(zip(graphs, microseconds(list(graphs.values()), REPLAYS)))
        graphs.clear()
        for n, m in enumerate(kernels):
            rows.append({
                "p": c.p, "m": c.m, "k": c.k, "size": c.size, "sparsity": c.sparsity, "rank": n, "choice": m.choice,
                "us": us[f"ours{n}"], "error": errors[n], "expected": m.cycles / 1.755e3, "gain": m.gain,
                "cublas": us["cublas"], "dense": us[f"ours{len(kernels)}"], "registers": m.code.registers,
                "dense_expected": plain[c.p, c.m, c.k].cycles / 1.755e3,
            })  # fmt: skip
        bad = [e for e in errors if e > TOLERANCE]
        if bad:
            print(f"WRONG {c}: {bad}", flush=True)
    return rows


def tables(rows: list[dict[str, Any]]) -> str:
    """Markdown: speed-ups by size of blocks, zeros and tokens; then each product."""
    out = [
        "| blocks | zeros | tokens | over cuBLAS | over our dense | over the better | fastest tried | least | chosen |"
    ]
    out.append("| --- " * 9 + "|")
    first = [r for r in rows if r["rank"] == 0]

    def key(r: dict[str, Any]) -> Any:
        return r["p"], r["m"], r["k"], r["size"], r["sparsity"]

    fastest = {key(r): min(x["us"] for x in rows if key(x) == key(r)) for r in first}
    mean = statistics.geometric_mean
    for size, zeros in dict.fromkeys((r["size"], r["sparsity"]) for r in first):
        for tokens in [*dict.fromkeys(r["p"] for r in first), "all"]:
            part = [r for r in first if (r["size"], r["sparsity"]) == (size, zeros) and tokens in (r["p"], "all")]
            better = [min(r["cublas"], r["dense"]) / r["us"] for r in part]
            tried = mean([min(r["cublas"], r["dense"]) / fastest[key(r)] for r in part])
            chosen = mean([r["dense"] / (r["us"] if r["gain"] >= block_weights.GAIN else r["dense"]) for r in part])
            over = [mean([r[n] / r["us"] for r in part]) for n in ("cublas", "dense")]
            cells = [*over, mean(better), tried, min(better), chosen]
            out.append(f"| {size} | {zeros:.0%} | {tokens} | " + " | ".join(f"{x:.2f}" for x in cells) + " |")
    lost = [r for r in first if r["gain"] >= block_weights.GAIN and r["us"] > r["dense"]]
    out += [
        "",
        f"Kernels: {len(rows)}, wrong: {sum(r['error'] > TOLERANCE for r in rows)}; chosen and slower than dense:",
    ]
    out += [f"{len(lost)}.", "", "| P, M, K | blocks | zeros | us | cuBLAS | our dense | expected | dense expected | |"]
    out.append("| --- " * 9 + "|")
    for r in first:
        times = " | ".join(f"{r[k]:.1f}" for k in ("us", "cublas", "dense", "expected", "dense_expected"))
        sizes = f"{r['p']}, {r['m']}, {r['k']}"
        out.append(f"| {sizes} | {r['size']} | {r['sparsity']:.0%} | {times} | {r['choice']} |")
    return "\n".join(out)


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--sparsity", default="0.8,0.9,0.95")
    ap.add_argument("--blocks", default="32,64")
    ap.add_argument("--candidates", type=int, default=1, help="kernels of each matrix that are timed")
    ap.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    ap.add_argument("--out", type=Path, default=Path())
    ap.add_argument("--emit-only", action="store_true", help="compile the kernels; needs no GPU")
    a = ap.parse_args()
    shapes = [*((p, m, k) for p in TOKENS for m, k in MATRICES), *LARGE]
    cases = [Case(*s) for s in shapes]
    cases += [
        Case(*s, size, z) for size in map(int, a.blocks.split(",")) for z in map(float, a.sparsity.split(","))
        for s in shapes
    ]  # fmt: skip
    with ProcessPoolExecutor(a.workers, get_context("spawn")) as pool:
        found = dict(zip(cases, pool.map(build, cases, [a.candidates] * len(cases))))
    if a.emit_only:
        for c, kernels in found.items():
            for x in kernels:
                print(f"{c} {x.code.registers} registers, {x.cycles / 1.755e3:.1f} us, {x.gain:.2f}: {x.choice}")
        return 0
    rows = timed(found)
    text = tables(rows)
    a.out.mkdir(parents=True, exist_ok=True)
    (a.out / "block_sparse.json").write_text(json.dumps(rows))
    (a.out / "block_sparse.md").write_text(text + "\n")
    print(text)
    return int(any(r["error"] > TOLERANCE for r in rows))


if __name__ == "__main__":
    sys.exit(main())
