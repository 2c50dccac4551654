"""Whole models by three kinds of schedules: the templates' own, those that the cost model picks without measuring, and
tuned ones.

    python benchmarks/autotune/tuned.py --models DIR --set resnet50,bert_base --target llvm --budget 120
    python3 benchmarks/autotune/tuned.py --models DIR --set resnet50 --target cuda --precision float16 --budget 120

DIR is made by `python benchmarks/zoo build DIR`. Outputs of all three are compared, relative to the largest element,
then their calls are timed in turns. Ratios are speeds: the templates' time over the untuned one, the untuned time over
the tuned one. `--budget 0` leaves tuning out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "gpu")]

import zoo  # noqa: E402
from timing import geometric_mean  # noqa: E402

import dnnc  # noqa: E402
from dnnc import tune_option as tuned  # noqa: E402
from dnnc.ir.graph import identifier  # noqa: E402
from dnnc.passes.schedule.step import first_choice  # noqa: E402

BOUNDS = {
    None: 1e-4,
    "float32": 1e-4,
    "float16": 5e-2,
    "bfloat16": 2e-1,
    "tf32": 2e-2,
}  # of outputs against each other; halves on drawn weights
KINDS = ("templates", "untuned", "tuned")
Call = Callable[[], Any]


def named_dims(model: Any, row: dict[str, Any]) -> dict[str, int]:
    """Sizes of the symbolic dims of a model for the inputs that its row gives."""
    shapes = {i["name"]: i["shape"] for i in row["inputs"]}
    found = {}
    for value in model.graph.input:
        for d, n in zip(value.type.tensor_type.shape.dim, shapes.get(value.name, ())):
            if d.dim_param:
                found[identifier(d.dim_param)] = int(n)
    return found


def by_templates(model: Any, options: dict[str, Any]) -> Any:
    """Compiled with the first choice of each template."""
    usual = tuned.unmeasured
    tuned.unmeasured = lambda *_: first_choice
    try:
        return dnnc.compile(model, **options)
    finally:
        tuned.unmeasured = usual


def measure(folder: Path, row: dict[str, Any], a: argparse.Namespace, cache: str) -> dict[str, Any]:
    model, inputs = zoo.load(folder, row), zoo.make_inputs(row)
    precision = None if row.get("half") else a.precision
    options = {
        "target": a.target,
        "precision": precision,
        "threads": a.threads,
        "cache": cache,
        "dims": named_dims(model, row),
    }
    made = {"templates": by_templates(model, options)}
    start = time.perf_counter()
    made["untuned"] = dnnc.compile(model, **options)
    out: dict[str, Any] = {
        "name": row["name"],
        "batch": row["inputs"][0]["shape"][0],
        "compile_s": time.perf_counter() - start,
    }
    if a.budget:
        start = time.perf_counter()
        found = dnnc.tune(model, budget=a.budget, log=a.log, **options)
        out |= {"tune_s": time.perf_counter() - start, "trials": found.result.trials, "kernels": found.speedup}
        made["tuned"] = found.compile()
    arrays = {k: [inputs[i.name] for i in f.inputs] for k, f in made.items()}
    results = {k: _all(f(*arrays[k])) for k, f in made.items()}
    out["error"] = max(_distance(r, results["templates"]) for r in results.values())
    out["right"] = out["error"] <= BOUNDS[a.precision if precision or not row.get("half") else "float16"]
    out["ms"] = dict(zip(made, timed([bound(f, arrays[k], a.target) for k, f in made.items()], a)))
    return out


def _all(r: Any) -> list[np.ndarray[Any, Any]]:
    return [np.asarray(x) for x in (r if isinstance(r, tuple) else (r,))]


def _distance(a: list[np.ndarray[Any, Any]], b: list[np.ndarray[Any, Any]]) -> float:
    pairs = [(x.astype(np.float64), y.astype(np.float64)) for x, y in zip(a, b) if x.dtype.kind == "f" and x.size]
    return max((float(np.abs(x - y).max() / max(np.abs(y).max(), 1e-30)) for x, y in pairs), default=0.0)


def bound(f: Any, arrays: list[Any], target: str) -> Call:
    """A call without copies: inputs and outputs are bound."""
    if target.startswith("cuda"):
        import cupy

        arrays = [cupy.asarray(x) for x in arrays]
    results = f(*arrays)
    call: Call = f.bind(arrays, list(results) if isinstance(results, tuple) else [results])
    return call


def timed(calls: list[Call], a: argparse.Namespace) -> list[list[float]]:
    """Milliseconds per call of each, one number per repeat."""
    if a.target.startswith("cuda"):
        from gpu_time import gpu_times

        rows = [gpu_times(calls) for _ in range(a.repeats)]
        return [list(column) for column in zip(*rows)]
    from dnnc.tools.timing import alternate

    times = alternate(calls, a.repeats, a.seconds, lambda _: None)
    return [[1e3 * statistics.median(repeat[k]) for repeat in times] for k in range(len(calls))]


def ratio(row: dict[str, Any], slow: str, fast: str) -> float:
    """The median over repeats of one kind's time over another's."""
    return statistics.median(s / f for s, f in zip(row["ms"][slow], row["ms"][fast]))


def report(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | batch | error | templates ms | untuned ms | tuned ms | untuned against templates | tuned against "
        "untuned | trials | tuning |"
    ]
    lines.append("|---" * 10 + "|")
    for r in rows:
        ms = [f"{statistics.median(r['ms'][k]):.4g}" if k in r["ms"] else "" for k in KINDS]
        gain = f"{ratio(r, 'untuned', 'tuned'):.3f}" if "tuned" in r["ms"] else ""
        more = [str(r.get("trials", "")), f"{r['tune_s']:.0f} s" if "tune_s" in r else ""]
        lines.append(
            "| "
            + " | ".join(
                [
                    r["name"],
                    str(r["batch"]),
                    f"{r['error']:.1e}",
                    *ms,
                    f"{ratio(r, 'templates', 'untuned'):.3f}",
                    gain,
                    *more,
                ]
            )
            + " |"
        )
    means = [f"untuned against templates {geometric_mean([ratio(r, 'templates', 'untuned') for r in rows]):.3f}"]
    both = [r for r in rows if "tuned" in r["ms"]]
    if both:
        means.append(f"tuned against untuned {geometric_mean([ratio(r, 'untuned', 'tuned') for r in both]):.3f}")
    return "\n".join(
        [*lines, "", f"geometric means: {', '.join(means)}; {sum(r['right'] for r in rows)} of {len(rows)} right"]
    )


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--models", type=Path, required=True)
    ap.add_argument("--set", required=True, help="names separated by commas")
    ap.add_argument("--target", default="llvm")
    ap.add_argument("--precision")
    ap.add_argument("--threads", type=int)
    ap.add_argument("--budget", type=float, default=120.0, help="seconds of tuning for each model; 0 for none")
    ap.add_argument("--seconds", type=float, default=20.0, help="of timing for each model, on a CPU")
    ap.add_argument("--repeats", type=int, default=3)
    ap.add_argument("--log", help="a tuning log to append to")
    ap.add_argument("--json", type=Path, help="write everything here")
    a = ap.parse_args()
    known, rows = zoo.read_manifest(a.models), []
    with tempfile.TemporaryDirectory() as cache:
        for name in a.set.split(","):
            rows.append(measure(a.models, known[name], a, cache))
            print(
                {k: v for k, v in rows[-1].items() if k != "ms"},
                {k: f"{statistics.median(v):.4g} ms" for k, v in rows[-1]["ms"].items()},
                flush=True,
            )
            if a.json:
                a.json.write_text(json.dumps(rows, indent=1))
    print(report(rows))
    return int(not all(r["right"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
