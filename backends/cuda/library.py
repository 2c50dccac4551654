"""Vendor library calls (cuBLASLt, cuDNN) as steps: what is called, as data, and where libraries are.

A schedule such as `cublaslt(algo=3)` makes no code. Its kernel is the nest as it was lowered, which says what is
computed, and a LibraryCall, which says what is called instead; the call's bytes take the place of machine code wherever
that goes. Nothing here needs a device. ctypes opens libraries from NVIDIA's wheels or by the system's loader.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dnnc.backends.runtime.device import Launch
from dnnc.ir.errors import InternalError, TargetError, install
from dnnc.ir.loops.stmt import Kernel

FORMAT = 1  # of a call's bytes
HEAD = b'{"library call": '  # how they begin; machine code begins otherwise
WORKSPACE = 64 << 20  # bytes that a call may ask for beside its operands
ALIGN = 16  # bytes: what addresses of operands are multiples of
PLANS = 8  # of a library's own suggestions that a search may measure
FEW_PLANS = 3  # of convolutions without tensor cores, which few engines do
ONE = Launch((1, 1, 1), (1, 1, 1))  # a call has no grid; its operands alone count


@dataclass(frozen=True)
class Vendor:
    """A library: name, files (newest first), functions for its version and a status's name, and its wheel."""

    title: str
    files: tuple[str, ...]
    version: str
    status: str
    wheel: str


VENDORS: Mapping[str, Vendor] = {
    "cublaslt": Vendor(
        "cuBLASLt",
        ("libcublasLt.so.13", "libcublasLt.so.12"),
        "cublasLtGetVersion",
        "cublasLtGetStatusName",
        "nvidia-cublas",
    ),
    "cudnn": Vendor("cuDNN", ("libcudnn.so.9",), "cudnnGetVersion", "cudnnGetErrorString", "nvidia-cudnn-cu13"),
}


# --- what is called ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Matrix:
    """A product's operand: argument number, stride of rows (transposed: columns), and of a batch's matrices."""

    arg: int
    transposed: bool
    step: int
    batch_step: int


@dataclass(frozen=True)
class Product:
    """y[m, n] = after(sum over k of x[m, k] * w[k, n] + bias[n]), `batch` times. `types`: of x and w, and of y; `math`:
    of the products, "f32", "tf32" or "i32"; sums are float32, those of "i32" integers. `bias`: argument or -1; `after`:
    "", "relu" or "gelu" (by tanh).
    """

    m: int
    n: int
    k: int
    batch: int
    types: tuple[str, str]
    math: str
    x: Matrix
    w: Matrix
    y: Matrix
    bias: int
    after: str


@dataclass(frozen=True)
class Image:
    """A convolution's operand: its argument number, sizes and steps (elements) in the order N, C, H, W."""

    arg: int
    sizes: tuple[int, int, int, int]
    steps: tuple[int, int, int, int]


@dataclass(frozen=True)
class Convolution:
    """y = after(conv(x, w) + bias), `w` as K, C, R, S. Pads (before, after) for H and W; the rest as of Product."""

    x: Image
    w: Image
    y: Image
    types: tuple[str, str]
    math: str
    pads: tuple[tuple[int, int], tuple[int, int]]
    strides: tuple[int, int]
    dilations: tuple[int, int]
    bias: int
    after: str


@dataclass(frozen=True)
class LibraryCall:
    """A library call. `plan`: number of its suggestion in the library's own order of expected times."""

    library: str
    plan: int
    work: Product | Convolution

    @property
    def code(self) -> bytes:
        """The call as bytes; `parse_call` reads them."""
        return HEAD + json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True).encode() + b"}"


def is_call(code: bytes) -> bool:
    """Are these the bytes of a call, and no machine code?"""
    return code.startswith(HEAD)


def parse_call(code: bytes) -> LibraryCall:
    """What `code` gave. InternalError where it is of another version."""
    try:
        data = json.loads(code)["library call"]
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}")
        kind, work = (Product, data["work"]) if data["library"] == "cublaslt" else (Convolution, data["work"])
        part = Matrix if kind is Product else Image
        made: dict[str, Any] = {k: part(**_tupled(v)) if k in ("x", "w", "y") else _tuples(v) for k, v in work.items()}
        return LibraryCall(data["library"], data["plan"], kind(**made))
    except (ValueError, KeyError, TypeError) as e:
        raise InternalError(
            f"the call of a library cannot be read ({e!r}); compile the model again: {code[:200]!r}"
        ) from None


def _tuples(v: Any) -> Any:
    return tuple(map(_tuples, v)) if isinstance(v, list) else v


def _tupled(d: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _tuples(v) for k, v in d.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Called(Kernel):
    """A kernel that is a library's: the nest says what it computes, `call` what is called."""

    call: LibraryCall | None = None


def call_of(kernel: Kernel) -> LibraryCall | None:
    """The call that a kernel is, if it is one."""
    return kernel.call if isinstance(kernel, Called) else None


def is_library(choice: str) -> bool:
    """Is this schedule, as text, the call of a library?"""
    return choice.partition("(")[0] in VENDORS


def described(call: LibraryCall) -> str:
    """For people: `cuBLASLt, suggestion 3: f16[128, 256] x f16[256, 384] -> f16, bias, relu`."""
    w = call.work
    after = [*(["bias"] if w.bias >= 0 else []), *([w.after] if w.after else [])]
    if isinstance(w, Product):
        times = f"{w.batch} x " if w.batch > 1 else ""
        what = f"{times}{w.types[0]}[{w.m}, {w.k}] x {w.types[0]}[{w.k}, {w.n}] -> {w.types[1]}"
    else:
        sizes = (", ".join(map(str, i.sizes)) for i in (w.x, w.w))
        what = f"convolution of {w.types[0]}[{next(sizes)}] by [{next(sizes)}] -> {w.types[1]}"
    return ", ".join(
        [
            f"{VENDORS[call.library].title}, suggestion {call.plan}: {what}",
            *after,
            *(["TF32"] if w.math == "tf32" else []),
        ]
    )


# --- where it is ------------------------------------------------------------------------------------------------------


def folders() -> list[Path]:
    """Where wheels of NVIDIA put libraries."""
    roots = dict.fromkeys(Path(p or ".") / "nvidia" for p in sys.path)
    return [lib for root in roots if root.is_dir() for lib in sorted(root.glob("*/lib"))]


@cache
def opened(name: str) -> Any:
    """A library by its name in VENDORS. TargetError says what to install."""
    vendor = VENDORS[name]
    tried: list[str] = []
    for file in vendor.files:
        for path in [*(str(f / file) for f in folders() if (f / file).exists()), file]:
            try:
                found = ctypes.CDLL(path)
            except OSError as e:
                tried.append(str(e))
                continue
            getattr(found, vendor.version).restype, getattr(found, vendor.status).restype = (
                ctypes.c_size_t,
                ctypes.c_char_p,
            )
            return found
    raise TargetError(
        f"{vendor.title} is not here ({'; '.join(tried)}): pip install {vendor.wheel}, or {install('libraries')}"
    )


@cache
def version_of(name: str) -> str:
    """Of a library, such as 13.1.0. TargetError where it is missing."""
    number = int(getattr(opened(name), VENDORS[name].version)())
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def installed() -> tuple[str, ...]:
    """The libraries that can be opened here."""
    found = []
    for name in VENDORS:
        try:
            opened(name)
        except TargetError:
            continue
        found.append(name)
    return tuple(found)


def need(kernel: Kernel) -> str:
    """The version of the library that a kernel is a call of, if it is one. TargetError where it is missing."""
    call = call_of(kernel)
    if call is None:
        return ""
    try:
        return version_of(call.library)
    except TargetError as e:
        raise TargetError(
            f"kernel {kernel.name} is a call of {VENDORS[call.library].title}, which a tuning log says is fastest, but "
            f"{e}. "
            "Or compile without this log, or with one of a search without libraries"
        ) from None


class CallFunction:
    """A call that is ready to be made on a device; see the modules of the libraries. `workspace_bytes`: of memory that
    no other call uses meanwhile, whose address is the last argument (of a kernel's: the status).
    """

    workspace_bytes: int

    def start(self, launch: Launch, args: Any, stream: int) -> None:
        """Put the call into a stream, also in capture. `args`: operand addresses, then the workspace."""
        raise InternalError(f"{type(self).__name__} cannot be started")


def workspace_bytes(function: Any) -> int:
    """Of a function that is a library's call; 0 of a kernel."""
    return function.workspace_bytes if isinstance(function, CallFunction) else 0
