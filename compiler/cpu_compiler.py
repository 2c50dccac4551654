"""Programs of one model for a CPU, and their instances."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.instance import CallFrame, CpuInstance
from dnnc.backends.llvm.native import Native
from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.backends.runtime.program import placed
from dnnc.backends.runtime.prologue import Pack
from dnnc.donation import donated
from dnnc.ir.errors import InputError
from dnnc.ir.expr import Var
from dnnc.ir.graph import Graph
from dnnc.options import CompileOptions, thread_count
from dnnc.parameters import Parameters
from dnnc.program_cache import ModelCompiler, OnnxParts
from dnnc.report.log import Log, Progress

if TYPE_CHECKING:
    from dnnc.executable import Executable
    from dnnc.tools.profile import Profile

Array = np.ndarray[Any, Any]


class CpuCompiler(ModelCompiler):
    """See ModelCompiler.

    Attributes:
        shared: one program serves all dims from these lower bounds on (a dim that is not named has its own); None: none
            does.
        threads: of a call.
        packers: compiled parts of prologues, by the text of their graph.
    """

    def __init__(
        self,
        interface: Graph,
        names: tuple[Sequence[str], Sequence[str]],
        options: CompileOptions,
        target: CpuTarget,
        log: Log,
        cache: KernelCache,
        shared: Mapping[str, int] | None,
        *,
        graph: Callable[[], Graph] | None = None,
        progress: Progress | None = None,
        objects: Mapping[str, bytes] | None = None,
        parameters: Parameters | None = None,
        onnx: Callable[[], OnnxParts] | None = None,
    ) -> None:
        """`graph` gives the imported graph where that is not the interface; `objects`: machine code by symbol, out of a
        saved model.
        """
        self.interface, (self.inputs, self.outputs) = interface, names
        self.options, self.target, self.log, self.onnx = options, target, log, onnx
        self.threads = min(thread_count(options.threads), target.threads)
        self.shared, self.parameters = shared, parameters
        self._graph, self.cache, self.progress, self.objects = graph, cache, progress, objects
        self.pairs = donated(interface, names, options.donate)
        self.frames: list[CallFrame] = []
        self.packers: dict[str, Pack] = {}

    @property
    def graph(self) -> Graph:
        return self.interface if self._graph is None else self._graph()

    def serves_all(self, dims: Mapping[Var, int]) -> bool:
        """Does the program for all sizes serve these? Small sizes, at which some value is empty, get programs of their
        own.
        """
        return self.shared is not None and all(n >= self.shared.get(v.name, 0) for v, n in dims.items())

    def sizes(self, dims: Mapping[Var, int]) -> tuple[int, ...]:
        return () if self.serves_all(dims) else super().sizes(dims)

    def compile(self, dims: Mapping[Var, int]) -> Native:
        from dnnc.cpu_build import compile_native  # loads the passes, which a saved model does without

        return compile_native(self, dims)

    def instance(self, program: Native, dims: Mapping[Var, int]) -> CpuInstance:
        by_name = {v.name: n for v, n in dims.items()}
        at_once = placed(self.pairs, program.calls, len(self.inputs))
        return CpuInstance(
            program, {v: by_name[v.name] for v in program.dims}, self.threads, self.frames, self.parameters, at_once
        )

    def refitted(self, instances: Sequence[CpuInstance]) -> None:
        self.frames.clear()  # frames hold what the old arrays were packed into

    def source(self, program: Native, stage: str, kernel: str | None) -> str:
        from dnnc.report.sources import sources_of  # loads the emitter, which a call does without

        return sources_of(program, self.target).text(stage, kernel)

    def profile(self, f: Executable, collect: Callable[[], list[Array]], repeats: int | None) -> Profile:
        from dnnc.tools.profile import profile

        return profile(f, self.target, collect, repeats)

    def save(self, path: Any, programs: Mapping[tuple[int, ...], Native], small: bool, archs: Sequence[str]) -> None:
        from dnnc.artifact.writer import save_programs

        only_for_devices(archs)
        save_programs(path, self, list(programs.items()), self.log.programs, small)


def only_for_devices(archs: Sequence[str]) -> None:
    """InputError where architectures are given for a model that has no code for a device."""
    if archs:
        raise InputError(
            f"{', '.join(archs)}: code for several architectures is kept of models that run wholly on a CUDA device"
        )
