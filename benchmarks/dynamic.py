"""One program for all sizes against programs made for one: a transformer with symbolic batch and length.

    python benchmarks/dynamic.py --models DIR [--model bert_base] [--layers 2] [--shapes 200] [--static 40]
        [--batch 16] [--length 512]
                                 [--tokens 8192] [--threads 2] [--seed 0]

Random shapes, half of them drawn evenly and half on a logarithmic scale, each through one program for all. Every result
must agree with ONNX Runtime, nothing may be compiled after the first call, and a plan of memory for a shape that is new
must take at most 20 ms of CPU time. For some of the shapes (`--static`), spread over the number of tokens, a program of
its own is compiled, and the two are timed in turns, from the second call on. Memory is what the process has after the
first call, after the shapes, and after 2,000 more that are planned and not run.

`--layers` cuts BERT off behind so many layers: at 16 x 512 the whole of it takes seconds a call. `--tokens` leaves out
larger shapes. DIR is made by `python benchmarks/zoo build DIR --only bert_base`, or with `--weights seeded`. The exit
status is 1 when a result is wrong, something was compiled, or a plan took too long.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import zoo
from onnx import helper
from rich.console import Console
from rich.progress import track
from rich.table import Table

import dnnc

PAUSE = 0.005  # seconds between the two programs, whose pools are one, so that neither finds it warmer
TOLERANCE = 1e-4  # of the largest value
PLAN = 0.020  # seconds
PLANNED = 2000  # shapes beyond those that are run
Sizes = dict[str, int]
Array = np.ndarray[Any, Any]


def cut(model: onnx.ModelProto, layers: int) -> onnx.ModelProto:
    """The model up to the last value of a layer, counted from 1, by the names of its nodes."""
    last = [n for n in model.graph.node if f"layer.{layers - 1}/" in n.name][-1].output[0]
    needed, kept = {last}, []
    for n in reversed(model.graph.node):
        if needed & set(n.output):
            kept.append(n)
            needed |= set(n.input)
    g = model.graph
    shape = [d.dim_param or d.dim_value for d in g.output[0].type.tensor_type.shape.dim]
    out = helper.make_tensor_value_info(last, onnx.TensorProto.FLOAT, shape)
    weights = [t for t in g.initializer if t.name in needed]
    made = helper.make_graph(kept[::-1], g.name, list(g.input), [out], weights)
    return helper.make_model(made, opset_imports=model.opset_import, ir_version=model.ir_version)


def draw(rng: np.random.Generator, most: Mapping[str, int], count: int, tokens: int) -> list[Sizes]:
    """Sizes of at most so many tokens: every second one even on a logarithmic scale."""
    out: list[Sizes] = []
    while len(out) < count:
        log = len(out) % 2
        sizes = {
            n: round(float(np.exp(rng.uniform(0, np.log(m))))) if log else int(rng.integers(1, m + 1))
            for n, m in sorted(most.items())
        }
        if np.prod(list(sizes.values())) <= tokens:
            out.append(sizes)
    return out


def inputs(rng: np.random.Generator, f: Any, sizes: Mapping[str, int]) -> list[Array]:
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


def several(x: Any) -> tuple[Array, ...]:
    return x if isinstance(x, tuple) else (x,)


def seconds(calls: Sequence[Any], arrays: Sequence[Array], repeats: int) -> list[list[float]]:
    """Times of the programs, in turns."""
    times: list[list[float]] = [[] for _ in calls]
    start = time.perf_counter()
    while len(times[0]) < repeats or (time.perf_counter() - start < 0.3 and len(times[0]) < 200):
        for f, mine in zip(calls, times):
            time.sleep(PAUSE)
            for k in range(3):  # the first finds the other's weights in the cache
                begin = time.perf_counter()
                f(*arrays)
                if k:
                    mine.append(time.perf_counter() - begin)
    return times


def resident() -> float:
    """Megabytes that the process has in memory now."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


class Bench:
    """A model as one program, with ONNX Runtime beside it, and what was found."""

    def __init__(self, a: argparse.Namespace) -> None:
        model = zoo.materialize(a.models / f"{a.model}.onnx")
        self.model = (cut(model, a.layers) if a.layers else model).SerializeToString()
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = a.threads
        options.enable_cpu_mem_arena = False  # it keeps the memory of the largest call, which would be counted here
        self.peer = ort.InferenceSession(self.model, options, providers=["CPUExecutionProvider"])
        self.a, self.rng = a, np.random.default_rng(a.seed)
        names = {d for i in self.peer.get_inputs() for d in i.shape if isinstance(d, str)}
        self.most = {n: a.batch if "batch" in n else a.length for n in names}
        start = time.perf_counter()
        self.f = dnnc.compile(self.model, dims={n: (1, m) for n, m in self.most.items()}, threads=a.threads)
        self.f(*inputs(self.rng, self.f, dict.fromkeys(names, 2)))
        self.compiled_in = time.perf_counter() - start
        self.memory = [resident()]
        self.errors: list[float] = []
        self.plans: list[float] = []
        self.cpu: list[float] = []  # of the thread that plans, without what others on the machine take
        self.ratios: list[tuple[float, float, Sizes, float, float]] = []

    def shape(self, sizes: Sizes, compare: bool) -> None:
        """Plan, run and check a shape; time it against a program of its own."""
        arrays = inputs(self.rng, self.f, sizes)
        self.plan(arrays)
        want = self.peer.run(None, dict(zip((s.name for s in self.f.inputs), arrays)))
        self.errors.append(
            max(float(np.abs(x - y).max() / np.abs(y).max()) for x, y in zip(several(self.f(*arrays)), want))
        )
        if compare:
            own = dnnc.compile(self.model, dims=sizes, threads=self.a.threads)
            own(*arrays)
            shared, single = seconds((self.f, own), arrays, self.a.repeats)
            times = float(np.median(shared)), float(np.median(single))
            self.ratios.append((times[0] / times[1], min(shared) / min(single), sizes, *times))
            del own
            gc.collect()  # what compiling it left behind, which would else be collected in the middle of some plan

    def plan(self, arrays: Sequence[Array]) -> None:
        start, own = time.perf_counter(), time.thread_time()
        self.f.cache.instance(tuple(a.shape for a in arrays))
        self.plans.append(time.perf_counter() - start)
        self.cpu.append(time.thread_time() - own)

    def run(self) -> None:
        a = self.a
        shapes = draw(self.rng, self.most, a.shapes, a.tokens)
        by_tokens = sorted(range(len(shapes)), key=lambda k: int(np.prod(list(shapes[k].values()))))
        chosen = {by_tokens[int(k)] for k in np.linspace(0, len(shapes) - 1, min(a.static, len(shapes)))}
        for k in track(range(len(shapes)), description="shapes", console=Console(stderr=True)):
            self.shape(shapes[k], k in chosen)
        self.memory.append(resident())
        for sizes in draw(self.rng, self.most, PLANNED, a.batch * a.length):
            self.plan(inputs(self.rng, self.f, sizes))
        self.memory.append(resident())

    def arenas(self) -> list[int]:
        """Bytes of the frames that are kept."""
        return [held.frame.arena.nbytes for held in self.f._compiler.frames]

    def table(self) -> Table:
        a = self.a
        cut_to = f", first {a.layers} layers" if a.layers else ""
        bounds = ", ".join(f"{n} 1 to {m}" for n, m in sorted(self.most.items()))
        table = Table(title=f"{a.model}{cut_to}: one program for {bounds}; {a.threads} threads")
        for c in ("shape", "one program ms", "own program ms", "ratio", "of shortest"):
            table.add_column(c, justify="left" if c == "shape" else "right")
        for r, least, sizes, mine, own in sorted(self.ratios, key=lambda x: (x[0], x[1])):
            table.add_row(
                " x ".join(str(sizes[n]) for n in sorted(sizes)),
                f"{mine * 1e3:.2f}",
                f"{own * 1e3:.2f}",
                f"{r:.2f}",
                f"{least:.2f}",
            )
        return table

    def lines(self) -> list[str]:
        plans, ratios = sorted(self.plans), sorted(r[0] for r in self.ratios)
        programs = len(self.f.programs)
        wrong = sum(not e <= TOLERANCE for e in self.errors)
        out = [
            f"right: {len(self.errors) - wrong} of {len(self.errors)} shapes, largest error {max(self.errors):.1e} of "
            "the largest value",
            f"compiled: one program in {self.compiled_in:.1f} s; after the first call "
            f"{'nothing' if programs == 1 else f'{programs - 1} programs'}",
            f"plan of a new shape: median {np.median(plans) * 1e3:.2f} ms, at most {plans[-1] * 1e3:.2f} ms "
            f"({max(self.cpu) * 1e3:.2f} ms of CPU time), {len(plans)} shapes",
            f"memory: {self.memory[0]:.0f} MB after the first call, {self.memory[1]:.0f} MB after {len(self.errors)} "
            f"shapes, {self.memory[2]:.0f} MB after "
            f"{PLANNED} more plans; {len(self.f.cache.instances)} plans kept, arena {sum(self.arenas()) / 1e6:.0f} MB "
            f"in {len(self.arenas())} frames",
        ]
        if ratios:
            within = sum(r <= 1.1 for r in ratios)
            least = float(np.median([r[1] for r in self.ratios]))
            out.append(
                f"time against a program of its own: median {np.median(ratios):.3f}, at most {ratios[-1]:.2f}, "
                f"{within} of {len(ratios)} sampled shapes "
                f"within 1.10; by shortest times median {least:.3f}, at most {max(r[1] for r in self.ratios):.2f}"
            )
        return out

    def fine(self) -> bool:
        return len(self.f.programs) == 1 and max(self.cpu) <= PLAN and all(e <= TOLERANCE for e in self.errors)


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--models", type=Path, required=True)
    ap.add_argument("--model", default="bert_base")
    ap.add_argument("--layers", type=int, default=0, help="of BERT, to save time; default: all")
    ap.add_argument("--shapes", type=int, default=200)
    ap.add_argument("--static", type=int, default=40, help="of these, how many are compiled for their shape as well")
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--length", type=int, default=512)
    ap.add_argument("--tokens", type=int, default=8192, help="batch times length at most, to bound the time")
    ap.add_argument("--repeats", type=int, default=6, help="calls that are timed at least")
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--seed", type=int, default=0)
    bench = Bench(ap.parse_args())
    bench.run()
    console = Console(width=120)
    if bench.ratios:
        console.print(bench.table())
    for line in bench.lines():
        print(line)
    return 0 if bench.fine() else 1


if __name__ == "__main__":
    sys.exit(main())
