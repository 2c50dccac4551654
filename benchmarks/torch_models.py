"""Models of PyTorch through `torch.compile(backend="dnnc")`, against Inductor and eager PyTorch; or, with --export,
through torch.export.

    python benchmarks/torch_models.py                                          # all models on 2 threads
    python benchmarks/torch_models.py --models resnet50,bert_base --seconds 10
    python benchmarks/torch_models.py --export --target cuda --precision float16

Every result is compared with eager PyTorch in float32 first. Blocks of calls of all engines take turns, with pauses
between them.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import Neighbours, geometric_mean
from torch.utils import _pytree as pytree
from torch_nets import Net, nets, seeded

import dnnc
from dnnc.tools.timing import alternate, percentiles, ratios

BOUND = {
    None: 2e-4,
    "float32": 2e-4,
    "tf32": 5e-3,
    "float16": 3e-2,
    "bfloat16": 2e-1,
}  # of the largest element of each result


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    torch._dynamo.config.allow_rnn = True  # else torch.compile runs recurrent layers eagerly, whatever the backend
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    wanted = args.models.split(",") if args.models else None
    rows = []
    for net in nets():
        if wanted is None or net.name in wanted:
            rows.append(measure(net, args))
            print(line(rows[-1]), flush=True)
    for peer in rows[0]["ratios"] if rows else ():
        print(
            f"{peer} / dnnc, geometric mean of {len(rows)} models: "
            f"{geometric_mean([r['ratios'][peer] for r in rows]):.3f}"
        )
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", help="names, with commas between; all by default")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--seconds", type=float, default=20, help="for each model")
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--export", action="store_true", help="through torch.export in place of torch.compile")
    p.add_argument("--target", default="llvm")
    p.add_argument("--precision", help="of dnnc's program, and of what it is compared with in speed")
    p.add_argument("--no-inductor", action="store_true")
    p.add_argument("--json", help="file for the figures")
    return p.parse_args()


def measure(net: Net, args: argparse.Namespace) -> dict[str, Any]:
    """Times and errors of one model."""
    module, inputs = seeded(net)
    wanted = results(module(*inputs))
    device = "cuda" if args.target.startswith("cuda") else "cpu"
    inputs = tuple(x.to(device) for x in inputs)
    start = time.perf_counter()
    ours = exported(module, inputs, args) if args.export else compiled(module.to(device), inputs, "dnnc", args)
    seconds = time.perf_counter() - start
    error = furthest(results(ours()), wanted)
    if not error < BOUND[args.precision]:
        raise SystemExit(
            f"{net.name}: dnnc is off by {error:.2g} of the largest element; allowed are {BOUND[args.precision]:.0e}"
        )
    half = getattr(torch, args.precision) if args.precision in ("float16", "bfloat16") else torch.float32
    module, given = module.to(device, half), tuple(x.to(half) if x.is_floating_point() else x for x in inputs)
    engines: dict[str, Callable[[], Any]] = {"dnnc": ours, "eager": lambda: module(*given)}
    if not args.no_inductor:
        engines["inductor"] = compiled(module, given, "inductor", args)
    if device == "cuda":
        engines = {n: waited(f) for n, f in engines.items()}
    neighbours = Neighbours()
    times = alternate(list(engines.values()), args.repeats, args.seconds, lambda _: None)
    own = {n: percentiles(times, k)["p50"] for k, n in enumerate(engines)}
    found = {n: float(np.median(ratios(times, 0, k))) for k, n in enumerate(engines) if k}
    return {
        "name": net.name,
        "error": error,
        "compile_s": seconds,
        "ms": own,
        "ratios": found,
        "other_cores": neighbours.cores(),
    }


def compiled(
    module: torch.nn.Module, inputs: Sequence[torch.Tensor], backend: str, args: argparse.Namespace
) -> Callable[[], Any]:
    torch._dynamo.reset()
    options = {"precision": args.precision} if backend == "dnnc" and args.precision else None
    f = torch.compile(module, backend=backend, options=options)
    f(*inputs)
    return lambda: f(*inputs)


def exported(module: torch.nn.Module, inputs: Sequence[torch.Tensor], args: argparse.Namespace) -> Callable[[], Any]:
    program = torch.export.export(module.cpu(), tuple(x.cpu() for x in inputs))
    f = dnnc.compile(
        program,
        target=args.target,
        precision=args.precision,
        **({"threads": args.threads} if args.target == "llvm" else {}),
    )
    return lambda: f(*inputs)


def waited(f: Callable[[], Any]) -> Callable[[], Any]:
    def call() -> Any:
        made = f()
        torch.cuda.synchronize()
        return made

    return call


def results(made: Any) -> list[np.ndarray[Any, Any]]:
    return [t.float().cpu().numpy() if t.is_floating_point() else t.cpu().numpy() for t in pytree.tree_leaves(made)]


def furthest(made: Sequence[Any], wanted: Sequence[Any]) -> float:
    """The largest difference over the result's largest element; infinite if shapes or counts differ."""
    if [a.shape for a in made] != [b.shape for b in wanted]:
        return float("inf")
    found = [float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)) if b.size else 0.0 for a, b in zip(made, wanted)]
    return float("inf") if any(np.isnan(x) for x in found) else max(found, default=0.0)


def line(row: dict[str, Any]) -> str:
    times = "  ".join(f"{n} {t:.3g}" for n, t in row["ms"].items())
    ahead = "  ".join(f"{n} / dnnc {r:.2f}" for n, r in row["ratios"].items())
    return f"{row['name']:20} {times} ms   {ahead}   error {row['error']:.1e}, first call {row['compile_s']:.0f} s"


if __name__ == "__main__":
    main()
