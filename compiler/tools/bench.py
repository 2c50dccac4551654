"""How long a call of a model takes, by itself or beside other engines in the same process: the logic of `dnnc bench`.

Every engine gets the same arrays and the same number of threads. Blocks of their calls take turns (`timing.py`), so
that a change of clock or a busy neighbour meets all of them, and their outputs are compared.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dnnc.ir.errors import InputError, UnsupportedError
from dnnc.report.bench_tables import bench_tables
from dnnc.report.tables import plain_text
from dnnc.tools.peers import PEERS, Engine, check_installed, error, several, version
from dnnc.tools.timing import Times, alternate, percentiles, ratios

Array = np.ndarray[Any, Any]
Progress = Callable[[str, int, int], None]
WRONG = 1e-2  # error beyond which outputs differ by more than rounding
REPEATS = 5  # rounds of the timing; a ratio has a range over them
OVERHEAD_SECONDS, OVERHEAD_CALLS = 0.5, 200  # of measuring what a call costs outside of kernels


@dataclass(frozen=True)
class EngineTimes:
    """One engine. Seconds, bytes, calls per second."""

    name: str
    version: str
    load: float  # until the first result: import of the engine, reading the model, compiling, one call
    # by how much the process has grown then; `peak`: by how much it had at most. None where the system does not tell.
    memory: int | None
    peak: int | None
    calls: int
    p50: float
    p90: float
    p99: float
    least: float
    throughput: float
    # largest difference between its outputs and dnnc's, over its largest output; None for dnnc
    error: float | None = None
    # its median time over dnnc's, above 1 where dnnc is faster: median, lowest and highest of the rounds
    ratio: tuple[float, float, float] | None = None

    @property
    def agrees(self) -> bool | None:
        """True if its outputs are dnnc's but for rounding. NaN or a shape on one side: infinite error."""
        return None if self.error is None else self.error <= WRONG


@dataclass(frozen=True, repr=False)
class Bench:
    """What was measured. `overhead`: seconds of a call outside kernels; `failures`: peers that failed, and why."""

    model: str
    threads: int
    inputs: tuple[tuple[str, str, tuple[int, ...]], ...]
    overhead: float | None
    compiled: int | None
    from_cache: int | None
    engines: tuple[EngineTimes, ...]
    failures: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        """The result as dicts, lists, strings and numbers."""
        out = {
            **dataclasses.asdict(self),
            "inputs": [{"name": n, "dtype": d, "shape": list(s)} for n, d, s in self.inputs],
        }
        for row, e in zip(out["engines"], self.engines):
            row |= {"agrees": e.agrees, "error": e.error if e.error is None or math.isfinite(e.error) else None}
        return out

    def to_json(self) -> str:
        """The result as a JSON object."""
        return json.dumps(self.as_dict(), indent=2)

    def __repr__(self) -> str:
        return f"<Bench of {self.model[:80]}: {', '.join(e.name for e in self.engines)}; print it>"

    def __str__(self) -> str:

        return plain_text(bench_tables(self))


def bench(
    model: str,
    own: Callable[[], tuple[Any, list[Array]]],
    threads: int,
    peers: Sequence[str] = (),
    duration: float = 5.0,
    warmup: float = 1.0,
    tell: Progress = lambda stage, done, of: None,
) -> Bench:
    """Time a model.

    Args:
        model: its name, and for peers the path of its .onnx file.
        own: opens it with dnnc: the executable and its inputs in order.
        threads: of the peers where dnnc's own executable does not tell how many it uses.
        peers: names of PEERS.
        duration: seconds of timing, of each engine; a model under 1 ms gets at least 200 calls per round, others 10.
        warmup: seconds of calls of each engine before.
        tell: told (stage, done, of).

    Raises:
        InputError: a peer that is not installed, or peers of a model that is no .onnx file.
    """
    if peers and not model.endswith(".onnx"):
        raise InputError(f"{', '.join(peers)} can only run .onnx files, not {model}")
    check_installed(peers)
    opened: list[Any] = []

    def first() -> Engine:
        f, arrays = own()
        opened.extend((f, arrays))
        return Engine("dnnc", lambda: f(*arrays), several)

    engines, failures = [load(first)], dict[str, str]()
    f, arrays = opened
    threads = f.report.threads if f.report.programs else threads
    feeds = {s.name: a for s, a in zip(f.inputs, arrays)}
    for k, name in enumerate(peers):
        tell(f"loading {name}", k, len(peers))
        try:
            engines.append(load(partial(PEERS[name], model, feeds, threads, f.options.precision)))
        except Exception as e:  # a peer that fails at a model is a result
            failures[name] = " ".join(f"{type(e).__name__}: {e}".split())
    return measure(model, f, arrays, threads, engines, failures, (duration, warmup), tell)


def load(make: Callable[[], Engine]) -> Engine:
    """Make an engine and call it once; notes seconds and growth of memory in its facts."""
    memory = Memory()
    start = time.perf_counter()
    engine = make()
    engine.facts["result"] = [np.array(a) for a in engine.outputs(engine.call())]
    engine.facts |= {
        "load": time.perf_counter() - start,
        "memory": memory.growth("VmRSS"),
        "peak": memory.growth("VmHWM"),
    }
    return engine


def measure(
    model: str,
    f: Any,
    arrays: Sequence[Array],
    threads: int,
    engines: Sequence[Engine],
    failures: Mapping[str, str],
    seconds: tuple[float, float],
    tell: Progress,
) -> Bench:
    """Time loaded engines in turns, dnnc the first of them. `seconds`: of timing and of warming up, of each engine."""
    duration, warmup = seconds
    for k, e in enumerate(engines):
        tell("warming up", k, len(engines))
        end = time.perf_counter() + warmup
        while time.perf_counter() < end:
            e.call()
    rounds, about = iter(range(REPEATS)), f"timing, {duration * len(engines):.0f} s or more"
    times = alternate(
        [e.call for e in engines], REPEATS, duration * len(engines), lambda _: tell(about, next(rounds), REPEATS)
    )
    rows = [_times(e, times, k, engines[0]) for k, e in enumerate(engines)]
    report = f.report
    programs = report.programs if report.host else report.programs[-1:]
    given = tuple((s.name, str(a.dtype), a.shape) for s, a in zip(f.inputs, arrays))
    compiled, cached = (
        (sum(p.compiled for p in programs), sum(p.from_cache for p in programs)) if programs else (None, None)
    )
    return Bench(model, threads, given, overhead(f, arrays, rows[0].p50), compiled, cached, tuple(rows), failures)


def _times(e: Engine, times: Times, k: int, ours: Engine) -> EngineTimes:
    p = {name: ms / 1e3 for name, ms in percentiles(times, k).items()}
    calls, spent = sum(len(r[k]) for r in times), sum(sum(r[k]) for r in times)
    load_, memory, peak = (e.facts[n] for n in ("load", "memory", "peak"))
    row = EngineTimes(
        e.name, version(e.name), load_, memory, peak, calls, p["p50"], p["p90"], p["p99"], p["min"], calls / spent
    )
    if e is ours:
        return row
    ratio = ratios(times, 0, k)
    worst = max((error(mine, theirs) for mine, theirs in zip(ours.facts["result"], e.facts["result"])), default=0.0)
    return dataclasses.replace(row, error=worst, ratio=(float(np.median(ratio)), min(ratio), max(ratio)))


def overhead(f: Any, arrays: Sequence[Array], seconds: float) -> float | None:
    """Seconds of a call outside of its kernels; None where nothing is compiled. `seconds`: of a whole call."""
    try:
        return float(f.profile(*arrays, repeats=max(10, min(OVERHEAD_CALLS, int(OVERHEAD_SECONDS / seconds)))).overhead)
    except UnsupportedError:
        return None
    except InputError:  # no kernel is called
        return seconds


class Memory:
    """By how much this process grows from now on, as Linux tells it."""

    def __init__(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the highest size so far is forgotten
            self._start = self._read("VmRSS")
        except OSError:
            self._start = None

    def growth(self, what: str) -> int | None:
        """Bytes. `what`: "VmRSS" is now, "VmHWM" at most."""
        now = self._read(what) if self._start is not None else None
        return None if now is None or self._start is None else max(now - self._start, 0)

    def _read(self, what: str) -> int | None:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(what + ":"):
                return int(line.split()[1]) << 10
        return None
