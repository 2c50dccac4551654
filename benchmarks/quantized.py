"""Quantized models on the CPU: dnnc, ONNX Runtime and OpenVINO run the same file; beside them our float32.

    python benchmarks/quantized.py build DIR [--only NAME,NAME]
    python benchmarks/quantized.py time DIR [--zoo DIR] [--only ...] [--json ROWS] [--cache DIR] [--threads 2]
        [--repeats 3] [--budget 12]
    python benchmarks/quantized.py table ROWS

`build` exports architectures of the zoo with seeded weights and quantizes them by ONNX Runtime's tool: u8 activations
calibrated with seeded inputs, i8 weights per output channel, QuantizeLinear and DequantizeLinear around all operators.
`--zoo`: a folder of `python benchmarks/zoo build`, whose quantized models are timed as well. Engines are timed in
turns; a ratio is one of medians over all calls, the peer's time over ours. `--json` keeps the rows of other models, so
that models can be timed one by one.

Errors are those against ONNX Runtime without graph optimizations, which evaluates the file operator by operator. What
evaluations of it that differ by roundings alone do to each other stands beside them: behind a code that falls on the
other side of a tie no two engines agree.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import zoo
from cpu import machine
from engines import PEERS, Engine, Task
from judge import largest_error, off_by_one_unit, shaken, share_within_a_step
from onnx import ModelProto
from timing import Neighbours, geometric_mean

from dnnc.tools.peers import several
from dnnc.tools.timing import alternate

Array = np.ndarray[Any, Any]
Row = dict[str, Any]
NETS = ("resnet50", "mobilenet_v3_large", "bert_base", "vit_small_patch16", "yolo_like")
SUFFIX = "_qdq"


# --- models -----------------------------------------------------------------------------------------------------------


def build(folder: Path, names: Sequence[str]) -> None:
    """Write `NAME.onnx`, `NAME_qdq.onnx` and their rows of the manifest."""
    from zoo.build import export, inputs_row, quantize
    from zoo.entries import ENTRIES

    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / "manifest.json"
    rows = zoo.read_manifest(folder) if manifest.exists() else {}
    for name in names:
        entry = ENTRIES[name]
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "model.onnx"
            export(entry, path)
            onnx.save(onnx.load(str(path)), str(folder / f"{name}.onnx"))
            of_bytes = quantize(replace(entry, source=replace(entry.source, quantize="qdq")), path)  # type: ignore[arg-type]
            onnx.save(onnx.load(str(of_bytes)), str(folder / f"{name}{SUFFIX}.onnx"))
        for n in (name, f"{name}{SUFFIX}"):
            rows[n] = inputs_row(entry) | {"name": n}
        manifest.write_text(json.dumps({"models": list(rows.values())}, indent=1))
        print(f"built {name}", flush=True)


# --- engines ----------------------------------------------------------------------------------------------------------


def ours(name: str, task: Task) -> Engine:
    import dnnc

    f = dnnc.compile(task.model, cache=task.cache, threads=task.threads)
    arrays = [task.inputs[i.name] for i in f.inputs]
    f(*arrays)  # a model with symbolic sizes compiles here
    return Engine(name, lambda: f(*arrays), several)


def reference(model: ModelProto, inputs: Mapping[str, Array]) -> list[Array]:
    """The outputs of ONNX Runtime without graph optimizations."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return several(session.run(None, dict(inputs)))


def measure(folder: Path, name: str, a: argparse.Namespace) -> Row:
    """Errors and times of all engines at one model."""
    rows = zoo.read_manifest(folder)
    inputs = zoo.make_inputs(rows[name])
    task = Task(name, zoo.load(folder, rows[name]), inputs, a.threads, a.cache)
    floats = rows.get(name.removesuffix(SUFFIX)) if name.endswith(SUFFIX) else None
    makers = {"dnnc": partial(ours, "dnnc")} | {p: PEERS[p] for p in ("onnxruntime", "openvino")}
    engines: list[Engine] = []
    out: Row = {"name": name, "failures": {}, "errors": {}, "ms": {}}
    for engine, make in makers.items():
        try:
            engines.append(make(task))
            engines[-1].call()
        except Exception as e:  # an engine that fails at a model is a result
            out["failures"][engine] = f"{type(e).__name__}: {e}"[:200]
    out["errors"] = errors(task.model, inputs, engines)
    if floats is not None:
        float_task = replace(task, model=zoo.load(folder, floats))
        engines.append(ours("float32", float_task))
        out["agreement"] = agreement(several(engines[0].call()), several(engines[-1].call()))
        del float_task
    del task
    gc.collect()
    watch = Neighbours()
    times = alternate([e.call for e in engines], a.repeats, a.budget, lambda _: None)
    out["others"] = watch.cores()
    for k, e in enumerate(engines):
        out["ms"][e.name] = float(np.median(np.concatenate([r[k] for r in times]))) * 1e3
    return out


def errors(model: ModelProto, inputs: Mapping[str, Array], engines: Sequence[Engine]) -> dict[str, dict[str, float]]:
    """Of each engine, and of the reference with its weights and inputs off by one unit in the last place."""
    want = reference(model, inputs)
    results = {e.name: [a.copy() for a in e.outputs(e.call())] for e in engines}
    with suppress(Exception):  # floats that are sizes may not be shaken
        results["roundings"] = reference(shaken(model), off_by_one_unit(inputs))
    return {
        name: {
            "largest": largest_error(got, want),
            "share": share_within_a_step(got, want),
            "agreement": agreement(got, want),
        }
        for name, got in results.items()
    }


def agreement(got: Sequence[Array], want: Sequence[Array]) -> float:
    """The share of positions whose largest element along the last axis is the same, in the first output."""
    return float(np.mean(np.argmax(got[0], -1) == np.argmax(want[0], -1)))


# --- tables -----------------------------------------------------------------------------------------------------------

HEAD = (
    "model", "dnnc", "ONNX Runtime", "OpenVINO", "dnnc float32", "ratio to the faster", "int8 over float32",
    "within a step", "arg-max", "largest error", "roundings alone: within a step, largest error",
)  # fmt: skip


def ratio(r: Row) -> float:
    """The time of the faster peer over ours."""
    return float(min(r["ms"][p] for p in ("onnxruntime", "openvino") if p in r["ms"]) / r["ms"]["dnnc"])


def gain(r: Row) -> float | None:
    """Our time in float32 over that in bytes."""
    return float(r["ms"]["float32"] / r["ms"]["dnnc"]) if "float32" in r["ms"] else None


def table(rows: Sequence[Row]) -> str:
    """Markdown; times are milliseconds."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    for r in rows:
        times = [f"{r['ms'][e]:.2f}" if e in r["ms"] else "-" for e in ("dnnc", "onnxruntime", "openvino", "float32")]
        won, own, noise = gain(r), r["errors"]["dnnc"], r["errors"].get("roundings")
        cells = [r["name"], *times, f"{ratio(r):.2f}", "-" if won is None else f"{won:.2f}"]
        cells += [f"{own['share']:.2%}", f"{own['agreement']:.1%}", f"{own['largest']:.1e}"]
        cells += ["-" if noise is None else f"{noise['share']:.2%}, {noise['largest']:.1e}"]
        lines.append("| " + " | ".join(cells) + " |")
    for title, some in (
        ("QDQ models", [r for r in rows if r["name"].removesuffix(SUFFIX) in NETS]),
        ("models of the zoo", [r for r in rows if r["name"].removesuffix(SUFFIX) not in NETS]),
    ):
        if some:
            ratios = [ratio(r) for r in some]
            lines.append(f"\n{title}: geometric mean {geometric_mean(ratios):.2f}, lowest {min(ratios):.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=("build", "time", "table"))
    parser.add_argument("path", type=Path, help="a folder of models, or a file of rows for `table`")
    parser.add_argument("--only", type=lambda text: text.split(","))
    parser.add_argument("--zoo", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cache", type=Path, help="of compiled kernels; a new one by default")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget", type=float, default=12.0, help="seconds of timing for each model")
    a = parser.parse_args()
    if a.job == "build":
        build(a.path, a.only or NETS)
    elif a.job == "table":
        print(table(list(json.loads(a.path.read_text())["models"].values())))
    else:
        time_all(a)


def time_all(a: argparse.Namespace) -> None:
    todo = [(a.path, n) for n in zoo.read_manifest(a.path) if n.endswith(SUFFIX)]
    if a.zoo:
        todo += [(a.zoo, n) for n, row in zoo.read_manifest(a.zoo).items() if zoo.is_quantized(row)]
    a.peers = ("onnxruntime", "openvino")
    done = json.loads(a.json.read_text()) if a.json and a.json.exists() else {"models": {}}
    done["machine"] = machine(argparse.Namespace(**vars(a), check="onnxruntime"))
    with tempfile.TemporaryDirectory() as scratch:
        a.cache = a.cache or Path(scratch)
        for folder, name in todo:
            if a.only and name not in a.only:
                continue
            row = done["models"][name] = measure(folder, name, a)
            print(f"{name}: {row['ms']}, {row['failures'] or 'no failures'}, others {row['others']}", flush=True)
            if a.json:
                a.json.write_text(json.dumps(done, indent=1))
    print(table(list(done["models"].values())))


if __name__ == "__main__":
    main()
