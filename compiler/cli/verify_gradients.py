"""`dnnc verify --grad`: the gradients of a model against differences, and compiled against interpreted ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import typer

from dnnc.bound import of_graph
from dnnc.cli.arguments import Array, load_model, make_arrays, parse_dims, parse_inputs
from dnnc.cli.console import show_json, show_tables
from dnnc.cli.errors import USER
from dnnc.cli.models import Job, compile_options, need_source
from dnnc.cli.verify import fixed
from dnnc.driver import compile
from dnnc.frontends.onnx import NeedsValues
from dnnc.frontends.onnx.signature import declared
from dnnc.gradients.check import Checked, Loss, Point, Verdict, directional, dot_test, groups_of, unexplained
from dnnc.gradients.models import Model, read_graph, read_onnx
from dnnc.ir.errors import GradientError, InputError
from dnnc.ir.graph import Graph
from dnnc.report.bar import Bar
from dnnc.report.layout import Table
from dnnc.report.tables import show_count
from dnnc.tools.accuracy import differences

TEXTS = {
    "right": "right",
    "kink": "right near by: a kink is here",
    "unsure": "unsure: differences disagree",
    "wrong": "WRONG",
}


def verify_gradients(job: Job, find: bool, directions: int, seed: int, as_json: bool) -> None:
    """Check the gradients of a model's weighed outputs, and print a row for each group. Exit code 1 where one is off.

    The float64 interpreter's gradients are compared with differences and with forward mode, the compiled gradients
    with those of the interpreter.
    """
    need_source(job.model)
    if find:
        raise InputError("--bisect finds what breaks outputs; give it without --grad")
    with Bar() as bar:
        found = checked(read(job), job, directions, seed, bar)
    if as_json:
        show_json({"model": job.model, "directions": directions, **found})
    else:
        show(found)
    if not found["right"]:
        raise typer.Exit(USER)


def read(job: Job) -> Model:
    """The model with weights that can be differentiated by, and the contents of inputs that shapes depend on."""
    model = load_model(job.model)
    if isinstance(model, Graph):
        return read_graph(model)
    dims = {n: d[0] if isinstance(d, tuple) else d for n, d in parse_dims(job.dims).items()}
    values: dict[str, Array] = {}
    while True:
        try:
            return read_onnx(model, True, dims=None if values else dims, values=values)
        except NeedsValues as e:
            given = parse_inputs(job.inputs, [n for n, _ in declared(model).inputs]) if e.inputs else {}
            new = {n: a for n in e.inputs if n not in values and isinstance(a := given.get(n), np.ndarray)}
            if not new:
                raise
            values |= new


def checked(model: Model, job: Job, directions: int, seed: int, bar: Bar) -> dict[str, Any]:
    """What is found, as `--json` prints it."""
    floats = [n for n, v in model.outputs.items() if v.type.dtype.is_float]
    if not floats:
        raise GradientError(
            f"no float is among the outputs {', '.join(model.outputs)}: there is nothing to differentiate"
        )
    names = model.differentiable([model.outputs[n] for n in floats], inputs=True)
    probe = model.gradient(names, floats, False, "input")
    options = compile_options(job)
    f = compile(probe, bar, **{**options, "dims": {n: d for n, d in options["dims"].items() if n in probe.dims}})
    texts = [*job.inputs, *(f"{v.name}=random" for v in probe.inputs[len(model.graph.inputs) :])] if job.inputs else ()
    arrays = make_arrays(f, texts, parse_dims(job.dims), seed)
    result = f(*arrays)
    got = list(result) if isinstance(result, tuple) else [result]
    own = len(model.graph.inputs)
    whole, bound = of_graph(model.graph, [model.sources[n].name for n in names if n in model.weights])
    whole = fixed(whole, [*arrays[:own], *bound.values()])
    kept = {model.sources[n].name for n in names}
    loss = Loss(whole, arrays[own:], [k for k, v in enumerate(whole.inputs) if v.name in kept])
    bar("interpret", 0, 1)
    point = Point.at(loss, [*arrays[:own], *bound.values()])
    graph = fixed(f.resolved.graph, arrays)
    wrong = dict(differences(graph, arrays, got, list(point.gradients.values()), job.precision))
    by_variable = dict(zip(loss.variables, got))
    reasons = unexplained(point, by_variable, {loss.variables[k]: why for k, why in wrong.items()}, seed)
    compiled = {k: (error(a, point.gradients[k]), reasons.get(k, "")) for k, a in by_variable.items()}
    rows = directional(point, groups_of(loss, own), directions, seed, bar)
    dot = forward_mode(point, seed)
    groups = [row(r, compiled) for r in rows]
    right = all(g["right"] for g in groups) and dot.get("right", True)
    return {"right": right, "groups": groups, "forward_mode": dot}


def error(got: Array, want: Array) -> float:
    """How far a compiled gradient is off, relative to the norm."""
    with np.errstate(all="ignore"):
        norm, off = (float(np.linalg.norm(x.reshape(-1))) for x in (want, got.astype(np.float64) - want))
    return off / norm if norm else off


def forward_mode(point: Point, seed: int) -> dict[str, Any]:
    """The product test, or why there is none."""
    try:
        verdict = dot_test(point, seed)
    except GradientError as e:
        return {"reason": str(e)}
    return {"right": verdict.kind == "right", "error": finite(verdict.error)}


def row(r: Checked, compiled: Mapping[int, tuple[float, str]]) -> dict[str, Any]:
    """What is said of a group."""
    worst: Verdict = r.worst
    reason = next((why for k in r.group.members if (why := compiled[k][1])), "")
    entry = {
        "name": r.group.name,
        "elements": r.group.elements,
        "error": finite(worst.error),
        "trust": finite(worst.trust),
        "verdict": worst.kind,
        "compiled_error": finite(max(compiled[k][0] for k in r.group.members)),
        "right": worst.kind != "wrong" and not reason,
    }
    return {**entry, "reason": reason} if reason else entry


def finite(x: float) -> float | None:
    return x if np.isfinite(x) else None


def show(found: Mapping[str, Any]) -> None:
    """The table of groups, and what is said of forward mode."""
    rows = tuple(
        (
            g["name"],
            show_count(g["elements"]),
            _number(g["error"]),
            _number(g["trust"]),
            _number(g["compiled_error"]),
            TEXTS[g["verdict"]] if "reason" not in g else "WRONG compiled",
        )
        for g in found["groups"]
    )
    columns = ("variable", "elements", "error", "uncertainty", "compiled error", "")
    title = "gradients of a weighted sum of the outputs: " + ("right" if found["right"] else "WRONG")
    show_tables([Table(title, columns, rows, frozenset(columns[1:5]))])
    for g in found["groups"]:
        if "reason" in g:
            typer.echo(f"{g['name']}: {g['reason']}")
    dot = found["forward_mode"]
    if "reason" in dot:
        typer.echo(f"Not compared with forward mode: {dot['reason']}")
    else:
        agrees = "agree" if dot["right"] else "DISAGREE"
        typer.echo(f"Forward and reverse mode {agrees}: <Jv, w> and <v, J'w> differ by {_number(dot['error'])}.")


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.2g}"
