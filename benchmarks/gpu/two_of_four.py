"""Products of 2:4 sparse weights in float16 on one GPU: every kernel is checked, then timed beside dense kernels.

    python benchmarks/gpu/two_of_four.py [--candidates N] [--pixels 1,16,512] [--large] [--cusparselt]
                                         [--out FOLDER] [--workers N] [--emit-only]

y[P, M] = x[P, K] @ w[K, M], of each four neighbours of w along K two are zeros, chosen at random. Rivals: `torch.mm`
(cuBLAS), the kernel that is chosen for dense weights, and with --cusparselt `torch.sparse.to_sparse_semi_structured`.
Errors are relative to the largest element of the product in float64. Times are microseconds of one call in a CUDA
graph, medians of replays; with up to 64 rows of x the weights rotate through more memory than the L2 cache holds, as
those of a model's layers do. Tables are markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from dnnc.backends.cuda import pair_weights
from dnnc.backends.cuda.emit import emit_kernel, launch_of
from dnnc.backends.cuda.nvrtc import Compiled, compile_cuda
from dnnc.backends.cuda.spelling import supported
from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates import overlapped, templates
from dnnc.backends.cuda.templates.contraction import two_of_four, two_of_four_rows
from dnnc.ir.dtype import f16
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.loops.stmt import Eval, Kernel, walk_stmts
from dnnc.ir.pairs import GROUP, KEPT, Pairs
from dnnc.ir.types import Encoding, Part, TensorType, dense, tensor
from dnnc.passes.lower.expand import decompose
from dnnc.passes.lower.nests import lower
from dnnc.passes.schedule.problem import Problem, classify

MATRICES = [
    (768, 768),
    (3072, 768),
    (768, 3072),
    (2048, 2048),
    (4096, 1024),
    (4096, 4096),
    (11264, 4096),
    (4096, 11264),
]
PIXELS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
LARGE = [(4096, 14336, 4096), (8192, 8192, 8192)]  # P, M, K
COLD, CALLS = 150 << 20, 20  # bytes of weights that take turns; calls of a graph
FEW = 64  # rows of x whose weights are read from memory
TOLERANCE = 4e-3
REPLAYS = 9
CLOCK = 1.755e3  # cycles in a microsecond
TARGET = GpuTarget()
RIVALS = ("cublas", "dense")


@dataclass(frozen=True)
class Case:
    p: int
    m: int
    k: int


@dataclass(frozen=True)
class Made:
    """A kernel; `cycles`: what the model expects. `order`: the parameters, of which the last one is the result."""

    choice: str
    stored: str
    code: Compiled
    launch: Any
    params: tuple[str, ...]
    order: tuple[str, ...]
    cycles: float
    waits: bool


@lru_cache(1)
def weights(k: int, m: int) -> Any:
    """float16 [K, M]"""
    rng = np.random.default_rng([m, k])
    patterns = np.array([[i in kept for i in range(GROUP)] for kept in combinations(range(GROUP), KEPT)])
    keep = patterns[rng.integers(len(patterns), size=(k // GROUP, m))].transpose(0, 2, 1)
    w = rng.standard_normal((k, m), np.float32).astype(np.float16)
    w *= keep.reshape(k, m)
    return w


@lru_cache(1)
def stored(k: int, m: int) -> dict[str, Any]:
    """The weights in each order, on the device."""
    import torch

    array = weights(k, m)
    found = {s: torch.from_numpy(Pairs(1, array.shape, s).pack(array)[0]).cuda() for s in ("tiles", "lanes")}
    return {**found, "dense": torch.from_numpy(array).cuda().t().contiguous()}


def problem_of(c: Case, encoding: Encoding) -> Problem:
    g = Graph("product")
    x, w = g.add_input("x", tensor(f16, c.p, c.k)), g.add_input("w", TensorType(f16, (c.k, c.m), encoding))
    g.outputs = [Builder(g).matmul(x, w)]
    nodes = list(g.nodes())
    lowered = lower(g, nodes, g.outputs)
    name = dict(zip(lowered.params, lowered.kernel.entry.buffers))[w].name
    return classify(nodes, lowered, constants=frozenset([name]))


def build(c: Case, candidates: int) -> list[Made]:
    """The dense kernel of a shape, and the best kernels of 2:4 weights by estimate."""
    p = problem_of(c, dense(Part(1), Part(0)))  # constant matrices lie with their terms innermost
    t, knobs = next((t, found[0]) for t in templates(TARGET) if (found := t.candidates(p)))
    out = [made(p, t.name, knobs, "dense", t.apply(p, dict(knobs)), pair_weights.dense(c.p, c.k, c.m, f16, TARGET))]
    for order, module in (("tiles", two_of_four), ("lanes", two_of_four_rows)):
        p = problem_of(c, Pairs(1, (c.k, c.m), order))
        for knobs in module.candidates(p, TARGET)[:candidates]:
            kernel = overlapped(module.apply(p, dict(knobs), TARGET))
            out.append(made(p, module.__name__.rpartition(".")[2], knobs, order, kernel, expected(c, order, knobs)))
    return out


def expected(c: Case, order: str, knobs: Any) -> float:
    """Cycles by the model."""
    n = dict(knobs)
    if order == "lanes":
        s = two_of_four_rows.Shape(**n)
        return two_of_four_rows.cycles(c.p, -(-c.m // two_of_four.ROWS), c.k // two_of_four.STEP, s, TARGET)
    t = two_of_four.PairTiling(two_of_four.ROWS, n["bn"], n["stages"], n["group"], TARGET.sms, n["split"])
    return two_of_four.cycles(c.p, c.m, c.k, t, TARGET)


def made(p: Problem, name: str, knobs: Any, stored: str, kernel: Kernel, cycles: float) -> Made:
    kernel = decompose(kernel, supported("standard"))
    code = compile_cuda(emit_kernel(kernel, "kernel", TARGET), TARGET.arch)
    choice = f"{name}({', '.join(f'{k}={v}' for k, v in knobs)})"
    waits = any(isinstance(s, Eval) and s.name == "pdl_wait" for f in kernel.funcs for s in walk_stmts(f.body))
    params = tuple(b.name for b in p.kernel.entry.params)
    order = tuple(v.name for v in p.lowered.params[:-1])
    return Made(choice, stored, code, launch_of(kernel), params, order, cycles, waits)


def timed(found: dict[Case, list[Made]], cusparselt: bool) -> list[dict[str, Any]]:
    """A row for each kernel: microseconds, error, and those of the rivals."""
    import torch
    from single import graph_of, microseconds

    from dnnc.backends.cuda.device import open_device

    device, rows = open_device(), []
    status = torch.zeros(4, dtype=torch.int32, device="cuda")
    for c, kernels in found.items():
        torch.manual_seed(0)
        sets = max(1, min(CALLS, -(-COLD // (2 * c.m * c.k)))) if c.p <= FEW else 1
        x = torch.randn(c.p, c.k, device="cuda", dtype=torch.float16)
        data = {s: [t.clone() for _ in range(sets)] for s, t in stored(c.k, c.m).items()}
        w = data["dense"][0]
        want, y = x.double() @ w.t().double(), torch.empty(c.p, c.m, device="cuda", dtype=torch.float16)
        graphs: dict[str, Any] = {"cublas": graph_of(lambda k: torch.mm(x, data["dense"][k].t(), out=y), sets)}
        keep: list[Any] = []  # what graphs read, which keep nothing alive
        errors = []
        if cusparselt:
            keep.append(peer(x, data["dense"]))
            graphs["cusparselt"] = graph_of(keep[0], sets)
        for n, m in enumerate(kernels):
            function = device.load(m.code.cubin, "kernel", m.launch, list(m.params), m.waits)
            out = torch.full(want.shape, float("nan"), device="cuda", dtype=torch.float16)
            keep.append((function, out))

            def call(k: int, function: Any = function, m: Made = m, out: Any = out, data: Any = data) -> None:
                operands = [x if name == "x" else data[m.stored][k] for name in m.order]
                addresses = [t.data_ptr() for t in (*operands, out, status)]
                device.launch(function, m.launch, addresses, torch.cuda.current_stream().cuda_stream)

            call(0)
            torch.cuda.synchronize()
            gap = float((out.double() - want).abs().max() / want.abs().max())
            errors.append(gap if gap == gap else float("inf"))
            graphs[f"ours{n}"] = graph_of(call, sets)
        us = dict(zip(graphs, microseconds(list(graphs.values()), REPLAYS, 0.002)))
        graphs.clear()
        for n, m in enumerate(kernels):
            rows.append({
                "p": c.p, "m": c.m, "k": c.k, "stored": m.stored, "choice": m.choice, "us": us[f"ours{n}"],
                "error": errors[n], "expected": m.cycles / CLOCK, "cublas": us["cublas"], "dense": us["ours0"],
                "cusparselt": us.get("cusparselt", float("nan")), "registers": m.code.registers,
                "dense_expected": kernels[0].cycles / CLOCK,
            })  # fmt: skip
        if bad := [(m.choice, e) for m, e in zip(kernels, errors) if e > TOLERANCE]:
            print(f"WRONG {c}: {bad}", flush=True)
    return rows


def peer(x: Any, every: list[Any]) -> Callable[[int], Any]:
    """Products by cuSPARSELt."""
    import torch
    from torch.sparse import SparseSemiStructuredTensor, to_sparse_semi_structured

    SparseSemiStructuredTensor._FORCE_CUTLASS = False
    stored = [to_sparse_semi_structured(w) for w in every]
    return lambda k: torch.nn.functional.linear(x, stored[k])


def tables(rows: list[dict[str, Any]]) -> str:
    """Markdown: speed-ups by rows of x; then each product with its first and its fastest kernel."""
    rows = sorted(rows, key=lambda r: (r["p"], r["k"] * r["m"]))
    keys = list(dict.fromkeys((r["p"], r["m"], r["k"]) for r in rows))
    products = []
    for key in keys:
        ours = [r for r in rows if (r["p"], r["m"], r["k"]) == key]
        sparse = [r for r in ours if r["stored"] != "dense"]
        first = min(sparse, key=lambda r: r["expected"])
        gain = first["dense_expected"] / first["expected"]
        best = min(sparse, key=lambda r: r["us"])
        products.append((key, ours[0], first, best, gain if gain >= pair_weights.GAIN else 0.0))
    mean = statistics.geometric_mean
    out = [
        "| rows | over cuBLAS | over our dense | over the better | least | fastest tried | chosen over dense | least |"
    ]
    out.append("| --- " * 8 + "|")
    for pixels in [*dict.fromkeys(k[0] for k in keys), "all"]:
        part = [x for x in products if pixels in (x[0][0], "all")]
        better = [min(d["cublas"], d["us"]) / f["us"] for _, d, f, _, _ in part]
        chosen = [d["us"] / (f["us"] if gain else d["us"]) for _, d, f, _, gain in part]
        cells = [
            mean([d["cublas"] / f["us"] for _, d, f, _, _ in part]),
            mean([d["us"] / f["us"] for _, d, f, _, _ in part]),
        ]
        cells += [mean(better), min(better), mean([min(d["cublas"], d["us"]) / b["us"] for _, d, _, b, _ in part])]
        cells += [mean(chosen), min(chosen)]
        out.append(f"| {pixels} | " + " | ".join(f"{x:.2f}" for x in cells) + " |")
    wrong = sum(r["error"] > TOLERANCE for r in rows)
    slower = sum(bool(gain) and f["us"] > d["us"] for _, d, f, _, gain in products)
    out += ["", f"Kernels: {len(rows)}, wrong: {wrong}; chosen and slower than dense: {slower} of {len(products)}.", ""]
    out.append(
        "| P, M, K | us | cuBLAS | our dense | cuSPARSELt | expected | dense expected | chosen | kernel | fastest |"
    )
    out.append("| --- " * 10 + "|")
    for (p, m, k), d, f, best, gain in products:
        times = f"{f['us']:.2f} | {d['cublas']:.2f} | {d['us']:.2f} | {d['cusparselt']:.2f} | {f['expected']:.2f}"
        fastest = "" if best is f else f"{best['us']:.2f}: {best['choice']}"
        out.append(
            f"| {p}, {m}, {k} | {times} | {d['expected']:.2f} | {'yes' if gain else 'no'} | {f['choice']} | {fastest} |"
        )
    return "\n".join(out)


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--candidates", type=int, default=1, help="kernels of each order that are timed")
    ap.add_argument("--pixels", default=",".join(map(str, PIXELS)))
    ap.add_argument("--large", action="store_true", help="two products of some TFLOP as well")
    ap.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    ap.add_argument("--out", type=Path, default=Path())
    ap.add_argument("--cusparselt", action="store_true")
    ap.add_argument("--emit-only", action="store_true", help="compile the kernels; needs no GPU")
    a = ap.parse_args()
    cases = [Case(p, m, k) for p in map(int, a.pixels.split(",")) for m, k in MATRICES]
    cases += [Case(*s) for s in LARGE if a.large]
    cases.sort(key=lambda c: (c.m, c.k))
    with ProcessPoolExecutor(a.workers, get_context("spawn")) as pool:
        found = dict(zip(cases, pool.map(build, cases, [a.candidates] * len(cases))))
    if a.emit_only:
        for c, kernels in found.items():
            for x in kernels:
                print(
                    f"{c} {x.code.registers} registers, {x.code.spills} spilled, {x.cycles / CLOCK:.1f} us: {x.choice}"
                )
        return 0
    rows = timed(found, a.cusparselt)
    a.out.mkdir(parents=True, exist_ok=True)
    (a.out / "two_of_four.json").write_text(json.dumps(rows))
    text = tables(rows)
    (a.out / "two_of_four.md").write_text(text + "\n")
    print(text)
    return int(any(r["error"] > TOLERANCE for r in rows))


if __name__ == "__main__":
    sys.exit(main())
