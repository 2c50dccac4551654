"""The progress of a training loop in the terminal, and as JSON lines; the loop stays Python's."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Sized
from io import TextIOWrapper
from typing import Any, BinaryIO, Generic, TextIO, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from dnnc.ir import checks
from dnnc.ir.errors import InputError, a_type
from dnnc.pytree import children, is_array

T = TypeVar("T")
PLACES = ("step", "seconds", "samples", "data_seconds")  # what a line of the log has beyond what was told
START = b'{"step"'  # of each line
BLOCK = 4096  # bytes at the end of a log in which its last line probably begins
TEXTS = "NaN", "Infinity", "-Infinity"  # numbers that JSON does not have
REST = 30  # columns of the line beside title, count and numbers: a bar, two times, spaces
REFRESH = 0.1  # seconds between looks at what was told: a look waits for the device


class Progress(Generic[T]):
    """Iterates over batches, and shows how far it has come; see `progress`."""

    def __init__(
        self, batches: Iterable[T], total: int | None, title: str, log: str | None, console: Console | None
    ) -> None:
        self._batches, self._log = batches, log
        self._total = total if total is not None else len(batches) if isinstance(batches, Sized) else None
        self._told: list[dict[str, Any]] = []
        self._samples, self._steps, self._waited = 0, 0, 0.0
        self._title = title
        self._first: tuple[float, int] | None = None  # when the display was first refreshed: the first step compiles
        self._bar = Bar(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(), TimeRemainingColumn(), console=console or Console(stderr=True),
        )  # fmt: skip
        self._task = self._bar.add_task(title, total=self._total, numbers="")

    def __len__(self) -> int:
        if self._total is None:
            raise TypeError("the number of batches is not known; give total=")
        return self._total

    def tell(self, **numbers: Any) -> None:
        """Show numbers of this step, such as `loss=loss`. Arrays are read when the display is refreshed."""
        for name, x in numbers.items():
            if not is_number(x):
                raise InputError(f"tell: {name} is {a_type(x)}; expected a number or an array of one element")
        now = time.perf_counter() - self._begin
        place = {"step": self._steps, "seconds": now, "samples": self._samples, "data_seconds": self._waited}
        self._told.append({**place, **numbers})

    def __iter__(self) -> Iterator[T]:
        self._begin = self._looked = time.perf_counter()
        file = None if self._log is None else opened(self._log)
        try:
            with self._bar:
                for batch, waited in timed(self._batches):
                    self._waited = waited
                    self._steps += 1
                    self._samples += samples(batch)
                    yield batch
                    if time.perf_counter() - self._looked >= REFRESH:
                        self._look(file)
                self._look(file)
        finally:
            if file is not None:
                self._write(file)
                file.close()

    def _look(self, file: TextIO | None) -> None:
        last = self._told[-1] if self._told else None
        if last is not None:
            for name, value in last.items():
                last[name] = number(value)
        if file is None:
            self._told.clear()
        else:
            self._write(file)
        self._looked = time.perf_counter()  # after the wait for the device
        self._first = self._first or (self._looked, self._samples)
        since, before = self._first if self._samples > self._first[1] else (self._begin, 0)
        rate = (self._samples - before) / max(self._looked - since, 1e-9)
        shown = [f"{n} {v:.4g}" for n, v in (last or {}).items() if n not in PLACES]
        self._bar.update(self._task, completed=self._steps, numbers=self._fitting(shown, f"{rate:,.0f} samples/s"))

    def _fitting(self, shown: list[str], rate: str) -> str:
        """As many numbers as the line has room for beside the title, the count and the times, the first ones first."""
        room = self._bar.console.width - len(self._title) - 2 * len(str(self._total or self._steps)) - REST
        words = [*shown, rate]
        while len("  ".join(words)) > room and len(words) > 1:
            words.pop(-2 if len(words) > 2 else -1)
        return "  ".join(words) if len(words) > 1 or len(words[0]) <= room else ""

    def _write(self, file: TextIO) -> None:
        for line in self._told:
            file.write(json.dumps({n: written(number(v)) for n, v in line.items()}, allow_nan=False) + "\n")
        self._told.clear()
        file.flush()


def progress(
    batches: Iterable[T],
    total: int | None = None,
    *,
    title: str = "training",
    log: str | os.PathLike[str] | None = None,
    console: Console | None = None,
) -> Progress[T]:
    """Iterate over batches, and show loss, samples a second and the time left.

        for x, y in (bar := dnnc.progress(loader)):
            bar.tell(loss=step(x, y))

    Args:
        batches: the iterable. A batch has as many samples as the first of its arrays has rows.
        total: number of batches, where `len(batches)` does not tell.
        title: stands ahead of the bar.
        log: a file to which a line of JSON is added for each step of which numbers were told: `step` from 1, `seconds`
            since the loop began, `samples` up to it, `data_seconds` that the loop waited for the batch, and the
            numbers. Numbers that JSON does not have are the texts "NaN", "Infinity" and "-Infinity". Lines are written
            ten times a second, and at the end of the loop. `dnnc curves` draws it.
        console: of rich; by default the standard error stream.

    Raises:
        InputError: `batches` cannot be iterated over, `total` is negative, or the log cannot be written.
    """
    if not isinstance(batches, Iterable):
        raise InputError(f"progress: expected batches to iterate over, got {batches!r}")
    total = None if total is None else checks.integer(total, "total", 0)
    return Progress(batches, total, title, None if log is None else checks.path(log, "log"), console)


def timed(batches: Iterable[T]) -> Iterator[tuple[T, float]]:
    """Batches, and the seconds that it took to get each."""
    it = iter(batches)
    while True:
        begin = time.perf_counter()
        try:
            batch = next(it)
        except StopIteration:
            return
        yield batch, time.perf_counter() - begin


def opened(path: str) -> TextIO:
    """A log, to add lines to. The last line of a run that was killed while it wrote is removed, or ended."""
    try:
        file = open(path, "a+b")
        tail = _unfinished(file)
        if tail.startswith(START) and not tail.endswith(b"}"):
            file.truncate(file.seek(0, os.SEEK_END) - len(tail))
        elif tail:
            file.write(b"\n")
    except OSError as e:
        raise InputError(f"progress: log {path} cannot be written: {e.strerror or e}") from e
    return TextIOWrapper(file, encoding="utf-8")


def _unfinished(file: BinaryIO) -> bytes:
    """What follows the last end of a line."""
    size, tail = file.seek(0, os.SEEK_END), b""
    while b"\n" not in tail and len(tail) < size:
        length = min(2 * len(tail) + BLOCK, size)
        file.seek(-length, os.SEEK_END)
        tail = file.read(length)
    return tail.rpartition(b"\n")[2]


def is_number(x: Any) -> bool:
    """Is it a number, or an array of one? Its value is not asked for."""
    if isinstance(x, (int, float, np.number, np.bool_)):
        return not isinstance(x, complex)
    return hasattr(x, "item") and math.prod(getattr(x, "shape", (2,))) == 1


def written(x: float) -> float | str:
    """A number as JSON has it."""
    if math.isfinite(x):
        return x
    return TEXTS[0] if math.isnan(x) else TEXTS[1 + int(x < 0)]


def number(x: Any) -> float:
    """A number, or an array with one element, as Python's."""
    value: float = x.item() if hasattr(x, "item") else x
    return value


def samples(batch: Any) -> int:
    """The rows of the first array of a tree; 1 where there is none."""
    if is_array(batch):
        return batch.shape[0] if len(batch.shape) else 1
    for _, part in children(batch) or ():
        return samples(part)
    return 1
