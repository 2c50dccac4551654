"""What the commands that make a model of a model share: `quantize` and `prune`."""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from dnnc.cli.console import show_json, show_tables
from dnnc.cli.models import Job, compile_options
from dnnc.cli.outputs import check_output, read_by
from dnnc.ir.errors import DnncError, InputError, a_type
from dnnc.quantization.reported import Reported
from dnnc.report.layout import Table
from dnnc.report.quantized import check_packages
from dnnc.report.tables import show_bytes

SUFFIXES = (".onnx", ".dnnc")


@dataclass(frozen=True)
class Files:
    """Paths of the command line."""

    data: str
    output: str
    html: str
    metric: str
    force: bool


def compiling(job: Job) -> dict[str, Any]:
    """The options of `dnnc.compile` that such a command takes."""
    return {n: v for n, v in compile_options(job).items() if n not in ("precision", "memory")}


def show_result(q: Reported, output: str, html: str, as_json: bool) -> None:
    """Print the report, and which files were written."""
    if as_json:
        show_json({"path": output, **q.as_dict()})
        return
    size = show_bytes(Path(output).stat().st_size)
    lines = [f"{output}: {size}", *([f"report: {html}"] if html else [])]
    show_tables([*q.tables(), *(Table(line, (), ()) for line in lines)])


def check_outputs(job: Job, output: str, files: Files) -> None:
    """Refuse files that cannot be written, that are read, or that exist without --force. `output`: "" for none."""
    reads = [*read_by(job.model), *([files.data] if files.data else []), *([files.metric] if files.metric else [])]
    if output:
        check_output(output, SUFFIXES, reads)
    if files.html:
        check_output(files.html, (".html", ".htm"), [*reads, output], option="--html")
        check_packages()
    for path, option in ((output, "--output"), (files.html, "--html")):
        if path and Path(path).exists() and not files.force:
            raise typer.BadParameter(f"{path} exists; choose another name, or replace it by --force", param_hint=option)


def load_metric(path: str) -> Callable[..., float]:
    """The function `metric` of a script, which is run. InputError where there is none; what it raises later is one."""
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

    def metric(model: Callable[..., Any]) -> float:
        try:
            return found(model)  # type: ignore[no-any-return]
        except DnncError:
            raise
        except Exception as e:
            lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == module.__file__]
            where = f" at line {lines[-1]}" if lines else ""  # none where it does not take a model
            raise InputError(f"metric of {path} failed{where}: {type(e).__name__}: {e}") from e

    return metric
