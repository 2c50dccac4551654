"""The texts of a device program: graph, operator IR, CUDA C++, PTX. Each is made when asked for; CUDA C++ follows from
the operator IR.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dnnc.backends.cuda.library import is_library
from dnnc.backends.runtime.program import NativeKernel
from dnnc.ir.errors import InputError
from dnnc.ir.loops.text import parse_kernel
from dnnc.report.sources import find_kernels, kernel_header

if TYPE_CHECKING:
    from dnnc.backends.cuda.native import CudaNative
    from dnnc.backends.cuda.target import GpuTarget

STAGES = ("graph", "operator", "cuda", "ptx")
COMMENT = {"graph": "#", "operator": "#", "cuda": "//", "ptx": "//"}


@dataclass(frozen=True)
class DeviceSources:
    """What the texts are made of; as `dnnc.report.sources.Sources`."""

    kernels: tuple[NativeKernel, ...]
    graph_text: Callable[[bool], str]
    target: GpuTarget
    naive: Mapping[str, str] | None = None

    def find(self, wanted: str | None) -> list[tuple[int, NativeKernel]]:
        """The kernels that a number, a kernel's name, a node's name or the beginning of a symbol means; all for None.
        InputError lists them.
        """
        return find_kernels(self.kernels, wanted)

    def kernel_text(self, k: NativeKernel, stage: str) -> str:
        """One kernel as operator IR, CUDA C++ or PTX; a loop or branch in words."""
        if k.control:
            return k.text
        if stage == "operator":
            return k.text if self.naive is None else self.naive[k.symbol]
        if is_library(k.choice):
            return f"// no code of ours: schedule {k.choice} calls a library, which the report names\n"
        from dnnc.backends.cuda.emit import emit_kernel

        text = emit_kernel(parse_kernel(k.text), k.symbol, self.target)
        if stage == "cuda":
            return text
        return ptx_text(text, self.target.arch)

    def text(self, stage: str, kernel: str | None = None, locs: bool = False) -> str:
        """The text of a stage, one of STAGES; of one kernel or all; `locs`: node names as comments in the graph.
        InputError where there is none.
        """
        if not isinstance(stage, str) or stage not in STAGES:
            raise InputError(f"there is no stage {stage!r} for this target; there are {', '.join(STAGES)}")
        if stage == "graph":
            return self.graph_text(locs)
        before = self.naive is not None and stage == "operator"
        return "\n".join(
            kernel_header(n, k, COMMENT[stage], before) + self.kernel_text(k, stage) for n, k in self.find(kernel)
        )


def sources_of(native: CudaNative, target: GpuTarget) -> DeviceSources:
    """The texts of a program."""
    return DeviceSources(native.kernels, native.graph_text, target)


def ptx_text(text: str, arch: str) -> str:
    """CUDA C++ as PTX. TargetError where NVRTC is missing."""
    from dnnc.backends.cuda.nvrtc import OPTIONS, compile_cuda, library

    compile_cuda(text, arch)  # an error is told with the lines that it names
    nvrtc = library()
    program = nvrtc.createProgram(text, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, (f"-arch={arch}", *OPTIONS))
        return bytes(nvrtc.getPTX(program)).rstrip(b"\0").decode()
    finally:
        nvrtc.destroyProgram(program)
