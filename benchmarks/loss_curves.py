"""Loss curves of the examples' nets beside PyTorch's: the same weights, the same batches, the same optimizer.

    python benchmarks/loss_curves.py [--steps 200] [--target llvm|cuda] [--only mlp,gpt] [--dtype float32|float64]

The net and the loss in PyTorch are the example's own text, with its imports changed. The table says how far
the losses are apart at most, relative to PyTorch's: float64 holds 1e-7, float32 1e-3. In float32 the last column says
how far PyTorch's losses are from its own in float64: a net whose training amplifies each rounding error shows there.

Stochastic depth does with the example's own settings: an activation within a rounding error of ReLU's kink changes the
gradient by up to 1e-3, and such differences move others across theirs, until PyTorch's own losses are 0.3 apart.
So its batches are of 4 images, which have few such activations, and its learning rate falls by 5 % a step. The net
still learns, and PyTorch's two curves are within 1e-4 for 8 choices of weights.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

import dnnc
from dnnc import optim

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))  # they import each other
BOUNDS = {"float64": 1e-7, "float32": 1e-3}
IMPORTS = {  # dnnc's, and what takes their place
    r"^import dnnc\.array as xp$": "import torch as xp",
    r"^import dnnc\.nn\.functional as F$": "import torch.nn.functional as F",
    r"^from dnnc import nn, optim$": "from torch import nn, optim",
    r"^from dnnc\.array\.lazy import PROGRAMS_MADE$": "",
    r"^import dnnc$": "import torch as dnnc",
}


@dataclass(frozen=True)
class Case:
    """A net of an example: what it is made with, and the optimizer, both by PyTorch's names."""

    name: str
    optimizer: str
    settings: dict[str, Any]
    made_with: dict[str, Any]
    by_run: bool = False  # define-by-run, where Python decides what runs; else `dnnc.train_step`
    decay: float = 1.0  # of the learning rate, by which each step multiplies it; of define-by-run alone
    batches: dict[str, Any] = field(default_factory=dict)  # what they are drawn with


CASES = (
    Case("mlp", "AdamW", {"lr": 2e-3, "weight_decay": 0.05}, {"dropout": 0.0}),
    Case("train_digits", "Adam", {"lr": 1e-3}, {}),
    Case("alexnet", "SGD", {"lr": 0.01, "momentum": 0.9}, {"width": 0.3, "dropout": 0.0}),
    Case("char_rnn", "RMSprop", {"lr": 1e-3}, {"width": 48}),
    Case("vae", "Adam", {"lr": 1e-3}, {}),
    Case("seq2seq", "Adam", {"lr": 1e-3}, {"width": 24}),
    Case("gpt", "AdamW", {"lr": 1e-3, "weight_decay": 0.1}, {"width": 32, "blocks": 2}),
    Case("word2vec", "Adagrad", {"lr": 0.05}, {}),
    Case(
        "stochastic_depth",
        "SGD",
        {"lr": 3e-3, "momentum": 0.9, "nesterov": True},
        {"blocks": 6},
        by_run=True,
        decay=0.95,
        batches={"size": 4},
    ),
)


def example(name: str, of_torch: bool) -> ModuleType:
    """An example as a module, by dnnc or by PyTorch."""
    text = (EXAMPLES / f"{name}.py").read_text()
    for pattern, other in IMPORTS.items() if of_torch else ():
        text = re.sub(pattern, other, text, flags=re.MULTILINE)
    module = ModuleType(f"{name}_of_{'torch' if of_torch else 'dnnc'}")
    module.__file__ = str(EXAMPLES / f"{name}.py")
    exec(compile(text, f"{name}.py", "exec"), module.__dict__)
    return module


def batches(module: ModuleType, case: Case, steps: int, dtype: str) -> Iterator[list[Any]]:
    rng = np.random.default_rng(0)
    data = module.load_data(rng)[:2] if case.name == "train_digits" else ()
    for batch in module.batches(rng, steps, *data, **case.batches):
        yield [a.astype(dtype) if isinstance(a, np.ndarray) and a.dtype.kind == "f" else a for a in batch]


def curves(case: Case, steps: int, dtype: str, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Losses [steps] of dnnc and of PyTorch. `options`: of `train_step`."""
    ours = example(case.name, False)
    net = ours.model(**case.made_with).to(dtype)
    net.load_state_dict(torch_net(case, dtype).state_dict())
    step = stepper(case, ours, net, options)
    found = [step(*batch) for batch in batches(ours, case, steps, dtype)]
    return np.array([float(x) for x in found]), torch_curve(case, steps, dtype)


def torch_net(case: Case, dtype: str) -> torch.nn.Module:
    """PyTorch's net, with the same weights in all dtypes."""
    torch.manual_seed(0)
    net: torch.nn.Module = example(case.name, True).model(**case.made_with).to(getattr(torch, dtype))
    return net


def torch_curve(case: Case, steps: int, dtype: str) -> np.ndarray:
    """PyTorch's losses [steps]."""
    theirs, net = example(case.name, True), torch_net(case, dtype)
    optimizer = getattr(torch.optim, case.optimizer)(net.parameters(), **case.settings)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, case.decay)
    losses = []
    for batch in batches(example(case.name, False), case, steps, dtype):
        optimizer.zero_grad()
        loss = theirs.loss_of(net, *(torch.tensor(a) if isinstance(a, np.ndarray) else a for a in batch))
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return np.array(losses)


def stepper(case: Case, ours: ModuleType, net: Any, options: dict[str, Any]) -> Any:
    """A function of a batch that gives the loss, and updates the net."""
    make = getattr(optim, case.optimizer)
    if not case.by_run:
        return dnnc.train_step(ours.loss_of, make(**case.settings), net, **options)
    device = "cpu" if options.get("target", "llvm") == "llvm" else "cuda:0"
    optimizer = make(net.to(device).parameters(), **case.settings)
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, case.decay)

    def step(*batch: Any) -> float:
        optimizer.zero_grad()
        given = (dnnc.array.asarray(a, device=device) if isinstance(a, np.ndarray) else a for a in batch)
        loss = ours.loss_of(net, *given)
        loss.backward()
        optimizer.step()
        schedule.step()
        return float(loss)

    return step


def apart(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference of two losses, relative to PyTorch's."""
    return float((np.abs(found - wanted) / np.abs(wanted)).max())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Loss curves of the examples' nets beside PyTorch's.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--target", default="llvm", help="llvm or cuda")
    parser.add_argument("--only", default="", help="names of examples, separated by commas")
    parser.add_argument("--dtype", default="float64,float32")
    args = parser.parse_args(argv)
    only = {n for n in args.only.split(",") if n}
    bad = 0
    print(f"{'net':18} {'type':8} {'first':>9} {'last':>9}   difference, bound, seconds; PyTorch's own from float64")
    for case in CASES:
        for dtype in args.dtype.split(",") if not only or case.name in only else ():
            start = time.perf_counter()
            found, wanted = curves(case, args.steps, dtype, target=args.target)
            off = apart(found, wanted)
            bad += not off <= BOUNDS[dtype]
            seconds = time.perf_counter() - start
            own = "" if dtype == "float64" else f"   {apart(wanted, torch_curve(case, args.steps, 'float64')):.1e}"
            print(
                f"{case.name:18} {dtype:8} {wanted[0]:9.4f} {wanted[-1]:9.4f}   {off:.1e} {BOUNDS[dtype]:.0e}"
                f"{'' if off <= BOUNDS[dtype] else '  TOO FAR'}   {seconds:.0f} s{own}",
                flush=True,
            )
    return bad


if __name__ == "__main__":
    raise SystemExit(main())
