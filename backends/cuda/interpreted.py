"""A CUDA device that is the operator-IR interpreter: whole device programs without a GPU.

Its machine code is the kernel's text. Memory is NumPy bytes under made-up addresses, with gaps, so that an address
outside of every allocation is noticed; memory that nobody wrote is NaN. Streams and events keep no order, for
everything happens at once; recording keeps what was asked for and does it again at each launch, as a graph does.
"""

from __future__ import annotations

import bisect
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from dnnc.backends.base import Built
from dnnc.backends.cuda.backend import CudaBackend
from dnnc.backends.cuda.build import Compiler
from dnnc.backends.cuda.emit import launch_of
from dnnc.backends.cuda.library import CallFunction, call_of, is_call
from dnnc.backends.cuda.library_load import Handles, function_of
from dnnc.backends.cuda.target import DEFAULT_ARCH, FACTS, GpuTarget
from dnnc.backends.registry import BACKENDS
from dnnc.backends.runtime.codec import encode
from dnnc.backends.runtime.device import ALIGN, PARAMETER_ALIGN, STATUS_BYTES, Device, Launch
from dnnc.ir.errors import InternalError, TargetError
from dnnc.ir.expr import Expr, Op, const, substitute, value
from dnnc.ir.loops.interp import Interpreter
from dnnc.ir.loops.stmt import Kernel
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.target import Target

Array = np.ndarray[Any, Any]
GAP = 1 << 20  # addresses between two allocations
START = 1 << 40


class TextCompiler:
    """Kernels as their own machine code."""

    version = "interpreter"

    def compile(
        self, kernels: Mapping[str, Kernel], target: GpuTarget, tell: Callable[[int, int], None] | None
    ) -> dict[str, bytes]:
        return {name: show_kernel(k).encode() for name, k in kernels.items()}


class Block:
    """An allocation."""

    def __init__(self, device: InterpretedDevice, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes
        self._free = weakref.finalize(self, device.free, address)


class Stream:
    """A stream, which ends with this object."""

    def __init__(self, device: InterpretedDevice, address: int) -> None:
        self.address = address
        self._free = weakref.finalize(self, device.ended.add, address)


@dataclass
class Recording:
    """Work in order."""

    device: InterpretedDevice
    steps: list[Callable[[], None]] = field(default_factory=list)

    def launch(self, stream: int) -> None:
        self.device.check_stream(stream)
        for step in self.steps:
            step()


class DeviceBuffer:
    """An array on the interpreted device, with the interface by which libraries exchange arrays."""

    def __init__(
        self,
        device: InterpretedDevice,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        owned: tuple[int, Any] | None = None,
    ) -> None:
        """`owned`: an address, and what owns the memory there; else it has memory of its own."""
        self.device, self.shape, self.dtype = device, shape, dtype
        self.nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self.address, self.keep = owned or device.pooled(self.nbytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "version": 3,
            "strides": None,
            "stream": None,
        }

    def get(self) -> Array:
        """Its elements as a NumPy array."""
        return self.device.bytes_at(self.address, self.nbytes).copy().view(self.dtype).reshape(self.shape)

    def set(self, a: Array) -> DeviceBuffer:
        self.device.bytes_at(self.address, self.nbytes)[...] = (
            np.ascontiguousarray(a, self.dtype).reshape(-1).view(np.uint8)
        )
        return self


class Guarded(Interpreter):
    """Notes an index that a guard finds outside, as kernels on a device do."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel, 1)
        self.strayed: int | None = None

    def compute(self, e: Expr) -> Any:
        if isinstance(e, Op) and e.name == "guard":
            x, low, high = (np.asarray(self.eval(a)) for a in e.args)
            active = np.asarray(self.active())
            wrong = ((x < low) | (x >= high)) & (active[:, None] if x.ndim == 2 else active)
            if wrong.any():
                self.strayed = int(np.broadcast_to(x, wrong.shape)[wrong][0])
        return super().compute(e)


class InterpretedDevice:
    """See `dnnc.backends.runtime.device.Device`. `launched`, `graphs` count; kernels take `seconds` of device time."""

    name = "interpreter"
    number = 0

    def __init__(self, seconds: float = 1e-6) -> None:
        self.seconds = seconds
        self._memory: dict[int, Array] = {}
        self._next = START
        self._own = threading.local()  # what a thread records
        self.ended: set[int] = set()  # streams; a real device's driver does not survive their use
        self._streams = itertools.count(16)
        self.launched = self.graphs = 0
        self._handles: Handles = {}

    @property
    def recording(self) -> Recording | None:
        """What this thread records now."""
        return getattr(self._own, "recording", None)

    # --- memory -------------------------------------------------------------------------------------------------------

    def alloc(self, nbytes: int) -> Block:
        if self.recording is not None:
            raise InternalError("memory is allocated while work is recorded")
        address = self._next
        self._next += -(-nbytes // ALIGN) * ALIGN + GAP
        self._memory[address] = np.full(nbytes, 0xFF, np.uint8)
        return Block(self, address, nbytes)

    def free(self, address: int) -> None:
        self._memory.pop(address, None)

    @property
    def allocated(self) -> int:
        """Bytes in use."""
        return sum(a.nbytes for a in self._memory.values())

    def bytes_at(self, address: int, nbytes: int) -> Array:
        """The bytes themselves. InternalError where they are not all of one allocation."""
        starts = sorted(self._memory)
        k = bisect.bisect_right(starts, address) - 1
        start = starts[k] if k >= 0 else 0
        if k < 0 or address + nbytes > start + self._memory[start].nbytes:
            raise InternalError(f"{nbytes} bytes at {address:#x} are no memory of the device")
        return self._memory[start][address - start :][:nbytes]

    def pinned(self, nbytes: int) -> Array:
        return np.empty(nbytes, np.uint8)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceBuffer:
        return DeviceBuffer(self, shape, np.dtype(dtype))

    def pooled(self, nbytes: int) -> tuple[int, Any]:
        block = self.alloc(max(nbytes, 1))
        return block.address, block

    def view(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], owner: Any) -> DeviceBuffer:
        return DeviceBuffer(self, shape, dtype, (address, owner))

    def upload(self, to: int, source: Array, stream: int) -> None:
        def step() -> None:
            self.bytes_at(to, source.nbytes)[...] = source.reshape(-1).view(np.uint8)

        self._do(step, stream)

    def download(self, to: Array, source: int, stream: int) -> None:
        def step() -> None:
            to.reshape(-1).view(np.uint8)[...] = self.bytes_at(source, to.nbytes)

        self._do(step, stream)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        def step() -> None:
            self.bytes_at(to, nbytes)[...] = self.bytes_at(source, nbytes)

        if nbytes and to != source:
            self._do(step, stream)

    def copy_from(self, to: int, other: InterpretedDevice, source: int, nbytes: int, stream: int) -> None:
        self.bytes_at(to, nbytes)[...] = other.bytes_at(source, nbytes)

    def fill(self, to: int, byte: int, nbytes: int, stream: int) -> None:
        def step() -> None:
            self.bytes_at(to, nbytes)[...] = byte

        self._do(step, stream)

    # --- kernels ------------------------------------------------------------------------------------------------------

    def load(
        self, cubin: bytes, symbol: str, launch: Launch, params: Sequence[str], overlaps: bool = False
    ) -> Kernel | CallFunction:
        """A kernel, or a call into `dnnc.backends.cuda.library.opened`'s library, which takes made-up addresses."""
        return function_of(cubin, self._handles) if is_call(cubin) else parse_kernel(cubin.decode())

    def launch(self, function: Kernel | CallFunction, launch: Launch, args: Sequence[int], stream: int) -> None:
        def step() -> None:
            self.launched += 1
            if isinstance(function, CallFunction):
                function.start(launch, args, stream)
                return
            *words, status = args
            sizes = dict(zip(function.entry.scalars, words))  # they stand before the buffers
            env = {p: const(n) for p, n in sizes.items()}
            arrays: dict[str, Any] = {p.name: n for p, n in sizes.items()}
            for p, address in zip(function.entry.buffers, words[len(sizes) :], strict=True):
                if address % PARAMETER_ALIGN:
                    raise InternalError(
                        f"{function.name}: {p.name} lies at {address:#x}, which is no multiple of {PARAMETER_ALIGN}"
                    )
                empty = any(value(substitute(const(d), env)) == 0 for d in p.shape)
                size = 0 if empty else int(value(substitute(p.size(), env)) or 0)
                dtype = np.dtype(np.bool_ if p.dtype.kind == "b" else p.dtype.numpy)
                arrays[p.name] = (
                    self.bytes_at(address, size * dtype.itemsize).view(dtype) if size else np.empty(0, dtype)
                )
            run = Guarded(function)
            with np.errstate(all="ignore"):
                run.run(arrays)
            if run.strayed is not None:
                self.bytes_at(status, STATUS_BYTES).view(np.int32)[:3] = 1, 0, run.strayed

        self._do(step, stream)

    # --- order --------------------------------------------------------------------------------------------------------

    def check_stream(self, stream: int) -> None:
        if stream in self.ended:
            raise InternalError(f"stream {stream} is used, which has ended")

    def _do(self, step: Callable[[], None], stream: int) -> None:
        self.check_stream(stream)
        if self.recording is not None:
            self.recording.steps.append(step)
        else:
            step()

    def new_stream(self) -> Stream:
        return Stream(self, next(self._streams))

    def current_stream(self) -> int:
        return 0

    def stream_object(self) -> None:
        return None

    def capture(self, stream: int, record: Callable[[], None]) -> Recording:
        self.check_stream(stream)
        self.graphs += 1
        self._own.recording = made = Recording(self)
        try:
            record()
        finally:
            self._own.recording = None
        return made

    def new_event(self, timing: bool = False) -> list[float]:
        return [0.0]

    def record(self, event: list[float], stream: int) -> None:
        self._do(lambda: event.__setitem__(0, float(self.launched)), stream)

    def wait(self, event: Any, stream: int) -> None:
        self.check_stream(stream)

    def elapsed(self, start: list[float], end: list[float]) -> float:
        return (end[0] - start[0]) * self.seconds

    def synchronize(self, stream: int) -> None:
        self.check_stream(stream)
        if self.recording is not None:
            raise InternalError("the host waits while work is recorded")


class InterpretedBackend(CudaBackend):
    """CUDA kernels by the operator-IR interpreter: the schedules of a real GPU, on a device that is always here."""

    name = "cuda-interpreted"

    def __init__(
        self, target: Target, threads: int | None = None, device: InterpretedDevice | None = None, present: bool = True
    ) -> None:
        super().__init__(target, threads)
        self.present = present
        self._interpreter = device or InterpretedDevice()

    def _parsed(self, target: Target) -> tuple[int, GpuTarget]:
        arch = target.option("arch", DEFAULT_ARCH)
        if arch not in FACTS:
            raise TargetError(f"target={str(target)!r}: unknown architecture {arch}; there are {', '.join(FACTS)}")
        return target.device, FACTS[arch]

    def _device_here(self) -> GpuTarget:
        return self.target

    @cached_property
    def compiler(self) -> Compiler:
        return TextCompiler()

    def _open(self) -> Device:
        return self._interpreter

    def compile_kernel(self, kernel: Kernel, symbol: str) -> Built:
        params = [p.name for p in kernel.entry.params]
        facts = {"launch": encode(launch_of(kernel)), "params": params, "overlaps": False}
        call = call_of(kernel)
        return super().compile_kernel(kernel, symbol) if call else Built(symbol, show_kernel(kernel).encode(), facts)

    @classmethod
    def availability(cls) -> dict[str, Any]:
        return {"name": cls.name, "available": True, "reason": "", "what": "CUDA kernels in NumPy; slow"}


def install(device: InterpretedDevice | None = None, present: bool = True) -> None:
    """From now on CUDA targets of this process mean the interpreter, kernel checks included."""
    BACKENDS["cuda"] = partial(InterpretedBackend, device=device, present=present)
