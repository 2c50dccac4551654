"""What a parallel call costs: the foreign call itself, dispatch to more threads, a barrier. `python benchmarks/pool.py`

Each figure is the median and the 99th percentile over repetitions. `after 1 ms idle`: the workers sleep when the call
comes. `phases` is what a model looks like: short pieces of work shared by the threads, with a barrier after each.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from dnnc.backends.llvm.compile import compile_text, load_objects
from dnnc.backends.llvm.features import parse_target
from dnnc.backends.llvm.runtime import runtime
from dnnc.backends.runtime.frames import FRAME_BARRIER, Frame, cpu_count

ENTRIES = f"""
define i64 @nothing(ptr %frame, ptr %buffers, ptr %dims, i64 %tid, i64 %n) nounwind {{
  ret i64 0
}}

; dims[0] phases of dims[1] dependent multiplications, shared by the threads, with a barrier after each
define i64 @phases(ptr %frame, ptr %buffers, ptr %dims, i64 %tid, i64 %n) nounwind {{
entry:
  %barrier.p = getelementptr i64, ptr %frame, i64 {FRAME_BARRIER}
  %barrier = load ptr, ptr %barrier.p
  %count = load i64, ptr %dims
  %work.p = getelementptr i64, ptr %dims, i64 1
  %work = load i64, ptr %work.p
  %share = udiv i64 %work, %n
  %out = getelementptr double, ptr %buffers, i64 %tid
  br label %phase
phase:
  %i = phi i64 [ 0, %entry ], [ %i.next, %end ]
  br label %multiply
multiply:
  %k = phi i64 [ 0, %phase ], [ %k.next, %multiply ]
  %x = phi double [ 1.0, %phase ], [ %y, %multiply ]
  %y = fmul double %x, 0.999
  %k.next = add i64 %k, 1
  %again = icmp slt i64 %k.next, %share
  br i1 %again, label %multiply, label %end
end:
  store double %y, ptr %out
  call void %barrier(ptr %frame)
  %i.next = add i64 %i, 1
  %more = icmp ult i64 %i.next, %count
  br i1 %more, label %phase, label %done
done:
  ret i64 0
}}
"""
BARRIERS, PHASES, WORK = 2000, 60, 20_000


def times(call: Callable[[], object], repeat: int, idle: float = 0.0) -> tuple[float, float]:
    """(median, 99th percentile) in microseconds."""
    out = []
    for _ in range(repeat):
        if idle:
            time.sleep(idle)
        start = time.perf_counter()
        call()
        out.append((time.perf_counter() - start) * 1e6)
    out.sort()
    return out[len(out) // 2], out[int(len(out) * 0.99)]


def main() -> None:
    target = parse_target("llvm")
    entries = load_objects([compile_text(ENTRIES, target.cpu, target.features)])
    nothing, phases = entries.address("nothing"), entries.address("phases")
    frame, out, launch = Frame(0), np.zeros(64), runtime().launch

    def job(entry: int, threads: int, dims: np.ndarray) -> Callable[[], int]:
        args = entry, frame.address, out.ctypes.data, dims.ctypes.data, threads
        return lambda: launch(*args)

    dims_work, dims_barriers = np.array([PHASES, WORK]), np.array([BARRIERS, 0])
    print(f"{target.cpu}, {cpu_count()} CPUs; microseconds, median and p99\n")
    print(
        f"{'threads':>7}  {'call':>15}  {'after 1 ms idle':>15}  {'barrier':>15}  {f'{PHASES} phases':>15}  "
        f"{'after 1 ms idle':>15}"
    )
    for threads in sorted({1, 2, cpu_count()}):
        empty, work, barriers = (
            job(nothing, threads, dims_work),
            job(phases, threads, dims_work),
            job(phases, threads, dims_barriers),
        )
        row = [
            times(empty, 5000),
            times(empty, 200, 1e-3),
            times(barriers, 50),
            times(work, 200),
            times(work, 200, 1e-3),
        ]
        row[2] = (row[2][0] / BARRIERS, row[2][1] / BARRIERS)
        print(f"{threads:7}  " + "  ".join(f"{m:8.2f} {p:6.1f}" for m, p in row))
    runtime().stop()


if __name__ == "__main__":
    main()
