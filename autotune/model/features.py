"""Features of schedules for a cost model: the kernel, the knobs, and what the knobs make of it.

In: a problem, choices, the limits of a machine. Out: float32 [choices, features], whose columns NAMES names. No
schedule is applied: the naive nest is read once (`work`), and each choice is some arithmetic on it (`roofline`,
`tiles`). Sizes and times are logarithms to base 2, so that trees cut them evenly. A saved model holds VERSION: one that
was trained on other columns is not used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import gcd, log2
from typing import TYPE_CHECKING, Any

import numpy as np

from dnnc.autotune.model import tiles
from dnnc.autotune.model.roofline import Plan, plan
from dnnc.autotune.model.tiles import log, shortest
from dnnc.autotune.model.work import KINDS, Walked, Work, work_of
from dnnc.passes.schedule.problem import Choice, Problem

if TYPE_CHECKING:
    from dnnc.ir.target import Limits

Array = np.ndarray[Any, Any]
PROBLEMS = ("contraction", "normed", "attention", "recurrence", "sequence", "reduce", "scatter", "map")
TEMPLATES = (
    "contraction", "backward_filter", "winograd", "reduce", "sequence", "map", "attention", "recurrence", "gemv",
    "gemv_norm", "wgmma", "mma", "tf32", "simt",
    "window", "patch", "scan", "scatter", "threads",
)  # fmt: skip
# of all templates; what is missing here, the model does not see
KNOBS = (
    "mr", "nv", "ku", "px", "pf", "kc", "tile", "tg", "share", "mo", "lanes", "chains", "unroll", "short", "grain",
    "serial", "turn", "straight", "rows",
    "pixels", "bm", "bn", "stages", "group", "split", "resident", "down", "across", "bk", "slices", "tm", "tn", "per",
    "parts", "threads", "wide",
    "row", "team", "width", "bytes", "chunks", "keys", "warps", "units", "kept", "sends", "blocks", "flight", "ahead",
    "keep", "columns", "near", "cut", "shares",
)  # fmt: skip
WORDS = (("order", "rows"), ("order", "panels"), ("order", "tiles"), ("layout", "rows"), ("layout", "columns"))
_PLACES = {k: place for place, k in enumerate(KNOBS)}
ABSENT = -1.0  # of a knob that the template does not have
PAGE = 4096  # bytes: rows that are so far apart, or a large part of it, compete for the same places of a cache
BUFFERS = 4  # that are told of one by one: the result and the largest others

_BUFFER = ("bytes", "reuse", "inner", "across", "grain", "element", "constant")
_WORK = (
    "batch rows cols red run taps element flops bytes intensity passes guarded buffers red_align cols_align run_align"
).split()
_PLAN = (
    "rows", "cols", "red", "pieces", "each", "balance", "items", "items_balance", "waste", "row_waste", "col_waste",
    "red_waste", "threads", "registers", "near", "l2", "together",
    "loads", "fetch", "compute", "cache", "memory", "seconds", "bound",
)  # fmt: skip
NAMES: tuple[str, ...] = (
    *(f"kind {k}" for k in PROBLEMS),
    *(f"work {n}" for n in _WORK),
    *(f"ops {k}" for k in KINDS),
    *(f"buffer {i} {n}" for i in range(BUFFERS) for n in _BUFFER),
    *(f"template {t}" for t in TEMPLATES),
    *(f"knob {k}" for k in KNOBS),
    *(f"knob {k}={v}" for k, v in WORDS),
    *(f"plan {n}" for n in _PLAN),
    *(f"tile {n}" for n in tiles.NAMES),
)
VERSION = hashlib.sha256("\n".join(NAMES).encode()).hexdigest()[:16]


def features(problem: Problem, choices: Sequence[Choice], limits: Limits) -> Array:
    """Features of choices, float32 [choices, len(NAMES)]: bits independent of the other choices."""
    w = work_of(problem)
    about = _about(w)
    out = np.empty((len(choices), len(NAMES)), np.float32)
    out[:, : len(about)] = about
    least = shortest(w, limits)
    for row, c in zip(out, choices):
        row[len(about) :] = [*_knobs(c), *_planned(w, plan(w, c, limits), limits, least), *tiles.spent(w, c, limits)]
    return out


def _about(w: Work) -> list[float]:
    """What is the same for all schedules of a kernel."""
    sizes = [
        log(n)
        for n in (
            w.batch,
            w.rows,
            w.cols,
            w.red,
            w.run,
            w.taps,
            w.element,
            w.flops + 1,
            w.nbytes,
            w.flops / max(w.nbytes, 1.0) + 2**-8,
        )
    ]
    per = [log(1 + n / max(w.outputs, 1.0)) for n in w.ops]
    result = next((b for b in w.buffers if b.written), None)
    told = [b for b in (result, *(b for b in w.buffers if b is not result)) if b is not None][:BUFFERS]
    rows = [x for b in told for x in _buffer(b)] + [0.0] * len(_BUFFER) * (BUFFERS - len(told))
    align = [log2(gcd(n * w.element, PAGE)) for n in (w.red, w.cols, w.run)]
    return [
        *(float(w.kind == k) for k in PROBLEMS),
        *sizes,
        float(w.passes),
        float(w.guarded),
        float(len(w.buffers)),
        *align,
        *per,
        *rows,
    ]


def _buffer(b: Walked) -> list[float]:
    return [
        log(b.nbytes),
        log(b.reuse),
        log(1 + b.inner),
        log(1 + b.across),
        log(b.grain),
        float(b.element),
        float(b.constant),
    ]


def _knobs(c: Choice) -> list[float]:
    knobs = dict(c.knobs)
    numbers = [ABSENT] * len(KNOBS)  # most of them are other templates'
    for k, v in knobs.items():
        if k in _PLACES and not isinstance(v, str):
            numbers[_PLACES[k]] = log2(1 + max(v, 0))
    return [*(float(c.template == t) for t in TEMPLATES), *numbers, *(float(knobs.get(k) == v) for k, v in WORDS)]


def seen(choice: Choice) -> bool:
    """Are a choice's template and all of its knobs features? Choices that differ in others look the same to a model."""
    return choice.template in TEMPLATES and all(k in KNOBS or (k, v) in WORDS or v == 0 for k, v in choice.knobs)


def _planned(w: Work, p: Plan, limits: Limits, least: float) -> list[float]:
    """What a plan makes of a kernel that takes `least` seconds at the peak."""
    each, items = p.pieces / limits.cores, p.items or p.pieces
    balance, by_items = (-(-n // limits.cores) * limits.cores / max(n, 1.0) for n in (p.pieces, items))
    left = [_over(n, by) for n, by in ((w.run, p.rows), (w.cols, p.cols), (w.red, p.red))]
    sizes = (p.rows, p.cols, p.red, p.pieces, each, balance, items, by_items, p.waste)
    used = (p.threads, p.registers, p.near, p.far, p.together, p.loads, p.fetch)
    times = (p.compute, p.cache, p.memory, p.seconds, least / max(p.seconds, 1e-12))
    return [*(log(x) for x in (*sizes, *left, *used)), *(log(t) for t in times)]


def _over(n: float, by: float) -> float:
    """By how much n grows when it is made a multiple."""
    return -(-n // max(by, 1.0)) * max(by, 1.0) / max(n, 1.0)
