"""The entry function: where barriers stand, and what its text says."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest

from dnnc.backends.llvm.compile import compile_text, load_objects
from dnnc.backends.llvm.entry import barriers, entry_text, stamp_places, timed_entry_text
from dnnc.backends.llvm.runtime import runtime
from dnnc.backends.runtime.frames import Frame, aligned_empty
from dnnc.backends.runtime.program import Call, MemoryRef

IN, OUT, W = MemoryRef("buffer", 0), MemoryRef("buffer", 1), MemoryRef("constant", 128)
A, B, C = (
    MemoryRef("arena", 0, 0, 256),
    MemoryRef("arena", 1, 256, 256),
    MemoryRef("arena", 2, 192, 128),
)  # C lies in the end of A and the start of B
SA, SB = MemoryRef("arena", 0), MemoryRef("arena", 1)  # of a symbolic plan
LA, LB, LC = (
    MemoryRef("arena", k, life=life) for k, life in enumerate([(0, 2), (1, 3), (3, 4)])
)  # whose slots are their own at these steps


def call(
    reads: list[MemoryRef],
    writes: list[MemoryRef],
    parallel: bool = True,
    name: str = "k_a",
    dims: tuple[int, ...] = (),
) -> Call:
    return Call(name, (*reads, *(w for w in writes if w not in reads)), tuple(writes), dims, parallel)


CASES: dict[str, tuple[list[Call], list[bool]]] = {
    "nothing before the first": ([call([IN, W], [A])], [False]),
    "read after write": ([call([IN], [A]), call([A], [OUT])], [False, True]),
    "write after read, through a reused stretch": ([call([A], [OUT]), call([IN], [C])], [False, True]),
    "write after write": ([call([IN], [A]), call([IN], [C])], [False, True]),
    "independent kernels": ([call([IN], [A]), call([IN], [B]), call([IN, W], [OUT])], [False, False, False]),
    "one barrier serves both": (
        [call([IN], [A]), call([IN], [B]), call([A], [OUT]), call([B], [MemoryRef("buffer", 2)])],
        [False, False, True, False],
    ),
    "what came before a barrier is forgotten": (
        [call([IN], [A]), call([A], [B]), call([A], [OUT])],
        [False, True, False],
    ),
    "what came since is not": ([call([IN], [A]), call([A], [B]), call([B], [OUT])], [False, True, True]),
    "in place is a write": ([call([IN], [A]), call([A], [A])], [False, True]),
    "two readers": ([call([IN, A], [OUT]), call([IN, A], [B])], [False, False]),
    "constants never conflict": ([call([W], [A]), call([W], [B])], [False, False]),
    "thread 0 alone is in order": (
        [call([IN], [A], False), call([A], [B], False), call([B], [OUT], False)],
        [False, False, False],
    ),
    "from thread 0 to all": ([call([IN], [A], False), call([A], [OUT])], [False, True]),
    "from all to thread 0": ([call([IN], [A]), call([A], [OUT], False)], [False, True]),
    "all, then thread 0, then thread 0": (
        [call([IN], [A]), call([A], [B], False), call([B], [OUT], False)],
        [False, True, False],
    ),
    "symbolic offsets may meet": ([call([IN], [SA]), call([IN], [SB])], [False, True]),
    "not those of slots that are alive together": (
        [call([IN], [LA]), call([IN], [LB]), call([LB], [LC])],
        [False, False, True],
    ),
    "but those of slots that follow each other": ([call([IN], [LA]), call([IN], [LC])], [False, True]),
    "the outputs of a symbolic plan do not": ([call([IN], [SA]), call([IN], [OUT])], [False, False]),
}


@pytest.mark.parametrize("name", CASES)
def test_barriers(name: str) -> None:
    calls, expected = CASES[name]
    assert barriers(calls) == expected


@pytest.mark.parametrize(
    ("a", "b", "meet"),
    [
        (A, A, True),
        (A, B, False),
        (A, C, True),
        (C, B, True),
        (IN, IN, True),
        (IN, OUT, False),
        (W, W, False),
        (A, IN, False),
        (SA, B, True),
        (LA, LB, False),
        (LA, LC, True),
        (LB, LC, False),
        (LA, LA, True),
        (LA, SB, True),
    ],
)
def test_places_that_meet(a: MemoryRef, b: MemoryRef, meet: bool) -> None:
    assert a.meets(b) is b.meets(a) is meet


def test_text_of_a_static_program(golden: Callable[..., None]) -> None:
    golden(entry_text([call([IN, W], [A]), call([A], [B], False, "k_b"), call([B], [OUT], True, "k_c")]))


def test_text_of_a_symbolic_program(golden: Callable[..., None]) -> None:
    golden(entry_text([call([IN], [SA], True, "k_a", (1, 0)), call([SA, W], [OUT], True, "k_b", (0,))]))


KERNELS = """
define void @k_store(i64 %n, ptr %x, ptr %y, ptr %frame, i64 %tid, i64 %nthreads) {
  %v = load i64, ptr %x
  %w = add i64 %v, %n
  store i64 %w, ptr %y
  ret void
}
define void @k_count(ptr %y, ptr %frame, i64 %tid, i64 %nthreads) {
  %v = load i64, ptr %y
  %w = add i64 %v, %nthreads
  store i64 %w, ptr %y
  ret void
}
"""


def test_run() -> None:
    """A constant goes through the arena at a symbolic offset to the output; thread 0 runs a serial kernel."""
    count, out = MemoryRef("buffer", 0), MemoryRef("buffer", 1)
    calls = [
        call([W], [SA], False, "k_store", (0,)),
        call([SA], [out], False, "k_store", (1,)),
        call([count], [count], False, "k_count"),
    ]
    loaded = load_objects([compile_text(text, "x86-64", "") for text in (KERNELS, entry_text(calls, "go"))])
    entry = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_void_p] * 3, ctypes.c_int64, ctypes.c_int64)(
        loaded.address("go")
    )
    constants = aligned_empty(256).view(np.int64)
    constants[:] = 1000
    frame = Frame(512, 1, constants.ctypes.data)
    frame.offsets[:] = 64
    frame.arena[:] = 0
    counted, result, dims = np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([7, 30])
    pointers = (ctypes.c_void_p * 2)(counted.ctypes.data, result.ctypes.data)
    for tid in (0, 1):
        assert entry(frame.address, ctypes.addressof(pointers), dims.ctypes.data, tid, 2) == 0
    assert result[0] == 1037 and frame.arena.view(np.int64)[8] == 1007
    assert counted[0] == 1  # thread 1 did not run it, and thread 0 was told that it is alone


# --- time -------------------------------------------------------------------------------------------------------------


def test_stamps_share_a_place_where_no_barrier_is() -> None:
    calls = [call([IN], [A]), call([IN], [B]), call([A], [OUT]), call([B], [MemoryRef("buffer", 2)])]
    assert barriers(calls) == [False, False, True, False]
    assert stamp_places(calls) == [(0, 1), (1, 2), (3, 4), (4, 5)]


def test_text_of_a_timed_entry(golden: Callable[..., None]) -> None:
    golden(timed_entry_text([call([IN, W], [A]), call([A], [OUT], False, "k_b")], {"k_a": 4096, "k_b": 8192}, 2, 16))


def test_timed_entry_runs_the_kernels_and_notes_ticks_in_order() -> None:
    calls = [call([IN], [OUT], True, "k_store", (0,)), call([OUT], [OUT], False, "k_count")]
    kernels = load_objects([compile_text(KERNELS, "x86-64", "")])
    addresses = {c.symbol: kernels.address(c.symbol) for c in calls}
    timed = load_objects([compile_text(timed_entry_text(calls, addresses, 2, 16), "x86-64", "")])
    x, y, stamps, dims = np.array([5]), np.zeros(1, np.int64), np.zeros((2, 16), np.int64), np.array([2])
    pointers = (ctypes.c_void_p * 3)(x.ctypes.data, y.ctypes.data, stamps.ctypes.data)
    status = runtime().run(timed.address("entry"), Frame(64).address, ctypes.addressof(pointers), dims.ctypes.data, 2)
    assert (status, y[0]) == (0, 8)  # 5 + 2, and 1 for the thread that runs it alone
    assert [p for pair in stamp_places(calls) for p in pair] == [0, 1, 2, 3]
    assert (np.diff(stamps[:, :4]) >= 0).all() and stamps[:, 0].min() > 0 and not stamps[:, 4:].any()
    ticks = ctypes.CFUNCTYPE(ctypes.c_int64)(timed.address("ticks"))
    assert stamps[0, 3] < ticks() < ticks()
