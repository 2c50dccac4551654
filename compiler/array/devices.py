"""Where arrays live: names of devices, elements on CUDA devices, and the ways there and back.

`cpu` is the host, whose elements are NumPy arrays. `cuda:N` is a CUDA device, whose elements are DeviceData. A value
without a device (None) is neutral: Python's numbers, and what is traced. It goes to the arrays it is combined with.

Work on a device is queued on CuPy's current stream of the calling thread, as CuPy's own is, and nobody waits for it.
DeviceData knows the stream of its elements: work on another one is made to wait for it on the device. Memory comes from
CuPy's pool, which orders its reuse by streams as well.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dnnc.array.errors import ValueInputError
from dnnc.backends.registry import backend_class, open_backend
from dnnc.backends.runtime.arrays import Kind, device_number, dtype_name, interface_array
from dnnc.backends.runtime.device import DeviceArray
from dnnc.ir.errors import InputError, TargetError
from dnnc.ir.lru import LRU

if TYPE_CHECKING:
    from dnnc.backends.base import Backend

Array = np.ndarray[Any, Any]
HOST = "cpu"
NUMBERS = 1024  # numbers that are kept on a device, of each of its streams
NUMBER_BYTES = 16  # what one takes there
ASKED = 1 << 30  # bytes of results from which a device is asked for room first
ALIGN = 16  # bytes: what addresses of kernels' operands are multiples of


def device_name(device: Any) -> str:
    """Return `cpu` or `cuda:N` for None (host), a name (`cuda`: `cuda:0`) or a device; else ValueInputError."""
    if device is None:
        return HOST
    number = getattr(device, "id", None)
    text = f"cuda:{number}" if isinstance(number, int) else str(device)
    kind, _, index = text.partition(":")
    if text == HOST or (kind == "cuda" and (index.isdigit() or text == "cuda")):
        return text if kind == HOST else f"cuda:{int(index or 0)}"
    raise ValueInputError(
        f"device={device!r}: expected 'cpu' or 'cuda:0'; dnnc.array.__array_namespace_info__().devices() lists what is "
        "here"
    )


_NEUTRAL: ContextVar[bool] = ContextVar("dnnc_neutral", default=False)


@contextmanager
def neutral() -> Iterator[None]:
    """While a function is traced: what is made of nothing lives where the arguments of a call will."""
    token = _NEUTRAL.set(True)
    try:
        yield
    finally:
        _NEUTRAL.reset(token)


def in_trace() -> bool:
    """True while a function is traced: arrays from outside stay as they are, so that others can replace them."""
    return _NEUTRAL.get()


def home(device: Any) -> str | None:
    """Return where a new array lives: the device asked for, else the host; nowhere in particular in a trace."""
    name = device_name(device)
    return None if in_trace() else name


def devices() -> tuple[str, ...]:
    """The devices of this machine, the host first."""
    backend = backend_class("cuda")
    found = [HOST]
    while not backend.device_problem(len(found) - 1):
        found.append(f"cuda:{len(found) - 1}")
    return tuple(found)


def mixed(what: str, one: str, other: str) -> ValueInputError:
    """The error of operands that live apart."""
    return ValueInputError(
        f"{what}: one operand lives on {one}, another on {other}; bring one of them over by x.to_device({one!r})"
    )


class DeviceData:
    """Elements in order on a CUDA device. `keep` owns their memory, `stream` orders the work that makes them."""

    __slots__ = ("address", "dtype", "keep", "place", "shape", "stream")

    def __init__(
        self, place: Place, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], keep: Any, stream: int
    ) -> None:
        self.place, self.address, self.shape, self.dtype, self.keep, self.stream = (
            place,
            address,
            shape,
            dtype,
            keep,
            stream,
        )

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        stream = {"stream": self.stream or 1}  # 1 is the default one
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "version": 3,
            "strides": None,
            **stream,
        }

    def __dnnc_array__(self, number: int) -> DeviceArray:
        """What a model on the device of this number takes. InputError where the elements are on another one."""
        if self.place.device.number != number:
            raise InputError(
                f"an array on {self.place.name} is given to a model on cuda:{number}; bring it there by "
                f"x.to_device('cuda:{number}')"
            )
        return DeviceArray(self.address, self.shape, dtype_name(self.dtype), self, self.stream)

    def __dnnc_kind__(self) -> Kind:
        """How a model that takes these elements gives its results."""
        place = self.place
        stream = place.device.current_stream()
        return Kind(lambda shape, dtype: place.empty(shape, dtype, stream), lambda a: a, stream, place.defer)

    def viewed(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceData:
        """The same bytes as other elements."""
        return DeviceData(self.place, self.address, shape, dtype, self.keep, self.stream)


class Foreign(NamedTuple):
    """What owns memory that others see too, and the stream in whose order they gave it."""

    owner: Any
    stream: Any


class Place:
    """A CUDA device as the home of arrays.

    `pending`: checks, with their streams and what keeps these alive, that the next one who waits for the device makes:
        work that is under way may
    still find an index outside of its axis.
    """

    def __init__(self, name: str, backend: Backend) -> None:
        assert backend.device is not None, "arrays of this target lie on the host"
        self.name, self.backend = name, backend
        self.device = backend.device()
        self.pending: dict[Any, tuple[Callable[[], None], int, Any]] = {}
        self._numbers: LRU[Any, DeviceData] = LRU(NUMBERS)
        self._lock = threading.Lock()

    def ask_for(self, nbytes: int) -> None:
        """TargetError where large results do not fit, before anything is compiled for them."""
        if nbytes > ASKED:
            self.device.pooled(nbytes)  # which goes back to the pool, and is taken from there

    # --- memory -------------------------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], stream: int) -> DeviceData:
        """Allocate elements without contents in the current stream. TargetError says what to do without room."""
        n = dtype.itemsize
        for d in shape:
            n *= d
        address, keep = self.device.pooled(n)
        return DeviceData(self, address, shape, dtype, keep, stream)

    def upload(self, a: Array) -> DeviceData:
        """Upload a NumPy array, which may be written to on return: CUDA copies pageable memory at once."""
        a = np.ascontiguousarray(a).reshape(a.shape)
        stream = self.device.current_stream()
        made = self.empty(a.shape, a.dtype, stream)
        if a.nbytes:
            self.device.upload(made.address, a, stream)
        return made

    def fetch(self, data: DeviceData) -> Array:
        """Wait for the elements and return a NumPy array. InputError where earlier work found a bad index."""
        stream = self.device.current_stream()
        self.order(data, stream)
        made = np.empty(data.shape, data.dtype)
        if made.nbytes:
            self.device.download(made, data.address, stream)
        self.device.synchronize(stream)
        self.check()
        return made

    def copied(self, data: DeviceData, stream: int | None = None) -> DeviceData:
        """Copy elements of this or another device to this one, after the work of `stream`."""
        current = self.device.current_stream()
        made = self.empty(data.shape, data.dtype, current)
        at = current if stream is None else stream
        if at != current:
            self.follow(current, at)
        if data.place is self:
            self.order(data, at)
            self.device.copy(made.address, data.address, data.nbytes, at)
        else:
            data.place.wait_here(data, self, at)
            self.device.copy_from(made.address, data.place.device, data.address, data.nbytes, at)
        self.done(data, at)
        if at != current:
            self.follow(at, current)
        return made

    def view(self, data: DeviceData) -> Any:
        """The elements as an array of the device's own library (CuPy), ready in the order of its current stream."""
        self.order(data, self.device.current_stream())
        return self.device.view(data.address, data.shape, data.dtype, data)

    # --- order --------------------------------------------------------------------------------------------------------

    def follow(self, first: int, then: int) -> None:
        """What comes on one stream from now on waits for what is on the other."""
        event = self.device.new_event()
        self.device.record(event, first)
        self.device.wait(event, then)

    def order(self, data: DeviceData, stream: int) -> None:
        """Let a stream wait for elements."""
        if data.stream != stream:
            self.follow(data.stream, stream)

    def done(self, data: DeviceData, stream: int) -> None:
        """Let the elements' own stream, where their memory will be used again, wait for a stream that has read them."""
        if data.place is not self:
            event = self.device.new_event()
            self.device.record(event, stream)
            data.place.device.wait(event, data.stream)
        elif data.stream != stream:
            self.follow(stream, data.stream)

    def wait_here(self, data: DeviceData, there: Place, stream: int) -> None:
        """Let a stream of another device wait for elements of this one."""
        event = self.device.new_event()
        self.device.record(event, data.stream)
        there.device.wait(event, stream)

    def defer(self, key: Any, check: Callable[[], None], stream: int) -> None:
        """Make a check when somebody waits, of work on the current stream."""
        self.pending[key, stream] = check, stream, self.device.stream_object()

    def check(self) -> None:
        """InputError where work of before has found an index outside of its axis; waits for that work."""
        while self.pending:
            try:
                _, (check, stream, _keep) = self.pending.popitem()
            except KeyError:  # another thread has taken the last one
                return
            self.device.synchronize(stream)
            check()

    def operand(self, a: Array | DeviceData, stream: int) -> DeviceData:
        """An operand of a program that runs on a stream. Numbers are kept here for the next time."""
        if isinstance(a, DeviceData):
            self.order(a, stream)
            return a
        if a.nbytes > NUMBER_BYTES or not a.nbytes:
            return self.upload(a)
        key = stream, a.dtype, a.shape, a.tobytes()
        with self._lock:
            found = self._numbers.find(key)
            if found is None:
                address, keep = self.device.pooled(NUMBER_BYTES)
                self.device.upload(address, a, stream)
                found = self._numbers[key] = DeviceData(self, address, a.shape, a.dtype, keep, stream)
            return found


@cache
def place(name: str) -> Place:
    """The device of a name such as `cuda:0`. TargetError says what is missing, and what to do."""
    try:
        return Place(name, open_backend(name))
    except TargetError as e:
        raise TargetError(
            f"device={name!r}: {e}; dnnc.array.__array_namespace_info__().devices() lists what is here"
        ) from None


# --- elements of other libraries --------------------------------------------------------------------------------------


def imported(a: Any) -> DeviceData:
    """Share the elements of another library's device array; copy them where strides or alignment do not fit."""
    if isinstance(a, DeviceData):
        return a
    where = place(f"cuda:{device_number(a)}")
    found = interface_array(a)
    dtype = np.dtype(found.dtype)
    current = where.device.current_stream()
    if found.ready not in (None, current):
        where.follow(int(found.ready or 0), current)
    data = DeviceData(
        where, found.address, found.shape, dtype, Foreign(found.keep, where.device.stream_object()), current
    )
    return where.copied(data) if data.address % ALIGN else data


def on_host(data: Array | DeviceData) -> Array:
    """Elements as a NumPy array, wherever they lie."""
    return data.place.fetch(data) if isinstance(data, DeviceData) else data


def moved_to(data: Array | DeviceData, name: str, stream: int | None = None) -> Array | DeviceData:
    """Elements on another device; themselves where they lie there already."""
    if name == HOST:
        return on_host(data)
    there = place(name)
    if isinstance(data, DeviceData):
        return data if data.place is there else there.copied(data, stream)
    return there.upload(data)


def common(what: str, names: Sequence[str | None]) -> str | None:
    """The device of several values; None where all are neutral. ValueInputError where they are on two."""
    found: str | None = None
    for n in names:
        if n is not None and n != found:
            if found is not None:
                raise mixed(what, found, n)
            found = n
    return found
