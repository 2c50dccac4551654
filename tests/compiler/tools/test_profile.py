"""Profiles: what stamps mean, and that times, work and names of real programs are where they belong."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import dnnc
from dnnc.backends.base import Ceilings, Level, Samples, numbered
from dnnc.backends.llvm.timing import Layout
from dnnc.backends.runtime.frames import cpu_count
from dnnc.backends.runtime.program import Call, MemoryRef
from dnnc.ir.graph.text import parse
from dnnc.report import KernelReport, MemoryReport, ProgramReport
from dnnc.report.profile_tables import SHOWN_KERNELS, profile_tables
from dnnc.tools.profile import Profile, kernel_time, summarize
from support.times import in_a_quiet_round, quiet

RNG = np.random.default_rng(0)
NET = """
def net(x: f32[N, 256], *, w: f32[256, 256], u: f32[256, 256]):
    h = relu(matmul(x, w))
    s = softmax(h, axis=-1)
    y = relu(matmul(s, u))
    return y
"""
WEIGHTS = {n: RNG.standard_normal((256, 256), np.float32) / 16 for n in "wu"}


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as m:
        path = tmp_path_factory.mktemp("cache")
        m.setenv("DNNC_CACHE_DIR", str(path))
        yield path


def compiled(n: int | None = 64, **options: Any) -> Any:
    return dnnc.compile(parse(NET if n is None else NET.replace("N,", f"{n},"), WEIGHTS), **options)


def inputs(n: int = 64) -> np.ndarray[Any, Any]:
    return RNG.standard_normal((n, 256), np.float32)


def profiled() -> Profile:
    made: Profile = compiled(threads=2).profile(inputs(), repeats=30)
    return made


@pytest.mark.slow
def test_a_profile_leaves_donated_arrays() -> None:
    x = inputs()
    before = x.copy()
    made = compiled(donate={"x": "y"}).profile(x, repeats=2)
    assert np.array_equal(x, before) and made.repeats == 2


@pytest.fixture(scope="module")
def found(folder: Path) -> Profile:
    return profiled()


# --- stamps -----------------------------------------------------------------------------------------------------------


def call(reads: str, writes: str, parallel: bool = True) -> Call:
    places = {name: MemoryRef("arena", k, 64 * k, 64) for k, name in enumerate("abcdef")}
    return Call("k_" + writes, (places[reads], places[writes]), (places[writes],), (), parallel)


def test_a_kernel_takes_as_long_as_its_slowest_thread() -> None:
    layout = Layout(
        [call("a", "b"), call("b", "c")]
    )  # stamps: start, after the first, behind the barrier, after the second
    ticks = layout.times(np.array([[1000, 1100, 1130, 1200], [1010, 1120, 1131, 1190]]))
    assert (ticks.threads, ticks.inside) == (2, 200)
    assert ticks.kernels.tolist() == [110, 70] and ticks.waiting.tolist() == [20, 0]
    assert ticks.balance == pytest.approx([105 / 110, 64.5 / 70])


def test_kernels_between_two_barriers_fill_their_segment() -> None:
    layout = Layout([call("a", "b"), call("a", "c"), call("c", "d")])  # no barrier between the first two
    ticks = layout.times(np.array([[0, 60, 100, 104, 204], [0, 40, 100, 104, 204]]))
    assert ticks.kernels == pytest.approx([52, 52, 100])  # 60 + 60 overlap in the 104 ticks to the end of the barrier
    assert ticks.waiting == pytest.approx([0, 0, 0]) and ticks.inside == 204
    assert ticks.kernels.sum() + ticks.waiting.sum() == pytest.approx(ticks.inside)


def test_a_kernel_of_one_thread_counts_by_that_thread() -> None:
    layout = Layout([call("a", "b", False), call("b", "c")])
    ticks = layout.times(np.array([[0, 50, 55, 80], [0, 1, 55, 85]]))
    assert ticks.kernels.tolist() == [50, 30] and ticks.waiting.tolist() == [5, 0]
    assert ticks.balance[0] == 1


def test_counters_that_differ_between_cores_make_no_negative_times() -> None:
    layout = Layout([call("a", "b"), call("b", "c")])
    ticks = layout.times(np.array([[1000, 1100, 1110, 1200], [990, 1101, 1089, 1195]]))
    assert ticks.kernels.min() >= 0 and ticks.waiting.min() >= 0
    assert ticks.kernels.sum() + ticks.waiting.sum() == pytest.approx(1200 - 990)


# --- figures ----------------------------------------------------------------------------------------------------------

LIMITS = Ceilings(2, 100.0, (Level("L2", 50, 20.0, 25.0), Level("memory", 0, 5.0, 4.0)))


def report_of(count: int, flops: Any, nbytes: Any, symbol: str = "k_b") -> KernelReport:
    return KernelReport("mul", symbol, count, "map()", True, flops, nbytes, ("one", "two")[:count])


@pytest.mark.family("cases")
@pytest.mark.parametrize(
    ("flops", "nbytes", "bound", "reached"),
    [
        (40, 10, "compute", 0.4 / 0.5),
        (10, 10, "L2", 0.4 / 0.5),
        (40, 100, "memory", 20 / 0.5),
        (40, 0, "compute", 0.4 / 0.5),
        ("N", 10, "", None),
    ],
)
def test_the_nearer_limit_is_named(flops: Any, nbytes: Any, bound: str, reached: float | None) -> None:
    half = kernel_time(report_of(1, flops, nbytes), 0.5, 0.1, 1.0, LIMITS)
    assert half.bound == bound and half.reached == (None if reached is None else pytest.approx(reached))
    whole = kernel_time(report_of(2, flops, nbytes), 1.0, 0.1, 1.0, LIMITS)  # twice the work in twice the time
    assert (whole.bound, whole.reached) == (half.bound, half.reached)
    assert whole.flops_per_second == half.flops_per_second and whole.bytes_per_second == half.bytes_per_second


def test_medians_by_call_and_sums_by_kernel() -> None:
    calls = [call("a", "b"), call("b", "c"), call("c", "b")]
    known = ProgramReport(
        {}, False, (), (report_of(2, 40, 10), report_of(1, 1, 1, "k_c")), MemoryReport(0, 0, 0), 0, (), {}
    )
    kernels = np.array([[1.0, 5.0, 3.0], [1.2, 5.2, 3.2], [9.0, 5.1, 3.1]])
    samples = Samples(
        numbered(calls),
        2,
        np.array([10.0, 11.0, 19.0]),
        np.array([0.5, 0.6, 0.7]),
        kernels,
        np.full((3, 3), 0.1),
        np.ones((3, 3)),
        np.zeros((3, 2, 2)),
    )
    p = summarize("m", "llvm", {}, known, samples, LIMITS, calls)
    assert [(k.symbol, k.calls) for k in p.kernels] == [("k_c", 1), ("k_b", 2)]
    assert (
        [k.seconds for k in p.kernels] == pytest.approx([5.1, 1.2 + 3.1])
        and p.total == 11
        and p.kernels[0].share == pytest.approx(5.1 / 11)
    )
    assert p.waiting == pytest.approx(0.3) and p.overhead == 0.6
    assert [(c.kernel, c.nodes) for c in p.calls] == [("mul", "one"), ("mul", "one"), ("mul", "two")]


# --- real programs ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@in_a_quiet_round
def test_a_profile_adds_up_to_the_time_of_a_call() -> None:
    found = profiled()
    parts = sum(k.seconds for k in found.kernels) + found.waiting + found.overhead
    quiet(0.5 * found.total < parts < 1.2 * found.total)
    assert found.repeats == 30
    assert sum(c.seconds for c in found.calls) == pytest.approx(sum(k.seconds for k in found.kernels))
    assert found.threads == min(2, cpu_count()) == found.ceilings.threads


@pytest.mark.slow
@in_a_quiet_round
def test_a_profile_knows_kernels_and_their_work() -> None:
    found = profiled()
    gemm = next(k for k in found.kernels if k.name == "matmul_relu")
    assert gemm.calls == 2 and gemm.flops == 2 * (2 * 64 * 256 * 256 + 64 * 256) and gemm.bound == "compute"
    assert gemm.bytes == 2 * 4 * (2 * 64 * 256 + 256 * 256) and gemm.choice.startswith("contraction(")
    assert gemm.flops_per_second == gemm.flops / gemm.seconds and gemm.reached == pytest.approx(
        gemm.flops_per_second / found.ceilings.flops
    )
    quiet(gemm.flops_per_second > 1e9 and 0.001 < gemm.reached < 5)
    assert [c.kernel for c in found.calls].count("matmul_relu") == 2 and len(found.calls) == sum(
        k.calls for k in found.kernels
    )


@pytest.mark.slow
def test_threads_and_calls_leave_the_model_as_it_was() -> None:
    f, x = compiled(threads=2), inputs()
    before = f(x)
    f.profile(x, repeats=2)
    assert np.array_equal(f(x), before)
    assert f.profile({"x": x}, repeats=1).repeats == f.profile(x=x, repeats=1).repeats == 1


@pytest.mark.slow
@in_a_quiet_round
def test_one_thread_does_not_wait() -> None:
    p = compiled(threads=1).profile(inputs(), repeats=20)
    assert p.threads == 1 and all(k.balance == 1 for k in p.kernels)
    quiet(p.waiting < 0.05 * p.total)


@pytest.mark.slow
@in_a_quiet_round
def test_more_work_takes_longer() -> None:
    f = compiled(None, threads=1)
    small, large = (f.profile(inputs(n), repeats=20) for n in (8, 256))
    assert (small.dims, large.dims) == ({"N": 8}, {"N": 256})
    times = [next(k.seconds for k in p.kernels if k.name == "matmul_relu") for p in (small, large)]
    quiet(times[1] > 4 * times[0])


@pytest.mark.slow
def test_a_program_for_all_sizes_tells_the_work_at_the_sizes_of_the_call() -> None:
    f = compiled(None, threads=1, dims={"N": (1, 512)})
    f(inputs(3))
    for n in (3, 40):
        p = f.profile(inputs(n), repeats=2)
        gemm = next(k for k in p.kernels if k.name == "matmul_relu")
        assert (
            p.dims == {"N": n}
            and gemm.flops == 2 * (2 * n * 256 * 256 + n * 256)
            and gemm.bytes == 2 * 4 * (2 * n * 256 + 256 * 256)
        )


@pytest.mark.slow
def test_a_model_that_is_read_at_the_call() -> None:
    shaped = [helper.make_node("Reshape", ["x", "to"], ["h"]), helper.make_node("Exp", ["h"], ["y"])]
    infos = [
        helper.make_tensor_value_info(n, t, s)
        for n, t, s in (("x", TensorProto.FLOAT, [6]), ("to", TensorProto.INT64, [2]))
    ]
    graph = helper.make_graph(
        shaped, "late", infos, [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["a", "b"])]
    )
    f = dnnc.compile(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    p = f.profile(np.ones(6, np.float32), np.array([2, 3]), repeats=1)
    assert len(p.kernels) == 1 and "Exp" in p.kernels[0].nodes[0]


@pytest.mark.slow
def test_a_loaded_model(tmp_path: Path) -> None:
    f = compiled(None, threads=1, dims={"N": (1, 512)})
    f(inputs(3))
    f.save(tmp_path / "net.dnnc")
    g = dnnc.load(tmp_path / "net.dnnc", threads=1)
    same, other = (g.profile(inputs(n), repeats=2) for n in (3, 40))
    own = {k.symbol: (k.flops, k.bytes, k.nodes) for k in f.profile(inputs(3), repeats=1).kernels}
    assert {k.symbol: (k.flops, k.bytes, k.nodes) for k in same.kernels} == own
    assert all(k.flops is k.reached is None and k.seconds > 0 for k in other.kernels) and "-" in str(other)


@pytest.mark.slow
def test_default_number_of_calls_is_bounded() -> None:
    assert 10 <= compiled(8, threads=1).profile(inputs(8)).repeats <= 1000


# --- what it looks like -----------------------------------------------------------------------------------------------


def test_text_and_json(found: Profile) -> None:
    text = str(found)
    assert (
        all(word in text for word in ("GFLOP/s", "waiting at barriers", "total", "matmul_relu", "of limit", "L2"))
        and "calls in program order" not in text
    )
    assert "calls in program order" in found.text(detail=True)
    data = json.loads(found.to_json())
    assert data["kernels"][0]["flops_per_second"] == found.kernels[0].flops_per_second and len(data["calls"]) == len(
        found.calls
    )
    assert data["ceilings"]["levels"][0]["name"] == "L2" and data["dims"] == {}


def test_short_tables_add_up_what_they_leave_out(found: Profile) -> None:
    many = dataclasses.replace(found, kernels=tuple(found.kernels[0] for _ in range(SHOWN_KERNELS + 4)))
    kernels = profile_tables(many)[2]
    assert kernels.rows[-1][0] == "and 4 more" and len(kernels.rows) == SHOWN_KERNELS + 1
    assert all(len(r) == len(kernels.columns) for r in kernels.rows)
    assert len(profile_tables(many, detail=True)[2].rows) == SHOWN_KERNELS + 4


# --- what cannot be profiled ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_wrong_arguments_are_errors_of_the_user() -> None:
    f = compiled(8, threads=1)
    with pytest.raises(dnnc.InputError, match="at least 1"):
        f.profile(inputs(8), repeats=0)
    with pytest.raises(dnnc.InputError, match="input x: expected float32"):
        f.profile(inputs(8).astype(np.float64))
    with pytest.raises(dnnc.InputError, match="no input 'z'"):
        f.profile(z=inputs(8))


def test_what_has_no_kernels_cannot_be_profiled() -> None:
    with pytest.raises(dnnc.InputError, match="nothing to profile"):
        dnnc.compile(parse("N: dim[0, 64]\n" + NET, WEIGHTS), threads=1).profile(inputs(0))
    with pytest.raises(dnnc.UnsupportedError, match="target reference"):
        compiled(8, target="reference").profile(inputs(8))


def test_a_clock_that_stands_still_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dnnc.backends.llvm.timing.Clock._read", lambda self: (0.0, 0))
    with pytest.raises(dnnc.UnsupportedError, match="no cycle counter"):
        compiled(8, threads=1).profile(inputs(8), repeats=1)
