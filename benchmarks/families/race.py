"""dnnc over a corpus: does every model compile, is it right, and how fast is it beside ONNX Runtime and OpenVINO?

    python -m benchmarks.families.race --models DIR [--jobs check|time] [--only REGEX] [--half visible|held|all]
        [--threads 2]
        [--target cuda] [--workers 12] [--strict-compile] [--seconds 300] [--memory 12] [--cache DIR] [--lock FILE]
        [--out race.jsonl] [--again] [--markdown FILE]

Each model runs in a process of its own with limits of time and memory: compiled with an empty cache, checked
(`verdict.py`), and with `--jobs time` timed in turns with its peers. Rows go to OUT as they come; models that OUT has
are skipped unless `--again`. The held-back third of the corpus is for final figures: look at the visible models while
you work.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import zoo
from engines import PEERS, Engine, Task, exact
from judge import off_by_one_unit
from timing import Neighbours

from dnnc.ir.graph.interp import Precision
from dnnc.tools.peers import several
from dnnc.tools.timing import alternate, percentiles, ratios
from families.apart import Outcome, Tell, run_apart
from families.index import HALVES, Row, append, is_held, read_index, read_lines, select
from families.summary import COMPILING, JUDGING, RESIZING, failure_class, markdown, one_line
from families.verdict import decide

Array = np.ndarray[Any, Any]
TIMED = ("onnxruntime", "openvino")


# --- one model, in a child process ------------------------------------------------------------------------------------


def measure(a: argparse.Namespace, row: Row, tell: Tell) -> Row:
    """What dnnc does with a model. The parent tells an exception, with the stage: dnnc's or a peer's."""
    inputs = zoo.make_inputs(row)
    with tempfile.TemporaryDirectory() as empty:
        task = Task(row["name"], zoo.load(a.models, row), inputs, a.threads, a.cache or Path(empty))
        tell(COMPILING)
        ours = compiled(task, a.target, a.strict_compile)
        f = ours.facts["executable"]
        out: Row = {"compile_s": round(ours.facts["compile_s"], 2), "host": f.report.fallbacks}
        out["kernels"] = sum(len(p.kernels) for p in f.report.programs)
        engines = [ours, *peers(task, TIMED if a.jobs == "time" else TIMED[:1], out, tell)]
        tell(JUDGING)
        stored = a.models / f"{row['name']}.npz"
        out["verdict"] = judge(engines, inputs, stored if stored.exists() else None)
        if row.get("symbolic") and a.jobs == "check" and a.target.startswith("llvm"):
            tell(RESIZING)
            out["resized"] = resized(row, task, ours)
        if a.jobs == "time":
            time_engines(a, engines, out, tell)
    return out


def compiled(task: Task, target: str, strict: bool) -> Engine:
    """dnnc's engine after its first call."""
    import dnnc

    start = time.perf_counter()
    options = {"strict_compile": True} if strict else {}
    options |= {"threads": task.threads} if target.startswith("llvm") else {}
    f = dnnc.compile(task.model, target=target, cache=task.cache, **options)
    arrays = [task.inputs[i.name] for i in f.inputs]
    f(*arrays)
    return Engine("dnnc", lambda: f(*arrays), several, {"compile_s": time.perf_counter() - start, "executable": f})


def peers(task: Task, names: tuple[str, ...], out: Row, tell: Tell) -> list[Engine]:
    """The peers that can run the model; `out` notes those that cannot."""
    engines = []
    for name in names:
        tell(f"loading {name}")
        try:
            engine = PEERS[name](task)
            engine.call()
            engines.append(engine)
        except Exception as e:
            out.setdefault("peers_failed", {})[name] = f"{type(e).__name__}: {e}"[:300]
    return engines


def judge(engines: list[Engine], inputs: Mapping[str, Array], stored: Path | None) -> Row:
    """The verdict as a row. `stored`: PyTorch's outputs at export, beside those of the engines."""
    results = {e.name: [x.copy() for x in e.outputs(e.call())] for e in engines if e.name != "openvino"}
    if stored:
        with np.load(stored) as arrays:
            results["torch"] = [arrays[f"arr_{k}"] for k in range(len(arrays.files))]

    def interpret(precision: Precision, moved: bool) -> list[Array]:
        given = off_by_one_unit(inputs) if moved else inputs
        return exact(engines[0], given, precision)

    verdict = decide(results.pop("dnnc"), results, interpret)
    return {k: v for k, v in vars(verdict).items() if v is not None}


def resized(row: Row, task: Task, ours: Engine) -> Row | None:
    """The verdict where every symbolic size is one larger; None where ONNX Runtime cannot run the model so, for
    exporters fix sizes silently.
    """
    infos = {i.name: i.type.tensor_type.shape.dim for i in task.model.graph.input}
    larger = [
        {**i, "shape": [n + bool(d.dim_param) for n, d in zip(i["shape"], infos[i["name"]])]} for i in row["inputs"]
    ]
    inputs = zoo.make_inputs({**row, "inputs": larger})
    theirs = peers(replace(task, inputs=inputs), TIMED[:1], {}, lambda stage: None)
    if not theirs:
        return None
    f = ours.facts["executable"]
    arrays = [inputs[i.name] for i in f.inputs]
    return judge([Engine("dnnc", lambda: f(*arrays), several, {"executable": f}), *theirs], inputs, None)


def time_engines(a: argparse.Namespace, engines: list[Engine], out: Row, tell: Tell) -> None:
    watch = Neighbours()
    times = alternate([e.call for e in engines], a.repeats, a.budget, tell)
    out["others"] = watch.cores()
    out["engines"] = {e.name: percentiles(times, k) for k, e in enumerate(engines)}
    if len(engines) > 1:
        fastest = min(range(1, len(engines)), key=lambda k: out["engines"][engines[k].name]["p50"])
        out |= {"fastest_peer": engines[fastest].name, "ratios": ratios(times, 0, fastest)}


# --- all models -------------------------------------------------------------------------------------------------------


def record(row: Row, outcome: Outcome) -> Row:
    """A row of the results: what the model is, what was measured, or the class of its failure."""
    about = {k: row.get(k) for k in ("name", "family", "exporter", "opset", "batch", "symbolic")}
    about |= {"held": is_held(row["name"]), "seconds": round(outcome.seconds, 1)}
    found = outcome.value or {}
    return {**about, **found, "failure": failure_class(outcome, found)}


def race(a: argparse.Namespace) -> list[Row]:
    rows = select(read_index(a.models), a.half, a.only)
    done = {} if a.again else read_lines(a.out)

    def one(row: Row) -> Row:
        if row["name"] in done:
            return done[row["name"]]
        with turn(a.lock):
            result = record(row, run_apart(partial(measure, a, row), a.seconds, a.memory))
        append(a.out, result)
        print(one_line(result), flush=True)
        return result

    with ThreadPoolExecutor(a.workers) as pool:
        return list(pool.map(one, rows))


@contextmanager
def turn(lock: Path | None) -> Iterator[None]:
    """Hold a lock file, so that several benchmarks on one machine take turns."""
    if lock is None:
        yield
        return
    with lock.open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def parse_arguments() -> argparse.Namespace:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument(
        "--models", type=Path, required=True, help="folder that `python -m benchmarks.families build` wrote"
    )
    ap.add_argument(
        "--jobs", choices=("check", "time"), default="check", help="check: compile and compare; time: and race"
    )
    ap.add_argument("--only", default="", help="regular expression of names or families")
    ap.add_argument("--half", choices=HALVES, default="visible")
    ap.add_argument("--target", default="llvm", help="of dnnc: llvm or cuda")
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--workers", type=int, default=1, help="models at a time, where nothing is timed")
    ap.add_argument("--strict-compile", action="store_true", help="no fallback to lesser schedules")
    ap.add_argument("--seconds", type=float, default=300.0, help="limit of one model")
    ap.add_argument("--memory", type=float, default=12.0, help="gigabytes, limit of one model")
    ap.add_argument("--repeats", type=int, default=3, help="rounds of timing")
    ap.add_argument("--budget", type=float, default=3.0, help="seconds of timing per model")
    ap.add_argument("--cache", type=Path, help="folder of compiled kernels; default: an empty one for each model")
    ap.add_argument("--lock", type=Path, help="file to lock for each model, where other benchmarks run")
    ap.add_argument("--out", type=Path, default=Path("race.jsonl"))
    ap.add_argument("--again", action="store_true", help="models that OUT has too")
    ap.add_argument("--markdown", type=Path, help="write the summary here")
    return ap.parse_args()


def main() -> int:
    a = parse_arguments()
    results = race(a)
    text = markdown(results, {k: str(v) for k, v in vars(a).items() if k in ("jobs", "half", "threads")})
    if a.markdown:
        a.markdown.write_text(text)
    print(text)
    return int(any(r["failure"] for r in results))


if __name__ == "__main__":
    sys.exit(main())
