"""The run of a program on a time axis, as a Chrome trace: for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dnnc.backends.runtime.program import Call
from dnnc.ir.errors import InputError
from dnnc.ir.files import replacing

HOST = -1  # the thread of host steps
PROCESS = 1  # Perfetto takes process 0 and its thread 0 for an idle kernel
Flow = tuple[int, int]  # numbers of two calls: the second reads what the first has written


@dataclass(frozen=True)
class Span:
    """The work of one thread (of a GPU: one stream) on one call, in seconds since the run began."""

    call: int
    thread: int
    start: float
    seconds: float
    kernel: str
    nodes: str


@dataclass(frozen=True)
class Timeline:
    """One run of a program, the fastest of those measured.

    Attributes:
        spans: by call, then by thread.
        alive: bytes of intermediate values in the arena during each call; empty where they are not known.
        flows: pairs of calls, producer and consumer.
        seconds: length of the run.
    """

    spans: tuple[Span, ...]
    alive: tuple[int, ...]
    flows: tuple[Flow, ...]
    seconds: float

    @property
    def calls(self) -> int:
        """One more than the greatest number of a call."""
        return max((s.call for s in self.spans), default=-1) + 1


def timeline(
    times: np.ndarray[Any, Any], names: Sequence[tuple[str, str]], calls: Sequence[Call], alive: Sequence[int]
) -> Timeline:
    """The timeline of a run.

    Args:
        times: [call, thread, 2] begin and end in seconds; NaN for a thread that has no part in a call.
        names: of each call its kernel and its nodes.
        calls: the program's calls; flows are left out where a loop runs some of them several times.
        alive: bytes of the arena in use at each step; left out where steps are not calls.
    """
    spans = [
        Span(k, t, float(a), float(b - a), *names[k])
        for k, row in enumerate(times)
        for t, (a, b) in enumerate(row)
        if not np.isnan(a)
    ]
    straight = len(calls) == len(times)
    return Timeline(
        tuple(spans),
        tuple(alive) if straight and len(alive) == len(times) else (),
        flows(calls) if straight else (),
        float(np.nanmax(times)) if len(spans) else 0.0,
    )


def flows(calls: Sequence[Call]) -> tuple[Flow, ...]:
    """Of each call and each memory that it reads (also in place), the last call before it that wrote there."""
    found: dict[Flow, None] = {}
    for k, c in enumerate(calls):
        for read in c.args:
            if (read in c.writes and c.args.count(read) == 1) or read.space in ("constant", "parameter"):
                continue
            for p in range(k - 1, -1, -1):
                if any(read.meets(w) for w in calls[p].writes):
                    found[p, k] = None
                    break
    return tuple(found)


def joined(parts: Sequence[Timeline | Span]) -> Timeline:
    """Timelines of segments and spans of host steps, one after the other."""
    spans: list[Span] = []
    pairs: list[Flow] = []
    at, first = 0.0, 0
    for p in parts:
        if isinstance(p, Span):
            p = Timeline((replace(p, call=0, thread=HOST, start=0.0),), (), (), p.seconds)
        spans += [replace(s, call=s.call + first, start=s.start + at) for s in p.spans]
        pairs += [(a + first, b + first) for a, b in p.flows]
        at, first = at + p.seconds, first + p.calls
    return Timeline(tuple(spans), (), tuple(pairs), at)


def chrome_trace(
    run: Timeline, name: str, target: str, facts: Mapping[tuple[str, str], Mapping[str, Any]]
) -> dict[str, Any]:
    """A trace in Chrome's format, in microseconds. `facts`: by kernel and nodes, what a click on a span shows."""
    unit = "stream" if target.startswith("cuda") else "thread"
    events: list[dict[str, Any]] = [_meta("process_name", HOST, f"{name} ({target})")]
    for t in sorted({s.thread for s in run.spans}):
        events.append(_meta("thread_name", t, "host steps" if t == HOST else f"{unit} {t}"))
    begins: dict[int, Span] = {}
    for s in run.spans:
        begins.setdefault(s.call, s)
        shown = {"call": s.call, "nodes": s.nodes, **facts.get((s.kernel, s.nodes), {})}
        events.append({"ph": "X", "name": s.kernel, **_at(s), "dur": s.seconds * 1e6, "args": shown})
    for call, nbytes in enumerate(run.alive):
        if call in begins:
            at = begins[call].start * 1e6
            events.append({"ph": "C", "name": "arena", "pid": PROCESS, "ts": at, "args": {"bytes alive": nbytes}})
    if run.alive:
        events.append({"ph": "C", "name": "arena", "pid": PROCESS, "ts": run.seconds * 1e6, "args": {"bytes alive": 0}})
    for number, (producer, consumer) in enumerate(run.flows):
        for call, ends in ((producer, {"ph": "s"}), (consumer, {"ph": "f", "bp": "e"})):
            if call in begins:
                events.append({**ends, "name": "value", "cat": "value", "id": number, **_at(begins[call])})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"model": name, "target": target}}


def _meta(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, **_thread(thread), "args": {"name": name}}


def _thread(number: int) -> dict[str, int]:
    return {"pid": PROCESS, "tid": PROCESS + number - HOST}


def _at(s: Span) -> dict[str, Any]:
    return {**_thread(s.thread), "ts": s.start * 1e6}


def write_trace(trace: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a trace as JSON. InputError where the file cannot be written."""
    try:
        with replacing(Path(path)) as file:
            file.write(json.dumps(trace).encode())
    except OSError as e:
        raise InputError(f"cannot write {path}: {e.strerror or e}") from e
