"""Attention on one GPU: our kernels beside PyTorch's scaled_dot_product_attention (without causal masks), each checked against float64.

    python benchmarks/gpu/attention.py [--only WORD] [--candidates N | --knobs ROWS,WARPS,KEYS,STAGES,SLICES,PARTS:...] [--emit-only]
    PYTHONPATH=.types python3 benchmarks/gpu/attention.py     where dnnc is not installed; `make .types` makes that folder

Times are microseconds of one call out of a CUDA graph of many, medians over replays that take turns; operands rotate through more memory than
the L2 cache holds. Names are of the type, batch B, heads H, queries M, keys N, elements D of a head. Float32 is float32 on both sides. The first
candidate is what is used without tuning; where the best one is another, the model that orders them is to be looked at.
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
from dnnc.backends.cuda.templates import attention
from dnnc.backends.cuda.templates.attention_choice import shapes
from dnnc.backends.cuda.templates.attention_nest import attention_of
from dnnc.ir.dtype import f32
from dnnc.ir.operator.stmt import Kernel
from dnnc.ir.operator.verify import verify_kernel
from dnnc.passes.schedule.problem import Choice, Knobs

TOLERANCE = {"f16": 3e-3, "bf16": 2e-2, "f32": 3e-5}
NAMES = ("rows", "warps", "keys", "stages", "slices", "parts")


def heads(b: int, h: int, m: int, n: int, d: int, t: str = "f16", mask: str = "") -> Case:
    """softmax(q kT / sqrt(d) + mask) v; `mask`: its shape."""
    scale = d**-0.5

    def peer(q: Any, k: Any, v: Any, more: Any = None) -> Any:
        import torch

        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=None if more is None else more.to(q.dtype), scale=scale)

    inputs = ", ".join(f"{x}: {t}[{b}, {h}, {s}, {d}]" for x, s in (("q", m), ("k", n), ("v", n))) + (f", mask: f32[{mask}]" if mask else "")
    name = f"{t}_B{b}_H{h}_M{m}_N{n}_D{d}{'_mask' if mask else ''}"
    return case(name, inputs, f"y = attention(q, k, v, {'mask, ' if mask else ''}scale={scale})", peer)


def cases() -> list[Case]:
    out = [heads(1, 12, 128, 128, 64), heads(32, 12, 128, 128, 64), heads(1, 12, 128, 128, 64, mask="1, 1, 1, 128")]
    out += [heads(8, 16, 2048, 2048, d, t) for d in (64, 128) for t in ("f16", "bf16")]
    out += [heads(8, 16, 2048, 2048, 64, mask="8, 1, 1, 2048"), heads(1, 6, 197, 197, 64), heads(32, 6, 197, 197, 64), heads(4, 8, 4096, 4096, 40)]
    out += [heads(2, 8, 1024, 1024, 256), heads(64, 4, 49, 49, 32)]
    out += [heads(*s) for s in ((1, 12, 1, 128, 64), (1, 12, 1, 1024, 64), (1, 32, 1, 4096, 128), (32, 32, 1, 4096, 128), (1, 12, 8, 4096, 64))]
    out += [heads(*s, "f32") for s in ((1, 12, 128, 128, 64), (8, 16, 1024, 1024, 64), (1, 12, 1, 1024, 64), (32, 6, 197, 197, 64))]
    return out


def knobs_of(text: str) -> list[Knobs]:
    """`128,4,64,2,1,1:64,4,64,2,1,1`"""
    return [tuple(zip(NAMES, map(int, one.split(",")))) for one in text.split(":")]


def wanted(a: argparse.Namespace, c: Case, target: GpuTarget) -> list[Knobs]:
    if a.knobs:
        return knobs_of(a.knobs)
    if a.candidates > 0:
        return attention.candidates(c.problem, target)[: a.candidates]
    found = attention_of(c.problem)
    assert found is not None
    every = shapes(found, target, found.q.loads[0].dtype is not f32)
    return [tuple((name, getattr(s, name)) for name in NAMES) for s in every]


def measure(c: Case, kernels: list[tuple[Choice, Kernel, bytes, str]]) -> float:
    """Print the times of a case; PyTorch's over that of our first candidate."""
    import torch

    device, arrays = open_device(), Arrays(c)
    status = torch.zeros(4, dtype=torch.int32, device="cuda")
    sets = len(arrays.inputs)
    graphs, errors, functions = [graph_of(lambda k: c.peer(*arrays.inputs[k]), sets)], [], []
    for _, kernel, cubin, symbol in kernels:
        launch = launch_of(kernel)
        functions.append(device.load(cubin, symbol, launch, [p.name for p in kernel.entry.params]))  # graphs do not keep them

        def call(k: int, function: Any = functions[-1], launch: Any = launch) -> None:
            addresses = [x.data_ptr() for x in (*arrays.inputs[k], arrays.outputs[k], status)]
            device.launch(function, launch, addresses, torch.cuda.current_stream().cuda_stream)

        call(0)
        torch.cuda.synchronize()
        errors.append(arrays.error(c.peer))
        graphs.append(graph_of(call, sets))
    peer, *ours = microseconds(graphs)
    flops = float(c.problem.flops) / 1e6  # type: ignore[arg-type]
    print(f"{c.name:26} torch {peer:8.2f} us {flops / peer:6.1f} TF | ours {ours[0]:8.2f} us {flops / ours[0]:6.1f} TF"
          f" {arrays.nbytes / ours[0] / 1e3:5.0f} GB/s | {peer / ours[0]:5.2f} x torch | best {min(ours):8.2f} us", flush=True)  # fmt: skip
    for (choice, *_), us, e in zip(kernels, ours, errors):
        wrong = "" if e <= TOLERANCE[arrays.output.type.dtype.name] else f"WRONG by {e:.1e} "
        print(f"    {us:8.2f} us {wrong}{choice}", flush=True)
    return peer / ours[0]


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--only", default="", help="cases whose name holds one of these words, separated by commas")
    ap.add_argument("--candidates", type=int, default=4, help="schedules of each case, best guess first; 0: all")
    ap.add_argument("--knobs", default="", help="these settings instead")
    ap.add_argument("--emit-only", action="store_true", help="print registers and spills of each kernel; needs no GPU")
    a = ap.parse_args()
    target, start = GpuTarget(), time.perf_counter()
    made: dict[str, tuple[Case, Choice, Kernel]] = {}
    for c in cases():
        if any(w in c.name for w in a.only.split(",")):
            for n, knobs in enumerate(wanted(a, c, target)):
                kernel = verify_kernel(attention.apply(c.problem, dict(knobs), target))
                made[f"{c.name}_{n}"] = (c, Choice("attention", knobs), kernel)
    compiled = compile_many({s: (emit_kernel(k, s, target), target.arch) for s, (_, _, k) in made.items()}, os.cpu_count() or 1)
    print(f"{len(made)} kernels in {time.perf_counter() - start:.1f} s; spills {sum(x.spills for x in compiled.values())}, "
          f"local memory of {[s for s, x in compiled.items() if x.local_bytes]}", flush=True)  # fmt: skip
    if a.emit_only:
        for s, (_, choice, _) in made.items():
            print(f"{s:36} {compiled[s].registers:4} registers, {compiled[s].shared_bytes} bytes shared: {choice}")
        return
    ratios = [
        measure(c, [(choice, k, compiled[s].cubin, s) for s, (d, choice, k) in made.items() if d is c])
        for c in dict.fromkeys(v[0] for v in made.values())
    ]
    print(f"geometric mean of PyTorch's time over ours, first candidates: {statistics.geometric_mean(ratios):.3f}")


if __name__ == "__main__":
    main()
