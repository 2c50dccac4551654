"""The thread pool: barriers hold, a busy pool is no obstacle, forks get their own, idle threads sleep."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from dnnc.backends.llvm.compile import Loaded, compile_text, load_objects
from dnnc.backends.llvm.elf import undefined_symbols
from dnnc.backends.llvm.instance import python_api
from dnnc.backends.llvm.pool import (
    CALL_API,
    CALL_ENTRY,
    CALL_FRAME,
    CALL_NTHREADS,
    CALL_OUT,
    CALL_WORDS,
    MAX_THREADS,
    pool_text,
)
from dnnc.backends.llvm.runtime import NativePool, load_pool, runtime
from dnnc.backends.runtime.frames import FRAME_BARRIER, FRAME_NTHREADS, Frame, aligned_empty, cpu_count, has_threads
from support.times import in_a_quiet_round, quiet

ENTRIES = f"""
; every thread counts in its own cell and, past a barrier, finds its neighbour at the same count; dims[0] rounds, \
two barriers each
define i64 @rounds(ptr %frame, ptr %cells, ptr %dims, i64 %tid, i64 %n) nounwind {{
entry:
  %barrier.p = getelementptr i64, ptr %frame, i64 {FRAME_BARRIER}
  %barrier = load ptr, ptr %barrier.p
  %count = load i64, ptr %dims
  %up = add i64 %tid, 1
  %next = urem i64 %up, %n
  %mine = getelementptr i64, ptr %cells, i64 %tid
  %theirs = getelementptr i64, ptr %cells, i64 %next
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %i.next, %step ]
  %i.next = add i64 %i, 1
  %old = load i64, ptr %mine
  %new = add i64 %old, 1
  store i64 %new, ptr %mine
  call void %barrier(ptr %frame)
  %seen = load i64, ptr %theirs
  %ok = icmp eq i64 %seen, %i.next
  br i1 %ok, label %step, label %wrong
wrong:
  %status = getelementptr i64, ptr %frame, i64 4
  store i64 7, ptr %status
  br label %step
step:
  call void %barrier(ptr %frame)
  %more = icmp ult i64 %i.next, %count
  br i1 %more, label %loop, label %done
done:
  ret i64 0
}}

; adds 1 to cells[tid], then waits until dims[0] is set
define i64 @hold(ptr %frame, ptr %cells, ptr %dims, i64 %tid, i64 %n) nounwind {{
  %mine = getelementptr i64, ptr %cells, i64 %tid
  %old = atomicrmw add ptr %mine, i64 1 seq_cst, align 8
  br label %loop
loop:
  %go = load atomic i64, ptr %dims acquire, align 8
  %set = icmp ne i64 %go, 0
  br i1 %set, label %done, label %loop
done:
  ret i64 0
}}

; cells[tid] += 1, cells[n] = dims[0]
define i64 @mark(ptr %frame, ptr %cells, ptr %dims, i64 %tid, i64 %n) nounwind {{
  %mine = getelementptr i64, ptr %cells, i64 %tid
  %old = atomicrmw add ptr %mine, i64 1 seq_cst, align 8
  %d = load i64, ptr %dims
  %last = getelementptr i64, ptr %cells, i64 %n
  store atomic i64 %d, ptr %last seq_cst, align 8
  ret i64 0
}}
"""

several_threads = pytest.mark.parametrize("threads", [2, 3, 4])

EMPTY = "define i64 @entry(ptr %f, ptr %b, ptr %d, i64 %t, i64 %n) {\n  ret i64 0\n}\n"


@pytest.fixture(scope="module")
def entries() -> Loaded:
    return load_objects([compile_text(ENTRIES, "x86-64" if has_threads() else "generic", "")])


@pytest.fixture
def pool() -> Iterator[NativePool]:
    """A pool of its own, with its own threads."""
    p = load_pool()
    yield p
    assert p.stop() == 0


def call(
    pool: NativePool, entries: Loaded, name: str, dims: list[int], threads: int, cells: int = MAX_THREADS + 1
) -> tuple[int, list[int], Frame]:
    """Run an entry; (status, cells, frame)."""
    frame, c, d = Frame(0), np.zeros(cells, np.int64), np.array(dims, np.int64)
    status = pool.launch(entries.address(name), frame.address, c.ctypes.data, d.ctypes.data, threads)
    return status, c.tolist(), frame


@pytest.mark.slow
@several_threads
def test_barrier_separates_the_rounds(pool: NativePool, entries: Loaded, threads: int) -> None:
    rounds = 5000 if threads == 2 else 1500  # more threads than cores sleep in most barriers
    status, cells, frame = call(pool, entries, "rounds", [rounds], threads)
    assert status == 0
    assert frame.status == (0, 0, 0)
    assert cells[: threads + 1] == [rounds] * threads + [0]
    assert frame.slots[FRAME_NTHREADS] == threads


def test_a_broken_round_would_be_seen(pool: NativePool, entries: Loaded) -> None:
    frame, cells, dims = Frame(0), np.zeros(9, np.int64), np.array([1])
    cells[1] = 5  # the neighbour is ahead
    assert pool.launch(entries.address("rounds"), frame.address, cells.ctypes.data, dims.ctypes.data, 2) == 7
    assert frame.status[0] == 7
    assert (
        pool.launch(entries.address("mark"), frame.address, cells.ctypes.data, dims.ctypes.data, 2) == 0
    )  # a run clears the status


def test_one_thread_is_a_direct_call(pool: NativePool, entries: Loaded) -> None:
    status, cells, frame = call(pool, entries, "rounds", [10], 1)
    assert (status, cells[:2]) == (0, [10, 0])
    assert frame.slots[FRAME_NTHREADS] == 1
    for absurd in (0, -3):
        assert call(pool, entries, "mark", [9], absurd)[1][:2] == [1, 9]


@pytest.mark.slow
def test_sizes_may_alternate(pool: NativePool, entries: Loaded) -> None:
    for k in range(300):
        threads = (2, 4, 1, 3, 7)[k % 5]
        assert call(pool, entries, "mark", [k], threads)[1][: threads + 1] == [1] * threads + [k]


def test_thread_count_is_capped(pool: NativePool, entries: Loaded) -> None:
    _, cells, frame = call(pool, entries, "mark", [5], 10 * MAX_THREADS)
    n = int(frame.slots[FRAME_NTHREADS])
    assert 1 <= n <= MAX_THREADS  # fewer where the system gives no more threads
    assert cells[:n] == [1] * n


def test_sleeping_workers_wake_up(pool: NativePool, entries: Loaded) -> None:
    for _ in range(5):
        time.sleep(0.01)
        assert call(pool, entries, "rounds", [20], 2)[0] == 0


@pytest.mark.slow
@in_a_quiet_round
def test_idle_threads_sleep(pool: NativePool, entries: Loaded) -> None:
    call(pool, entries, "mark", [0], 4)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.2)
    quiet(time.process_time() - before < 0.05)


def test_a_caller_that_finds_the_pool_busy_runs_alone(pool: NativePool, entries: Loaded) -> None:
    frame, cells, go = Frame(0), np.zeros(8, np.int64), np.zeros(1, np.int64)
    args = (entries.address("hold"), frame.address, cells.ctypes.data, go.ctypes.data, 2)
    holder = threading.Thread(target=pool.launch, args=args)
    holder.start()
    while cells[:2].tolist() != [1, 1]:
        time.sleep(0.001)
    try:
        status, other, alone = call(pool, entries, "mark", [42], 2)
        assert (status, other[:3]) == (0, [1, 42, 0])
        assert alone.slots[FRAME_NTHREADS] == 1
        assert call(pool, entries, "rounds", [3], 2)[0] == 0  # its barriers let it pass
        assert pool.stop() == 1  # a run under way is left alone
    finally:
        go[0] = 1
        holder.join()
    assert call(pool, entries, "mark", [1], 2)[1][:3] == [1, 1, 1]


def test_many_python_threads_share_the_pool(pool: NativePool, entries: Loaded) -> None:
    bad: list[object] = []

    def work() -> None:
        for _ in range(200):
            status, cells, frame = call(pool, entries, "rounds", [3], 2)
            n = int(frame.slots[FRAME_NTHREADS])
            if status or cells[: n + 1] != [3] * n + [0]:
                bad.append((status, n, cells[:4]))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not bad


def test_stopped_pool_starts_again(pool: NativePool, entries: Loaded) -> None:
    for _ in range(3):
        assert call(pool, entries, "rounds", [5], 3)[0] == 0
        assert pool.stop() == 0


@pytest.mark.slow
def test_affinity_is_given_back(pool: NativePool, entries: Loaded) -> None:
    if not hasattr(os, "sched_getaffinity"):
        return
    before = os.sched_getaffinity(0)
    call(pool, entries, "rounds", [200], 4)
    assert os.sched_getaffinity(0) == before


FORK = """
import os, sys
import numpy as np
from dnnc.backends.llvm.compile import compile_text, load_objects
from dnnc.backends.llvm.runtime import runtime
from dnnc.backends.runtime.frames import Frame
entries = load_objects([compile_text({text!r}, {cpu!r}, "")])
launch = runtime().launch
def right(threads):
    frame, cells, dims = Frame(0), np.zeros(9, np.int64), np.array([50])
    status = launch(entries.address("rounds"), frame.address, cells.ctypes.data, dims.ctypes.data, threads)
    return status == 0 and cells.tolist() == [50] * threads + [0] * (9 - threads)
assert right(2)
pid = os.fork()
if pid == 0:
    os._exit(0 if right(2) and right(3) else 1)
assert os.waitpid(pid, 0)[1] == 0 and right(2)
print("ok")
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", [FORK])
def test_a_forked_child_has_its_own_threads(script: str) -> None:
    code = script.format(text=ENTRIES, cpu="x86-64" if has_threads() else "generic")
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=600)
    assert (ended.returncode, ended.stdout) == (0, "ok\n"), ended.stderr


def test_without_threads_the_functions_are_the_same(entries: Loaded) -> None:
    obj = compile_text(pool_text(threads=False), "x86-64" if has_threads() else "generic", "")
    assert undefined_symbols(obj) == set()
    lone = load_objects([obj])
    run = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_void_p] * 5, ctypes.c_int64)(lone.address("dnnc_pool_run"))
    frame, cells, dims = Frame(0), np.zeros(4, np.int64), np.array([6])
    assert run(0, entries.address("rounds"), frame.address, cells.ctypes.data, dims.ctypes.data, 4) == 0
    assert cells.tolist() == [6, 0, 0, 0]
    assert frame.slots[FRAME_NTHREADS] == 1


def test_the_runtime_is_one_per_process(entries: Loaded) -> None:
    assert runtime() is runtime()
    assert runtime().start() is runtime().start()
    cells, dims, frame = np.zeros(4, np.int64), np.array([3]), Frame(0)
    assert runtime().run(entries.address("mark"), frame.address, cells.ctypes.data, dims.ctypes.data, 2) == 0
    assert runtime().stop()


def test_frames_are_aligned() -> None:
    for n in (0, 1, 63, 64, 1000):
        assert aligned_empty(n).shape == (n,)
        assert aligned_empty(n, 4096).ctypes.data % 4096 == 0
        frame = Frame(n, offsets=3, constants=1234)
        assert frame.address % 64 == 0
        assert frame.slots[:4].tolist() == [frame.arena.ctypes.data, frame.offsets.ctypes.data, 0, 1234]
        assert frame.arena.ctypes.data % 64 == 0
    assert 1 <= cpu_count() <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    "a",
    [
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.arange(12)[5:],
        np.empty((0, 3)),
        np.array(3.0),
        np.ones(3, ml_dtypes.bfloat16),
        np.frombuffer(bytes(range(64)), np.uint8, 8, 16),
        np.arange(6.0).view(np.matrix),
    ],
)
def test_a_call_finds_the_memory_of_arrays(a: np.ndarray) -> None:
    """Of arrays that are read-only, views, empty, of no dimension, and of dtypes that are not NumPy's."""
    out, record = np.zeros(3, np.int64), np.zeros(CALL_WORDS, np.int64)
    record[CALL_API:] = python_api()
    record[CALL_OUT] = out.ctypes.data
    nothing = load_objects([compile_text(EMPTY, "x86-64", "")])
    frame = Frame(64)
    record[CALL_ENTRY], record[CALL_FRAME], record[CALL_NTHREADS] = nothing.address("entry"), frame.address, 1
    assert runtime().call(record.ctypes.data, [a, a], (a,)) == 0
    assert out.tolist() == [a.ctypes.data] * 3


def test_a_call_says_what_has_no_buffer() -> None:
    record, out = np.zeros(CALL_WORDS, np.int64), np.zeros(3, np.int64)
    record[CALL_API:] = python_api()
    record[CALL_OUT] = out.ctypes.data
    with pytest.raises(TypeError, match="bytes-like object is required"):
        runtime().call(record.ctypes.data, [3.0], [])
