"""A program for a CUDA device as data, and what a device must be able to do to run it.

It comes from a scheduled program (`build.py`) and is run by `graph.py`. Nothing here needs CuPy or a device: addresses
and streams are integers, so a program also runs on a device that is an interpreter (`dnnc.tools.interpreted`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dnnc.backends.runtime.frames import ALIGN as CACHE_LINE
from dnnc.backends.runtime.program import Call, Control, Loop, NativeKernel
from dnnc.ir.arena import Arena
from dnnc.ir.expr import Var
from dnnc.ir.types import TensorType

if TYPE_CHECKING:
    from dnnc.backends.cuda.launch import Launch
    from dnnc.backends.runtime.link import ConstantBlock
    from dnnc.backends.runtime.prologue import Prologue
    from dnnc.passes.planning.program import Program

Array = np.ndarray[Any, Any]
ALIGN = 256  # bytes: what device allocations are aligned to, and every place that is made of them
PARAMETER_ALIGN = 16  # bytes: what addresses of kernels' parameters are multiples of, as the printer counts on
STATUS_BYTES = 16  # int32[4]: code (0 is success), kernel, value
DEFAULT_STREAM = 0


class Memory(Protocol):
    """Device memory, which is freed with the last reference to it."""

    address: int
    nbytes: int


class Stream(Protocol):
    """A queue of work, which ends with the last reference to it; `address` is what the other methods take."""

    address: int


class Recorded(Protocol):
    """Work that was recorded once and is started as a whole."""

    def launch(self, stream: int) -> None: ...


class Device(Protocol):
    """One device. Everything but `alloc`, `load` and `capture` goes into a stream, and happens in its order.

    Host arrays of `upload` and `download` must stay until the stream has passed them; while work is recorded they come
    from `pinned`.
    """

    name: str
    number: int

    def alloc(self, nbytes: int) -> Memory: ...

    def pinned(self, nbytes: int) -> Array: ...

    def upload(self, to: int, source: Array, stream: int) -> None: ...

    def download(self, to: Array, source: int, stream: int) -> None: ...

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None: ...

    def copy_from(self, to: int, other: Any, source: int, nbytes: int, stream: int) -> None:
        """From the memory of another device of this kind."""
        ...

    def fill(self, to: int, byte: int, nbytes: int, stream: int) -> None: ...

    def load(self, cubin: bytes, symbol: str, launch: Launch, params: Sequence[str], overlaps: bool = False) -> Any:
        """The function of a kernel, or of a library's call (`dnnc.backends.cuda.library`). `params`: names of its
        parameters; `overlaps`: it may begin while the kernel before it still runs.
        """
        ...

    def launch(self, function: Any, launch: Launch, args: Sequence[int], stream: int) -> None:
        """`args`: the addresses of its parameters in order, then that of the status; of a library's call, of its
        workspace.
        """
        ...

    def new_stream(self) -> Stream: ...

    def capture(self, stream: int, record: Callable[[], None]) -> Recorded: ...

    def new_event(self, timing: bool = False) -> Any: ...

    def record(self, event: Any, stream: int) -> None:
        """While work is recorded, each launch of it records the event anew."""
        ...

    def wait(self, event: Any, stream: int) -> None: ...

    def elapsed(self, start: Any, end: Any) -> float: ...

    def synchronize(self, stream: int) -> None: ...

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any: ...

    def pooled(self, nbytes: int) -> tuple[int, Any]:
        """Memory for an array, used again in the order of the current stream: its address, and what owns it."""
        ...

    def view(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], owner: Any) -> Any:
        """Elements that somebody else owns as an array of the device's own library."""
        ...

    def current_stream(self) -> int: ...

    def stream_object(self) -> Any:
        """What keeps the current stream alive."""
        ...


@dataclass(frozen=True)
class DeviceArray:
    """Contiguous elements on a device. `keep` owns them; `ready` is the stream that makes them, where that is told.
    `copied`: from an array whose elements were not contiguous; `read_only`: nobody may write to them.
    """

    address: int
    shape: tuple[int, ...]
    dtype: str
    keep: Any
    ready: int | None = None
    copied: bool = False
    read_only: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _itemsize(self.dtype)

    def overlaps(self, other: DeviceArray) -> bool:
        """Do the two share memory?"""
        n, m = self.nbytes, other.nbytes
        return bool(n and m) and self.address < other.address + m and other.address < self.address + n


@cache
def _itemsize(dtype: str) -> int:
    import ml_dtypes

    return int(np.dtype(getattr(ml_dtypes, dtype) if hasattr(ml_dtypes, dtype) else dtype).itemsize)


@dataclass(eq=False)
class Weights:
    """What is bound to the parameters of a model: arrays by the names of the prologue's inputs, and what its programs
    share of what was packed of them on the device, by the text of the graph that computes it.
    """

    arrays: Mapping[str, Array | DeviceArray]
    packed: dict[str, Sequence[DeviceArray]] = field(default_factory=dict)


@dataclass(frozen=True)
class Reference:
    """Bytes of the constants, from `start` to `end`, that lie in an array of somebody else on the device."""

    start: int
    end: int
    array: DeviceArray


@dataclass(frozen=True)
class Constants:
    """A block of constants, and which parts of it lie elsewhere, in order."""

    block: Array
    references: tuple[Reference, ...]

    @property
    def own(self) -> Array:
        """The bytes that lie in no other array."""
        if not self.references:
            return self.block
        ends = [*(r.start for r in self.references), self.block.nbytes]
        return np.concatenate([self.block[a:b] for a, b in zip([0, *(r.end for r in self.references)], ends)])


Check = Callable[
    ["Device", Any, "Launch"], None
]  # runs a kernel's function once on a device and compares; AccuracyError


@dataclass
class CudaNative:
    """A program of fixed sizes.

    Attributes:
        arch: what its machine code is for, `sm_90a`.
        cubins: symbol -> machine code, or what a library is to be called for.
        launches: symbol -> grid, block and shared memory.
        params: symbol -> names of the kernel's parameters.
        calls: kernels, loops and branches in order.
        controls: loops and branches by symbol.
        placed: where constants lie in one block of bytes; `constants` is the block, made when somebody asks for it,
            which is not where a program is only saved.
        inputs, outputs: their types.
        arena: the plan of the memory between the calls.
        kernels: the unique kernels in order of their first call, then loops and branches.
        graph_text: the graph after the passes; with True, with comments that say where nodes come from.
        compiled: kernels that were not in the cache.
        checks: by symbol, how a kernel is compared with its reference; those that were checked are taken out.
        program: what it was made of.
        prologue: makes what its kernels read of parameters; None where there are none.
        donated: outputs that take the memory of an input, both by number.
        bound: the constants with what kernels read of parameters, after `bind`.
    """

    arch: str
    cubins: Mapping[str, bytes]
    launches: Mapping[str, Launch]
    params: Mapping[str, tuple[str, ...]]
    calls: tuple[Call, ...]
    controls: Mapping[str, Control]
    placed: ConstantBlock
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    arena: Arena
    kernels: tuple[NativeKernel, ...]
    graph_text: Callable[[bool], str]
    compiled: int = 0
    checks: dict[str, Check] = field(default_factory=dict)
    program: Program | None = None
    prologue: Prologue | None = None
    donated: Mapping[int, int] = field(default_factory=dict)
    bound: Constants | None = None

    @cached_property
    def constants(self) -> Array:
        """One block of bytes; another one once parameters are bound."""
        return self.placed.made()

    @property
    def constant_bytes(self) -> int:
        return self.placed.nbytes

    def bind(self, weights: Weights, fetch: Callable[[DeviceArray], Array]) -> None:
        """Put what kernels read of parameters behind the constants, in a new block; what lies on the device, as the
        parameter itself or packed there, stays where it is. `fetch` brings an array to the host.
        """
        assert self.prologue is not None
        arrays = weights.arrays
        there: dict[int, DeviceArray] = self.prologue.as_they_lie(
            {n: a for n, a in arrays.items() if not isinstance(a, np.ndarray) and a.address % PARAMETER_ALIGN == 0}
        )
        kernels = self.prologue.kernels
        if kernels is not None:
            if kernels.text not in weights.packed:
                weights.packed[kernels.text] = kernels.pack([arrays[n] for n in kernels.inputs])
            there.update(zip(kernels.numbers, weights.packed[kernels.text]))
        read = self.prologue.reads(there)
        host = {n: a if isinstance(a, np.ndarray) else fetch(a) if n in read else None for n, a in arrays.items()}
        packed = self.prologue.by_numpy(host)
        sizes = [-(-int(str(t.nbytes)) // CACHE_LINE) * CACHE_LINE for t in self.prologue.types]
        at, references = self.constants.nbytes - sum(sizes), []
        block = np.empty_like(self.constants)  # what lies elsewhere is never touched
        block[:at] = self.constants[:at]
        for k, n in enumerate(sizes):
            if k in there:
                references.append(Reference(at, at + n, there[k]))
            else:
                block[at : at + packed[k].nbytes] = packed[k].reshape(-1).view(np.uint8)
                block[at + packed[k].nbytes : at + n] = 0
            at += n
        self.constants = block
        self.bound = Constants(block, tuple(references))

    @property
    def dims(self) -> tuple[Var, ...]:
        """None: device programs are made for fixed sizes."""
        return ()

    @property
    def symbols(self) -> dict[str, str]:
        """Kernel text -> symbol."""
        return {k.text: k.symbol for k in self.kernels}

    @property
    def guarded(self) -> bool:
        """Does any kernel read at indices that are known at run time only?"""
        return any(k.guarded for k in self.kernels)

    def functions(self, device: Device) -> dict[str, Any]:
        """Its kernels, loaded on a device."""
        return {s: self.function(s, device) for s in self.cubins}

    def function(self, symbol: str, device: Device) -> Any:
        """One of its kernels, loaded on a device."""
        overlapping = any(k.symbol == symbol and "pdl_wait(" in k.text for k in self.kernels)
        return device.load(self.cubins[symbol], symbol, self.launches[symbol], self.params[symbol], overlapping)

    def check(self, symbol: str, device: Device, function: Any) -> None:
        """Check a kernel that no device has checked. AccuracyError where it is wrong."""
        self.checks[symbol](device, function, self.launches[symbol])
        del self.checks[symbol]

    def sizes(self, dims: Mapping[Var, int]) -> tuple[list[int], int]:
        """Byte offsets into the arena, and its size."""
        return self.arena.offsets(dims)

    def stepwise(self) -> list[str]:
        """Loops and branches whose course only the data tells: the host reads their conditions, and the program is not
        recorded as a whole.
        """
        names = {k.symbol: f"{k.name}{k.where}" for k in self.kernels if k.control}
        return [names[s] for s, c in self.controls.items() if not _known(c)]


def _known(c: Control) -> bool:
    """Is it known before a run how often the bodies run? A trip count that is a constant stands in `length` already."""
    return isinstance(c, Loop) and c.condition is None and c.trips is None and c.length is not None
