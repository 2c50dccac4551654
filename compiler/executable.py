"""A compiled model as a callable: arrays in, arrays out, one native call between."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.native import Native, shape_of
from dnnc.backends.places import placed
from dnnc.backends.results import maker
from dnnc.backends.runtime import FRAME_BOUND, FRAME_CONSTANTS, FRAME_OFFSETS, Frame, address_of, runtime
from dnnc.compiled import CompiledModel
from dnnc.donation import Donation, donated
from dnnc.ir.errors import InputError
from dnnc.ir.expr import Expr, Var, const
from dnnc.ir.graph import Graph
from dnnc.ir.shapes import bind_dims
from dnnc.memory import check_fits
from dnnc.options import CompileOptions
from dnnc.origin import Origin
from dnnc.parameters import Parameters, Table, frozen
from dnnc.report import Report
from dnnc.report.log import Log
from dnnc.signature import Signature, TensorSpec, described, shapes_of

if TYPE_CHECKING:
    from dnnc.profile import Profile

Array = np.ndarray[Any, Any]
MAX_SPECIALISATIONS = 16  # programs kept for different shapes of one model
MAX_PLANS = 512  # memory plans kept of one symbolic program, some kilobytes each


class Held:
    """The memory of one call: a frame, and the addresses of its buffers. Calls of all shapes use it in turns. `table`: of the parameters that
    it reads, which stay alive as long."""

    __slots__ = ("address", "frame", "owner", "pointers", "table")

    def __init__(self, frame: Frame, buffers: int, owner: Bound) -> None:
        self.frame, self.owner = frame, owner
        self.pointers: Any = (ctypes.c_void_p * buffers)()
        self.address: int = ctypes.addressof(self.pointers)
        self.table: Table | None = None


class Bound:
    """A native program at fixed dims: what a call needs without looking anything up.

    `free` is shared by the shapes of an executable: as many frames as calls ran at once, each as large as its largest call needed.
    """

    __slots__ = (
        "arena_bytes",
        "at_once",
        "dims",
        "dims_address",
        "empty",
        "entry",
        "free",
        "fresh",
        "native",
        "nthreads",
        "offsets",
        "outputs",
        "parameters",
        "used",
    )

    def __init__(self, native: Native, dims: Mapping[Var, int], nthreads: int, free: list[Held], parameters: Parameters | None = None) -> None:
        env: dict[Expr, Expr] = {v: const(n) for v, n in dims.items()}
        self.native, self.entry = native, native.entry
        self.nthreads = nthreads if native.parallel else 1
        self.outputs = [(shape_of(t, env), t.dtype.numpy) for t in native.outputs]
        self.fresh = maker(self.outputs)
        self.empty = all(0 in s for s, _ in self.outputs)
        self.dims = np.array([dims[v] for v in native.dims], np.int64)
        self.dims_address: int = self.dims.ctypes.data
        offsets, self.arena_bytes = native.sizes(dims)
        self.offsets = np.array(offsets, np.int64)
        check_fits([(f"output {k}", s, d) for k, (s, d) in enumerate(self.outputs)], self.arena_bytes)
        self.free = free
        self.parameters = parameters if native.prologue is not None else None
        self.at_once: frozenset[int] = frozenset()  # outputs that kernels write to the memory of donated inputs
        self.used = False  # again, since it was last looked at whether to drop it

    def take(self, buffers: int) -> Held:
        """A frame that no other call uses, with this plan."""
        try:
            held = self.free.pop()
        except IndexError:
            held = None
        if held is None or held.frame.arena.nbytes < self.arena_bytes:
            held = self._own(Held(Frame(self.arena_bytes), buffers, self))
        elif held.owner is not self:
            self._own(held)
        if self.parameters is not None:
            table = self.parameters.table(self.native)
            if held.table is not table:
                held.table = table
                held.frame.slots[FRAME_BOUND] = table.address
        return held

    def _own(self, held: Held) -> Held:
        """Give a frame this plan."""
        held.owner = self
        held.frame.slots[FRAME_OFFSETS] = self.offsets.ctypes.data
        held.frame.slots[FRAME_CONSTANTS] = self.native.constants.ctypes.data
        return held


class Executable(CompiledModel):
    """A compiled model: `y = f(x)`, `f(name=x)` or `f({"input.1": x})`; one output is an array, several are a tuple.

    Inputs are NumPy arrays of the exact dtypes (lists and Python scalars convert); results are fresh arrays. Calls may come from several
    threads at once. A model with symbolic dims is specialised to each shape it meets, the last MAX_SPECIALISATIONS of them kept.
    """

    def __init__(self, origin: Origin, nthreads: int, log: Log, parameters: Parameters | None = None) -> None:
        self._origin, self._nthreads, self._log, self._parameters = origin, nthreads, log, parameters
        self._signature = Signature(origin.interface, origin.inputs, origin.outputs)
        self._collect = self._signature.collect
        pairs = donated(origin.interface, (origin.inputs, origin.outputs), origin.options.donate)
        self._donation = Donation(pairs, list(origin.inputs)) if pairs else None
        self._bound: OrderedDict[tuple[tuple[int, ...], ...], Bound] = OrderedDict()
        self._natives: OrderedDict[tuple[int, ...], Native] = OrderedDict()
        self._free: list[Held] = []
        self._when_empty: Callable[[Sequence[tuple[int, ...]]], Any] | None = None
        self._lock = threading.RLock()
        self._launch = runtime().launch

    # --- what it is -----------------------------------------------------------------------------------------------------------

    @property
    def options(self) -> CompileOptions:
        """How it was compiled."""
        return self._origin.options

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self._signature.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self._signature.outputs

    @property
    def parameters(self) -> tuple[TensorSpec, ...]:
        """The arrays that it was compiled with `parameters=` for; see `refit`."""
        return self._parameters.specs if self._parameters is not None else ()

    def refit(self, changed: Mapping[str, Any] | None = None) -> None:
        """Use other arrays for parameters from now on, or see what their owner wrote into them. Nothing is compiled.

        Args:
            changed: arrays by name, of the same shapes and dtypes, which are shared where they are contiguous. All parameters are packed anew,
                also those that are not named.

        Raises:
            InputError: there is no such parameter, or an array does not fit; then everything is as it was.
        """
        if self._parameters is None:
            raise InputError("refit: the model has no parameters; compile it with parameters=")
        self._parameters.refit(changed or {})
        self._free.clear()  # they hold what the old arrays were packed into

    @property
    def natives(self) -> list[Native]:
        """The programs compiled so far."""
        with self._lock:
            return list(self._natives.values())

    @property
    def graph(self) -> Graph:
        """The imported graph before any pass, with the dims that were fixed."""
        return self._origin.graph()

    @property
    def target(self) -> CpuTarget:
        """The CPU that its code is for."""
        return self._origin.target

    @property
    def report(self) -> Report:
        """What the compilation did: passes, kernels, memory, time; print it."""
        return self._log.report(self._signature)

    def source(self, stage: str, kernel: str | None = None) -> str:
        """The text of the last program: "graph", "operator", "llvm" or "asm"; of one kernel by number, name or symbol.

        InputError names what there is, or the dims that are still open: a symbolic model has no program before its first call.
        """
        natives = self.natives
        if not natives:
            raise InputError(f"no program is compiled yet: call the model first, or give dims={{...}} for {', '.join(self._origin.interface.dims)}")
        from dnnc.report.sources import sources_of  # loads the emitter, which a call does without

        return sources_of(natives[-1], self._origin.target).text(stage, kernel)

    # --- calls ----------------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run the model. InputError names the input, what was expected and what was given."""
        arrays = self._collect(args, named)
        bound = self._bind(arrays)
        results = [bound.fresh(s, d) for s, d in bound.outputs]
        if self._donation is None:
            self._execute(bound, arrays, results)
        else:
            results = self._execute_donated(bound, arrays, results)
        return results[0] if len(results) == 1 else tuple(results)

    def run(self, inputs: Any, outputs: Sequence[Array] | None = None) -> Any:
        """Run into given buffers (contiguous, of the right shape and dtype, not overlapping the inputs); without them as a call.

        The buffer of an output that takes the memory of a donated input may be that input.
        """
        arrays = self._collect(self._signature.arguments(inputs), {})
        bound = self._bind(arrays)
        results = [bound.fresh(s, d) for s, d in bound.outputs] if outputs is None else self._signature.buffers(outputs)
        if outputs is not None:
            self._signature.check_outputs(bound.outputs, [*arrays, *self._weights], results, self._pairs)
        if self._donation is None:
            self._execute(bound, arrays, results)
        else:
            results = self._execute_donated(bound, arrays, results, outputs is not None)
        return results[0] if len(results) == 1 else tuple(results)

    @property
    def _weights(self) -> Sequence[Array]:
        """What parameters hold: memory of others that kernels may read as it is."""
        return () if self._parameters is None else self._parameters.on_host

    @property
    def _pairs(self) -> Mapping[int, int]:
        return {} if self._donation is None else self._donation.pairs

    def _execute_donated(self, bound: Bound, arrays: Sequence[Array], results: list[Array], given: bool = False) -> list[Array]:
        """A call whose results take the memory of inputs. `given`: the caller wants them in these buffers too."""
        assert self._donation is not None
        self._donation.check(arrays, self._weights)
        own = results
        if given:  # what is copied in the end must not go through the buffer of an input
            own = [np.empty_like(r) if k in self._pairs and k not in bound.at_once else r for k, r in enumerate(results)]
        buffers = self._donation.place(bound.at_once, arrays, own)
        self._execute(bound, arrays, buffers)
        return self._donation.finish(buffers, arrays, results if given else None)

    def bind(self, inputs: Any, outputs: Sequence[Array]) -> Callable[[], None]:
        """A function that runs on these very buffers each time it is called, copying nothing. It keeps the buffers alive."""
        arrays = self._collect(self._signature.arguments(inputs), {})
        given = self._signature.in_order(self._signature.arguments(inputs), {})
        for a, b, name in zip(arrays, given, self._signature.input_names):
            if a is not b:
                raise InputError(f"input {name}: bind needs a contiguous array that it can keep; got {described(b)}")
        bound = self._bind(arrays)
        results = self._signature.buffers(outputs)
        self._signature.check_outputs(bound.outputs, [*arrays, *self._weights], results, self._pairs)
        if self._donation is None:
            return lambda: self._execute(bound, arrays, results)

        def call() -> None:
            self._execute_donated(bound, arrays, results, True)

        return call

    def profile(self, *args: Any, repeats: int | None = None, **named: Any) -> Profile:
        """Where the time of a call on these inputs goes, kernel by kernel; print it. `repeats`: calls to measure, about a second's by default."""
        from dnnc.profile import profile

        return profile(self, self._origin.target, args, named, repeats)

    def _execute(self, bound: Bound, arrays: Sequence[Array], results: Sequence[Array]) -> None:
        if bound.empty:
            return
        held = bound.take(len(arrays) + len(results))
        pointers = held.pointers
        k = 0
        for a in arrays:
            pointers[k] = address_of(a)
            k += 1
        for a in results:
            pointers[k] = address_of(a)
            k += 1
        status = self._launch(bound.entry, held.frame.address, held.address, bound.dims_address, bound.nthreads)
        if status:
            self._fail(bound, held.frame)
        bound.free.append(held)

    def _fail(self, bound: Bound, frame: Frame) -> None:
        code = frame.status[0]
        frame.forget()
        where = "; ".join([f"{k.name}{k.where}" for k in bound.native.kernels if k.guarded][:3])
        raise InputError(f"an index read at run time lies outside of its axis (status {code}), in {where}: check the values of integer inputs")

    # --- buffers and programs -----------------------------------------------------------------------------------------------

    def _bind(self, arrays: Sequence[Array]) -> Bound:
        key = tuple([a.shape for a in arrays])
        bound = self._bound.get(key)
        if bound is None:
            return self._bind_new(key, arrays)
        bound.used = True
        return bound

    def when_empty(self, compile_for: Callable[[Sequence[tuple[int, ...]]], Any]) -> None:
        """`compile_for(shapes)` makes the executable that takes calls with an empty input of symbolic size."""
        self._when_empty = compile_for

    def _bind_new(self, key: tuple[tuple[int, ...], ...], arrays: Sequence[Array]) -> Bound:
        with self._lock:
            if self._when_empty is not None and any(0 in s for s in key):
                bound: Bound = self._when_empty(key)._bind(arrays)
            else:
                dims = bind_dims(self._origin.interface, [a.shape for a in arrays])
                native = self._native(dims)
                by_name = {v.name: n for v, n in dims.items()}
                bound = Bound(native, {v: by_name[v.name] for v in native.dims}, self._nthreads, self._free, self._parameters)
                bound.at_once = placed(self._pairs, native.calls, len(arrays))
            while len(self._bound) >= MAX_PLANS:
                self._drop_plan()
            self._bound[key] = bound
            return bound

    def _native(self, dims: Mapping[Var, int]) -> Native:
        """The program that serves these dims, compiled if there is none."""
        sizes = self._sizes(dims)
        native = self._natives.get(sizes)
        if native is None:
            native = self._natives[sizes] = self._origin.specialise(dims)
            if len(self._natives) > MAX_SPECIALISATIONS:
                self._drop_program()
            if dims and not sizes and gc.isenabled():  # one program for all sizes, whose later calls shall not pay for this
                gc.collect()  # what the compiler leaves behind: 40 ms for a model of twelve attention layers
        return native

    def _drop_plan(self) -> None:
        """Forget the oldest plan that was not used again since it was last looked at here."""
        while True:
            key, bound = next(iter(self._bound.items()))
            if not bound.used:
                del self._bound[key]
                return
            bound.used = False
            self._bound.move_to_end(key)

    def _drop_program(self) -> None:
        """Forget the oldest program that was not used again since one was last dropped, with its plans; the newest one stays."""
        *old, _ = self._natives
        recent = {id(b.native) for b in self._bound.values() if b.used}
        dropped = self._natives.pop(next((s for s in old if id(self._natives[s]) not in recent), old[0]))
        for b in self._bound.values():
            b.used = False
        for key in [k for k, b in self._bound.items() if b.native is dropped]:
            del self._bound[key]

    def prepare(self, shapes: Sequence[tuple[int, ...]]) -> Native:
        """Compile for input shapes ahead of the first call."""
        inputs = self._origin.interface.inputs
        shapes = shapes_of(shapes, self._signature.input_names)
        check_fits([(f"input {n}", s, v.type.dtype.numpy) for n, s, v in zip(self._signature.input_names, shapes, inputs)])
        return self._bind([np.empty(s, v.type.dtype.numpy) for s, v in zip(shapes, inputs)]).native

    def _sizes(self, dims: Mapping[Var, int]) -> tuple[int, ...]:
        """Which program serves these dims; () is the one for all."""
        return () if self._origin.serves_all(dims) else tuple(dims[v] for v in sorted(dims, key=lambda v: v.name))

    # --- files ------------------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str] | BinaryIO, small: bool = False) -> None:
        """Write the compiled model to a file that `dnnc.load` reads: what was compiled so far, and the model to compile the rest.

        Args:
            path: the file; it is replaced at once, so that no reader sees half of it. Or an open binary file. Parameters are constants in it.
            small: leave out weights in the order that kernels read them. Loading then takes as long as the passes do.

        Raises:
            ArtifactError: the file cannot be written.
        """
        from dnnc.artifacts import save_executable

        if self._parameters is not None:
            self._without_parameters().save(path, small)
            return
        with self._lock:
            programs = list(self._natives.items())
        save_executable(path, self._origin, programs, self._log.programs, small)

    def frozen(self) -> Graph:
        """The imported graph with what its parameters are now as constants."""
        return self.graph if self._parameters is None else frozen(self.graph, self._parameters.held)

    def _without_parameters(self) -> Executable:
        """The model with what its parameters are now as constants, compiled anew."""
        from dnnc.driver import compile_graph

        g, names = self.frozen(), (list(self._origin.inputs), list(self._origin.outputs))
        options = self._origin.options  # sizes that were fixed and outputs that were added are in the graph
        f: Any = compile_graph(g, names, replace(options, dims={n: d for n, d in options.dims.items() if n in g.dims}, outputs=()))
        assert isinstance(f, Executable)
        return f

    def adopt(self, programs: Iterable[tuple[tuple[int, ...], Native]]) -> None:
        """Take programs that were compiled elsewhere, by the sizes that they serve in the order of the dims' names; () serves all."""
        with self._lock:
            self._natives.update(programs)
