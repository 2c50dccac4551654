"""Groups in one kernel against other ways, during a search: which parts to measure, and what wins.

In: the entries of a search, and the variations of those groups that take a share of the model's time. Out: entries for
their parts, which the search measures like any other, and a Fusion for the log and a Fused for reports of each group.
Parts have their place behind the tasks of the model: they get a fifth of the trials, and losers get no more.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dnnc.autotune.log.record import Fusion
from dnnc.autotune.search.scheduler import Entry
from dnnc.autotune.search.task import Task
from dnnc.autotune.search.trial import Request, Trial, ahead
from dnnc.autotune.search.variants import Variation, Variations
from dnnc.passes.schedule.problem import Choice

SHARE = 0.02  # of the model's time that a group must take
EXTRA = 0.2  # of the trials that parts may get while the model's own tasks are not done
FALLEN = 1.25  # times the time of the group in one kernel, from which its parts get no more trials
UNTUNED = (
    8  # schedules of a part that are measured before it is compared with the best of the group rather than its default
)
BEHIND = "the group is faster in one kernel"


@dataclass(frozen=True)
class Fused:
    """What became of one other way to make a group, for reports."""

    task: Task  # the group in one kernel
    calls: int  # per call of the model
    name: str  # the other way: "conv | relu", "direct"
    parts: tuple[Task, ...]  # its kernels
    together: float  # seconds of the group in one kernel, with its winner
    apart: float  # seconds of the parts together, with theirs
    taken: bool  # is it compiled so?
    verdict: str  # why


@dataclass
class Rival:
    """A variation under way: the entries of the group and of its parts, one of these perhaps several times."""

    variation: Variation
    whole: Entry
    parts: list[Entry]

    @property
    def together(self) -> float:
        """Seconds of the group, as far as is known."""
        return _seconds(self.whole)

    @property
    def apart(self) -> float:
        return sum(map(_seconds, self.parts))

    @property
    def known(self) -> bool:
        return math.isfinite(self.together) and math.isfinite(self.apart)

    @property
    def failed(self) -> bool:
        """Is there a part of which nothing works?"""
        return any(e.reason and e.search.best is None for e in self.parts)

    @property
    def fallen(self) -> bool:
        """Is measuring more of the parts of no use? Defaults are compared with defaults."""
        if not self.known:
            return self.failed
        base = self.whole.search.default
        early = base is not None and any(len(e.search.tried) < UNTUNED for e in self.parts)
        return self.apart > FALLEN * (base.seconds if early and base is not None else self.together)

    @property
    def leads(self) -> bool:
        """Are the parts faster, as far as is known?"""
        return self.known and self.apart < self.together


def _seconds(e: Entry) -> float:
    best = e.search.best
    return math.inf if best is None else best.seconds


class Rivals:
    """All of a search.

    Attributes:
        entries: of parts that are no tasks of the model.
        all: rivals, in the order of the variations.
        asked: are the variations known?
        trials: of the parts so far.
    """

    def __init__(self, source: Variations | None) -> None:
        self.source = source
        self.entries: list[Entry] = []
        self.all: list[Rival] = []
        self.asked = source is None
        self.trials = 0

    def ask(self, entries: Sequence[Entry], enter: Callable[[Task, int], Entry | None]) -> None:
        """Once tasks are measured, find alternatives for those with a share. `enter`: an entry for a part."""
        if self.asked or self.source is None or any(not e.search.tried for e in entries):
            return
        self.asked = True
        times = {e.search.task.key: (e, e.calls * _seconds(e)) for e in entries if math.isfinite(_seconds(e))}
        total = sum(t for _, t in times.values())
        wanted = {key: e for key, (e, t) in times.items() if t >= SHARE * total}
        parts: dict[str, Entry] = {}
        own = {e.search.task.key: e for e in entries}
        for v in self.source(list(wanted)):
            whole = wanted[v.task.key]
            found = [own.get(t.key) or parts.get(t.key) or enter(t, 0) for t in v.parts]
            parts.update((e.search.task.key, e) for e in found if e is not None and e.search.task.key not in own)
            if all(e is not None for e in found):
                self.all.append(Rival(v, whole, [e for e in found if e is not None]))
        for e in parts.values():
            e.calls = max((r.whole.calls for r in self.all if any(p is e for p in r.parts)), default=0)
        self.entries = [e for e in parts.values() if e.calls]

    def close(self) -> None:
        """End the search of parts that have fallen behind in all of what they are parts of."""
        for e in self.entries:
            if not e.reason and all(r.fallen for r in self.of(e)):
                e.reason = BEHIND

    def of(self, e: Entry) -> list[Rival]:
        return [r for r in self.all if any(p is e for p in r.parts)]

    def deserves_final(self, e: Entry) -> bool:
        """May the winner of this part be compiled?"""
        return any(r.leads for r in self.of(e))

    @property
    def open(self) -> list[Entry]:
        return [e for e in self.entries if not e.reason]

    @property
    def unknown(self) -> list[Entry]:
        """Parts of which nothing has been measured."""
        return [e for e in self.open if not e.search.tried]

    def allowed(self, made: int) -> list[Entry]:
        """The parts that may be measured now, after so many trials: first each of them once."""
        room = int(EXTRA * made) - self.trials
        if room <= 0:
            return []
        return self.unknown[:room] or self.open

    def hope(self, believed: Callable[[Entry], float]) -> float:
        """Seconds of a model call that measuring more parts may save. `believed`: seconds of a part's call."""
        groups: dict[str, float] = {}
        for r in self.all:
            if r.known and any(not e.reason for e in r.parts):
                may = sum(believed(e) for e in r.parts if not e.reason) + r.together - r.apart
                key = r.variation.task.key
                groups[key] = max(groups.get(key, 0.0), r.whole.calls * may)
        return sum(groups.values())

    def contest(self) -> tuple[list[Rival], list[Rival]]:
        """Of each group the fastest other way, where that is known; and those that are slower."""
        known = sorted((r for r in self.all if r.known), key=lambda r: r.apart)
        best = {r.variation.task.key: r for r in reversed(known)}
        return [r for r in known if best[r.variation.task.key] is r], [
            r for r in known if best[r.variation.task.key] is not r
        ]


def passed_over(r: Rival) -> Fused:
    """A way that is slower than another one of the same group."""
    v = r.variation
    return Fused(v.task, r.whole.calls, str(v), v.parts, r.together, r.apart, False, "there is a faster one")


def settle(
    r: Rival,
    held: Sequence[tuple[Choice, float]],
    measure: Callable[[Sequence[Request]], Sequence[Trial]],
    repeats: int,
) -> tuple[Fusion, Fused] | None:
    """Decide whether a group is made in another way. None where that could not be measured.

    Args:
        r: the group and the other way.
        held: schedules with which the group and each of the parts would be compiled, and their seconds so far.
        measure: measures schedules in turns.
        repeats: of each, where the other way may be faster.
    """
    (_, together), *others = held
    apart, taken, machine, verdict = sum(seconds for _, seconds in others), False, "", "as measured one after the other"
    if apart < together:
        wanted = [Request(e.search.task, choice, None, repeats) for e, (choice, _) in zip((r.whole, *r.parts), held)]
        made = {t.task: t for t in measure(list(dict.fromkeys(wanted))) if t.ok and t.seconds}
        if any(q.task.key not in made for q in wanted):
            return None
        whole, *parts = (made[q.task.key] for q in wanted)
        sums = [sum(turn) for turn in zip(*(t.seconds for t in parts))]
        together, apart, taken = whole.median, statistics.median(sums), ahead(sums, whole.seconds)
        machine, verdict = whole.machine, "measured in turns"
    v = r.variation
    fusion = Fusion(
        v.task.key, tuple(t.key for t in v.parts), v.variant.cuts, v.variant.tile, taken, apart, together, machine
    )
    return fusion, Fused(v.task, r.whole.calls, str(v), v.parts, together, apart, taken, verdict)
