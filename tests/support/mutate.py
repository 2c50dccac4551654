"""Spoiled models: `PYTHONPATH=tests python -m support.mutate --count 20000 [--seed 0] [--jobs 2]`.

Each mutant (mutants.py) is read, compiled and run in a child process with limits of time and memory. Right is an error
that says what is wrong with the model, or a result as the interpreter's (judge.py); a crash, a hang, any other
exception and a wrong result are failures. Children are replaced after a crash or a hang. The first failure of each kind
is made smaller and printed with the command that makes it again; the exit status is 1 when there are any.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.mutants import SEALED, Mutant, bases, mutant, spoiled

SECONDS = 20.0  # for one mutant
MEMORY = 6 << 30  # bytes of address space that a child may have on top of what it has
SHRINK_TRIES = 60
STALE = 3000  # mutants after which a child is replaced: what is compiled stays in its memory


@dataclass(frozen=True)
class Job:
    """What a child is to judge."""

    path: str
    threads: int
    sealed: bool


@dataclass
class Tally:
    """What came out so far."""

    phases: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


# --- in the child -----------------------------------------------------------------------------------------------------


def work(cache: str, memory: int) -> None:
    """A child: jobs on stdin, answers on stdout: {"phase": ...} on the way, {"error": text or null} last."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def tell(**answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    from support.judge import judge

    limit_memory(memory)
    tell(ready=True)
    for line in sys.stdin:
        job = Job(**json.loads(line))
        try:
            error = judge(Path(job.path), cache, job.threads, job.sealed, lambda phase: tell(phase=phase))
        except KeyboardInterrupt:
            return
        except BaseException as e:  # whatever it is, it came out of dnnc
            error = f"escaped {type(e).__name__}: {e}"
        tell(error=None if error is None else " ".join(error.split())[:600])


def limit_memory(extra: int) -> None:
    """No more than `extra` bytes of address space on top of what the process has."""
    if sys.platform != "linux":
        return
    import resource

    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + extra, used + extra))


# --- children as seen from outside ------------------------------------------------------------------------------------


class Child:
    """A child process; started anew after a crash, a hang, or many jobs."""

    def __init__(self, cache: str, seconds: float, memory: int) -> None:
        self.cache, self.seconds, self.memory = cache, seconds, memory
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "support.mutate", "--child", self.cache, "--memory", str(self.memory)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.answers: queue.Queue[str | None] = queue.Queue()
        self.served = 0
        threading.Thread(target=_listen, args=(self.process, self.answers), daemon=True).start()
        if self.answers.get(timeout=120) is None:
            raise SystemExit(f"the child does not start: {' '.join(command)}")

    def judge(self, job: Job) -> tuple[str, str | None]:
        """How far it came ("read", "compiled" or "refused"), and what is wrong or None."""
        if self.served >= STALE:
            self.stop()
            self.start()
        self.served += 1
        phase = "read"
        end = time.monotonic() + self.seconds
        assert self.process.stdin is not None
        try:
            print(json.dumps(job.__dict__), file=self.process.stdin, flush=True)
            while True:
                line = self.answers.get(timeout=max(end - time.monotonic(), 0.001))
                if line is None:
                    return phase, self._replaced("crash: the process ended with status {code}")
                answer = json.loads(line)
                if "error" in answer:
                    return phase, answer["error"]
                phase = answer["phase"]
        except queue.Empty:
            return phase, self._replaced(f"hang: it takes longer than {self.seconds:g} s, {phase} at last")
        except OSError:
            return phase, self._replaced("crash: the process ended with status {code}")

    def _replaced(self, message: str) -> str:
        if "hang" not in message:
            self.process.wait()
        self.stop()
        code = self.process.returncode
        self.start()
        return message.format(code=code)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def _listen(process: Any, answers: queue.Queue[str | None]) -> None:
    for line in process.stdout:
        answers.put(line)
    answers.put(None)


# --- a campaign -------------------------------------------------------------------------------------------------------


class Campaign:
    """Judges mutants by number; threads share it, each with a child of its own."""

    def __init__(self, seed: int, folder: Path, seconds: float, memory: int, keep: Path | None, loud: bool) -> None:
        self.seed, self.folder, self.seconds, self.memory, self.keep, self.loud = (
            seed,
            folder,
            seconds,
            memory,
            keep,
            loud,
        )
        self.bases = bases(folder)
        self.tally, self.lock = Tally(), threading.Lock()

    def run(self, numbers: Sequence[int], jobs: int) -> Tally:
        """Judge these mutants on `jobs` children, after the bases: were those wrong, nothing would be tested."""
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        for k in range(len(self.bases) if len(numbers) > 1 else 0):
            todo.put(-1 - k)
        for n in numbers:
            todo.put(n)
        threads = [
            threading.Thread(target=self.serve, args=(todo, k), daemon=True)
            for k in range(max(1, min(jobs, len(numbers))))
        ]
        for t in threads:
            t.start()
        while any(t.is_alive() for t in threads):
            threads[0].join(0.05)
            time.sleep(0.02)
        return self.tally

    def serve(self, todo: queue.SimpleQueue[int], worker: int) -> None:
        child = Child(str(self.folder / "kernels"), self.seconds, self.memory)
        while True:
            try:
                n = todo.get_nowait()
            except queue.Empty:
                child.stop()
                return
            self.one(n, child, worker)

    def one(self, number: int, child: Child, worker: int) -> None:
        names = list(self.bases)
        m = mutant(self.seed, number, names) if number >= 0 else Mutant(names[-1 - number], ())
        data = spoiled(self.bases[m.base], m.edits)
        phase, error = child.judge(self.job(m, data, number, worker))
        if number < 0 and phase != "compiled":
            error = error or "base refused: it should run"
        with self.lock:
            self.tally.phases["failed" if error else phase] += 1
            if error is None:
                return
            kind = kind_of(error)
            self.tally.kinds[kind] += 1
            first = self.tally.kinds[kind] == 1
        if first:
            text = self.explain(m, number, error, child, worker)
            with self.lock:
                self.tally.failures.append(text)
                if self.loud:
                    print(text, flush=True)

    def job(self, m: Mutant, data: bytes, number: int, worker: int) -> Job:
        """A file for the child, and how it is to be judged."""
        path = self.folder / f"mutant{worker}{'.dnnc' if m.base.endswith('.dnnc') else '.onnx'}"
        path.write_bytes(data)
        return Job(str(path), 1 + (number % 8 == 0), any(e.kind in SEALED for e in m.edits))

    def explain(self, m: Mutant, number: int, error: str, child: Child, worker: int) -> str:
        """A failure as text, made smaller."""

        def fails(candidate: Mutant, data: bytes) -> str | None:
            found = child.judge(self.job(candidate, data, number, worker))[1]
            return found if found is not None and kind_of(found) == kind_of(error) else None

        small, data, error = shrink(m, self.bases[m.base], error, fails)
        lines = [
            f"FAILED {number}: {error}",
            f"  {small}",
            f"  again: PYTHONPATH=tests python -m support.mutate --seed {self.seed} --only {number}",
        ]
        if self.keep is not None:
            self.keep.mkdir(parents=True, exist_ok=True)
            path = self.keep / f"{self.seed}-{number}{'.dnnc' if m.base.endswith('.dnnc') else '.onnx'}"
            path.write_bytes(data)
            lines.append(f"  file: {path}")
        shown = describe(data) if not m.base.endswith(".dnnc") else ""
        return "\n".join([*lines, *("  | " + line for line in shown.splitlines()[:40])])


def kind_of(error: str) -> str:
    """What failures have in common that have one cause, as far as messages tell."""
    head = error.split(" at element ")[0]
    place = re.search(r" at (\S+\.py:\d+)$", error)
    if error.startswith("escaped") and place:
        return f"{error.split(':')[0]} at {place[1]}"
    return re.sub(r"'[^']*'|\"[^\"]*\"|[\d.]+", "_", head)[:70]


def describe(data: bytes) -> str:
    """A model as text, as far as it can be read."""
    import onnx

    try:
        m = onnx.load_model_from_string(data)
        for t in m.graph.initializer:
            if len(t.raw_data) > 32:
                t.ClearField("raw_data")
        return onnx.printer.to_text(m)
    except Exception as e:  # a damaged file; onnx raises what it likes
        return f"({len(data)} bytes that onnx does not read: {type(e).__name__})"


# --- making a failing mutant smaller ----------------------------------------------------------------------------------


def shrink(m: Mutant, base: bytes, error: str, fails: Any) -> tuple[Mutant, bytes, str]:
    """Drop edits, then elements of the model, as long as it fails in the same way.

    Args:
        m: what fails.
        base: the data before the edits.
        error: how it fails.
        fails: `fails(mutant, data)` is the error where that is of the same kind, else None.

    Returns:
        The mutant with fewer edits, the data made smaller still, and its error.
    """
    data = spoiled(base, m.edits)
    for e in m.edits:
        fewer = Mutant(m.base, tuple(x for x in m.edits if x is not e))
        found = fails(fewer, spoiled(base, fewer.edits))
        if found is not None:
            m, data, error = fewer, spoiled(base, fewer.edits), found
    if m.base.endswith(".dnnc"):
        return m, data, error
    left, again = SHRINK_TRIES, True
    while again and left > 0:
        again = False
        for candidate in smaller(data):
            left -= 1
            found = fails(m, candidate) if left >= 0 else None
            if found is not None:
                data, error, again = candidate, found, True
                break
    return m, data, error


def smaller(data: bytes) -> Iterator[bytes]:
    """Models with one node, output, input, initializer, function or attribute less."""
    import onnx
    from google.protobuf.message import DecodeError

    m = onnx.ModelProto()
    try:
        m.ParseFromString(data)
    except DecodeError:
        return
    places: list[Any] = [
        m.graph.node,
        m.functions,
        m.graph.output,
        m.graph.initializer,
        m.graph.value_info,
        m.graph.input,
    ]
    places += [n.attribute for n in m.graph.node]
    for place in places:
        for k in reversed(range(len(place))):
            held = [type(e).FromString(e.SerializeToString()) for e in place]
            del place[k]
            yield m.SerializeToString(deterministic=True)
            del place[:]
            place.extend(held)


# --- command line -----------------------------------------------------------------------------------------------------


def campaign(
    count: int,
    seed: int = 0,
    jobs: int = 1,
    seconds: float = SECONDS,
    only: int | None = None,
    keep: Path | None = None,
    loud: bool = False,
) -> Tally:
    """Judge `count` mutants, or the one of number `only`."""
    with tempfile.TemporaryDirectory() as folder:
        c = Campaign(seed, Path(folder), seconds, MEMORY, keep, loud)
        return c.run(range(count) if only is None else [only], jobs)


def summary(tally: Tally) -> str:
    """Totals: what was refused, what ran and was right, what failed, by kind."""
    phases: Mapping[str, int] = tally.phases
    words = {"refused": "refused with a clear error", "compiled": "ran and right", "failed": "failed"}
    lines = [f"{sum(phases.values())} mutants: " + ", ".join(f"{phases.get(k, 0)} {w}" for k, w in words.items())]
    return "\n".join([*lines, *(f"  {n} x {kind}" for kind, n in tally.kinds.most_common())])


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m support.mutate", description="Spoiled models: errors that say so, or right results."
    )
    p.add_argument("--count", type=int, default=1000, help="mutants")
    p.add_argument("--seed", type=int, default=0, help="of the campaign")
    p.add_argument("--jobs", type=int, default=2, help="child processes")
    p.add_argument("--seconds", type=float, default=SECONDS, help="that one mutant may take")
    p.add_argument("--only", type=int, help="the mutant of this number alone")
    p.add_argument("--keep", type=Path, help="folder for the files that fail")
    p.add_argument("--child", metavar="CACHE", help=argparse.SUPPRESS)
    p.add_argument("--memory", type=int, default=MEMORY, help=argparse.SUPPRESS)
    a = p.parse_args(argv)
    if a.child:
        work(a.child, a.memory)
        return 0
    tally = campaign(a.count, a.seed, a.jobs, a.seconds, a.only, a.keep, loud=True)
    print(summary(tally))
    return int(bool(tally.kinds))


if __name__ == "__main__":
    sys.exit(main())
