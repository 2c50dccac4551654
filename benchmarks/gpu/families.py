"""Architectures that the zoo lacks, in float16 at batch 1 on one GPU: first right, then timed beside torch.compile.

    python benchmarks/gpu/families.py [--nets NAME,NAME] [--precision float16] [--mode reduce-overhead] [--jobs 5]
        [--json OUT] [--markdown OUT]

It needs PyTorch, timm, torchvision and transformers; weights are drawn from a seed. Each network has a process of its
own. Processes compile side by side, and time one after the other. Results are compared with PyTorch in float32. Times
are the GPU's per call, by events around calls that are enqueued back to back; a ratio is torch.compile's time over
ours.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE)  # gpu_time
sys.path.insert(1, str(HERE.parent))  # zoo, timing
LOCK = Path("/tmp/dnnc-gpu-timing.lock")
BOUND = {"float32": 1e-3, "float16": 5e-2}  # of the largest error over an output's scale
Row = dict[str, Any]


@dataclass(frozen=True)
class Net:
    """`make()` is a module in eval mode; `inputs()` are tensors in float32 or of integers."""

    name: str
    make: Callable[[], Any]
    inputs: Callable[[], tuple[Any, ...]]


def arguments() -> argparse.Namespace:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--nets", help="names, with commas between; all by default")
    ap.add_argument("--precision", default="float16", choices=sorted(BOUND))
    ap.add_argument("--mode", default="reduce-overhead", help="of torch.compile; none for dnnc alone")
    ap.add_argument("--jobs", type=int, default=5, help="networks that compile at a time")
    ap.add_argument("--timeout", type=float, default=400, help="seconds for one network")
    ap.add_argument("--profile", action="store_true", help="print where the time of each network goes")
    ap.add_argument("--json", type=Path)
    ap.add_argument("--markdown", type=Path)
    ap.add_argument("--one", default="", help=argparse.SUPPRESS)
    return ap.parse_args()


# --- networks ---------------------------------------------------------------------------------------------------------


def nets() -> Iterator[Net]:
    import torch

    def image(*shape: int) -> Callable[[], tuple[Any, ...]]:
        return lambda: (torch.randn(1, *shape),)

    for name, size in TIMM:
        yield Net(name, lambda name=name: timm_net(name), image(3, size, size))
    yield Net("wav2vec2_base", wav2vec2, image(16000))
    yield Net("r3d_18", r3d, image(3, 16, 112, 112))
    yield Net("hifigan", hifigan, image(80, 128))
    yield Net("graph_conv", graph_conv, graph_inputs)


TIMM = (
    ("resnext50_32x4d", 224),
    ("regnety_008", 224),
    ("regnetx_016", 224),
    ("resnest50d", 224),
    ("dpn68", 224),
    ("nextvit_small", 224),
    ("mixnet_s", 224),
    ("hrnet_w18_small", 224),
    ("repvit_m1", 224),
)


def timm_net(name: str) -> Any:
    import timm
    from zoo.weights import settle

    net = timm.create_model(name, pretrained=False).eval()
    size = dict(TIMM)[name]
    return settle(net, (3, size, size))


def wav2vec2() -> Any:
    from torch import nn
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Wav2Vec2Model(Wav2Vec2Config(attn_implementation="sdpa"))

        def forward(self, x: Any) -> Any:
            return self.net(x).last_hidden_state

    return Features().eval()


def r3d() -> Any:
    from torchvision.models.video import r3d_18

    return r3d_18(weights=None).eval()


def hifigan() -> Any:
    """The generator of HiFi-GAN (Kong and others, 2020), its smallest configuration but one: dilated and transposed
    convolutions of one axis.
    """
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, c: int, kernel: int) -> None:
            super().__init__()
            self.wide = nn.ModuleList(
                nn.Conv1d(c, c, kernel, dilation=d, padding=d * (kernel - 1) // 2) for d in (1, 3, 5)
            )
            self.near = nn.ModuleList(nn.Conv1d(c, c, kernel, padding=(kernel - 1) // 2) for _ in range(3))

        def forward(self, x: Any) -> Any:
            for a, b in zip(self.wide, self.near):
                x = x + b(nn.functional.leaky_relu(a(nn.functional.leaky_relu(x, 0.1)), 0.1))
            return x

    class Generator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            c = 128
            self.first, rates, kernels = nn.Conv1d(80, c, 7, padding=3), (8, 8, 2, 2), (16, 16, 4, 4)
            self.up = nn.ModuleList(
                nn.ConvTranspose1d(c >> k, c >> k + 1, n, r, padding=(n - r) // 2)
                for k, (r, n) in enumerate(zip(rates, kernels))
            )
            self.blocks = nn.ModuleList(nn.ModuleList(Block(c >> k + 1, n) for n in (3, 7, 11)) for k in range(4))
            self.last = nn.Conv1d(c >> 4, 1, 7, padding=3)

        def forward(self, x: Any) -> Any:
            x = self.first(x)
            for up, blocks in zip(self.up, self.blocks):
                x = up(nn.functional.leaky_relu(x, 0.1))
                x = sum(b(x) for b in blocks) / len(blocks)
            return torch.tanh(self.last(nn.functional.leaky_relu(x)))

    return Generator().eval()


NODES, EDGES, WIDTH = 4096, 32768, 128


def graph_conv() -> Any:
    """Three layers of a graph convolution: messages along edges, summed where they arrive."""
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.message, self.own = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any, edges: Any) -> Any:
            sums = torch.zeros_like(x).index_add(0, edges[1], self.message(x)[edges[0]])
            return torch.relu(self.own(x) + sums / (EDGES / NODES))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x: Any, edges: Any) -> Any:
            for layer in self.layers:
                x = layer(x, edges)
            return x

    return Net().eval()


def graph_inputs() -> tuple[Any, ...]:
    import torch

    return torch.randn(NODES, WIDTH), torch.randint(NODES, (2, EDGES))


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(net: Net, a: argparse.Namespace) -> Row:
    import numpy as np
    import torch
    from gpu_time import gpu_times, host_microseconds

    import dnnc

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_grad_enabled(False)
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    module, inputs = net.make(), net.inputs()
    wanted = module(*inputs)
    kind = getattr(torch, a.precision)
    given = tuple(x.cuda().to(kind) if x.is_floating_point() else x.cuda() for x in inputs)
    start = time.perf_counter()
    program = torch.export.export(module, inputs)
    exported = time.perf_counter() - start
    f = dnnc.compile(program, target="cuda", precision=None if a.precision == "float32" else a.precision)
    device = [x.cuda() for x in inputs]
    result = f(*device)
    row: Row = {
        "name": net.name,
        "precision": a.precision,
        "export_s": exported,
        "compile_s": time.perf_counter() - start - exported,
    }
    got, want = (x.float().cpu().numpy().astype(np.float64) for x in (result, wanted))
    row["error"] = float(np.abs(got - want).max() / np.abs(want).max())
    row["right"] = row["error"] <= BOUND[a.precision]
    report = f.report.programs[-1]
    row |= {"kernels": len(report.kernels), "calls": report.calls}
    bound = f.bind(device, [result])
    calls: dict[str, Callable[[], object]] = {"dnnc": bound}
    if a.mode != "none":
        peer = module.cuda().to(kind)
        peer = peer.to(memory_format=torch.channels_last) if given[0].ndim == 4 else peer
        compiled = torch.compile(peer, mode=a.mode)
        for _ in range(3):
            compiled(*given)
        calls["torch.compile"] = lambda: compiled(*given)
    with alone():
        row["ms"] = dict(zip(calls, gpu_times(list(calls.values()))))
        row["host_us"] = host_microseconds(bound)
        if a.profile:
            row["profile"] = str(f.profile(*device))
    return row


@contextmanager
def alone() -> Iterator[None]:
    """One process times at once."""
    with LOCK.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def apart(name: str, a: argparse.Namespace) -> Row:
    """Measure one network in a process of its own."""
    try:
        words = [sys.executable, str(HERE / "families.py"), *sys.argv[1:], "--one", name]
        done = subprocess.run(words, capture_output=True, text=True, timeout=a.timeout)
    except subprocess.TimeoutExpired:
        return {"name": name, "failed": f"not done after {a.timeout:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if lines and lines[-1].startswith("{"):
        return json.loads(lines[-1])
    return {"name": name, "failed": (done.stderr.strip().splitlines() or ["no output"])[-1][:300]}


def line(r: Row) -> str:
    if "failed" in r:
        return f"{r['name']:18} failed: {r['failed']}"
    times, peer = r["ms"], r["ms"].get("torch.compile")
    ratio = f"{peer / times['dnnc']:.2f}" if peer else ""
    right = "right" if r["right"] else "WRONG"
    return (
        f"{r['name']:18} {right} {r['error']:.1e}  {times['dnnc']:.4f} ms  {peer or 0:.4f}  {ratio}  {r['calls']} "
        f"launches, {r['compile_s']:.0f} s"
    )


def table(rows: list[Row]) -> str:
    out = [
        "| network | error | dnnc, ms | torch.compile, ms | ratio | launches | compiled in, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        if "failed" in r:
            out.append(f"| {r['name']} | {r['failed']} | | | | | |")
            continue
        peer = r["ms"].get("torch.compile", float("nan"))
        figures = f"{r['error']:.1e} | {r['ms']['dnnc']:.4f} | {peer:.4f} | {peer / r['ms']['dnnc']:.2f}"
        out.append(f"| {r['name']} | {figures} | {r['calls']} | {r['compile_s']:.0f} |")
    return "\n".join(out) + "\n"


def main() -> None:
    a = arguments()
    every = {n.name: n for n in nets()}
    if a.one:
        try:
            row = measure(every[a.one], a)
        except Exception as e:
            traceback.print_exc()
            row = {"name": a.one, "failed": f"{type(e).__name__}: {str(e).splitlines()[0][:250]}"}
        print(json.dumps(row), flush=True)
        return
    rows = []
    with ThreadPoolExecutor(a.jobs) as pool:
        for row in pool.map(lambda n: apart(n, a), a.nets.split(",") if a.nets else every):
            rows.append(row)
            print(line(row), flush=True)
            if "profile" in row:
                print(row["profile"], flush=True)
    if a.json:
        a.json.write_text(json.dumps(rows, indent=1))
    if a.markdown:
        a.markdown.write_text(table(rows))


if __name__ == "__main__":
    main()
