"""Single memory-bound groups on one GPU: our kernels beside PyTorch and the rate of a copy, each checked before it is timed.

    python benchmarks/gpu/memory_bound.py [--only WORD] [--candidates N] [--emit-only]
    PYTHONPATH=.types python3 benchmarks/gpu/memory_bound.py     where dnnc is not installed; `make .types` makes that folder

Times are microseconds of one call out of a CUDA graph of many, medians over replays that take turns; arrays rotate through more memory than the
L2 cache holds. GB/s count every input and output once. Errors are against PyTorch in float64, relative to the largest element.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dnnc.backends.cuda.device import open_device
from dnnc.backends.cuda.emit import emit_kernel, launch_of
from dnnc.backends.cuda.nvrtc import compile_many
from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates import templates
from dnnc.ir.graph_text import parse
from dnnc.ir.operator.stmt import Kernel
from dnnc.ir.operator.verify import verify_kernel
from dnnc.passes.lower import lower
from dnnc.passes.schedule.problem import Choice, Problem, classify

CALLS = 12  # of a graph
COLD_BYTES = 150 << 20
TOLERANCE = {"f16": 4e-3, "bf16": 3e-2, "f32": 2e-5, "i64": 0.0}
GENERIC = ("map", "reduce", "sequence", "threads")
Peer = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    name: str
    problem: Problem
    peer: Peer


def case(name: str, inputs: str, body: str, peer: Peer) -> Case:
    """A group as graph text, and what PyTorch is asked for."""
    g = parse(f"def {name}({inputs}):\n" + "".join(f"    {line}\n" for line in body.split("; ")) + "    return y\n")
    nodes = list(g.nodes())
    return Case(name, classify(nodes, lower(g, nodes, g.outputs[0])), peer)


def softmax(x: Any) -> Any:
    return x.softmax(-1)


def layer_norm(x: Any, w: Any, b: Any) -> Any:
    import torch

    return torch.nn.functional.layer_norm(x, w.shape, w, b)


def gelu_chain(x: Any, s: Any, b: Any, r: Any) -> Any:
    import torch

    return torch.nn.functional.gelu(x * s + b) + r


def pool(x: Any) -> Any:
    import torch

    return torch.nn.functional.max_pool2d(x, 3, 2, 1)


def cases() -> list[Case]:
    big = "f16[16384, 4096]"
    out = [
        case("neg", f"x: {big}", "y = neg(x)", lambda x: -x),
        case("add", f"x: {big}, z: {big}", "y = add(x, z)", lambda x, z: x + z),
        case("add_f32", "x: f32[16384, 4096], z: f32[16384, 4096]", "y = add(x, z)", lambda x, z: x + z),
        case("gelu_chain", f"x: {big}, s: f16[4096], b: f16[4096], r: {big}", "a = mul(x, s); c = add(a, b); d = gelu(c); y = add(d, r)", gelu_chain),
        case("sum_rows", "x: f32[16384, 4096]", "y = reduce_sum(x, axes=(1,), keepdims=False)", lambda x: x.sum(1)),
        case("sum_columns", "x: f32[16384, 4096]", "y = reduce_sum(x, axes=(0,), keepdims=False)", lambda x: x.sum(0)),
        case("sum_middle", "x: f16[64, 1024, 512]", "y = reduce_sum(x, axes=(1,), keepdims=False)", lambda x: x.sum(1)),
        case("sum_all", "x: f32[1000000]", "y = reduce_sum(x, keepdims=False)", lambda x: x.sum()),
        case("sum_all_large", "x: f32[67108864]", "y = reduce_sum(x, keepdims=False)", lambda x: x.sum()),
        case("mean_7x7", "x: f16[256, 2048, 7, 7]", "y = reduce_mean(x, axes=(2, 3), keepdims=False)", lambda x: x.mean((2, 3))),
        case("mean_image", "x: f16[1, 12544, 32]", "y = reduce_mean(x, axes=(1,), keepdims=False)", lambda x: x.mean(1)),
        case("mean_image_half", "x: f16[112, 112, 32]", "y = reduce_mean(x, axes=(1,), keepdims=False)", lambda x: x.mean(1)),
        case("mean_image_rest", "x: f32[112, 32]", "y = reduce_mean(x, axes=(0,), keepdims=False)", lambda x: x.mean(0)),
        case("mean_14", "x: f16[196, 480]", "y = reduce_mean(x, axes=(0,), keepdims=False)", lambda x: x.mean(0)),
        case("sum_all_half", "x: f32[256, 262144]", "y = reduce_sum(x, axes=(1,), keepdims=False)", lambda x: x.sum(1)),
        case("argmax", "x: f16[512, 50257]", "y = argmax(x, axis=1, keepdims=False)", lambda x: x.argmax(1)),
        case("max_pool", "x: f16[64, 64, 112, 112]", "y = max_pool(x, kernel=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1))", pool),
        case("transpose_f32", "x: f32[8192, 8192]", "y = transpose(x, perm=(1, 0))", lambda x: x.t().contiguous()),
        case("transpose_f16", "x: f16[8192, 8192]", "y = transpose(x, perm=(1, 0))", lambda x: x.t().contiguous()),
        case("heads", "x: f16[64, 512, 16, 64]", "y = transpose(x, perm=(0, 2, 1, 3))", lambda x: x.permute(0, 2, 1, 3).contiguous()),
        case("to_nhwc", "x: f16[64, 256, 56, 56]", "y = transpose(x, perm=(0, 2, 3, 1))", lambda x: x.permute(0, 2, 3, 1).contiguous()),
        case("cumsum", "x: f32[4096, 1024]", "y = cumsum(x, axis=1)", lambda x: x.cumsum(1)),
        case("softmax_middle", "x: f32[64, 256, 512]", "y = softmax(x, axis=1)", lambda x: x.softmax(1)),
        case("softmax_f32", "x: f32[16384, 2048]", "y = softmax(x)", softmax),
    ]
    for r, n in ((16384, 4096), (65536, 128), (16384, 1024), (131072, 512), (2048, 32000), (1536, 128), (4096, 16384)):
        out.append(case(f"softmax_{r}_{n}", f"x: f16[{r}, {n}]", "y = softmax(x)", softmax))
    for r, n in ((16384, 4096), (4096, 768), (65536, 768), (128, 768), (32768, 320)):
        out.append(case(f"layer_norm_{r}_{n}", f"x: f16[{r}, {n}], w: f16[{n}], b: f16[{n}]", "y = layer_norm(x, w, b)", layer_norm))
    return out


class Arrays:
    """Several sets of a case's inputs and outputs."""

    def __init__(self, c: Case) -> None:
        import torch

        types = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "i64": torch.int64}
        *self.inputs_, self.output = c.problem.lowered.params
        self.nbytes = sum(int(v.type.nbytes) for v in c.problem.lowered.params)
        count = max(1, min(CALLS, -(-COLD_BYTES // self.nbytes)))

        def laid_out(x: Any, v: Any) -> Any:
            """Images with channels last, as the value's layout has them."""
            return x if tuple(v.type.physical) == tuple(v.type.shape) else x.contiguous(memory_format=torch.channels_last)

        self.inputs = [
            [laid_out(torch.randn(v.type.shape, device="cuda").to(types[v.type.dtype.name]), v) for v in self.inputs_] for _ in range(count)
        ]
        self.outputs = [laid_out(torch.empty(v.type.shape, device="cuda", dtype=types[v.type.dtype.name]), v) for v in [self.output] * count]

    def error(self, peer: Peer) -> float:
        """Of the first results, which are then overwritten."""
        want, got = peer(*(x.double() for x in self.inputs[0])).double(), self.outputs[0].double()
        gap = float((got - want).abs().max() / want.abs().max().clamp(min=1e-30))
        self.outputs[0].fill_(-7)
        return float("inf") if gap != gap else gap


def graph_of(call: Callable[[int], object], sets: int) -> Any:
    import torch

    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for k in range(sets):
            call(k)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for k in range(CALLS):
                call(k % sets)
    return graph


def microseconds(graphs: list[Any], replays: int = 9) -> list[float]:
    """Of one call, for each graph; they take turns."""
    import torch

    found: list[list[float]] = [[] for _ in graphs]
    for turn in range(replays + 1):
        for k, graph in enumerate(graphs):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn:
                found[k].append(start.elapsed_time(end) * 1e3 / CALLS)
    return [statistics.median(f) for f in found]


def measure(c: Case, kernels: list[tuple[Choice, Kernel, bytes, str]]) -> None:
    import torch

    device, arrays = open_device(), Arrays(c)
    status = torch.zeros(4, dtype=torch.int32, device="cuda")
    sets = len(arrays.inputs)
    graphs, errors = [graph_of(lambda k: c.peer(*arrays.inputs[k]), sets)], []
    functions = []  # a graph does not keep what it calls
    for _, kernel, cubin, symbol in kernels:
        launch = launch_of(kernel)
        function = device.load(cubin, symbol, launch, [p.name for p in kernel.entry.params])
        functions.append(function)

        def call(k: int, function: Any = function, launch: Any = launch) -> None:
            addresses = [x.data_ptr() for x in (*arrays.inputs[k], arrays.outputs[k], status)]
            device.launch(function, launch, addresses, torch.cuda.current_stream().cuda_stream)

        call(0)
        torch.cuda.synchronize()
        errors.append(arrays.error(c.peer))
        graphs.append(graph_of(call, sets))
    torch_us, *ours = microseconds(graphs)
    limit = TOLERANCE[arrays.output.type.dtype.name]
    rate = {us: arrays.nbytes / us / 1e3 for us in (torch_us, *ours)}
    print(f"{c.name:24} torch {torch_us:8.1f} us {rate[torch_us]:5.0f} GB/s | ours {ours[0]:8.1f} us {rate[ours[0]]:5.0f} GB/s | {torch_us / ours[0]:5.2f} x torch"
          f" | best {min(ours):8.1f} us", flush=True)  # fmt: skip
    for (choice, *_), us, e in zip(kernels, ours, errors):
        print(f"    {us:8.1f} us {'' if e <= limit else f'WRONG by {e:.1e} '}{choice}", flush=True)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--only", default="", help="cases whose name holds this word")
    ap.add_argument("--candidates", type=int, default=4, help="schedules of each case, best guess first")
    ap.add_argument("--emit-only", action="store_true", help="print registers and spills of each kernel; needs no GPU")
    a = ap.parse_args()
    target, start = GpuTarget(), time.perf_counter()
    made: dict[str, tuple[Case, Choice, Kernel]] = {}
    for c in cases():
        if a.only in c.name:
            found = [Choice(t.name, k) for t in templates(target) if t.name in GENERIC for k in t.candidates(c.problem)][: a.candidates]
            for n, choice in enumerate(found):
                template = next(t for t in templates(target) if t.name == choice.template)
                made[f"{c.name}_{n}"] = (c, choice, verify_kernel(template.apply(c.problem, dict(choice.knobs))))
    compiled = compile_many({s: (emit_kernel(k, s, target), target.arch) for s, (_, _, k) in made.items()}, os.cpu_count() or 1)
    print(f"{len(made)} kernels in {time.perf_counter() - start:.1f} s; spills {sum(x.spills for x in compiled.values())}, "
          f"local memory of {[s for s, x in compiled.items() if x.local_bytes]}", flush=True)  # fmt: skip
    if a.emit_only:
        for s, (_, choice, _) in made.items():
            print(f"{s:28} {compiled[s].registers:4} registers, {compiled[s].shared_bytes} bytes shared: {choice}")
        return
    for c in dict.fromkeys(c for c, _, _ in made.values()):
        measure(c, [(choice, k, compiled[s].cubin, s) for s, (d, choice, k) in made.items() if d is c])


if __name__ == "__main__":
    main()
