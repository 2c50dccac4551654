"""A look at what a machine measures: the kernels of a graph's text, some schedules of each, and a table of their times.

    python -m dnnc.autotune.search.inspect layer.txt --target cuda --choices 8 --check

Use it to bring up a new machine or device: it compiles, measures and checks as tuning does, keeping nothing.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dnnc.autotune.runners.machine import machine_of
from dnnc.autotune.runners.measure import ProcessRunner
from dnnc.autotune.search.task import Setting, Task, extract
from dnnc.autotune.search.trial import Request, Trial
from dnnc.backends.runtime.operands import noise
from dnnc.ir.dtype import BY_NAME
from dnnc.ir.errors import DnncError, InputError, count
from dnnc.ir.graph.text import parse
from dnnc.passes.pipelines import compile_program
from dnnc.passes.schedule.problem import Choice

EXAMPLE = """
def layer(x: f32[256, 512], *, w: f32[512, 1024], b: f32[1024]):
    return gelu(add(matmul(x, w), b))
"""


def tasks_of(text: str, setting: Setting, precision: str | None = None) -> list[tuple[Task, int]]:
    """Tasks of a graph's text with random constants, and their calls. ParseError: no graph. InputError: no size."""
    machine = machine_of(setting.target)
    program = compile_program(
        parse(text, _constants(text)),
        machine.context(setting, precision),
        machine.templates(setting),
        passes=machine.backend.passes(3),
    )
    return extract(program, setting)


def _constants(text: str) -> dict[str, Any]:
    """Random arrays for the parameters behind the star."""
    functions = [s for s in ast.parse(text).body if isinstance(s, ast.FunctionDef)]
    found: dict[str, Any] = {}
    for a in functions[-1].args.kwonlyargs if functions else ():
        shown = ast.unparse(a.annotation) if a.annotation is not None else ""
        name, _, dims = shown.partition("[")
        sizes = [d.strip() for d in dims.rstrip("]").split(",") if d.strip()]
        if name not in BY_NAME or not all(d.isdigit() for d in sizes):
            raise InputError(f"{a.arg}: {shown}: a constant has a type and sizes, such as f32[512, 256]")
        shape, dtype = tuple(map(int, sizes)), BY_NAME[name]
        count = 1
        for d in shape:
            count *= d
        found[a.arg] = noise(dtype, count * dtype.bytes).view(dtype.numpy).reshape(shape)
    return found


def schedules(task: Task, count: int) -> list[Choice]:
    """The first choice and others from all over the templates' spaces, `count` at most."""
    problem = task.rebuilt[2]
    spaces = [
        [Choice(t.name, knobs) for knobs in t.space(problem)]
        for t in machine_of(task.setting.target).templates(task.setting)
    ]
    every = [c for s in spaces for c in s]
    step = max(1, -(-len(every) // max(count, 1)))
    return every[::step][:count]


def table(task: Task, calls: int, trials: Sequence[Trial]) -> list[str]:
    """Lines about a task, the fastest schedule first."""
    lines = [f"{task.name}: {task.kind}, {task.flops / 1e6:.3g} MFLOP, called {calls} x"]
    for t in sorted(trials, key=lambda t: t.median):
        if t.ok:
            spread = (max(t.seconds) / min(t.seconds) - 1) * 100 if min(t.seconds) else 0.0
            rate = f"{task.flops / t.median / 1e9:9.1f} GFLOP/s" if t.median else ""
            what = f"{t.median * 1e6:10.2f} us {rate} spread {spread:4.1f} %{' right' if t.checked else ''}"
        else:
            what = f"{t.status}: {t.error.splitlines()[0][:100] if t.error else ''}"
        lines.append(f"    {what}  {t.choice}")
    return lines


def look(arguments: Sequence[str] | None = None) -> None:
    """The command. `arguments`: default is the process's own."""
    ap = argparse.ArgumentParser(
        prog="python -m dnnc.autotune.search.inspect", description="Measure some schedules of the kernels of a graph."
    )
    ap.add_argument("graph", nargs="?", type=Path, help="a file with a graph's text; default: a fully connected layer")
    ap.add_argument("--target", default="llvm", help="such as 'llvm -threads=1' or 'cuda:1'")
    ap.add_argument("--devices", default="", help="numbers of GPUs to use at once, such as 0,1")
    ap.add_argument("--precision", help="how floats are stored: float16, bfloat16, tf32")
    ap.add_argument("--choices", type=int, default=6, help="schedules of each kernel")
    ap.add_argument("--repeats", type=int, default=3, help="of each schedule")
    ap.add_argument("--builders", type=int, help="processes that compile; default: one per CPU")
    ap.add_argument("--check", action="store_true", help="compare each with float64 as well")
    ap.add_argument("--json", action="store_true", help="a line for each trial instead of tables")
    a = ap.parse_args(arguments)
    try:
        _look(a)
    except DnncError as e:
        sys.exit(f"error: {e}")


def _look(a: argparse.Namespace) -> None:
    setting = Setting(machine_of(a.target).text, rounded=a.precision == "tf32")
    found = tasks_of(a.graph.read_text() if a.graph else EXAMPLE, setting, a.precision)
    requests = [Request(t, c, None, a.repeats, a.check) for t, _ in found for c in schedules(t, a.choices)]
    devices = [int(d) for d in a.devices.split(",") if d] or None
    with ProcessRunner(a.target, devices, a.builders) as runner:
        start = time.perf_counter()
        trials = list(runner.measure(requests))
        took = time.perf_counter() - start
    if a.json:
        print("\n".join(json.dumps(t.as_json()) for t in trials))
        return
    for task, calls in found:
        print("\n".join(table(task, calls, [t for t in trials if t.task == task.key])))
    print(
        f"{count(len(trials), 'schedule')} in {took:.1f} s, processes started, on "
        f"{trials[0].machine if trials else 'nothing'}: "
        f"{setting.target}"
    )


if __name__ == "__main__":
    look()
