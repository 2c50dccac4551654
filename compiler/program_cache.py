"""A model's programs and instances by shapes: compiled at first use, least recently used ones dropped."""

from __future__ import annotations

import gc
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dnnc.backends.base import Instance
from dnnc.ir.errors import InputError, UnsupportedError
from dnnc.ir.expr import Var
from dnnc.ir.graph import Graph
from dnnc.ir.shapes import bind_dims
from dnnc.memory import check_fits
from dnnc.options import CompileOptions
from dnnc.report import Report
from dnnc.report.log import Log
from dnnc.signature import Signature

if TYPE_CHECKING:
    from dnnc.device_calls import DeviceCalls
    from dnnc.donation import Donation
    from dnnc.executable import Executable
    from dnnc.import_cache import ImportCache
    from dnnc.tools.profile import Profile

Array = np.ndarray[Any, Any]
Shapes = tuple[tuple[int, ...], ...]
OnnxParts = tuple[bytes, Sequence[Array]]
MAX_PROGRAMS = 16  # programs kept for different shapes of one model
MAX_INSTANCES = 512  # instances kept of one model, some kilobytes each


class ModelCompiler(ABC):
    """Compiles the programs of one model for one target."""

    # has the model's name, inputs and outputs. It is the imported graph, or of a loaded model a graph without nodes.
    interface: Graph
    inputs: Sequence[str]  # what users call the inputs
    outputs: Sequence[str]  # what users call the outputs
    options: CompileOptions  # how to compile
    log: Log  # what compilations have noted
    # gives the ONNX model that was read, as a protobuf and the bytes of its large tensors; None where it is not needed
    # any more
    onnx: Callable[[], OnnxParts] | None
    target: Any  # facts of the machine that programs are for
    imports: ImportCache | None = None  # of a model that is read for the inputs of a call, its variants

    @property
    @abstractmethod
    def graph(self) -> Graph:
        """The imported graph before any pass, with the dims that were fixed and the outputs that were added."""

    @abstractmethod
    def compile(self, dims: Mapping[Var, int]) -> Any:
        """A program for these dims, and for all others with the same `sizes`."""

    @abstractmethod
    def instance(self, program: Any, dims: Mapping[Var, int]) -> Instance:
        """A program at these dims."""

    def sizes(self, dims: Mapping[Var, int]) -> tuple[int, ...]:
        """Which program serves these dims; () is the one for all."""
        return tuple(dims[v] for v in sorted(dims, key=lambda v: v.name))

    def report(self, signature: Signature, programs: Sequence[Any]) -> Report:
        """What the compilation of these programs did."""
        return self.log.report(signature)

    @abstractmethod
    def source(self, program: Any, stage: str, kernel: str | None) -> str:
        """The text of a program at a stage; of one kernel by number, name or symbol. InputError names what there is."""

    def profile(self, f: Executable, collect: Callable[[], list[Array]], repeats: int | None) -> Profile:
        """Profile a call; `collect` gives its arrays. UnsupportedError: nothing is compiled for this target."""
        raise UnsupportedError(f"a profile is of compiled code; the target {self.options.target} has none")

    def prepare(self, instance: Any, shapes: Shapes) -> None:  # noqa: B027
        """Compile what an instance would compile when it is called first."""

    def refitted(self, instances: Sequence[Any]) -> None:  # noqa: B027
        """Parameters hold other arrays from now on."""

    def device_calls(self, signature: Signature, donation: Donation | None, cache: ProgramCache) -> DeviceCalls | Any:
        """What runs calls on arrays of a device; None where there is no device."""
        return None

    def compile_again(self, graph: Graph, options: CompileOptions) -> Executable:
        """Another graph with the same inputs and outputs, compiled."""
        raise UnsupportedError(f"models for {self.options.target} have no parameters")

    def sources(self, program: Any) -> Any:
        """The texts of a program; see `dnnc.backends.runtime.sources.Sources`."""
        raise UnsupportedError(f"the target {self.options.target} has no texts of kernels")

    @abstractmethod
    def save(self, path: Any, programs: Mapping[tuple[int, ...], Any], small: bool, archs: Sequence[str]) -> None:
        """Write the model and its programs, by the sizes that they serve, to a file."""


def only_for_devices(archs: Sequence[str]) -> None:
    """InputError where architectures are given for a model that has no code for a device."""
    if archs:
        raise InputError(
            f"{', '.join(archs)}: code for several architectures is kept of models that run wholly on a CUDA device"
        )


class ProgramCache:
    """`instance(shapes)` is what runs a call on inputs of these shapes. Calls may come from several threads at once.

    Attributes:
        programs: by `ModelCompiler.sizes`, the last MAX_PROGRAMS.
        instances: by shapes, the last MAX_INSTANCES.
        when_empty: compiles the model for shapes with a symbolic size of 0, for which programs of other sizes are not
            right.
    """

    def __init__(self, compiler: ModelCompiler) -> None:
        self.compiler = compiler
        self.programs: OrderedDict[tuple[int, ...], Any] = OrderedDict()
        self.instances: OrderedDict[Shapes, Instance] = OrderedDict()
        self.when_empty: Callable[[Sequence[tuple[int, ...]]], Executable] | None = None
        self.lock = threading.RLock()

    def instance(self, shapes: Shapes) -> Instance:
        instance = self.instances.get(shapes)
        if instance is None:
            return self._new(shapes)
        instance.used = True
        return instance

    def _new(self, shapes: Shapes) -> Instance:
        with self.lock:
            if shapes in self.instances:
                return self.instances[shapes]
            if self.when_empty is not None and any(0 in s for s in shapes):
                instance = self.when_empty(shapes).cache.instance(shapes)
            else:
                dims = bind_dims(self.compiler.interface, shapes)
                program = self.program(dims)
                instance = self.compiler.instance(program, dims)
            if instance.outputs is not None:
                check_fits(
                    [(f"output {k}", s, d) for k, (s, d) in enumerate(instance.outputs)],
                    getattr(instance, "arena_bytes", 0),
                )
            while len(self.instances) >= MAX_INSTANCES:
                self._drop_instance()
            self.instances[shapes] = instance
            return instance

    def program(self, dims: Mapping[Var, int]) -> Any:
        """The program that serves these dims, compiled if there is none."""
        sizes = self.compiler.sizes(dims)
        program = self.programs.get(sizes)
        if program is None:
            program = self.programs[sizes] = self.compiler.compile(dims)
            if len(self.programs) > MAX_PROGRAMS:
                self._drop_program()
            if dims and not sizes and gc.isenabled():
                gc.collect(1)  # later calls of a program for all sizes shall not pay for what the compiler leaves
        return program

    def _drop_instance(self) -> None:
        """Forget the oldest instance that was not used again since this last came to it."""
        while True:
            shapes, instance = next(iter(self.instances.items()))
            if not instance.used:
                del self.instances[shapes]
                return
            instance.used = False
            self.instances.move_to_end(shapes)

    def _drop_program(self) -> None:
        """Drop the oldest program unused since the last drop, and its instances; the newest one stays."""
        *old, _ = self.programs
        recent = {id(i.program) for i in self.instances.values() if i.used}
        dropped = self.programs.pop(next((s for s in old if id(self.programs[s]) not in recent), old[0]))
        for i in self.instances.values():
            i.used = False
        for shapes in [s for s, i in self.instances.items() if i.program is dropped]:
            del self.instances[shapes]
