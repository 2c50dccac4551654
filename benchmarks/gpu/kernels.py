"""Single matrix products on one GPU: our kernels beside cuBLAS (through PyTorch), each checked before it is timed.

    python benchmarks/gpu/kernels.py [--shapes MxNxK,...] [--dtype f16|bf16] [--weights nk|kn] [--tilings N|all] [--warm] [--json OUT]
    PYTHONPATH=.types python3 benchmarks/gpu/kernels.py        where dnnc is not installed; `make .types` makes that folder

Ours computes relu(A @ B + bias), cuBLAS the bare product A @ B. Times are microseconds of one call out of a CUDA graph of many, medians over
replays that take turns; operands rotate through more memory than the L2 cache holds unless --warm. A ratio is cuBLAS's time over ours. Errors
are the largest over sampled rows and all columns against float64, relative to the largest element.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dnnc.backends.cuda.device import open_device
from dnnc.backends.cuda.emit import emit_kernel, launch_of
from dnnc.backends.cuda.nvrtc import compile_many
from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.wgmma import tilings
from dnnc.backends.cuda.templates.wgmma_kernel import Product, Tiling, build
from dnnc.ir.dtype import BY_NAME, f32
from dnnc.ir.expr import Expr, cast, const, maximum
from dnnc.ir.operator.stmt import Buffer, Kernel
from dnnc.ir.operator.verify import verify_kernel

SHAPES = (
    "1024x1024x1024,2048x2048x2048,4096x4096x4096,8192x8192x8192,4096x3072x768,4096x768x3072,4096x768x768,128x2304x768,128x3072x768,"
    "128x768x3072,128x768x768,128x4096x4096,197x1536x384,1000x1000x1000"
)
COLD_BYTES = 150 << 20
CALLS = 20  # of a graph
SAMPLES = 256  # rows that are compared
Call = Callable[[int], None]


def arguments() -> argparse.Namespace:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--shapes", default=SHAPES, help="MxNxK, separated by commas")
    ap.add_argument("--dtype", default="f16", choices=("f16", "bf16"))
    ap.add_argument("--weights", default="kn", choices=("nk", "kn"), help="how B lies in memory: as in ONNX (kn), or transposed")
    ap.add_argument("--tilings", default="3", help="how many tilings, best guess first; or all; or BMxBNxSTAGES[xGROUP[xSPLIT]]")
    ap.add_argument("--warm", action="store_true", help="the same operands in each call")
    ap.add_argument("--replays", type=int, default=15)
    ap.add_argument("--json", type=Path, help="append a line for each tiling")
    return ap.parse_args()


def kernel_of(m: int, n: int, k: int, dtype: str, weights: str, t: Tiling) -> Kernel:
    """relu(a @ b + bias), with a bias in the type of the operands."""
    d = BY_NAME[dtype]
    shapes = {"a": (m, k), "b": (k, n) if weights == "kn" else (n, k), "bias": (n,), "c": (m, n)}
    a, b, bias, c = (Buffer(name, d, tuple(map(const, s))) for name, s in shapes.items())

    def finish(z: Expr, row: Expr, col: Expr, total: Expr) -> Expr:
        return cast(maximum(total + cast(bias[col], f32), const(0.0, f32)), d)

    return verify_kernel(build(Product("matmul", (a, b, bias, c), a, b, c, 1, m, n, k, finish, weights == "kn"), t))


def wanted(text: str, m: int, n: int, k: int, target: GpuTarget) -> list[Tiling]:
    found = tilings(1, m, n, k, target)
    if "x" in text:
        bm, bn, stages, *more = map(int, text.split("x"))
        return [Tiling(bm, bn, stages, more[0] if more else found[0].group, target.sms, *more[1:])]
    return found if text == "all" else found[: int(text)]


def name_of(t: Tiling) -> str:
    return f"{t.bm}x{t.bn}x{t.stages}x{t.group}x{t.split}"


class Case:
    """Operands of one shape, several sets of them."""

    def __init__(self, m: int, n: int, k: int, a: argparse.Namespace) -> None:
        import torch

        self.m, self.n, self.k = m, n, k
        dtype = {"f16": torch.float16, "bf16": torch.bfloat16}[a.dtype]
        size = 2 * (m * k + n * k + m * n)
        generator = torch.Generator("cuda").manual_seed(1)

        def draw(*shape: int) -> Any:
            return torch.randn(*shape, device="cuda", dtype=dtype, generator=generator)

        self.sets = 1 if a.warm else max(1, min(CALLS, -(-COLD_BYTES // size)))
        b_shape = (k, n) if a.weights == "kn" else (n, k)
        self.a, self.b = [draw(m, k) for _ in range(self.sets)], [draw(*b_shape) for _ in range(self.sets)]
        self.bias, self.c = draw(n), [torch.empty(m, n, device="cuda", dtype=dtype) for _ in range(self.sets)]
        self.product = [b if a.weights == "kn" else b.t() for b in self.b]

    def error(self) -> float:
        """Of the last results, which are then overwritten with NaN."""
        import torch

        worst = 0.0
        rows = torch.unique(torch.cat([torch.tensor([0, self.m - 1]), torch.randint(self.m, (SAMPLES,))])).cuda()
        for a, b, c in zip(self.a, self.product, self.c):
            want = torch.relu(a[rows].double() @ b.double() + self.bias.double())
            gap = (c[rows].double() - want).abs().max() / want.abs().max()
            worst = max(worst, float("inf") if bool(torch.isnan(gap)) else float(gap))
            c.fill_(float("nan"))
        torch.cuda.synchronize()
        return worst


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


def measure(case: Case, kernels: dict[str, tuple[Kernel, bytes]], replays: int) -> tuple[float, dict[str, tuple[float, float]]]:
    """Microseconds of cuBLAS, and for each of ours its microseconds and error. A kernel that is wrong or fails is not timed: inf."""
    import torch

    device = open_device()
    status = torch.zeros(4, dtype=torch.int32, device="cuda")
    graphs = [graph_of(lambda k: torch.mm(case.a[k], case.product[k], out=case.c[k]), case.sets)]
    errors: dict[str, float] = {}
    for name, (kernel, cubin) in kernels.items():
        launch = launch_of(kernel)
        function = device.load(cubin, f"matmul_{case.m}_{case.n}_{case.k}_{name}", launch, [p.name for p in kernel.entry.params])
        case.error()

        def call(k: int, function: Any = function, launch: Any = launch) -> None:
            addresses = [x.data_ptr() for x in (case.a[k], case.b[k], case.bias, case.c[k], status)]
            device.launch(function, launch, addresses, torch.cuda.current_stream().cuda_stream)

        graph = graph_of(call, case.sets)
        graph.replay()
        torch.cuda.synchronize()
        errors[name] = case.error()
        graphs.append(graph)
    times = microseconds(graphs, replays)
    return times[0], {name: (t, errors[name]) for name, t in zip(kernels, times[1:])}


def main() -> None:
    a = arguments()
    target = GpuTarget()
    shapes = [tuple(map(int, s.split("x"))) for s in a.shapes.split(",")]
    made = {(s, name_of(t)): kernel_of(*s, a.dtype, a.weights, t) for s in shapes for t in wanted(a.tilings, *s, target)}  # type: ignore[arg-type]
    start = time.perf_counter()
    names = {key: f"matmul_{'_'.join(map(str, key[0]))}_{key[1]}" for key in made}
    compiled = compile_many({names[key]: (emit_kernel(kernel, names[key], target), "sm_90a") for key, kernel in made.items()}, os.cpu_count() or 1)
    print(
        f"{len(made)} kernels emitted and compiled in {time.perf_counter() - start:.1f} s; spills {sum(c.spills for c in compiled.values())}",
        flush=True,
    )
    tolerance = {"f16": 2e-3, "bf16": 1e-2}[a.dtype]
    ratios = []
    for s in shapes:
        case = Case(*s, a)  # type: ignore[call-arg, misc]
        kernels = {key[1]: (kernel, compiled[names[key]].cubin) for key, kernel in made.items() if key[0] == s}
        cublas, ours = measure(case, kernels, a.replays)
        right = {name: v for name, v in ours.items() if v[1] < tolerance}
        flops = 2 * s[0] * s[1] * s[2] / 1e6
        listed = " ".join(f"{name}:{t:.2f}" + ("" if e < tolerance else f"(WRONG {e:.1e})") for name, (t, e) in ours.items())
        best = min(right, key=lambda name: right[name][0], default=None)
        if best is not None:
            t = right[best][0]
            ratios.append(cublas / t)
            print(f"{'x'.join(map(str, s)):16} cuBLAS {cublas:9.2f} us {flops / cublas:6.1f} TF | ours {t:9.2f} us {flops / t:6.1f} TF | ratio {cublas / t:5.3f}"
                  f" | best {best}, error {right[best][1]:.1e} | {listed}", flush=True)  # fmt: skip
        else:
            print(f"{'x'.join(map(str, s)):16} cuBLAS {cublas:9.2f} us | no kernel is right | {listed}", flush=True)
        if a.json:
            with a.json.open("a") as f:
                for name, (t, e) in ours.items():
                    f.write(
                        json.dumps({"shape": s, "dtype": a.dtype, "weights": a.weights, "tiling": name, "us": t, "error": e, "cublas_us": cublas})
                        + "\n"
                    )
        del case
    if ratios:
        print(f"geometric mean of the ratios: {statistics.geometric_mean(ratios):.3f}")


if __name__ == "__main__":
    main()
