"""Peak memory of the training steps of `train_cpu.py`, beside PyTorch eager's, on the CPU.

    python benchmarks/train_memory.py [--only resnet,mlp] [--threads 2] [--markdown file.md]

Every figure is of a process of its own, in megabytes. `state` are parameters, buffers, moments and the batch: the same
in both engines, and no part of other columns. `plan`: the arena, constants and results of dnnc's program, and second
buffers of state that is not updated in place. `resident`: the highest resident memory during a step above that ahead of
it: of dnnc that of the first step, once the program is compiled, of PyTorch that of the second, without gradients and
after free memory went back to the system. `again`: the activations of blocks are computed again by `checkpoint`; for
networks without blocks the program has a budget instead (`memory=`), of `SHARE` of PyTorch's peak. Bars: the plan is
at most PyTorch's peak, and at most `SHARE` of it with activations computed again.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from train_cpu import dnnc_training, first_weights, resident, torch_training
from train_nets import TASKS, loss

SHARE = 0.6  # of PyTorch's memory, with activations computed again
MB = 1e6


def main() -> None:
    a = arguments()
    if a.engine:
        serve(a)
        return
    from rich.console import Console

    rows, console = [], Console(width=160)
    for name in TASKS:
        if any(part in name for part in a.only.split(",")):
            rows.append(measure(name, a))
            console.print(", ".join(f"{k} {v:.1f}" if isinstance(v, float) else str(v) for k, v in rows[-1].items()))
    console.print(table(rows))
    if a.json:
        Path(a.json).write_text(json.dumps(rows, indent=1))
    if a.markdown:
        Path(a.markdown).write_text(markdown(rows))


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", default="", help="parts of names, with commas between")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--quick", action="store_true", help="small batches")
    p.add_argument("--json", help="file for the figures")
    p.add_argument("--markdown", help="file for the table")
    for hidden in ("--engine", "--task", "--state"):
        p.add_argument(hidden, help=argparse.SUPPRESS)
    p.add_argument("--again", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    return p.parse_args()


# --- one process ------------------------------------------------------------------------------------------------------


def serve(a: argparse.Namespace) -> None:
    """Print the figures of one engine as a line of JSON."""
    task = TASKS[a.task]
    x, labels = (task.quick if a.quick else task.batch)(np.random.default_rng(0))
    with np.load(a.state) as file:
        state = dict(file)
    found = (dnnc_memory if a.engine == "dnnc" else torch_memory)(a, task, state, x, labels)
    print(json.dumps(found))


def dnnc_memory(a: argparse.Namespace, task: Any, state: Any, x: Any, labels: Any) -> dict[str, float]:
    step = dnnc_training(task, state, a.again, a.threads, a.budget)
    state.clear()
    step._read_numbers()
    step._prepared((x, labels), "alone")  # compiles, and runs nothing
    before = settled()
    value = float(step(x, labels))
    peak = resident("VmHWM") - before
    report = step.programs[-1].report
    (program, _) = step._programs[next(iter(step._programs))]
    spare = sum(b.nbytes for b in program._spare.values())
    results = sum(int(np.prod(s)) * np.dtype(d).itemsize for s, d in program._fresh)
    memory = max((p.memory for p in report.programs), key=lambda m: m.arena)
    held = sum(np.asarray(v).nbytes for v in step.state_dict().values())
    return {
        "state": (held + x.nbytes + labels.nbytes) / MB,
        "plan": (memory.arena + memory.constants + spare + results) / MB,
        "resident": peak,
        "loss": value,
    }


def torch_memory(a: argparse.Namespace, task: Any, state: Any, x: Any, labels: Any) -> dict[str, float]:
    import torch

    torch.set_num_threads(a.threads)
    net, optimizer = torch_training(task, state, a.again)
    state.clear()
    given, target = torch.from_numpy(x), torch.from_numpy(labels)

    def step() -> float:
        optimizer.zero_grad()
        value = loss(torch.nn.functional, net, given, target)
        value.backward()
        optimizer.step()
        return value.item()

    value = step()
    optimizer.zero_grad()
    before = settled()
    step()
    return {"resident": resident("VmHWM") - before, "loss": value}


def settled() -> float:
    """Resident megabytes, once free memory went back to the system; the high-water mark starts anew."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


# --- all of them ------------------------------------------------------------------------------------------------------


def measure(name: str, a: argparse.Namespace) -> dict[str, Any]:
    """The row of a network."""
    with tempfile.TemporaryDirectory() as folder:
        state = f"{folder}/state.npz"
        first_weights(name, state)

        def ask(engine: str, *more: str) -> Mapping[str, float]:
            command = [sys.executable, __file__, "--engine", engine, "--task", name, "--state", state, *more]
            command += ["--threads", str(a.threads), *(["--quick"] if a.quick else [])]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            return dict(json.loads(done.stdout.splitlines()[-1]))

        peer, ours = ask("eager"), ask("dnnc")
        blocks = TASKS[name].blocks
        again = ask("dnnc", *(["--again"] if blocks else ["--budget", str(int(SHARE * peer["resident"] * MB))]))
        for found in (ours, again):
            if abs(found["loss"] - peer["loss"]) > 1e-4 * abs(peer["loss"]):
                raise SystemExit(f"{name}: loss {found['loss']}, PyTorch's is {peer['loss']}")
        checkpointed = ask("eager", "--again")["resident"] if blocks else None
    return {
        "network": name,
        "state": ours["state"],
        "PyTorch": peer["resident"],
        "PyTorch again": checkpointed,
        "plan": ours["plan"],
        "resident": ours["resident"],
        "again": again["plan"],
        "again resident": again["resident"],
    }


COLUMNS = ("state", "PyTorch", "PyTorch again", "plan", "resident", "again", "again resident")


def cells(row: Mapping[str, Any]) -> list[str]:
    peer = row["PyTorch"]
    shares = [f"{row['plan'] / peer:.0%}".replace("%", " %"), f"{row['again'] / peer:.0%}".replace("%", " %")]
    within = "yes" if row["plan"] <= peer and row["again"] <= SHARE * peer else "no"
    return [row["network"], *("" if row[c] is None else f"{row[c]:.1f}" for c in COLUMNS), *shares, within]


HEADINGS = ("network", *COLUMNS, "plan / PyTorch", "again / PyTorch", "within bars")


def table(rows: Sequence[Mapping[str, Any]]) -> Any:
    from rich.table import Table

    t = Table(*HEADINGS, title="megabytes beside the state")
    for row in rows:
        t.add_row(*cells(row))
    return t


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [HEADINGS, ["---"] * len(HEADINGS), *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    main()
