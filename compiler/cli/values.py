"""Texts of the command line as values, with errors in plain words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from enum import Enum
from typing import TypeVar

import typer

E = TypeVar("E", bound=Enum)

COLUMN = 17  # characters of an option's type that help shows in one line at 80 columns


def whole(low: int) -> Callable[[str | int], int]:
    """A parser of integers of at least `low`."""

    def parse(text: str | int) -> int:
        try:
            n = int(text)
        except ValueError:
            n = low - 1
        if n < low:
            raise typer.BadParameter(f"{text!r}: expected an integer of at least {low}")
        return n

    return parse


def number(low: float) -> Callable[[str | float], float]:
    """A parser of finite numbers of at least `low`."""

    def parse(text: str | float) -> float:
        try:
            x = float(text)
        except ValueError:
            x = low - 1
        if not low <= x < float("inf"):
            raise typer.BadParameter(f"{text!r}: expected a number of at least {low:g}")
        return x

    return parse


def choice(kind: type[E], aliases: Callable[[], Mapping[str, str]] | None = None) -> Callable[[str | E], E]:
    """A parser of the values of an enumeration, in any case, and of other names for them."""
    values = [str(m.value) for m in kind]

    def parse(text: str | E) -> E:
        if isinstance(text, kind):
            return text
        others = aliases() if aliases is not None else {}
        name = others.get(str(text).lower(), str(text).lower())
        if name in values:
            return kind(name)
        near = get_close_matches(name, [*values, *others], 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise typer.BadParameter(f"{str(text)!r}: expected {', '.join(values[:-1])} or {values[-1]}{hint}")

    return parse


def one_of(kind: type[Enum]) -> str:
    """The values of an enumeration as the column of types shows them; the name where they are too long for it, and
    the text of the option names them.
    """
    values = "|".join(str(m.value) for m in kind)
    return values if len(values) <= COLUMN else kind.__name__.upper()
