"""Made-up tasks and a runner that computes seconds from the knobs: the best is known, nothing compiles."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from dnnc.autotune.search.task import Setting, Task
from dnnc.autotune.search.trial import Request, Trial
from dnnc.passes.schedule.problem import Choice

SETTING = Setting("llvm -mcpu=made-up -threads=2")


def task(name: str) -> Task:
    return Task(f"{name}-key", name, "contraction", "", None, (), SETTING, 1000)


def space(seed: int) -> list[Choice]:
    """Some hundreds of schedules of two templates, in an order that tells nothing."""
    tiles = itertools.product([1, 2, 4, 6, 8, 12, 16], [8, 16, 32, 64], [1, 2, 4], [0, 4, 8], ["mn", "nm"])
    knobs = [
        (("bm", m), ("bn", n), ("unroll", u), ("prefetch", p), ("order", o)) for m, n, u, p, o in tiles if m * n <= 512
    ]
    found = [Choice("tile", k) for k in knobs]
    found += [Choice("plain", (("unroll", u), ("grain", g))) for u in (1, 2, 4, 8, 16) for g in (1, 2, 4)]
    np.random.default_rng(seed).shuffle(found)
    return found


class Landscape:
    """Seconds of a schedule: a valley placed by the seed, and a cliff where a tile exceeds the registers."""

    def __init__(self, seed: int, scale: float = 1e-3) -> None:
        rng = np.random.default_rng(seed)
        self.scale = scale
        self.bm, self.bn, self.unroll = rng.uniform(0, 4), rng.uniform(3, 6), rng.uniform(0, 2)
        self.room, self.prefetch, self.order = (
            int(rng.choice([64, 128, 256, 512])),
            int(rng.choice([0, 4, 8])),
            str(rng.choice(["mn", "nm"])),
        )

    def __call__(self, c: Choice) -> float:
        k = dict(c.knobs)
        if c.template == "plain":
            return self.scale * 3 * (1 + 0.1 * math.log2(int(k["unroll"]))) * (1 + 0.05 * int(k["grain"]))
        m, n, u = int(k["bm"]), int(k["bn"]), int(k["unroll"])
        valley = (
            (1 + 0.25 * abs(math.log2(m) - self.bm))
            * (1 + 0.2 * abs(math.log2(n) - self.bn))
            * (1 + 0.06 * abs(math.log2(u) - self.unroll))
        )
        cliff = 1 + 0.5 * max(0, m * n * u / self.room - 1)
        return (
            self.scale
            * valley
            * cliff
            * (1.05 if k["prefetch"] != self.prefetch else 1)
            * (1.12 if k["order"] != self.order else 1)
        )


class FakeRunner:
    """Seconds out of a function, with noise. `fate` gives another status for some requests; `wait` is seconds of sleep
    for each request.
    """

    def __init__(
        self,
        seconds: Callable[[Request], float],
        noise: float = 0.02,
        fate: Callable[[Request], str] = lambda r: "ok",
        wait: float = 0.0,
    ) -> None:
        self.seconds, self.noise, self.fate, self.wait = seconds, noise, fate, wait
        self.asked: list[Request] = []
        self.rng = np.random.default_rng(0)
        self.closed = False

    def measure(self, requests: Sequence[Request]) -> Iterator[Trial]:
        for r in requests:
            self.asked.append(r)
            time.sleep(self.wait)
            status = self.fate(r)
            if status != "ok":
                yield Trial(r.task.key, r.choice, status, error="planted")
                continue
            s = self.seconds(r) * np.exp(self.rng.normal(0, self.noise, r.repeats))
            yield Trial(
                r.task.key,
                r.choice,
                "ok",
                tuple(map(float, s)),
                code=str(hash(r.choice)),
                checked=r.check,
                at=time.time(),
            )

    def close(self) -> None:
        self.closed = True
