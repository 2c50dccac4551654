"""What pages of reports share: Plotly's figures, and a Jinja template around them; one file that needs no network."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from dnnc.ir.errors import DnncError, install
from dnnc.ir.files import replacing

NEEDED = ("plotly", "jinja2")
LAYOUT = {
    "height": 320,
    "margin": {"l": 60, "r": 20, "t": 10, "b": 45},
    "template": "plotly_white",
    "paper_bgcolor": "rgba(0,0,0,0)",  # of the page, light or dark
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"color": "#7a8290"},
    "legend": {"orientation": "h", "y": 1.12},
}


def needed(error: type[DnncError], packages: Sequence[str] = NEEDED) -> None:
    """`error` where a package is missing that a page takes."""
    missing = [n for n in packages if find_spec(n) is None]
    if missing:
        raise error(f"a report takes {' and '.join(missing)}: {install('tune')}")


def write(text: str, path: str | os.PathLike[str], error: type[DnncError]) -> None:
    """Write a page at once. `error` where the file cannot be written."""
    try:
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as e:
        raise error(f"cannot write the report {path}: {e.strerror or e}") from None


def page(template: str, **values: Any) -> str:
    """A page by its template in this folder, with Plotly's script as `plotly_js`."""
    from plotly.offline import get_plotlyjs

    return plain_page(template, plotly_js=get_plotlyjs(), **values)


def plain_page(template: str, **values: Any) -> str:
    """A page by its template in this folder, without Plotly."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("dnnc.report", "")
    folder = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    text: str = folder.get_template(template).render(**values)
    return text


def figure(x: str, y: str, **axes: Any) -> Any:
    """An empty figure with titles of its axes."""
    import plotly.graph_objects as go

    made = go.Figure(layout=LAYOUT)
    made.update_xaxes(title=x, **axes)
    made.update_yaxes(title=y, **axes)
    for update in (made.update_xaxes, made.update_yaxes):
        update(gridcolor="rgba(128,128,128,0.25)", zerolinecolor="rgba(128,128,128,0.4)")
    return made


def drawn(made: Any, name: str) -> str:
    """A figure as HTML, which templates take as it is (`safe`)."""
    config = {"displaylogo": False, "responsive": True}
    text: str = made.to_html(full_html=False, include_plotlyjs=False, div_id=f"plot-{name}", config=config)
    return text
