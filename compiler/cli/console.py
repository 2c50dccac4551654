"""What commands print: tables and code, with colours on a terminal and plain elsewhere; JSON; a progress bar on stderr."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable
from rich.text import Text

from dnnc.report.tables import Table, plain_text

BAR_AFTER = 1.0  # seconds
LEAST_ROOM = 12  # columns of a terminal
HIGHLIGHTED = 400_000  # characters; colouring more takes longer than making it
LEXERS = {"graph": "python", "operator": "python", "llvm": "llvm", "asm": "gas", "cuda": "cuda", "ptx": "ptx"}


def show_tables(tables: Iterable[Table]) -> None:
    """Print tables; off a terminal lines are never wrapped."""
    console = Console(highlight=False)
    if not console.is_terminal:
        typer.echo(plain_text(tables))
        return
    for t in tables:
        _show_table(console, t)


def _show_table(console: Console, t: Table) -> None:
    console.print(t.title, style="bold", markup=False)
    if t.columns:
        console.print(_rich(t, console.width))
    for row in () if t.columns else t.rows:
        console.print("  " + " ".join(row), markup=False)
    console.print()


def _rich(t: Table, width: int) -> RichTable:
    """The table as wide as the terminal; without its cut column where that has no room."""
    rich = RichTable(box=None, header_style="dim", padding=(0, 2, 0, 0), show_header=t.headed)
    room = _room(width, t)
    shown = [k for k, name in enumerate(t.columns) if name != t.cut or room >= LEAST_ROOM]
    for name in (t.columns[k] for k in shown):
        justify: Literal["left", "right"] = "right" if name in t.right else "left"
        cut = name == t.cut
        rich.add_column(name, justify=justify, overflow="ellipsis" if cut else "fold", no_wrap=cut, max_width=room if cut else None)
    for row in t.rows:
        rich.add_row(*(Text(row[k]) for k in shown))
    return rich


def _room(width: int, t: Table) -> int:
    """What the other columns, each with two spaces behind it, leave for the cut one."""
    others = (k for k, name in enumerate(t.columns) if name != t.cut)
    return width - 2 - sum(2 + max(len(r[k]) for r in (t.columns, *t.rows)) for k in others)


def show_code(text: str, stage: str) -> None:
    """Print the text of a stage."""
    console = Console()
    if not console.is_terminal or len(text) > HIGHLIGHTED:
        typer.echo(text.rstrip("\n"))
        return
    from rich.syntax import Syntax

    code = Syntax("", LEXERS[stage], theme="ansi_dark", background_color="default").highlight(text.rstrip("\n"))
    console.print(code, soft_wrap=True)


def show_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=2, allow_nan=False))


class Bar:
    """A progress function for `dnnc.compile`. The bar comes after a second, if stderr is a terminal; use it as a context manager."""

    def __init__(self, console: Console | None = None, after: float = BAR_AFTER) -> None:
        self._console = console or Console(file=sys.stderr)
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
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
            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.add_task("")
            self._update()
            self._bar.start()

    def _update(self) -> None:
        if self._bar is not None:
            stage, done, of = self._state
            self._bar.update(self._bar.task_ids[0], description=stage, completed=done, total=of)
