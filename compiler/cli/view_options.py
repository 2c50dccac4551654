"""The options of `dnnc view`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Annotated

import typer

from dnnc.cli.options import Json, Seed

if TYPE_CHECKING:
    from dnnc.cli.models import Job


def view_(
    job: Job,
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="FILE.html", help="The page. Default: MODEL.html.", show_default=False),
    ] = "",
    onnx: Annotated[
        str,
        typer.Option(metavar="FILE.onnx", help="Also write the fused graph, for Netron.", show_default=False),
    ] = "",
    timed: Annotated[bool, typer.Option("--profile/--no-profile", help="Measure the time of each kernel.")] = True,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Write an HTML page about a model: graphs before and after fusion, passes, code, times, memory.

    The page is one file and works offline. --onnx writes the optimized graph with one ONNX function per kernel. It is
    for viewing: no runtime can run it.
    """

    import_module("dnnc.cli.view").view_command(job, output, onnx, timed, seed, as_json)
