"""`dnnc compile` and `dnnc run`: the model through `dnnc.compile`, its report, its outputs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import typer

from dnnc.artifact.format import SUFFIX, is_artifact
from dnnc.cli.arguments import Array, make_arrays
from dnnc.cli.console import show_json, show_tables
from dnnc.cli.models import Job, open_model, open_with_arrays, prepare
from dnnc.cli.outputs import check_output, job_reads
from dnnc.ir.errors import InputError, count
from dnnc.ir.files import replacing
from dnnc.report.bar import Bar
from dnnc.report.layout import Table
from dnnc.report.tables import report_tables, show_bytes, show_seconds

FIRST = 4  # values of an output that are shown


@dataclass(frozen=True)
class Saving:
    """Where to save a compiled model, each weight once or not, coded or not, and other GPUs. No output: do not save."""

    output: str = ""
    small: bool = False
    also: tuple[str, ...] = ()
    compress: bool = False


def compile_command(job: Job, as_json: bool, saving: Saving, passes: bool = False, detail: bool = False) -> None:
    """Compile a model, save it if asked to, and print the report, with passes and schedules if asked to."""
    output, small, also = saving.output, saving.small, saving.also
    if (small or saving.compress) and not output:
        raise typer.BadParameter(
            "it says how to save, so give a file to save to as well: -o model.dnnc",
            param_hint="--small" if small else "--compress",
        )
    if also and not output:
        raise typer.BadParameter(
            "it says what to save, so give a file to save to as well: -o model.dnnc", param_hint="--also"
        )
    if output:
        check_output(output, (SUFFIX,), job_reads(job))
    with Bar() as bar:
        f = open_model(job, bar)
        if f.deferred:
            f(*make_arrays(f, job.inputs, {}, 0))
        elif job.inputs or not f.programs:
            prepare(f, job)
    report = f.report
    saved: dict[str, Any] = {}
    if output:
        f.save(output, small, also, saving.compress)
        saved = {"file": output, "file_bytes": Path(output).stat().st_size}
    if as_json:
        show_json({**report.as_dict(), **saved})
        return
    show_tables(report_tables(report, passes, detail))
    if output:
        show_tables([Table(f"saved to {output}, {show_bytes(saved['file_bytes'])}", (), ())])


def run_command(job: Job, output: str, repeat: int, seed: int, as_json: bool) -> None:
    """Run a model and print what its outputs look like."""
    if output:
        check_output(output, (".npz", ".npy"), job_reads(job))
    with Bar() as bar:
        start = time.perf_counter()
        f, arrays = open_with_arrays(job, bar, seed)
        compiled = time.perf_counter() - start
    results, seconds = timed(lambda: f(*arrays), repeat)
    names = [s.name for s in f.outputs]
    if output:
        save(output, names, results)
    summaries = [summary(n, r) for n, r in zip(names, results)]
    times = {"compile": compiled, "first": seconds[0], "median": statistics.median(seconds), "calls": len(seconds)}
    if as_json:
        show_json(
            {
                "model": job.model,
                "inputs": [plain_spec(s.name, a) for s, a in zip(f.inputs, arrays)],
                "outputs": summaries,
                "seconds": times,
            }
        )
        return
    rows = [
        (
            s["name"],
            f"{s['dtype']}{s['shape']}",
            *(_number(s[k]) for k in ("min", "mean", "max")),
            _odd(s),
            " ".join(map(_number, s["first"])),
        )
        for s in summaries
    ]
    done = "loaded" if is_artifact(job.model) else "compiled"
    line = f"{done} in {show_seconds(compiled)}; first call {show_seconds(times['first'])}"
    line += f", median of {repeat} calls {show_seconds(times['median'])}" if repeat > 1 else ""
    columns: tuple[str, ...] = ("output", "type", "min", "mean", "max", "not finite", "first values")
    if not any(s["not_finite"] for s in summaries):
        columns, rows = (*columns[:5], columns[6]), [(*r[:5], r[6]) for r in rows]
    show_tables(
        [
            Table(
                f"{job.model}: {count(len(results), 'output')}", columns, tuple(rows), frozenset(("min", "mean", "max"))
            ),
            Table(line, (), ()),
        ]
    )


def timed(call: Callable[[], Any], repeat: int) -> tuple[list[Any], list[float]]:
    """The results of the first of `repeat` calls, and the seconds of each."""
    results: Any = None
    seconds: list[float] = []
    for k in range(repeat):
        start = time.perf_counter()
        made = call()
        seconds.append(time.perf_counter() - start)
        results = made if k == 0 else results
    return list(results) if isinstance(results, tuple) else [results], seconds


def save(path: str, names: Sequence[str], results: Sequence[Array]) -> None:
    """Write outputs to a .npz file by name, or a single one to a .npy file."""
    if Path(path).suffix == ".npy" and len(results) != 1:
        raise InputError(
            f"{path}: a .npy file holds one array, the model has {count(len(results), 'output')}; give a .npz file"
        )
    try:
        with replacing(path) as file:
            if Path(path).suffix == ".npz":
                np.savez(file, **dict(zip(names, results)))  # type: ignore[arg-type]
            else:
                np.save(file, results[0])
    except OSError as e:
        raise InputError(
            f"cannot write {path}: {e.strerror or e}; choose a folder that exists, may be written and has room"
        ) from None


def plain_spec(name: str, a: Any) -> dict[str, Any]:
    x = np.asarray(a)
    return {"name": name, "dtype": str(x.dtype), "shape": list(x.shape)}


def summary(name: str, a: Any) -> dict[str, Any]:
    """What an output looks like; min, mean and max of its finite numbers, None where there are none."""
    x = np.asarray(a)
    flat = x.reshape(-1)
    numbers = flat.astype(np.float64) if x.dtype.kind in "biuf" or x.dtype.kind == "V" else np.zeros(0)
    finite = numbers[np.isfinite(numbers)]
    stats = {
        k: float(f(finite)) if finite.size else None for k, f in (("min", np.min), ("mean", np.mean), ("max", np.max))
    }
    first = [_plain(v) for v in (numbers if numbers.size else flat)[:FIRST]]
    odd = {"not_finite": int(numbers.size - finite.size), "nan": int(np.isnan(numbers).sum())}
    return {**plain_spec(name, x), **stats, **odd, "first": first}


def _odd(s: Mapping[str, Any]) -> str:
    """`12 NaN, 1 inf`: how many numbers of an output are not finite."""
    infinite = s["not_finite"] - s["nan"]
    return ", ".join(f"{n} {what}" for n, what in ((s["nan"], "NaN"), (infinite, "inf")) if n)


def _plain(v: Any) -> Any:
    """A number that JSON has, else its text."""
    if isinstance(v, (float, np.floating)) and np.isfinite(v):
        return float(v)
    return str(v)


def _number(v: Any) -> str:
    return "-" if v is None else f"{v:.5g}" if isinstance(v, float) else str(v)
