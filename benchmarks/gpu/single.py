"""Single kernels on one GPU, beside a library's call for the same: what the scripts kernels, contractions, attention
and memory_bound share.

In: cases, each a group of nodes with PyTorch's call for it, and the schedules to try. Kernels are made as the driver
makes them. Each is checked before it is timed: what the replayed graph wrote into every set of arrays is compared in
float64, errors relative to the largest element.

Times are microseconds of one call out of a CUDA graph of many, medians over replays that take turns. Inputs and
results, the library's too, rotate through COLD_BYTES, more than the L2 cache holds (of small cases through as many sets
as the graph has calls), unless they are to be warm. A ratio is the library's time over ours: of the first schedule,
which is what is used without tuning, and of the fastest right one. Where these differ, the model that orders the
schedules is to be looked at.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dnnc.backends.cuda.device import open_device
from dnnc.backends.cuda.emit import emit_kernel, launch_of
from dnnc.backends.cuda.nvrtc import Compiled, compile_many
from dnnc.backends.cuda.spelling import supported
from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates import templates
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.stmt import Eval, Kernel, walk_stmts
from dnnc.ir.loops.verify import verify_kernel
from dnnc.ir.types import TensorType
from dnnc.passes.lower.expand import decompose
from dnnc.passes.lower.nests import lower
from dnnc.passes.schedule.problem import Choice, Problem, classify

CALLS = 20  # of a graph
WARM = 2  # replays before any is timed
COLD_BYTES = 150 << 20
LAST = '@ "0 2 3 1"'  # channels are the last axis in memory
TOLERANCE = {
    "f16": 4e-3,
    "bf16": 2e-2,
    "f32": 3e-5,
    "f64": 1e-12,
    "i64": 0.0,
    "i32": 0.0,
    "i8": 1.01 / 127,
    "u8": 1.01 / 255,
    "f8e4m3fn": 0.07,
}
# of results by their type: bytes may be off by a step
TOLERANCE_TF32 = 2e-3
TORCH_TYPES = {
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
    "i64": "int64",
    "i32": "int32",
    "i8": "int8",
    "f8e4m3fn": "float8_e4m3fn",
    "u8": "uint8",
}
Call = Callable[..., Any]
Choices = Callable[[Problem], list[Choice]]


@dataclass(frozen=True)
class Case:
    """`peer`: the library's call, which is timed. `want`: what results are compared with, of float64. Both take what
    kernels take, but the output. `below`: integers among the inputs, which are indices, are less than it.
    """

    name: str
    problem: Problem
    peer: Call
    want: Call
    below: int = 1

    @property
    def nbytes(self) -> int:
        """Of inputs and output, each once."""
        return sum(int(v.type.nbytes) for v in self.problem.lowered.params)  # type: ignore[arg-type, misc]

    def rate(self, us: float) -> str:
        moved = f"{self.nbytes / us / 1e3:5.0f} GB/s"
        return moved if self.problem.anchor is None else (f"{float(self.problem.flops) / us / 1e6:6.1f} TF {moved}")  # type: ignore[arg-type]


def case(name: str, inputs: str, body: str, peer: Call, want: Call | None = None, below: int = 1) -> Case:
    """A group as graph text whose result is `y`, its lines separated by semicolons. `peer` and `want` take the inputs
    in this order.
    """
    g = parse(f"def f({inputs}):\n" + "".join(f"    {line}\n" for line in body.split("; ")) + "    return y\n")
    nodes = list(g.nodes())
    lowered = lower(g, nodes, g.outputs)
    places = [lowered.params.index(v) for v in g.inputs]  # of kernels' arguments, which come in the order of their uses

    def ordered(call: Call) -> Call:
        return lambda *arguments: call(*(arguments[k] for k in places))

    return Case(name, classify(nodes, lowered), ordered(peer), ordered(want or peer), below)


class Schedules:
    """What the driver offers for a target. `rounded`: operands in float32 may be rounded to TF32."""

    def __init__(self, rounded: bool = False) -> None:
        self.target, self.rounded = GpuTarget(), rounded
        self.templates = templates(self.target, rounded)

    def offered(self, problem: Problem, names: Collection[str], each: int | None = None) -> list[Choice]:
        """Of the templates of these names, `each` with so many; best guess first."""
        return [
            Choice(t.name, knobs) for t in self.templates if t.name in names for knobs in t.candidates(problem)[:each]
        ]

    def kernel(self, problem: Problem, choice: Choice) -> Kernel:
        template = next(t for t in self.templates if t.name == choice.template)
        return verify_kernel(decompose(template.apply(problem, dict(choice.knobs)), supported("standard")))


@dataclass(frozen=True)
class Candidate:
    case: Case
    choice: Choice
    kernel: Kernel
    symbol: str
    code: Compiled

    @property
    def waits(self) -> bool:
        """Does it wait by itself for the kernel before it, and so may begin early?"""
        return any(isinstance(s, Eval) and s.name == "pdl_wait" for f in self.kernel.funcs for s in walk_stmts(f.body))

    @property
    def limit(self) -> float:
        """The largest error that it may have."""
        return (
            TOLERANCE_TF32
            if self.choice.template == "tf32"
            else TOLERANCE[self.case.problem.lowered.params[-1].type.dtype.name]
        )

    def __str__(self) -> str:
        c, shared = self.code, self.code.shared_bytes + launch_of(self.kernel).shared_bytes
        return (
            f"{self.case.name:30} {c.registers:4} registers, {c.spills:4} bytes spilled, {shared:6} shared: "
            f"{self.choice}"
        )


def compiled(cases: Sequence[Case], choices: Choices, schedules: Schedules) -> list[tuple[Case, list[Candidate]]]:
    """The candidates of each case."""
    start, target = time.perf_counter(), schedules.target
    made = [(c, choice, schedules.kernel(c.problem, choice)) for c in cases for choice in choices(c.problem)]
    texts = {
        f"kernel_{k}": (emit_kernel(kernel, f"kernel_{k}", target), target.arch)
        for k, (_, _, kernel) in enumerate(made)
    }
    codes = compile_many(texts, os.cpu_count() or 1)
    found = [Candidate(*m, symbol, codes[symbol]) for m, symbol in zip(made, texts)]
    print(f"{len(found)} kernels in {time.perf_counter() - start:.1f} s; spills {sum(x.code.spills for x in found)}, "
          f"local memory of {[f'{x.case.name} {x.choice}' for x in found if x.code.local_bytes]}",
          flush=True)  # fmt: skip
    return [(c, [x for x in found if x.case is c]) for c in cases]


class Arrays:
    """Several sets of a case's inputs and outputs, and what the outputs should be."""

    def __init__(self, c: Case, warm: bool) -> None:
        import torch

        torch.manual_seed(0)
        *given, result = c.problem.lowered.params
        self.count = 1 if warm else max(1, min(CALLS, -(-COLD_BYTES // c.nbytes)))
        self.inputs = [[self.drawn(v.type, c.below) for v in given] for _ in range(self.count)]
        self.outputs = [self.drawn(result.type) for _ in range(self.count)]
        self.wants = [
            c.want(*(x.double() if x.is_floating_point() else x for x in inputs)).double() for inputs in self.inputs
        ]

    @staticmethod
    def drawn(t: TensorType, below: int = 1) -> Any:
        """Random elements, laid out as the type says."""
        import torch

        if t.dtype.bytes == 1 and not t.dtype.is_float:
            low, high = t.dtype.range
            return torch.randint(low, high + 1, t.shape, device="cuda", dtype=getattr(torch, TORCH_TYPES[t.dtype.name]))
        if not t.dtype.is_float:
            return torch.randint(below, t.shape, device="cuda", dtype=getattr(torch, TORCH_TYPES[t.dtype.name]))

        assert t.row_major or f'@ "{t.layout}"' == LAST
        x = torch.randn(t.shape, device="cuda").to(getattr(torch, TORCH_TYPES[t.dtype.name]))
        return x if t.row_major else x.contiguous(memory_format=torch.channels_last)

    def overwrite(self) -> None:
        """The outputs, with what no kernel computes."""
        for x in self.outputs:
            x.fill_(math.nan if x.is_floating_point() else -7)

    def error(self) -> float:
        """The largest of all sets, relative to the largest element; a NaN is infinitely wrong."""
        gaps = [
            float((x.double() - want).abs().max() / want.abs().max().clamp(min=1e-30))
            for x, want in zip(self.outputs, self.wants)
        ]
        return math.inf if any(math.isnan(gap) for gap in gaps) else max(gaps)


def graph_of(call: Callable[[int], Any], sets: int) -> Any:
    """A graph of calls on one set after the other."""
    import torch

    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for k in range(sets):
            call(k)
        stream.synchronize()
        results = {}  # kept while the graph is recorded, so that the library's results have memory of their own
        with torch.cuda.graph(graph, stream=stream):
            for k in range(CALLS):
                results[k % sets] = call(k % sets)
    return graph


def microseconds(graphs: Sequence[Any], replays: int, pause: float = 0.0) -> list[float]:
    """Of one call, for each graph; they take turns, with so many seconds of rest before each."""
    import torch

    found: list[list[float]] = [[] for _ in graphs]
    for _ in range(WARM + replays):
        for times, graph in zip(found, graphs):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            time.sleep(pause)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / CALLS)
    return [statistics.median(times[WARM:]) for times in found]


@dataclass(frozen=True)
class Result:
    candidate: Candidate
    us: float
    ratios: list[float]  # one for each repeat
    error: float

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def right(self) -> bool:
        return self.error <= self.candidate.limit

    def __str__(self) -> str:
        spread = f" ({min(self.ratios):.3f} to {max(self.ratios):.3f})" if len(self.ratios) > 1 else ""
        return (
            f"{self.us:8.2f} us, ratio {self.ratio:6.3f}{spread}, {'' if self.right else 'WRONG '}error "
            f"{self.error:.1e}: {self.candidate.choice}"
        )

    def row(self, library: float) -> dict[str, Any]:
        """For --json."""
        c, choice = self.candidate.case, self.candidate.choice
        named = {"name": c.name, "template": choice.template, "tiling": "x".join(str(v) for _, v in choice.knobs)}
        return {**named, "us": self.us, "error": self.error, "library_us": library, "ratio": self.ratio}


def measured(
    c: Case, found: Sequence[Candidate], a: argparse.Namespace, rivals: Sequence[Any] = (), pause: float = 0.0
) -> tuple[list[float], list[Result]]:
    """The microseconds of the library's call and of other graphs, `rivals`, and what the candidates gave, whose ratios
    are those of the fastest of the former. All take turns, after so many seconds of rest.
    """
    import torch

    device, arrays = open_device(), Arrays(c, a.warm)
    status = torch.zeros(4, dtype=torch.int32, device="cuda")
    graphs, functions, errors = [graph_of(lambda k: c.peer(*arrays.inputs[k]), arrays.count)], [], []
    for x in found:
        launch = launch_of(x.kernel)
        function = device.load(x.code.cubin, x.symbol, launch, [p.name for p in x.kernel.entry.params], x.waits)
        functions.append(function)  # a graph keeps no function alive that it calls

        def call(k: int, function: Any = function, launch: Any = launch) -> None:
            addresses = [t.data_ptr() for t in (*arrays.inputs[k], arrays.outputs[k], status)]
            device.launch(function, launch, addresses, torch.cuda.current_stream().cuda_stream)

        graphs.append(graph_of(call, arrays.count))
        arrays.overwrite()
        graphs[-1].replay()
        torch.cuda.synchronize()
        errors.append(arrays.error())
    graphs += rivals
    times = list(zip(*(microseconds(graphs, a.replays, pause) for _ in range(a.repeats))))
    graphs.clear()  # before the functions
    peers, ours = [times[0], *times[1 + len(found) :]], times[1 : 1 + len(found)]
    ratios = [[min(theirs) / own for *theirs, own in zip(*peers, t)] for t in ours]
    return list(map(statistics.median, peers)), [
        Result(x, statistics.median(t), r, e) for x, t, r, e in zip(found, ours, ratios, errors)
    ]


def report(c: Case, library: float, results: Sequence[Result]) -> tuple[float | None, float | None]:
    """Print a case; the ratios of the first schedule and of the fastest one, None where they are wrong."""
    first, best = results[0], min((r for r in results if r.right), key=lambda r: r.us, default=None)
    fastest = f"best {best.us:8.2f} us, ratio {best.ratio:6.3f}" if best else "no kernel is right"
    ours = f"ours {first.us:8.2f} us {c.rate(first.us)}, ratio {first.ratio:6.3f}"
    print(f"{c.name:30} library {library:8.2f} us {c.rate(library)} | {ours} | {fastest}")
    print(*(f"    {r}" for r in results), sep="\n", flush=True)
    return first.ratio if first.right else None, best.ratio if best else None


def options(text: str | None) -> argparse.ArgumentParser:
    """What every script takes."""
    ap = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--only", default="", help="cases whose name holds one of these words, separated by commas")
    ap.add_argument("--emit-only", action="store_true", help="print registers and spills of each kernel; needs no GPU")
    ap.add_argument("--warm", action="store_true", help="the same arrays in each call")
    ap.add_argument("--replays", type=int, default=15, help="of each graph, for one median")
    ap.add_argument(
        "--repeats", type=int, default=1, help="medians, of which ratios are taken; the median of these counts"
    )
    ap.add_argument("--json", type=Path, help="append a line for each kernel")
    return ap


def run(cases: Sequence[Case], choices: Choices, schedules: Schedules, a: argparse.Namespace, **more: str) -> int:
    """Compile, check, measure and print; exit code 1 for a wrong kernel. `more`: for each line of --json."""
    every = compiled([c for c in cases if any(word in c.name for word in a.only.split(","))], choices, schedules)
    for c, found in every:
        if a.emit_only or not found:
            print("\n".join(map(str, found)) or f"{c.name:30} no schedule")
    if a.emit_only:
        return 0
    import torch

    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = schedules.rounded
    torch.backends.cudnn.benchmark = True
    wrong, ratios = 0, []
    for c, found in ((c, found) for c, found in every if found):
        (library,), results = measured(c, found, a)
        ratios.append(report(c, library, results))
        wrong += sum(not r.right for r in results)
        if a.json:
            with a.json.open("a") as f:
                f.writelines(json.dumps(r.row(library) | more) + "\n" for r in results)
    for what, every_one in zip(("first schedules", "fastest schedules"), zip(*ratios)):
        right = [r for r in every_one if r is not None]
        if right:
            print(
                f"geometric mean of the ratios, {what}: {statistics.geometric_mean(right):.3f} over {len(right)} of "
                f"{len(ratios)}"
            )
    print(f"wrong kernels: {wrong}")
    return int(wrong > 0)
