"""`dnnc view`: a model's graphs, passes, kernels and times as one page; its fused graph as ONNX functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dnnc.cli.console import show_json, show_tables
from dnnc.cli.models import Job, open_with_arrays
from dnnc.cli.outputs import check_output, job_reads
from dnnc.executable import Executable
from dnnc.export.fused import write_fused
from dnnc.ir.errors import DnncError, TargetError, UnsupportedError, count
from dnnc.report.bar import Bar
from dnnc.report.layout import Table
from dnnc.report.tables import show_bytes
from dnnc.tools.profile import Profile
from dnnc.view import write_html


def view_command(job: Job, output: str, onnx: str, timed: bool, seed: int, as_json: bool) -> None:
    """Write the page, and the ONNX file where one is asked for, and say what they hold."""
    title = Path(job.model).stem
    page = output or f"{title}.html"
    check_output(page, (".html", ".htm"), job_reads(job))
    if onnx:
        check_output(onnx, (".onnx",), job_reads(job), option="--onnx")
    with Bar() as bar:
        f, arrays = open_with_arrays(job, bar, seed)
        if f.deferred:
            f(*arrays)
        bar("profile", 0, 1)
        profile, why = _profile(f, arrays) if timed else (None, "--no-profile")
        bar("page", 0, 1)
        write_html(f, page, profile, title)
        functions = len(write_fused(f, onnx, title).functions) if onnx else 0
    said = {"page": page, "bytes": Path(page).stat().st_size, "profiled": profile is not None}
    if onnx:
        said |= {"onnx": onnx, "functions": functions}
    if as_json:
        show_json(said)
        return
    rows = [(page, f"{show_bytes(Path(page).stat().st_size)}{f', without times: {why}' if why else ''}")]
    if onnx:
        rows.append((onnx, count(functions, "kernel as ONNX function", "kernels as ONNX functions")))
    show_tables([Table("files written", ("", ""), tuple(rows))])


def _profile(f: Executable, arrays: Sequence[Any]) -> tuple[Profile | None, str]:
    """Times of a call; or why there are none, such as no device."""
    try:
        return f.profile(*arrays), ""
    except (TargetError, UnsupportedError) as e:
        return None, _first_line(e)


def _first_line(e: DnncError) -> str:
    return str(e).splitlines()[0]
