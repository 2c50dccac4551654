"""Training on a GPU: an epoch of 60,000 x 784 through an MLP 784-1000-1000-10, and PyTorch's beside it.

    python3 benchmarks/gpu/train_mlp.py [--rows 60000] [--batch 100] [--repeats 5]

Batches have 100 rows. Checked first: the losses of the first steps are PyTorch's in float32. An epoch is the wall time
of a Python loop over all batches, which are on the device, or are copied from the host.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np

import dnnc
import dnnc.array as xp
import dnnc.nn.functional as F
from dnnc import nn, optim

CHECKED = 20  # steps whose losses are compared
LR, MOMENTUM = 0.05, 0.9
SIZES = (784, 1000, 1000, 10)


def model() -> Any:
    a, b, c, d = SIZES
    return nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, c), nn.ReLU(), nn.Linear(c, d))


def loss_of(net: Any, x: Any, y: Any) -> Any:
    return F.cross_entropy(net(x), y)


def torch_step(state: dict[str, Any]) -> tuple[Callable[[Any, Any], Any], Any] | None:
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    a, b, c, d = SIZES
    t = torch.nn
    net = t.Sequential(t.Linear(a, b), t.ReLU(), t.Linear(b, c), t.ReLU(), t.Linear(c, d))
    net.load_state_dict({k: torch.tensor(np.asarray(v)) for k, v in state.items()})
    net.cuda()
    descent = torch.optim.SGD(net.parameters(), LR, momentum=MOMENTUM, fused=True)

    def step(x: Any, y: Any) -> Any:
        descent.zero_grad()
        loss = t.functional.cross_entropy(net(x), y)
        loss.backward()
        descent.step()
        return loss

    return step, torch


def torch_graph(step: Callable[[Any, Any], Any], torch: Any, x: Any, y: Any) -> Callable[[Any, Any], None]:
    """A step as one CUDA graph, whose batch lies in memory of its own."""
    x, y, stream = x.clone(), y.clone(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(x, y)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(x, y)

    def replay(u: Any, v: Any) -> None:
        x.copy_(u)
        y.copy_(v)
        graph.replay()

    return replay


def timed(call: Callable[[], Any], repeats: int) -> float:
    """Seconds, the median of runs that end when the device has finished."""
    times = []
    for _ in range(repeats + 1):
        cupy.cuda.Device().synchronize()
        start = time.perf_counter()
        call()
        cupy.cuda.Device().synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 60000), ("batch", 100), ("repeats", 5)):
        ap.add_argument(f"--{name}", type=int, default=default)
    a = ap.parse_args()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((a.rows, SIZES[0])).astype(np.float32)
    y = rng.integers(0, SIZES[-1], a.rows)
    batches = [slice(k, k + a.batch) for k in range(0, a.rows, a.batch)]
    net = model()
    state = {k: np.asarray(v).copy() for k, v in net.state_dict().items()}
    step = dnnc.train_step(loss_of, optim.SGD(lr=LR, momentum=MOMENTUM), net, target="cuda")
    losses = [float(step(x[s], y[s])) for s in batches[:CHECKED]]
    report = step.programs[-1].report
    print(f"{len(batches)} steps of {a.batch}; {report.programs[0].memory.arena / 1e6:.1f} MB arena")
    peer = torch_step(state)
    if peer is not None:
        other, torch = peer
        wanted = [float(other(torch.tensor(x[s]).cuda(), torch.tensor(y[s]).cuda())) for s in batches[:CHECKED]]
        error = max(abs(p - q) / abs(q) for p, q in zip(losses, wanted))
        print(f"losses of {CHECKED} steps differ from PyTorch's by at most {error:.1e}")
        if error > 1e-3:
            return 1
    there = [(xp.asarray(x[s], device="cuda"), xp.asarray(y[s], device="cuda")) for s in batches]

    def resident() -> None:
        for u, v in there:
            step(u, v)

    def epoch() -> None:
        for s in batches:
            step(x[s], y[s])

    print(f"dnnc     {timed(resident, a.repeats):.3f} s an epoch with batches on the device")
    print(f"dnnc     {timed(epoch, a.repeats):.3f} s an epoch with batches from the host")
    if peer is not None:
        on = [(torch.tensor(x[s]).cuda(), torch.tensor(y[s]).cuda()) for s in batches]

        def torch_resident() -> None:
            for u, v in on:
                other(u, v)

        print(f"PyTorch  {timed(torch_resident, a.repeats):.3f} s, eager, fused SGD, batches on the device")
        replay = torch_graph(other, torch, *on[0])

        def torch_replayed() -> None:
            for u, v in on:
                replay(u, v)

        print(f"PyTorch  {timed(torch_replayed, a.repeats):.3f} s, a captured graph, batches on the device")
    return 0


if __name__ == "__main__":
    sys.exit(main())
