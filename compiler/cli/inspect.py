"""`dnnc inspect`: the texts of a model at each stage. Nothing is compiled to machine code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dnnc.backends.llvm.features import CpuTarget, parse_target
from dnnc.cli.arguments import load_graph, open_dims
from dnnc.cli.console import show_code, show_json
from dnnc.driver import make_program
from dnnc.frontends.onnx import read_model
from dnnc.ir.errors import DnncError, InputError
from dnnc.ir.graph import Graph
from dnnc.ir.shapes import specialise
from dnnc.options import CompileOptions
from dnnc.passes.program import Program
from dnnc.report.collect import step_nodes
from dnnc.report.sources import STAGES, entries, find, kernel_text, source


@dataclass(frozen=True)
class View:
    """What to show: a stage; of one kernel or all; before the passes or schedules (`naive`); with node names in the graph (`locs`)."""

    stage: str
    kernel: str | None
    naive: bool
    locs: bool


def inspect_command(model: str, view: View, options: CompileOptions, as_json: bool) -> None:
    """Print a stage's text."""
    if view.stage not in STAGES:
        raise InputError(f"there is no stage {view.stage!r}; there are {', '.join(STAGES)}")
    graph = read_graph(model, dict(options.dims))
    if view.stage == "graph" and view.naive:
        _show_graph(graph.text(view.locs), as_json)
        return
    cpu = parse_target(str(options.target), options.threads)
    program = lowered(graph, cpu, options)
    if view.stage == "graph":
        _show_graph(source(program, cpu, "graph", locs=view.locs), as_json)
    elif as_json:
        show_json({"stage": view.stage, "kernels": kernels(program, cpu, view)})
    else:
        show_code(source(program, cpu, view.stage, view.kernel, view.naive), view.stage)


def _show_graph(text: str, as_json: bool) -> None:
    if as_json:
        show_json({"stage": "graph", "text": text})
    else:
        show_code(text, "graph")


def read_graph(model: str, dims: dict[str, Any]) -> Graph:
    """The graph of an .onnx model or of graph text in a .py file, with the given dims fixed."""
    graph = load_graph(model) if model.endswith(".py") else read_model(model, dims=dims).graph
    fixed = {n: d for n, d in dims.items() if isinstance(d, int) and (model.endswith(".py") or n in graph.dims)}
    return specialise(graph, fixed)


def lowered(graph: Graph, cpu: CpuTarget, options: CompileOptions) -> Program:
    """The program of a graph, with open dims as symbols. InputError names them where that does not work."""
    try:
        return make_program(specialise(graph, {}), cpu, options)
    except DnncError as e:
        if not graph.dims:
            raise
        raise InputError(f"{open_dims('kernels for every size cannot be made of this model', list(graph.dims))}\n{e}") from e


def kernels(program: Program, cpu: CpuTarget, view: View) -> list[dict[str, Any]]:
    """The kernels of a view as data."""
    found = entries(program, cpu)
    return [
        {
            "number": e.number,
            "name": e.name,
            "symbol": e.symbol,
            "schedule": str(e.steps[0].choice),
            "nodes": [step_nodes(s) for s in e.steps],
            "text": kernel_text(program, cpu, e, view.stage, view.naive),
        }
        for e in (found if view.kernel is None else find(found, view.kernel))
    ]
