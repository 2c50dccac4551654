"""What a device does to run programs, and arrays on it. Addresses and streams are integers: no libraries."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import numpy as np

from dnnc.ir.dtype import DType

Array = np.ndarray[Any, Any]
ALIGN = 256  # bytes: what device allocations are aligned to, and every place that is made of them
PARAMETER_ALIGN = 16  # bytes: what addresses of kernels' parameters are multiples of, as the printer counts on
STATUS_BYTES = 16  # int32[4]: code (0 is success), kernel, value
DEFAULT_STREAM = 0


@dataclass(frozen=True)
class TensorMap:
    """Layout of a TMA descriptor: elements per axis, bytes between them, innermost last, the copy's box.

    swizzle: bytes (0, 32, 64, 128). `steps` and `corners` are of im2col: elements from one position of the filter to
        the next, and (lower,
    upper) reach of the filter per spatial axis; empty for a tiled map.
    """

    param: str
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    steps: tuple[int, ...] = ()
    corners: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Launch:
    """grid and block as CUDA takes them (an empty grid is not launched), and bytes of dynamic shared memory. `cached`:
    the kernel lives from the first-level cache.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int = 0
    cluster: int = 1
    maps: tuple[TensorMap, ...] = ()
    cached: bool = False


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

    Host arrays of `upload` and `download` stay until the stream has passed them; in a recording they are `pinned`.
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
        """`args`: parameter addresses in order, then the status; of a library call, then the workspace."""
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


@dataclass(eq=False)
class Weights:
    """What is bound to the parameters of a model."""

    arrays: Mapping[str, Array | DeviceArray]  # by the names of the prologue's inputs
    # what was packed of them on the device, by the text of the graph that computes it; programs share it
    packed: dict[str, Sequence[DeviceArray]] = field(default_factory=dict)


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
