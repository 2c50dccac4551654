"""Training steps of `dnnc.train_step` beside PyTorch eager, torch.compile (Inductor) and JAX, on the CPU.

    python benchmarks/train_cpu.py                                          # all networks, 2 threads
    python benchmarks/train_cpu.py --only resnet,mlp --seconds 10
    python benchmarks/train_cpu.py --check-only --quick                     # right or wrong, with small batches
    python benchmarks/train_cpu.py --neighbours --engines eager             # families beside those
    python benchmarks/train_cpu.py --only bert_small --checkpoint           # blocks' activations are computed again
    python benchmarks/train_cpu.py --only mlp --profile                     # and where the time goes
    python benchmarks/train_cpu.py --jax-python /opt/jax/bin/python         # JAX of another environment

A step is forward, backward and the update, by SGD with momentum 0.9 or Adam; batch and result are NumPy arrays and a
number. All engines begin with the same weights. The losses of the first three steps are compared with PyTorch's
in float64, then blocks of steps of all engines take turns, with pauses in which their threads go to sleep. Each
engine has a process of its own. Its memory is what the highest resident memory of a step is above that ahead of the
network; for dnnc that has what remained of the compiler, so beside it is what the program needs: arena, constants and
state. `overhead`: of a step, Python's part and what the native call does ahead of its first kernel and behind its last.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from train_neighbours import NEIGHBOURS
from train_nets import TASKS, Task, loss

Array = np.ndarray[Any, Any]
Step = Callable[[], float]

ENGINES = ("dnnc", "eager", "inductor", "jax")
EXACT = "float64"  # PyTorch eager, as reference
NETS = {**TASKS, **NEIGHBOURS}
STEPS = 3  # whose losses are compared
CLOSE, LATER = 1e-5, 1e-3  # errors of the first loss, and of those behind updates: a rounding error that brings an
# activation to the other side of a kink makes a gradient 1e-3 off
WORSE = 2  # times PyTorch's own float32 error, where that is larger: deep networks amplify each rounding error
PAUSE = 0.04  # seconds: as long as a pool of threads spins after its last work, and more
LEAST = 3  # steps of an engine in a repeat
SAMPLES = 20  # steps whose part in Python is measured
BLOCK = 0.1  # seconds of steps of one engine


def main() -> None:
    a = arguments()
    if a.engine:
        serve(a)
        return
    from rich.console import Console

    rows, console = [], Console(width=180)
    for name in NEIGHBOURS if a.neighbours else TASKS:
        if any(part in name for part in a.only.split(",")):
            rows.append(measure(name, a, console))
            if not a.check_only:
                console.print(table(rows[-1:], a))
    if len(rows) > 1 and not a.check_only:
        console.print(table(rows, a))
    if a.json:
        Path(a.json).write_text(json.dumps(rows, indent=1))


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", default="", help="parts of names, with commas between")
    p.add_argument("--neighbours", action="store_true", help="other families, which no kernel was tuned for")
    p.add_argument("--engines", default=",".join(ENGINES), help="beside dnnc; one that is not installed is left out")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--seconds", type=float, default=6, help="of steps of each engine, in all repeats")
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--check-only", action="store_true", help="compare losses, and take no times")
    p.add_argument("--quick", action="store_true", help="small batches")
    p.add_argument("--checkpoint", action="store_true", help="compute activations of blocks again, in all engines")
    p.add_argument("--compile-seconds", type=float, default=600, help="an engine that takes longer is left out")
    p.add_argument("--jax-python", default=sys.executable, help="the interpreter that has JAX")
    p.add_argument("--profile", action="store_true", help="print where the time of dnnc's step goes")
    p.add_argument("--json", help="file for the figures")
    for hidden in ("--engine", "--task", "--state"):
        p.add_argument(hidden, help=argparse.SUPPRESS)
    return p.parse_args()


# --- the process of an engine -----------------------------------------------------------------------------------------


def serve(a: argparse.Namespace) -> None:
    """Answer commands of stdin by JSON lines: the first is {"losses", "compile_s"}, then times of as many steps as a
    line says, or facts for "facts".
    """
    replies, sys.stdout = sys.stdout, sys.stderr  # libraries print
    task = NETS[a.task]
    x, labels = (task.quick if a.quick else task.batch)(np.random.default_rng(0))
    setup = {"dnnc": dnnc_step, "jax": jax_step}.get(a.engine, torch_step)
    prepare = setup(a)
    before = resident("VmRSS")
    start = time.perf_counter()
    with np.load(a.state) as state:
        step, facts = prepare(task, dict(state), x, labels)
    losses = [step()]
    seconds = time.perf_counter() - start
    losses += [step() for _ in range(STEPS - 1)]
    print(json.dumps({"losses": losses, "compile_s": seconds}), file=replies, flush=True)
    for line in sys.stdin:
        if line.strip() == "facts":
            gc.collect()
            with contextlib.suppress(OSError):  # a kernel without this file gives the mark since the start
                Path("/proc/self/clear_refs").write_text("5")
            step()
            print(json.dumps({"memory_mb": resident("VmHWM") - before, **facts()}), file=replies, flush=True)
        else:
            times = []
            for _ in range(int(line)):
                start = time.perf_counter()
                step()
                times.append(time.perf_counter() - start)
            print(json.dumps(times), file=replies, flush=True)


def resident(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(key)) / 1e3


Prepare = Callable[[Task, dict[str, Array], Array, Array], tuple[Step, Callable[[], dict[str, Any]]]]


def renamed(state: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
    """The state by the names of a module some blocks of which are wrapped."""
    return {n: state[n.replace(".block.", ".")] for n in names}


def dnnc_training(task: Task, state: Mapping[str, Array], checkpoint: bool, threads: int, memory: Any = None) -> Any:
    """A `dnnc.train_step` of a network that begins with a state. `memory`: the option of `dnnc.compile`."""
    import dnnc
    from dnnc import nn, optim
    from dnnc.nn import functional as F

    class Checkpointed(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Any) -> Any:
            def run(x: Any) -> Any:
                return nn.functional_call(self.block, {}, x, return_buffers=True)

            y, new = dnnc.checkpoint(run)(x)
            for name, b in self.block.named_buffers():
                b[...] = new[name]
            return y

    net = task.make(nn, F, Checkpointed if checkpoint else lambda block: block)
    net.load_state_dict(renamed(state, list(net.state_dict())))
    optimizer = optim.Adam(lr=task.rate) if task.optimizer == "Adam" else optim.SGD(lr=task.rate, momentum=0.9)
    options = {} if memory is None else {"memory": memory}
    return dnnc.train_step(lambda net, x, y: loss(F, net, x, y), optimizer, net, threads=threads, **options)


def dnnc_step(a: argparse.Namespace) -> Prepare:
    import dnnc  # noqa: F401  before memory is measured

    def prepare(task: Task, state: dict[str, Array], x: Array, labels: Array) -> Any:
        step = dnnc_training(task, state, a.checkpoint, a.threads)

        def facts() -> dict[str, Any]:
            report = step.programs[-1].report
            arena = max(p.memory.arena + p.memory.constants for p in report.programs)
            held = sum(np.asarray(v).nbytes for v in step.state_dict().values())
            profile = step.profile(x, labels, repeats=10)
            if a.profile:
                print(profile)
                for note in report.fallbacks:
                    print(note)
            return {
                "program_mb": (arena + held) / 1e6,
                "arena_mb": arena / 1e6,
                "overhead_us": (python_part(step, x, labels) + profile.overhead) * 1e6,
                "cached": report.programs[-1].from_cache,
            }

        return (lambda: float(step(x, labels))), facts

    return prepare


def python_part(step: Any, x: Array, labels: Array) -> float:
    """Seconds of a step that are spent outside of the native call."""
    ((resident, _),) = step._programs.values()
    run, native, outside = resident.instance.run, 0.0, []

    def timed(*args: Any) -> Any:
        nonlocal native
        start = time.perf_counter()
        status = run(*args)
        native += time.perf_counter() - start
        return status

    resident.instance.run = timed
    for _ in range(SAMPLES):
        native, start = 0.0, time.perf_counter()
        step(x, labels)
        outside.append(time.perf_counter() - start - native)
    resident.instance.run = run
    return float(np.median(outside))


def torch_training(task: Task, state: Mapping[str, Array], checkpointed: bool, dtype: Any = None) -> tuple[Any, Any]:
    """The module and the optimizer of a network that begins with a state."""
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Any) -> Any:
            return checkpoint(self.block, x, use_reentrant=False)

    net = task.make(nn, F, Checkpointed if checkpointed else lambda block: block)
    wanted = renamed(state, list(net.state_dict()))
    net.load_state_dict({n: torch.from_numpy(v) for n, v in wanted.items()})
    net.to(dtype or torch.float32).train()
    if task.optimizer == "Adam":
        return net, torch.optim.Adam(net.parameters(), lr=task.rate)
    return net, torch.optim.SGD(net.parameters(), lr=task.rate, momentum=0.9)


def torch_step(a: argparse.Namespace) -> Prepare:
    import torch
    from torch.nn import functional as F

    torch.set_num_threads(a.threads)
    torch._dynamo.config.allow_rnn = True
    dtype = torch.float64 if a.engine == EXACT else torch.float32

    def prepare(task: Task, state: dict[str, Array], x: Array, labels: Array) -> Any:
        net, optimizer = torch_training(task, state, a.checkpoint, dtype)
        compiled = torch.compile(lambda x, y: loss(F, net, x, y)) if a.engine == "inductor" else None
        given, target = torch.from_numpy(x), torch.from_numpy(labels)
        given = given.to(dtype) if given.is_floating_point() else given

        def step() -> float:
            optimizer.zero_grad()
            value = loss(F, net, given, target) if compiled is None else compiled(given, target)
            value.backward()
            optimizer.step()
            return float(value)

        return step, dict

    return prepare


def jax_step(a: argparse.Namespace) -> Prepare:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: a.threads])  # XLA has no number of threads
    os.environ["JAX_PLATFORMS"] = "cpu"
    import train_jax as nn

    def prepare(task: Task, state: dict[str, Array], x: Array, labels: Array) -> Any:
        net = task.make(nn, nn, nn.Checkpointed if a.checkpoint else lambda block: block)
        step = nn.train_step(net, loss, state, task.optimizer, task.rate)
        return (lambda: step(x, labels)), dict

    return prepare


# --- measurement ------------------------------------------------------------------------------------------------------


class Engine:
    """A process that trains a network. `ready` waits for its first steps."""

    def __init__(self, name: str, task: str, state: str, a: argparse.Namespace) -> None:
        python = a.jax_python if name == "jax" else sys.executable
        flags = [f for f, on in (("--quick", a.quick), ("--checkpoint", a.checkpoint), ("--profile", a.profile)) if on]
        self.name = name
        self.process = subprocess.Popen(
            [python, __file__, "--engine", name, "--task", task, "--state", state, "--threads", str(a.threads), *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if name == "dnnc" else subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": str(a.threads)},
        )

    def reply(self, seconds: float | None = None) -> Any:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            self.close()
            raise TimeoutError(f"{self.name}: no first step within {seconds:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            said = self.process.stderr.read() if self.process.stderr is not None else ""
            raise RuntimeError(f"{self.name}: " + (said.strip().splitlines() or ["ended"])[-1])
        return json.loads(line)

    def ask(self, command: object) -> Any:
        assert self.process.stdin is not None
        print(command, file=self.process.stdin, flush=True)
        return self.reply()

    def close(self) -> None:
        """End the process and those that it has started, as Inductor does."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def engine(*args: Any) -> Iterator[Engine]:
    made = Engine(*args)
    try:
        yield made
    finally:
        made.close()


def measure(name: str, a: argparse.Namespace, console: Any) -> dict[str, Any]:
    """Losses, times and memory of all engines at one network; SystemExit where dnnc's losses are off."""
    row: dict[str, Any] = {"name": name, "engines": {}}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        state = f"{folder}/state.npz"
        first_weights(name, state)
        with engine(EXACT, name, state, a) as reference:
            exact = np.array(reference.reply()["losses"])
        running: list[Engine] = []
        wanted = ["dnnc", *(e for e in a.engines.split(",") if e != "dnnc")]
        for e in wanted:
            made = stack.enter_context(engine(e, name, state, a))
            try:
                reply = made.reply(a.compile_seconds)
            except (RuntimeError, TimeoutError) as problem:
                if e in ("dnnc", "eager"):
                    raise SystemExit(f"{name}: {problem}") from None
                console.print(f"{name}: left out {problem}", markup=False)
                continue
            off = np.abs(np.array(reply["losses"]) - exact) / np.abs(exact)
            row["engines"][e] = {"errors": off.tolist(), "losses": reply["losses"], "compile_s": reply["compile_s"]}
            running.append(made)
        errors = {e: f["errors"] for e, f in row["engines"].items()}
        console.print(f"{name}: errors of losses " + ", ".join(f"{e} {max(off):.1e}" for e, off in errors.items()))
        first, *later = errors["dnnc"]
        if not (first <= CLOSE and max(later) <= max(LATER, WORSE * max(errors.get("eager", [0])))):
            raise SystemExit(f"{name}: losses {row['engines']['dnnc']['losses']}, expected {exact.tolist()}")
        if a.check_only:
            return row
        times = in_turns(running, a.repeats, a.seconds)
        for e in running:
            medians = [float(np.median(t)) * 1e3 for t in times[e.name]]
            row["engines"][e.name] |= {"ms": float(np.median(medians)), "repeats_ms": medians, **e.ask("facts")}
        ours = row["engines"]["dnnc"]["repeats_ms"]
        for facts in row["engines"].values():
            facts["ratio"] = float(np.median([t / u for t, u in zip(facts["repeats_ms"], ours)]))
    return row


def first_weights(name: str, path: str) -> None:
    import torch
    from torch import nn

    torch.manual_seed(0)
    net = NETS[name].make(nn, nn.functional, lambda block: block)
    for m in net.modules():
        if isinstance(m, nn.Embedding):
            nn.init.normal_(m.weight, std=0.02)
    np.savez(path, **{n: v.numpy() for n, v in net.state_dict().items()})


def in_turns(engines: Sequence[Engine], repeats: int, seconds: float) -> dict[str, list[list[float]]]:
    """Seconds of steps, [repeat][step] of each engine."""
    guess = {e.name: min(e.ask(2)) for e in engines}
    times: dict[str, list[list[float]]] = {e.name: [[] for _ in range(repeats)] for e in engines}
    first = 0
    for k in range(repeats):
        while any(sum(times[e.name][k]) < seconds / repeats or len(times[e.name][k]) < LEAST for e in engines):
            for e in (*engines[first:], *engines[:first]):
                time.sleep(PAUSE)
                times[e.name][k] += e.ask(max(1, int(BLOCK / guess[e.name])))
            first = (first + 1) % len(engines)
    return times


def table(rows: Sequence[Mapping[str, Any]], a: argparse.Namespace) -> Any:
    from rich.table import Table
    from timing import geometric_mean

    t = Table("network", "engine", "step ms", "peer / dnnc", "memory MB", "program MB", "first step s", "overhead us")
    for row in rows:
        for name, f in row["engines"].items():
            t.add_row(
                row["name"], name, f"{f['ms']:.3g}", f"{f['ratio']:.2f}", f"{f['memory_mb']:.0f}",
                f"{f['program_mb']:.0f}" if "program_mb" in f else "", f"{f['compile_s']:.1f}",
                f"{f['overhead_us']:.0f}" if "overhead_us" in f else "",
            )  # fmt: skip
    best = [min((f["ratio"] for n, f in r["engines"].items() if n != "dnnc"), default=1.0) for r in rows]
    if len(rows) > 1:
        t.caption = f"best peer / dnnc: geometric mean {geometric_mean(best):.2f}, least {min(best):.2f}"
    return t


if __name__ == "__main__":
    main()
