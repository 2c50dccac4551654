"""Chrome traces: spans by thread, the arena as a counter, flows from producers to consumers."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx.parser import parse_model

import dnnc
from dnnc.backends.llvm.timing import Layout
from dnnc.backends.runtime.program import Call, MemoryRef
from dnnc.ir.errors import InputError
from dnnc.tools.trace import HOST, Span, chrome_trace, flows, joined, timeline

COUNTS = """<ir_version: 8, opset_import: ["": 17]>
f (float[256, 256] x) => (int64[2, n] z) {
    y = MatMul(x, x)
    z = NonZero(y)
}"""
FIELDS = {"M": {"args"}, "X": {"ts", "dur"}, "C": {"ts", "args"}, "s": {"ts", "id", "cat"}, "f": {"ts", "id", "cat"}}


def check_format(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The events by phase. What the trace-event format and Perfetto's importer ask of a file."""
    by: dict[str, list[dict[str, Any]]] = {phase: [] for phase in FIELDS}
    for e in trace["traceEvents"]:
        assert {"name", "ph", "pid"} | FIELDS[e["ph"]] <= e.keys() and e["pid"] > 0, e
        assert e["ph"] == "C" or e["tid"] > 0, e  # 0 is the idle process and thread
        assert e.get("ts", 0) >= 0 and e.get("dur", 0) >= 0, e
        by[e["ph"]].append(e)
    named = {e["tid"] for e in by["M"] if e["name"] == "thread_name"}
    assert {e["tid"] for e in by["X"]} == named and len({e["pid"] for e in trace["traceEvents"]}) == 1
    for tid in named:  # the slices of a thread follow each other
        row = sorted((e for e in by["X"] if e["tid"] == tid), key=lambda e: e["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(row))
    ends = {e["id"]: e for e in by["f"]}
    assert len(ends) == len(by["f"]) == len(by["s"])
    for e in by["s"]:  # a flow binds to slices that hold its ends, and goes forward
        assert e["ts"] <= ends[e["id"]]["ts"]
        for end in (e, ends[e["id"]]):
            row = [x for x in by["X"] if x["tid"] == end["tid"]]
            assert any(x["ts"] <= end["ts"] <= x["ts"] + x["dur"] for x in row), end
    return by


def ref(offset: int) -> MemoryRef:
    return MemoryRef("arena", offset, offset, 64)


def call(reads: list[int], writes: int, parallel: bool = True) -> Call:
    return Call("k", (*map(ref, reads), ref(writes)), (ref(writes),), (), parallel)


CALLS = [call([], 0), call([0], 64), call([0, 64], 0), call([0], 0), call([128, 64], 192)]


def test_flows_come_from_the_last_writer_also_in_place() -> None:
    assert flows(CALLS) == ((0, 1), (0, 2), (1, 2), (2, 3), (1, 4))


def test_spans_of_threads_without_a_part_are_left_out() -> None:
    calls = [call([], 0), call([0], 64, parallel=False)]
    stamps = np.array([[100, 110, 115, 130], [102, 112, 113, 113]])
    layout = Layout(calls)
    times = layout.spans(stamps[:, : layout.places])
    assert times.shape == (2, 2, 2) and times[0].tolist() == [[0, 10], [2, 12]] and np.isnan(times[1, 1]).all()
    run = timeline(times, [("a", "x"), ("b", "y")], calls, [64, 128])
    assert [(s.call, s.thread) for s in run.spans] == [(0, 0), (0, 1), (1, 0)]
    assert run.alive == (64, 128) and run.flows == ((0, 1),)


def test_a_loop_has_no_flows_and_host_steps_follow_segments() -> None:
    times = np.array([[[0.0, 1.0]], [[1.0, 2.0]]])
    run = timeline(times, [("a", ""), ("a", "")], CALLS[:1], [1])
    assert run.flows == run.alive == ()
    whole = joined([run, Span(0, HOST, 0.0, 0.5, "split", "words"), run])
    assert [(s.call, s.thread, s.start) for s in whole.spans] == [
        (0, 0, 0.0), (1, 0, 1.0), (2, HOST, 2.0), (3, 0, 2.5), (4, 0, 3.5),
    ]  # fmt: skip
    assert whole.seconds == 4.5


def test_events() -> None:
    times = np.array([[[0.0, 1e-6]], [[2e-6, 3e-6]]])
    made = chrome_trace(
        timeline(times, [("a", "x"), ("a", "y")], CALLS[:2], [64, 128]), "m", "cuda", {("a", "y"): {"schedule": "s"}}
    )
    events: list[dict[str, Any]] = made["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["m (cuda)", "stream 0"]
    assert [(e["ts"], e["dur"], e["args"].get("schedule")) for e in events if e["ph"] == "X"] == [
        (0, pytest.approx(1), None), (pytest.approx(2), pytest.approx(1), "s"),
    ]  # fmt: skip
    assert [e["args"]["bytes alive"] for e in events if e["ph"] == "C"] == [64, 128, 0]
    assert [(e["ph"], e["id"]) for e in events if e["ph"] in "sf"] == [("s", 0), ("f", 0)]


@pytest.mark.slow
def test_a_real_program(tmp_path: Path) -> None:
    model = Path(__file__).resolve().parents[3] / "examples" / "digits.onnx"
    f = dnnc.compile(str(model), dims={"N": 8}, threads=1)
    p = f.profile(np.zeros((8, 1, 8, 8), np.float32), repeats=10)
    p.trace(tmp_path / "t.json")
    by = check_format(json.loads((tmp_path / "t.json").read_text()))
    spans = by["X"]
    assert len(by["C"]) == len(p.calls) + 1 and len(by["s"]) >= len(p.calls) - 1
    assert len(spans) == len(p.calls) and all(s["args"]["schedule"] for s in spans)
    assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(spans))
    assert "timeline" not in p.as_dict()
    with pytest.raises(InputError, match="cannot write"):
        p.trace(tmp_path / "none" / "t.json")


@pytest.mark.slow
def test_threads_and_host_steps(tmp_path: Path) -> None:
    """A matrix product of two threads, and the number of non-zeros, which the data tell."""
    f = dnnc.compile(parse_model(COUNTS), threads=2)
    p = f.profile(np.ones((256, 256), np.float32), repeats=5)
    p.trace(tmp_path / "t.json")
    by = check_format(json.loads((tmp_path / "t.json").read_text()))
    rows = {e["args"]["name"] for e in by["M"] if e["name"] == "thread_name"}
    assert rows == {"host steps", "thread 0", "thread 1"}
