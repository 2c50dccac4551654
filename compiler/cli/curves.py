"""`dnnc curves`: a training run as a page."""

from __future__ import annotations

from pathlib import Path

from dnnc.cli.console import show_json, show_tables
from dnnc.cli.outputs import check_output
from dnnc.report.layout import Table
from dnnc.report.run import read, write_html
from dnnc.report.tables import show_bytes, show_seconds


def curves_command(log: str, output: str, report: str, as_json: bool) -> None:
    """Write the page of a log, and say what the log holds."""
    path = output or str(Path(log).with_suffix(".html"))
    check_output(path, (".html", ".htm"), [log, *([report] if report else [])])
    write_html(log, path, report or None)
    last = read(log)[-1]
    if as_json:
        show_json({"path": path, "steps": last["step"], "seconds": last["seconds"], "samples": last["samples"]})
        return
    rows = [
        ("steps", f"{last['step']:,}"),
        ("time", show_seconds(last["seconds"])),
        ("samples", f"{last['samples']:,}"),
    ]
    size = show_bytes(Path(path).stat().st_size)
    show_tables([Table(f"{path}: {size}, needs no network", ("", ""), tuple(rows))])
