"""Schedules out of a tuning log instead of the templates' own guess.

In: the winners of a log and the setting of a compilation. Out: the `choose` for `compile_program`, which knows
afterwards what it found, for winners of any origin (a search, a saved model).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dnnc.autotune.log.record import read_choice
from dnnc.autotune.search.task import Setting, workload_key
from dnnc.autotune.search.variants import Decisions
from dnnc.ir.errors import TuneError, count
from dnnc.passes.planning.ladder import Refusal
from dnnc.passes.planning.program import Revise, ScheduledGraph
from dnnc.passes.schedule.problem import Choice, Problem
from dnnc.passes.schedule.step import Choose, first_choice

SHOWN = 5  # names of untuned kernels


class Winners(Mapping[str, Choice]):
    """Schedules by workload key, and decisions on fused groups as `dnnc.autotune.search.variants` names them.

    Args:
        choices: `{key: Choice}`, or as JSON data `{key: [template, {knob: value}]}`.
        source: where they come from, for people.

    TuneError: a value that is no schedule.
    """

    def __init__(self, choices: Mapping[str, object], source: str = "") -> None:
        try:
            self._choices = {key: c if isinstance(c, Choice) else read_choice(c, key) for key, c in choices.items()}
        except ValueError as e:
            raise TuneError(f"winners{f' of {source}' if source else ''}: {e}") from None
        self.source = source

    def __getitem__(self, key: str) -> Choice:
        return self._choices[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._choices)

    def __len__(self) -> int:
        return len(self._choices)

    def __repr__(self) -> str:
        return f"Winners({count(len(self), 'schedule')}{f' of {self.source}' if self.source else ''})"


class Replay:
    """A `choose` that takes winners where there are some, and asks `default` for the rest.

    Attributes:
        found: names of the kernels for which there was a winner, in order; one for each kernel that was scheduled.
        missing: names of those for which there was none.
        varying: names of those whose sizes are known at run time only, which logs do not have.
        fusions: groups that are made in another way than the compiler's own.
        revise: makes them so, for `compile_program`; None where there are none.
    """

    def __init__(self, winners: Mapping[str, Choice], setting: Setting, default: Choose) -> None:
        self.winners, self.setting, self.default = winners, setting, default
        self.found: list[str] = []
        self.missing: list[str] = []
        self.varying: list[str] = []
        self._given: list[Choice] = []
        self.fusions = Decisions(winners, setting)
        self.revise: Revise | None = self.fusions.revise if self.fusions.choices else None

    def __call__(self, problem: Problem, candidates: Sequence[Choice]) -> Choice:
        name = problem.kernel.name
        if problem.lowered.dims:
            self.varying.append(name)
            return self.default(problem, candidates)
        choice = self.winners.get(workload_key(problem, self.setting))
        if choice is None:
            self.missing.append(name)
            return self.default(problem, candidates)
        self.found.append(name)
        self._given.append(choice)
        return choice

    def refused(self, program: ScheduledGraph) -> list[tuple[str, Refusal]]:
        """Return winners that did not apply, with kernel names: of another version or other templates."""
        given = {id(c) for c in self._given}
        steps = [
            (s.kernel.name, s.refusal)
            for s in program.kernels
            if s.refusal is not None and id(s.refusal.choice) in given
        ]
        return list({id(r): (name, r) for name, r in steps}.values())  # calls of one kernel share their refusal

    def report(self, program: ScheduledGraph) -> tuple[str, ...]:
        """What a user should know: how many kernels are tuned, which are not, which winners were of no use."""
        refused = self.refused(program)
        tuned = len(self.found) - len(refused)
        total = len(self.found) + len(self.missing) + len(self.varying)
        source = getattr(self.winners, "source", "")
        parts = [f"tuned: {tuned} of {total} kernels{f' from {source}' if source else ''}"]
        parts += [
            f"{n} {what}"
            for n, what in ((len(self.missing), "untuned"), (len(self.varying), "of sizes known at run time only"))
            if n
        ]
        parts += [f"{len(refused)} refused"] if refused else []
        untuned = [f"untuned: {_names(self.missing)}"] if self.missing else []
        return (", ".join(parts), *untuned, *self.fusions.notes, *(f"{name}: the log's {r}" for name, r in refused))


def chooser(winners: Mapping[str, Choice], setting: Setting, default: Choose = first_choice) -> Replay:
    """What to pass to `compile_program` as `choose`.

    Args:
        winners: schedules by workload key: `Log.winners()`, or Winners, which know where they come from.
        setting: of this compilation; winners of other settings are not found.
        default: chooses where there is no winner.
    """
    return Replay(winners, setting, default)


def _names(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
