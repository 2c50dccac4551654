"""`dnnc prune`: a pruned model with its table and page, or an exploration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from dnnc.cli.arguments import load_model
from dnnc.cli.console import show_json, show_tables
from dnnc.cli.model_tool import Files as Files
from dnnc.cli.model_tool import check_outputs, compiling, load_metric, show_result
from dnnc.cli.models import Job, need_source
from dnnc.pruning.entry import explore_pruning, prune
from dnnc.report.bar import Bar
from dnnc.report.layout import Table


def prune_command(job: Job, files: Files, options: dict[str, Any], compress: bool, as_json: bool) -> None:
    """Prune, write, and say what was won and paid."""
    need_source(job.model)
    output = files.output or f"{Path(job.model).stem}.pruned.onnx"
    check_outputs(job, output, files)
    metric = load_metric(files.metric) if files.metric else None
    with Bar(left=True) as bar:
        p = prune(load_model(job.model), files.data or None, metric=metric, progress=bar, **options, **compiling(job))
        p.save(output, compress=compress)
    if files.html:
        p.html(files.html)
    show_result(p, output, files.html, as_json)


def explore_command(
    job: Job, files: Files, methods: str, sparsities: str, options: dict[str, Any], as_json: bool
) -> None:
    """Try methods and sparsities, and show what each costs and gains."""
    need_source(job.model)
    if files.output:
        raise typer.BadParameter("--explore writes no model; leave it out", param_hint="--output")
    check_outputs(job, "", files)
    metric = load_metric(files.metric) if files.metric else None
    given: dict[str, Any] = {"methods": tuple(m.strip() for m in methods.split(","))} if methods else {}
    if sparsities:
        given["sparsities"] = tuple(share(s.strip(), "--sparsities") for s in sparsities.split(","))
    with Bar(left=True) as bar:
        e = explore_pruning(
            load_model(job.model), files.data or None, metric=metric, progress=bar, **given, **options, **compiling(job)
        )
    if files.html:
        e.html(files.html)
    if as_json:
        show_json(e.as_dict())
        return
    show_tables([*e.tables(), *([Table(f"report: {files.html}", (), ())] if files.html else [])])


def shares(texts: Sequence[str]) -> float | dict[str, float] | None:
    """The values of --sparsity: one share, shares by patterns, or None. A share alone is for all other layers."""
    named = {(name.strip() if found else "*"): value for name, found, value in (t.rpartition("=") for t in texts)}
    if not named:
        return None
    out = {name: share(value, "--sparsity") for name, value in named.items()}
    if set(out) == {"*"}:
        return out["*"]
    rest = out.pop("*", None)
    return out if rest is None else {**out, "*": rest}


def share(text: str, option: str) -> float:
    """A number from 0 to below 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise typer.BadParameter(f"{text!r}: expected a share from 0 to below 1, such as 0.9", param_hint=option)
    return value
