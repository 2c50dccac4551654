"""`dnnc quantize`: a quantised model with its table and page."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from dnnc.cli.arguments import load_model
from dnnc.cli.console import Bar, show_json, show_tables
from dnnc.cli.errors import say
from dnnc.cli.models import Job, compile_options, need_source
from dnnc.cli.outputs import check_output, read_by
from dnnc.ir.errors import InputError, a_type
from dnnc.quantization.entry import quantize
from dnnc.quantization.result import Quantized
from dnnc.report.layout import Table
from dnnc.report.quantized import check_packages, tables
from dnnc.report.tables import show_bytes

SUFFIXES = (".onnx", ".dnnc")
RANDOM = (
    "warning: calibrating on RANDOM numbers. The speed of the result is right, its accuracy means nothing; give --data "
    "for a model that is used"
)


@dataclass(frozen=True)
class Files:
    """Paths of the command line."""

    data: str
    output: str
    html: str
    metric: str
    force: bool


def quantize_command(job: Job, files: Files, options: dict[str, Any], as_json: bool) -> None:
    """Quantise, write, and say what was won and paid."""
    need_source(job.model)
    output = files.output or f"{Path(job.model).stem}.{options['scheme']}.onnx"
    check_outputs(job, output, files)
    if options["random"]:
        say(RANDOM)
    metric = load_metric(files.metric) if files.metric else None
    compiling = {n: v for n, v in compile_options(job).items() if n not in ("precision", "memory")}
    with Bar(left=True) as bar:
        q: Quantized = quantize(
            load_model(job.model), files.data or None, metric=metric, progress=bar, **options, **compiling
        )
        q.save(output)
    if files.html:
        q.html(files.html)
    if as_json:
        show_json({"path": output, **q.as_dict()})
        return
    size = show_bytes(Path(output).stat().st_size)
    lines = [f"{output}: {size}", *([f"report: {files.html}"] if files.html else [])]
    show_tables([*tables(q), *(Table(line, (), ()) for line in lines)])


def check_outputs(job: Job, output: str, files: Files) -> None:
    """Refuse files that cannot be written, that are read, or that exist without --force."""
    reads = [*read_by(job.model), *([files.data] if files.data else []), *([files.metric] if files.metric else [])]
    check_output(output, SUFFIXES, reads)
    if files.html:
        check_output(files.html, (".html", ".htm"), [*reads, output], option="--html")
        check_packages()
    for path, option in ((output, "--output"), (files.html, "--html")):
        if path and Path(path).exists() and not files.force:
            raise typer.BadParameter(f"{path} exists; choose another name, or replace it by --force", param_hint=option)


def load_metric(path: str) -> Callable[..., float]:
    """The function `metric` of a script, which is run. InputError where there is none."""
    if not Path(path).is_file():
        raise InputError(f"there is no script {path}; --metric takes a Python file with a function metric(model)")
    spec = importlib.util.spec_from_file_location("dnnc_metric", path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is no Python file; --metric takes one with a function metric(model)")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as e:
        raise InputError(f"{path} failed when it was read: {type(e).__name__}: {e}") from e
    found = getattr(module, "metric", None)
    if not callable(found):
        what = "has none" if found is None else f"has {a_type(found)} of that name"
        raise InputError(f"{path}: --metric takes a script with a function metric(model), and this one {what}")
    return found  # type: ignore[no-any-return]
