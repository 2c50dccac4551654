"""Matrix products and convolutions on one GPU by the templates gemv, mma, simt and tf32: our kernels beside PyTorch (cuBLAS, cuDNN).

    python benchmarks/gpu/contractions.py [--only WORD,WORD] [--templates gemv,mma,simt] [--tf32] [--candidates N] [--emit-only]
    PYTHONPATH=.types python3 benchmarks/gpu/contractions.py     where dnnc is not installed; `make .types` makes that folder

Each kernel is checked before it is timed. Times are microseconds of one call out of a CUDA graph of many, medians over replays that take turns;
operands rotate through more memory than the L2 cache holds. Float32 is float32 on both sides, with --tf32 TF32 on both. The first candidate is what is used
without tuning; where the best one is another, the model that orders them is to be looked at.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

from memory_bound import Arrays, Case, case, graph_of, microseconds

from dnnc.backends.cuda.device import open_device
from dnnc.backends.cuda.emit import emit_kernel, launch_of
from dnnc.backends.cuda.nvrtc import compile_many
from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates import templates
from dnnc.ir.operator.stmt import Kernel
from dnnc.ir.operator.verify import verify_kernel
from dnnc.passes.schedule.problem import Choice

TOLERANCE = {"f16": 3e-3, "bf16": 2e-2, "f32": 3e-5, "f64": 1e-12}


def product(m: int, n: int, k: int, t: str = "f32", nk: bool = False, batch: int = 0) -> Case:
    """x @ w, the weights as in ONNX (k, n) or as in PyTorch (n, k)."""
    b = f"{batch}, " if batch else ""
    name = f"{t}_{'b' + str(batch) + '_' if batch else ''}{m}x{n}x{k}{'_nk' if nk else ''}"
    if nk:
        return case(name, f"w: {t}[{n}, {k}], x: {t}[{k}, {m}]", "y = matmul(w, x)", lambda w, x: w @ x)
    return case(name, f"x: {t}[{b}{m}, {k}], w: {t}[{b}{k}, {n}]", "y = matmul(x, w)", lambda x, w: x @ w)


def dense(m: int, n: int, k: int, t: str) -> Case:
    def peer(x: Any, w: Any, c: Any, r: Any) -> Any:
        import torch

        return torch.nn.functional.gelu(x @ w + c) + r

    inputs = f"x: {t}[{m}, {k}], w: {t}[{k}, {n}], c: {t}[{n}], r: {t}[{m}, {n}]"
    return case(f"{t}_dense_{m}x{n}x{k}", inputs, "a = matmul(x, w); b = add(a, c); d = gelu(b); y = add(d, r)", peer)


def conv(
    name: str, x: tuple[int, ...], w: tuple[int, ...], stride: int = 1, pad: int = 0, t: str = "f32", group: int = 1, last: bool = False
) -> Case:
    """`last`: channels are, as in whole models."""

    def peer(a: Any, b: Any) -> Any:
        import torch

        return torch.nn.functional.conv2d(a, b, None, stride, pad, 1, group)

    text = f"y = conv(x, w, strides=({stride}, {stride}), pads=({pad}, {pad}, {pad}, {pad}), group={group})"
    order = ' @ "0 2 3 1"' if last else ""
    size = [(n + 2 * pad - k) // stride + 1 for n, k in zip(x[2:], w[2:])]
    text = text.replace("y =", f"y: {t}[{x[0]}, {w[0]}, {size[0]}, {size[1]}]{order} =")
    inputs = f"x: {t}[{', '.join(map(str, x))}]{order}, w: {t}[{', '.join(map(str, w))}]{order}"
    return case(f"{t}_conv_{name}{'_nhwc' if last else ''}", inputs, text, peer)


def cases() -> list[Case]:
    out = [product(*s) for s in ((4096, 4096, 4096), (1024, 1024, 1024), (512, 512, 512), (128, 3072, 768), (128, 768, 768), (128, 768, 3072),
                                 (197, 384, 1536), (197, 1536, 384), (2048, 2048, 2048), (16, 4096, 4096), (1000, 1000, 1000))]  # fmt: skip
    out += [
        product(1, 480, 20),
        product(1, 1152, 48),
        product(1, 4096, 4096),
        product(1, 1, 4096, nk=True),
        product(128, 128, 64, batch=96),
        dense(1024, 1024, 1024, "f32"),
    ]
    out += [product(*s, "f16") for s in ((4096, 4096, 4096), (1024, 1024, 1024), (128, 3072, 768), (128, 768, 768), (16, 4096, 4096),
                                         (1000, 1000, 1000))]  # fmt: skip
    out += [product(1, n, k, "f16") for n, k in ((4096, 4096), (768, 768), (3072, 768), (768, 3072), (50257, 768))]
    out += [product(1, n, k, "f16", nk=True) for n, k in ((4096, 4096), (768, 768), (3072, 768), (768, 3072), (50257, 768))]
    out += [product(8, 4096, 4096, "f16"), product(128, 128, 64, "f16", batch=96), dense(1024, 1024, 1024, "f16")]
    layers = {"l1_3x3": ((64, 56, 56), (64, 64, 3, 3), 1, 1), "l2_3x3s2": ((128, 56, 56), (128, 128, 3, 3), 2, 1),
              "l3_3x3": ((256, 14, 14), (256, 256, 3, 3), 1, 1), "l4_3x3": ((512, 7, 7), (512, 512, 3, 3), 1, 1),
              "l1_1x1": ((64, 56, 56), (256, 64, 1, 1), 1, 0), "l4_1x1": ((512, 7, 7), (2048, 512, 1, 1), 1, 0), "stem": ((3, 224, 224), (64, 3, 7, 7), 2, 3)}  # fmt: skip
    out += [conv(f"{name}_b1", (1, *x), w, stride, pad, last=True) for name, (x, w, stride, pad) in layers.items() if name != "stem"]
    for t in ("f32", "f16"):
        for n in (1, 32):
            out += [conv(f"{name}_b{n}", (n, *x), w, stride, pad, t) for name, (x, w, stride, pad) in layers.items()]
    return out


def measure(c: Case, kernels: list[tuple[Choice, Kernel, bytes, str]]) -> float:
    """Print the times of a case; PyTorch's over that of our first candidate."""
    import torch

    device, arrays = open_device(), Arrays(c)
    status = torch.zeros(4, dtype=torch.int32, device="cuda")
    sets = len(arrays.inputs)
    graphs, errors = [graph_of(lambda k: c.peer(*arrays.inputs[k]), sets)], []
    for _, kernel, cubin, symbol in kernels:
        launch = launch_of(kernel)
        function = device.load(cubin, symbol, launch, [p.name for p in kernel.entry.params])

        def call(k: int, function: Any = function, launch: Any = launch) -> None:
            addresses = [x.data_ptr() for x in (*arrays.inputs[k], arrays.outputs[k], status)]
            device.launch(function, launch, addresses, torch.cuda.current_stream().cuda_stream)

        call(0)
        torch.cuda.synchronize()
        errors.append(arrays.error(c.peer))
        graphs.append(graph_of(call, sets))
    peer, *ours = microseconds(graphs)
    flops = float(c.problem.flops) / 1e6  # type: ignore[arg-type]
    limits = [2e-3 if choice.template == "tf32" else TOLERANCE[arrays.output.type.dtype.name] for choice, *_ in kernels]
    print(f"{c.name:26} torch {peer:8.2f} us {flops / peer:6.1f} TF | ours {ours[0]:8.2f} us {flops / ours[0]:6.1f} TF"
          f" {arrays.nbytes / ours[0] / 1e3:5.0f} GB/s | {peer / ours[0]:5.2f} x torch | best {min(ours):8.2f} us", flush=True)  # fmt: skip
    for (choice, *_), us, e, limit in zip(kernels, ours, errors, limits):
        print(f"    {us:8.2f} us {'' if e <= limit else f'WRONG by {e:.1e} '}{choice}", flush=True)
    return peer / ours[0]


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--only", default="", help="cases whose name holds one of these words, separated by commas")
    ap.add_argument("--templates", default="gemv,mma,simt", help="of gemv, wgmma, mma, simt, threads")
    ap.add_argument("--tf32", action="store_true", help="the template tf32 in the place of simt, and PyTorch with TF32")
    ap.add_argument("--candidates", type=int, default=4, help="schedules of each case and template, best guess first")
    ap.add_argument("--emit-only", action="store_true", help="print registers and spills of each kernel; needs no GPU")
    a = ap.parse_args()
    target, start = GpuTarget(), time.perf_counter()
    wanted = a.templates.replace("simt", "tf32").split(",") if a.tf32 else a.templates.split(",")
    made: dict[str, tuple[Case, Choice, Kernel]] = {}
    for c in cases():
        for t in templates(target, rounded=a.tf32):
            if any(word in c.name for word in a.only.split(",")) and t.name in wanted:
                for n, knobs in enumerate(t.candidates(c.problem)[: a.candidates]):
                    made[f"{c.name}_{t.name}_{n}"] = (c, Choice(t.name, knobs), verify_kernel(t.apply(c.problem, dict(knobs))))
    compiled = compile_many({s: (emit_kernel(k, s, target), target.arch) for s, (_, _, k) in made.items()}, os.cpu_count() or 1)
    print(f"{len(made)} kernels in {time.perf_counter() - start:.1f} s; spills {sum(x.spills for x in compiled.values())}, "
          f"local memory of {[s for s, x in compiled.items() if x.local_bytes]}", flush=True)  # fmt: skip
    if a.emit_only:
        for s, (_, choice, _) in made.items():
            print(f"{s:36} {compiled[s].registers:4} registers, {compiled[s].shared_bytes} bytes shared: {choice}")
        return
    import torch

    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = a.tf32
    torch.backends.cudnn.benchmark = True
    ratios = [
        measure(c, [(choice, k, compiled[s].cubin, s) for s, (d, choice, k) in made.items() if d is c])
        for c in dict.fromkeys(v[0] for v in made.values())
    ]
    print(f"geometric mean of PyTorch's time over ours, first candidates: {statistics.geometric_mean(ratios):.3f}")


if __name__ == "__main__":
    main()
