"""Tables as HTML for notebooks: what `_repr_html_` of reports, profiles and tuning results returns."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from dnnc.report.layout import Table

NUMBER = ' style="text-align:right"'
TEXT = ' style="text-align:left"'


def html_of(tables: Iterable[Table]) -> str:
    """Tables one below the other; the notebook's own style applies."""
    return "\n".join(_table(t) for t in tables)


def folded(summary: str, content: str) -> str:
    """Content that a click on its summary shows."""
    return f"<details><summary><code>{escape(summary)}</code></summary>\n{content}\n</details>"


def _table(t: Table) -> str:
    title = f"<p>{escape(t.title)}</p>"
    if not t.columns:
        return title + "".join(f"<p>{escape(' '.join(r))}</p>" for r in t.rows)
    head = "".join(f"<th{_side(t, n)}>{escape(n)}</th>" for n in t.columns)
    rows = "\n".join(
        "<tr>" + "".join(f"<td{_side(t, n)}>{escape(c)}</td>" for n, c in zip(t.columns, r)) + "</tr>" for r in t.rows
    )
    return f"{title}\n<table>\n{f'<tr>{head}</tr>' if t.headed else ''}\n{rows}\n</table>"


def _side(t: Table, column: str) -> str:
    return NUMBER if column in t.right else TEXT
