"""Products of quantized operands on one GPU: correctness of every kernel, then times beside cuBLASLt, and whole models.

    python benchmarks/gpu/quantized.py [--parts int8,fp8,few,bert,llama] [--only WORD,WORD] [--candidates N]
                                       [--layers N] [--forms float,w8,w4] [--out FOLDER] [--emit-only]
    PYTHONPATH=.types python3 benchmarks/gpu/quantized.py      where dnnc is not installed; `make .types` makes that
                                                               folder

Parts:
    int8      i8 x i8 -> i32, and with scales, bias and requantization in the epilogue; the rival is the fastest of
              cuBLASLt's suggestions for i8 x i8 -> i32, which ends there
    fp8       e4m3 x e4m3 with scales in the epilogue, to float16; the rivals are the fastest of cuBLASLt's suggestions
              and torch._scaled_mm, which adds up in the tensor cores' own precision
    few       weights of 4 bits (w4) and 8 bits (w8), few rows in float16: beside cuBLAS in float16, and as a share of
              the rate of a copy, which is counted as bytes read and written, by the bytes of codes and scales; x lies
              in the L2 cache
    llama     one token of a Llama-shaped decoder of 1.1 B parameters, batch 1, all by our kernels: float16, w8, w4
    bert      12 layers of BERT-base: QDQ in int8 beside the same in float16; results against float64 of the interpreter
              are checked on a layer of few tokens

Tables are markdown, in FOLDER/quantized.md too. Times are microseconds of calls in a CUDA graph; weights and results
rotate through more memory than the L2 cache holds. The library's fastest suggestion takes turns with ours. How a kernel
is measured stands in single.py.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from single import CALLS, Case, Schedules, case, compiled, graph_of, measured, microseconds

from dnnc.backends.cuda.device import open_device
from dnnc.backends.cuda.emit import emit_kernel, launch_of
from dnnc.backends.cuda.facts import facts
from dnnc.backends.cuda.library import PLANS, LibraryCall, Matrix, Product
from dnnc.backends.cuda.library_load import function_of
from dnnc.backends.cuda.nvrtc import compile_many
from dnnc.ir.dtype import BY_NAME, f16
from dnnc.ir.errors import DnncError
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.types import tensor
from dnnc.passes.base import PassContext, PassManager
from dnnc.passes.lower.nests import lower
from dnnc.passes.pipelines import LEVELS
from dnnc.passes.planning.fuse import plan_fusion
from dnnc.passes.schedule.problem import Problem, classify

SQUARES = (1024, 2048, 4096, 8192)
# rows, columns, length of the sum: BERT-base with 32 x 128 tokens, Llama-7B with 512 and 2048 tokens
LAYERS = ((4096, 2304, 768), (4096, 768, 768), (4096, 3072, 768), (4096, 768, 3072), (512, 4096, 4096),
          (512, 11008, 4096), (512, 4096, 11008), (2048, 12288, 4096), (2048, 4096, 11008))  # fmt: skip
WIDENING = (4096, 3072, 768)  # the first product of BERT's feed-forward layer
PAUSE = 0.04  # seconds of rest ahead of a graph of large products, whose clock falls with the power that they take
FEW_ROWS = ((1, 4096, 4096), (4, 4096, 4096), (16, 4096, 4096), (64, 4096, 4096))
# bits, k, n, and rows of x
FEW = (
    (4, 4096, 4096, (1, 4, 8, 16, 32, 64)),
    (4, 4096, 11008, (1, 8, 16)),
    (4, 11008, 4096, (1, 8, 16)),
    (4, 8192, 28672, (1, 16)),
    (4, 28672, 8192, (1, 16)),
    (8, 4096, 4096, (1, 8, 16)),
    (8, 8192, 28672, (1, 16)),
)
Array = np.ndarray[Any, Any]
Rows = list[list[str]]


class Report:
    """Markdown, printed and kept."""

    def __init__(self, folder: Path | None) -> None:
        self.file = None if folder is None else folder / "quantized.md"
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text("")

    def say(self, text: str) -> None:
        print(text, flush=True)
        if self.file is not None:
            with self.file.open("a") as f:
                f.write(text + "\n")

    def table(self, title: str, head: Sequence[str], rows: Rows) -> None:
        lines = [f"\n### {title}\n", "| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
        self.say("\n".join([*lines, *("| " + " | ".join(r) + " |" for r in rows)]))


# --- products ---------------------------------------------------------------------------------------------------------


def int8_product(m: int, n: int, k: int, end: str) -> Case:
    """`end`: "i32"; "f16", scaled; "i8", scaled, with a bias, ReLU and requantized."""

    def sums(x: Any, w: Any) -> Any:
        return x.double() @ w.double().t()

    def want(x: Any, w: Any, *more: Any) -> Any:
        if end == "i32":
            return sums(x, w)
        y = sums(x, w) * more[0] * 1e-3
        return y if end == "f16" else ((y + more[1]).clamp(min=0)).round().clamp(-128, 127)

    body = f"s: i32[{m}, {n}] = matmul(x, transpose(w, perm=(1, 0)), out_dtype=i32); "
    inputs = f"x: i8[{m}, {k}], w: i8[{n}, {k}]"
    scaled = "f = cast(s, to=f32); g = mul(f, c); h = mul(g, 0.001); "
    if end == "i32":
        body = body.replace("s: i32", "y: i32").rstrip("; ")
    elif end == "f16":
        inputs, body = inputs + f", c: f32[{n}]", body + scaled + "y = cast(h, to=f16)"
    else:
        inputs += f", c: f32[{n}], b: f32[{n}]"
        body += (
            scaled + "a = add(h, b); r = relu(a); q = round(r); p = clip(q, low=-128.0, high=127.0); y = cast(p, to=i8)"
        )

    def peer(x: Any, w: Any, *more: Any) -> Any:
        import torch

        return torch._int_mm(x, w.t()) if m > 16 else w.clone()  # which takes no fewer rows: a copy of the weights

    return case(f"int8_{m}x{n}x{k}_{end}", inputs, body, peer, want)


def float8_product(m: int, n: int, k: int, end: str = "f16") -> Case:
    """`end`: "f16", scaled; "gelu", scaled, with a bias and GELU, in e4m3."""
    body = f"s: f32[{m}, {n}] = matmul(x, transpose(w, perm=(1, 0)), out_dtype=f32); g = mul(s, c); "
    inputs = f"x: f8e4m3fn[{m}, {k}], w: f8e4m3fn[{n}, {k}], c: f32[{n}]"
    if end == "gelu":
        inputs += f", b: f16[{n}]"
        body += "a = add(mul(g, 0.01), cast(b, to=f32)); e = gelu(a); q = mul(e, 9.0); y = cast(q, to=f8e4m3fn)"
    else:
        body += "y = cast(g, to=f16)"

    def want(x: Any, w: Any, c: Any, *more: Any) -> Any:
        import torch

        y = x.double() @ w.double().t() * c
        return torch.nn.functional.gelu(y * 0.01 + more[0].double()).mul(9).clamp(-448, 448) if more else y

    def peer(x: Any, w: Any, c: Any, *more: Any) -> Any:
        import torch

        one = c.new_ones(())
        return torch._scaled_mm(x, w.t(), one, one, out_dtype=torch.float16, use_fast_accum=True)

    return case(f"fp8_{m}x{n}x{k}_{end}", inputs, body, peer, want)


def fp8(a: argparse.Namespace, report: Report) -> int:
    """All sizes; how many kernels are wrong."""
    cases = {float8_product(*s): s for s in [*((n, n, n) for n in SQUARES), *LAYERS]}
    cases[float8_product(*WIDENING, "gelu")] = WIDENING
    cases = {c: s for c, s in cases.items() if any(word in c.name for word in a.only.split(","))}
    schedules, wrong, rows = Schedules(), 0, []
    found = compiled(list(cases), lambda p: schedules.offered(p, ("wgmma",), a.candidates * 3), schedules)
    if a.emit_only:
        print("\n".join(str(x) for _, xs in found for x in xs))
        return sum(x.code.spills > 0 for _, xs in found for x in xs)
    for c, candidates in found:
        m, n, k = cases[c]
        best_plan, plan = library(m, n, k, ("f8e4m3fn", "f16"))
        (mm, rival), results = measured(c, candidates, a, [best_plan], PAUSE)
        wrong += sum(not r.right for r in results)
        first, best = results[0], min(results, key=lambda r: r.us if r.right else float("inf"))
        rows.append([c.name, f"{first.us:.2f}", f"{2e-6 * m * n * k / first.us:.0f}", f"{best.us:.2f}",
                     f"{rival:.2f} ({plan})", f"{mm:.2f}", f"{min(rival, mm) / first.us:.3f}",
                     f"{min(rival, mm) / best.us:.3f}", "yes" if all(r.right for r in results) else "WRONG",
                     str(first.candidate.choice), str(best.candidate.choice)])  # fmt: skip
        print(rows[-1], flush=True)
    report.table("fp8 products, microseconds", ("product", "first", "TFLOP/s", "best", "cuBLASLt (plan)", "torch",
                 "ratio first", "ratio best", "right", "schedule", "best schedule"), rows)  # fmt: skip
    return wrong


kept: list[Any] = []  # what graphs of the library call


def library(m: int, n: int, k: int, types: tuple[str, str] = ("i8", "i32")) -> tuple[Any, int]:
    """The fastest of cuBLASLt's suggestions, for operands and results of these types: a graph of it, and its number."""
    import torch

    x, w, y = Matrix(0, False, k, m * k), Matrix(1, True, k, n * k), Matrix(2, False, n, m * n)
    sets = max(1, min(CALLS, -(-(150 << 20) // (m * k + n * k + 4 * m * n))))
    whole = types[0] == "i8"

    def drawn(*shape: int) -> Any:
        if whole:
            return torch.randint(-128, 128, shape, device="cuda", dtype=torch.int8)
        return torch.randn(shape, device="cuda").to(torch.float8_e4m3fn)

    made = torch.int32 if whole else torch.float16
    arrays = [(drawn(m, k), drawn(n, k), torch.empty(m, n, device="cuda", dtype=made)) for _ in range(sets)]
    best, found = float("inf"), (None, -1)
    handles: dict[str, Any] = {}
    for plan in range(PLANS):
        call = LibraryCall("cublaslt", plan, Product(m, n, k, 1, types, "i32" if whole else "f32", x, w, y, -1, ""))
        try:
            f = function_of(call.code, handles)
        except DnncError:
            break
        space = torch.empty(max(f.workspace_bytes, 16), device="cuda", dtype=torch.uint8)

        def start(i: int, f: Any = f, space: Any = space) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            f.start(None, [*(a.data_ptr() for a in arrays[i]), space.data_ptr()], stream)

        graph = graph_of(start, sets)
        (us,) = microseconds([graph], 3)
        if us < best:
            kept.append((f, space, arrays, handles))  # as long as the graph may be replayed
            best, found = us, (graph, plan)
    return found


def int8(a: argparse.Namespace, report: Report) -> int:
    """All sizes and ends; how many kernels are wrong."""
    sizes = [(n, n, n) for n in SQUARES] + [*LAYERS, *FEW_ROWS]
    cases = {int8_product(*s, end): s for s in sizes for end in ("i32", "f16", "i8")}
    cases = {c: s for c, s in cases.items() if any(word in c.name for word in a.only.split(","))}
    schedules, names = Schedules(), ("gemv", "wgmma", "mma")
    found = compiled(list(cases), lambda p: schedules.offered(p, names, a.candidates), schedules)
    if a.emit_only:
        print("\n".join(str(x) for _, xs in found for x in xs))
        return sum(x.code.spills > 0 for _, xs in found for x in xs)
    rows: Rows = []
    wrong = 0
    for c, candidates in found:
        m, n, k = cases[c]
        best_plan, plan = library(m, n, k) if m > 16 else (None, -1)
        (mm, *more), results = measured(c, candidates, a, [best_plan] if best_plan else [], PAUSE)
        rival = more[0] if more else float("nan")
        wrong += sum(not r.right for r in results)
        first, best = results[0], min(results, key=lambda r: r.us if r.right else float("inf"))
        other = min(rival, mm) if m > 16 else mm
        rows.append([c.name, f"{first.us:.2f}", f"{2e-6 * m * n * k / first.us:.0f}", f"{best.us:.2f}",
                     f"{rival:.2f} ({plan})", f"{mm:.2f}", f"{other / first.us:.3f}", f"{other / best.us:.3f}",
                     "yes" if all(r.right for r in results) else "WRONG",
                     str(first.candidate.choice), str(best.candidate.choice)])  # fmt: skip
        print(rows[-1], flush=True)
    report.table("int8 products, microseconds", ("product", "first", "TOP/s", "best", "cuBLASLt (plan)", "torch",
                 "ratio first", "ratio best", "right", "schedule", "best schedule"), rows)  # fmt: skip
    return wrong


# --- few rows ---------------------------------------------------------------------------------------------------------


def copy_rate() -> float:
    """Bytes read and written per microsecond by a copy of 1 GiB. Not in a graph: there it is no kernel, and takes
    longer.
    """
    import torch

    x = torch.empty(1 << 28, device="cuda", dtype=torch.float32).normal_()
    y = torch.empty_like(x)
    return 2 * x.numel() * 4 / (step_ms(lambda: y.copy_(x), 5) * 1e3)


@dataclass
class Weights:
    """Codes [k, n] of so many bits, unsigned, with scales [k / block, n] in float16."""

    k: int
    n: int
    bits: int
    block: int

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)
        self.codes = rng.integers(0, 1 << self.bits, (self.k, self.n), dtype=np.uint8)
        self.scales = (rng.random((self.k // self.block, self.n), np.float32) * 0.01 + 0.005).astype(np.float16)

    @property
    def nbytes(self) -> int:
        return self.k * self.n * self.bits // 8 + self.scales.nbytes

    def problem(self, m: int, facts: Any) -> tuple[Problem, list[Array]]:
        """The group of x [m, k] times the weights as the passes leave it, and its parameters ahead of the result:
        constants as they lie in memory, an empty array for x.
        """
        g = Graph("few")
        b = Builder(g)
        kind = BY_NAME[f"u{self.bits}"].numpy
        zero = np.full(self.scales.shape, 1 << (self.bits - 1)).astype(kind)
        w = b.dequantize_linear(b.constant(self.codes.astype(kind)), b.constant(self.scales), b.constant(zero),
                                axis=0, block=self.block)  # fmt: skip
        g.outputs = [b.matmul(g.add_input("x", tensor(f16, m, self.k)), w)]
        PassManager().run(g, LEVELS[3], PassContext(facts))
        (group,) = plan_fusion(g, stores_several=facts.stores_several).groups
        low = lower(g, group.nodes, group.outputs)
        given = [v.type.encoding.pack(g.constants[v])[0] if v in g.constants else np.empty(0) for v in low.params[:-1]]
        return classify(group.nodes, low, g.constants), given


def few(a: argparse.Namespace, report: Report) -> int:
    schedules = Schedules()
    told = facts(schedules.target, "standard")
    wrong, rows = 0, []
    rate = float("nan") if a.emit_only else copy_rate()
    report.say(f"\ncopy: {rate / 1e3:.0f} GB/s read and written")
    for bits, k, n, ms in FEW:
        name = f"w{bits}_{k}x{n}"
        if not any(word in name for word in a.only.split(",")):
            continue
        weights = Weights(k, n, bits, 128)
        for m in ms:
            p, constants = weights.problem(m, told)
            choices = schedules.offered(p, ("decoded",), a.candidates * 2)
            kernels = [(c, schedules.kernel(p, c)) for c in choices]
            texts = {f"k_{i}": (emit_kernel(kernel, f"k_{i}", schedules.target), schedules.target.arch)
                     for i, (_, kernel) in enumerate(kernels)}  # fmt: skip
            codes = compile_many(texts, os.cpu_count() or 1)
            if a.emit_only:
                for (c, _), code in zip(kernels, codes.values()):
                    print(f"{name} m={m} {code.registers} registers, {code.spills} spilled: {c}")
                    wrong += code.spills > 0
                continue
            results, half = few_measured(weights, m, kernels, codes, constants, a.replays)
            wrong += sum(e > 4e-3 for _, e, _ in results)
            first, best = results[0], min(results, key=lambda r: r[0])
            rows.append([name, str(m), f"{first[0]:.2f}", f"{weights.nbytes / first[0] / rate:.3f}", f"{best[0]:.2f}",
                         f"{weights.nbytes / best[0] / rate:.3f}", f"{half:.2f}", f"{half / first[0]:.2f}",
                         f"{max(e for _, e, _ in results):.1e}", first[2], best[2]])  # fmt: skip
            print(rows[-1], flush=True)
    report.table("few rows, microseconds", ("weights", "rows", "first", "of copy", "best", "of copy", "cuBLAS f16",
                 "over f16", "error", "schedule", "best schedule"), rows)  # fmt: skip
    return wrong


def few_measured(
    weights: Weights, m: int, kernels: Sequence[Any], codes: Any, constants: Sequence[Array], replays: int
) -> tuple[list[tuple[float, float, str]], float]:
    """(microseconds, error, schedule) of each kernel, and the microseconds of cuBLAS in float16."""
    import torch

    device = open_device()
    sets = max(1, min(CALLS, -(-(150 << 20) // weights.nbytes)))
    given = [torch.from_numpy(np.ascontiguousarray(c).view(np.uint8)).cuda() for c in constants]
    held = [[c.clone() for c in given] for _ in range(sets)]
    x = [torch.randn(m, weights.k, device="cuda").half()] * sets  # in the L2 cache, as after the kernel that makes it
    y = [torch.empty(m, weights.n, device="cuda", dtype=torch.float16) for _ in range(sets)]
    q = torch.from_numpy(weights.codes).cuda().half() - (1 << (weights.bits - 1))
    w = (q.view(-1, weights.block, weights.n) * torch.from_numpy(weights.scales).cuda()[:, None]).view(q.shape)
    exact = q.view(-1, weights.block, weights.n).float() * torch.from_numpy(weights.scales).cuda()[:, None].float()
    want = [(v.double() @ exact.view(q.shape).double()) for v in x[:1]]
    status = torch.zeros(4, dtype=torch.int32, device="cuda")
    found, graphs = [], []
    functions = []
    for (choice, kernel), (symbol, code) in zip(kernels, codes.items()):
        launch = launch_of(kernel)
        f = device.load(code.cubin, symbol, launch, [p.name for p in kernel.entry.params], True)
        functions.append(f)

        def start(i: int, f: Any = f, launch: Any = launch) -> None:
            operands = [*((c if c.numel() else x[i]) for c in held[i]), y[i], status]
            device.launch(f, launch, [v.data_ptr() for v in operands], torch.cuda.current_stream().cuda_stream)

        graph = graph_of(start, sets)
        y[0].fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        error = float((y[0].double() - want[0]).abs().max() / want[0].abs().max())
        found.append((float("inf") if np.isnan(error) else error, str(choice)))
        graphs.append(graph)
    copies = [w.clone() for _ in range(min(sets, max(1, -(-(150 << 20) // (w.numel() * 2)))))]
    graphs.append(graph_of(lambda i: x[i % len(x)] @ copies[i % len(copies)], sets))
    *ours, half = microseconds(graphs, replays)
    graphs.clear()
    return [(us, e, c) for us, (e, c) in zip(ours, found)], half


# --- models -----------------------------------------------------------------------------------------------------------


def model_ms(f: Any, inputs: Sequence[Any], replays: int = 20) -> float:
    """Milliseconds of a call that is bound to arrays on the device, the median."""
    import torch

    outputs = [torch.empty(tuple(o.shape), device="cuda", dtype=getattr(torch, np.dtype(o.dtype).name))
               for o in f.outputs]  # fmt: skip
    return step_ms(f.bind(list(inputs), outputs), replays)


def step_ms(step: Callable[[], Any], replays: int = 20) -> float:
    """Milliseconds of a bound call, the median of several in a row."""
    import torch

    stream = torch.cuda.current_stream()
    times = []
    for k in range(replays + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(stream)
        for _ in range(5):
            step()
        end.record(stream)
        end.synchronize()
        times += [start.elapsed_time(end) / 5] if k >= 3 else []
    return statistics.median(times)


def bert(a: argparse.Namespace, report: Report) -> int:
    import torch
    from quantized_models import encoder

    import dnnc

    wrong = 0
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, 64, 768)).astype(np.float32)
    for form in ("int8", "fp8"):
        want = dnnc.compile(encoder(form, 2, 64, layers=1), target="reference")(x)
        got = dnnc.compile(encoder(form, 2, 64, layers=1), target="cuda", precision="float16")(x)
        gap = np.abs(got - want)
        share = float((gap <= 0.05 * np.abs(want).max()).mean())
        wrong += share < 0.999
        report.say(
            f"\none layer, {form}, against the interpreter: largest gap {gap.max():.3f}, within 5 %: {share:.5f}"
        )
    rows: Rows = []
    data = torch.randn(32, 128, 768, device="cuda")
    times: dict[str, float] = {}
    for form, precision in (("float", "float16"), ("int8", "float16"), ("fp8", "float16")):
        begin = time.perf_counter()
        f = dnnc.compile(encoder(form, 32, 128), target="cuda", precision=precision)
        f(data)
        seconds = time.perf_counter() - begin
        times[form] = model_ms(f, [data])
        kernels = f.report.programs[-1]
        rows.append([f"BERT-base b32 s128, {form}", f"{times[form]:.3f}", f"{times['float'] / times[form]:.3f}",
                     str(kernels.calls), f"{seconds:.0f}"])  # fmt: skip
    report.table("BERT-base, milliseconds", ("model", "ms", "over float16", "kernels", "compile s"), rows)
    return wrong


def llama(a: argparse.Namespace, report: Report) -> int:
    """A decoder of 1.1 B parameters, batch 1, one token: float16, 8 and 4 bits. Logits are compared with float16's."""
    import torch
    from quantized_models import CACHES, decoder

    import dnnc

    rows: Rows = []
    logits: dict[str, Any] = {}
    first, wrong, context, size = float("nan"), 0, 512, 64
    torch.manual_seed(0)
    at = torch.stack([torch.arange(4), torch.full((4,), 300)], 1).cuda()
    mask = torch.where(torch.arange(context) <= 300, 0.0, -10000.0).half().cuda()
    angle = torch.rand(size, device="cuda") * 6
    x = torch.randn(1, 2048, device="cuda").half()
    caches = [torch.randn(4, context, size, device="cuda").half() for _ in range(2 * a.layers)]
    for form in a.forms.split(","):
        begin = time.perf_counter()
        g = decoder(form, a.layers)
        names = [v.name for v in g.outputs[1:]]
        donate = {f"{c}{k}": names[2 * k + j] for k in range(a.layers) for j, c in enumerate(CACHES)}
        f = dnnc.compile(g, target="cuda", donate=donate)
        held = [c.clone() for c in caches]
        out = torch.empty(1, 32000, device="cuda", dtype=torch.float16)
        step = f.bind([x, at, mask, angle.cos().half(), angle.sin().half(), *held], [out, *held])
        step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        logits[form] = out.float().clone()
        gap = float((logits[form] - logits["float"]).abs().max() / logits["float"].abs().max())
        wrong += not gap < 0.05
        ms = step_ms(step)
        first = ms if form == "float" else first
        kernels = f.report.programs[-1].calls
        rows.append(
            [form, f"{ms:.3f}", f"{1e3 / ms:.0f}", f"{first / ms:.2f}", str(kernels), f"{gap:.4f}", f"{seconds:.0f}"]
        )
        print(rows[-1], flush=True)
    report.table(f"decoder of {a.layers} layers, one token", ("weights", "ms", "tokens/s", "over float16", "kernels",
                 "logits' gap", "compile s"), rows)  # fmt: skip
    return wrong


PARTS: dict[str, Callable[[argparse.Namespace, Report], int]] = {
    "int8": int8,
    "fp8": fp8,
    "few": few,
    "bert": bert,
    "llama": llama,
}


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    ap.add_argument("--only", default="", help="products whose name holds one of these words, separated by commas")
    ap.add_argument("--candidates", type=int, default=2, help="schedules of each product and template")
    ap.add_argument("--replays", type=int, default=9, help="of each graph, for one median")
    ap.add_argument("--layers", type=int, default=22, help="of the decoder")
    ap.add_argument("--forms", default="float,w8,w4", help="of the decoder's weights, float first")
    ap.add_argument("--emit-only", action="store_true", help="compile the products' kernels; needs no GPU")
    ap.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="folder of quantized.md")
    a = ap.parse_args()
    a.warm, a.repeats = False, 1
    report = Report(None if a.out is None else Path(a.out))
    if not a.emit_only:
        import torch

        report.say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    wrong = 0
    for name in a.parts.split(","):
        begin = time.perf_counter()
        wrong += PARTS[name](a, report)
        report.say(f"\n{name}: {time.perf_counter() - begin:.0f} s, wrong so far: {wrong}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
