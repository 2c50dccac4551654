"""Array expressions on CUDA: kernels launched in the caller's stream, since a recorded graph would copy operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dnnc.backends.base import BuildJob
from dnnc.backends.cuda.build import checked_key
from dnnc.backends.cuda.emit import kernel_number
from dnnc.backends.cuda.library import is_call
from dnnc.backends.runtime.device import STATUS_BYTES, Device
from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.backends.runtime.program import CompiledKernel, MemoryRef, Program
from dnnc.ir.errors import outside
from dnnc.ir.lru import LRU
from dnnc.ir.shapes import concrete_shape

KERNELS = 4096  # loaded kernels kept in a process


class CudaExpressions:
    """Loads programs of expressions; see ExpressionLoader. Keeps the kernels of this process by symbol."""

    def __init__(self, device: Callable[[], Device], cache: KernelCache, check: bool) -> None:
        self._device, self.cache, self.check = device, cache, check
        self.functions: LRU[str, Any] = LRU(KERNELS)

    def job(self, check: bool) -> BuildJob:
        return BuildJob(self.cache, check=check)

    def load(self, program: Program) -> CudaExpression | None:
        if program.controls or any(map(is_call, program.code.values())):
            return None
        functions: dict[str, Any] = {}
        for k in program.kernels:
            function = self._function(program, k)
            if function is None:
                return None
            functions[k.symbol] = function
        return CudaExpression(program, self._device(), functions)

    def _function(self, program: Program, k: CompiledKernel) -> Any:
        """A kernel that needs neither a compiler nor a check any more, loaded; else None."""
        found = self.functions.find(k.symbol)
        if found is not None:
            return found
        if self.check and k.symbol not in program.code and self.cache.get(checked_key(k.symbol)) is None:
            return None
        code = program.code.get(k.symbol) or self.cache.get(k.symbol[2:])
        if code is None or k.symbol in program.checks:
            return None
        launch, params = program.launches[k.symbol], program.params[k.symbol]
        found = self._device().load(code, k.symbol, launch, params, "pdl_wait(" in k.text)
        self.functions[k.symbol] = found
        return found


class CudaExpression:
    """A program that runs on addresses. Calls may come from several threads at once.

    Attributes:
        kernels: see Program.
        outputs: shape and dtype of each; the shape is empty in a flat program.
        arena: bytes of intermediate values of a call.
        guards: by number, the names of kernels that read at indices known at run time only.
    """

    def __init__(self, program: Program, device: Device, functions: dict[str, Any]) -> None:
        self.kernels, self.device = program.kernels, device
        shapes = [() if program.dims else concrete_shape(t, {}) for t in program.outputs]
        self.outputs = [(shape, t.dtype.numpy) for shape, t in zip(shapes, program.outputs)]
        self.arena = 0 if program.dims else program.sizes({})[1]
        self.guards = {kernel_number(k.symbol): k.name for k in program.kernels if k.guarded}
        buffers, launches = len(program.inputs) + len(program.outputs), program.launches
        self._calls = [
            (functions[c.symbol], launches[c.symbol], [_place(a, buffers) for a in c.args])
            for c in program.calls
            if 0 not in (*launches[c.symbol].grid, *launches[c.symbol].block)
        ]
        self._constants, self._status, self._keep = self._resident(program.constants)

    def _resident(self, constants: np.ndarray[Any, Any]) -> tuple[int, int, Any]:
        """The addresses of the constants and of the status, and what owns that memory."""
        at, memory = self.device.pooled(constants.nbytes + STATUS_BYTES)
        stream = self.device.current_stream()
        block = np.concatenate([np.zeros(STATUS_BYTES, np.uint8), constants])
        self.device.upload(at, block, stream)
        self.device.synchronize(stream)  # so that all streams see it
        return at + STATUS_BYTES, at, memory

    def run(self, buffers: Sequence[int], sizes: Sequence[int], stream: int) -> None:
        """Queue the kernels. `buffers`: addresses of the operands, then of the results."""
        device = self.device
        arena, memory = device.pooled(self.arena) if self.arena else (0, None)
        bases = [*buffers, arena, self._constants]
        for function, launch, args in self._calls:
            device.launch(function, launch, [*sizes, *(bases[k] + offset for k, offset in args), self._status], stream)
        del memory  # used again by what comes later on this stream

    def check(self) -> None:
        """InputError: a kernel has found an index outside of its axis."""
        status = np.zeros(STATUS_BYTES // 4, np.int32)
        self.device.download(status.view(np.uint8), self._status, 0)
        self.device.synchronize(0)
        code, number, value, _ = status.tolist()
        if code:
            self.device.fill(self._status, 0, STATUS_BYTES, 0)
            self.device.synchronize(0)
            where = self.guards.get(number) or ", ".join(self.guards.values())
            raise outside(where, value)


def _place(p: MemoryRef, buffers: int) -> tuple[int, int]:
    """(base, offset) of an argument: bases are the buffers, the arena, and the constants."""
    if p.space == "buffer":
        return p.number, p.inside
    return (buffers, p.offset) if p.space == "arena" else (buffers + 1, p.number)
