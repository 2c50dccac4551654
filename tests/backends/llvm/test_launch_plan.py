"""The runner: it calls what a table says, with the arguments in their places, and lets threads meet."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from dnnc.backends.llvm.compile import Loaded, compile_text, load_objects
from dnnc.backends.llvm.features import parse_target
from dnnc.backends.llvm.launch_plan import CONSTANTS, MOST_ARGUMENTS, PARALLEL, Record, can_run, records_of, runner, table_of
from dnnc.backends.places import Call, Place
from dnnc.backends.runtime import Frame, runtime


def summing(count: int) -> Loaded:
    """A kernel of `count` pointers: the sum of the numbers at all but the last, and of its thread's number + 1, goes to the last one's place for
    that thread."""
    args = ", ".join(f"ptr %a{k}" for k in range(count))
    lines = [f"define void @k_sum({args}, ptr %frame, i64 %tid, i64 %nthreads) nounwind {{", "  %s0 = add i64 %tid, 1"]
    for k in range(count - 1):
        lines += [f"  %v{k} = load i64, ptr %a{k}", f"  %s{k + 1} = add i64 %s{k}, %v{k}"]
    lines += [f"  %to = getelementptr i64, ptr %a{count - 1}, i64 %tid", f"  store i64 %s{count - 1}, ptr %to", "  ret void", "}"]
    target = parse_target("llvm")
    return load_objects([compile_text("\n".join(lines) + "\n", target.cpu, target.features)])


@pytest.mark.parametrize("count", [1, 2, 5, 6, 13, 14, 40, MOST_ARGUMENTS])
def test_arguments_arrive(count: int) -> None:
    loaded = summing(count)
    data = np.arange(1, count + 1, dtype=np.int64)
    out = np.zeros(4, np.int64)
    pointers = (ctypes.c_void_p * 4)(0, 0, data.ctypes.data, out.ctypes.data)
    args = [word for k in range(count - 1) for word in (2, 8 * k)] + [3, 0]
    table = table_of([Record("k_sum", 0, tuple(args))], {"k_sum": loaded.address("k_sum")})
    frame = Frame(0)
    assert runtime().run(runner().entry, frame.address, ctypes.addressof(pointers), table.ctypes.data, 1) == 0
    assert out[0] == data[: count - 1].sum() + 1


def test_serial_kernels_run_once_and_parallel_ones_on_all_threads() -> None:
    loaded = summing(1)
    for flags, expected in ((0, [1, 0]), (PARALLEL, [1, 2])):
        out = np.zeros(2, np.int64)
        pointers = (ctypes.c_void_p * 3)(0, 0, out.ctypes.data)
        table = table_of([Record("k_sum", flags, (2, 0))], {"k_sum": loaded.address("k_sum")})
        frame = Frame(0)
        runtime().run(runner().entry, frame.address, ctypes.addressof(pointers), table.ctypes.data, 2)
        assert out.tolist() in (expected, [1, 0])  # the second where another test has the pool: a run is alone then


def test_records_name_bases_and_barriers() -> None:
    write, read = Place("arena", 0, 64, 32), Place("buffer", 1, nbytes=32)
    first = Call("k_a", (Place("constant", 128), write), (write,), (), True)
    second = Call("k_b", (write, read), (read,), (0,), True)
    a, b = records_of([first, second], buffers=2)
    assert a == Record("k_a", PARALLEL, (CONSTANTS, 128, 0, 64))
    assert b == Record("k_b", PARALLEL + 1, (4, 0, 0, 64, 3, 0))  # its size stands behind the two buffers
    assert can_run([first, second])
    assert not can_run([Call("k_c", (Place("arena", 0),), (), (), False)])  # a place that only a call's sizes tell
