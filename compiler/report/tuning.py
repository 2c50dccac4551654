"""A search's report as a self-contained HTML page: time, predictions, choices; Plotly and Jinja (extra `tune`)."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from dnnc.autotune.log.record import Session
from dnnc.autotune.search.fusion_variants import Fused
from dnnc.autotune.search.outcome import Outcome, Point, Result
from dnnc.ir.errors import TuneError
from dnnc.report import pages
from dnnc.report.pages import drawn, figure, page
from dnnc.report.tables import show_seconds
from dnnc.report.tuning_tables import divided, further, weight

BEST = 5  # schedules of a task that are listed
MICRO = 1e6
# by why a schedule was measured: one colour each, told apart also by those who do not see all colours
COLOURS = {
    "default": "#999999",
    "last winner": "#cc79a7",
    "predicted": "#0072b2",
    "neighbour of the best": "#009e73",
    "unsure": "#e69f00",
}
OTHER = "#888888"


def needed() -> None:
    """TuneError where a package is missing that the report takes."""
    pages.needed(TuneError)


def write_html(result: Result, path: str | os.PathLike[str], model: str, session: Session | None = None) -> None:
    """Write the report of a search. TuneError where a package is missing or the file cannot be written."""
    pages.write(html(result, model, session), path, TuneError)


def html(result: Result, model: str, session: Session | None = None) -> str:
    """The page. `session`: adds machine, date, budget and version."""
    needed()
    outcomes = sorted(result.outcomes, key=weight, reverse=True)
    parts = sorted(result.parts, key=weight, reverse=True)
    predictions = _predictions([*outcomes, *parts])
    return page(
        "tuning.html.j2",
        model=model,
        target=", ".join(dict.fromkeys(o.task.setting.target for o in outcomes)),
        reason="it was asked to" if result.reason == "stopped" else result.reason,
        figures=_figures(result),
        facts=_facts(session) if session is not None else [],
        further=further(result),
        course=drawn(_course(result), "course"),
        predictions=drawn(predictions, "predictions") if predictions is not None else "",
        tasks=[_task(k, o, result, drawn(_curve(o), f"curve-{k}")) for k, o in enumerate(outcomes)],
        shown=[outcomes.index(o) for o in divided(outcomes)[0]],
        fusions=[_fused(f) for f in result.fusions],
        parts=[_task(k, o, result, drawn(_curve(o), f"curve-{k}")) for k, o in enumerate(parts, len(outcomes))],
    )


# --- numbers ----------------------------------------------------------------------------------------------------------


def _figures(r: Result) -> list[tuple[str, str]]:
    return [
        ("untuned, a call", show_seconds(r.untuned)),
        ("tuned, a call", show_seconds(r.tuned)),
        ("speedup", f"{r.speedup:.2f}"),
        ("trials", str(r.trials)),
        ("failed", str(r.failures)),
        ("of tuning", show_seconds(r.seconds)),
    ]


def _facts(s: Session) -> list[tuple[str, str]]:
    """Where, when and how long the search ran."""
    return [
        ("machine", s.machine or "unknown"),
        ("began", time.strftime("%Y-%m-%d %H:%M", time.localtime(s.at)) if s.at else "unknown"),
        ("budget", "none" if s.budget is None else show_seconds(s.budget)),
        ("dnnc", s.version or "unknown"),
    ]


def _shown(seconds: float | None) -> str:
    return show_seconds(seconds) if seconds is not None and math.isfinite(seconds) else "-"


def _task(number: int, o: Outcome, r: Result, curve: Any) -> dict[str, Any]:
    known = math.isfinite(o.default) and math.isfinite(o.seconds)
    failed = Counter(p.status for p in o.points if p.status != "ok")
    return {
        "anchor": f"task-{number}",
        "key": o.task.key[:10],
        "name": o.task.name,
        "node": o.task.node,
        "nodes": ", ".join(o.task.nodes),
        "shape": o.task.shape,
        "kind": o.task.kind,
        "calls": o.calls,
        "share": f"{weight(o) / r.untuned:.0%}" if r.untuned else "-",
        "trials": len(o.points),
        "space": o.choices,
        "default": _shown(o.default),
        "tuned": _shown(o.seconds),
        "gain": f"{o.default / o.seconds:.2f}x" if known else "-",
        "faster": known and o.seconds < o.default,
        "chosen": "-" if o.choice is None else "default" if o.choice == o.base else o.choice.template,
        "verdict": o.verdict,
        "reason": o.reason,
        "failures": o.failures,
        "failed": ", ".join(f"{n} {status}" for status, n in failed.items()),
        "curve": curve,
        "knobs": _knobs(o),
        "best": [(str(p.choice), _shown(p.seconds), _shown(p.predicted), p.why) for p in _fastest(o.points)],
    }


def _fused(f: Fused) -> dict[str, Any]:
    return {
        "name": f.task.name,
        "calls": f.calls,
        "together": _shown(f.together),
        "way": f.name,
        "apart": _shown(f.apart),
        "gain": f"{f.together / f.apart:.2f}x" if f.apart else "-",
        "taken": f.taken,
        "verdict": f.verdict,
    }


def _knobs(o: Outcome) -> list[tuple[str, str, str]]:
    """Default and winner side by side; nothing where they are the same."""
    if o.choice is None or o.choice == o.base:
        return []
    before, after = ({"template": c.template, **dict(c.knobs)} for c in (o.base, o.choice))
    return [(k, str(before.get(k, "-")), str(after.get(k, "-"))) for k in dict.fromkeys([*before, *after])]


def _fastest(points: Sequence[Point]) -> list[Point]:
    """The last trial of each of the fastest schedules."""
    last = {p.choice: p for p in points if p.status == "ok"}
    return sorted(last.values(), key=lambda p: p.seconds)[:BEST]


# --- figures ----------------------------------------------------------------------------------------------------------


def _course(r: Result) -> Any:
    """Time of all kernels over the seconds of the search, each point where a task got better."""
    best: dict[str, float] = {o.task.key: o.default for o in r.outcomes if math.isfinite(o.default)}
    calls = {o.task.key: o.calls for o in r.outcomes}
    whole = sum(calls[k] * s for k, s in best.items())
    xs, ys = [0.0], [100.0]
    for key, p in sorted(((o.task.key, p) for o in r.outcomes for p in o.points), key=lambda item: item[1].at):
        if key in best and p.status == "ok" and p.seconds < best[key]:
            best[key] = p.seconds
            xs.append(p.at)
            ys.append(100 * sum(calls[k] * s for k, s in best.items()) / whole)
    drawing = figure("seconds of tuning", "% of the untuned time")
    drawing.add_scatter(
        x=[*xs, r.seconds],
        y=[*ys, ys[-1]],
        mode="lines",
        line={"shape": "hv", "color": "#0072b2"},
        name="measured so far",
    )
    return drawing


def _predictions(outcomes: Sequence[Outcome]) -> Any:
    """Predicted and measured times of all schedules that were measured by a prediction; None without any."""
    first: dict[tuple[str, Any], tuple[Outcome, Point]] = {}
    for o in outcomes:
        for p in o.points:
            if p.predicted is not None and p.status == "ok":
                first.setdefault((o.task.key, p.choice), (o, p))
    if not first:
        return None
    drawing = figure("predicted, us", "measured, us", type="log")
    for why in dict.fromkeys(p.why for _, p in first.values()):
        some = [(o, p) for o, p in first.values() if p.why == why]
        drawing.add_scatter(
            x=[(p.predicted or 0) * MICRO for _, p in some],
            y=[p.seconds * MICRO for _, p in some],
            text=[f"{o.task.name}<br>{p.choice}" for o, p in some],
            mode="markers",
            name=why,
            marker={"color": COLOURS.get(why, OTHER), "size": 6, "opacity": 0.7},
        )
    ends = [f(x for _, p in first.values() for x in (p.predicted or p.seconds, p.seconds)) * MICRO for f in (min, max)]
    drawing.add_scatter(
        x=ends, y=ends, mode="lines", name="right", line={"color": OTHER, "dash": "dot"}, hoverinfo="skip"
    )
    return drawing


def _curve(o: Outcome) -> Any:
    """The trials of a task in their order, and the best so far."""
    drawing = figure("trial", "us a call")
    works = [(k, p) for k, p in enumerate(o.points, 1) if p.status == "ok"]
    for why in dict.fromkeys(p.why for _, p in works):
        some = [(k, p) for k, p in works if p.why == why]
        drawing.add_scatter(
            x=[k for k, _ in some],
            y=[p.seconds * MICRO for _, p in some],
            text=[str(p.choice) for _, p in some],
            mode="markers",
            name=why,
            marker={"color": COLOURS.get(why, OTHER), "size": 6},
        )
    low, ys = math.inf, []
    for _, p in works:
        low = min(low, p.seconds)
        ys.append(low * MICRO)
    drawing.add_scatter(
        x=[k for k, _ in works], y=ys, mode="lines", name="best so far", line={"shape": "hv", "color": "#0072b2"}
    )
    bad = [(k, p) for k, p in enumerate(o.points, 1) if p.status != "ok"]
    if bad:
        marker = {"symbol": "x", "color": "#d55e00", "size": 7}
        drawing.add_scatter(
            x=[k for k, _ in bad],
            y=[min(ys, default=0.0)] * len(bad),
            text=[f"{p.status}: {p.choice}" for _, p in bad],
            mode="markers",
            name="failed",
            marker=marker,
        )
    if math.isfinite(o.default):
        drawing.add_hline(y=o.default * MICRO, line={"dash": "dot", "color": OTHER})
    return drawing
