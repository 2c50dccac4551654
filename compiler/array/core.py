"""The array that users hold: one lazy value, or two for the parts of complex numbers, and Python's protocols on them.

Operators and methods find their functions in `dnnc.array`, as `__array_namespace__` gives. An array is a handle:
writing to it gives the handle a new value, and leaves arrays that were made of the old one as they are.
"""

from __future__ import annotations

import math
import operator
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from html import escape
from importlib import import_module
from typing import Any

import numpy as np

from dnnc.array.devices import HOST, DeviceData, Foreign, Place, device_name, moved_to, on_host
from dnnc.array.errors import TypeInputError, ValueInputError
from dnnc.array.lazy import Lazy, apply, buffer, leaf, materialise
from dnnc.array.methods import Methods
from dnnc.array.methods import function as _function
from dnnc.array.operators import Operators
from dnnc.array.promotion import BFLOAT16, DType, dtype_of, kind_of, real_of
from dnnc.array.sizes import Size
from dnnc.array.structure import ROOT
from dnnc.backends.runtime.arrays import Kind, stream_address
from dnnc.backends.runtime.device import DeviceArray
from dnnc.ir.dtype import from_numpy
from dnnc.ir.errors import InputError
from dnnc.ir.types import TensorType

VERSIONS = ("2021.12", "2022.12", "2023.12", "2024.12", "2025.12")
CPU, CUDA = 1, 2  # kDLCPU and kDLCUDA, kinds of devices to DLPack


class Array(Operators, Methods):
    """An n-dimensional array of one dtype, computed when it is needed. Make one by `dnnc.array.asarray`."""

    __slots__ = ("__weakref__", "_dtype", "_grad", "_pairs", "_parts", "_shown")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, parts: Sequence[Lazy], dtype: DType) -> None:
        self._dtype = dtype
        self._grad: Array | None = None
        self._set(parts)

    def _set(self, parts: Sequence[Lazy]) -> None:
        self._parts = tuple(parts)
        self._pairs: Lazy | None = None  # the numbers of a complex array as they lie in memory
        for p in self._parts:
            if p.owner is None or p.owner() is None:
                p.owner = weakref.ref(self)

    def _written(self, parts: Sequence[Lazy]) -> None:
        """Take other values in place. An array that requires a gradient still does, from these on."""
        before = self._parts[0]
        if before.tracked == ROOT and before.root() is self:
            gradients().again(self, before, parts)
        else:
            self._set(parts)

    # --- gradients ----------------------------------------------------------------------------------------------------

    @property
    def requires_grad(self) -> bool:
        """Does `backward` of what is computed with the array give it a gradient? Set it before computing."""
        p = self._parts[0]
        return p.tracked == ROOT and p.root() is self

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if bool(value) != self.requires_grad:
            (gradients().begin if value else gradients().end)(self)

    @property
    def grad(self) -> Array | None:
        """The gradient that `backward` has added up; None before."""
        return self._grad

    @grad.setter
    def grad(self, value: Array | None) -> None:
        self._grad = value

    def backward(self, gradient: Any = None) -> None:
        """Add the gradient of this array to `grad` of all arrays that it depends on and that require one.

        Args:
            gradient: the cotangent of this array, of its shape and dtype; an array without axes needs none.

        Raises:
            GradientError: it depends on no such array, it has axes and no `gradient` is given, or an op on the way has
                no derivative.
        """
        gradients().backward(self, gradient)

    def unchain_backward(self) -> None:
        """Forget how this array was computed, and all that it was computed of: gradients end there (truncated BPTT)."""
        gradients().unchain(self)

    # --- what it is ---------------------------------------------------------------------------------------------------

    @property
    def dtype(self) -> DType:
        return self._dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._parts[0].shape

    @property
    def ndim(self) -> int:
        return len(self._parts[0].type.shape)

    @property
    def size(self) -> int:
        n = 1
        for d in self.shape:
            n *= d
        return n

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self._dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self._dtype.itemsize

    @property
    def device(self) -> str:
        """`cpu`, or `cuda:0` and the like."""
        return self._parts[0].device or HOST

    @property
    def T(self) -> Array:
        """The transpose of a matrix."""
        if self.ndim != 2:
            raise InputError(f".T needs two axes, the array has shape {self.shape}; use .mT or permute_dims")
        return self.mT

    @property
    def mT(self) -> Array:
        """The transpose of each matrix of a stack."""
        return _function("matrix_transpose")(self)  # type: ignore[no-any-return]

    @property
    def real(self) -> Array:
        return Array(self._parts[:1], real_of(self._dtype))

    @property
    def imag(self) -> Array:
        return _function("imag")(self)  # type: ignore[no-any-return]

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        if api_version is not None and api_version not in VERSIONS:
            raise InputError(f"api_version={api_version!r}: dnnc.array follows {', '.join(VERSIONS)}")
        return namespace()

    def to_device(self, device: str, /, *, stream: Any = None) -> Array:
        """The array on a device, `cpu` or `cuda:N`: itself where it lives there, else it is computed and copied.

        Args:
            device: its name, or a device object of CuPy or torch.
            stream: a stream of a CUDA device (of CuPy or torch, or its address) in whose order the copy is made as
                well.
        """
        name = device_name(device)
        if name != self.device and any(p.tracked for p in self._parts):
            raise ValueInputError(
                "to_device: gradients do not flow between devices; move the array before it requires a gradient"
            )
        if stream is not None and HOST in (name, self.device):
            raise ValueInputError(
                f"stream={stream!r}: copies from and to the host take none; they are made when this returns"
            )
        return moved(self, name, stream)

    def astype(self, dtype: Any, /, *, copy: bool = True) -> Array:
        return _function("astype")(self, dtype, copy=copy)  # type: ignore[no-any-return]

    def reshape(self, *shape: Any) -> Array:
        return _function("reshape")(  # type: ignore[no-any-return]
            self, shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        )

    # --- its contents -------------------------------------------------------------------------------------------------

    def numpy(self) -> np.ndarray[Any, Any]:
        """The contents as a NumPy array, which nobody may write to; brought to the host where they live elsewhere."""
        a = self._contents().view()
        a.flags.writeable = False
        return a

    def _contents(self) -> np.ndarray[Any, Any]:
        """The contents on the host."""
        a = on_host(self._buffer())
        return a if len(self._parts) == 1 else a.view(self._dtype)[..., 0]

    def _buffer(self) -> np.ndarray[Any, Any] | DeviceData:
        """The contents where they live; of complex numbers the pairs."""
        if len(self._parts) == 1:
            return buffer(self._parts[0])
        if self._pairs is None:
            self._pairs = joined(self._parts)
        return buffer(self._pairs)

    def _on_device(self) -> DeviceData | None:
        """The contents on a CUDA device; None where they live on the host."""
        if self.device == HOST:
            return None
        data = self._buffer()
        assert isinstance(data, DeviceData)
        return data if len(self._parts) == 1 else data.viewed(data.shape[:-1], self._dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if self.device != HOST:
            raise TypeInputError(
                f"an array on {self.device} does not become a NumPy array by itself; ask for x.numpy() or "
                "x.to_device('cpu')"
            )
        a = self.numpy()
        wanted = a.dtype if dtype is None else np.dtype(dtype)
        if copy is False and wanted != a.dtype:
            raise ValueInputError(f"an array of {a.dtype} cannot be one of {wanted} without a copy")
        return a.astype(wanted) if copy or wanted != a.dtype else a

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return numpy_protocol().ufunc(ufunc, method, inputs, kwargs)

    def __array_function__(self, fn: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return numpy_protocol().function(fn, args, kwargs)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[Any, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        data = self._on_device()
        if data is None or (dl_device is not None and int(dl_device[0]) == CPU):
            if data is not None and copy is False:
                raise BufferError(f"an array on {self.device} cannot be shared with the host")
            a = self._contents()
            return (a.copy() if copy and data is None else a).__dlpack__()
        asked = {"stream": stream, "max_version": max_version, "dl_device": dl_device, "copy": copy}
        return data.place.view(data).__dlpack__(**{k: v for k, v in asked.items() if v is not None})

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CPU, 0) if self.device == HOST else (CUDA, int(self.device.partition(":")[2]))

    def __dnnc_array__(self, number: int) -> DeviceArray:
        """What a model on the device of this number takes."""
        data = self._on_device()
        assert data is not None, "only arrays on a device are asked"
        return data.__dnnc_array__(number)

    def __dnnc_kind__(self) -> Kind:
        """How a model that takes this array gives its results."""
        data = self._on_device()
        assert data is not None, "only arrays on a device are asked"
        return replace(data.__dnnc_kind__(), finish=lambda made: from_data(made, made.dtype))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = self._on_device()
        if data is None:
            raise AttributeError("__cuda_array_interface__: the array lives on the host")
        shown = getattr(self, "_shown", ())
        if not any(d is data for d in shown):
            self._shown = (*shown, data)  # who asks keeps this array alive, which may become another value meanwhile
        return data.__cuda_array_interface__

    def __dnnc_own__(self) -> DeviceData:
        """Return writable contents on a CUDA device: memory that nobody else sees, else a copy."""
        data = self._buffer()
        assert isinstance(data, DeviceData), "only arrays on a device are asked"
        alone = len(self._parts) == 1 and not isinstance(data.keep, Foreign)
        where = data.place
        del data
        if alone and all(n <= least for n, least in zip(_references(self), _references(_unseen(where)))):
            return self._parts[0].data  # type: ignore[return-value]
        copy = where.copied(self._buffer())  # type: ignore[arg-type]
        if len(self._parts) == 1:
            self._set((leaf(copy),))
        return copy

    def item(self, *place: Any) -> Any:
        """The only element as a Python number; with indices, or one into all elements in order, that one."""
        if not place and self.size != 1:
            raise TypeError(f"an array of shape {self.shape} is no single number")
        found = self._contents().item(*place)
        return float(found) if self._dtype == BFLOAT16 else found

    def tolist(self) -> Any:
        a = self._contents()
        return (a.astype(np.float32) if self._dtype == BFLOAT16 else a).tolist()

    def _scalar(self, kinds: str, what: str) -> Any:
        if self.ndim:
            raise TypeError(f"only an array without axes is {what}; this one has shape {self.shape}")
        if kind_of(self._dtype) not in kinds:
            raise TypeError(f"an array of {self._dtype} is not {what}")
        return self.item()

    def __bool__(self) -> bool:
        return bool(self._scalar("biufc", "true or false"))

    def __int__(self) -> int:
        return int(self._scalar("biuf", "an integer"))

    def __float__(self) -> float:
        return float(self._scalar("biuf", "a float"))

    def __complex__(self) -> complex:
        return complex(self._scalar("biufc", "a complex number"))

    def __index__(self) -> int:
        return operator.index(self._scalar("iu", "an index"))

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("an array without axes has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Array]:
        if not any(p.traced for p in self._parts):
            evaluate(self)
        return (self[k] for k in range(len(self)))

    def __repr__(self) -> str:
        if any(p.traced for p in self._parts):
            return f"<traced array of {self._dtype}, shape {self.shape}>"
        return repr(self._contents()).replace("array(", "Array(", 1)

    def _repr_html_(self) -> str:
        facts = f"{self._dtype}, shape {self.shape}, {self.device}"
        return f"<pre>{escape(repr(self))}</pre><small>{escape(facts)}</small>"

    def __str__(self) -> str:
        return self.__repr__() if any(p.traced for p in self._parts) else str(self._contents())

    def __format__(self, how: str) -> str:
        return format(self.item(), how) if how and not self.ndim else str(self)

    def __reduce__(self) -> Any:
        return from_buffer, (np.array(self._contents()), self.device)

    # --- indexing -----------------------------------------------------------------------------------------------------

    def __getitem__(self, key: Any, /) -> Array:
        return indexing().read(self, key)  # type: ignore[no-any-return]

    def __setitem__(self, key: Any, value: Any, /) -> None:
        self._written(indexing().written(self, key, value)._parts)


@cache
def namespace() -> Any:
    """`dnnc.array`, which imports this module."""
    return import_module("dnnc.array")


@cache
def numpy_protocol() -> Any:
    return import_module("dnnc.array.numpy_protocol")


@cache
def gradients() -> Any:
    return import_module("dnnc.frontends.trace.backward")


@cache
def indexing() -> Any:
    return import_module("dnnc.array.indexing")


# --- making arrays ----------------------------------------------------------------------------------------------------


def from_buffer(a: Any, device: str | None = HOST) -> Array:
    """An array of a NumPy array that nobody writes to any more, on the named device. None: device-neutral."""
    a = np.asarray(a)
    dtype = dtype_of(a.dtype)
    a = a.astype(dtype, copy=False)
    if dtype.kind == "c":
        a = np.ascontiguousarray(a).reshape(*a.shape, 1).view(real_of(dtype))
    return from_data(a if device is None else moved_to(a, device), dtype, device)


def _references(a: Array) -> tuple[int, int, int, int]:
    """Count the references to a device value, the tuple of it that arrays share, its elements and memory."""
    x = a._parts[0]
    return sys.getrefcount(a._parts), sys.getrefcount(x), sys.getrefcount(x.data), sys.getrefcount(x.data.keep)  # type: ignore[union-attr]


def _unseen(where: Place) -> Array:
    """An array of a device that nobody else sees."""
    return from_data(DeviceData(where, 0, (), np.dtype(np.float32), object(), 0), np.dtype(np.float32))


def from_data(data: np.ndarray[Any, Any] | DeviceData, dtype: DType, device: str | None = HOST) -> Array:
    """An array of a buffer; of complex numbers the pairs. `device`: of a NumPy array; None for one that is neutral."""
    x = leaf(data, device)
    if dtype.kind != "c":
        return Array((x,), dtype)
    made = Array(taken_apart(x), dtype)
    made._pairs = x  # the parts need not be put together again
    return made


def moved(x: Array, name: str, stream: Any = None) -> Array:
    """An array on a device."""
    if x.device == name or any(p.traced for p in x._parts):  # where a traced array lives, the call says
        return x
    at = None
    if stream is not None:
        at = stream_address(stream)
    return from_data(moved_to(x._buffer(), name, at), x.dtype)


def placed(x: Array, name: str | None) -> Array:
    """A new array, made of numbers alone, on the device where it was asked for."""
    for p in x._parts:
        p.device = name
        if p.data is not None and name not in (None, HOST):
            p.data = moved_to(p.data, str(name))
    return x


def taken_apart(pairs: Lazy) -> list[Lazy]:
    """The parts of numbers that lie next to each other along the last axis."""
    *shape, _ = pairs.shape
    parts = [
        apply("slice", pairs, starts=(*(0 for _ in shape), k), steps=(1,) * (len(shape) + 1), shape=(*shape, 1))
        for k in (0, 1)
    ]
    return [apply("reshape", p, shape=tuple(shape)) for p in parts]


def joined(parts: Sequence[Lazy]) -> Lazy:
    """Values next to each other along a new last axis."""
    shape = parts[0].shape
    return apply("concat", *(apply("reshape", p, shape=(*shape, 1)) for p in parts), axis=len(shape))


def as_operand(x: Any) -> Any:
    """An array or a Python number, of these or a NumPy array or scalar."""
    return (
        from_buffer(np.array(x), HOST if isinstance(x, np.ndarray) else None)
        if isinstance(x, (np.ndarray, np.generic))
        else x
    )


def scalar(value: Any, dtype: DType) -> Array:
    """A number without axes, which lives nowhere in particular. It is an operand of programs, not a part of them."""
    if isinstance(value, Size):
        return cast(array_of(apply("full", shape=(), value=value, dtype=from_numpy(real_of(dtype)))), dtype)
    if type(value) in (int, float) and dtype.kind != "c":
        return Array((number(value, dtype),), dtype)
    return from_buffer(_as_dtype(value, dtype), None)


def number(value: int | float, dtype: DType) -> Lazy:
    """The same of a number of a real type."""
    type_, a = _number(value, dtype, 1.0 if value else math.copysign(1.0, value))
    return Lazy(type_, None, 0, a)


def _as_dtype(value: Any, dtype: DType) -> np.ndarray[Any, Any]:
    return np.asarray(value).astype(dtype) if not isinstance(value, int) else np.array(wrapped(value, dtype), dtype)


@lru_cache(1024, typed=True)
def _number(value: int | float, dtype: DType, sign: float) -> tuple[TensorType, np.ndarray[Any, Any]]:
    """Type and contents of a number. `sign`: of a zero, since zeros are equal and have signs."""
    a = _as_dtype(value, dtype)
    a.flags.writeable = False
    return TensorType(from_numpy(dtype), ()), a


def wrapped(value: int, dtype: DType) -> Any:
    """InputError where an integer is not one of the type."""
    if dtype.kind in "iu" and not isinstance(value, bool):
        info = np.iinfo(dtype)
        if not info.min <= value <= info.max:
            raise InputError(f"{value} is no {dtype}: expected {info.min} to {info.max}")
    return value


def fresh(x: Lazy) -> Array:
    """An array of a value that was just recorded, of real numbers."""
    a = _new_array(Array)
    a._dtype, a._grad, a._parts, a._pairs = x.type.dtype.numpy, None, (x,), None
    x.owner = weakref.ref(a)
    return a


_new_array = Array.__new__


def array_of(*parts: Lazy) -> Array:
    """An array of values whose type says its dtype: one part, or two of complex numbers."""
    d = parts[0].type.dtype.numpy
    if len(parts) == 2:
        d = np.dtype(np.complex64 if d.itemsize == 4 else np.complex128)
    return Array(parts, d)


def cast(x: Array, dtype: DType) -> Array:
    """The numbers as another type; the imaginary part is dropped where it has no place."""
    if x.dtype == dtype:
        return x
    real = real_of(dtype)
    if dtype.kind == "b":
        parts = [apply("not_equal", p, apply_full(p, 0)) if p.type.dtype.kind != "b" else p for p in x._parts]
        return array_of(parts[0] if len(parts) == 1 else apply("logical_or", *parts))
    parts = [p if p.type.dtype.numpy == real else apply("cast", p, to=from_numpy(real)) for p in x._parts]
    if dtype.kind != "c":
        return array_of(parts[0])
    return array_of(parts[0], parts[1] if len(parts) == 2 else apply_full(parts[0], 0, x.shape))


def apply_full(like: Lazy, value: Any, shape: tuple[int, ...] = ()) -> Lazy:
    """A constant of the type of a value, where that lives."""
    made = apply("full", shape=shape, value=value, dtype=like.type.dtype)
    if shape:
        placed(array_of(made), like.device)
    return made


def evaluate(*arrays: Array) -> None:
    """Compute several arrays as one program."""
    for a in arrays:
        if len(a._parts) == 2 and a._pairs is None:
            a._pairs = joined(a._parts)
    materialise([a._pairs or a._parts[0] for a in arrays])
