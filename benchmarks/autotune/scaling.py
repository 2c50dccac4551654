"""Trials per second of one host with one GPU against several: what another device brings to a search.

    python benchmarks/autotune/scaling.py --target cuda --devices 0 1

Schedules of random workloads are built and measured twice, by a new runner each time, with as many builders: by the
first device alone, and by all. As in a search the default of each kernel comes first, before the clock, and a schedule
that takes more than EARLY_STOP times as long ends early: without that, one kernel of seconds keeps a device for as long
as all others together. `building` is how busy the builders were: near 100 % more of them would help, and not more
devices. `agree`: of the schedules that were measured both times, how far apart the two medians are, in the middle of
the list and at its 90th percentile; devices must not disturb each other. `--ray` adds a row for a Ray cluster of this
host alone, with all its devices.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from workloads import tasks, workload

from dnnc.autotune.runners.machine import machine_of
from dnnc.autotune.runners.measure import ProcessRunner
from dnnc.autotune.runners.ray_runner import RayRunner
from dnnc.autotune.search.space import space
from dnnc.autotune.search.task import Setting, Task
from dnnc.autotune.search.task_search import EARLY_STOP
from dnnc.autotune.search.trial import Request, Runner, Trial
from dnnc.passes.schedule.problem import Choice

Medians = dict[tuple[str, Choice], float]


@dataclass(frozen=True)
class Row:
    """One run: who measured, what came, and the seconds from the first request to the last trial."""

    name: str
    trials: list[Trial]
    seconds: float

    @property
    def rate(self) -> float:
        return len(self.trials) / self.seconds

    @property
    def medians(self) -> Medians:
        return {(t.task, t.choice): t.median for t in self.trials if t.ok}


def some_tasks(kind: str, setting: Setting, count: int, seed: int) -> list[Task]:
    """The first different tasks of the list of workloads."""
    found: dict[str, Task] = {}
    number = 0
    while len(found) < count:
        found.update({t.key: t for t in tasks(workload(kind, number, seed), setting)})
        number += 1
    return list(found.values())[:count]


def some_requests(found: Sequence[Task], each: int, repeats: int) -> list[Request]:
    """Schedules from all over the space of each task."""
    out = []
    for task in found:
        choices = space(task.rebuilt[2], machine_of(task.setting.target).templates(task.setting))
        step = max(len(choices) // each, 1)
        out += [Request(task, c, repeats=repeats) for c in choices[::step][:each]]
    return out


def run(name: str, runner: Runner, requests: Sequence[Request]) -> Row:
    """Measure with a runner all of whose processes have worked already; what one repeat told them is not enough for the
    requests of three.
    """
    try:
        defaults = list({r.task.key: replace(r, repeats=1) for r in reversed(requests)}.values())
        best = {t.task: t.median for t in runner.measure(defaults) if t.ok}
        limited = [replace(r, limit=EARLY_STOP * best[r.task.key]) if r.task.key in best else r for r in requests]
        start = time.perf_counter()
        trials = list(runner.measure(limited))
        return Row(name, trials, time.perf_counter() - start)
    finally:
        runner.close()


def agreement(one: Medians, other: Medians) -> str:
    """How far apart the times of the same schedules are."""
    ratios = sorted(
        max(one[k], other[k]) / min(one[k], other[k]) - 1
        for k in one.keys() & other.keys()
        if min(one[k], other[k]) > 0
    )
    if not ratios:
        return "-"
    return f"{statistics.median(ratios) * 100:.1f} %, {ratios[int(len(ratios) * 0.9)] * 100:.1f} %"


def show(rows: Sequence[Row], builders: int) -> None:
    print(
        f"{'measured by':<24} {'trials':>7} {'ok':>5} {'seconds':>8} {'trials/s':>9} {'speed-up':>9} {'building':>9}  "
        "agree with the first row"
    )
    first = rows[0]
    for r in rows:
        building = sum(t.compile_seconds for t in r.trials) / (builders * r.seconds)
        cells = (
            f"{len(r.trials):>7} {sum(t.ok for t in r.trials):>5} {r.seconds:>8.1f} {r.rate:>9.1f} "
            f"{r.rate / first.rate:>8.2f}x {building * 100:>7.0f} %"
        )
        print(f"{r.name:<24} {cells}  {agreement(first.medians, r.medians) if r is not first else ''}")


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--target", default="cuda")
    ap.add_argument("--devices", type=int, nargs="+", default=[0, 1])
    ap.add_argument("--tasks", type=int, default=24)
    ap.add_argument("--each", type=int, default=16, help="schedules of a task")
    ap.add_argument("--repeats", type=int, default=3, help="of a schedule, 2 at least")
    ap.add_argument(
        "--builders", type=int, default=os.cpu_count() or 1, help="processes that compile, of all devices together"
    )
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--ray", action="store_true", help="a row for a Ray cluster of this host")
    a = ap.parse_args()
    machine = machine_of(a.target)
    kind = a.target.split()[0].split(":")[0]
    requests = some_requests(some_tasks(kind, Setting(machine.text), a.tasks, a.seed), a.each, a.repeats)
    print(
        f"{machine.name}, {machine.text}: {len(requests)} schedules of {a.tasks} kernels, {a.repeats} repeats, "
        f"{a.builders} builders"
    )
    groups = [a.devices[:1], a.devices] if kind == "cuda" and len(a.devices) > 1 else [a.devices[:1]]
    rows = []
    for devices in groups:
        name = f"process, {len(devices)} device{'s' * (len(devices) > 1)}"
        rows.append(run(name, ProcessRunner(a.target, devices, a.builders), requests))
    if a.ray:
        cluster = RayRunner(a.target, "local")
        count = len(cluster.workers)
        rows.append(run(f"ray, {count} device{'s' * (count > 1)}", cluster, requests))
    show(rows, a.builders)


if __name__ == "__main__":
    main()
