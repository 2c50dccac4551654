"""Measure schedules of random workloads into a log: what the cost model is trained on.

    python benchmarks/autotune/gather.py --target llvm --seconds 600 --out benchmarks/autotune/logs/znver5.jsonl
    python3 benchmarks/autotune/gather.py --target cuda --seconds 500 --out h200.jsonl           on a machine with a GPU

Run again with the same --out it goes on where it stopped. Of each task's space the default, the templates' other
guesses, what the roofline takes for fast and a sample of the rest are measured, `--each` in all. Tasks go in groups:
while one group is measured, the defaults of the next one are too, and a schedule that is more than LIMIT times slower
than its task's best stops early.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from workloads import FAMILIES, tasks, workload

from dnnc.autotune.log.file import Log, read
from dnnc.autotune.model.roofline import plan
from dnnc.autotune.model.work import work_of
from dnnc.autotune.runners.machine import machine_of
from dnnc.autotune.runners.measure import ProcessRunner
from dnnc.autotune.search.space import space
from dnnc.autotune.search.task import Setting, Task
from dnnc.autotune.search.trial import Request, Trial
from dnnc.ir.errors import DnncError
from dnnc.passes.schedule.problem import Choice

GROUP = {
    "cpu": 8,
    "gpu": 24,
}  # tasks whose schedules are measured together: while they are, builders do not wait for others
LIMIT = 5.0  # times the default, past which measuring one stops early
# times the roofline's estimate of the default: schedules that only take time; one of each template tells the model of
# them
HOPELESS = 20.0
TELL = 10.0  # seconds between lines of progress


def hopeful(found: list[Choice], seconds: list[float]) -> tuple[list[Choice], list[float]]:
    """Choices, with their estimates, without those that are estimated to be far slower than the default, but for one of
    each template.
    """
    out: dict[Choice, float] = {}
    slow: set[str] = set()
    for c, s in zip(found, seconds):
        if s <= HOPELESS * seconds[0] or c.template not in slow:
            out[c] = s
            slow |= {c.template} if s > HOPELESS * seconds[0] else set()
    return list(out), list(out.values())


def sample(found: list[Choice], seconds: list[float], count: int, key: str) -> list[Choice]:
    """A third each: the beginning of the list (the default and the templates' guesses), what is estimated to be fast,
    and others at random; the same for the same task.
    """
    third = max(count // 3, 1)
    picked = list(range(min(third, len(found))))
    picked += [k for k in sorted(range(len(found)), key=lambda k: seconds[k]) if k >= third][:third]
    rng = np.random.default_rng(int(hashlib.sha256(key.encode()).hexdigest()[:16], 16))
    rest = [int(k) for k in rng.permutation(len(found)) if k not in picked]
    return [found[k] for k in [*picked, *rest[: max(count - len(picked), 0)]]]


def settled(trials: Iterable[Trial]) -> set[Choice]:
    """What need not be measured again. One number alone may be an interruption by something else, which ended the
    measuring: it is tried twice.
    """
    found: dict[Choice, list[Trial]] = {}
    for t in trials:
        found.setdefault(t.choice, []).append(t)
    return {c for c, ts in found.items() if len(ts) > 1 or not ts[0].ok or len(ts[0].seconds) > 1}


class Gathering:
    """One run: what is asked for, what is known already, and what comes."""

    def __init__(self, a: argparse.Namespace) -> None:
        self.args, self.begun = a, time.monotonic()
        self.machine = machine_of(a.target)
        self.setting = Setting(self.machine.text, a.numerics, a.rounded)
        self.templates = self.machine.templates(self.setting)
        self.log = Log.open(Path(a.out))
        self.renewed = [task for path in a.renew for task in read(path).tasks.values()]
        self.best = {key: min((t.median for t in ts), default=float("inf")) for key, ts in self.log.trials.items()}
        self.counts: Counter[str] = Counter()
        self.told = 0.0

    @property
    def left(self) -> float:
        return self.args.seconds - (time.monotonic() - self.begun)

    def todo(self) -> Iterator[tuple[Task, list[Choice]]]:
        """Tasks with the choices that are not in the log, the default first."""
        seen: set[str] = set()
        for task in self.changed() if self.renewed else self.of_workloads():
            if task.key in seen:
                continue
            seen.add(task.key)
            done = settled(self.log.trials.get(task.key, ()))
            wanted = self.choices(task)
            if len(wanted) > 1 and not done.issuperset(wanted):
                yield task, [c for c in wanted if c not in done]

    def of_workloads(self) -> Iterator[Task]:
        kind = "cuda" if self.setting.target.startswith("cuda") else "llvm"
        for number in range(self.args.start, self.args.start + self.args.workloads):
            if not self.args.only or self.args.only in FAMILIES[number % len(FAMILIES)][0]:
                yield from tasks(workload(kind, number, self.args.seed), self.setting)

    def changed(self) -> Iterator[Task]:
        """Of the tasks of other logs those that are lowered to another kernel today, so that what was measured says
        nothing of them.
        """
        for task in self.renewed:
            now = task.renewed()
            if now.key != task.key and self.args.only in task.name:
                yield now

    def choices(self, task: Task) -> list[Choice]:
        try:
            problem = task.rebuilt[2]
            found, work = space(problem, self.templates), work_of(problem)
            return sample(
                *hopeful(found, [plan(work, c, self.machine.limits).seconds for c in found]), self.args.each, task.key
            )
        except DnncError as e:
            print(f"no space for {task.name} {task.key[:12]}: {e}", file=sys.stderr)
            return []

    def run(self) -> None:
        """Until the time is over or everything has been measured."""
        todo = self.todo()
        group: list[tuple[Task, list[Choice]]] = []
        runner = ProcessRunner(
            self.args.target,
            tuple(self.args.devices),
            **({"builders": self.args.builders} if self.args.builders else {}),
        )
        try:
            while self.left > 0:
                following = list(islice(todo, GROUP[self.machine.limits.kind]))
                if not group and not following:
                    break
                for task, _ in following:
                    if task.key not in self.log.tasks:
                        self.log.append(task)
                if not self.measured(runner, self.requests(group, following)):
                    break
                group = [(task, choices[1:]) for task, choices in following]
        finally:
            runner.close()
        self.tell(last=True)

    def requests(
        self, group: list[tuple[Task, list[Choice]]], following: list[tuple[Task, list[Choice]]]
    ) -> list[Request]:
        out = []
        for task, choices in group:
            best = self.best.get(task.key, float("inf"))
            out += [
                Request(task, c, None if best == float("inf") else LIMIT * best, self.args.repeats) for c in choices
            ]
        return out + [Request(task, choices[0], None, self.args.repeats) for task, choices in following]

    def measured(self, runner: ProcessRunner, requests: list[Request]) -> bool:
        """Measure and log; False where the time ended first."""
        for trial in runner.measure(requests):
            self.take(trial)
            if self.left <= 0:
                return False
        return True

    def take(self, trial: Trial) -> None:
        self.log.append(trial)
        self.counts[trial.status] += 1
        self.best[trial.task] = min(self.best.get(trial.task, float("inf")), trial.median)
        if time.monotonic() - self.told > TELL:
            self.tell()

    def tell(self, last: bool = False) -> None:
        self.told = time.monotonic()
        states = ", ".join(f"{n} {s}" for s, n in self.counts.most_common())
        print(
            f"{self.told - self.begun:6.0f} s: {len(self.best)} tasks; "
            f"{states or 'nothing measured'}{'; done' if last else ''}",
            flush=True,
        )


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--target", default="llvm", help="such as llvm or cuda")
    ap.add_argument("--seconds", type=float, default=300.0)
    ap.add_argument("--out", required=True, help="the log, which is added to")
    ap.add_argument("--each", type=int, default=24, help="schedules of a task")
    ap.add_argument("--workloads", type=int, default=2000, help="the last one of the list")
    ap.add_argument("--start", type=int, default=0, help="the first one")
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--only", default="", help="part of a family's name")
    ap.add_argument(
        "--renew",
        nargs="*",
        type=Path,
        default=[],
        help="logs of which those tasks are measured again whose kernels have changed since",
    )
    ap.add_argument("--repeats", type=int, default=3)
    ap.add_argument("--builders", type=int, default=0, help="processes that compile; as many as suit the machine")
    ap.add_argument("--devices", type=int, nargs="+", default=[0])
    ap.add_argument("--numerics", default="standard")
    ap.add_argument("--rounded", action="store_true", help="operands may be rounded to TF32")
    Gathering(ap.parse_args()).run()


if __name__ == "__main__":
    main()
