"""Array expressions on the CPU: the table runner calls kernels, so a program compiles only new kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dnnc.backends.base import BuildJob
from dnnc.backends.llvm.code import Code
from dnnc.backends.llvm.compile import Loaded, load_objects
from dnnc.backends.llvm.instance import HEAD, CallFrame, CpuInstance
from dnnc.backends.llvm.pool import CALL_NTHREADS
from dnnc.backends.llvm.table_runner import can_run, counters, records_of, runner, table_of
from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.backends.runtime.program import Program
from dnnc.backends.runtime.results import results as result_memory
from dnnc.ir.lru import LRU

Array = np.ndarray[Any, Any]
KERNELS = 4096  # loaded kernels kept in a process, some kilobytes each
PARALLEL_SIZE = 1 << 14  # elements from which a flat program wakes other threads
FREE_FRAMES = 4  # of a program: so many calls at once find their memory
KEPT_ARENA = 64 << 20  # bytes of intermediate values that a program keeps for its next call
# Bytes that one frame keeps for all programs with larger arenas, since fresh memory costs a page fault for each 4 KiB:
# steps of a training run. More is given back.
SHARED_ARENA = 1 << 30


class CpuExpressions:
    """Loads programs of expressions; see ExpressionLoader. Keeps the kernels of this process by symbol."""

    def __init__(self, cache: KernelCache, threads: int) -> None:
        self.cache, self.threads = cache, threads
        self.runner = runner(cache)
        self.loaded: LRU[str, tuple[Loaded, bytes]] = LRU(KERNELS)

    def job(self, check: bool) -> BuildJob:
        return ExpressionJob(self.cache, check=check, entry=False, loader=self)

    def load(self, program: Program) -> CpuExpression | None:
        if not can_run(program.calls):
            return None
        kernels: dict[str, Loaded] = {}
        for k in program.kernels:
            loaded = self.kernel(k.symbol, program.code.get(k.symbol))
            if loaded is None:
                return None
            kernels[k.symbol] = loaded
        words = len(program.inputs) + len(program.outputs)
        apart = {k.symbol for k in program.kernels if "barrier()" not in k.text}
        records = records_of(program.calls, words, apart)
        table = table_of(records, {s: loaded.address(s) for s, loaded in kernels.items()})
        code = Code(self.runner.entry, kernels, self.runner.loaded, table)
        return CpuExpression(replace(program, code={}, loaded=code), self.threads, counters(records))

    def kernel(self, symbol: str, code: bytes | None) -> Loaded | None:
        """A loaded kernel; None if its code is nowhere."""
        found = self.loaded.find(symbol)
        if found is not None:
            return found[0]
        code = code or self.cache.get(symbol[2:])
        if code is None:
            return None
        loaded = load_objects([code])
        self.loaded[symbol] = loaded, code
        return loaded


class ExpressionJob(BuildJob):
    """Finds kernels that the process has loaded."""

    def find(self, symbol: str) -> bytes | None:
        found = self.loader.loaded.find(symbol)
        return found[1] if found is not None else super().find(symbol)


class CpuExpression(CpuInstance):
    """A thread-safe program of an expression. A flat one serves arrays of any one shape, as vectors."""

    __slots__ = ("dtypes", "empty_result", "most")

    def __init__(self, program: Program, threads: int, counters: int) -> None:
        super().__init__(program, dict.fromkeys(program.dims, 1), threads, [])
        self.words += len(program.dims) + counters
        self.dtypes = [np.dtype(d) for _, d in self.outputs]
        self.empty_result = result_memory().empty
        self.most = FREE_FRAMES
        if self.arena_bytes > KEPT_ARENA:
            self.free, self.most = result_memory().frames, int(self.arena_bytes <= SHARED_ARENA)

    @property
    def notes(self) -> Sequence[Any]:
        """The kernels, for who wants to know what was fused."""
        return self.program.kernels

    def __call__(self, arrays: Sequence[Array]) -> list[Array]:
        """Run on contiguous arrays of the right shapes and dtypes."""
        return self.call(arrays)

    def flat(self, arrays: Sequence[Array], shape: tuple[int, ...], size: int) -> list[Array]:
        """Run a flat program on arrays of a shape with `size` elements, at least one."""
        new = self.empty_result
        results = [new(shape, d) for d in self.dtypes]
        held = self.take()
        held.pointers[HEAD + len(arrays) + len(results)] = size
        held.record[CALL_NTHREADS] = self.nthreads if size >= PARALLEL_SIZE else 1
        if self.run(held.address, arrays, results):
            self.fail(held.frame)
        self.put(held)
        return results

    def on(self, arrays: Sequence[Array], sizes: Sequence[int]) -> None:
        """Run on contiguous arrays, which are read and written in place, of such sizes."""
        held = self.take()
        held.pointers[HEAD + len(arrays) : HEAD + len(arrays) + len(sizes)] = sizes
        held.record[CALL_NTHREADS] = self.nthreads
        if self.run(held.address, arrays, ()):
            self.fail(held.frame)
        self.put(held)

    def _adopted(self, held: CallFrame | None) -> CallFrame:
        found = super()._adopted(held)
        found.pointers[HEAD + len(self.program.inputs) + len(self.outputs) :] = 0  # counters begin so
        return found

    def put(self, held: CallFrame) -> None:
        if len(self.free) < self.most:
            self.free.append(held)
