"""What commands print: tables and code, colour on terminals, plain elsewhere; JSON; progress on stderr."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import typer
from rich.console import Console, Group
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from dnnc.report.layout import INDENT, Table, fitted, wrapped
from dnnc.report.tables import plain_text

BAR_AFTER = 1.0  # seconds
HIGHLIGHTED = 400_000  # characters; colouring more takes longer than making it
LEXERS = {"graph": "python", "operator": "python", "asm": "gas"}  # those of other stages have the stage's name


def show_tables(tables: Iterable[Table]) -> None:
    """Print tables; off a terminal lines are never wrapped."""
    console = Console(highlight=False)
    if not console.is_terminal:
        typer.echo(plain_text(tables))
        return
    for t in tables:
        console.print(rendered(t, console.width), soft_wrap=True)
        console.print()


def rendered(t: Table, width: int) -> Group:
    """A table for a terminal of this width, its title bold."""
    lines = [Text(line, style="bold") for line in wrapped(t.title, width)]
    if t.columns:
        head, *rows = fitted(t, width)
        lines += [Text(head, style="dim" if t.headed else ""), *map(Text, rows)]
    else:
        lines += [Text(line) for row in t.rows for line in wrapped(" ".join(row), width, INDENT)]
    return Group(*lines)


def show_code(text: str, stage: str) -> None:
    """Print the text of a stage."""
    console = Console()
    if not console.is_terminal or len(text) > HIGHLIGHTED:
        typer.echo(text.rstrip("\n"))
        return
    from rich.syntax import Syntax

    code = Syntax("", LEXERS.get(stage, stage), theme="ansi_dark", background_color="default").highlight(
        text.rstrip("\n")
    )
    console.print(code, soft_wrap=True)


def show_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=2, allow_nan=False))


class Bar:
    """A progress callback for `dnnc.compile`. Its bar shows after a second on a terminal; a context manager.

    `left`: does it show the time left of each stage? Each stage then has a bar of its own.
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
        if self._console.is_terminal:
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
