"""Training steps of PyTorch models through `torch.compile(backend="dnnc")`, against Inductor and eager PyTorch.

    python benchmarks/torch_training.py                                          # all models, batches of 4, 2 threads
    python benchmarks/torch_training.py --models resnet50,bert_base --batch 16 --seconds 30
    python benchmarks/torch_training.py --check                                  # right or wrong, no times

A step is forward, backward and SGD. First each model's loss, gradients of all parameters and updated buffers are
compared with eager PyTorch in float64: in float64 closely, in float32 as far as kinks allow, on whose other side a
rounding error brings single activations. Then blocks of steps of all engines take turns, with pauses between them.
Dropout is off, unless `--dropout` says otherwise for times.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from timing import Neighbours, geometric_mean
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch_nets import Net, nets, seeded

from dnnc.tools.timing import alternate, percentiles, ratios

EXACT = 1e-6  # in float64, of a tensor's norm: PyTorch's own hardsigmoid has a constant of float32
TIMES, TYPICAL, MOST = 4, 1e-3, 0.1  # in float32: the median over tensors, and the largest error
RATE = 1e-4


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    torch._dynamo.config.allow_rnn = True
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    wanted = args.models.split(",") if args.models else None
    rows = []
    for net in nets():
        if wanted is None or net.name in wanted:
            rows.append(measure(net, args))
            print(line(rows[-1]), flush=True)
    for peer in rows[0]["ratios"] if rows else ():
        mean = geometric_mean([r["ratios"][peer] for r in rows])
        print(f"{peer} / dnnc, geometric mean of {len(rows)} models: {mean:.3f}")
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", help="names, with commas between; all by default")
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--seconds", type=float, default=20, help="for each model")
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--device", default="cpu", help="cpu or cuda")
    p.add_argument("--dropout", action="store_true", help="time with dropout")
    p.add_argument("--check", action="store_true", help="compare results, and take no times")
    p.add_argument("--no-inductor", action="store_true")
    p.add_argument("--json", help="file for the figures")
    return p.parse_args()


class Trained:
    """A copy of a module with a loss: the squared distance of its results from targets.

    Args:
        module: copied.
        inputs: example arguments.
        backend: of torch.compile; None for eager PyTorch.
        dtype: of parameters and float inputs.
        device: where it runs.
    """

    def __init__(
        self, module: nn.Module, inputs: Sequence[Tensor], backend: str | None, dtype: torch.dtype, device: str
    ) -> None:
        self.module = copy.deepcopy(module).to(device, dtype)
        self.inputs = [x.to(device, dtype) if x.is_floating_point() else x.to(device) for x in inputs]
        state = {k: v.clone() for k, v in self.module.state_dict().items()}
        with torch.no_grad():
            results = floats(self.module(*self.inputs))
        self.module.load_state_dict(state)  # without what running it has changed
        g = torch.Generator().manual_seed(1)
        drawn = [torch.randn(t.shape, generator=g, dtype=torch.float64) for t in results]
        self.targets = [t.to(device, dtype) for t in drawn]
        self.forward = self.loss if backend is None else torch.compile(self.loss, backend=backend)
        self.optimizer = torch.optim.SGD(self.module.parameters(), RATE)

    def loss(self, *inputs: Tensor) -> Tensor:
        made = [F.mse_loss(t, want) for t, want in zip(floats(self.module(*inputs)), self.targets)]
        return torch.stack(made).sum()

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.forward(*self.inputs)
        loss.backward()
        self.optimizer.step()
        if loss.is_cuda:
            torch.cuda.synchronize()
        return loss

    def changes(self) -> dict[str, Tensor]:
        """What one step makes: the loss, gradients, and float buffers."""
        found = {"loss": self.step().detach().double().cpu()}
        found |= {n: p.grad.double().cpu() for n, p in self.module.named_parameters() if p.grad is not None}
        return found | {n: b.double().cpu() for n, b in self.module.named_buffers() if b.is_floating_point()}


def floats(made: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(made) if isinstance(t, Tensor) and t.is_floating_point()]


def measure(net: Net, args: argparse.Namespace) -> dict[str, Any]:
    """Times and errors of one model."""
    module, _ = seeded(net)
    torch.manual_seed(2)
    inputs = [joined(parts) for parts in zip(*(net.inputs() for _ in range(args.batch)))]
    module.train()
    set_dropout(module, False)
    seconds, off = errors(module, inputs, args.device)
    row = {"name": net.name, "batch": args.batch, "compile_s": seconds, **off, "ms": {}, "ratios": {}}
    if args.check:
        return row
    set_dropout(module, args.dropout)
    backends = {"dnnc": "dnnc", "eager": None, **({} if args.no_inductor else {"inductor": "inductor"})}
    torch._dynamo.reset()
    engines = {n: Trained(module, inputs, b, torch.float32, args.device) for n, b in backends.items()}
    for engine in engines.values():
        engine.step()
    neighbours = Neighbours()
    times = alternate([e.step for e in engines.values()], args.repeats, args.seconds, lambda _: None)
    return {
        **row,
        "ms": {n: percentiles(times, k)["p50"] for k, n in enumerate(engines)},
        "ratios": {n: float(np.median(ratios(times, 0, k))) for k, n in enumerate(engines) if k},
        "other_cores": neighbours.cores(),
    }


def joined(parts: Sequence[Tensor]) -> Tensor:
    """One batch: examples have size 1 along its axis."""
    return torch.cat(list(parts), next(k for k, n in enumerate(parts[0].shape) if n == 1))


def set_dropout(module: nn.Module, on: bool) -> None:
    for m in module.modules():
        if isinstance(m, (nn.Dropout, nn.Dropout1d, nn.Dropout2d)):
            m.train(on)


def errors(module: nn.Module, inputs: Sequence[Tensor], device: str) -> tuple[float, dict[str, float]]:
    """Seconds of the first step, and the largest errors of dnnc and of eager PyTorch; SystemExit where dnnc is off."""
    torch._dynamo.reset()
    exact = Trained(module, inputs, None, torch.float64, "cpu").changes()
    peer = Trained(module, inputs, None, torch.float32, device).changes()
    ours = Trained(module, inputs, "dnnc", torch.float32, device)
    start = time.perf_counter()
    made = ours.changes()
    seconds = time.perf_counter() - start
    torch._dynamo.reset()
    twice = Trained(module, inputs, "dnnc", torch.float64, device).changes()
    largest = max(float(exact[n].norm()) for n, _ in module.named_parameters() if n in exact)
    found = {}
    for name, results in (("eager", peer), ("dnnc", made), ("float64", twice)):
        assert results.keys() == exact.keys(), f"{name}: other gradients than eager PyTorch's"
        found[name] = {n: distance(results[n], v, largest) for n, v in exact.items()}
    middle = {name: float(np.median(list(off.values()))) for name, off in found.items()}
    worst = {name: max(off, key=lambda n: (np.isnan(off[n]), off[n])) for name, off in found.items()}
    most = {name: found[name][n] for name, n in worst.items()}
    if not most["float64"] <= EXACT:
        raise SystemExit(f"{type(module).__name__}: {worst['float64']} is off by {most['float64']:.1e} in float64")
    if not (
        middle["dnnc"] <= max(TIMES * middle["eager"], TYPICAL) and most["dnnc"] <= max(TIMES * most["eager"], MOST)
    ):
        raise SystemExit(
            f"{type(module).__name__}: {worst['dnnc']} is off by {most['dnnc']:.1e} in float32, the median by "
            f"{middle['dnnc']:.1e}, where eager PyTorch is by {middle['eager']:.1e}"
        )
    return seconds, {"error": middle["dnnc"], "eager_error": middle["eager"], "float64_error": most["float64"]}


def distance(made: Tensor, exact: Tensor, largest: float) -> float:
    """The norm of the difference over the norm, where that is no rounding error of the largest gradient."""
    return float((made - exact).norm() / max(float(exact.norm()), 1e-6 * largest, 1e-30))


def line(row: dict[str, Any]) -> str:
    times = "  ".join(f"{n} {t:.4g}" for n, t in row["ms"].items())
    ahead = "  ".join(f"{n} / dnnc {r:.2f}" for n, r in row["ratios"].items())
    timed = f"{times} ms   {ahead}   " if times else ""
    return (
        f"{row['name']:20} {timed}error {row['error']:.1e} (eager {row['eager_error']:.1e}), "
        f"float64 {row['float64_error']:.1e}, first step {row['compile_s']:.0f} s"
    )


if __name__ == "__main__":
    main()
