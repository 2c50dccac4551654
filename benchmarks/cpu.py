"""Whole models on the CPU: dnnc against ONNX Runtime, OpenVINO and torch.compile.

    python benchmarks/cpu.py [--models DIR] [--set float|all|NAME,NAME] [--peers onnxruntime,openvino,torch]
        [--threads 2] [--repeats 3]
                             [--budget 20] [--json OUT] [--check none|peer|float64]
    python benchmarks/cpu.py --random-shapes 60

DIR is made by `python benchmarks/zoo build DIR`. Each model runs in a process of its own: it is compiled with an empty
cache and once more with the full one, its outputs are compared, then calls of all engines alternate.
docs/internals/benchmarks.md defines the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import random_shapes
import zoo
from engines import PEERS, Engine, Task, dnnc_engine, exact
from judge import is_right, largest_error, share_within_a_step
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from timing import Neighbours, geometric_mean

from dnnc.tools.timing import alternate, percentiles, ratios

Array = np.ndarray[Any, Any]
Row = dict[str, Any]
Tell = Callable[[str], None]
MARK = "\x1e"  # begins a line of the child process that is for its parent
WRONG = 1e-2  # error over the largest output: beyond, a model in floats counts as wrong, whatever its speed
BUSY = 0.2  # cores that other processes used while timing: beyond, a row is marked
MEASURED = ("onnxruntime", "openvino")  # peers that run this very model, so their outputs can be compared


# --- one model, in a child process ------------------------------------------------------------------------------------


def measure_model(a: argparse.Namespace, row: Row, tell: Tell) -> Row:
    """All that is known of one model; what fails is told in `failures`."""
    out: Row = {
        "name": row["name"],
        "gflops": row["gflops"],
        "engines": {},
        "failures": {},
        "errors": {},
        "load": os.getloadavg()[0],
    }
    inputs = zoo.make_inputs(row)
    with tempfile.TemporaryDirectory() as cache:
        task = Task(row["name"], zoo.load(a.models, row), inputs, a.threads, Path(cache), a.bfloat16)
        engines: list[Engine] = []
        for name, make in {"dnnc": dnnc_engine, **{p: PEERS[p] for p in a.peers}}.items():
            tell("compiling" if name == "dnnc" else f"loading {name}")
            try:
                engine = make(task)
                engine.call()
                engines.append(engine)
            except Exception as e:  # an engine that fails at a model is a result
                out["failures"][name] = f"{type(e).__name__}: {e}"
    compare(a.check, engines, inputs, out, tell)
    if engines and engines[0].name == "dnnc":
        out |= {k: v for k, v in engines[0].facts.items() if k != "executable"}
    time_engines(a, engines, out, tell)
    return out


def compare(check: str, engines: Sequence[Engine], inputs: dict[str, Array], out: Row, tell: Tell) -> None:
    """Errors of the engines against float64, or of the others against the first peer."""
    if check == "none" or not engines:
        return
    tell("checking results")
    comparable = [e for e in engines if not e.facts.get("own_weights")]
    results = {e.name: [a.copy() for a in e.outputs(e.call())] for e in comparable}
    try:
        if check == "float64":
            want, out["reference"] = exact(engines[0], inputs), "float64"
        else:
            peer = next(n for n in MEASURED if n in results)
            want, out["reference"] = results.pop(peer), peer
    except Exception as e:  # no peer, or a model that the interpreter cannot run
        out["failures"]["check"] = f"nothing to compare with: {type(e).__name__}: {e}"
        return
    out["errors"] = {name: largest_error(got, want) for name, got in results.items()}
    out["shares"] = {
        name: share_within_a_step(got, want) for name, got in results.items() if not np.isinf(out["errors"][name])
    }


def time_engines(a: argparse.Namespace, engines: Sequence[Engine], out: Row, tell: Tell) -> None:
    if not engines:
        return
    watch = Neighbours()
    times = alternate([e.call for e in engines], a.repeats, a.budget, tell)
    out["others"] = watch.cores()
    for k, e in enumerate(engines):
        out["engines"][e.name] = percentiles(times, k) | {
            "calls": sum(len(r[k]) for r in times),
            "load_s": e.facts.get("load_s"),
        }
    if len(engines) > 1 and engines[0].name == "dnnc":
        fastest = min(range(1, len(engines)), key=lambda k: out["engines"][engines[k].name]["p50"])
        out |= {"fastest_peer": engines[fastest].name, "ratios": ratios(times, 0, fastest)}


def child(a: argparse.Namespace, row: Row) -> None:
    def say(**what: Any) -> None:
        print(MARK + json.dumps(what, default=str), flush=True)

    say(row=measure_model(a, row, lambda stage: say(stage=stage)))


# --- all models -------------------------------------------------------------------------------------------------------


def run_apart(a: argparse.Namespace, row: Row, tell: Tell) -> Row:
    """A model's row from a child process, which may crash or take too long."""
    words = ["--models", str(a.models), "--set", row["name"], "--peers", ",".join(a.peers), "--threads", str(a.threads)]
    words += ["--repeats", str(a.repeats), "--budget", str(a.budget), "--check", a.check, "--child"]
    words += ["--bfloat16"] * a.bfloat16
    command = [sys.executable, str(Path(__file__).resolve()), *words]
    stage, found = "start", None
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        timer = threading.Timer(a.timeout, process.kill)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                message = json.loads(line[1:])
                stage, found = message.get("stage", stage), message.get("row", found)
                tell(stage)
        status = process.wait()
        late = not timer.is_alive()
        timer.cancel()
        errors.seek(0)
        last = (errors.read().strip().splitlines() or [""])[-1]
    if found is not None:
        return found
    why = (
        f"more than {a.timeout:g} s"
        if late
        else signal.Signals(-status).name
        if status < 0
        else last or f"exit status {status}"
    )
    return {
        "name": row["name"],
        "gflops": row["gflops"],
        "engines": {},
        "errors": {},
        "failures": {"process": f"{why} while {stage}"},
    }


def run_all(a: argparse.Namespace, rows: Sequence[Row], console: Console) -> list[Row]:
    done: list[Row] = []
    columns = (TextColumn("{task.description:45}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # drawn when there is news: a bar that is drawn ten times a second costs engines of two threads a tenth of their
    # speed
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        bar = progress.add_task("", total=len(rows))

        def news(name: str, stage: str) -> None:
            progress.update(bar, description=f"{name}: {stage}", refresh=True)

        for row in rows:
            done.append(run_apart(a, row, partial(news, row["name"])))
            done[-1]["quantized"] = zoo.is_quantized(row)
            progress.advance(bar)
            console.print(one_line(done[-1]), highlight=False, markup=False, soft_wrap=True)
            if a.json:
                a.json.write_text(json.dumps({"machine": machine(a), "models": done}, indent=1))
    return done


def machine(a: argparse.Namespace) -> dict[str, Any]:
    """What figures depend on."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next(
            (line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")),
            cpu,
        )
    versions = {}
    for name in ("dnnc", "numpy", "llvmlite", *a.peers):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    options = {"threads": a.threads, "repeats": a.repeats, "budget_s": a.budget, "check": a.check}
    return {
        "cpu": cpu,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "time": time.strftime("%Y-%m-%d %H:%M"),
        **options,
        **versions,
    }


# --- tables -----------------------------------------------------------------------------------------------------------


def is_wrong(r: Row) -> bool:
    return "dnnc" in r["errors"] and not is_right(
        r["errors"]["dnnc"], r["shares"].get("dnnc", 0.0), WRONG, bool(r.get("quantized"))
    )


def ratio_text(r: Row) -> str:
    if not r.get("ratios"):
        return "-"
    middle, low, high = float(np.median(r["ratios"])), min(r["ratios"]), max(r["ratios"])
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def one_line(r: Row) -> str:
    times = ", ".join(f"{name} {ms(e['p50'])}" for name, e in r["engines"].items())
    notes = "".join(f"; {short(where, what)}" for where, what in r["failures"].items())
    return f"{r['name']:22} {times} ms; ratio {ratio_text(r)}{notes}" if times else f"{r['name']:22} {notes[2:]}"


def short(where: str, what: str) -> str:
    return f"{where}: {' '.join(what.split())[:90]}"


def ms(t: float) -> str:
    return f"{t:.4f}" if t < 0.1 else f"{t:.3f}" if t < 10 else f"{t:.1f}"


def results_table(a: argparse.Namespace, rows: Sequence[Row]) -> Table:
    m = machine(a)
    peers = ", ".join(f"{p} {m[p] or ''}".strip() for p in a.peers)
    table = Table(
        title=f"{m['cpu']}, {a.threads} threads, float32, batch as in the model; {peers}",
        caption=caption(rows),
        caption_justify="left",
    )
    headings = ["model", "GFLOP", "dnnc ms", "p90", "p99", *(f"{p} ms" for p in a.peers), "ratio (range)", "of minima"]
    headings += ["error", "fallbacks", "arena / bound MB", "kernels", "compile s", "cached s", "notes"]
    for h in headings:
        table.add_column(
            h, justify="left" if h in ("model", "notes") else "right", no_wrap=h != "notes", overflow="fold"
        )
    for r in rows:
        table.add_row(*cells(a, r))
    return table


def cells(a: argparse.Namespace, r: Row) -> list[str]:
    ours = r["engines"].get("dnnc")
    mine = [ms(ours[p]) for p in ("p50", "p90", "p99")] if ours else ["-"] * 3
    theirs = [ms(r["engines"][p]["p50"]) if p in r["engines"] else "-" for p in a.peers]
    off = r["errors"].get("dnnc")
    wrong = "" if off is None else f"[bold red]{off:.0e}[/]" if is_wrong(r) else f"{off:.0e}"
    ratio = ratio_text(r)
    colour = "green" if r.get("ratios") and float(np.median(r["ratios"])) >= 1 else "yellow"
    made = "compile_s" in r
    memory = f"{r['arena'] / 1e6:.2f} / {r['arena_bound'] / 1e6:.2f}" if made else "-"
    built = (
        [str(len(r["fallbacks"])), memory, str(r["kernels"]), f"{r['compile_s']:.2f}", f"{r['cached_s']:.2f}"]
        if made
        else ["-"] * 5
    )
    notes = [f"{where} failed" for where in r["failures"]]
    if (r.get("others") or 0) > BUSY:
        notes.append(f"others: {r['others']:.1f} cores")
    best = min((e["min"] for name, e in r["engines"].items() if name != "dnnc"), default=None)
    minima = f"{best / ours['min']:.2f}" if best and ours else "-"
    return [
        r["name"],
        f"{r['gflops']:.3g}",
        *mine,
        *theirs,
        f"[{colour}]{ratio}[/]",
        minima,
        wrong,
        *built,
        ", ".join(notes),
    ]


def caption(rows: Sequence[Row]) -> str:
    """The geometric mean, over models that are right and that some peer runs."""
    middles = [float(np.median(r["ratios"])) for r in rows if r.get("ratios") and not is_wrong(r)]
    text = (
        "ratio: time of the fastest peer over dnnc's, by medians (median and range of the repeats) and by shortest "
        "calls. "
    )
    if not middles:
        return text
    ahead = sum(m > 1 for m in middles)
    left = [r["name"] for r in rows if not r.get("ratios") or is_wrong(r)]
    text += (
        f"Geometric mean {geometric_mean(middles):.3f} over {len(middles)} models, ahead on {ahead}, lowest "
        f"{min(middles):.2f}."
    )
    return text + (f" Not counted: {', '.join(left)}." if left else "")


# --- command line -----------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument(
        "--models",
        type=Path,
        default=Path("zoo"),
        help="folder with models and their manifest.json; default: zoo, where you are",
    )
    ap.add_argument("--set", default="float", help="float (no quantized models), all, or names separated by commas")
    ap.add_argument("--peers", default="onnxruntime,openvino", help=f"of {', '.join(PEERS)}; none for dnnc alone")
    ap.add_argument("--bfloat16", action="store_true", help="in bfloat16; ONNX Runtime, which has none, in float32")
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--repeats", type=int, default=3)
    ap.add_argument("--budget", type=float, default=20.0, help="seconds of timing per model")
    ap.add_argument("--timeout", type=float, default=900.0, help="seconds for all of a model")
    ap.add_argument(
        "--check", choices=("none", "peer", "float64"), default="peer", help="what outputs are compared with"
    )
    ap.add_argument("--json", type=Path, help="write everything here, after each model")
    ap.add_argument("--random-shapes", type=int, metavar="N", help="measure N kernels of random shapes instead")
    ap.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    a = ap.parse_args()
    a.peers = [p for p in a.peers.split(",") if p not in ("", "none")]
    unknown = [p for p in a.peers if p not in PEERS]
    if unknown:
        ap.error(f"no peer {', '.join(unknown)}; there are {', '.join(PEERS)}")
    if not a.models.is_dir() and a.random_shapes is None:
        ap.error(
            f"there is no folder {a.models}: `python benchmarks/zoo build {a.models}` makes it; or give --models DIR, "
            "or --random-shapes N"
        )
    return a


def chosen(a: argparse.Namespace) -> list[Row]:
    try:
        rows = zoo.read_manifest(a.models)
    except FileNotFoundError as e:
        sys.exit(str(e))
    if a.set in ("all", "float"):
        return [r for r in rows.values() if a.set == "all" or not zoo.is_quantized(r)]
    names = a.set.split(",")
    unknown = [n for n in names if n not in rows]
    if unknown:
        sys.exit(f"{a.models} has no model {', '.join(unknown)}; it has {', '.join(rows)}")
    return [rows[n] for n in names]


def main() -> int:
    a = parse_arguments()
    console = Console() if sys.stdout.isatty() else Console(width=210)
    if a.random_shapes is not None:
        random_shapes.run(a.random_shapes, console=console)
        return 0
    rows = chosen(a)
    if a.child:
        child(a, rows[0])
        return 0
    done = run_all(a, rows, console)
    console.print(results_table(a, done))
    return int(any(is_wrong(r) or "dnnc" not in r["engines"] for r in done))


if __name__ == "__main__":
    sys.exit(main())
