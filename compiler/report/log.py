"""Records of compiling and loading: clock laps, and the programs of a model, which become its report."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Union

from dnnc.report import LADDER, ProgramReport, Report

if TYPE_CHECKING:
    from dnnc.signature import Signature

Progress = Callable[[str, int, int], None]
Noted = Union[ProgramReport, Callable[[], ProgramReport]]
KEPT = 16  # reports of specialisations of one model
logger = logging.getLogger("dnnc")


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
        if isinstance(program, ProgramReport):
            self._tell(program)
        else:
            logger.info("%s for %s: loaded", self.name, self.target)

    def _tell(self, p: ProgramReport) -> None:
        """Give the logger `dnnc` a program: INFO what was compiled, WARNING lesser schedules, DEBUG each pass."""
        how = f"compiled, {p.from_cache} of them from the cache"
        sizes = f" at {', '.join(f'{n}={d}' for n, d in p.dims.items())}" if p.dims else ""
        seconds = sum(p.seconds.values())
        logger.info("%s%s for %s: %d kernels, %s, %.2f s", self.name, sizes, self.target, len(p.kernels), how, seconds)
        for r in p.passes:
            logger.debug("%s: pass %s took %.2f ms", self.name, r.name, r.seconds * 1e3)
            for note in r.notes if r.name in (LADDER, "cache") else ():
                logger.warning("%s: %s", self.name, note)

    @property
    def programs(self) -> tuple[ProgramReport, ...]:
        return tuple(p if isinstance(p, ProgramReport) else p() for p in self._programs)

    def report(self, signature: Signature) -> Report:
        inputs, outputs = signature.inputs, signature.outputs
        return Report(
            self.name, self.target, self.threads, inputs, outputs, self.import_seconds, self.programs, self.notes
        )
