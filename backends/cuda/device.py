"""A real CUDA device, through CuPy's bindings of the runtime and the driver.

In: a device's number. Out: a `Device` that loads cubins, launches kernels and records graphs. CuPy is imported at first
use. Every method may be called from any thread; the device is made current for the call, as CUDA keeps that per thread.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from dnnc.backends.cuda.library import CallFunction, is_call
from dnnc.backends.cuda.library_load import Handles, function_of
from dnnc.backends.cuda.target import ask_device, why_no_device
from dnnc.backends.cuda.tensor_maps import encoded
from dnnc.ir.errors import DnncError, InternalError, TargetError

if TYPE_CHECKING:
    from dnnc.backends.runtime.device import Launch

Array = np.ndarray[Any, Any]
SHARED_DEFAULT = 48 << 10  # bytes of shared memory that a kernel may have without asking for more
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
SHARED_BYTES, NUM_REGS = 1, 4  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, .._NUM_REGS
CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent of the most that there can be
RESERVED = 1024  # bytes of shared memory that the system takes of each block
# of a multiprocessor's shared memory, for blocks of this kernel and of the next: where two kernels divide the memory
# between it and the first-level cache in different ways, blocks of the second wait until there are none of the first
ROOM = 0.44
LAUNCH_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
RECORD_EXTERNAL = 1  # CU_EVENT_RECORD_EXTERNAL
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation and CUDA_ERROR_OUT_OF_MEMORY
HERE = nullcontext()  # nothing is to be changed; it may be entered again and again, by all threads
NO_BINARY = 209  # CUDA_ERROR_NO_BINARY_FOR_GPU


def device_problem(number: int = 0) -> str:
    """Why this machine has no such device that can be used; empty where it has."""
    return "" if ask_device(number) is not None else why_no_device(number)


def open_device(number: int = 0) -> CupyDevice:
    """The device of this number. TargetError says what is missing and what to do."""
    problem = device_problem(number)
    if problem:
        raise TargetError(
            f"target cuda{f':{number}' if number else ''}: {problem}. Without a device models can be compiled, not "
            "run: target='cuda -arch=sm_90a'"
        )
    return _opened(number)


@cache
def _opened(number: int) -> CupyDevice:
    """One object for all users of a device in this process, so that they share loaded kernels."""
    return CupyDevice(number)


def _reason(e: Exception) -> str:
    return str(e).splitlines()[0] if str(e) else type(e).__name__


class Block:
    """Device memory of its own allocation; freeing it waits for the device."""

    def __init__(self, device: CupyDevice, nbytes: int) -> None:
        self.nbytes = nbytes
        with device.current():
            try:
                self.address: int = device.malloc(nbytes)
            except Exception as e:
                raise device.failed(e, f"{nbytes / 1e9:.3g} GB for a program's values") from None
        self._free = weakref.finalize(self, device.free, self.address)
        self._free.atexit = False  # the driver may be gone by then, and frees all


class Queue:
    """A stream of its own."""

    def __init__(self, device: CupyDevice) -> None:
        with device.current():
            self.address: int = device.runtime.streamCreateWithFlags(device.runtime.streamNonBlocking)
        self._free = weakref.finalize(self, device.runtime.streamDestroy, self.address)
        self._free.atexit = False


class CupyDevice:
    """See `dnnc.backends.runtime.device.Device`."""

    def __init__(self, number: int) -> None:
        import cupy
        from cupy.cuda import function
        from cupy_backends.cuda.api import driver, runtime

        self.number, self.cupy, self.driver, self.runtime, self.new_module = (
            number,
            cupy,
            driver,
            runtime,
            function.Module,
        )
        self._functions: weakref.WeakValueDictionary[Any, Function | CallFunction] = weakref.WeakValueDictionary()
        self._handles: Handles = {}
        self._lock = threading.Lock()
        self._current = cupy.cuda.Device
        properties = runtime.getDeviceProperties(number)
        self.name: str = properties["name"].decode()
        self.capability: tuple[int, int] = properties["major"], properties["minor"]
        self.sms: int = properties["multiProcessorCount"]
        self.shared_per_sm: int = properties["sharedMemPerMultiprocessor"]

    def current(self) -> Any:
        """A context in which this device is the current one of the thread."""
        return HERE if self.runtime.getDevice() == self.number else self._current(self.number)

    def failed(self, e: Exception, what: str) -> DnncError:
        """A failure of CUDA as what a user can do something about."""
        status = getattr(e, "status", None)
        if status == OUT_OF_MEMORY or type(e).__name__ == "OutOfMemoryError":
            with self.current():
                free, total = self.runtime.memGetInfo()
            return TargetError(
                f"{self.name} (cuda:{self.number}) has no room for {what}: {free / 1e9:.3g} of {total / 1e9:.3g} GB "
                "are free; "
                "give smaller sizes, let go of arrays, end other users of the device, or take another one (cuda:1)"
            )
        if status == NO_BINARY:
            major, minor = self.capability
            return TargetError(
                f"{self.name} (cuda:{self.number}) is sm_{major}{minor} and cannot run {what}; compile for it with "
                "target='cuda'"
            )
        return InternalError(
            f"{what} on {self.name} (cuda:{self.number}): {_reason(e)}; please report it with the kernel's text "
            "(f.source('cuda'))"
        )

    # --- memory -------------------------------------------------------------------------------------------------------

    def alloc(self, nbytes: int) -> Block:
        return Block(self, nbytes)

    def malloc(self, nbytes: int) -> int:
        """Memory of its own allocation. What CuPy's pool keeps without need is given back where there is no other."""
        try:
            return int(self.runtime.malloc(nbytes))
        except self.runtime.CUDARuntimeError as e:
            if e.status != OUT_OF_MEMORY:
                raise
            self.cupy.get_default_memory_pool().free_all_blocks()
            return int(self.runtime.malloc(nbytes))

    def pooled(self, nbytes: int) -> tuple[int, Any]:
        """Memory of CuPy's pool: its address, owner, and current stream, in whose order it is reused."""
        with self.current():
            try:
                memory = self.cupy.cuda.alloc(nbytes)
            except self.cupy.cuda.memory.OutOfMemoryError as e:
                raise self.failed(e, f"an array of {nbytes / 1e9:.3g} GB") from None
            return int(memory.ptr), (memory, self.stream_object())

    def view(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], owner: Any) -> Any:
        """Elements that somebody else owns as a CuPy array."""
        nbytes = math.prod(shape) * dtype.itemsize
        memory = self.cupy.cuda.UnownedMemory(address, nbytes, owner, self.number)
        with self.current():
            return self.cupy.ndarray(shape, dtype, self.cupy.cuda.MemoryPointer(memory, 0))

    def free(self, address: int) -> None:
        if not sys.is_finalizing():
            with self.current():
                self.runtime.free(address)

    def pinned(self, nbytes: int) -> Array:
        """Host memory that copies go to and from without the driver's staging; uint8[nbytes]."""
        if not nbytes:
            return np.empty(0, np.uint8)
        with self.current():
            memory = self.cupy.cuda.PinnedMemory(nbytes)
        array = np.frombuffer(self.cupy.cuda.PinnedMemoryPointer(memory, 0), np.uint8, nbytes)
        return array

    def upload(self, to: int, source: Array, stream: int) -> None:
        with self.current():
            self.runtime.memcpyAsync(to, source.ctypes.data, source.nbytes, self.runtime.memcpyHostToDevice, stream)

    def download(self, to: Array, source: int, stream: int) -> None:
        with self.current():
            self.runtime.memcpyAsync(to.ctypes.data, source, to.nbytes, self.runtime.memcpyDeviceToHost, stream)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        if nbytes and to != source:
            with self.current():
                self.runtime.memcpyAsync(to, source, nbytes, self.runtime.memcpyDeviceToDevice, stream)

    def copy_from(self, to: int, other: CupyDevice, source: int, nbytes: int, stream: int) -> None:
        """From the memory of another device."""
        if nbytes:
            with self.current():
                self.runtime.memcpyPeerAsync(to, self.number, source, other.number, nbytes, stream)

    def fill(self, to: int, byte: int, nbytes: int, stream: int) -> None:
        with self.current():
            self.runtime.memsetAsync(to, byte, nbytes, stream)

    # --- kernels ------------------------------------------------------------------------------------------------------

    def load(
        self, cubin: bytes, symbol: str, launch: Launch, params: Sequence[str], overlaps: bool = False
    ) -> Function | CallFunction:
        """A kernel, or a library's call, ready to be launched. Programs that are alive share what is equal in all."""
        key = symbol, hashlib.sha256(cubin).digest(), launch, tuple(params), overlaps
        with self._lock:
            found = self._functions.get(key)
            if found is None:
                with self.current():
                    try:
                        call = is_call(cubin)
                        found = (
                            function_of(cubin, self._handles)
                            if call
                            else Function(self, cubin, symbol, launch, params, overlaps)
                        )
                    except DnncError:
                        raise
                    except Exception as e:
                        raise self.failed(e, f"kernel {symbol}") from None
                self._functions[key] = found
            return found

    def launch(self, function: Function | CallFunction, launch: Launch, args: Sequence[int], stream: int) -> None:
        """`args`: kernel parameter addresses, made tensor maps where needed, then the status; calls: workspace."""
        with self.current():
            function.start(launch, args, stream)

    # --- streams, graphs, events --------------------------------------------------------------------------------------

    def new_stream(self) -> Queue:
        """A stream that does not wait for the default one."""
        return Queue(self)

    def current_stream(self) -> int:
        with self.current():
            return int(self.cupy.cuda.get_current_stream().ptr)

    def stream_object(self) -> Any:
        """What keeps the current stream alive."""
        with self.current():
            return self.cupy.cuda.get_current_stream()

    def capture(self, stream: int, record: Callable[[], None]) -> Graph:
        with self.current():
            self.runtime.streamBeginCapture(
                stream, self.runtime.streamCaptureModeRelaxed
            )  # memory that is freed meanwhile does no harm
            try:
                record()
            except BaseException:
                try:
                    self.runtime.graphDestroy(self.runtime.streamEndCapture(stream))
                except Exception:  # the capture is invalid already: the first error tells why
                    pass
                raise
            return Graph(self, self.runtime.streamEndCapture(stream))

    def new_event(self, timing: bool = False) -> Any:
        with self.current():
            return self.cupy.cuda.Event(disable_timing=not timing)

    def record(self, event: Any, stream: int) -> None:
        with self.current():
            if self.runtime.streamIsCapturing(
                stream
            ):  # CuPy has no binding of the call that makes it a node of the graph
                status = driver_library().cuEventRecordWithFlags(
                    ctypes.c_void_p(event.ptr), ctypes.c_void_p(stream), RECORD_EXTERNAL
                )
                if status:
                    raise InternalError(f"cuEventRecordWithFlags failed with status {status}")
            else:
                self.runtime.eventRecord(event.ptr, stream)

    def wait(self, event: Any, stream: int) -> None:
        with self.current():
            self.runtime.streamWaitEvent(stream, event.ptr)

    def elapsed(self, start: Any, end: Any) -> float:
        """Seconds between two recorded events."""
        with self.current():
            return float(self.runtime.eventElapsedTime(start.ptr, end.ptr)) * 1e-3

    def synchronize(self, stream: int) -> None:
        with self.current():
            try:
                self.runtime.streamSynchronize(stream)
            except Exception as e:
                raise self.failed(e, "a run") from None

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """A CuPy array that nobody has written."""
        with self.current():
            try:
                return self.cupy.empty(shape, dtype)
            except self.cupy.cuda.memory.OutOfMemoryError as e:
                raise self.failed(e, f"a result {dtype}{list(shape)}") from None


class Graph:
    """Recorded work."""

    def __init__(self, device: CupyDevice, graph: int) -> None:
        runtime = device.runtime
        try:
            executable = runtime.graphInstantiate(graph)
        finally:
            runtime.graphDestroy(graph)
        self._current, self._launch, self._executable = device.current, runtime.graphLaunch, executable
        self._free = weakref.finalize(self, runtime.graphExecDestroy, executable)
        self._free.atexit = False

    def launch(self, stream: int) -> None:
        with self._current():
            self._launch(self._executable, stream)


class Function:
    """A kernel of a loaded module, which it keeps alive. `params` are the names of its parameters, for its tensor maps;
    `overlaps`: it waits by itself for the kernel before it (griddepcontrol), and so may begin early.
    """

    def __init__(
        self, device: CupyDevice, cubin: bytes, symbol: str, launch: Launch, params: Sequence[str], overlaps: bool
    ) -> None:
        self.driver, self.params = device.driver, list(params)
        self.attributes: Mapping[int, tuple[int, ...]] = (
            {LAUNCH_SERIALIZATION: (1,)} if overlaps else {}
        )  # the size of clusters stands in the code
        self.module = device.new_module()
        self.module.load(cubin)
        self.function = self.module.get_function(symbol)
        self.pointer: int = self.function.ptr
        if launch.shared_bytes > SHARED_DEFAULT:
            self.driver.funcSetAttribute(self.pointer, MAX_DYNAMIC_SHARED, launch.shared_bytes)
        self.driver.funcGetAttribute(
            NUM_REGS, self.pointer
        )  # a kernel that is loaded lazily is loaded now: not while a stream is captured
        if overlaps and not launch.cached:
            self.driver.funcSetAttribute(self.pointer, CARVEOUT, self.carveout(device, launch))

    def carveout(self, device: CupyDevice, launch: Launch) -> int:
        """Percent of the shared memory that a multiprocessor can have; the rest is first-level cache. As much as all
        blocks take that it can have at a time, and ROOM at least.
        """
        driver, threads, blocks = self.driver, math.prod(launch.block), math.prod(launch.grid)
        most: int = driver.occupancyMaxActiveBlocksPerMultiprocessor(self.pointer, threads, launch.shared_bytes)
        own: int = driver.funcGetAttribute(SHARED_BYTES, self.pointer) + launch.shared_bytes + RESERVED
        taken = min(most, -(-blocks // device.sms)) * own
        return min(math.ceil(100 * max(taken / device.shared_per_sm, ROOM)), 100)

    _prepared: Prepared | None = None  # made by the first launch

    def start(self, launch: Launch, args: Sequence[int], stream: int) -> None:
        """Launch. `args`: parameter addresses in order, then the status; tensor maps precede their address."""
        if not launch.maps:
            if self._prepared is None:
                self._prepared = Prepared(self.pointer, launch, len(args), self.attributes)
            self._prepared.start(args, stream)
            return
        maps = [encoded(m, args[self.params.index(m.param)], driver_library()) for m in launch.maps]
        words = (ctypes.c_uint64 * len(args))(*args)
        at = ctypes.addressof(words)
        places = [at + 8 * k for k in range(len(args))]
        places[-1:-1] = [m.address for m in maps]
        params = (ctypes.c_void_p * len(places))(*places)
        started(configured(launch, self.attributes, stream), self.pointer, params)


class Prepared:
    """A launch of structures made once: only eight-byte words and the stream change between launches."""

    def __init__(self, function: int, launch: Launch, count: int, attributes: Mapping[int, tuple[int, ...]]) -> None:
        self._function, self._lock = ctypes.c_void_p(function), threading.Lock()
        self._words = (ctypes.c_uint64 * count)()
        at = ctypes.addressof(self._words)
        self._params = (ctypes.c_void_p * count)(*(at + 8 * k for k in range(count)))
        self._config = configured(launch, attributes, 0)
        self._there = ctypes.byref(self._config)
        self._start = driver_library().cuLaunchKernelEx

    def start(self, args: Sequence[int], stream: int) -> None:
        with self._lock:  # the call takes a copy of all
            self._words[:] = args if isinstance(args, list) else list(args)
            self._config.stream = stream
            status = self._start(self._there, self._function, self._params, None)
        if status:
            raise refused(status, self._config)


# --- launches with attributes -----------------------------------------------------------------------------------------


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint32 * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


@cache
def driver_library() -> Any:
    """libcuda, for what CuPy has no binding of."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def configured(launch: Launch, attributes: Mapping[int, tuple[int, ...]], stream: int) -> _Config:
    """Arguments of cuLaunchKernelEx. `LAUNCH_SERIALIZATION: (1,)` lets a kernel start before the last ends."""
    made = (_Attribute * len(attributes))()
    for a, (key, numbers) in zip(made, attributes.items()):
        a.id = key
        for k, n in enumerate(numbers):
            a.value[k] = n
    grid, block = (ctypes.c_uint * 3)(*launch.grid), (ctypes.c_uint * 3)(*launch.block)
    return _Config(grid, block, launch.shared_bytes, stream, made, len(attributes))  # which keeps the attributes alive


def started(config: _Config, function: int, params: Any) -> None:
    status = driver_library().cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(function), params, None)
    if status:
        raise refused(status, config)


def refused(status: int, c: _Config) -> InternalError:
    return InternalError(
        f"cuLaunchKernelEx failed with status {status}: grid {tuple(c.grid)}, block {tuple(c.block)}, {c.shared_bytes} "
        "bytes shared; "
        "a failure of a kernel before may be told here"
    )
