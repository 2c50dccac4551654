"""Matrix products and convolutions on one GPU: our kernels beside cuBLAS and cuDNN (through PyTorch), each checked before it is timed.

    python benchmarks/gpu/kernels.py [--shapes MxNxK,... | none] [--convs NAME,... | all | none] [--batches 1,32] [--qkv BxSxHxD,...]
                                     [--act relu|gelu|silu] [--dtype f16|bf16] [--weights nk|kn] [--mma N]
                                     [--tilings N|all|BMxBNxSTAGES[xGROUP[xSPLIT[xRESIDENT]]]] [--warm] [--json OUT]
    PYTHONPATH=.types python3 benchmarks/gpu/kernels.py        where dnnc is not installed; `make .types` makes that folder

Ours computes act(A @ B + bias) or act(conv(x, w) + bias), or queries, keys and values of a batch in one product, stored head by head; the
library the bare product or convolution (NHWC, cudnn.benchmark). --mma adds kernels of the template `mma`. Times are
microseconds of one call out of a CUDA graph of many, medians over replays that take turns; operands rotate through more memory than the L2
cache holds unless --warm. A ratio is the library's time over ours. Errors are the largest against float64 (float32 for convolutions) over
sampled rows, relative to the largest element.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dnnc.backends.cuda.device import open_device
from dnnc.backends.cuda.emit import emit_kernel, launch_of
from dnnc.backends.cuda.nvrtc import compile_many
from dnnc.backends.cuda.spelling import spelled
from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates import mma, wgmma
from dnnc.ir.graph_text import parse
from dnnc.ir.operator.stmt import Eval, Kernel, walk_stmts
from dnnc.ir.operator.verify import verify_kernel
from dnnc.passes.lower import lower
from dnnc.passes.operator.decompose import decompose
from dnnc.passes.schedule.problem import Problem, classify

SHAPES = (
    "1024x1024x1024,2048x2048x2048,4096x4096x4096,8192x8192x8192,4096x3072x768,4096x768x3072,4096x768x768,128x2304x768,128x3072x768,"
    "128x768x3072,128x768x768,128x4096x4096,197x1536x384,1000x1000x1000"
)
# name -> input channels, output channels, height and width, filter, stride, padding: of ResNet-50, VGG and EfficientNet-B0
CONVS = {
    "l1_1x1a": (64, 64, 56, 1, 1, 0), "l1_3x3": (64, 64, 56, 3, 1, 1), "l1_1x1c": (64, 256, 56, 1, 1, 0), "l2_3x3s2": (128, 128, 56, 3, 2, 1),
    "l2_3x3": (128, 128, 28, 3, 1, 1), "l3_1x1s2": (512, 1024, 28, 1, 2, 0), "l3_3x3": (256, 256, 14, 3, 1, 1), "l3_1x1c": (256, 1024, 14, 1, 1, 0),
    "l4_3x3": (512, 512, 7, 3, 1, 1), "l4_1x1a": (2048, 512, 7, 1, 1, 0), "vgg_256": (256, 256, 56, 3, 1, 1),
    "eff_16_96": (16, 96, 112, 1, 1, 0), "eff_24_144": (24, 144, 56, 1, 1, 0), "eff_40_240": (40, 240, 28, 1, 1, 0), "eff_96_24": (96, 24, 56, 1, 1, 0),
}  # fmt: skip
COLD_BYTES = 150 << 20
CALLS = 20  # of a graph
SAMPLES = 256  # rows that are compared
KNOBS = ("bm", "bn", "stages", "group", "split", "resident")
ACTS = ("relu", "gelu", "silu")
TOLERANCE = {"f16": 2e-3, "bf16": 1e-2}
Call = Callable[[int], object]
Knobs = dict[str, int]


def arguments() -> argparse.Namespace:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--shapes", default=SHAPES, help="MxNxK, separated by commas; none")
    ap.add_argument("--convs", default="none", help=f"of {', '.join(CONVS)}; all; none")
    ap.add_argument("--batches", default="1,32", help="of the convolutions")
    ap.add_argument("--qkv", default="none", help="BxSxHxD, separated by commas: batch, tokens, heads, elements of a head; none")
    ap.add_argument("--act", default="relu", choices=ACTS, help="what follows the bias")
    ap.add_argument("--mma", type=int, default=0, help="how many kernels of the template mma are timed as well")
    ap.add_argument("--dtype", default="f16", choices=tuple(TOLERANCE))
    ap.add_argument("--weights", default="kn", choices=("nk", "kn"), help="how B lies in memory: as in ONNX (kn), or transposed")
    ap.add_argument("--tilings", default="3", help="how many, best guess first; all; or one, BMxBNxSTAGES[xGROUP[xSPLIT[xRESIDENT]]]")
    ap.add_argument("--warm", action="store_true", help="the same operands in each call")
    ap.add_argument("--replays", type=int, default=15)
    ap.add_argument("--json", type=Path, help="append a line for each tiling")
    return ap.parse_args()


@dataclass(frozen=True)
class Work:
    """One problem: its name, the graph that is compiled, its multiplications and additions, and how its operands are made on a device."""

    name: str
    text: str
    flops: float
    operands: Callable[[], Operands]

    def problem(self) -> Problem:
        graph = parse(self.text)
        nodes = list(graph.nodes())
        return classify(nodes, lower(graph, nodes, graph.outputs[0]))


@dataclass
class Operands:
    """Sets of [inputs..., output] on the device, the library's call on a set, and the error of a set's output (which is overwritten with NaN)."""

    sets: list[list[Any]]
    library: Call
    error: Call


def torch_type(name: str) -> Any:
    import torch

    return {"f16": torch.float16, "bf16": torch.bfloat16}[name]


def count_of(size: int, warm: bool) -> int:
    return 1 if warm else max(1, min(CALLS, -(-COLD_BYTES // size)))


def gap(found: Any, want: Any) -> float:
    """The largest error relative to the largest element; a NaN is infinitely wrong."""
    import torch

    e = (found.double() - want.double()).abs().max() / want.abs().max()
    return float("inf") if bool(torch.isnan(e)) else float(e)


def finished(h: str, y: str, act: str) -> str:
    """The line of a graph that follows the bias: the result is `y`, of this type."""
    if act == "silu":
        return f"    s: {y} = sigmoid({h})\n    y: {y} = mul({h}, s)\n    return y\n"
    return f"    y: {y} = {act}({h})\n    return y\n"


def activated(x: Any, act: str) -> Any:
    from torch.nn import functional

    return getattr(functional, act)(x)


def matmul(m: int, n: int, k: int, a: argparse.Namespace) -> Work:
    d, kn = a.dtype, a.weights == "kn"
    other = "w" if kn else "transpose(w, perm=(1, 0))"
    y = f"{d}[{m}, {n}]"
    text = f"def f(x: {d}[{m}, {k}], w: {d}[{f'{k}, {n}' if kn else f'{n}, {k}'}], b: {d}[{n}]):\n    h: {y} = add(matmul(x, {other}), b)\n"
    text += finished("h", y, a.act)

    def operands() -> Operands:
        import torch

        def draw(*shape: int) -> Any:
            return torch.randn(*shape, device="cuda", dtype=torch_type(d))

        rows = torch.unique(torch.cat([torch.tensor([0, m - 1]), torch.randint(m, (SAMPLES,))])).cuda()
        sets = [[draw(m, k), draw(k, n) if kn else draw(n, k), draw(n), draw(m, n)] for _ in range(count_of(2 * (m * k + n * k + m * n), a.warm))]
        product = [s[1] if kn else s[1].t() for s in sets]

        def error(i: int) -> float:
            x, _, b, y = sets[i]
            e = gap(y[rows], activated(x[rows].double() @ product[i].double() + b.double(), a.act))
            y.fill_(float("nan"))
            return e

        return Operands(sets, lambda i: torch.mm(sets[i][0], product[i], out=sets[i][3]), error)

    return Work(f"{m}x{n}x{k}", text, 2.0 * m * n * k, operands)


def conv(name: str, batch: int, a: argparse.Namespace) -> Work:
    ci, co, hw, r, stride, pad = CONVS[name]
    out, d, last = (hw + 2 * pad - r) // stride + 1, a.dtype, '@ "0 2 3 1"'
    y = f"{d}[{batch}, {co}, {out}, {out}] {last}"
    text = f"""\
def f(x: {d}[{batch}, {ci}, {hw}, {hw}] {last}, w: {d}[{co}, {ci}, {r}, {r}] {last}, b: {d}[{co}]):
    h: {y} = conv(x, w, b, strides=({stride}, {stride}), pads=({pad}, {pad}, {pad}, {pad}))
{finished("h", y, a.act)}"""

    def operands() -> Operands:
        import torch
        from torch.nn import functional

        def draw(*shape: int) -> Any:
            return torch.randn(*shape, device="cuda", dtype=torch_type(d)).contiguous(memory_format=torch.channels_last)

        size = 2 * (batch * ci * hw * hw + co * ci * r * r + batch * co * out * out)
        sets = []
        for _ in range(count_of(size, a.warm)):
            bias = torch.randn(co, device="cuda", dtype=torch_type(d))
            sets.append([draw(batch, ci, hw, hw), draw(co, ci, r, r), bias, draw(batch, co, out, out)])

        def error(i: int) -> float:
            x, w, b, y = sets[i]
            e = gap(y, activated(functional.conv2d(x.float(), w.float(), b.float(), stride, pad), a.act))
            y.fill_(float("nan"))
            return e

        return Operands(sets, lambda i: functional.conv2d(sets[i][0], sets[i][1], None, stride, pad), error)

    return Work(f"{name} b{batch}", text, 2.0 * batch * out * out * co * ci * r * r, operands)


def qkv(batch: int, tokens: int, heads: int, size: int, a: argparse.Namespace) -> Work:
    k, d = heads * size, a.dtype
    n, rows = 3 * k, f"{a.dtype}[{batch}, {tokens}"
    text = f"""\
def f(x: {rows}, {k}], w: {d}[{k}, {n}], b: {d}[{n}]):
    h: {rows}, {n}] = add(matmul(x, w), b)
    r: {rows}, 3, {heads}, {size}] = reshape(h, shape=({batch}, {tokens}, 3, {heads}, {size}))
    y: {d}[3, {batch}, {heads}, {tokens}, {size}] = transpose(r, perm=(2, 0, 3, 1, 4))
    return y
"""

    def operands() -> Operands:
        import torch

        def draw(*shape: int) -> Any:
            return torch.randn(*shape, device="cuda", dtype=torch_type(d))

        m = batch * tokens
        sets = [[draw(m, k), draw(k, n), draw(n), draw(3, batch, heads, tokens, size)] for _ in range(count_of(2 * (m * k + n * k + m * n), a.warm))]
        plain = [draw(m, n) for _ in sets]

        def error(i: int) -> float:
            x, w, b, y = sets[i]
            want = (x.float() @ w.float() + b.float()).view(batch, tokens, 3, heads, size).permute(2, 0, 3, 1, 4)
            e = gap(y, want)
            y.fill_(float("nan"))
            return e

        return Operands(sets, lambda i: torch.mm(sets[i][0], sets[i][1], out=plain[i]), error)

    return Work(f"qkv {batch}x{tokens}x{heads}x{size}", text, 2.0 * batch * tokens * n * k, operands)


def wanted(text: str, found: list[Knobs]) -> list[Knobs]:
    """The settings of --tilings among those that a problem offers, or one of one's own."""
    if "x" in text:
        given = dict(zip(KNOBS, map(int, text.split("x"))))
        return [{"group": wgmma.GROUP, "split": 1, "resident": 1} | given]
    return found if text == "all" else found[: int(text)]


def tag(k: Knobs) -> str:
    return "x".join(str(k[name]) for name in KNOBS)


def kernels_of(work: Work, target: GpuTarget, a: argparse.Namespace) -> dict[str, Kernel]:
    """The kernels to time, by their tilings; as the driver makes them."""
    problem, known = work.problem(), spelled("standard")
    made = {}
    for knobs in wanted(a.tilings, [{k: int(v) for k, v in c} for c in wgmma.candidates(problem, target)]):
        made[tag(knobs)] = wgmma.apply(problem, knobs, target)
    for c in mma.candidates(problem, target)[: a.mma]:
        made["mma:" + "x".join(str(v) for _, v in c)] = mma.apply(problem, dict(c), target)
    return {name: verify_kernel(decompose(k, known)) for name, k in made.items()}


def uses(kernel: Kernel, effect: str) -> bool:
    return any(isinstance(s, Eval) and s.name == effect for s in walk_stmts(kernel.entry.body))


def graph_of(call: Call, sets: int) -> Any:
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


def microseconds(graphs: list[Any], replays: int) -> list[float]:
    """Of one call, for each graph; they take turns."""
    import torch

    found: list[list[float]] = [[] for _ in graphs]
    for turn in range(replays + 2):
        for k, graph in enumerate(graphs):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn > 1:
                found[k].append(start.elapsed_time(end) * 1e3 / CALLS)
    return [statistics.median(f) for f in found]


def measure(work: Work, kernels: dict[str, tuple[Kernel, bytes, str]], replays: int) -> tuple[float, dict[str, tuple[float, float]]]:
    """Microseconds of the library, and for each of ours its microseconds and error."""
    import torch

    device, given = open_device(), work.operands()
    status = torch.zeros(4, dtype=torch.int32, device="cuda")
    graphs, errors = [graph_of(given.library, len(given.sets))], []
    functions = []  # a graph keeps no function alive that it calls
    for kernel, cubin, symbol in kernels.values():
        launch = launch_of(kernel)
        function = device.load(cubin, symbol, launch, [p.name for p in kernel.entry.params], uses(kernel, "pdl_wait"))
        functions.append(function)
        for k in range(len(given.sets)):
            given.error(k)

        def call(k: int, function: Any = function, launch: Any = launch) -> None:
            addresses = [x.data_ptr() for x in (*given.sets[k], status)]
            device.launch(function, launch, addresses, torch.cuda.current_stream().cuda_stream)

        graphs.append(graph_of(call, len(given.sets)))
        graphs[-1].replay()
        torch.cuda.synchronize()
        errors.append(max(float(given.error(k)) for k in range(len(given.sets))))  # type: ignore[arg-type]
        torch.cuda.synchronize()
    library, *times = microseconds(graphs, replays)
    functions.clear()
    return library, {name: (t, e) for name, t, e in zip(kernels, times, errors)}


def report(work: Work, library: float, ours: dict[str, tuple[float, float]], tolerance: float) -> float | None:
    """Print a line; the ratio of the fastest kernel that is right."""
    listed = " ".join(f"{name}:{t:.2f}" + ("" if e < tolerance else f"(WRONG {e:.1e})") for name, (t, e) in ours.items())
    head = f"{work.name:16} library {library:9.2f} us {work.flops / library / 1e6:6.1f} TF"
    right = {name: v for name, v in ours.items() if v[1] < tolerance}
    if not right:
        print(f"{head} | no kernel is right | {listed}", flush=True)
        return None
    best = min(right, key=lambda name: right[name][0])
    t, e = right[best]
    print(f"{head} | ours {t:9.2f} us {work.flops / t / 1e6:6.1f} TF | ratio {library / t:5.3f} | best {best}, error {e:.1e} | {listed}", flush=True)
    return library / t


def main() -> None:
    a = arguments()
    target = GpuTarget()
    works = [matmul(*map(int, s.split("x")), a) for s in a.shapes.split(",") if s != "none"]  # type: ignore[arg-type, call-arg]
    names = list(CONVS) if a.convs == "all" else [c for c in a.convs.split(",") if c != "none"]
    works += [conv(name, int(batch), a) for name in names for batch in a.batches.split(",")]
    works += [qkv(*map(int, s.split("x")), a) for s in a.qkv.split(",") if s != "none"]  # type: ignore[arg-type, call-arg]
    made = {(work.name, name): k for work in works for name, k in kernels_of(work, target, a).items()}
    symbols = {key: f"kernel_{k}" for k, key in enumerate(made)}
    start = time.perf_counter()
    compiled = compile_many({symbols[key]: (emit_kernel(k, symbols[key], target), "sm_90a") for key, k in made.items()}, os.cpu_count() or 1)
    print(
        f"{len(made)} kernels printed and compiled in {time.perf_counter() - start:.1f} s; spills {sum(c.spills for c in compiled.values())}",
        flush=True,
    )
    ratios = []
    for work in works:
        kernels = {key[1]: (k, compiled[symbols[key]].cubin, symbols[key]) for key, k in made.items() if key[0] == work.name}
        library, ours = measure(work, kernels, a.replays)
        ratios.append(report(work, library, ours, TOLERANCE[a.dtype]))
        if a.json:
            with a.json.open("a") as f:
                for name, (t, e) in ours.items():
                    row = {"name": work.name, "dtype": a.dtype, "weights": a.weights, "tiling": name, "us": t, "error": e, "library_us": library}
                    f.write(json.dumps(row) + "\n")
    right = [r for r in ratios if r is not None]
    if right:
        print(f"geometric mean of the ratios: {statistics.geometric_mean(right):.3f} over {len(right)} of {len(works)}")


if __name__ == "__main__":
    main()
