"""Convolutions by class on one GPU: grouped, depthwise, with a channel multiplier, first layers, long 1-D, 3-D,
dilated, transposed; beside PyTorch.

    python benchmarks/gpu/convolutions.py [--only WORD,WORD] [--minutes 5.5] [--others N] [--compile] [--json OUT]
        [--emit-only]
    PYTHONPATH=.types python3 benchmarks/gpu/convolutions.py     where dnnc is not installed; `make .types` makes that
                                                                 folder

A case is relu(conv(x, w) + b) as a model has it: it goes through all passes, which choose layouts, and its kernels are
timed without those that only change the order of the input and the output. Every kernel is checked against float64 at
sampled outputs before it is timed. Times are microseconds of one call out of a CUDA graph of many, medians over
replays; activations stay where they are, and so may lie in the L2 cache, as in a model.

Columns: `floor`, what the bytes (at the memory's rate) or the multiply-adds (at the tensor cores' rate, or that of
float32) take at the least; `ours`; `eager`, cuDNN's choice by cudnn.benchmark with channels last; `compile`,
torch.compile's with --compile; `ratio`, the fastest peer's time over ours; the schedule. Below a case, up to --others
kernels of other schedules, the first of each template. Without PyTorch, ours alone are timed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dnnc.backends.cuda.check import check_kernel
from dnnc.backends.cuda.device import open_device
from dnnc.backends.cuda.emit import emit_kernel, launch_of
from dnnc.backends.cuda.nvrtc import Compiled, compile_many
from dnnc.backends.cuda.spelling import supported
from dnnc.backends.cuda.target import DEFAULT_ARCH, FACTS, GpuTarget, ask_device
from dnnc.backends.registry import open_backend
from dnnc.compile_program import schedule
from dnnc.ir.errors import AccuracyError, DnncError
from dnnc.ir.graph import Graph, Value
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.stmt import Eval, Kernel, walk_stmts
from dnnc.ir.loops.verify import verify_kernel
from dnnc.ir.op import Trait
from dnnc.options import CompileOptions
from dnnc.passes.lower.expand import decompose
from dnnc.passes.planning.program import Scheduled, Step, lower_group
from dnnc.passes.schedule.problem import Choice, Problem, classify

CALLS, WARM, REPLAYS = 20, 3, 11  # calls of a graph, replays before any is timed, replays
CLOCK = 1.755e9  # hertz, of an H200 under load
RATES = {"f16": 4096.0, "f32": 256.0}  # operations a cycle of an SM at the peak: wgmma in halves, fused multiply-adds
MOVES = {"pack", "cast", "transpose"}  # nodes that only change how a value lies
LIBRARIES = ("cublaslt", "cudnn")


@dataclass(frozen=True)
class Case:
    """A convolution: `shape` of x, `filters` of w as ONNX has them; one stride, padding and dilation for all axes."""

    kind: str
    name: str
    shape: tuple[int, ...]
    filters: tuple[int, ...]
    stride: int = 1
    pad: int = 0
    dilation: int = 1
    group: int = 1
    dtype: str = "f16"
    transposed: bool = False

    @property
    def rank(self) -> int:
        return len(self.shape) - 2

    @property
    def outputs(self) -> int:
        """Channels of the result."""
        return self.filters[1] * self.group if self.transposed else self.filters[0]

    def graph(self) -> Graph:
        rng = np.random.default_rng(0)
        kind = np.float16 if self.dtype == "f16" else np.float32
        scale = 1 / math.sqrt(math.prod(self.filters[1:]))
        constants = {
            "w": (rng.standard_normal(self.filters) * scale).astype(kind),
            "b": rng.standard_normal(self.outputs).astype(kind),
        }
        each = {
            "strides": (self.stride,) * self.rank,
            "pads": (self.pad,) * 2 * self.rank,
            "dilations": (self.dilation,) * self.rank,
        }
        attrs = ", ".join(f"{k}=({', '.join(map(str, v))},)" for k, v in each.items())
        op = "conv_transpose" if self.transposed else "conv"
        x, w = (", ".join(map(str, s)) for s in (self.shape, self.filters))
        return parse(
            f"def net(x: {self.dtype}[{x}], *, w: {self.dtype}[{w}], b: {self.dtype}[{self.outputs}]):\n"
            f"    h = {op}(x, w, b, {attrs}, group={self.group})\n    return relu(h)\n",
            constants=constants,
        )

    def peer(self) -> Callable[[], Any]:
        """PyTorch's call on arrays of its own."""
        import torch

        kind = torch.float16 if self.dtype == "f16" else torch.float32
        order = {2: torch.channels_last, 3: torch.channels_last_3d}.get(self.rank, torch.contiguous_format)
        x = torch.randn(self.shape, device="cuda").to(kind).contiguous(memory_format=order)
        w = torch.randn(self.filters, device="cuda").to(kind).contiguous(memory_format=order)
        b = torch.randn(self.outputs, device="cuda").to(kind)
        f = getattr(torch.nn.functional, f"conv{'_transpose' if self.transposed else ''}{self.rank}d")
        rest = (
            (self.stride, self.pad, 0, self.group, self.dilation)
            if self.transposed
            else (self.stride, self.pad, self.dilation, self.group)
        )

        def compute(x: Any, w: Any, b: Any) -> Any:
            return torch.relu(f(x, w, b, *rest))

        call = torch.compile(compute, dynamic=False) if COMPILED["on"] else compute
        return lambda: call(x, w, b)


COMPILED = {"on": False}  # are peers made by torch.compile?


def cases() -> list[Case]:
    """The ones that matter most first: a run that is short of time leaves the last ones out."""
    out = []
    for n in (1, 32):  # groups as wide as in ResNeXt, RegNet and their kin: channels, height, width of a group, stride
        for c, hw, wide, s in ((128, 56, 4, 1), (256, 28, 8, 1), (512, 14, 16, 1), (1024, 7, 32, 1), (256, 56, 8, 2),
        (408, 14, 24, 1),
                               (560, 14, 40, 1), (432, 14, 48, 1), (392, 14, 56, 1), (512, 14, 64, 1),
                               (720, 14, 120, 1)):  # fmt: skip
            out.append(
                Case(
                    "grouped",
                    f"g{wide}_c{c}_{hw}{'s2' if s == 2 else ''}_b{n}",
                    (n, c, hw, hw),
                    (c, wide, 3, 3),
                    s,
                    1,
                    group=c // wide,
                )
            )
    for c, hw, wide in ((128, 56, 4), (256, 28, 8), (512, 14, 16), (1024, 7, 32), (432, 14, 48)):
        for n in (1, 32):
            out.append(
                Case(
                    "grouped",
                    f"g{wide}_c{c}_{hw}_b{n}_f32",
                    (n, c, hw, hw),
                    (c, wide, 3, 3),
                    1,
                    1,
                    group=c // wide,
                    dtype="f32",
                )
            )
    out.append(Case("1d", "wav2vec2_pos_b1", (1, 768, 499), (768, 48, 128), 1, 64, group=16))
    for c, hw, k, n in (
        (96, 56, 7, 1),
        (384, 14, 7, 1),
        (96, 56, 7, 32),
        (240, 28, 5, 1),
        (144, 56, 3, 32),
        (128, 28, 9, 1),
        (128, 28, 13, 1),
        (64, 56, 31, 1),
    ):
        out.append(Case("depthwise", f"dw{k}_c{c}_{hw}_b{n}", (n, c, hw, hw), (c, 1, k, k), 1, k // 2, group=c))
    out.append(Case("depthwise", "dw7_c96_56_b1_f32", (1, 96, 56, 56), (96, 1, 7, 7), 1, 3, group=96, dtype="f32"))
    out.append(Case("depthwise", "dw31_1d_c512_b1", (1, 512, 1500), (512, 1, 31), 1, 15, group=512))
    for t in ("f16", "f32"):
        out.append(Case("multiplier", f"x2_c32_56_b1_{t}", (1, 32, 56, 56), (64, 1, 3, 3), 1, 1, group=32, dtype=t))
    out += [
        Case("first", "resnet_7x7s2_b1", (1, 3, 224, 224), (64, 3, 7, 7), 2, 3),
        Case("first", "resnet_7x7s2_b32", (32, 3, 224, 224), (64, 3, 7, 7), 2, 3),
        Case("first", "regnet_3x3s2_b1", (1, 3, 224, 224), (32, 3, 3, 3), 2, 1),
        Case("first", "resnet_7x7s2_b1_f32", (1, 3, 224, 224), (64, 3, 7, 7), 2, 3, dtype="f32"),
        Case("first", "r3d_3x7x7_b1", (1, 3, 16, 112, 112), (64, 3, 3, 7, 7), 2, 3),
        Case("1d", "wav2vec2_k3s2_b1", (1, 512, 7999), (512, 512, 3), 2),
        Case("dilated", "hifigan_c256_k3d3_b1", (1, 256, 800), (256, 256, 3), 1, 3, 3),
        Case("dilated", "hifigan_c128_k7d3_b1", (1, 128, 6400), (128, 128, 7), 1, 9, 3),
        Case("dilated", "hifigan_c64_k11d5_b1", (1, 64, 12800), (64, 64, 11), 1, 25, 5),
        Case("dilated", "hifigan_c32_k11d5_b1", (1, 32, 25600), (32, 32, 11), 1, 25, 5),
        Case("transposed", "hifigan_up8_b1", (1, 512, 100), (512, 256, 16), 8, 4, transposed=True),
        Case("transposed", "hifigan_up2_b1", (1, 128, 6400), (128, 64, 4), 2, 1, transposed=True),
        Case("transposed", "depthwise_up2_b1", (1, 128, 28, 28), (128, 1, 4, 4), 2, 1, group=128, transposed=True),
        Case("transposed", "grouped_up2_b1", (1, 128, 28, 28), (128, 8, 4, 4), 2, 1, group=16, transposed=True),
        Case("dilated", "aspp_c256_d12_b1", (1, 256, 33, 33), (256, 256, 3, 3), 1, 12, 12),
        Case("3d", "r3d_c64_b1", (1, 64, 8, 56, 56), (64, 64, 3, 3, 3), 1, 1),
        Case("3d", "r3d_c256_b1", (1, 256, 2, 14, 14), (256, 256, 3, 3, 3), 1, 1),
        Case("3d", "x3d_dw_c54_b1", (1, 54, 13, 40, 40), (54, 1, 3, 3, 3), 1, 1, group=54),
    ]
    for c in (out[-3], out[-11]):
        out.append(replace(c, name=c.name + "_f32", dtype="f32"))
    return out


# --- our kernels ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """The kernels of a case by one schedule of that kernel which has the convolution; `label` says which. `main`: its
    place among the steps.
    """

    case: Case
    graph: Graph
    steps: tuple[Step, ...]
    main: int

    @property
    def label(self) -> str:
        return str(self.steps[self.main].choice) + "".join(
            f" + {s.choice.template}" for k, s in enumerate(self.steps) if k != self.main
        )


class Maker:
    """Programs of cases, and other schedules of their kernels."""

    def __init__(self, target: GpuTarget, others: int) -> None:
        self.options = CompileOptions(target=f"cuda -arch={target.arch}", cache=False)
        self.target, self.others = target, others
        self.backend = open_backend(self.options.target)

    def made(self, case: Case) -> list[Made]:
        """What a model would run, then others."""
        program = schedule(case.graph(), self.backend, self.options)
        steps = tuple(s for s in program.kernels if not {n.op.name for n in s.group.nodes} <= MOVES)
        main = next((k for k, s in enumerate(steps) if any(Trait.CONTRACTION in n.op.traits for n in s.group.nodes)), 0)
        first = Made(case, program.graph, steps, main)
        return [
            first,
            *(
                replace(first, steps=(*steps[:main], s, *steps[main + 1 :]))
                for s in self.other(program.graph, steps[main])
            ),
        ]

    def other(self, graph: Graph, step: Step) -> Iterator[Step]:
        """The same step by the first schedule of each other template, then by others of its own."""
        g = step.group
        problem = classify(g.nodes, lower_group(graph, g), {*graph.constants, *graph.parameters})
        offered = [(t.name, t.candidates(problem)) for t in self.machine.templates if t.name not in LIBRARIES]
        firsts = [Choice(name, found[0]) for name, found in offered if found]
        own = [Choice(name, k) for name, found in offered if name == step.choice.template for k in found[1:]]
        choices = [c for c in dict.fromkeys([*firsts[:3], *own, *firsts[3:]]) if c != step.choice]
        for choice in choices[: self.others]:
            kernel = self.kernel(problem, choice)
            if kernel is not None:
                yield replace(step, scheduled=Scheduled.of(kernel, choice), make=lambda kernel=kernel: kernel)

    def kernel(self, problem: Problem, choice: Choice) -> Kernel | None:
        template = next(t for t in self.machine.templates if t.name == choice.template)
        try:
            return verify_kernel(decompose(template.apply(problem, dict(choice.knobs)), supported("standard")))
        except DnncError as e:
            print(f"    {choice}: {e}")
            return None


def floor(case: Case, made: Made, target: GpuTarget) -> tuple[float, float, float]:
    """Microseconds at the least, GFLOP, megabytes of input, filters and output."""
    sizes = [
        int(np.prod([int(d) for d in made.graph.outputs[0].type.shape])),
        math.prod(case.shape),
        math.prod(case.filters),
    ]  # type: ignore[call-overload]
    pixels = math.prod(case.shape[2:]) if case.transposed else sizes[0] // case.shape[0] // case.outputs
    flops = 2.0 * case.shape[0] * pixels * math.prod(case.filters)
    nbytes = sum(sizes) * (2 if case.dtype == "f16" else 4)
    rate = RATES[case.dtype] * target.sms * CLOCK
    return max(flops / rate, nbytes / target.bandwidth / 1e9) * 1e6, flops / 1e9, nbytes / 1e6


# --- on a device ------------------------------------------------------------------------------------------------------


class Bench:
    """Kernels of cases on the device of this machine."""

    def __init__(self) -> None:
        self.device = open_device()
        self.queue = self.device.new_stream()
        self.stream = self.queue.address

    def run(self, m: Made, codes: dict[str, Compiled], symbols: dict[str, str]) -> tuple[float, str]:
        """Microseconds of all steps, and what is wrong with their results."""
        device, places, wrong = self.device, self.placed(m), ""
        calls = []
        for s in m.steps:
            symbol = symbols[s.text]
            launch = launch_of(s.kernel)
            waits = any(
                isinstance(x, Eval) and x.name == "pdl_wait" for f in s.kernel.funcs for x in walk_stmts(f.body)
            )
            function = device.load(codes[symbol].cubin, symbol, launch, [p.name for p in s.kernel.entry.params], waits)
            try:
                check_kernel(m.graph, s, device, function, launch)
            except AccuracyError as e:
                wrong += f" WRONG {str(e).splitlines()[0]}"
            calls.append((function, launch, [*(places[v].address for v in s.params), places[None].address]))

        def record() -> None:
            for _ in range(CALLS):
                for function, launch, args in calls:
                    device.launch(function, launch, args, self.stream)

        graph = device.capture(self.stream, record)
        start, end = device.new_event(timing=True), device.new_event(timing=True)
        times = []
        for _ in range(WARM + REPLAYS):
            device.record(start, self.stream)
            graph.launch(self.stream)
            device.record(end, self.stream)
            device.synchronize(self.stream)
            times.append(device.elapsed(start, end) * 1e6 / CALLS)
        return statistics.median(times[WARM:]), wrong

    def placed(self, m: Made) -> dict[Value | None, Any]:
        """Memory for all values, random halves or floats of about 1 in it, and for the status."""
        rng, out = np.random.default_rng(1), {}
        for v in {v for s in m.steps for v in s.params}:
            count = math.prod(int(str(d)) for d in v.type.physical)
            data = rng.standard_normal(min(count, 1 << 20)).astype(v.type.dtype.numpy)
            block = self.device.alloc(count * v.type.dtype.bytes)
            for at in range(0, count, 1 << 20):
                part = data[: min(count - at, 1 << 20)]
                self.device.upload(block.address + at * v.type.dtype.bytes, part.view(np.uint8), self.stream)
            out[v] = block
        out[None] = self.device.alloc(64)
        self.device.fill(out[None].address, 0, 64, self.stream)
        self.device.synchronize(self.stream)
        return out


def peer_time(case: Case, compiled: bool) -> float:
    """Microseconds of PyTorch's call out of a CUDA graph."""
    import torch

    COMPILED["on"] = compiled
    call = case.peer()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(WARM):
            call()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                kept = call()
        times = []
        for _ in range(WARM + REPLAYS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / CALLS)
    del kept
    return statistics.median(times[WARM:])


def peers(case: Case, a: argparse.Namespace, left: float) -> dict[str, float]:
    """What PyTorch has for a case; nothing where it is missing or fails."""
    out = {}
    for name, compiled in (("eager", False), ("compile", True)):
        if compiled and (not a.compile or left < 60):
            continue
        try:
            out[name] = peer_time(case, compiled)
        except Exception as e:
            print(f"    {name}: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}")
    return out


def arguments() -> argparse.Namespace:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument(
        "--only", default="", help="cases whose class or name holds one of these words, separated by commas"
    )
    ap.add_argument("--minutes", type=float, default=5.5, help="after which no further case is begun")
    ap.add_argument("--others", type=int, default=3, help="schedules of a case beside the one that is used")
    ap.add_argument("--compile", action="store_true", help="time torch.compile as well: some seconds a case")
    ap.add_argument("--no-peers", action="store_true", help="ours alone")
    ap.add_argument("--arch", default=DEFAULT_ARCH, help="with --emit-only, where no device is")
    ap.add_argument("--json", type=Path, help="append a line for each case")
    ap.add_argument("--emit-only", action="store_true", help="print registers and spills of each kernel; needs no GPU")
    return ap.parse_args()


def made_of(chosen: Sequence[Case], a: argparse.Namespace, target: GpuTarget) -> list[list[Made]]:
    maker, out = Maker(target, a.others), []
    for case in chosen:
        try:
            out.append(maker.made(case))
        except DnncError as e:
            print(f"{case.name}: {type(e).__name__}: {e}", flush=True)
    return out


def main() -> int:
    a, began = arguments(), time.perf_counter()
    target = ask_device() or FACTS[a.arch]
    chosen = [c for c in cases() if any(word in f"{c.kind} {c.name}" for word in a.only.split(","))]
    every = made_of(chosen, a, target)
    kernels = {s.text: s.kernel for found in every for m in found for s in m.steps}
    symbols = {text: f"kernel_{k}" for k, text in enumerate(kernels)}
    codes = compile_many(
        {symbols[t]: (emit_kernel(k, symbols[t], target), target.arch) for t, k in kernels.items()}, os.cpu_count() or 1
    )
    print(f"{len(codes)} kernels for {target.name} in {time.perf_counter() - began:.0f} s, "
          f"{sum(c.spills > 0 for c in codes.values())} spill", flush=True)  # fmt: skip
    bench = None if a.emit_only else Bench()
    with_peers = bench is not None and not a.no_peers and _torch()
    wrong, ratios = 0, {}
    print(
        f"{'class':11} {'case':24} {'GFLOP':>7} {'MB':>6} {'floor':>7} {'ours':>8} {'eager':>8} {'compile':>8} "
        f"{'ratio':>6}  schedule"
    )
    for found in every:
        case, left = found[0].case, a.minutes * 60 - (time.perf_counter() - began)
        if left < 0:
            print(f"{case.kind:11} {case.name:24} left out: {a.minutes} minutes are over")
            continue
        least, gflop, mb = floor(case, found[0], target)
        theirs = peers(case, a, left) if with_peers else {}
        rows = [(m, *(bench.run(m, codes, symbols) if bench else (math.nan, usage(m, codes, symbols)))) for m in found]
        _, us, note = rows[0]
        ratio = min(theirs.values()) / us if theirs else math.nan
        named = "".join(f" {theirs[k]:8.2f}" if k in theirs else " " * 9 for k in ("eager", "compile"))
        print(
            f"{case.kind:11} {case.name:24} {gflop:7.3f} {mb:6.2f} {least:7.2f} {us:8.2f}{named} {ratio:6.2f}  "
            f"{found[0].label}{note}"
        )
        print("".join(f"{'':54}{t:13.2f}{'':25}  {m.label}{n}\n" for m, t, n in rows[1:]), end="", flush=True)
        wrong += sum("WRONG" in n for _, _, n in rows)
        if theirs:
            ratios.setdefault(case.kind, []).append(ratio)
        if a.json:
            with a.json.open("a") as f:
                line = {
                    "name": case.name,
                    "floor_us": least,
                    "peers": theirs,
                    "ours": [{"schedule": m.label, "us": t} for m, t, _ in rows],
                }
                f.write(json.dumps(line) + "\n")
    for kind, each in ratios.items():
        print(
            f"geometric mean of the ratios, {kind}: {statistics.geometric_mean(each):.2f} over {len(each)}, the least "
            f"{min(each):.2f}"
        )
    print(f"wrong kernels: {wrong}; {time.perf_counter() - began:.0f} s")
    return int(wrong > 0)


def usage(m: Made, codes: dict[str, Compiled], symbols: dict[str, str]) -> str:
    """Registers, spills, shared memory and the grid of the main kernel."""
    s = m.steps[m.main]
    c, launch = codes[symbols[s.text]], launch_of(s.kernel)
    spills = f", {c.spills} bytes spilled" if c.spills else ""
    return (
        f"  [{c.registers} registers{spills}, {c.shared_bytes + launch.shared_bytes} shared, grid "
        f"{math.prod(launch.grid)} x {launch.block[0]}]"
    )


def _torch() -> bool:
    try:
        import torch
    except ImportError:
        print("PyTorch is not here: ours alone")
        return False
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    return bool(torch.cuda.is_available())


if __name__ == "__main__":
    raise SystemExit(main())
