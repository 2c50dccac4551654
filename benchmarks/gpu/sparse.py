"""Products of sparse weights on one GPU: every kernel is checked, then timed beside cuBLAS, cuSPARSE and our dense one.

    python benchmarks/gpu/sparse.py [--only WORD,WORD] [--sparsity 0.9,0.95,0.98] [--patterns magnitude,rmat]
                                    [--inner pixels|terms] [--candidates N] [--workers N] [--out FOLDER] [--emit-only]
    PYTHONPATH=.types python3 benchmarks/gpu/sparse.py     where dnnc is not installed; `make .types` makes that folder

Products in float32: 13 1 x 1 convolutions of ResNet-50 and MobileNetV1 (P pixels of 1 and of 32 images) and the
products of transformers (P of 128, 512 and 2048 tokens). With pixels innermost y[M, P] = w[M, K] @ x[K, P], with terms
innermost y[P, M] = x[P, K] @ w[K, M]. Patterns, from a seed:

    magnitude   normal weights with scales for rows and columns, of which the smallest are removed
    rmat        R-MAT: few long rows, many short ones

Rivals: `torch.mm` in float32 (cuBLAS, TF32 off), our dense kernel that is chosen without weights that are zero, and
cuSPARSE by `torch.addmm` of a CSR matrix and x transposed, in the memory order that it likes. Errors are relative to
the largest element of the product in float64. Times are microseconds of one call in a CUDA graph, medians of replays;
all operands stay in the L2 cache if they fit. As in programs, our kernels begin while the one before ends. Kernels with
weights in their code are several copies that take turns, so that none finds its code in the instruction cache. "chosen"
is the policy of the compiler: sparse where the estimate promises it, dense elsewhere. Tables are markdown, in
FOLDER/sparse.md too; FOLDER/sparse.json has a row a kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from dnnc.backends.cuda import sparse_weights
from dnnc.backends.cuda.emit import emit_kernel, launch_of
from dnnc.backends.cuda.nvrtc import Compiled, compile_cuda
from dnnc.backends.cuda.spelling import supported
from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates import overlapped, templates
from dnnc.backends.cuda.templates.contraction import immediates, sparse, sparse_gather
from dnnc.ir.bundles import Bundles, matrix_of
from dnnc.ir.dtype import f32
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.types import Encoding, TensorType, tensor
from dnnc.passes.lower.expand import decompose
from dnnc.passes.lower.nests import lower
from dnnc.passes.rewrites.sparse import Zeros
from dnnc.passes.schedule.problem import Problem, classify

RESNET = [(64, 256, 3136), (256, 64, 3136), (128, 512, 784), (512, 128, 784), (256, 1024, 196), (1024, 256, 196),
          (512, 2048, 49), (2048, 512, 49)]  # fmt: skip
MOBILE = [(128, 64, 3136), (128, 128, 3136), (256, 256, 784), (512, 512, 196), (1024, 1024, 49)]
TRANSFORMER = [(768, 768), (3072, 768), (768, 3072), (1024, 4096), (4096, 1024), (4096, 4096)]
TOLERANCE = 3e-5
CLOCK = 1.755e3  # cycles of a microsecond, by which estimates are shown
REPLAYS = 9
COPIES = 8  # of kernels with weights in their code, which take turns: none finds its code in the instruction cache
RMAT = (0.45, 0.22, 0.22, 0.11)
TARGET = GpuTarget()


@dataclass(frozen=True)
class Case:
    kind: str
    m: int
    k: int
    p: int
    sparsity: float = 0.0
    pattern: str = ""
    inner: str = "pixels"

    @property
    def name(self) -> str:
        return f"{self.kind} {self.m}x{self.k}x{self.p} {self.pattern} {self.sparsity or 'dense'}"


def shapes(inner: str) -> Iterator[Case]:
    for images in (1, 32):
        for m, k, pixels in RESNET + MOBILE:
            yield Case(f"conv, batch {images}", m, k, pixels * images, inner=inner)
    for tokens in (128, 512, 2048):
        for m, k in TRANSFORMER:
            yield Case(f"transformer, {tokens} tokens", m, k, tokens, inner=inner)


def weights(c: Case) -> Any:
    """float32 [M, K] where pixels are innermost, else [K, M]."""
    rng = np.random.default_rng([c.m, c.k, round(1000 * c.sparsity), len(c.pattern)])
    w = rng.standard_normal((c.m, c.k), np.float32)
    if c.pattern == "magnitude":
        w *= np.exp(0.5 * rng.standard_normal((c.m, 1), np.float32))
        w *= np.exp(0.5 * rng.standard_normal((1, c.k), np.float32))
        w[np.abs(w) < np.quantile(np.abs(w), c.sparsity)] = 0
    elif c.pattern == "rmat":
        w *= rmat(rng, c.m, c.k, round(c.m * c.k * (1 - c.sparsity)))
    return w if c.inner == "pixels" else np.ascontiguousarray(w.T)


def rmat(rng: Any, m: int, k: int, count: int) -> Any:
    """bool[m, k] with `count` places: at each level a place falls into one of four quadrants."""
    levels, kept = (max(m, k) - 1).bit_length(), np.zeros((m, k), np.bool_)
    for _ in range(60):
        left = count - int(kept.sum())
        if left <= 0:
            break
        row, column = np.zeros(2 * left + 64, np.int64), np.zeros(2 * left + 64, np.int64)
        for _ in range(levels):
            part = rng.choice(4, len(row), p=RMAT)
            row, column = 2 * row + part // 2, 2 * column + part % 2
        row, column = row * m >> levels, column * k >> levels
        flat = np.unique(row * k + column)
        flat = flat[~kept.reshape(-1)[flat]]
        kept.reshape(-1)[rng.permutation(flat)[:left]] = True
    return kept


# --- kernels ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """A kernel: `words` of its weights where they are sparse, and what these are made of, `kept`: a bitmap and the
    other numbers; `cycles`: what the model expects.
    """

    case: Case
    choice: str
    code: Compiled
    launch: Any
    params: tuple[str, ...]
    order: tuple[str, ...]  # of the operands x and w
    cycles: float
    gain: float  # over the dense kernel by the model
    words: Any = None
    kept: Any = None


def problem_of(c: Case, encoding: Encoding | None = None) -> Problem:
    g = Graph("sparse" if encoding else "dense")
    pixels = c.inner == "pixels"
    x = g.add_input("x", tensor(f32, *((c.k, c.p) if pixels else (c.p, c.k))))
    shape = (c.m, c.k) if pixels else (c.k, c.m)
    w = g.add_input("w", TensorType(f32, shape, encoding) if encoding else tensor(f32, *shape))
    g.outputs = [Builder(g).matmul(*((w, x) if pixels else (x, w)))]
    nodes = list(g.nodes())
    return classify(nodes, lower(g, nodes, g.outputs), frozenset((w,)))


def made(c: Case, p: Problem, choice: str, kernel: Any, cycles: float, words: Any = None, kept: Any = None) -> Made:
    kernel = overlapped(decompose(kernel, supported("standard")))
    code = compile_cuda(emit_kernel(kernel, "kernel", TARGET), TARGET.arch)
    dense = sparse_weights.dense_cycles(c.p, c.k, c.m, TARGET)
    names = tuple(b.name for b in p.kernel.entry.params)
    order = tuple(v.name for v in p.lowered.params[:-1])
    return Made(c, choice, code, launch_of(kernel), names, order, cycles, dense / cycles, words, kept)


def build(c: Case, candidates: int) -> list[Made]:
    """The dense kernel of a shape, or the best sparse ones of its weights by estimate."""
    if not c.sparsity:
        p = problem_of(c)
        t, knobs = next((t, found[0]) for t in templates(TARGET) if (found := t.candidates(p)))
        return [
            made(c, p, f"{t.name}{knobs}", t.apply(p, dict(knobs)), sparse_weights.dense_cycles(c.p, c.k, c.m, TARGET))
        ]
    w, out = weights(c), []
    kept = np.packbits(w != 0), w[w != 0]
    if c.inner == "pixels":
        dense = sparse_weights.dense_cycles(c.p, c.k, c.m, TARGET)
        form = sparse_weights.best_form(Zeros(w, 0, len(kept[1]), ""), (c.p, c.p), TARGET, dense)
        if form.rows:
            return coded(c, w, form.rows, candidates, kept)
        encoding = sparse_gather.encoding_of(w, 0)
        p = problem_of(c, encoding)
        words = encoding.pack(w)[0]
        work = sparse_gather.work_of(p)
        for knobs in sparse_gather.candidates(p, TARGET)[:candidates]:
            choice, shape = ", ".join(f"{k}={v}" for k, v in knobs), sparse_gather.Shape(**dict(knobs))
            kernel = sparse_gather.apply(p, dict(knobs), TARGET)
            out.append(made(c, p, choice, kernel, sparse_gather.cycles(work, shape, TARGET), words, kept))
        return out
    for cycles, shape, height, depth in ranked(w, c.p)[:candidates]:
        encoding = Bundles.of(w, 1, height, depth)
        p, knobs = problem_of(c, encoding), dict(sparse.knobs_of(shape))
        choice = f"height={height}, depth={depth}, {', '.join(f'{k}={v}' for k, v in knobs.items())}"
        out.append(made(c, p, choice, sparse.apply(p, knobs, TARGET), cycles, encoding.pack(w)[0], kept))
    return out


def coded(c: Case, w: Any, rows: int, candidates: int, kept: Any) -> list[Made]:
    """Kernels with the elements of a matrix in their code, by groups of so many rows."""
    encoding, out = immediates.encoding_of(w, 0, rows), []
    p = problem_of(c, encoding)
    work = immediates.Work(c.p, 1, encoding.pattern.blocks)
    for knobs in immediates.candidates(p, TARGET)[:candidates]:
        cycles = immediates.cycles(work, immediates.Shape(rows, **dict(knobs)), TARGET)
        choice = f"in code, rows={rows}, " + ", ".join(f"{k}={v}" for k, v in knobs)
        kernel = immediates.apply(p, dict(knobs), TARGET)
        out.append(made(c, p, choice, kernel, cycles, encoding.pack(w)[0], kept))
    return out


def ranked(w: Any, pixels: int) -> list[tuple[float, sparse.Shape, int, int]]:
    """Blocks and encodings by estimate, the best block of each encoding; each next one differs from all before."""
    found = sparse_weights.costs(matrix_of(w, 1) != 0, pixels, TARGET)
    best: dict[tuple[int, int], tuple[float, sparse.Shape, int, int]] = {}
    for row in sorted(found, key=lambda r: r[0]):
        best.setdefault(row[2:], row)
    return list(best.values())


def built(cases: Sequence[Case], candidates: int, workers: int) -> dict[Case, list[Made]]:
    start = time.perf_counter()
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        found = dict(zip(cases, pool.map(build, cases, [candidates] * len(cases))))
    every = [x for row in found.values() for x in row]
    took, registers = time.perf_counter() - start, max(x.code.registers for x in every)
    spills = sum(x.code.spills for x in every)
    print(f"{len(every)} kernels in {took:.0f} s; most registers {registers}, spills {spills}", flush=True)
    return found


# --- times ------------------------------------------------------------------------------------------------------------


def error_of(y: Any, want: Any) -> float:
    gap = float((y.double() - want).abs().max() / want.abs().max())
    return gap if gap == gap else float("inf")


def whole(m: Made) -> Any:
    """The weights of a kernel, as its maker drew them."""
    c = m.case
    if m.kept is None:
        return weights(c)
    w = np.zeros(c.k * c.m, np.float32)
    w[np.unpackbits(m.kept[0], count=len(w)).view(np.bool_)] = m.kept[1]
    return w.reshape((c.m, c.k) if c.inner == "pixels" else (c.k, c.m))


def rivals(c: Case, w: Any, x: Any) -> dict[str, Any]:
    """Calls of libraries for the product; the weights as CSR and pixels innermost are what cuSPARSE likes."""
    import torch

    first, second = (w, x) if c.inner == "pixels" else (x, w)
    y = torch.empty(first.shape[0], second.shape[1], device="cuda")
    matrix, turned = (w, x) if c.inner == "pixels" else (w.t().contiguous(), x.t().contiguous())
    out, rows = torch.empty(c.m, c.p, device="cuda"), matrix.to_sparse_csr()
    csr = torch.sparse_csr_tensor(rows.crow_indices().int(), rows.col_indices().int(), rows.values(), size=(c.m, c.k))
    return {
        "cublas": lambda k: torch.mm(first, second, out=y),
        "cusparse": lambda k: torch.addmm(out, csr, turned, beta=0, alpha=1, out=out),
    }


def least_gain(m: Made) -> float:
    """By how much the estimate of a kernel must beat that of the dense one for it to be chosen."""
    if m.case.inner != "pixels":
        return sparse_weights.GAIN
    return sparse_weights.CODE_GAIN if m.choice.startswith("in code") else sparse_weights.GATHER_GAIN


def timed(found: dict[Case, list[Made]]) -> list[dict[str, Any]]:
    """A row for each kernel: microseconds, error, and those of the rivals."""
    import torch
    from single import graph_of, microseconds

    from dnnc.backends.cuda.device import Function, open_device

    device, rows = open_device(), []
    torch.backends.cuda.matmul.allow_tf32 = False
    status = torch.zeros(4, dtype=torch.int32, device="cuda")
    dense: dict[tuple[int, int, int], dict[str, float]] = {}
    for c, kernels in found.items():
        torch.manual_seed(0)
        pixels = c.inner == "pixels"
        x = torch.randn(*((c.k, c.p) if pixels else (c.p, c.k)), device="cuda")
        w = torch.from_numpy(whole(kernels[0])).cuda()
        want = w.double() @ x.double() if pixels else x.double() @ w.double()
        graphs, keep, ours = {}, [], []
        packed: dict[int, Any] = {}
        for n, m in enumerate(kernels):
            params, copies = list(m.params), COPIES if m.choice.startswith("in code") else 1
            with device.current():
                functions = [Function(device, m.code.cubin, "kernel", m.launch, params, True) for _ in range(copies)]
            if m.words is not None and id(m.words) not in packed:
                packed[id(m.words)] = torch.from_numpy(m.words.view(np.int32)).cuda()
            data = w if m.words is None else packed[id(m.words)]
            y = torch.full(want.shape, float("nan"), device="cuda")
            keep.append((functions, data, y))

            def call(k: int, functions: Any = functions, m: Made = m, data: Any = data, y: Any = y) -> None:
                operands = [x if name == "x" else data for name in m.order]
                addresses = [t.data_ptr() for t in (*operands, y, status)]
                device.launch(functions[k], m.launch, addresses, torch.cuda.current_stream().cuda_stream)

            call(0)
            torch.cuda.synchronize()
            ours.append(error_of(y, want))
            graphs[f"ours{n}"] = graph_of(call, copies)
        others = rivals(c, w, x)
        if c.sparsity:
            others.pop("cublas")
        else:
            others.pop("cusparse")
        for name, rival in others.items():
            try:
                graphs[name] = graph_of(rival, 1)
            except RuntimeError as e:
                print(f"{c.name}: {name} is left out: {str(e)[:100]}")
        us = dict(zip(graphs, microseconds(list(graphs.values()), REPLAYS)))
        graphs.clear()
        if not c.sparsity:
            dense[c.m, c.k, c.p] = {"cublas": us["cublas"], "dense": us["ours0"]}
        for n, m in enumerate(kernels):
            rows.append({
                "kind": c.kind, "m": c.m, "k": c.k, "p": c.p, "sparsity": c.sparsity, "pattern": c.pattern, "rank": n,
                "choice": m.choice, "us": us[f"ours{n}"], "error": ours[n], "expected": m.cycles / CLOCK,
                "gain": m.gain, "least": least_gain(m),
                "registers": m.code.registers, "cusparse": us.get("cusparse"), **dense[c.m, c.k, c.p],
            })  # fmt: skip
            if ours[n] > TOLERANCE:
                print(f"WRONG {c.name}: {m.choice}, error {ours[n]:.1e}", flush=True)
    return rows


# --- tables -----------------------------------------------------------------------------------------------------------


def mean(xs: Sequence[float]) -> str:
    return f"{statistics.geometric_mean(xs):.2f}" if xs else ""


def key(r: dict[str, Any]) -> Any:
    return tuple(r[k] for k in ("m", "k", "p", "sparsity", "pattern"))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(r) + " |" for r in (head, ["---"] * len(head), *rows)]


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: speed-ups by class and sparsity; then what the model expected of them."""
    first = [r for r in rows if r["sparsity"] and r["rank"] == 0]
    fastest: dict[Any, float] = {}
    for r in (r for r in rows if r["sparsity"]):
        fastest[key(r)] = min(r["us"], fastest.get(key(r), r["us"]))
    summary = []
    kinds = list(dict.fromkeys(r["kind"] for r in first))
    for pattern, zeros in dict.fromkeys((r["pattern"], r["sparsity"]) for r in first):
        for kind in [*kinds, "all"]:
            part = [
                r for r in first if (r["pattern"], r["sparsity"]) == (pattern, zeros) and kind in (r["kind"], "all")
            ]
            if part:
                summary.append([pattern, f"{zeros:.0%}", kind, *summed(part, fastest)])
    head = (
        "pattern", "zeros", "class", "over cuBLAS", "over our dense", "over the better", "fastest tried", "least",
        "over cuSPARSE", "least", "chosen over dense", "least",
    )  # fmt: skip
    out = [*table(head, summary), "", "Measured over expected time (geometric mean, least, most):", ""]
    for name, some in (("sparse", first), ("dense", [r for r in rows if not r["sparsity"]])):
        ratios = [r["us"] / r["expected"] for r in some]
        if ratios:
            out.append(f"- {name}: {mean(ratios)}, {min(ratios):.2f}, {max(ratios):.2f}")
    out += ["", f"Kernels: {len(rows)}, wrong: {sum(r['error'] > TOLERANCE for r in rows)}.", ""]
    head = ("class", "M, K, P", "zeros", "pattern", "us", "cuBLAS", "our dense", "cuSPARSE", "expected", "choice")
    each = []
    for r in (r for r in first if r["sparsity"] in (0.9, 0.95)):
        times = (f"{r[k]:.1f}" if r[k] else "" for k in ("us", "cublas", "dense", "cusparse", "expected"))
        sizes = f"{r['m']}, {r['k']}, {r['p']}"
        each.append([r["kind"], sizes, f"{r['sparsity']:.0%}", r["pattern"], *times, r["choice"]])
    return "\n".join([*out, *table(head, each)])


def summed(part: Sequence[dict[str, Any]], fastest: dict[Any, float]) -> list[str]:
    """Cells of a row of the summary."""
    better = [min(r["cublas"], r["dense"]) / r["us"] for r in part]
    tried = [min(r["cublas"], r["dense"]) / fastest[key(r)] for r in part]
    peers = [r["cusparse"] / r["us"] for r in part if r["cusparse"]]
    policy = [r["dense"] / r["us"] if r["gain"] >= r["least"] else 1.0 for r in part]
    over = [mean([r[k] / r["us"] for r in part]) for k in ("cublas", "dense")]
    ends = [f"{min(peers):.2f}" if peers else "", mean(policy), f"{min(policy):.2f}"]
    return [*over, mean(better), mean(tried), f"{min(better):.2f}", mean(peers), *ends]


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--only", default="", help="shapes whose name holds one of these words, separated by semicolons")
    ap.add_argument("--sparsity", default="0.9,0.95,0.98")
    ap.add_argument("--patterns", default="magnitude,rmat")
    ap.add_argument("--inner", choices=("pixels", "terms"), default="pixels", help="what lies side by side in memory")
    ap.add_argument("--candidates", type=int, default=2, help="encodings of each matrix that are timed")
    ap.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    ap.add_argument("--out", type=Path, default=Path())
    ap.add_argument("--emit-only", action="store_true", help="compile the kernels; needs no GPU")
    a = ap.parse_args()
    cases = []
    for c in (c for c in shapes(a.inner) if any(word in c.name for word in a.only.split(";"))):
        cases.append(c)
        for pattern in a.patterns.split(","):
            cases += [replace(c, sparsity=float(s), pattern=pattern) for s in a.sparsity.split(",")]
    found = built(cases, a.candidates, a.workers)
    if a.emit_only:
        for x in (x for row in found.values() for x in row):
            expected = f"{x.cycles / CLOCK:7.1f} us, {x.gain:5.2f}"
            print(f"{x.case.name:60} {x.code.registers:4} registers, {expected}: {x.choice}")
        return 0
    rows = timed(found)
    text = tables(rows)
    a.out.mkdir(parents=True, exist_ok=True)
    (a.out / "sparse.json").write_text(json.dumps(rows))
    (a.out / "sparse.md").write_text(text + "\n")
    print(text)
    return int(any(r["error"] > TOLERANCE for r in rows))


if __name__ == "__main__":
    sys.exit(main())
