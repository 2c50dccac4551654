"""Records of compiling and loading: clock laps, and the programs of a model, which become its report."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Union

from dnnc.report import ProgramReport, Report

if TYPE_CHECKING:
    from dnnc.signature import Signature

Progress = Callable[[str, int, int], None]
Noted = Union[ProgramReport, Callable[[], ProgramReport]]
KEPT = 16  # reports of specialisations of one model


class Laps:
    """Seconds by stage: each lap gives the time since the last one to a stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now

    def through(self, progress: Progress | None) -> Progress:
        """A progress function that laps the stage that it is told of, and passes the news on."""

        def tell(stage: str, done: int, of: int) -> None:
            self.lap(stage)
            if progress is not None:
                progress(stage, done, of)

        return tell


class Log:
    """Facts of a compiled model so far. `notes`: how it came about, from a file, or why it was compiled again."""

    def __init__(
        self, name: str, target: str, threads: int, import_seconds: float = 0.0, notes: tuple[str, ...] = ()
    ) -> None:
        self.name, self.target, self.threads, self.import_seconds, self.notes = (
            name,
            target,
            threads,
            import_seconds,
            notes,
        )
        self._programs: deque[Noted] = deque(maxlen=KEPT)

    def add(self, program: Noted) -> None:
        """Note a program; one that was loaded comes as a function, read when somebody asks."""
        self._programs.append(program)

    @property
    def programs(self) -> tuple[ProgramReport, ...]:
        return tuple(p if isinstance(p, ProgramReport) else p() for p in self._programs)

    def report(self, signature: Signature) -> Report:
        inputs, outputs = signature.inputs, signature.outputs
        return Report(
            self.name, self.target, self.threads, inputs, outputs, self.import_seconds, self.programs, self.notes
        )
