"""Gradients of the float models of the zoo, by all float weights and inputs: right or not, and what they cost.

    python benchmarks/zoo_gradients.py DIR [--only NAME,NAME] [--target llvm] [--torch REFERENCES] [--json OUT]
    python benchmarks/zoo_gradients.py DIR --write-torch REFERENCES     # where torch and what builds the zoo are there

DIR is what `benchmarks/zoo build` writes, with full or with seeded weights. The loss is the sum of the outputs, each
element weighed by a random number of a fixed seed. For each model, in a process of its own:

- the gradients that dnnc compiles, in float32, against the float64 interpreter's, by the bounds of `dnnc verify`;
- the interpreter's gradients against central differences in float64, along random directions over all variables;
- against PyTorch's autograd in float64, where the model is an architecture of benchmarks/zoo: inputs in full, weights
  by projections on random vectors. Weights are matched by their contents, so the model is exported with weights that
  all differ, into REFERENCES: an exporter merges equal ones. Those that it has folded into others have no match.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE)

import zoo  # noqa: E402

Array = Any
PROJECTIONS = 3
SAME = 1e-6  # of the norm: how far float64 gradients may be from PyTorch's, where the weights are the same
# of the largest norm: a gradient below is made of rounding errors, as that of an attention's key bias, which is zero
NOTHING = {"float64": 1e-9, "float32": 1e-5}


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("dir", type=Path)
    ap.add_argument("--only", default="", help="names, separated by commas; default: all models of floats")
    ap.add_argument("--skip", default="", help="names, separated by commas")
    ap.add_argument("--target", default="llvm")
    ap.add_argument("--directions", type=int, default=8)
    ap.add_argument("--no-differences", action="store_true", help="leave out differences")
    ap.add_argument("--torch", type=Path, help="a folder that --write-torch has written")
    ap.add_argument("--write-torch", type=Path, help="write PyTorch's gradients into this folder")
    ap.add_argument("--limit", type=float, default=1800, help="seconds a model may take")
    ap.add_argument("--json", type=Path, help="append a line for each model")
    ap.add_argument("--here", action="store_true", help="in this process, one model, its row to standard output")
    a = ap.parse_args()
    rows = {n: r for n, r in zoo.read_manifest(a.dir).items() if not zoo.is_quantized(r)}
    unknown = sorted({*a.only.split(","), *a.skip.split(",")} - {""} - set(rows))
    if unknown:
        ap.error(f"no float model {', '.join(unknown)} in {a.dir}")
    names = [n for n in (a.only.split(",") if a.only else rows) if n not in a.skip.split(",")]
    if a.here:
        print(json.dumps(studied(rows[names[0]], a)))
        return 0
    if a.write_torch:
        a.write_torch.mkdir(parents=True, exist_ok=True)
        for n in names:
            if rows[n]["kind"] == "torch" and not (a.write_torch / f"{n}.npz").exists():
                written(rows[n], a.write_torch)
        return 0
    found = []
    for n in names:
        found.append(apart(n, a))
        print(line(found[-1]), flush=True)
        if a.json:
            with a.json.open("a") as f:
                f.write(json.dumps(found[-1]) + "\n")
    right = sum(r["right"] for r in found)
    print(f"{right} of {len(found)} models have right gradients on {a.target}")
    return int(right < len(found))


def apart(name: str, a: argparse.Namespace) -> dict[str, Any]:
    """One model in a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--here", "--only", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=a.limit)
    except subprocess.TimeoutExpired:
        return {"name": name, "right": False, "why": f"takes longer than {a.limit:g} s"}
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        return {"name": name, "right": False, "why": why}
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return row


def line(r: dict[str, Any]) -> str:
    """A row for people."""
    if "seconds" not in r:
        return f"{r['name']:20} WRONG  {r['why']}"
    s = r["seconds"]
    peers = f"torch {r['torch']:.1e}/{r['matched']} of {r['weights']}  " if "torch" in r else ""
    off = f"differences {r['differences']:.1e} (vary {r['trust']:.1e})  " if "differences" in r else ""
    return (
        f"{r['name']:20} {'right' if r['right'] else 'WRONG'}  {peers}{off}compiled {r['compiled']:.1e}  "
        f"kernels {r['kernels']} for {r['forward_kernels']}  compile {s['compile']:.1f} s  "
        f"call {s['call'] * 1e3:.1f} ms for {s['forward'] * 1e3:.1f}  {r['megabytes']} MB  {r['why']}"
    )


# --- dnnc -------------------------------------------------------------------------------------------------------------


def studied(row: dict[str, Any], a: argparse.Namespace) -> dict[str, Any]:
    """Compile a model's gradient and compare it with what else says what it is."""
    import dnnc
    from dnnc.bound import of_graph
    from dnnc.gradients.check import CHANGES, ROUNDED, Group, Loss, Point, directional, unexplained
    from dnnc.ir.shapes import bind_dims, specialise
    from dnnc.tools.accuracy import differences

    feeds, seconds = zoo.make_inputs(row), {}
    start = time.perf_counter()
    distinct = a.torch is not None and (a.torch / f"{row['name']}.onnx").exists()
    model = read(zoo.load(a.torch if distinct else a.dir, row), feeds)
    outputs = [n for n, v in model.outputs.items() if v.type.dtype.is_float]
    names = model.differentiable([model.outputs[n] for n in outputs], inputs=True)
    given = [np.asarray(feeds[n]) for n, v in model.sources.items() if v in model.graph.inputs]
    dims = {v.name: n for v, n in bind_dims(model.graph, [x.shape for x in given]).items()}
    model = fixed(model, specialise(model.graph, dims))
    gradient = model.gradient(names, outputs, False, "input")
    seconds["read"] = time.perf_counter() - start
    start = time.perf_counter()
    f = dnnc.compile(gradient, target=a.target)
    seconds["compile"] = time.perf_counter() - start
    weights = cotangents([model.outputs[n].type for n in outputs])
    got, seconds["call"] = timed(f, [*given, *weights])
    forward = dnnc.compile(model.graph, target=a.target)
    _, seconds["forward"] = timed(forward, given)
    start = time.perf_counter()
    held = [n for n in names if n in model.weights]
    whole, bound = of_graph(model.graph, [model.sources[n].name for n in held])
    kept = {model.sources[n].name for n in names}
    loss = Loss(whole, weights, [k for k, v in enumerate(whole.inputs) if v.name in kept])
    point = Point.at(loss, [*given, *bound.values()])
    seconds["interpret"] = time.perf_counter() - start
    why, found = [], {"name": row["name"], "weights": len(held)}
    want = list(point.gradients.values())
    found["compiled"] = compiled_error(got, want)
    wrong = differences(gradient, [*given, *weights], got, want)
    by_variable = dict(zip(loss.variables, got))
    reasons = unexplained(point, by_variable, {loss.variables[k]: f"{names[k]}: {w}" for k, w in wrong}, 0)
    why += [f"compiled {reason}" for reason in list(reasons.values())[:2]]
    if not a.no_differences:
        start = time.perf_counter()
        every = Group("all", tuple(loss.variables), sum(w.size for w in want))
        worst = directional(point, [every], a.directions, 0)[0].worst
        found |= {"differences": worst.error, "trust": worst.trust, "kind": worst.kind}
        why += [f"differences: {worst.kind}"] if worst.kind in ("wrong", "unsure") else []
        seconds["differences"] = time.perf_counter() - start
    if a.torch and (a.torch / f"{row['name']}.npz").exists():
        arrays = dict(zip(names, [*(x for n, x in feeds.items() if n in names), *bound.values()]))
        errors = against_torch(a.torch / f"{row['name']}.npz", dict(zip(names, want)), arrays)
        found["matched"] = sum(n in held for n in errors)
        found["torch"] = max(errors.values())
        near = (
            point.moved(np.random.default_rng(0), ROUNDED)
            if found["torch"] > SAME and found["matched"] < len(held)
            else None
        )
        for n, k in zip(names, loss.variables):
            # the module's weights before folding are others: as far as rounding of weights changes the gradient
            change = 0.0 if near is None else relative(near.gradients[k] - point.gradients[k], point.gradients[k])
            if errors.get(n, 0.0) > SAME + CHANGES * change:
                why.append(f"PyTorch: {n} is off by {errors[n]:.1e}, and rounding changes it by {change:.1e}")
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    counts = {"kernels": kernels(f), "forward_kernels": kernels(forward)}
    return {**found, **counts, "seconds": seconds, "megabytes": megabytes, "right": not why, "why": "; ".join(why)}


def read(model: Any, feeds: dict[str, Array]) -> Any:
    """The model by name; contents of inputs on which shapes depend are read."""
    from dnnc.frontends.onnx import NeedsValues
    from dnnc.gradients.models import read_onnx

    values: dict[str, Array] = {}
    while True:
        try:
            return read_onnx(model, True, shapes={n: x.shape for n, x in feeds.items()}, values=values)
        except NeedsValues as e:
            if not set(e.inputs) - set(values):
                raise
            values |= {n: feeds[n] for n in e.inputs}


def fixed(model: Any, graph: Any) -> Any:
    """The model with another form of its graph, whose inputs, constants and outputs have the same order."""
    from dataclasses import replace

    pairs = zip((*model.graph.inputs, *model.graph.constants), (*graph.inputs, *graph.constants))
    there = dict(pairs)
    numbers = {n: next(k for k, o in enumerate(model.graph.outputs) if o is v) for n, v in model.outputs.items()}
    sources = {n: there[v] for n, v in model.sources.items()}
    return replace(model, graph=graph, sources=sources, outputs={n: graph.outputs[k] for n, k in numbers.items()})


def cotangents(types: Any) -> list[Array]:
    """The weights of the outputs, the same for the same number of the output."""
    draws = (np.random.default_rng(1000 + k).standard_normal(t.shape) for k, t in enumerate(types))
    return [d.astype(t.dtype.numpy) for d, t in zip(draws, types)]


def timed(f: Any, arrays: list[Array]) -> tuple[list[Array], float]:
    """Results, and the least seconds of a call."""
    result, best = f(*arrays), np.inf
    for _ in range(3):
        start = time.perf_counter()
        f(*arrays)
        best = min(best, time.perf_counter() - start)
    return list(result) if isinstance(result, tuple) else [result], best


def kernels(f: Any) -> int:
    """The number of kernels that a call launches."""
    return sum(len(p.kernels) for p in f.report.programs)


def compiled_error(got: list[Array], want: list[Array]) -> float:
    """The largest error of a gradient over its norm."""
    worst, norms = 0.0, [float(np.linalg.norm(b.reshape(-1))) for b in want]
    for a, b, norm in zip(got, want, norms):
        with np.errstate(all="ignore"):
            off = float(np.linalg.norm(np.asarray(a, np.float64).reshape(-1) - b.reshape(-1)))
        worst = max(worst, off / (max(norm, NOTHING["float32"] * max(norms)) or 1.0))
    return worst


# --- PyTorch ----------------------------------------------------------------------------------------------------------


def written(row: dict[str, Any], folder: Path) -> None:
    """Write a module of benchmarks/zoo as ONNX, and its gradients: of inputs in full, of parameters by projections.

    Parameters of one value, such as biases of zeros, get noise, so that all weights differ.
    """
    import torch
    from zoo.build import export, module
    from zoo.entries import ENTRIES

    start = time.perf_counter()
    net, names = module(row["name"])
    with torch.no_grad():
        for k, p in enumerate(net.parameters()):
            if p.numel() > 1 and bool((p == p.reshape(-1)[0]).all()):
                scale = 0.1 * float(p.reshape(-1)[0].abs()) or 0.02
                p += scale * torch.randn(p.shape, generator=torch.Generator().manual_seed(k))
    export(ENTRIES[row["name"]], folder / f"{row['name']}.onnx", net)
    digests = {n: digest(p.detach().numpy()) for n, p in net.named_parameters()}
    turned = {n: digest(p.detach().numpy().T) for n, p in net.named_parameters()}
    net = net.double()
    given = [torch.from_numpy(x) for n, x in zoo.make_inputs(row).items() if n in names]
    given = [x.double().requires_grad_() if x.is_floating_point() else x for x in given]
    made = net(*given)
    made = [y for y in (made if isinstance(made, tuple) else (made,)) if y.is_floating_point()]
    weights = [np.random.default_rng(1000 + k).standard_normal(tuple(y.shape)) for k, y in enumerate(made)]
    sum((y * torch.from_numpy(w.astype(np.float32))).sum() for y, w in zip(made, weights)).backward()
    out = {f"input:{n}": x.grad.numpy() for n, x in zip(names, given) if x.grad is not None}
    for n, p in net.named_parameters():
        if p.grad is None:
            continue
        g = p.grad.numpy()
        out[f"weight:{digests[n]}"] = projected(g)
        out[f"weight:{turned[n]}"] = projected(g.T)
    np.savez(folder / f"{row['name']}.npz", **out)
    print(f"{row['name']:20} {time.perf_counter() - start:.1f} s", flush=True)


def digest(a: Array) -> str:
    """What tells a weight from others: its shape and contents."""
    return hashlib.sha256(str(a.shape).encode() + np.ascontiguousarray(a, np.float32).tobytes()).hexdigest()[:24]


def projected(g: Array) -> Array:
    """The norm of an array, and what it is along random vectors."""
    flat = np.ascontiguousarray(g, np.float64).reshape(-1)
    rng = np.random.default_rng(7)
    return np.array([np.linalg.norm(flat), *(flat @ rng.standard_normal(flat.size) for _ in range(PROJECTIONS))])


def relative(difference: Array, whole: Array) -> float:
    """The norm of a difference over that of what it is of."""
    return float(np.linalg.norm(difference.reshape(-1)) / (np.linalg.norm(whole.reshape(-1)) or 1.0))


def against_torch(path: Path, gradients: dict[str, Array], arrays: dict[str, Array]) -> dict[str, float]:
    """The differences to PyTorch's gradients, over their norms, of inputs and of weights that PyTorch has.

    A weight that the model reads as it is and transposed, such as that of a tied embedding, may be two in the ONNX
    model: PyTorch's gradient is the sum of theirs.
    """
    reference = np.load(path)
    errors: dict[str, float] = {}
    least = NOTHING["float64"] * max(float(np.linalg.norm(g.reshape(-1))) for g in gradients.values())
    weights = {digest(arrays[n]): n for n in gradients if f"input:{n}" not in reference}
    for n, g in gradients.items():
        if f"input:{n}" in reference:
            want = reference[f"input:{n}"]
            errors[n] = float(np.linalg.norm(g - want) / (max(np.linalg.norm(want), least) or 1.0))
        elif (key := f"weight:{digest(arrays[n])}") in reference:
            turned = weights.get(digest(arrays[n].T), n)
            own, want = projected(g if turned == n else g + gradients[turned].T), reference[key]
            errors[n] = float(np.abs(want - own).max() / (max(want[0], least) or 1.0))
    return errors


if __name__ == "__main__":
    sys.exit(main())
