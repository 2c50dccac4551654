"""A measurement of a schedule: the data, and the interface of search, runners and log."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from dnnc.autotune.search.task import Task
from dnnc.passes.schedule.problem import Choice

OK = "ok"
FAILURES = (
    "build",
    "crash",
    "hang",
    "wrong",
    "lost",
)  # does not compile; ends its process; exceeds its time; differs from float64; its worker went away
TIE = 0.02  # of the default's time, by which a winner must be faster
AHEAD = 2 / 3  # of the repeats in which it must be faster as well


@dataclass(frozen=True)
class Trial:
    """One schedule of one task, measured once."""

    task: str  # key of the Task
    choice: Choice  # the schedule
    status: str  # OK, or one of FAILURES
    # of one call, one number per repeat, in the order of measuring; empty where it failed
    seconds: tuple[float, ...] = ()
    error: str = ""  # what was said where it failed
    code: str = ""  # hex SHA-256 of the machine code; two schedules of the same code are one
    checked: bool = False  # has the kernel check compared it with float64?
    compile_seconds: float = 0.0  # of printing and compiling
    machine: str = ""  # what it ran on, such as "znver5" or "NVIDIA H200"
    version: str = ""  # of dnnc
    at: float = 0.0  # seconds since 1970

    @property
    def ok(self) -> bool:
        return self.status == OK

    @property
    def median(self) -> float:
        """Seconds of a call; infinite where it failed."""
        return statistics.median(self.seconds) if self.ok and self.seconds else float("inf")

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "choice": [self.choice.template, dict(self.choice.knobs)]}

    @staticmethod
    def from_json(record: dict[str, Any]) -> Trial:
        template, knobs = record["choice"]
        return Trial(
            **{**record, "choice": Choice(template, tuple(knobs.items())), "seconds": tuple(record["seconds"])}
        )


def ahead(seconds: Sequence[float], default: Sequence[float]) -> bool:
    """True if a schedule beats the default beyond a tie; equal numbers of repeats are paired rounds."""
    if statistics.median(seconds) > (1 - TIE) * statistics.median(default):
        return False
    pairs = (
        list(zip(seconds, default))
        if len(seconds) == len(default)
        else [(statistics.median(seconds), d) for d in default]
    )
    return sum(a < b for a, b in pairs) >= AHEAD * len(pairs)


@dataclass(frozen=True)
class Request:
    """What a runner is asked for."""

    task: Task  # the kernel
    choice: Choice  # the schedule to measure
    # seconds of one call past which measuring stops early with what there is: 3 times the best so far; None for none
    limit: float | None = None
    repeats: int = 3  # how many numbers `seconds` shall hold
    check: bool = False  # run the kernel check as well, and fail with "wrong" where it does


class Runner(Protocol):
    """Measures schedules: in processes of this machine, on several GPUs, over a Ray cluster."""

    def measure(self, requests: Sequence[Request]) -> Iterator[Trial]:
        """Yield one Trial per request, in any order. A schedule's failure is a status, never an exception."""
        ...

    def close(self) -> None:
        """Ends its processes; also while `measure` is interrupted."""
        ...
