"""The progress of a compilation as a bar on stderr, for the command line and for `progress=True`."""

from __future__ import annotations

import sys
import threading
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

BAR_AFTER = 1.0  # seconds


class Bar:
    """A progress callback for `dnnc.compile`. Its bar shows after a second, on a terminal or in a notebook.

    A context manager. `left`: does it show the time left of each stage? Each stage then has a bar of its own.
    """

    def __init__(self, console: Console | None = None, after: float = BAR_AFTER, left: bool = False) -> None:
        self._console = console or Console(file=sys.stderr)
        self._left = left
        self._after = after
        self._lock = threading.Lock()
        self._state: tuple[str, int, int | None] = ("import and passes", 0, None)
        self._bar: Progress | None = None
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Bar:
        if self._console.is_terminal or self._console.is_jupyter:
            self._timer = threading.Timer(self._after, self._start)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._bar is not None:
                self._bar.stop()
                self._bar = None

    def __call__(self, stage: str, done: int, of: int) -> None:
        with self._lock:
            self._state = (stage, done, of)
            self._update()

    def _start(self) -> None:
        with self._lock:
            if self._timer is None:  # over meanwhile
                return
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                *([TimeRemainingColumn()] if self._left else []),
            )
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.add_task("")
            self._update()
            self._bar.start()

    def _update(self) -> None:
        if self._bar is not None:
            stage, done, of = self._state
            task = self._bar.tasks[0]
            if self._left and task.description != stage:
                self._bar.reset(task.id)
            self._bar.update(task.id, description=stage, completed=done, total=of)
