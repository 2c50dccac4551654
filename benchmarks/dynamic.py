"""One program for all sizes against programs made for one: a transformer with symbolic batch and length.

    python benchmarks/dynamic.py --models DIR [--model bert_base] [--shapes 200] [--static 20] [--batch 16] [--length 512] [--threads 2]

Random shapes are run through one program. Each must agree with ONNX Runtime, and nothing may be compiled after the first call. For some of
the shapes (`--static`) a program of its own is compiled, and the two are timed in turns, from the second call on. Memory is printed at the
start and at the end. DIR is made by `python benchmarks/zoo build DIR`.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import dnnc

PAUSE = 0.005  # seconds between the two programs, whose pools are one, so that neither finds it warmer


def inputs(rng: np.random.Generator, f: Any, sizes: dict[str, int]) -> list[np.ndarray]:
    """Token ids below 1,000, ones for masks, zeros for segments."""
    out = []
    for s in f.inputs:
        shape = [d if isinstance(d, int) else sizes[d] for d in s.shape]
        if "mask" in s.name:
            out.append(np.ones(shape, s.dtype))
        elif "type" in s.name:
            out.append(np.zeros(shape, s.dtype))
        else:
            out.append(rng.integers(0, 1000, shape).astype(s.dtype))
    return out


def several(x: Any) -> tuple[np.ndarray, ...]:
    return x if isinstance(x, tuple) else (x,)


def seconds(f: Any, g: Any, arrays: list[np.ndarray], repeats: int) -> tuple[float, float]:
    """Medians of the two, in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for h, mine in ((f, times[0]), (g, times[1])):
            time.sleep(PAUSE)
            start = time.perf_counter()
            h(*arrays)
            mine.append(time.perf_counter() - start)
    return float(np.median(times[0])), float(np.median(times[1]))


def resident() -> float:
    """Megabytes of the process at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--models", type=Path, required=True)
    ap.add_argument("--model", default="bert_base")
    ap.add_argument("--shapes", type=int, default=200)
    ap.add_argument("--static", type=int, default=20, help="of these, how many are compiled for their shape as well")
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--length", type=int, default=512)
    ap.add_argument("--tokens", type=int, default=2048, help="batch times length at most, to bound the time")
    ap.add_argument("--repeats", type=int, default=7)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--seed", type=int, default=0)
    a = ap.parse_args()
    path = str(a.models / f"{a.model}.onnx")
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = a.threads
    peer = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(a.seed)
    names = {d for i in peer.get_inputs() for d in i.shape if isinstance(d, str)}
    most = {n: a.batch if "batch" in n else a.length for n in names}
    f = dnnc.compile(path, dims={n: (1, m) for n, m in most.items()}, threads=a.threads)
    f(*inputs(rng, f, dict.fromkeys(names, 2)))
    kernels, before = len(f.natives), resident()
    worst, plans, ratios = 0.0, [], []
    console = Console()
    for k in track(range(a.shapes), description="shapes", console=Console(stderr=True)):
        while True:
            sizes = {n: round(float(np.exp(rng.uniform(0, np.log(m))))) for n, m in sorted(most.items())}
            if np.prod(list(sizes.values())) <= a.tokens:
                break
        arrays = inputs(rng, f, sizes)
        start = time.perf_counter()
        f._bind(arrays)
        plans.append(time.perf_counter() - start)
        want = peer.run(None, dict(zip((s.name for s in f.inputs), arrays)))
        worst = max([worst, *(float(np.abs(x - y).max() / np.abs(y).max()) for x, y in zip(several(f(*arrays)), want))])
        if k % max(1, a.shapes // max(a.static, 1)) == 0 and len(ratios) < a.static:
            g = dnnc.compile(path, dims=sizes, threads=a.threads)
            g(*arrays)
            mine, own = seconds(f, g, arrays, a.repeats)
            ratios.append((mine / own, sizes, mine, own))
    table = Table(title=f"{a.model}: one program for {', '.join(f'{n} 1 to {m}' for n, m in most.items())}; {a.threads} threads")
    for c in ("shape", "one program ms", "own program ms", "ratio"):
        table.add_column(c, justify="left" if c == "shape" else "right")
    for r, sizes, mine, own in sorted(ratios, key=lambda x: x[0]):
        table.add_row(" x ".join(str(sizes[n]) for n in sorted(sizes)), f"{mine * 1e3:.2f}", f"{own * 1e3:.2f}", f"{r:.2f}")
    compiled = "nothing" if len(f.natives) == kernels == 1 else f"{len(f.natives)} programs were"
    table.caption = (
        f"{a.shapes} shapes, largest error / scale {worst:.1e}; {compiled} compiled after the first call; a plan takes {np.median(plans) * 1e3:.2f} ms "
        f"(at most {max(plans) * 1e3:.2f}); median ratio {np.median([r[0] for r in ratios]):.3f}; memory at most {before:.0f} MB at first, {resident():.0f} MB at the end"
    )
    console.print(table)


if __name__ == "__main__":
    main()
