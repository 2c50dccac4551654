"""Arrays on a device that other libraries made: where their elements lie, and results of the same kind.

CuPy and whatever has `__cuda_array_interface__` or speaks DLPack come in; torch tensors are asked directly, so that all
of their dtypes pass. Nothing is copied, but for arrays that are not contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from dnnc.backends.runtime.device import DEFAULT_STREAM, Device, DeviceArray
from dnnc.ir.errors import InputError, a_type, count

CUDA = 2  # kDLCUDA
TORCH_NAMES = {"bool_": "bool"}  # where NumPy's name of a dtype is not torch's


def is_device_array(a: Any) -> bool:
    """Does it lie on a CUDA device?"""
    if isinstance(a, (np.ndarray, np.generic, list, tuple, int, float)):
        return False
    if _is_torch(a):
        return bool(a.is_cuda)
    if hasattr(a, "__dnnc_array__"):  # asked for their interface, these would note that others see their memory
        return bool(getattr(a, "device", "cuda") != "cpu")
    if hasattr(a, "__cuda_array_interface__"):
        return True
    where = getattr(a, "__dlpack_device__", None)
    return where is not None and int(where()[0]) == CUDA


def _is_torch(a: Any) -> bool:
    return type(a).__module__.partition(".")[0] == "torch"


@cache
def dtype_name(d: np.dtype[Any]) -> str:
    """A dtype's name, which NumPy puts together each time."""
    return d.name


def device_array(
    a: Any, name: str, dtype: np.dtype[Any], rank: int, device: Device, what: str = "input"
) -> DeviceArray:
    """An input of a call on a device. InputError names it, what was expected and what was given."""
    found = _found(a, device)
    if found.dtype != dtype_name(dtype):
        raise InputError(f"{what} {name}: expected {dtype.name}, got {found.dtype}; cast it before the call")
    if len(found.shape) != rank:
        raise InputError(f"{what} {name}: expected {count(rank, 'dimension')}, got shape {found.shape}")
    return found


def _found(a: Any, device: Device) -> DeviceArray:
    own = getattr(a, "__dnnc_array__", None)  # arrays of dnnc say it themselves
    if own is not None:
        found: DeviceArray = own(device.number)
        return found
    number = getattr(getattr(a, "device", None), "id", device.number)
    if number != device.number and hasattr(a, "__cuda_array_interface__"):
        raise InputError(
            f"an array on cuda:{number} is given to a model on cuda:{device.number}; move it there, or compile for "
            f"target='cuda:{number}'"
        )
    return (
        _from_torch(a, device)
        if _is_torch(a)
        else _from_interface(a if hasattr(a, "__cuda_array_interface__") else _from_dlpack(a))
    )


def is_read_only(a: Any) -> bool:
    """Does a device array of any library say that nobody may write to it?"""
    told = None if _is_torch(a) else getattr(a, "__cuda_array_interface__", None)
    return told is not None and bool(told["data"][1])


def device_number(a: Any) -> int:
    """The number of the device on which an array of any library lies."""
    device = getattr(a, "device", None)
    for attribute in ("index", "number", "id"):  # of torch, the interpreter, CuPy
        found = getattr(device, attribute, None)
        if isinstance(found, int):
            return found
    if hasattr(a, "__dlpack_device__"):
        return int(a.__dlpack_device__()[1])
    return int(_cupy().cuda.runtime.pointerGetAttributes(a.__cuda_array_interface__["data"][0]).device)


def interface_array(a: Any) -> DeviceArray:
    """Return where a foreign array's elements lie, by exchange interfaces; torch's follow CuPy's stream."""
    a = a.detach() if _is_torch(a) else a
    return _from_interface(_from_dlpack(a) if _is_torch(a) or not hasattr(a, "__cuda_array_interface__") else a)


def output_array(a: Any, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], device: Device) -> DeviceArray:
    """A buffer for an output. InputError where it is another dtype, shape or order of elements."""
    if not is_device_array(a):
        raise InputError(f"output {name}: expected an array on the device as the first input is one, got {a_type(a)}")
    found = _found(a, device)
    if hasattr(a, "__dnnc_array__") and found.keep is not a:
        raise InputError(
            f"output {name}: arrays of dnnc.array are values, nobody writes to them; give a CuPy or torch array, or no "
            "outputs"
        )
    if found.dtype != dtype_name(dtype) or found.shape != shape or found.copied:
        raise InputError(
            f"output {name}: expected a contiguous array {dtype.name} {shape}, got {found.dtype} {found.shape}"
        )
    return found


def _from_torch(a: Any, device: Device) -> DeviceArray:
    if a.device.index != device.number:
        raise InputError(
            f"a tensor on {a.device} is given to a model on cuda:{device.number}; move it there, or compile for "
            f"target='{a.device}'"
        )
    copied = not a.is_contiguous()
    a = a.detach().contiguous() if copied else a.detach()
    return DeviceArray(a.data_ptr(), tuple(a.shape), str(a.dtype).removeprefix("torch."), a, None, copied)


def _cupy() -> Any:
    import cupy  # an optional package

    return cupy


def _from_dlpack(a: Any) -> Any:
    return _cupy().from_dlpack(a)


def _from_interface(a: Any) -> DeviceArray:
    told = a.__cuda_array_interface__
    dtype = getattr(a, "dtype", None)
    name = dtype_name(np.dtype(told["typestr"] if dtype is None else dtype))
    shape = tuple(int(n) for n in told["shape"])
    copied, read_only = not _contiguous(shape, told.get("strides"), told["typestr"]), bool(told["data"][1])
    if copied:
        a = _cupy().ascontiguousarray(_cupy().asarray(a))
        told = a.__cuda_array_interface__
    stream = told.get("stream")
    ready = DEFAULT_STREAM if stream == 1 else stream  # as the interface calls it
    return DeviceArray(int(told["data"][0] or 0), shape, name, a, ready, copied, read_only and not copied)


def _contiguous(shape: tuple[int, ...], strides: Any, typestr: str) -> bool:
    if strides is None or 0 in shape:
        return True
    expected = np.dtype(typestr).itemsize
    for n, s in zip(reversed(shape), reversed(tuple(strides))):
        if n != 1 and s != expected:
            return False
        expected *= n
    return True


# --- results ----------------------------------------------------------------------------------------------------------

Empty = Callable[[tuple[int, ...], np.dtype[Any]], Any]
Defer = Callable[[Any, Callable[[], None], int], None]


@dataclass(frozen=True)
class Kind:
    """The array library of a call: `empty` makes outputs, `finish` turns them into the caller's kind.

    `defer(key, check, stream)` puts off the check of indices that were read at run time until somebody waits for the
    stream; without it the call waits.
    """

    empty: Empty
    finish: Callable[[Any], Any]
    stream: int
    defer: Defer | None = None


def kind_of(a: Any, device: Device) -> Kind:
    """The kind of a device array, with the stream on which its library works now."""
    of_dnnc = getattr(a, "__dnnc_kind__", None)
    if of_dnnc is not None:
        found: Kind = of_dnnc()
        return found
    if _is_torch(a):
        import torch

        where = torch.device("cuda", device.number)
        stream = int(torch.cuda.current_stream(where).cuda_stream)

        def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
            return torch.empty(shape, dtype=getattr(torch, TORCH_NAMES.get(dtype.name, dtype.name)), device=where)

        return Kind(empty, _as_it_is, stream)
    namespace = getattr(a, "__array_namespace__", None)
    if namespace is not None and not hasattr(a, "__cuda_array_interface__"):
        return Kind(device.empty, namespace().from_dlpack, device.current_stream())
    return Kind(device.empty, _as_it_is, device.current_stream())


def _as_it_is(a: Any) -> Any:
    return a


def from_host(a: np.ndarray[Any, Any], kind: Kind, device: Device) -> Any:
    """A NumPy array as an array on the device, not yet finished."""
    made = kind.empty(a.shape, a.dtype)
    if a.nbytes:
        device.upload(device_array(made, "", a.dtype, a.ndim, device).address, np.ascontiguousarray(a), kind.stream)
        device.synchronize(kind.stream)
    return made


def to_host(a: Any) -> Any:
    """A device array as a NumPy array."""
    if _is_torch(a):
        return a.detach().cpu().numpy()
    return _cupy().asnumpy(a if hasattr(a, "__cuda_array_interface__") else _from_dlpack(a))


def stream_address(stream: Any) -> int:
    """The address of a stream of CuPy or torch, or one that is given as such. InputError for anything else."""
    for name in ("ptr", "cuda_stream", "handle"):
        if hasattr(stream, name):
            return int(getattr(stream, name))
    if not isinstance(stream, int):
        raise InputError(f"stream={stream!r}: expected a CuPy or torch stream, or its address as an int")
    return stream
