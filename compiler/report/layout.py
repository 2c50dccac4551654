"""Tables and lines within the terminal's width: numbers never wrap, texts are cut with an ellipsis."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

INDENT, GAP = 2, 2
LEAST = 8  # characters that a cut text keeps; columns that have no room for that continue below
COMFORT = 20  # characters that other texts keep before a column of `drop` goes
ELLIPSIS = "…"
# a number and its unit stay together
_UNIT = re.compile(r"(?<=\d) (?=(?:[kmun]?s|[KMGT]?B|[KMGT]|%|x|(?:GFLOP|GB)/s|calls|threads?|of)\b|%)")
_JOINT = "\u00a0"


@dataclass(frozen=True)
class Table:
    """A title, column names, and rows of text. No columns: rows are lines. Nameless columns have no head."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[str] = frozenset()  # columns of numbers, which are never cut
    drop: tuple[str, ...] = ()  # columns that are left out, in this order, where a terminal is too narrow
    more: str = ""  # how to see what was left out, such as `--detail`
    prose: bool = False  # the last column is prose: it is wrapped, not cut

    @property
    def headed(self) -> bool:
        return any(self.columns)

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """The rows, below the names of the columns where there are any."""
        return [*([self.columns] if self.headed else []), *self.rows]

    @property
    def widths(self) -> list[int]:
        """The width of each column in characters."""
        return [max((len(r[k]) for r in self.cells), default=0) for k in range(len(self.columns))]

    def only(self, numbers: Sequence[int]) -> Table:
        """The table with these columns."""
        rows = tuple(tuple(r[k] for k in numbers) for r in self.rows)
        return replace(self, columns=tuple(self.columns[k] for k in numbers), rows=rows)


def aligned(t: Table, widths: Sequence[int]) -> list[str]:
    """Each row, its cells cut or filled to these widths; numbers are flush right. Prose may take several lines."""
    gap = " " * GAP
    lines = []
    for r in t.cells:
        last = wrapped(r[-1], widths[-1]) if t.prose else [r[-1]]
        for k, text in enumerate(last):
            cells = (*r[:-1], text) if k == 0 else (*[""] * (len(r) - 1), text)
            row = (
                c.rjust(w) if name in t.right else cut(c, w).ljust(w) for c, w, name in zip(cells, widths, t.columns)
            )
            lines.append(gap.join(row).rstrip())
    return lines


def cut(text: str, width: int) -> str:
    """The text, shortened with an ellipsis where it is longer than `width`."""
    return text if len(text) <= width else text[: max(width - 1, 0)] + ELLIPSIS


def wrapped(text: str, width: int, indent: int = 0) -> list[str]:
    """Wrap to `width`, not between a number and its unit. A longer word gets a line of its own."""
    pad = " " * indent
    lines = []
    for line in text.split("\n"):
        kept = _UNIT.sub(_JOINT, line)
        parts = textwrap.wrap(
            kept,
            max(width, LEAST),
            initial_indent=pad,
            subsequent_indent=pad,
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines += [p.replace(_JOINT, " ") for p in parts] or [""]
    return lines


def fitted(t: Table, width: int) -> list[str]:
    """The header and the rows of a table within `width` characters; nothing for a table without columns.

    Columns of `drop` go first, while other texts would be cut to less than COMFORT; then texts are cut, the widest
    first; columns that have no room even so continue below, behind the first column again.
    """
    if not t.columns:
        return []
    room = width - INDENT
    kept = list(range(len(t.columns)))
    for name in t.drop:
        if _needed(t.only(kept), COMFORT) <= room:
            break
        kept = [k for k in kept if t.columns[k] != name]
    gone = [t.columns[k] for k in range(len(t.columns)) if k not in kept]
    lines = [line for block in _blocks(t.only(kept), room) for line in aligned(block, shrunk(block, room))]
    lines = [" " * INDENT + line for line in lines]
    if gone:
        how = f": {t.more}" if t.more else ""
        lines += wrapped(f"(no room for {', '.join(gone)}{how})", width, INDENT)
    return lines


def _needed(t: Table, least: int) -> int:
    """The width of a table whose texts keep at most `least` characters; columns of `drop` keep all, names COMFORT."""
    whole = t.right | set(t.drop)
    widths = [w if name in whole else min(w, least) for name, w in zip(t.columns, t.widths)]
    widths[0] = max(widths[0], min(t.widths[0], COMFORT))
    return sum(widths) + GAP * (len(t.columns) - 1)


def _blocks(t: Table, room: int) -> list[Table]:
    """The table in parts that have room, each with the first column."""
    whole = replace(t, drop=())
    if _needed(whole, LEAST) <= room or len(t.columns) < 3:
        return [whole]
    blocks: list[list[int]] = [[0]]
    for k in range(1, len(t.columns)):
        longer = [*blocks[-1], k]
        if len(blocks[-1]) > 1 and _needed(whole.only(longer), LEAST) > room:
            blocks.append([0, k])
        else:
            blocks[-1] = longer
    return [whole.only(b) for b in blocks]


def shrunk(t: Table, room: int) -> list[int]:
    """Widths of the columns for this room: the widest texts are cut, and names only where no other text is left."""
    widths = t.widths
    texts = [k for k, name in enumerate(t.columns) if name not in t.right]
    over = sum(widths) + GAP * (len(widths) - 1) - room
    while over > 0 and texts:
        cuttable = [k for k in texts if (k > 0 and widths[k] > LEAST) or widths[k] > COMFORT] or texts
        widest = max(cuttable, key=lambda k: widths[k])
        if widths[widest] <= 1:
            break
        widths[widest] -= 1
        over -= 1
    return widths
