"""How fast is one state of dnnc beside another? Calls of models and array expressions, cached compiles, the import.

    python benchmarks/before_after.py BEFORE AFTER --models DIR [--set all|float|NAME,NAME] [--starts 1] [--rounds 9]
        [--again 3] [--bar 0.96] [--by median|minimum] [--threads 2] [--budget 0.2] [--ahead] [--json OUT]

BEFORE and AFTER are checkouts of the project; each runs in processes of its own, with a cache of its own that is empty
at first. A start is a fresh process of each state: they take turns, a block of calls each per round, and swap places
from round to round. A round's ratio is the median time before over the median time after (above 1: AFTER is faster); a
start counts by the median of its rounds, or where other processes want the same cores by the shortest calls of all its
rounds (`--by minimum`; with `--ahead`, for root, blocks run before everything else on the machine). A model counts by
the median of its starts; what falls below the bar is started `--again` times more. Times of the import, and of
compiling ResNet-50 from a full cache up to its first result, are those of fresh processes, alternating. DIR is made by
`python benchmarks/zoo build DIR`. The exit code is 1 where a model stays below the bar, or the geometric mean is below
0.99.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zoo
from timing import Neighbours, geometric_mean

Array = np.ndarray[Any, Any]
Row = dict[str, Any]
HERE = Path(__file__).resolve().parent
MEAN, EXPRESSIONS = 0.99, 0.95  # least geometric mean over models, least ratio of an array expression
CACHED = "resnet50"
SMALL, LARGE = 1000, 1 << 20  # elements of array expressions


# --- one state, in a process of its own -------------------------------------------------------------------------------


def times_of_turns() -> Any:
    """`dnnc.tools.timing` of this checkout, whichever state the process runs."""
    spec = importlib.util.spec_from_file_location("turns", HERE.parent / "compiler" / "tools" / "timing.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def model_call(name: str, folder: Path, threads: int) -> Callable[[], Any]:
    import dnnc

    row = zoo.read_manifest(folder)[name]
    f = dnnc.compile(zoo.load(folder, row), threads=threads, verify=False)
    made = zoo.make_inputs(row)
    inputs = [made[i.name] for i in f.inputs]
    return lambda: f(*inputs)


def bound_call(name: str, folder: Path, threads: int) -> Callable[[], Any]:
    """A call without checks of its arguments, into arrays that are there."""
    import dnnc

    row = zoo.read_manifest(folder)[name]
    f = dnnc.compile(zoo.load(folder, row), threads=threads, verify=False)
    made = zoo.make_inputs(row)
    inputs = [made[i.name] for i in f.inputs]
    results = f(*inputs)
    call: Callable[[], Any] = f.bind(inputs, list(results) if isinstance(results, tuple) else [results])
    return call


def expression(op: str, size: int) -> Callable[[], Any]:
    """One op on arrays, or the same traced before."""
    import dnnc
    import dnnc.array as xp

    a, b = (np.random.default_rng(k).standard_normal(size).astype(np.float32) for k in range(2))
    if op == "jit":
        f = dnnc.jit(lambda x, y: x + y)
        return lambda: f(a, b)
    x, y = xp.asarray(a), xp.asarray(b)
    calls: dict[str, Callable[[], Any]] = {
        "add": lambda: np.asarray(x + y),
        "exp": lambda: np.asarray(xp.exp(x)),
        "sum": lambda: np.asarray(xp.sum(x)),
    }
    return calls[op]


def call_of(words: Sequence[str], folder: Path, threads: int) -> Callable[[], Any]:
    if words[0] == "expression":
        return expression(words[1], int(words[2]))
    return (bound_call if words[0] == "bound" else model_call)(words[1], folder, threads)


def serve(words: Sequence[str], folder: Path, threads: int, budget: float) -> None:
    """Make a call, then time a block of it for each line of standard input; answers are lines of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    turns = times_of_turns()
    call = call_of(words, folder, threads)
    call()
    print("[]", file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps(turns.alternate([call], 1, budget, lambda stage: None)[0][0]), file=answers, flush=True)


def once(words: Sequence[str], folder: Path, threads: int) -> None:
    """The seconds of an import, or from a model that is read to its first result."""
    row = zoo.read_manifest(folder).get(CACHED) if words[0] == "compile" else None
    model, inputs = (zoo.load(folder, row), zoo.make_inputs(row)) if row else (None, {})
    start = time.perf_counter()
    import dnnc

    if model is not None:
        f = dnnc.compile(model, threads=threads)
        f(*[inputs[i.name] for i in f.inputs])
    print(json.dumps(time.perf_counter() - start))


# --- both -------------------------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("before", type=Path)
    ap.add_argument("after", type=Path)
    ap.add_argument("--models", type=Path, default=Path("zoo"), help="folder with models and their manifest.json")
    ap.add_argument("--set", default="all", help="all, float (no quantized models), none, or names with commas")
    ap.add_argument("--starts", type=int, default=1, help="fresh processes of each state, for each model")
    ap.add_argument("--rounds", type=int, default=9, help="blocks of each state in a start")
    ap.add_argument("--again", type=int, default=3, help="further starts of what is below the bar")
    ap.add_argument("--bar", type=float, default=0.96)
    ap.add_argument("--by", choices=("median", "minimum"), default="median", help="what a start counts by")
    ap.add_argument("--ahead", action="store_true", help="time under the real-time scheduler, which root may use")
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--budget", type=float, default=0.2, help="seconds of a block")
    ap.add_argument("--no-small", action="store_true", help="models alone: no expressions, imports, cached compiles")
    ap.add_argument("--json", type=Path, help="write everything here, after each row")
    ap.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    return ap.parse_args()


def start(a: argparse.Namespace, checkout: Path, cache: Path, words: Sequence[str]) -> subprocess.Popen[str]:
    """A process of one state. `cache`: its folder of compiled kernels."""
    env = {**os.environ, "PYTHONPATH": str(checkout.resolve() / ".types"), "DNNC_CACHE_DIR": str(cache)}
    options = ["--models", str(a.models), "--threads", str(a.threads), "--budget", str(a.budget)]
    command = [sys.executable, __file__, str(a.before), str(a.after), *options, "--child", *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)


def answer(p: subprocess.Popen[str], ask: bool = True) -> Any:
    """The next line of a process, which is asked for a block first."""
    assert p.stdin is not None and p.stdout is not None
    if ask:
        p.stdin.write("\n")
        p.stdin.flush()
    line = p.stdout.readline()
    if not line:
        raise RuntimeError(f"a process ended with status {p.wait()}")
    return json.loads(line)


def put_ahead(pids: Sequence[int]) -> None:
    """All threads of these processes run as soon as they can, whatever else wants the cores."""
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setscheduler(int(task.name), os.SCHED_RR, os.sched_param(1))


def rounds(a: argparse.Namespace, caches: Sequence[Path], words: Sequence[str]) -> list[list[list[float]]]:
    """[round][state][call] seconds, of one process of each state."""
    processes = [start(a, c, cache, words) for c, cache in zip((a.before, a.after), caches)]
    try:
        for p in processes:
            answer(p, ask=False)
        if a.ahead:
            put_ahead([p.pid for p in processes])
        times = []
        for k in range(a.rounds):
            found = {s: answer(processes[s]) for s in ((0, 1) if k % 2 else (1, 0))}
            times.append([found[0], found[1]])
        return times
    finally:
        for p in processes:
            p.kill()
            p.communicate()


def alone(a: argparse.Namespace, caches: Sequence[Path], word: str) -> list[list[list[float]]]:
    """As `rounds`, of processes that measure once: each state's first fills its cache and is not counted."""
    times = []
    for k in range(a.rounds + 1):
        found = {}
        for s in (0, 1) if k % 2 else (1, 0):
            p = start(a, (a.before, a.after)[s], caches[s], ["once", word])
            found[s] = json.loads(p.communicate()[0])
        times.append([[found[0]], [found[1]]])
    return times[1:]


def compare(a: argparse.Namespace, caches: Sequence[Path], words: Sequence[str], bar: float) -> Row:
    """The row of a call: medians and minima of both states, a ratio for each start."""
    from dnnc.tools.timing import percentiles, ratios

    watch = Neighbours()
    row: Row = {"name": " ".join(words), "median": [], "minimum": [], "ranges": []}
    every: list[list[list[float]]] = []
    count = a.starts
    while len(row["median"]) < count:
        times = alone(a, caches, words[1]) if words[0] == "once" else rounds(a, caches, words)
        every += times
        each = ratios(times, 1, 0)
        row["median"].append(float(np.median(each)))
        row["ranges"].append([min(each), max(each)])
        row["minimum"].append(percentiles(times, 0)["min"] / percentiles(times, 1)["min"])
        if len(row["median"]) == a.starts and float(np.median(row[a.by])) < bar:
            count += a.again
    row |= {"ratio": float(np.median(row[a.by])), "bar": bar, "cores": watch.cores(), "load": os.getloadavg()[0]}
    return row | {"before": percentiles(every, 0), "after": percentiles(every, 1)}


def line(r: Row) -> str:
    if "failed" in r:
        return f"| {r['name']} | {r['failed']} |"
    times = [f"{r['before'][q]:.4g}, {r['after'][q]:.4g}" for q in ("min", "p50")]
    by = [", ".join(f"{x:.3f}" for x in r[q]) for q in ("minimum", "median")]
    low, high = min(x for x, _ in r["ranges"]), max(x for _, x in r["ranges"])
    return f"| {r['name']} | {' | '.join(times)} | {' | '.join(by)} | {low:.2f}-{high:.2f} |"


def calls(a: argparse.Namespace) -> list[tuple[list[str], float]]:
    """(what is called, its bar)."""
    rows = zoo.read_manifest(a.models)
    chosen = {
        "all": list(rows),
        "float": [n for n, r in rows.items() if not zoo.is_quantized(r)],
        "none": [],
    }.get(a.set, a.set.split(","))
    small = [] if a.no_small else [["bound", "mlp_mnist"]] if "mlp_mnist" in rows else []
    if not a.no_small:
        small += [["expression", op, str(n)] for op in ("jit", "add", "exp", "sum") for n in (SMALL, LARGE)]
        small += [["once", "import"]] + ([["once", "compile"]] if CACHED in rows else [])
    return [(["model", n], EXPRESSIONS if n == "mlp_mnist" else a.bar) for n in chosen] + [
        (words, EXPRESSIONS) for words in small
    ]


def main() -> int:
    a = arguments()
    if a.child:
        if a.child[0] == "once":
            once(a.child[1:], a.models, a.threads)
        else:
            serve(a.child, a.models, a.threads, a.budget)
        return 0
    for checkout in (a.before, a.after):
        subprocess.run(["make", "-s", ".types"], cwd=checkout, check=True)
    heads = ["call", "shortest ms", "median ms", "ratio of minima", "ratio of medians", "of rounds"]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    done: list[Row] = []
    for words, bar in calls(a):
        with tempfile.TemporaryDirectory() as before, tempfile.TemporaryDirectory() as after:
            try:
                done.append(compare(a, (Path(before), Path(after)), words, bar))
            except (RuntimeError, ValueError) as e:
                done.append({"name": " ".join(words), "failed": str(e)})
        print(line(done[-1]), flush=True)
        if a.json:
            a.json.write_text(json.dumps(done, indent=1))
    models = [r["ratio"] for r in done if r["name"].startswith("model ") and "ratio" in r]
    mean = geometric_mean(models) if models else 1.0
    below = [r["name"] for r in done if "failed" in r or r["ratio"] < r["bar"]]
    print(f"\n{len(models)} models, geometric mean {mean:.3f}, lowest {min(models, default=1):.3f}")
    print(f"below their bar, or failed: {', '.join(below) or 'none'}")
    return int(bool(below) or mean < MEAN)


if __name__ == "__main__":
    sys.exit(main())
