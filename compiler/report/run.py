"""A page of a training run from the log of `dnnc.progress`: curves, samples a second, where step time goes, memory.

In: the JSON lines of `progress(log=...)`, perhaps of several loops one after the other, and the report of the step's
program (`step.programs[-1].report.to_json()`). Out: one HTML file; Plotly and Jinja (extra `tune`) make it.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dnnc.ir.errors import InputError
from dnnc.report import pages
from dnnc.report.pages import drawn, figure, page
from dnnc.report.progress import PLACES, TEXTS
from dnnc.report.tables import show_bytes, show_seconds

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # told apart by those who do not see all
RATES = frozenset(("lr", "rate", "learning_rate"))
PARTS = "_seconds"  # how the names of a step's parts end
POINTS = 2000  # of a curve: a longer run is drawn by means of neighbours
FAR = 4  # times the time that nearly all steps stay below: longer ones are cut off
WINDOW = 20  # steps whose samples a second are drawn as one
Line = dict[str, Any]


def write_html(
    log: str | os.PathLike[str], path: str | os.PathLike[str], report: str | os.PathLike[str] | None = None
) -> None:
    """Write the page of a run.

    Args:
        log: what `dnnc.progress(log=...)` wrote.
        path: the page.
        report: a file with the report of the step's program as JSON, for the memory over the step.

    Raises:
        InputError: a file cannot be read or written, is no such log or report, or a package is missing.
    """
    pages.needed(InputError)
    pages.write(html(read(log), Path(log).name, _alive(report)), path, InputError)


def read(log: str | os.PathLike[str]) -> list[Line]:
    """The lines of a log; steps and seconds go on where another loop begins. InputError: it is no such log."""
    text = _text(log).splitlines()
    lines: list[Line] = []
    before = {"step": 0, "seconds": 0.0, "samples": 0}
    ends = dict(before)
    for k, row in enumerate(text):
        try:
            line = json.loads(row)
            line = {n: float(v) if v in TEXTS else v for n, v in line.items()} if isinstance(line, dict) else line
            wrong = not isinstance(line, dict) or not all(isinstance(line.get(n), (int, float)) for n in ends)
        except ValueError:
            wrong = True
        if wrong:
            if k == len(text) - 1 and lines:
                break  # a run that was killed while it wrote
            raise InputError(f"{log}: line {k + 1} is none of a log of dnnc.progress: {row[:80]!r}")
        if line["step"] + before["step"] <= ends["step"]:
            before = dict(ends)
        for n in ends:
            line[n] += before[n]
            ends[n] = line[n]
        lines.append(line)
    if not lines:
        raise InputError(f"{log} has no lines; expected a log of dnnc.progress, which told at least one number")
    return lines


def _text(path: str | os.PathLike[str]) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"{path} cannot be read: {getattr(e, 'strerror', None) or e}") from None


def _alive(report: str | os.PathLike[str] | None) -> list[int]:
    """Bytes alive at each step of the last program of a report."""
    if report is None:
        return []
    try:
        memory = json.loads(_text(report))["programs"][-1]["memory"]
        return [int(n) for n in memory["alive"]]
    except (ValueError, KeyError, IndexError, TypeError) as e:
        raise InputError(
            f"{report} is no report with the memory of a program ({type(e).__name__}: {e}); write it by "
            "step.programs[-1].report.to_json()"
        ) from None


def html(lines: Sequence[Line], name: str, alive: Sequence[int] = ()) -> str:
    """The page."""
    names = [n for n in dict.fromkeys(n for line in lines for n in line) if n not in PLACES]
    parts = [n for n in names if n.endswith(PARTS)]
    rates = [n for n in names if n in RATES]
    losses = [n for n in names if "loss" in n]
    rest = [[n] for n in names if n not in (*parts, *rates, *losses)]
    groups = [("Loss", losses), ("Learning rate", rates), *((g[0], g) for g in rest)]
    sections = [(title, drawn(_curves(lines, g), f"curve-{k}")) for k, (title, g) in enumerate(groups) if g]
    sections.append(("Samples a second", drawn(_speed(lines), "speed")))
    if any("data_seconds" in line for line in lines):
        sections.append(("Step time", drawn(_times(lines, ["data_seconds", *parts]), "times")))
    if alive:
        sections.append(("Memory over the step", drawn(_memory(alive), "memory")))
    return page("run.html.j2", name=name, figures=_figures(lines, losses, alive), sections=sections)


def _figures(lines: Sequence[Line], losses: Sequence[str], alive: Sequence[int]) -> list[tuple[str, str]]:
    last = lines[-1]
    shown = [("steps", f"{last['step']:,}"), ("of training", show_seconds(last["seconds"]))]
    for n in losses:
        told = [line[n] for line in lines if n in line]
        values = [x for x in map(_number, told) if x is not None]
        if values:
            shown += [(f"{n} at the end", f"{told[-1]:.4g}"), (f"least {n}", f"{min(values):.4g}")]
    first = lines[0]
    if last["seconds"] > first["seconds"]:  # the first step compiles
        rate = (last["samples"] - first["samples"]) / (last["seconds"] - first["seconds"])
        shown.append(("samples a second", f"{rate:,.0f}"))
        shown.append(("first step, with its compilation", show_seconds(first["seconds"])))
    if last["seconds"] > 0:
        waited = sum(line.get("data_seconds", 0.0) for line in lines)
        shown.append(("waiting for data", f"{waited / last['seconds']:.0%}"))
    if alive:
        shown.append(("most memory of intermediates", show_bytes(max(alive))))
    return shown


def _number(x: Any) -> float | None:
    """A finite number; None, which is a gap in a curve, of all else."""
    return float(x) if isinstance(x, (int, float)) and math.isfinite(x) else None


def _thinned(xs: Sequence[Any], ys: Sequence[float | None]) -> tuple[list[Any], list[float | None]]:
    """At most POINTS points: means of as many neighbours each."""
    by = -(-len(xs) // POINTS)
    means = []
    for k in range(0, len(ys), by):
        some = [y for y in ys[k : k + by] if y is not None]
        means.append(sum(some) / len(some) if some else None)
    return list(xs[::by]), means


def _curves(lines: Sequence[Line], names: Sequence[str]) -> Any:
    made = figure("step", "")
    for n, colour in zip(names, COLOURS * len(names)):
        xs, ys = _thinned(
            [line["step"] for line in lines if n in line], [_number(line[n]) for line in lines if n in line]
        )
        mode = "lines" if len(xs) > 1 else "markers"
        made.add_scatter(x=xs, y=ys, mode=mode, name=n, line={"color": colour}, showlegend=True)
    return made


def _speed(lines: Sequence[Line]) -> Any:
    """Over windows of steps, so that a single slow batch is seen but does not hide the rest."""
    marks = [{"step": 0, "seconds": 0.0, "samples": 0}, *lines[WINDOW - 1 :: WINDOW]]
    marks += [lines[-1]] if marks[-1] is not lines[-1] else []
    pairs = [(a, b) for a, b in itertools.pairwise(marks) if b["seconds"] > a["seconds"]]
    made = figure("step", "samples a second", rangemode="tozero")
    rates = [(b["samples"] - a["samples"]) / (b["seconds"] - a["seconds"]) for a, b in pairs]
    made.add_scatter(x=[b["step"] for _, b in pairs], y=rates, mode="lines+markers", line={"color": COLOURS[0]})
    return made


def _times(lines: Sequence[Line], parts: Sequence[str]) -> Any:
    """Milliseconds of each step: parts that were told, and the rest, which is Python and the program."""
    steps = [line["step"] for line in lines]
    begins = [0.0, *(line["seconds"] for line in lines)]
    whole = [1e3 * (b - a) for a, b in itertools.pairwise(begins)]
    stacks = {n: [1e3 * (_number(line.get(n)) or 0.0) for line in lines] for n in parts}
    rest = [max(w - sum(s), 0.0) for w, s in zip(whole, zip(*stacks.values()))]
    made = figure("step", "ms", rangemode="tozero")
    most = sorted(whole)[int(0.99 * (len(whole) - 1))]
    if max(whole) > FAR * most > 0:  # a step that compiles would flatten all others
        made.update_yaxes(range=[0, FAR / 2 * most])
    for (n, ys), colour in zip({**stacks, "the step itself": rest}.items(), COLOURS * len(lines)):
        xs, means = _thinned(steps, ys)
        label = "waiting for data" if n == "data_seconds" else n.removesuffix(PARTS)
        made.add_scatter(x=xs, y=means, name=label, stackgroup="time", line={"color": colour, "width": 1})
    return made


def _memory(alive: Sequence[int]) -> Any:
    made = figure("kernel call of the step", "MB of intermediates alive", rangemode="tozero")
    ys = [n / 1e6 for n in alive]
    made.add_scatter(x=list(range(1, len(ys) + 1)), y=ys, fill="tozeroy", line={"shape": "hv", "color": COLOURS[0]})
    return made
