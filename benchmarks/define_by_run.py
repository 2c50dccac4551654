"""Define-by-run on the CPU: what Python costs, which kernels structures share, and how step time grows with depth.

    python benchmarks/define_by_run.py [--only products,convolutions] [--blocks 54] [--structures 12] [--seconds 3]

Stochastic depth (Huang et al., 2016): in each step, Python's `if` decides which of the blocks run.

    products       h + relu(h @ w + b) @ v, arrays of 4 x 8: kernels are short, so that Python's part shows
    convolutions   two 3 x 3 convolutions with batch norms, a third of the blocks each at 16 x 32 x 32, 32 x 16 x 16
                   and 64 x 8 x 8, as in the paper's networks for CIFAR

For each net: kernels of all structures together; of structures seen before the time of a step by number of blocks,
with the line through it; Python's part for each op that the forward pass records, and for each of these and
each update of a parameter. `--by-hand` lets a loop update the parameters (`p -= rate * p.grad`): then all ops count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import dnnc.array as xp
import dnnc.nn.functional as F
from dnnc import nn, optim
from dnnc.array.lazy import PROGRAMS_MADE, Call

Runs = Sequence[int]  # the numbers of the blocks that run
CLASSES = 10


class Products(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Module() for _ in range(blocks)])
        rng = np.random.default_rng(0)
        for b in self.blocks:
            for name, shape in (("w", (8, 8)), ("b", (8,)), ("v", (8, 8))):
                b.register_parameter(name, nn.Parameter(0.1 * rng.standard_normal(shape).astype(np.float32)))
        self.list = [(b.w, b.b, b.v) for b in self.blocks]

    def forward(self, x: Any, y: Any, runs: Runs) -> Any:
        for k in runs:
            w, b, v = self.list[k]
            x = x + xp.maximum(x @ w + b, 0.0) @ v
        return xp.mean(x * x)

    @staticmethod
    def batch(rng: np.random.Generator) -> tuple[Any, Any]:
        return rng.standard_normal((4, 8)).astype(np.float32), np.zeros(4, np.int64)


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Any) -> Any:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class Convolutions(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        third = blocks // 3
        self.blocks = nn.ModuleList([Block(16 << min(k // third, 2)) for k in range(3 * third)])
        self.down = nn.ModuleList([nn.Conv2d(c, 2 * c, 1, 2) for c in (16, 32)])
        self.head = nn.Linear(64, CLASSES)
        self.third = third

    def forward(self, x: Any, y: Any, runs: Runs) -> Any:
        x = F.relu(self.norm(self.first(x)))
        for size in range(3):
            if size:
                x = self.down[size - 1](x)
            for k in runs:
                if k // self.third == size:
                    x = self.blocks[k](x)
        return F.cross_entropy(self.head(x.mean(axis=(2, 3))), y)

    @staticmethod
    def batch(rng: np.random.Generator) -> tuple[Any, Any]:
        return rng.standard_normal((8, 3, 32, 32)).astype(np.float32), rng.integers(0, CLASSES, 8)


NETS: dict[str, Callable[[int], Any]] = {"products": Products, "convolutions": Convolutions}


class ByHand:
    """Gradient descent by array code."""

    def __init__(self, net: Any) -> None:
        self.params = list(net.parameters())

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    def step(self) -> None:
        used = [p for p in self.params if p.grad is not None]
        for p in used:
            p -= 1e-3 * p.grad
        xp.evaluate(*used)


class Clock:
    """Runs steps of a net. `native`: seconds in programs since it was asked last."""

    def __init__(self, net: Any, by_hand: bool) -> None:
        self.net = net
        self.optimizer: Any = ByHand(net) if by_hand else optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
        self.x, self.y = map(xp.asarray, net.batch(np.random.default_rng(1)))
        self.native = 0.0
        get = PROGRAMS_MADE.get

        def timed(*args: Any) -> Any:
            program = get(*args)

            def run(data: Any) -> Any:
                start = time.perf_counter()
                made = program(data)
                self.native += time.perf_counter() - start
                return made

            return run

        PROGRAMS_MADE.get = timed  # type: ignore[method-assign]

    def step(self, runs: Runs) -> float:
        """Seconds of a step."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.net(self.x, self.y, runs)
        loss.backward()
        self.optimizer.step()
        return time.perf_counter() - start

    def parts(self, runs: Runs) -> tuple[float, float, float, float]:
        """Seconds of Python in a step: to record the forward pass, for `backward`, for `step`; and of its program."""
        self.native = 0.0
        times = [time.perf_counter()]
        self.optimizer.zero_grad()
        loss = self.net(self.x, self.y, runs)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        self.optimizer.step()
        times.append(time.perf_counter())
        record, backward, step = np.diff(times)
        return record, backward, step - self.native, self.native

    def ops(self, runs: Runs) -> tuple[int, int]:
        """How many ops the forward pass records, running statistics among them, and how many the whole step makes."""
        init, made = Call.__init__, 0

        def counted(*args: Any, **kwargs: Any) -> None:
            nonlocal made
            made += 1
            init(*args, **kwargs)

        Call.__init__ = counted  # type: ignore[method-assign]
        try:
            loss = self.net(self.x, self.y, runs)
            forward = made
            loss.backward()
            self.optimizer.step()
        finally:
            Call.__init__ = init  # type: ignore[method-assign]
        return forward, made


def structures(blocks: int, count: int) -> list[Runs]:
    """All blocks, and random ones of which the later run the less often, down to one in ten."""
    rng = np.random.default_rng(2)
    out = [tuple(range(blocks))]
    for k in range(count - 1):
        keep = 1 - (0.1 + 0.9 * k / count) * np.arange(1, blocks + 1) / blocks
        out.append(tuple(int(b) for b in np.flatnonzero(rng.random(blocks) < keep)))
    return out


def measure(name: str, blocks: int, count: int, seconds: float, by_hand: bool) -> None:
    net = NETS[name](blocks)
    clock = Clock(net, by_hand)
    seen, kernels = structures(blocks, count), set()
    print(f"{name}: {blocks} blocks, {count} structures", flush=True)
    for k, runs in enumerate(seen):
        before = len(kernels)
        took = clock.step(runs)
        kernels |= {note.symbol for note in PROGRAMS_MADE.last.notes}
        print(
            f"  new structure {k}, {len(runs)} blocks: {len(kernels) - before} kernels more, {took:.2f} s", flush=True
        )
    print(f"  kernels in all: {len(kernels)}", flush=True)
    for runs in seen:
        clock.step(runs)
    times: list[list[float]] = [[] for _ in seen]
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times[0]) < 3:
        for runs, made in zip(seen, times):
            made.append(clock.step(runs))
    depth, best = np.array([len(runs) for runs in seen]), np.array([1e3 * statistics.median(t) for t in times])
    slope, intercept = np.polyfit(depth, best, 1)
    off = np.abs(best - (slope * depth + intercept)).max() / best.max()
    for d, t in sorted(zip(depth, best)):
        print(f"  {d} blocks: {t:.2f} ms")
    print(f"  line: {intercept:.2f} ms and {slope:.3f} ms for each block; the farthest point is {100 * off:.1f} % off")
    forward, every = clock.ops(seen[0])
    every = every if by_hand else forward + len(list(net.parameters()))
    parts = np.median([clock.parts(seen[0]) for _ in range(15)], axis=0) * 1e6
    record, backward, step, native = parts
    print(
        f"  {forward} ops recorded forward, {every} with updates; us: record {record:.0f}, backward {backward:.0f}, "
        f"step {step:.0f}; program {native:.0f}\n"
        f"  Python for each op of the forward pass {sum(parts[:3]) / forward:.2f} us, with updates "
        f"{sum(parts[:3]) / every:.2f} us",
        flush=True,
    )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", default="")
    p.add_argument("--blocks", type=int, default=54)
    p.add_argument("--structures", type=int, default=12)
    p.add_argument("--seconds", type=float, default=3)
    p.add_argument("--by-hand", action="store_true", help="update parameters without an optimizer")
    a = p.parse_args()
    for name in NETS:
        if not a.only or name in a.only.split(","):
            measure(name, a.blocks, a.structures, a.seconds, a.by_hand)


if __name__ == "__main__":
    main()
