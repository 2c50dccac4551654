"""cuBLASLt and cuDNN as steps of compiled models on one GPU: are they right there, and how fast beside our kernels?

    python benchmarks/gpu/libraries.py [--only WORD] [--ours N] [--json OUT] [--no-times]
    PYTHONPATH=.types python3 benchmarks/gpu/libraries.py     where dnnc is not installed; `make .types` makes that
                                                              folder

First small models are compiled as a log with library calls would have it: with the kernel check, without it (so that a
library's first call is while a graph is recorded), from NumPy and from CuPy arrays, bound, and out of a file. Then
kernels of six shapes are timed as the tuner times them, weights cold: N schedules of ours, the untuned one first, and
each suggestion of the library. What fails is told at its place; the exit status is 1 if anything but a suggestion that
a library does not offer has failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import dnnc
from dnnc.autotune.runners.machine import Machine, machine_of
from dnnc.autotune.runners.worker import build
from dnnc.autotune.search.space import space, with_libraries
from dnnc.autotune.search.task import Task
from dnnc.backends.cuda.library import VENDORS, installed, version_of
from dnnc.ir.errors import AccuracyError, DnncError, TargetError
from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.options import make_options
from dnnc.passes.schedule.problem import Choice
from dnnc.tools.sample_graphs import graph_of
from dnnc.tune_option import setting_of
from dnnc.tune_session import tasks_of

Array = np.ndarray[Any, Any]
BOUND = {None: 2e-5, "tf32": 5e-3, "float16": 1e-2, "bfloat16": 6e-2}  # of the largest error over the largest result
LAYERS = """
def layers(x: f32[128, 768], *, w: f32[768, 3072], b: f32[3072], v: f32[3072, 768], c: f32[768], u: f32[768, 256]):
    h = gelu(add(matmul(x, w), b), approximate="tanh")
    return matmul(relu(add(matmul(h, v), c)), u)
"""
BATCH = "def batch(x: f32[12, 96, 64], y: f32[12, 64, 96]):\n    return softmax(matmul(relu(x), y))\n"
CONVS = """
def convs(x: f32[4, 64, 28, 28], *, w: f32[128, 64, 3, 3], b: f32[128], v: f32[64, 128, 1, 1], c: f32[64],
    u: f32[64, 64, 3, 3]):
    h = relu(conv(x, w, b, pads=(1, 1, 1, 1), strides=(2, 2)))
    return conv(relu(conv(h, v, c)), u, pads=(0, 1, 1, 2))
"""
MODELS = (
    (LAYERS, "cublaslt", (None, "float16", "bfloat16", "tf32")),
    (BATCH, "cublaslt", (None, "float16")),
    (CONVS, "cudnn", (None, "float16", "bfloat16", "tf32")),
)
SHAPES = {
    "f16 128x3072x768 bias gelu": "x: f16[128, 768], *, w: f16[768, 3072], b: f16[3072] -> gelu(add(matmul(x, w), b), "
    "approximate='tanh')",
    "f16 2048x768x3072 bias relu": (
        "x: f16[2048, 3072], *, w: f16[3072, 768], b: f16[768] -> relu(add(matmul(x, w), b))"
    ),
    "f16 4096x4096x4096": "x: f16[4096, 4096], *, w: f16[4096, 4096] -> matmul(x, w)",
    "f32 1024x1024x1024": "x: f32[1024, 1024], *, w: f32[1024, 1024] -> matmul(x, w)",
    "f16 conv 1x64x56x56 3x3 bias relu": "x: f16[1, 64, 56, 56], *, w: f16[64, 64, 3, 3], b: f16[64] -> relu(conv(x, "
    "w, b, pads=(1, 1, 1, 1)))",
    "f16 conv 32x256x14x14 3x3 bias relu": "x: f16[32, 256, 14, 14], *, w: f16[256, 256, 3, 3], b: f16[256] -> "
    "relu(conv(x, w, b, pads=(1, 1, 1, 1)))",
}


# --- are they right? --------------------------------------------------------------------------------------------------


def winners_of(g: Graph, library: str, number: int, precision: str | None) -> dict[str, Choice]:
    """As a log would say it: a library's call for each kernel that it can do."""
    _, tasks = tasks_of(g, make_options({"target": "cuda", "precision": precision, "cache": False}))
    offered = with_libraries(machine_of("cuda"))
    found = {}
    for task, _ in tasks:
        calls = [
            c
            for c in offered(task)
            if c.template == library and dict(c.knobs).get("algo", dict(c.knobs).get("plan")) == number
        ]
        if calls:
            found[task.key] = calls[-1] if precision == "tf32" else calls[0]
    return found


def errors_of(f: Any, arrays: list[Array], want: Array) -> dict[str, float]:
    """Largest errors over the largest result, of each way to call a model."""
    import cupy

    def error(got: Any) -> float:
        return float(np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max())

    out = {"numpy": max(error(f(*arrays)) for _ in range(3))}
    device = [cupy.asarray(a) for a in arrays]
    out["cupy"] = max(error(cupy.asnumpy(f(*device))) for _ in range(3))
    result = cupy.empty_like(f(*device))
    bound = f.bind(device, [result])
    bound()
    bound()
    cupy.cuda.Device().synchronize()
    out["bound"] = error(cupy.asnumpy(result))
    with tempfile.TemporaryDirectory() as folder:
        f.save(Path(folder) / "m.dnnc")
        out["file"] = error(dnnc.load(Path(folder) / "m.dnnc", cache=False)(*arrays))
    return out


def check(text: str, library: str, precision: str | None, number: int, verify: Any) -> str:
    """A line about a model. DnncError and AssertionError say what is wrong."""
    g = graph_of(text)
    found = winners_of(g, library, number, precision)
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal(tuple(int(str(d)) for d in v.type.shape), np.float32) for v in g.inputs]
    (want,) = run(g, arrays, precision="float64")
    f = dnnc.compile(graph_of(text), target="cuda", precision=precision, cache=False, tune=found, verify=verify)
    called = [k for k in f.report.programs[-1].kernels if k.choice.startswith(library)]
    assert called, f"no kernel is a call of {library}: the tasks that it can do are {found}; report:\n{f.report}"
    errors = errors_of(f, arrays, want)
    shown = ", ".join(f"{k} {v:.1e}" for k, v in errors.items())
    assert max(errors.values()) <= BOUND[precision], f"errors {shown} are over {BOUND[precision]}"
    return f"{len(called)} of {len(f.report.programs[-1].kernels)} kernels are calls; errors {shown}"


def check_all(only: str, failed: list[str]) -> None:
    for text, library, precisions in MODELS:
        for k, precision in enumerate(precisions):
            number, verify = (0, False) if k % 2 else (min(k, 1), "kernels")
            name = (
                f"{text.split('(')[0].split()[-1]} {library} {precision or 'float32'} suggestion "
                f"{number}{'' if verify else ', not checked before'}"
            )
            if only in name:
                told(name, failed, lambda: check(text, library, precision, number, verify))


def told(name: str, failed: list[str], work: Callable[[], str]) -> None:
    """Print what comes of it; a suggestion that there is not is no failure."""
    start = time.perf_counter()
    try:
        text = "right    " + work()
    except TargetError as e:
        text = f"none     {e}"
    except (DnncError, AssertionError) as e:
        failed.append(name)
        text = f"WRONG    {type(e).__name__}: {e}"
    except Exception:
        failed.append(name)
        text = "FAILED   " + traceback.format_exc()
    print(f"{name:64} {time.perf_counter() - start:5.1f} s  {text}", flush=True)


# --- how fast? --------------------------------------------------------------------------------------------------------


def task_of_shape(shape: str) -> Task:
    inputs, _, body = shape.partition(" -> ")
    _, tasks = tasks_of(
        graph_of(f"def f({inputs}):\n    return {body}\n"), make_options({"target": "cuda", "cache": False})
    )
    return next(t for t, _ in tasks if t.kind == "contraction")


def times(name: str, shape: str, machine: Machine, bench: Any, count: int) -> dict[str, Any]:
    """Microseconds of our schedules and of the library's suggestions; None where one does not apply, or is wrong."""
    task = task_of_shape(shape)
    ours = space(task.rebuilt[2], machine.templates(task.setting))[:count]
    theirs = with_libraries(machine_of("cuda"))(task)
    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(lambda c: _built(machine, task, c), [*ours, *theirs]))
    found: dict[str, float | None] = {}
    notes: dict[str, str] = {}
    for choice, code in zip([*ours, *theirs], made):
        found[str(choice)] = None
        try:
            if isinstance(code, Exception):
                raise code
            kernel = bench.load(task, code[0])
            if choice in theirs and not kernel.check(code[1], choice):
                notes[str(choice)] = "not checked: too long for the gate"
            found[str(choice)] = min(kernel.measure() for _ in range(3)) * 1e6
        except (TargetError, AccuracyError) as e:
            notes[str(choice)] = f"{type(e).__name__}: {e}"
    best_ours, best_theirs = (
        (min((t for c in group if (t := found[str(c)]) is not None), default=None)) for group in (ours, theirs)
    )
    return {
        "name": name,
        "ours": best_ours,
        "default": found[str(ours[0])],
        "library": best_theirs,
        "all": found,
        "notes": notes,
    }


def _built(machine: Machine, task: Task, choice: Choice) -> Any:
    try:
        return build(machine, task, choice)
    except DnncError as e:
        return TargetError(str(e))


def row(r: dict[str, Any]) -> str:
    def us(t: float | None) -> str:
        return "      -" if t is None else f"{t:7.2f}"

    ratio = f"{r['library'] / r['ours']:5.2f}x" if r["library"] and r["ours"] else "    -"
    each = " ".join(us(t).strip() for c, t in r["all"].items() if c.partition("(")[0] in VENDORS)
    notes = "".join(f"\n      {c}: {text[:300]}" for c, text in r["notes"].items())
    return (
        f"untuned {us(r['default'])} us, best of ours {us(r['ours'])}, library {us(r['library'])}, its time over "
        f"ours {ratio}; its ways: {each}{notes}"
    )


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--only", default="", help="models and shapes whose names contain this")
    ap.add_argument("--ours", type=int, default=6, help="schedules of ours to time for each shape")
    ap.add_argument("--json", default="", help="write the times to this file")
    ap.add_argument("--no-times", action="store_true", help="the first half alone")
    a = ap.parse_args()
    failed: list[str] = []
    print(
        ", ".join(f"{VENDORS[n].title} {version_of(n)}" for n in installed()) or "no library is installed", flush=True
    )
    check_all(a.only, failed)
    rows: list[dict[str, Any]] = []
    if not a.no_times:
        machine = machine_of(setting_of(make_options({"target": "cuda"})).target)
        bench = machine.bench()

        def timed(name: str, shape: str) -> str:
            rows.append(times(name, shape, machine, bench, a.ours))
            return row(rows[-1])

        for name, shape in SHAPES.items():
            if a.only in name:
                told(name, failed, lambda: timed(name, shape))
    if a.json:
        Path(a.json).write_text(json.dumps(rows, indent=1))
    print(f"{len(failed)} failed{': ' + ', '.join(failed) if failed else ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
