"""The result of a tuning run as tables: the tasks that gained first, the others counted."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dnnc.autotune.search.fusion_variants import Fused
from dnnc.autotune.search.outcome import Outcome, Result
from dnnc.ir.errors import count
from dnnc.report.layout import Table
from dnnc.report.tables import show_seconds

LOGGED = "dnnc log best LOG"  # lists all schedules
ROWS = 20
GAINED = 1.01  # times as fast: what counts as a gain


def result_tables(r: Result, name: str) -> list[Table]:
    """What won, task by task, the heaviest first; what more time is expected to bring."""
    title = (
        f"{name}: {count(len(r.outcomes), 'task')}, {count(r.trials, 'trial')}, {r.failures} failed, "
        f"{show_seconds(r.seconds)}; stopped because {_ended(r.reason)}"
    )
    columns = ("task", "node", "shape", "calls", "share", "trials", "default", "tuned", "gain", "schedule", "why")
    right = frozenset(("calls", "share", "trials", "default", "tuned", "gain"))
    shown, others = divided(r.outcomes)
    rows = tuple(_row(o, r) for o in shown)
    drop = ("schedule", "why", "calls", "trials", "share", "shape")
    tables = [Table(title, columns, rows, right, drop, f"see {LOGGED}")]
    if others:
        tables.append(Table(_folded(others, r), (), ()))
    return [*tables, *fusion_tables(r), Table(_whole(r), (), ()), Table(further(r), (), ())]


def divided(outcomes: Sequence[Outcome]) -> tuple[list[Outcome], list[Outcome]]:
    """Tasks by weight: those to show, and those to fold, which have no gain or are beyond ROWS. One stands for all."""
    every = sorted(outcomes, key=weight, reverse=True)
    if len(every) <= ROWS // 2:
        return every, []
    gained = [o for o in every if _times(o) >= GAINED][:ROWS]
    shown = gained or every[:1]
    return shown, [o for o in every if o not in shown]


def _folded(others: Sequence[Outcome], r: Result) -> str:
    share = sum(map(weight, others)) / r.untuned if r.untuned else 0.0
    best = max(map(_times, others))
    what = "with less than 1 % gain" if best < GAINED else f"with up to {best:.2f}x"
    return f"and {count(len(others), 'task')} {what}, {share:.0%} of the time; {LOGGED} lists all"


def _whole(r: Result) -> str:
    return f"kernel time of a call: {show_seconds(r.untuned)} -> {show_seconds(r.tuned)}, speedup {r.speedup:.2f}x"


def further(r: Result) -> str:
    """What a longer search is expected to bring."""
    unmeasured = sum(not o.points for o in r.outcomes)
    if unmeasured:
        return f"longer search: gain unknown, {unmeasured} of {count(len(r.outcomes), 'task')} not measured"
    if math.isnan(r.predicted):
        return "longer search: no prediction, too few measurements"
    if r.further < GAINED:
        return "longer search: expected gain below 1 %"
    return f"longer search: about {r.further:.2f}x more expected, {r.speedup * r.further:.2f}x in all"


def fusion_tables(r: Result) -> list[Table]:
    """Groups that were also measured in another way; those that stay as they are are counted."""
    if not r.fusions:
        return []
    taken = [f for f in r.fusions if f.taken]
    shown = taken if len(r.fusions) > ROWS // 2 else list(r.fusions)
    columns = ("group", "calls", "default", "alternative", "time", "used", "why")
    rows = tuple(
        (f.task.name, str(f.calls), time_of(f.together), f.name, time_of(f.apart), _way(f), f.verdict) for f in shown
    )
    right = frozenset(("calls", "default", "time"))
    title = "fusion: groups and their alternatives"
    tables = [Table(title, columns, rows, right, ("why", "calls"), f"see {LOGGED}")] if rows else []
    left = len(r.fusions) - len(shown)
    return [*tables, *([Table(f"fusion: {count(left, 'group')} unchanged", (), ())] if left else [])]


def _way(f: Fused) -> str:
    return f.name if f.taken else "default"


def _row(o: Outcome, r: Result) -> tuple[str, ...]:
    share = weight(o) / r.untuned if r.untuned else 0.0
    choice = "" if o.choice is None else "default" if o.choice == o.base else str(o.choice)
    times = (time_of(o.default), time_of(o.seconds), gain(o.default, o.seconds))
    place = (o.task.name, o.task.node, o.task.shape)
    return (*place, str(o.calls), f"{share:.0%}", str(len(o.points)), *times, choice, o.verdict)


def weight(o: Outcome) -> float:
    """Seconds of a call of the model, untuned; 0 where none was measured."""
    return o.calls * o.default if math.isfinite(o.default) else 0.0


def _times(o: Outcome) -> float:
    known = math.isfinite(o.default) and math.isfinite(o.seconds) and o.seconds > 0
    return o.default / o.seconds if known else 1.0


def _ended(reason: str) -> str:
    return "you interrupted it" if reason == "stopped" else reason


def time_of(seconds: float) -> str:
    """`2.1 ms`, or `-` for a time that there is not."""
    return show_seconds(seconds) if math.isfinite(seconds) else "-"


def gain(default: float, seconds: float) -> str:
    """`1.25x`"""
    return f"{default / seconds:.2f}x" if math.isfinite(default) and math.isfinite(seconds) and seconds > 0 else "-"
