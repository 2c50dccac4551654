"""CUDA C++ -> cubin by NVRTC, which needs no device and no driver.

In: source text and an architecture. Out: the cubin with what the assembler says of registers and spills. CuPy's thin
wrapper is used and not its `RawModule`, which asks for a device. NVRTC releases the interpreter's lock, so
`compile_many` uses threads. Cubins are the same for the same text, options and version.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from dnnc.ir.errors import InternalError, TargetError, count, install

# Only a written fma contracts; denormals and the last bit of divisions and roots are kept, as on the CPU.
OPTIONS = (
    "-std=c++17",
    "-default-device",
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--disable-warnings",
    "--ptxas-options=-v",
)
# Where CuPy looks for NVRTC first. Loading it takes a fifth of a second, which cached code does not need.
WHEELS = (("cupy-cuda13x", "nvidia-cuda-nvrtc"), ("cupy-cuda12x", "nvidia-cuda-nvrtc-cu12"))
PATIENCE = 120.0  # seconds of CPU time that a kernel may take, where NVRTC can be told to end (12.8 and newer)
SHARED = 10  # times that on the clock
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_STACK = re.compile(r"(\d+) bytes stack frame")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Compiled:
    """A cubin, and its kernels' maximum: registers, spill and local bytes per thread, shared bytes."""

    cubin: bytes
    registers: int
    spills: int
    local_bytes: int
    shared_bytes: int
    log: str


_BOUNDS = re.compile(r"__launch_bounds__\((\d+)\)")


def compile_cuda(text: str, arch: str) -> Compiled:
    """Compile a translation unit to a cubin for `sm_90a` and so on.

    The assembler may spill to keep a second block; then the kernel is compiled again with all registers. TargetError:
    NVRTC is not installed, or does not know the architecture. InternalError: the text does not compile, and then the
    error shows the log and the lines that it names; or NVRTC takes longer than PATIENCE.
    """
    made = _compiled(text, arch)
    if made.spills and _BOUNDS.search(text):
        return min(made, _compiled(_BOUNDS.sub(r"__launch_bounds__(\1, 1)", text), arch), key=lambda c: c.spills)
    return made


def _compiled(text: str, arch: str) -> Compiled:
    nvrtc = library()
    program = nvrtc.createProgram(text, "kernel.cu", (), ())
    limit = _limit(program, PATIENCE)
    try:
        try:
            nvrtc.compileProgram(program, (f"-arch={arch}", *OPTIONS))
        except nvrtc.NVRTCError as e:
            if "CANCELLED" in str(e):
                raise InternalError(
                    f"NVRTC takes longer than {PATIENCE:g} s for a kernel of {count(len(text), 'byte')}, for {arch}"
                ) from e
            log = nvrtc.getProgramLog(program)
            if "INVALID_OPTION" in str(e) or "nvrtc: error: invalid value for --gpu-architecture" in log:
                raise TargetError(
                    f"NVRTC {nvrtc_version()} does not compile for {arch}; install a newer one: "
                    f"{install('cuda13', newer=True)}"
                ) from e
            raise InternalError(f"generated CUDA does not compile for {arch}: {e}\n{log}\n{_quoted(text, log)}") from e
        log = nvrtc.getProgramLog(program)
        # CuPy cuts the last byte, as if it ended a string; the last field of an ELF file's last header is zero there
        return Compiled(bytes(nvrtc.getCUBIN(program)) + b"\0", *_usage(log), log)
    finally:
        nvrtc.destroyProgram(program)
        del limit  # NVRTC has called it until here


_Flow = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


@cache
def _set_flow() -> Any:
    """nvrtcSetFlowCallback, which CuPy does not wrap; None where NVRTC has none."""
    try:
        return ctypes.CDLL(
            f"libnvrtc.so.{library().getVersion()[0]}"
        ).nvrtcSetFlowCallback  # CuPy has loaded it: found by its name
    except (OSError, AttributeError):
        return None


def _limit(program: int, seconds: float) -> Any:
    """End the compilation of a program after so many seconds of CPU time, or on the clock after SHARED times as many.

    Returns what must live as long as it runs.
    """
    set_flow = _set_flow()
    if set_flow is None:
        return None
    ends = time.thread_time() + seconds, time.monotonic() + SHARED * seconds
    callback = _Flow(lambda parameter, payload: int(time.thread_time() > ends[0] or time.monotonic() > ends[1]))
    set_flow(ctypes.c_void_p(program), callback, None)
    return callback


def compile_many(
    texts: Mapping[str, tuple[str, str]], threads: int = 2, progress: Callable[[str], None] = lambda name: None
) -> dict[str, Compiled]:
    """Compile (text, architecture) by name, `threads` at a time; `progress` gets done names. Errors as compile_cuda."""
    library()
    out: dict[str, Compiled] = {}
    with ThreadPoolExecutor(max(threads, 1)) as pool:
        waiting = {pool.submit(compile_cuda, text, arch): name for name, (text, arch) in texts.items()}
        try:
            for done in as_completed(waiting):
                out[waiting[done]] = done.result()
                progress(waiting[done])
        except BaseException:
            for w in waiting:
                w.cancel()
            raise
    return {name: out[name] for name in texts}


def nvrtc_version() -> str:
    """Such as 13.0. TargetError where NVRTC is missing."""
    return ".".join(map(str, library().getVersion()))


@cache
def nvrtc_identity() -> str:
    """Identify an NVRTC: the version of CuPy's wheel, else its own answer. TargetError where it is missing."""
    for cupy, nvrtc in WHEELS:
        try:
            version(cupy)
            return version(nvrtc)
        except PackageNotFoundError:
            continue
    return nvrtc_version()


@cache
def library() -> Any:
    """NVRTC as CuPy wraps it. TargetError says what to install."""
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except Exception as e:  # the wrapper raises errors of its own where the library lies nowhere
        raise TargetError(
            f"CUDA kernels are compiled by NVRTC through CuPy, which cannot be loaded ({e}): {install('cuda13')}"
        ) from e
    return nvrtc


def _usage(log: str) -> tuple[int, int, int, int]:
    def most(found: list[Any]) -> int:
        return max((sum(map(int, f)) if isinstance(f, tuple) else int(f) for f in found), default=0)

    return (
        most(_REGISTERS.findall(log)),
        most(_SPILLS.findall(log)),
        most(_STACK.findall(log)),
        most(_SHARED.findall(log)),
    )


def _quoted(text: str, log: str) -> str:
    """The lines that a log names, with two around each."""
    lines = text.splitlines()
    named = {int(n) for n in re.findall(r"kernel\.cu\((\d+)\)", log)}
    near = sorted({k for n in named for k in range(n - 2, n + 3) if 1 <= k <= len(lines)})
    return "\n".join(f"{k:4} | {lines[k - 1]}" for k in near or range(1, len(lines) + 1))
