"""TMA tensor maps for addresses on a device, by the driver's own functions: CuPy has no binding."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dnnc.ir.errors import InternalError

if TYPE_CHECKING:
    from dnnc.backends.runtime.device import TensorMap

BYTES, ALIGN = 128, 64  # of a descriptor
# CUtensorMapDataType; 8-bit floats travel as bytes
TYPES = {
    "u8": 0,
    "i8": 0,
    "f8e4m3fn": 0,
    "f8e5m2": 0,
    "bool": 0,
    "u16": 1,
    "i16": 1,
    "u32": 2,
    "i32": 3,
    "u64": 4,
    "i64": 5,
    "f16": 6,
    "f32": 7,
    "f64": 8,
    "bf16": 9,
}
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle
L2_256 = 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B


@dataclass(frozen=True)
class Encoded:
    """A descriptor; `memory` owns it."""

    address: int
    memory: Any


def encoded(m: TensorMap, address: int, driver: Any) -> Encoded:
    """Descriptor of a map at this address, axes innermost first. InternalError where the driver refuses it."""
    memory = (ctypes.c_uint8 * (BYTES + ALIGN))()
    at = -(-ctypes.addressof(memory) // ALIGN) * ALIGN
    rank = len(m.shape)
    sizes = (ctypes.c_uint64 * rank)(*reversed(m.shape))
    strides = (ctypes.c_uint64 * max(rank - 1, 1))(*reversed(m.strides[:-1]))
    steps = (ctypes.c_uint32 * rank)(*(reversed(m.steps) if m.steps else [1] * rank))
    dtype = TYPES.get(m.dtype.name, 0)
    head = (ctypes.c_void_p(at), dtype, rank, ctypes.c_void_p(address), sizes, strides)
    tail = (steps, 0, SWIZZLES[m.swizzle], L2_256, 0)
    if m.corners:
        spatial = rank - 2
        lower = (ctypes.c_int * spatial)(*(lo for lo, _ in reversed(m.corners)))
        upper = (ctypes.c_int * spatial)(*(hi for _, hi in reversed(m.corners)))
        pixels, channels = ctypes.c_uint32(m.box[0]), ctypes.c_uint32(m.box[-1])
        status = driver.cuTensorMapEncodeIm2col(*head, lower, upper, channels, pixels, *tail)
    else:
        box = (ctypes.c_uint32 * rank)(*reversed(m.box))
        status = driver.cuTensorMapEncodeTiled(*head, box, *tail)
    if status:
        raise InternalError(f"the driver refuses a tensor map (status {status}): {m} at {address:#x}")
    return Encoded(at, memory)
