"""What commands print: tables and code, colour on terminals, plain elsewhere; JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import typer
from rich.console import Console, Group
from rich.text import Text

from dnnc.report.layout import INDENT, Table, fitted, wrapped
from dnnc.report.tables import plain_text

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
