"""`dnnc inspect`: the texts of a model at each stage. Nothing is compiled to machine code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dnnc.artifact.format import is_artifact
from dnnc.backends.base import Backend
from dnnc.backends.registry import open_backend
from dnnc.backends.runtime.program import Program
from dnnc.backends.runtime.sources import Sources
from dnnc.cli.arguments import load_graph, make_arrays, open_dims
from dnnc.cli.console import show_code, show_json
from dnnc.cli.models import load_saved, need_source
from dnnc.compile_program import schedule
from dnnc.frontends.onnx import read_model
from dnnc.frontends.trace.onnx_operators import load_with
from dnnc.ir.errors import DnncError, InputError
from dnnc.ir.graph import Graph
from dnnc.ir.loops.text import show_kernel
from dnnc.ir.shapes import specialise
from dnnc.options import CompileOptions
from dnnc.passes.analysis.segments import HostStep, needs_host, split
from dnnc.passes.analysis.segments import prepare as prepare_split
from dnnc.passes.base import pass_context
from dnnc.passes.planning.program import ScheduledGraph


@dataclass(frozen=True)
class View:
    """What to show: stage, one kernel or all, before passes or schedules (`naive`), node names (`locs`)."""

    stage: str
    kernel: str | None
    naive: bool
    locs: bool


def inspect_command(model: str, view: View, options: CompileOptions, as_json: bool) -> None:
    """Print a stage's text."""
    if is_artifact(model):
        inspect_saved(model, view, options, as_json)
        return
    graph = read_graph(model, dict(options.dims), options.custom_ops)
    if view.stage == "graph" and view.naive:
        _show_graph(graph.text(view.locs), as_json)
        return
    machine = open_backend(options.target, options.threads)
    if view.stage not in machine.stages:
        stages = ", ".join(machine.stages)
        raise InputError(f"there is no stage {view.stage!r} for target {options.target}; there are {stages}")
    if needs_host(graph):
        _show_steps(graph, view, machine, options, as_json)
        return
    program = lowered(graph, machine, options)
    if view.stage == "graph":
        _show_graph(program.graph.text(view.locs), as_json)
        return
    show_sources(program_sources(program, machine, view.naive), view, as_json)


def _show_steps(graph: Graph, view: View, machine: Backend, options: CompileOptions, as_json: bool) -> None:
    """A model with host nodes: its segments' texts in order, and in the graph the nodes between them."""
    prepare_split(graph, pass_context(numerics=options.numerics, precision=options.precision))
    texts = []
    for k, step in enumerate(split(graph)):
        if isinstance(step, HostStep):
            texts += [f"# step {k}: on the host\n{step.node!r}\n"] if view.stage == "graph" else []
            continue
        program = lowered(step.graph, machine, options)
        sources = program_sources(program, machine, view.naive)
        shown = program.graph.text(view.locs) if view.stage == "graph" else sources.text(view.stage, view.kernel)
        texts.append(f"# step {k}: native\n{shown}")
    _show_text("\n".join(texts), view.stage, as_json)


def inspect_saved(model: str, view: View, options: CompileOptions, as_json: bool) -> None:
    """Print a stage of the last program of a saved model, or of the one for the sizes that are given."""
    if replace(options, dims={}) != CompileOptions():
        raise InputError(f"{model} is compiled already: of the options only --dims, --stage and --kernel can be chosen")
    f = load_saved(model, None, "auto")
    if view.naive and view.stage == "operator":
        raise InputError(
            f"{model} holds scheduled kernels only; give the model that it was compiled from, or --naive with --stage "
            "graph"
        )
    if view.stage == "graph" and view.naive and not f.deferred:
        _show_graph(f.graph.text(view.locs), as_json)
        return
    if f.deferred or f.target is None:
        raise InputError(f"{model} holds no compiled program; run it, or inspect the model that it was compiled from")
    if options.dims or not f.programs:
        f.prepare([a.shape for a in make_arrays(f, ("zeros",), dict(options.dims), 0)])
    program = f.last_program()
    if needs_host(f.graph):
        _show_text(f.source(view.stage, view.kernel), view.stage, as_json)
        return
    assert isinstance(program, Program)
    if view.stage == "graph":
        _show_graph(program.graph_text(view.locs), as_json)
        return
    show_sources(f.sources(program), view, as_json)


def show_sources(sources: Sources, view: View, as_json: bool) -> None:
    """Print kernels at a stage."""
    if as_json:
        show_json({"stage": view.stage, "kernels": kernels(sources, view)})
    else:
        show_code(sources.text(view.stage, view.kernel), view.stage)


def _show_graph(text: str, as_json: bool) -> None:
    _show_text(text, "graph", as_json)


def _show_text(text: str, stage: str, as_json: bool) -> None:
    if as_json:
        show_json({"stage": stage, "text": text})
    else:
        show_code(text, stage)


def read_graph(model: str, dims: dict[str, Any], custom_ops: Mapping[str, Any] | None = None) -> Graph:
    """Return the graph of a model or graph text with these dims fixed. InputError for a compiled model."""
    need_source(model)
    graph = load_graph(model) if model.endswith(".py") else read_model(load_with(model, custom_ops), dims=dims).graph
    fixed = {n: d for n, d in dims.items() if isinstance(d, int) and (model.endswith(".py") or n in graph.dims)}
    return specialise(graph, fixed)


def lowered(graph: Graph, machine: Backend, options: CompileOptions) -> ScheduledGraph:
    """The program of a graph, with open dims as symbols. InputError names them where that does not work."""
    if graph.dims and not machine.any_sizes:
        raise InputError(open_dims("kernels for a device are made for fixed sizes", list(graph.dims)))
    try:
        return schedule(specialise(graph, {}), machine, options)
    except DnncError as e:
        if not graph.dims:
            raise
        raise InputError(
            f"{open_dims('kernels for every size cannot be made of this model', list(graph.dims))}\n{e}"
        ) from e


def program_sources(program: ScheduledGraph, machine: Backend, naive: bool = False) -> Sources:
    """The texts of a program that nobody has compiled to machine code."""
    linked = machine.describe(program)
    texts = {linked.symbols[s.text]: show_kernel(s.nest) for s in program.kernels} if naive else None
    return Sources(linked, machine, texts)


def kernels(sources: Sources, view: View) -> list[dict[str, Any]]:
    """The kernels of a view as data."""
    return [
        {
            "number": n,
            "name": k.name,
            "symbol": k.symbol,
            "schedule": k.choice,
            "nodes": list(k.calls),
            "text": sources.kernel_text(k, view.stage),
        }
        for n, k in sources.find(view.kernel)
    ]
