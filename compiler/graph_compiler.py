"""Programs of one graph for one backend: passes, schedules, machine code, checks, in this order for every backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dnnc.backends.base import Backend, BuildJob, Instance
from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.backends.runtime.program import Program, written_in_place
from dnnc.backends.runtime.sources import Sources
from dnnc.device_calls import DeviceCalls
from dnnc.donation import Donation, donated
from dnnc.ir.expr import Var
from dnnc.ir.graph import Graph
from dnnc.options import CompileOptions
from dnnc.parameters import Parameters
from dnnc.program_cache import ModelCompiler, OnnxParts, ProgramCache
from dnnc.report import Report
from dnnc.report.log import Log, Progress
from dnnc.signature import Signature

if TYPE_CHECKING:
    from dnnc.backends.runtime.prologue import Pack
    from dnnc.executable import Executable
    from dnnc.tools.profile import Profile

Array = np.ndarray[Any, Any]


CompileGraph = Callable[[Graph, "tuple[list[str], list[str]]", CompileOptions], "Executable"]


@dataclass(frozen=True)
class SavedCode:
    """Machine code out of a saved model: by symbol, and the symbols of kernels that a device has checked."""

    code: Mapping[str, bytes] = field(default_factory=dict)
    checked: frozenset[str] = frozenset()


class GraphCompiler(ModelCompiler):
    """See ModelCompiler.

    Attributes:
        backend: what programs are for.
        shared: one program serves all dims from these lower bounds on (a dim that is not named has its own); None: each
            size has its own program.
        cache: of machine code.
        progress: told (stage, done, of).
        saved: machine code out of a saved model.
        parameters: what those of the graph hold.
        runner: runs the programs.
        packers: compiled parts of prologues, by the text of their graph.
    """

    def __init__(
        self,
        interface: Graph,
        names: tuple[Sequence[str], Sequence[str]],
        options: CompileOptions,
        backend: Backend,
        log: Log,
        cache: KernelCache,
        *,
        shared: Mapping[str, int] | None = None,
        graph: Callable[[], Graph] | None = None,
        progress: Progress | None = None,
        saved: SavedCode | None = None,
        parameters: Parameters | None = None,
        onnx: Callable[[], OnnxParts] | None = None,
        again: CompileGraph | None = None,
    ) -> None:
        """`graph` gives the imported graph where that is not the interface."""
        self.interface, (self.inputs, self.outputs) = interface, names
        self.options, self.backend, self.log, self.onnx = options, backend, log, onnx
        self.shared = shared if backend.any_sizes else None
        self.cache, self.progress, self.saved, self.parameters = cache, progress, saved or SavedCode(), parameters
        self._graph, self._again = graph, again
        self.pairs = donated(interface, names, options.donate)
        self.runner = backend.runner(parameters)
        self.packers: dict[str, Pack] = {}

    @property
    def graph(self) -> Graph:
        return self.interface if self._graph is None else self._graph()

    @property
    def target(self) -> Any:
        return self.backend.target

    def serves_all(self, dims: Mapping[Var, int]) -> bool:
        """True if the program for all sizes serves these. Sizes at which some value is empty get their own program."""
        return self.shared is not None and all(n >= self.shared.get(v.name, 0) for v, n in dims.items())

    def sizes(self, dims: Mapping[Var, int]) -> tuple[int, ...]:
        return () if self.serves_all(dims) or not self.backend.compiles else super().sizes(dims)

    def compile(self, dims: Mapping[Var, int]) -> Any:
        if not self.backend.compiles:
            return self.backend.interpret(self.graph, self.options.precision, self.outputs)
        from dnnc.compile_program import compile_program  # loads the passes, which a saved model does without

        return compile_program(self, dims)

    def instance(self, program: Any, dims: Mapping[Var, int]) -> Instance:
        in_place = frozenset[int]()
        if isinstance(program, Program):
            in_place = written_in_place(self.pairs, program.calls, len(self.inputs))
        return self.runner.instance(program, dims, in_place)

    def compile_again(self, graph: Graph, options: CompileOptions) -> Executable:
        assert self._again is not None
        return self._again(graph, (list(self.inputs), list(self.outputs)), options)

    def refitted(self, instances: Sequence[Any]) -> None:
        self.runner.refitted(instances)

    def job(self, progress: Progress | None) -> BuildJob:
        """How programs of this model are built."""
        return BuildJob(
            self.cache,
            check=bool(self.options.verify),
            progress=progress,
            code=self.saved.code,
            checked=self.saved.checked,
            flush=self.options.numerics == "fast",
        )

    def device_calls(self, signature: Signature, donation: Donation | None, cache: ProgramCache) -> DeviceCalls | None:
        device = self.backend.device
        return None if device is None else DeviceCalls(device, signature, donation, cache)

    def report(self, signature: Signature, programs: Sequence[Any]) -> Report:
        """Says too how many kernels no device has checked."""
        report = self.log.report(signature)
        fresh = sum(len(p.checks) for p in programs if isinstance(p, Program))
        note = f"{fresh} kernels unverified: each is checked when a device first loads it"
        return replace(report, notes=(*report.notes, note)) if fresh else report

    def sources(self, program: Any) -> Sources:
        """The texts of a program."""
        return Sources(program, self.backend)

    def source(self, program: Any, stage: str, kernel: str | None) -> str:
        return self.sources(program).text(stage, kernel)

    def profile(self, f: Executable, collect: Callable[[], list[Array]], repeats: int | None) -> Profile:
        from dnnc.tools.profile import profile  # loads what measures, which a call does without

        return profile(f, self.backend, collect, repeats)

    def elsewhere(self, arch: str) -> GraphCompiler:
        """The same model for another architecture of the target."""
        backend = self.backend.elsewhere(arch)
        options = replace(self.options, target=backend.text, dims={})
        log = Log(self.graph.name, backend.text, 1)
        names = self.inputs, self.outputs
        return GraphCompiler(
            self.graph, names, options, backend, log, self.cache, progress=self.progress, parameters=self.parameters
        )

    def save(self, path: Any, programs: Mapping[tuple[int, ...], Any], small: bool, archs: Sequence[str]) -> None:
        from dnnc.artifact.writer import save_model  # loads what writes, which a call does without

        save_model(path, self, programs, small, archs)
