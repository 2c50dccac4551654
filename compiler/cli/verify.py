"""`dnnc verify`: a model against the float64 interpreter, and what breaks it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import typer

from dnnc.cli.arguments import Array, parse_cache
from dnnc.cli.console import show_json, show_tables
from dnnc.cli.errors import USER
from dnnc.cli.models import Job, open_with_arrays
from dnnc.ir.errors import UnsupportedError
from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.ir.shapes import bind_dims, specialise
from dnnc.options import CompileOptions
from dnnc.report.bar import Bar
from dnnc.report.layout import Table
from dnnc.tools.accuracy import differences
from dnnc.tools.bisect import OWN_FAULT, Finding, bisect


def verify_command(job: Job, find: bool, seed: int, as_json: bool) -> None:
    """Compare a model with the reference and print differences; `find` bisects. Exit code 1 for a failure."""
    if find:
        job = replace(job, verify="none")  # a wrong kernel shall show in the results, not end the compilation
    graph: Graph | None = None
    arrays: list[Array] = []
    outputs: list[dict[str, Any]] = []
    try:
        with Bar() as bar:
            f, arrays = open_with_arrays(job, bar, seed)
            graph, got, names = called(f, arrays)
            outputs = judged(graph, arrays, got, names, job.precision)
    except OWN_FAULT:
        if not find:
            raise
        graph, arrays = imported(job, seed)
    right = bool(outputs) and all(o["right"] for o in outputs)
    finding = bisect(graph, arrays, options_of(job)) if find and not right and graph is not None else None
    if as_json:
        show_json(
            {
                "model": job.model,
                "right": right,
                "outputs": outputs,
                "finding": None if finding is None else finding.as_dict(),
            }
        )
    else:
        show_verdict(outputs, right, finding, find)
    if not right:
        raise typer.Exit(USER)


def options_of(job: Job) -> CompileOptions:
    """The options of a command line."""
    return CompileOptions(
        target=job.target,
        threads=job.threads,
        opt_level=job.opt_level,
        numerics=job.numerics,
        precision=job.precision,
        cache=parse_cache(job.cache),
        tune=job.tune,
    )


def fixed(graph: Graph, arrays: list[Array]) -> Graph:
    """The graph at the sizes of these arrays."""
    return specialise(graph, {v.name: n for v, n in bind_dims(graph, [a.shape for a in arrays]).items()})


def called(f: Any, arrays: list[Array]) -> tuple[Graph, list[Array], list[str]]:
    """What was compiled, at the sizes of these arrays, and what it computes of them."""
    result = f(*arrays)
    inner = f.resolved
    got = list(result) if isinstance(result, tuple) else [result]
    if any(not isinstance(x, np.ndarray) for x in got):
        raise UnsupportedError("an output of this model is no array: only arrays can be compared; look at `dnnc run`")
    return fixed(inner.graph, arrays), got, [s.name for s in f.outputs]


def imported(job: Job, seed: int) -> tuple[Graph, list[Array]]:
    """The graph of a model that does not compile, and inputs for it: the interpreter takes any."""
    f, arrays = open_with_arrays(replace(job, target="reference"), None, seed)
    inner = f.resolved
    return fixed(inner.graph, arrays), arrays


def judged(
    graph: Graph, arrays: list[Array], got: list[Array], names: list[str], asked: str | None
) -> list[dict[str, Any]]:
    """Return each output's name, type, largest absolute and relative error, and whether it is in bounds."""
    want = run(graph, arrays, precision="float64")
    wrong = dict(differences(graph, arrays, got, want, asked))
    out = []
    for k, (name, a, b) in enumerate(zip(names, got, want)):
        reason = wrong.get(k, "")
        error, scale = errors(a, b)
        entry = {
            "name": name,
            "dtype": str(a.dtype),
            "shape": list(a.shape),
            "error": error,
            "scale": scale,
            "right": not reason,
        }
        out.append({**entry, "reason": reason} if reason else entry)
    return out


def errors(a: Array, b: Array) -> tuple[float | None, float | None]:
    """Return the largest finite difference and the reference's largest finite number; None without numbers."""
    if a.shape != b.shape or a.dtype.kind in "OUSTV" or not a.size:
        return None, None
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        difference, magnitude = np.abs(a.astype(wide) - b.astype(wide)), np.abs(b.astype(wide))
    return float(difference[np.isfinite(difference)].max(initial=0.0)), float(
        magnitude[np.isfinite(magnitude)].max(initial=0.0)
    )


def show_verdict(outputs: list[dict[str, Any]], right: bool, finding: Finding | None, find: bool) -> None:
    """The table of outputs, and what breaks them."""
    verdict = {True: "right", False: "WRONG"}
    rows = tuple(
        (o["name"], f"{o['dtype']}{o['shape']}", _number(o["error"]), _number(o["scale"]), verdict[bool(o["right"])])
        for o in outputs
    )
    title = "compared with the float64 interpreter: " + ("all outputs are right" if right else "WRONG")
    columns = ("output", "type", "largest error", "largest number", "")
    show_tables([Table(title, columns, rows, frozenset(("largest error", "largest number")))])
    for o in outputs:
        if not o["right"]:
            typer.echo(f"{o['name']}: {o['reason']}")
    if finding is not None:
        where = f" at {finding.nodes}" if finding.nodes else ""
        typer.echo(
            f"\nThe first {finding.stage} that breaks it: {finding.culprit}{where}\n{finding.message}\n\n"
            f"{finding.graph}"
        )
    elif find and not right:
        typer.echo(
            "A second compilation gives right results: the error is not deterministic. It may depend on the "
            "order of threads."
        )
    elif not right:
        typer.echo("--bisect finds the pass or kernel at fault.")


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.3g}"
