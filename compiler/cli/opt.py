"""`dnnc opt`: named passes on a graph, with the text, the time and the number of nodes after each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import typer

from dnnc.cli.arguments import parse_dims, side_file
from dnnc.cli.console import show_code, show_json, show_tables
from dnnc.cli.inspect import read_graph
from dnnc.cli.outputs import check_output, read_by
from dnnc.ir.errors import ModelError, count
from dnnc.ir.files import replacing
from dnnc.ir.graph import Graph
from dnnc.ir.graph.constant_text import write_constants
from dnnc.ir.graph.verify import verify
from dnnc.ir.target import TargetFacts
from dnnc.passes.base import Pass, PassContext, PassManager, PassRecord, parse_passes, pass_context
from dnnc.passes.pipelines import COPY_OUTPUTS, PASSES
from dnnc.passes.planning.fuse import FusionPlan, plan_fusion
from dnnc.passes.planning.memory_plan import MemoryPlan, plan_memory
from dnnc.report.layout import Table
from dnnc.report.tables import show_bytes, show_seconds


def _keeps(graph: Graph, ctx: PassContext) -> bool:
    return False


FUSE = Pass("fuse", _keeps, "print the groups of nodes that become kernels")
MEMORY_PLAN = Pass("memory-plan", _keeps, "print the address of every value")
TABLE = (*PASSES, FUSE, MEMORY_PLAN)


@dataclass(frozen=True)
class Settings:
    """How to run: pass names, print and verify after each, why rules do not fire, the file to write."""

    passes: str | None
    print_after_all: bool
    check: bool
    explain: bool
    output: str


def context(lanes: int, numerics: str, precision: str | None) -> PassContext:
    """Return the context of passes for a target of which no more than the vectors are known."""
    return pass_context(TargetFacts(lanes), numerics=numerics, precision=precision)


def opt_command(path: str, dims: tuple[str, ...], settings: Settings, ctx: PassContext, as_json: bool) -> None:
    """Run passes on graph text or a model and print what comes out."""
    if settings.output:
        check_output(settings.output, (".py",), read_by(path), also=(side_file(settings.output),))
    graph = read_graph(path, parse_dims(dims))
    chosen = list(PASSES) if settings.passes in (None, "all") else parse_passes(settings.passes, TABLE)
    reasons: list[str] = []
    if settings.explain:
        ctx = replace(ctx, explain=lambda rule, n, why: reasons.append(f"{rule} at {n.outputs[0].name}: {why}"))
    if settings.check:
        verify(graph)
    manager = PassManager()
    results: list[dict[str, Any]] = []
    for p in chosen:
        reasons.clear()
        manager.run(graph, [p], replace(ctx, check=settings.check))
        record, plan = manager.records[-1], plan_text(p, graph)
        results.append(_result(record, str(graph) if settings.print_after_all else "", plan, reasons))
        if not as_json:
            _show_step(results[-1], record)
    if settings.output:
        write(graph, settings.output)
    if as_json:
        show_json({"passes": results, "graph": str(graph)})
    elif not settings.output and not (settings.print_after_all and chosen):
        show_code(str(graph), "graph")


def _result(r: PassRecord, graph: str, plan: str, reasons: list[str]) -> dict[str, Any]:
    out: dict[str, Any] = {
        "name": r.name,
        "seconds": r.seconds,
        "nodes_before": r.nodes_before,
        "nodes_after": r.nodes_after,
        "changed": r.changed,
    }
    return {**out, **{k: v for k, v in (("graph", graph), ("plan", plan), ("reasons", list(reasons))) if v}}


def _show_step(result: dict[str, Any], r: PassRecord) -> None:
    changed = "" if r.changed else ", unchanged"
    typer.echo(
        f"# {r.name}"
        if "plan" in result
        else f"# {r.name}: {show_seconds(r.seconds)}, {r.nodes_before} -> {r.nodes_after} nodes{changed}"
    )
    for reason in result.get("reasons", ()):
        typer.echo(f"#   {reason}")
    if "plan" in result:
        typer.echo(result["plan"])
    elif "graph" in result:
        show_code(result["graph"], "graph")


def plan_text(p: Pass, graph: Graph) -> str:
    """Return the plan of a planning step, made on a copy with outputs that own their memory."""
    if p not in (FUSE, MEMORY_PLAN):
        return ""
    copy = graph.copy()
    COPY_OUTPUTS.run(copy, pass_context())
    fusion = plan_fusion(copy)
    return str(fusion) if p is FUSE else memory_text(copy, fusion, plan_memory(copy, fusion))


def memory_text(graph: Graph, fusion: FusionPlan, plan: MemoryPlan) -> str:
    """One line per slot of the arena: its values, its steps, its size, and its offset where all dims are fixed."""
    offsets = [] if graph.dims else plan.offsets({})[0]
    lines = []
    for k, s in enumerate(plan.slots):
        at = f" at {offsets[k]}" if offsets else ""
        size = show_bytes(s.nbytes) if isinstance(s.nbytes, int) else f"{s.nbytes!r} bytes"
        lines.append(
            f"slot {k}: {', '.join(v.name for v in s.values)}: {size}{at}, alive in steps {s.first} to {s.last}"
        )
    if graph.dims:
        lines.append(f"arena: depends on {', '.join(graph.dims)}, {count(len(fusion.groups), 'step')}")
    else:
        lines.append(
            f"arena: {show_bytes(plan.offsets({})[1])}, lower bound {show_bytes(plan.lower_bound({}))}, "
            f"{count(len(fusion.groups), 'step')}"
        )
    return "\n".join(lines)


def write(graph: Graph, path: str) -> None:
    """Write graph text, and its constants to the .npz file beside it."""
    try:
        with replacing(path) as text, replacing(side_file(path)) as constants:
            write_constants(graph, constants)
            text.write(str(graph).encode())
            text.flush()  # before the constants are renamed: a full disk leaves both old files
    except OSError as e:
        raise ModelError(f"cannot write {path}: {e.strerror or e}") from None


def passes_command(as_json: bool) -> None:
    """List the passes."""
    if as_json:
        show_json([{"name": p.name, "why": p.why} for p in TABLE])
    else:
        rows = tuple((p.name, p.why) for p in TABLE)
        columns = ("pass", "purpose and place")
        show_tables([Table("passes in pipeline order", columns, rows, prose=True)])
