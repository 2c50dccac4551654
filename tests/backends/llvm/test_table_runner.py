"""The runner: it calls what a table says, with the arguments in their places, and lets threads meet."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from dnnc.backends.llvm.compile import Loaded, compile_text, load_objects
from dnnc.backends.llvm.features import parse_target
from dnnc.backends.llvm.runtime import runtime
from dnnc.backends.llvm.table_runner import (
    BARRIER,
    BUFFERS,
    CLAIMED,
    CONSTANTS,
    COUNTER,
    LARGE,
    MOST_ARGUMENTS,
    PARALLEL,
    SHARES,
    ZERO,
    Record,
    can_run,
    counters,
    records_of,
    runner,
    table_of,
)  # fmt: skip
from dnnc.backends.runtime.frames import Frame
from dnnc.backends.runtime.program import Call, MemoryRef


def summing(count: int) -> Loaded:
    """A kernel of `count` pointers: the sum of the numbers at all but the last, and of its thread's number + 1, goes to
    the last one's place for that thread.
    """
    args = ", ".join(f"ptr %a{k}" for k in range(count))
    lines = [f"define void @k_sum({args}, ptr %frame, i64 %tid, i64 %nthreads) nounwind {{", "  %s0 = add i64 %tid, 1"]
    for k in range(count - 1):
        lines += [f"  %v{k} = load i64, ptr %a{k}", f"  %s{k + 1} = add i64 %s{k}, %v{k}"]
    lines += [
        f"  %to = getelementptr i64, ptr %a{count - 1}, i64 %tid",
        f"  store i64 %s{count - 1}, ptr %to",
        "  ret void",
        "}",
    ]
    target = parse_target("llvm")
    return load_objects([compile_text("\n".join(lines) + "\n", target.cpu, target.features)])


@pytest.mark.parametrize("count", [1, 2, 5, 6, 13, 14, 40, MOST_ARGUMENTS])
def test_arguments_arrive(count: int) -> None:
    loaded = summing(count)
    data = np.arange(1, count + 1, dtype=np.int64)
    out = np.zeros(4, np.int64)
    pointers = (ctypes.c_void_p * (BUFFERS + 2))(0, 0, 0, data.ctypes.data, out.ctypes.data)
    args = [word for k in range(count - 1) for word in (BUFFERS, 8 * k)] + [BUFFERS + 1, 0]
    table = table_of([Record("k_sum", 0, tuple(args))], {"k_sum": loaded.address("k_sum")})
    frame = Frame(0)
    assert runtime().run(runner().entry, frame.address, ctypes.addressof(pointers), table.ctypes.data, 1) == 0
    assert out[0] == data[: count - 1].sum() + 1


def test_serial_kernels_run_once_and_parallel_ones_on_all_threads() -> None:
    loaded = summing(1)
    for flags, expected in ((0, [1, 0]), (PARALLEL, [1, 2])):
        out = np.zeros(2, np.int64)
        pointers = (ctypes.c_void_p * (BUFFERS + 1))(0, 0, 0, out.ctypes.data)
        table = table_of([Record("k_sum", flags, (BUFFERS, 0))], {"k_sum": loaded.address("k_sum")})
        frame = Frame(0)
        runtime().run(runner().entry, frame.address, ctypes.addressof(pointers), table.ctypes.data, 2)
        assert out.tolist() in (expected, [1, 0])  # the second where another test has the pool: a run is alone then


def test_records_name_bases_and_barriers() -> None:
    write, read = MemoryRef("arena", 0, 64, 32), MemoryRef("buffer", 1, nbytes=32)
    first = Call("k_a", (MemoryRef("constant", 128), write), (write,), (), True)
    second = Call("k_b", (write, read), (read,), (0,), True)
    a, b = records_of([first, second], buffers=2)
    assert a == Record("k_a", PARALLEL, (CONSTANTS, 128, 0, 64))
    assert b == Record(
        "k_b", PARALLEL + 1, (BUFFERS + 2, 0, 0, 64, BUFFERS + 1, 0)
    )  # its size stands behind the buffers
    assert can_run([first, second])
    assert not can_run([Call("k_c", (MemoryRef("arena", 0),), (), (), False)])  # a place that only a call's sizes tell


def test_a_size_is_a_number_and_no_place() -> None:
    size, place = MemoryRef("size", 7), MemoryRef("buffer", 0, inside=64)
    (record,) = records_of([Call("k_a", (size, place), (place,), (), False)], buffers=1)
    assert record == Record("k_a", 0, (ZERO, 7, BUFFERS, 64))
    assert not size.meets(MemoryRef("size", 7))


def test_large_kernels_are_claimed_in_shares_unless_their_threads_meet() -> None:
    small, large = MemoryRef("buffer", 0, nbytes=1 << 20), MemoryRef("buffer", 1, nbytes=LARGE)
    calls = [
        Call(f"k_{name}", (small, of), (of,), (0,), parallel)
        for name, of, parallel in (("a", large, True), ("b", small, True), ("c", large, False))
    ]
    calls += [Call("k_meet", (small, large), (large,), (2,), True), Call("k_d", (large, small), (small,), (), True)]
    records = records_of(calls, 2, {"k_a", "k_b", "k_c", "k_d"})
    assert [r.flags & CLAIMED != 0 for r in records] == [True, False, False, False, True]
    assert [r.flags >> COUNTER for r in records] == [
        BUFFERS + 2 + 3,
        0,
        0,
        0,
        BUFFERS + 2 + 3 + 1,
    ]  # behind two buffers and three sizes
    assert counters(records) == 2


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_each_share_is_computed_once_by_whoever_claims_it(threads: int) -> None:
    """The kernel counts for each thread number that it is told; the counter is 0 again for the next call."""
    lines = [
        "define void @k_count(ptr %a, ptr %frame, i64 %tid, i64 %nthreads) nounwind {",
        "  %p = getelementptr i64, ptr %a, i64 %tid",
    ]
    lines += ["  %v = load i64, ptr %p", "  %w = add i64 %v, %nthreads", "  store i64 %w, ptr %p", "  ret void", "}"]
    target = parse_target("llvm")
    loaded = load_objects([compile_text("\n".join(lines) + "\n", target.cpu, target.features)])
    out = np.zeros(2 * SHARES, np.int64)
    pointers = (ctypes.c_void_p * (BUFFERS + 3))(0, 0, 0, out.ctypes.data, 0, 0)
    flags = [PARALLEL + CLAIMED + (BUFFERS + 1 << COUNTER), BARRIER + PARALLEL + CLAIMED + (BUFFERS + 2 << COUNTER)]
    table = table_of([Record("k_count", f, (BUFFERS, 0)) for f in flags], {"k_count": loaded.address("k_count")})
    frame = Frame(0)
    for _ in range(200):
        out[:] = 0
        assert runtime().run(runner().entry, frame.address, ctypes.addressof(pointers), table.ctypes.data, threads) == 0
        alone = [2, *[0] * (out.size - 1)]  # also where another test has the pool
        assert out.tolist() in ([2 * out.size] * out.size if threads == 2 else alone, alone)
        assert not pointers[BUFFERS + 1] and not pointers[BUFFERS + 2]
