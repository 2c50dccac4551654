"""A training run that is killed at random moments and resumed, beside one that is not: the same bits.

    python benchmarks/killed.py [--kills 10] [--steps 300] [--target llvm|cuda] [--seed 0]

The child process trains a net with dropout and batch norm by Adam under a schedule, and writes a checkpoint after every
step, so that SIGKILL strikes while files are written, too. The last checkpoints of both runs are compared bit by bit.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def train(path: Path, steps: int, target: str) -> None:
    """Go on from the checkpoint, if there is one, to the last step."""
    import dnnc
    import dnnc.nn.functional as F
    from dnnc import nn, optim

    dnnc.random.seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(512, 10)
    )
    optimizer = optim.Adam(lr=1e-3)
    schedule = optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, steps)
    step = dnnc.train_step(lambda net, x, y: F.cross_entropy(net(x), y), optimizer, net, target=target)
    first = 0
    if path.exists():
        saved = dnnc.load_arrays(path)
        step.load_state_dict(saved["step"])
        schedule.load_state_dict(saved["schedule"])
        first = saved["next"]
    for k in range(first, steps):
        rng = np.random.default_rng(k)
        step(rng.standard_normal((16, 1, 8, 8), np.float32), rng.integers(0, 10, 16))
        if k + 1 < steps:
            schedule.step()
        state = {"step": step.state_dict(), "schedule": schedule.state_dict(), "next": k + 1}
        dnnc.save_arrays(path, state)
        print(k, flush=True)


def contents(path: Path) -> dict[str, bytes]:
    with np.load(path) as arrays:
        return {n: arrays[n].tobytes() for n in arrays.files}


def child(path: Path, args: argparse.Namespace) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--child", str(path), "--steps", str(args.steps), "--target", args.target]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Kill a training run at random moments, and resume it.")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--target", default="llvm", help="llvm or cuda")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        train(args.child, args.steps, args.target)
        return 0
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        whole, parts = Path(folder, "whole.npz"), Path(folder, "parts.npz")
        run = child(whole, args)
        assert run.stdout is not None
        stamps = [time.perf_counter() for _ in run.stdout]
        assert run.wait() == 0
        each = (stamps[-1] - stamps[0]) / max(len(stamps) - 1, 1)
        reached = 0
        for k in range(args.kills):
            run = child(parts, args)
            assert run.stdout is not None
            run.stdout.readline()  # its first step
            time.sleep(rng.uniform(0, each * args.steps / (args.kills + 1)))
            run.send_signal(signal.SIGKILL)
            lines = run.stdout.read().split()
            run.wait()
            reached = int(lines[-1]) + 1 if lines else reached + 1
            print(f"killed {k + 1}: after step {reached} of {args.steps}", flush=True)
        run = child(parts, args)
        run.communicate()
        assert run.returncode == 0
        same = compared(contents(whole), contents(parts))
    print("equal bits" if same else "the runs differ")
    return not same


def compared(a: dict[str, Any], b: dict[str, Any]) -> bool:
    for name in sorted(a.keys() | b.keys()):
        if a.get(name) != b.get(name):
            print(f"{name} differs")
    return a == b


if __name__ == "__main__":
    raise SystemExit(main())
