"""The search over all tasks of a model under a budget: what is measured in which order, and which schedules win.

In: tasks with their calls, a runner, a log, a budget. Out: a Result; every trial is in the log before anybody hears of
it. Three parts: each task's default (and last winner), so that the shares of the model's time are known; batches for
the tasks that promise most; and for each task a final, in which the fastest take turns with the default, checked. The
default wins ties. Fused groups with a share are measured in parts as well (`rivals`), and at last against these.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dnnc.autotune.log.file import Log
from dnnc.autotune.log.record import Winner
from dnnc.autotune.search.fusion_variants import Fused, Rival, Rivals, passed_over, settle
from dnnc.autotune.search.outcome import Callback, Event, Outcome, Point, Progress, Result
from dnnc.autotune.search.scheduler import Entry, share
from dnnc.autotune.search.task import Task
from dnnc.autotune.search.task_search import LEAST_TRIALS, Model, TaskSearch, Tried
from dnnc.autotune.search.trial import TIE, Request, Runner, Trial, ahead
from dnnc.autotune.search.variants import Variations
from dnnc.passes.schedule.problem import Choice

Array = np.ndarray[Any, Any]
BATCH = 8  # requests of one task in a batch
FINALISTS = 3  # beside the default
FINAL_REPEATS = 9
FINAL_COST = 4.0  # trials that a finalist's trial costs, until finals have shown it
ATTEMPTS = 3  # finals of a task, where all finalists of one fail
MOST_FINALS = 0.3  # of the budget, that is kept for finals
OVERTIME = 0.1  # of the budget, for finals that take longer than was reserved
LEARNING = 0.1  # of the time, at most, that the model may learn
LEARN_FROM = 16  # schedules measured from which the model learns
LEARN_AGAIN = 1.25  # times as many when it learns again
FEW_GAIN = 0.1  # of a task's time, that is taken to be possible while few of its schedules are measured
WORTH = 0.01  # predicted gain of the model below which the search ends
OUT_OF_TIME, OUT_OF_TRIALS, STOPPED, CONVERGED = (
    "the budget ran out",
    "all trials are done",
    "stopped",
    "predicted gain below 1 %",
)


Space = Callable[[Task], Sequence[Choice]]  # the schedules of a task, the default first; a task without any is left out
Features = Callable[[Task, Sequence[Choice]], Array]


@dataclass(frozen=True)
class Plan:
    """How to search."""

    space: Space  # schedules of a task
    features: Features | None = None  # of schedules, for the model; None without one
    model: Model | None = None  # ranks schedules; one with `update` learns from trials
    trials: int | None = None  # to make at most, finals not counted; None for no limit
    resume: bool = False  # do the trials of the log count as measured? Otherwise they serve the model alone
    batch: int = BATCH  # requests that a runner gets at once; more where it has several devices
    callbacks: Sequence[Callback] = ()  # told of what happens
    stopped: Callable[[], bool] = lambda: False  # asked between trials whether to end; finals follow
    clock: Callable[[], float] = time.monotonic  # seconds
    version: str = ""  # of dnnc, for the log
    variations: Variations | None = None  # other ways to make fused groups; None: they stay as they are


def search(tasks: Sequence[tuple[Task, int]], runner: Runner, log: Log, budget: float, plan: Plan) -> Result:
    """Tune tasks.

    Args:
        tasks: each with its calls per call of the model.
        runner: measures; the caller closes it.
        log: gets tasks, trials and winners; its winners compete.
        budget: seconds for all; finals are part of it.
        plan: how.

    KeyboardInterrupt: at once; the log has all trials that were finished. TuneError: the log cannot be written.
    """
    return _Session(tasks, runner, log, budget, plan).run()


class _Session:
    def __init__(self, tasks: Sequence[tuple[Task, int]], runner: Runner, log: Log, budget: float, plan: Plan) -> None:
        self.runner, self.log, self.budget, self.plan = runner, log, budget, plan
        self.start = plan.clock()
        self.last = self.start + budget * (1 + OVERTIME)
        self.made = self.failed = self.learned = 0
        self.final_cost, self.learning = FINAL_COST, 0.0
        self.points: dict[str, list[Point]] = {}
        self.verdicts: dict[str, tuple[Winner | None, str, float, float]] = {}
        self.winners = log.winners()
        self.by_key: dict[str, Entry] = {}
        self.entries = [e for t, n in tasks if (e := self._entry(t, n)) is not None]
        self.rivals = Rivals(plan.variations)
        self.fused: list[Fused] = []

    @property
    def everything(self) -> list[Entry]:
        """The tasks of the model, then the parts of their groups."""
        return [*self.entries, *self.rivals.entries]

    def _entry(self, task: Task, calls: int) -> Entry | None:
        choices = self.plan.space(task)
        if not choices:
            return None
        self.log.append(task)
        seeds = [self.winners[task.key]] if task.key in self.winners else []
        choices = list(dict.fromkeys([*choices, *seeds]))
        features = (
            self.plan.features(task, choices)
            if self.plan.features is not None and self.plan.model is not None
            else None
        )
        s = TaskSearch(task, choices, features, self.plan.model, seeds)
        if self.plan.resume:
            s.add(self.log.trials.get(task.key, ()))
        self.by_key[task.key] = Entry(s, calls)
        return self.by_key[task.key]

    # --- the course ---------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        self._tell("begin")
        self._learn()
        reason = self._explore()
        if reason == STOPPED:  # somebody waits
            self.last = min(self.last, self.plan.clock() + OVERTIME * self.budget)
        self._finals([e for e in self._by_worth() if e.search.task.key not in self.verdicts])
        best, others = self.rivals.contest()
        for rival in best:
            self._match(rival)
        self.fused += map(passed_over, others)
        result = self._result(reason)
        self._tell("end")
        return result

    def _explore(self) -> str:
        """Batches until something ends them; the reason."""
        while True:
            self.rivals.ask(self.entries, self._entry)
            for e in self.everything:
                e.reason = e.reason or e.search.done()
            self.rivals.close()
            finished = [
                e
                for e in self.everything
                if e.reason and e.search.task.key not in self.verdicts and self._deserves_final(e)
            ]
            if finished and any(not e.reason for e in self.everything):
                self._finals(finished)  # early, so that the log has their winners whatever happens later
            reason = self._over()
            if reason:
                return reason
            requests = self._batch()
            if not requests:
                return CONVERGED
            self._measure(requests)
            self._learn()

    def _over(self) -> str:
        if self.plan.stopped():
            return STOPPED
        if self.plan.trials is not None and self.made >= self.plan.trials:
            return OUT_OF_TRIALS
        if self.plan.clock() >= self._deadline():
            return OUT_OF_TIME
        if not self._converged() or self.rivals.unknown:
            return ""
        return CONVERGED if self.rivals.hope(lambda e: _believed(e.search)) < WORTH * self._progress().current else ""

    def _converged(self) -> bool:
        """Is what the model's tasks may still gain too little?"""
        if any(not e.search.tried for e in self.entries):
            return False
        return (
            sum(e.calls * _believed(e.search) for e in self.entries if not e.reason) < WORTH * self._progress().current
        )

    def _deadline(self) -> float:
        """When finals must begin, to end in time."""
        cost = sum(
            e.cost * self.final_cost * (len(self._contenders(e)) + 1) for e in self.everything if self._needs_final(e)
        )
        cost += sum(e.cost * self.final_cost for r in self.rivals.all if r.leads for e in (r.whole, *r.parts))
        return self.start + self.budget * (1 - min(cost / self.budget, MOST_FINALS))

    def _batch(self) -> list[Request]:
        """The next requests, as many as there is time for."""
        left = self.plan.batch if self.plan.trials is None else min(self.plan.batch, self.plan.trials - self.made)
        costs = [e.cost for e in self.everything if e.cost]
        if costs:
            left = min(left, max(int((self._deadline() - self.plan.clock()) / statistics.median(costs)), 1))
        out: list[Request] = []
        parts = self.rivals.unknown or self.rivals.open
        pool = parts if parts and self._converged() else [*self.entries, *self.rivals.allowed(self.made)]
        for e, n in share(pool, left, BATCH):
            out += e.search.requests(n)
        return out

    def _measure(self, requests: Sequence[Request], final: bool = False) -> list[Trial]:
        """Yield trials of requests, logged first. Only what exceeds the budget by the overtime is broken off."""
        began, starts = self.plan.clock(), not self.made
        out: list[Trial] = []
        with closing(_iterator(self.runner.measure(requests))) as trials:
            for t in trials:
                if starts and not out:  # what the runner's processes take to start is no cost of trials
                    began = self.plan.clock() - t.compile_seconds
                out.append(t)
                self._take(t)
                if self.plan.clock() >= self.last:
                    break
        wall = self.plan.clock() - began
        for key in {t.task for t in out} if not final else ():
            n = sum(t.task == key for t in out)
            self.by_key[key].note(n, max(wall * n / len(out), 1e-4))
        return out

    def _take(self, t: Trial) -> None:
        self.log.append(t)
        self.made += 1
        self.failed += not t.ok
        e = self.by_key[t.task]
        self.rivals.trials += any(e is x for x in self.rivals.entries)
        e.search.add([t])
        tried = next((x for x in e.search.tried.values() if x.trials[-1] is t), None)
        why, predicted = (tried.why, tried.predicted) if tried is not None else ("", None)
        point = Point(self.plan.clock() - self.start, t.choice, why, predicted, t.status, t.median)
        self.points.setdefault(t.task, []).append(point)
        self._tell("trial", e, t)

    def _learn(self) -> None:
        """Tell the model of all trials so far, where it wants to know."""
        update = getattr(self.plan.model, "update", None)
        able = [
            (g, e.search.features, e.search.tried)
            for g, e in enumerate(self.everything)
            if e.search.features is not None
        ]
        known = [(features[k], t.seconds, g) for g, features, tried in able for k, t in tried.items()]
        began = self.plan.clock()
        if (
            update is None
            or len(known) < max(LEARN_FROM, LEARN_AGAIN * self.learned)
            or self.learning > LEARNING * (began - self.start)
        ):
            return
        self.learned = len(known)
        x, seconds, groups = zip(*known)
        update(np.stack(x), np.array(seconds), np.array(groups))
        self.learning += self.plan.clock() - began
        for e in self.everything:
            if not e.reason:
                e.search.rescored()

    # --- finals -------------------------------------------------------------------------------------------------------

    def _contenders(self, e: Entry) -> list[Tried]:
        """What may beat the default: the fastest, and the last winner."""
        s = e.search
        base = s.default
        near = math.inf if base is None else base.seconds
        found = [t for t in s.ranked if t.number != 0 and t.seconds < near]
        return found[:FINALISTS]

    def _needs_final(self, e: Entry) -> bool:
        return e.search.task.key not in self.verdicts and self._deserves_final(e) and bool(self._contenders(e))

    def _deserves_final(self, e: Entry) -> bool:
        """May the task's winner be compiled?"""
        return any(e is x for x in self.entries) or self.rivals.deserves_final(e)

    def _by_worth(self) -> list[Entry]:
        """Tasks by the time of the model that they save, most first."""

        def saved(e: Entry) -> float:
            base, best = e.search.default, e.search.best
            return (
                e.calls * (base.seconds - best.seconds)
                if base is not None and best is not None and base.seconds < math.inf
                else math.inf
            )

        return sorted(
            (e for e in self.everything if e.search.tried and self._deserves_final(e)), key=lambda e: -saved(e)
        )

    def _finals(self, entries: Sequence[Entry]) -> None:
        """Decide tasks, in the order given, as many at once as a batch holds. What does not fit into the budget, with a
        little overtime, stays as the log has it; where nothing competes with the default there is nothing to measure.
        """
        left = deque((e, 0) for e in entries)
        while left:
            matches = self._matches(left)
            if matches and self.plan.clock() < self.last:
                undecided = self._hold([(e, field) for e, _, field in matches])
                left.extend((e, n + 1) for e, n, _ in matches if e in undecided and n + 1 < ATTEMPTS)

    def _matches(self, left: deque[tuple[Entry, int]]) -> list[tuple[Entry, int, list[Tried]]]:
        """The next tasks to decide, with the contenders of each; those that need no final are decided on the way."""
        out: list[tuple[Entry, int, list[Tried]]] = []
        room = self.plan.batch
        while left:
            e, attempt = left[0]
            if self.points.get(e.search.task.key) or not self._keep_winner(e):
                field = self._contenders(e)  # without those that failed in the last attempt
                if out and len(field) + 1 > room:
                    break
                if field:
                    out.append((e, attempt, field))
                    room -= len(field) + 1
                else:
                    self._keep_default(e, _unrivalled(e.search, attempt))
            left.popleft()
        return out

    def _hold(self, matches: Sequence[tuple[Entry, Sequence[Tried]]]) -> list[Entry]:
        """Measure contenders and defaults in turns. The tasks of which no contender works, so that others may try."""
        requests = [
            Request(e.search.task, c, None, FINAL_REPEATS, True)
            for e, field in matches
            for c in (e.search.choices[0], *(t.choice for t in field))
        ]
        began, costs = self.plan.clock(), [e.cost for e, _ in matches if e.cost]
        made = self._measure(requests, final=True)
        if costs:
            self.final_cost = max((self.plan.clock() - began) / len(requests) / statistics.mean(costs), 1.0)
        return [
            e for e, _ in matches if not self._decide(e, {t.choice: t for t in made if t.task == e.search.task.key})
        ]

    def _decide(self, e: Entry, made: dict[Choice, Trial]) -> bool:
        """Return a final's winner; False if no contender works, or the default was not timed in the same turns."""
        key = e.search.task.key
        default = made.pop(e.search.choices[0], None)
        if (default is None or default.status == "lost") and not (e.search.default and e.search.default.failed):
            self.verdicts[key] = (
                None,
                "final not finished: the budget ran out",
                math.inf,
                math.inf,
            )
            return True
        right = [t for t in made.values() if t.ok and t.checked and t.seconds]
        if not right:
            unchecked = any(t.ok for t in made.values())
            if unchecked:
                self.verdicts[key] = (
                    None,
                    "the kernel check cannot check this kernel, so the default stays",
                    math.inf,
                    math.inf,
                )
            return unchecked
        best = min(right, key=lambda t: t.median)
        if default is None or not default.ok:
            self._settle(e, best, None, "the default does not work")
        elif ahead(best.seconds, default.seconds):
            self._settle(
                e, best, default, f"{default.median / best.median:.2f} times as fast as the default, measured in turns"
            )
        else:
            self._settle(e, default, default, f"no other is more than {TIE:.0%} faster when measured in turns with it")
        return True

    def _keep_winner(self, e: Entry) -> bool:
        """A task that has a winner and got no trial since: nothing to decide."""
        w = self.log.decided().get(e.search.task.key)
        if w is not None:
            self.verdicts[w.task] = (
                w,
                "won in an earlier session",
                math.inf if w.baseline is None else w.baseline,
                w.seconds,
            )
        return w is not None

    def _keep_default(self, e: Entry, why: str) -> None:
        base = e.search.default
        if base is None or base.failed or not base.checked:
            return
        last = replace(base.trials[-1], seconds=(base.seconds,))
        self._settle(e, last, last, why)

    def _settle(self, e: Entry, t: Trial, default: Trial | None, why: str) -> None:
        baseline = None if default is None else default.median
        w = Winner(t.task, t.choice, t.median, baseline, t.machine, t.version or self.plan.version, time.time())
        self.log.append(w)
        self.verdicts[t.task] = (w, why, math.inf if baseline is None else baseline, t.median)
        self._tell("winner", e, t)

    # --- fusion -------------------------------------------------------------------------------------------------------

    def _match(self, r: Rival) -> None:
        """Decide whether a group is made in another way, while there is time."""

        def measured(requests: Sequence[Request]) -> list[Trial]:
            return self._measure(requests, final=True) if self.plan.clock() < self.last else []

        made = settle(r, [self._held(e) for e in (r.whole, *r.parts)], measured, FINAL_REPEATS)
        if made is not None:
            self.log.append(replace(made[0], version=self.plan.version, at=time.time()))
            self.fused.append(made[1])

    def _held(self, e: Entry) -> tuple[Choice, float]:
        """The schedule with which a task is compiled, and its seconds."""
        key, s = e.search.task.key, e.search
        decided = self.verdicts.get(key)
        if decided is not None and decided[0] is not None:
            return decided[0].choice, decided[0].seconds
        choice = self.winners.get(key, s.choices[0])
        return choice, min((t.seconds for t in s.tried.values() if t.choice == choice), default=math.inf)

    # --- telling ------------------------------------------------------------------------------------------------------

    def _progress(self) -> Progress:
        untuned = current = predicted = 0.0
        for e in self.entries:
            base, best = e.search.default, e.search.best
            if base is None or best is None:
                continue
            usual = base.seconds if math.isfinite(base.seconds) else best.seconds
            untuned += e.calls * usual
            current += e.calls * min(best.seconds, usual)
            gain = 0.0 if e.reason or len(e.search.tried) < BATCH else e.search.last_gain
            predicted += e.calls * max(min(best.seconds, usual) - (gain if math.isfinite(gain) else 0.0), 0.0)
        now = self.plan.clock() - self.start
        eta = max(self.budget - now, 0.0)
        if self.plan.trials is not None and self.made:
            eta = min(eta, max(self.plan.trials - self.made, 0) * now / self.made)
        done = sum(e.search.task.key in self.verdicts for e in self.entries)
        return Progress(
            now, self.budget, self.made, self.failed, len(self.entries), done, untuned, current, predicted, eta
        )

    def _tell(self, kind: str, e: Entry | None = None, trial: Trial | None = None) -> None:
        if not self.plan.callbacks:
            return
        s = None if e is None else e.search
        best, default = (None, None) if s is None else (s.best, s.default)
        event = Event(
            kind,
            self._progress(),
            None if s is None else s.task,
            trial,
            math.inf if best is None else best.seconds,
            math.inf if default is None else default.seconds,
        )
        for call in self.plan.callbacks:
            call(event)

    def _result(self, reason: str) -> Result:
        outcomes = tuple(self._outcome(e) for e in self.entries)
        parts = tuple(self._outcome(e) for e in self.rivals.entries)
        fused = tuple(sorted(self.fused, key=lambda f: -f.calls * f.together))
        p = self._progress()
        made = Result(outcomes, self.plan.clock() - self.start, self.made, self.failed, reason, fused, parts)
        return replace(made, predicted=made.tuned * p.predicted / p.current if p.current > 0 else math.nan)

    def _outcome(self, e: Entry) -> Outcome:
        s = e.search
        winner, why, default, seconds = self.verdicts.get(
            s.task.key, (None, "no final: the budget ran out", math.inf, math.inf)
        )
        if winner is None or not math.isfinite(default):
            default = math.inf if s.default is None else s.default.seconds
            seconds = default if winner is None else seconds
        choice = None if winner is None else winner.choice
        points = tuple(self.points.get(s.task.key, ()))
        reason = e.reason or "the search ended"
        return Outcome(s.task, e.calls, len(s.choices), default, seconds, choice, s.choices[0], reason, why, points)


def _unrivalled(s: TaskSearch, attempt: int) -> str:
    """Why nothing competes with the default."""
    if attempt:
        return "faster schedules failed in the final"
    return "no faster schedule found" if len(s.tried) > 1 else "no other schedule measured"


def _believed(s: TaskSearch) -> float:
    """Seconds that the rest of a task's search may save; few trials do not show that it is nothing."""
    best = s.best
    least = FEW_GAIN * best.seconds if best is not None and len(s.tried) < LEAST_TRIALS else 0.0
    return max(s.gain, least)


def _iterator(trials: Iterator[Trial]) -> Any:
    """What `measure` gives, as something to close: a generator ends its work when it is."""
    return trials if hasattr(trials, "close") else (t for t in trials)
