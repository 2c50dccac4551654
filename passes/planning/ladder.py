"""Fallbacks where a kernel fails: the next schedule, a smaller group, then each node's naive nest.

A failure is anything that a later stage refuses: a schedule that does not apply or does not verify, a kernel of too
many statements, code that cannot be emitted or compiled or takes too long, a kernel that cannot be loaded, one that the
kernel check finds wrong. `Planner` (program.py) plans; a driver builds and, where kernels fail, hands them to
`ScheduledGraph.stepped_down`, which plans again without what failed. All drivers do so through `built`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from dnnc.ir.errors import DnncError, InternalError, locations
from dnnc.ir.graph import Node
from dnnc.passes.analysis.kinds import kind_of
from dnnc.passes.schedule.problem import Choice
from dnnc.passes.schedule.step import NAIVE

if TYPE_CHECKING:
    from dnnc.passes.planning.fuse import Group
    from dnnc.passes.planning.program import ScheduledGraph, Step

T = TypeVar("T")
BUILDS = 3  # schedules of a nest that are built and fail, before the group becomes smaller
LONGEST = 400  # characters of a reason


@dataclass(frozen=True)
class Refusal:
    """A schedule that was chosen and that failed."""

    choice: Choice
    why: str

    def __str__(self) -> str:
        return f"schedule {self.choice} does not apply: {self.why}"


@dataclass(frozen=True)
class Failure:
    """A kernel that a stage of the build refuses."""

    step: Step
    stage: str
    error: Exception


class KernelsFailed(InternalError):
    """Kernels of a program failed while it was built; the program can step down."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        super().__init__(f"{failures[0].step.nest.name}, {failures[0].stage}: {failures[0].error}")
        self.failures = tuple(failures)


class Unfit(InternalError):
    """Groups of nodes that cannot be one kernel, each with the reason."""

    def __init__(self, groups: Sequence[tuple[Group, str]]) -> None:
        super().__init__(groups[0][1])
        self.groups = tuple(groups)


class Ladder:
    """What one compilation has learnt not to try again.

    Attributes:
        down: may it step down? Otherwise a failure is an error.
        cut: nodes that do not join the group of their readers.
        notes: for the report, the groups that were split.
    """

    def __init__(self, down: bool = False) -> None:
        self.down = down
        self.cut: set[Node] = set()
        self.notes: list[str] = []
        self._refused: dict[str, dict[Choice, str]] = {}
        self._builds: dict[str, int] = {}
        self._last: set[str] = set()

    def refused(self, nest: str) -> dict[Choice, str]:
        """The schedules of a nest that failed, first to last, each with the reason."""
        return self._refused.get(nest, {})

    def naive_only(self, nest: str) -> bool:
        """Is a nest to be split or, where it is of one node, left as it was lowered?"""
        return nest in self._last

    def refuse(self, nest: str, choice: Choice, why: str, nodes: int, built: bool = False) -> None:
        """Note that a schedule of a nest, which computes so many nodes, failed. `built`: after it was scheduled."""
        self._refused.setdefault(nest, {})[choice] = why
        self._builds[nest] = self._builds.get(nest, 0) + built
        if self._builds[nest] >= BUILDS or (choice == NAIVE and nodes > 1):
            self._last.add(nest)

    def split(self, groups: Iterable[tuple[Group, str]]) -> None:
        """Make groups of several nodes smaller."""
        for g, why in groups:
            n = _middle(g)
            self.cut.add(n)
            if len(g.outputs) > 1:
                self.cut.update(v.node for v in g.outputs if v.node is not None)
            ops = ", ".join(m.op.name for m in g.nodes[:6]) + (" and more" if len(g.nodes) > 6 else "")
            self.notes.append(f"{ops}{locations(g.outputs[0].locs)}: split behind {n.op.name}: {why}")


def _middle(g: Group) -> Node:
    """Return the split node of a group: its contraction or reduction before the end, else the middle."""
    inner = [n for n in g.nodes[:-1] if len(n.outputs) == 1]
    anchors = [n for n in inner if kind_of(n) != "map"]
    return anchors[-1] if anchors else inner[len(inner) // 2]


def reason(e: BaseException) -> str:
    """Why something failed, on one line."""
    text = str(e) if isinstance(e, DnncError) else f"{type(e).__name__}: {e}"
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}..."


def fail(program: ScheduledGraph, failures: Sequence[Failure]) -> None:
    """Raise what kernels of a program failed with, if there are such: KernelsFailed where the program can step down."""
    if failures:
        raise KernelsFailed(failures) if program.can_step_down else failures[0].error


def built(program: ScheduledGraph, build: Callable[[ScheduledGraph], T]) -> tuple[ScheduledGraph, T]:
    """Build a program, and where kernels of it fail the next best one.

    Returns:
        The program that could be built, and what `build` made of it.

    DnncError: the last failure, where nothing is left to try: the naive nest of a single node fails.
    """
    while True:
        try:
            return program, build(program)
        except KernelsFailed as e:
            program = program.stepped_down(e.failures)
