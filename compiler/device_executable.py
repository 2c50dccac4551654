"""A model compiled for a device as a callable: NumPy arrays in and out through pinned memory, or arrays on the device with no copy to the host.

Every shape that comes has a program of its own. A call takes a frame (arena, slots, recorded graph) that no other call uses; there are at
most MAX_FRAMES of each program, so calls beyond wait.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from dnnc.backends.cuda.arrays import Defer, Kind, device_array, is_device_array, kind_of, output_array, to_host
from dnnc.backends.cuda.emit import kernel_number
from dnnc.backends.cuda.graph import Frame, LoadedProgram
from dnnc.backends.cuda.native import PARAMETER_ALIGN, CudaNative, Device, DeviceArray
from dnnc.compiled import CompiledModel
from dnnc.donation import Donation, donated
from dnnc.ir.errors import ArtifactError, InputError
from dnnc.ir.expr import Var
from dnnc.ir.graph import Graph
from dnnc.ir.shapes import bind_dims
from dnnc.ir.types import TensorType
from dnnc.memory import check_fits
from dnnc.options import CompileOptions
from dnnc.origin import OnnxParts
from dnnc.parameters import Parameters, frozen
from dnnc.report import Report
from dnnc.report.log import Log
from dnnc.signature import Signature, TensorSpec, described

if TYPE_CHECKING:
    from dnnc.backends.cuda.target import GpuTarget
    from dnnc.profile import Profile

Array = np.ndarray[Any, Any]
MAX_SPECIALISATIONS = 16  # programs kept for different shapes of one model
MAX_FRAMES = 4  # of a program: calls that run at the same time


@dataclass(frozen=True)
class DeviceOrigin:
    """What a device executable is made from; see Origin. `device` opens the device: TargetError where there is none. `elsewhere` makes the
    same model for another architecture."""

    interface: Graph
    inputs: Sequence[str]
    outputs: Sequence[str]
    graph: Callable[[], Graph]
    specialise: Callable[[Mapping[Var, int]], CudaNative]
    options: CompileOptions
    target: GpuTarget
    device: Callable[[], Device]
    present: bool
    elsewhere: Callable[[str], DeviceExecutable]
    onnx: Callable[[], OnnxParts] | None = None


class Bound:
    """A program of fixed sizes with its frames. It is loaded on the device when first asked for."""

    def __init__(self, native: CudaNative, device: Callable[[], Device], others: weakref.WeakMethod[Any]) -> None:
        self.native, self._device, self._others = native, device, others
        self.outputs = [(_shape(t), t.dtype.numpy) for t in native.outputs]
        self.empty = all(0 in s for s, _ in self.outputs)
        self._loaded: LoadedProgram | None = None
        self._free: list[Frame] = []
        self._made = 0
        self._turn = threading.Condition()
        self._lock = threading.Lock()

    def loaded(self) -> LoadedProgram:
        """The program on the device, its kernels checked. TargetError where there is no device, AccuracyError where a kernel is wrong."""
        with self._lock:
            if self._loaded is None:
                others = self._others()
                self._loaded = LoadedProgram(self.native, self._device(), others() if others is not None else ())
            return self._loaded

    def reload(self) -> LoadedProgram | None:
        """Load the program anew at the next call, as its constants are others; gives the one that was loaded."""
        with self._lock, self._turn:
            before, self._loaded = self._loaded, None
            self._made -= len(self._free)
            self._free.clear()
            return before

    @property
    def ready(self) -> LoadedProgram | None:
        """The program, if it is loaded."""
        return self._loaded

    @contextmanager
    def frame(self) -> Iterator[Frame]:
        """A frame that no other call uses, as soon as there is one."""
        loaded = self._loaded or self.loaded()
        with self._turn:
            while not self._free and self._made >= MAX_FRAMES:
                self._turn.wait()
            held = self._free.pop() if self._free else None
            self._made += held is None
        try:
            held = held or Frame(loaded)
            yield held
        finally:
            with self._turn:
                if held is None or held.loaded is not self._loaded:  # it failed, or has weights of before a refit
                    self._made -= 1
                else:
                    self._free.append(held)
                self._turn.notify()


def _shape(t: TensorType) -> tuple[int, ...]:
    return tuple(int(str(d)) for d in t.shape)


class DeviceExecutable(CompiledModel):
    """A model on a CUDA device: `y = f(x)`, `f(name=x)` or `f({"input.1": x})`; one output is an array, several are a tuple.

    The first input decides what comes back: NumPy arrays (lists, scalars) give NumPy arrays; arrays on the device (CuPy, torch, anything with
    `__cuda_array_interface__` or DLPack) give arrays of their library, computed in the order of the caller's current stream. Calls may come
    from several threads. Each shape of a symbolic model has a program of its own, the last MAX_SPECIALISATIONS of them kept.
    """

    def __init__(self, origin: DeviceOrigin, log: Log, ahead: bool = True, parameters: Parameters | None = None) -> None:
        self._origin, self._log, self._ahead, self._parameters = origin, log, ahead, parameters
        self._before: list[LoadedProgram] = []  # with the weights of before the last refit: work of theirs may still be queued
        self._signature = Signature(origin.interface, origin.inputs, origin.outputs)
        self._donation = Donation(donated(origin.interface, (origin.inputs, origin.outputs), origin.options.donate), list(origin.inputs))
        self._bound: OrderedDict[tuple[tuple[int, ...], ...], Bound] = OrderedDict()
        self._when_empty: Callable[[Sequence[tuple[int, ...]]], Any] | None = None
        self._lock = threading.RLock()

    # --- what it is -------------------------------------------------------------------------------------------------------------

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
        """Use other arrays for parameters from now on, or see what their owner wrote into them; see Executable. They are loaded at the next call."""
        if self._parameters is None:
            raise InputError("refit: the model has no parameters; compile it with parameters=")
        with self._lock:
            self._parameters.refit(changed or {})
            self._before = [p for b in self._bound.values() if (p := b.reload()) is not None]

    def frozen(self) -> Graph:
        """The imported graph with what its parameters are now as constants."""
        return self.graph if self._parameters is None else frozen(self.graph, self._parameters.held)

    @property
    def natives(self) -> list[CudaNative]:
        """The programs compiled so far."""
        with self._lock:
            return [b.native for b in self._bound.values()]

    @property
    def graph(self) -> Graph:
        """The imported graph before any pass, with the dims that were fixed."""
        return self._origin.graph()

    @property
    def target(self) -> GpuTarget:
        """The GPU that its code is for."""
        return self._origin.target

    @property
    def report(self) -> Report:
        """What the compilation did: passes, kernels, memory, time, and how many kernels no device has checked; print it."""
        told = self._log.report(self._signature)
        fresh = sum(len(n.checks) for n in self.natives)
        return told if not fresh else replace(told, notes=(*told.notes, f"{fresh} kernels unverified: each is checked when a device first loads it"))

    def source(self, stage: str, kernel: str | None = None) -> str:
        """The text of the last program: "graph", "operator", "cuda" or "ptx"; of one kernel by number, name or symbol.

        InputError names what there is, or the dims that are still open: a symbolic model has no program before its first call.
        """
        natives = self.natives
        if not natives:
            raise InputError(f"no program is compiled yet: call the model first, or give dims={{...}} for {', '.join(self._origin.interface.dims)}")
        from dnnc.report.device_sources import sources_of

        return sources_of(natives[-1], self._origin.target).text(stage, kernel)

    # --- calls ------------------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run the model. InputError names the input, what was expected and what was given; TargetError: there is no such device."""
        return self._run(self._signature.in_order(args, named), None, None)

    def run(self, inputs: Any, outputs: Sequence[Any] | None = None, stream: Any = None) -> Any:
        """Run into given buffers of the inputs' kind (contiguous, of the right shape and dtype, not overlapping the inputs); without them as a call.

        The buffer of an output that takes the memory of a donated input may be that input.

        Args:
            inputs: in order, or by name.
            outputs: buffers for the results.
            stream: for arrays on the device, the stream in whose order to run: a CuPy or torch stream, or its address; default: the
                current one of the first input's library.
        """
        return self._run(self._given(inputs), outputs, stream)

    def bind(self, inputs: Any, outputs: Sequence[Any]) -> BoundCall:
        """A function that runs on these very buffers each time it is called, copying nothing on the device. It keeps the buffers alive.

        It has a frame of its own, so it may run beside calls, but not beside itself.
        """
        given, results = self._given(inputs), self._signature.buffers(outputs)
        if not given or not is_device_array(given[0]):
            arrays = self._host(given)
            for j in self._donation.pairs.values():
                if arrays[j] is not given[j]:
                    raise InputError(f"input {self._donation.names[j]}: bind needs a contiguous array that it can keep; got {described(given[j])}")
            bound = self._bind([a.shape for a in arrays])
            self._check_outputs(bound, arrays, results)
            return BoundCall(lambda stream: self._into(bound, arrays, results), 0, None, (given, results), self._fail)
        device = self._origin.device()
        views = self._views(given, device, keep=True)
        bound = self._bind([v.shape for v in views])
        made = self._output_views(bound, views, results, device)
        frame = Frame(bound.loaded())
        kind = kind_of(given[0], device)
        addresses = [v.address for v in views], [v.address for v in made]
        if any(a % PARAMETER_ALIGN for group in addresses for a in group):
            launch: Callable[[int], None] = lambda stream: frame.run_device(*addresses, stream)  # noqa: E731
        else:
            launch = frame.bind(*addresses)
        return BoundCall(launch, kind.stream, frame if bound.native.guarded else None, (views, made, frame), self._fail)

    def profile(self, *args: Any, repeats: int | None = None, **named: Any) -> Profile:
        """Where the time of a call on these inputs goes, kernel by kernel; print it. `repeats`: runs to measure, about a second's by default."""
        from dnnc.device_profile import profile

        values = self._signature.in_order(args, named)
        arrays = self._host(values)
        return profile(self.report, self._bind([a.shape for a in arrays]), arrays, self._origin.target, repeats)

    def _given(self, inputs: Any) -> tuple[Any, ...]:
        return self._signature.in_order(self._signature.arguments(inputs), {})

    def _run(self, values: tuple[Any, ...], outputs: Sequence[Any] | None, stream: Any) -> Any:
        if values and is_device_array(values[0]):
            results = self._on_device(values, outputs, stream)
        else:
            arrays = self._host(values)
            bound = self._bind([a.shape for a in arrays])
            if outputs is None:
                own = {k: arrays[j] for k, j in self._donation.pairs.items()}
                results = [own[k] if k in own else np.empty(s, d) for k, (s, d) in enumerate(bound.outputs)]
            else:
                results = list(outputs)
                self._check_outputs(bound, arrays, results)
            self._into(bound, arrays, results)
        return results[0] if len(results) == 1 else tuple(results)

    # --- on NumPy arrays --------------------------------------------------------------------------------------------------------

    def _host(self, values: Sequence[Any]) -> list[Array]:
        self._donation.check_side(values, False)
        return self._signature.convert([to_host(v) if is_device_array(v) else v for v in values])

    def _check_outputs(self, bound: Bound, arrays: Sequence[Array], results: Sequence[Any]) -> None:
        self._signature.check_outputs(bound.outputs, arrays, results, self._donation.pairs)

    def _into(self, bound: Bound, arrays: Sequence[Array], results: list[Any]) -> None:
        """A call that leaves its results in these arrays, and those that take the memory of inputs there as well."""
        if not self._donation.pairs:
            self._on_host(bound, arrays, results)
            return
        self._donation.check(arrays, () if self._parameters is None else self._parameters.on_host)
        own = {k: arrays[j] for k, j in self._donation.pairs.items()}
        buffers = [own.get(k, r) for k, r in enumerate(results)]
        self._on_host(bound, arrays, buffers)
        self._donation.finish(buffers, arrays, results)

    def _on_host(self, bound: Bound, arrays: Sequence[Array], results: Sequence[Array]) -> None:
        if bound.empty:
            return
        with bound.frame() as frame:
            status = frame.run_host(arrays, results)
        if status[0]:
            self._fail(bound.native, status)

    # --- on arrays of the device ------------------------------------------------------------------------------------------------

    def _on_device(self, values: tuple[Any, ...], outputs: Sequence[Any] | None, stream: Any) -> list[Any]:
        device = self._origin.device()
        kind = kind_of(values[0], device)
        order = kind.stream if stream is None else address_of(stream)
        views = self._views(values, device)
        bound = self._bind([v.shape for v in views])
        pairs = self._donation.pairs
        if outputs is None:
            results = [values[pairs[k]] if k in pairs else kind.empty(s, d) for k, (s, d) in enumerate(bound.outputs)]
            named = enumerate(zip(self._signature.output_names, results, bound.outputs))
            made = [views[pairs[k]] if k in pairs else output_array(r, n, s, d, device) for k, (n, r, (s, d)) in named]
        else:
            results = list(outputs)
            made = self._output_views(bound, views, results, device)
        if not bound.empty:
            self._start(bound, views, made, order, kind.defer)
        for ready in {views[j].ready for j in pairs.values()} - {None, order}:
            _follow(device, order, int(ready or 0))  # where its owner looks for it, or uses the memory again
        if outputs is not None:
            return results
        copied = {k for k, j in pairs.items() if views[j].copied}  # whose elements were not contiguous: the copy was donated
        return [kind.finish(made[k].keep if k in copied else r) if k in copied or k not in pairs else r for k, r in enumerate(results)]

    def _start(self, bound: Bound, views: Sequence[DeviceArray], made: Sequence[DeviceArray], stream: int, defer: Defer | None) -> None:
        with bound.frame() as frame:
            for other in {v.ready for v in views if v.ready not in (None, stream)}:
                _follow(frame.device, int(other or 0), stream)
            frame.run_device([v.address for v in views], [v.address for v in made], stream)
            if bound.native.guarded and defer is not None:
                defer(frame, lambda: self._told(bound.native, frame.status_of_before()), stream)
                return
            self._told(bound.native, frame.outcome(stream) if bound.native.guarded else (0, 0, 0))

    def _told(self, native: CudaNative, status: tuple[int, int, int]) -> None:
        if status[0]:
            self._fail(native, status)

    def _views(self, values: Sequence[Any], device: Device, keep: bool = False) -> list[DeviceArray]:
        """Inputs on the device; those on the host are brought there. `keep`: donated ones have to be memory that can be kept."""
        out = self._brought(values, device)
        if not self._donation.pairs:
            return out
        self._donation.check_side(values, True)
        for j in self._donation.pairs.values():
            name, own = self._donation.names[j], getattr(values[j], "__dnnc_own__", None)
            if keep and own is not None:
                raise InputError(f"input {name}: arrays of dnnc.array are values, and no memory that bind could keep; give a CuPy or torch array")
            if keep and out[j].copied:
                raise InputError(f"input {name}: bind needs a contiguous array that it can keep")
            if own is not None:
                del out[j]  # references are counted
                out.insert(j, own().__dnnc_array__(device.number))
        self._donation.check_views(out, self._weights)
        return out

    @property
    def _weights(self) -> Sequence[DeviceArray]:
        """Arrays on the device that are parameters, which kernels may read as they are."""
        return () if self._parameters is None else self._parameters.on_device

    def _brought(self, values: Sequence[Any], device: Device) -> list[DeviceArray]:
        out = []
        for value, (name, dtype, rank) in zip(values, self._signature.expected):
            if not is_device_array(value):
                host = self._one_on_host(value, name)
                value = device.empty(host.shape, host.dtype)
                if host.nbytes:
                    device.upload(int(value.__cuda_array_interface__["data"][0]), host, 0)
                    device.synchronize(0)
            out.append(device_array(value, name, dtype, rank, device))
        return out

    def _one_on_host(self, value: Any, name: str) -> Array:
        from dnnc.signature import converted

        dtype, rank = next((d, r) for n, d, r in self._signature.expected if n == name)
        return converted(value, name, dtype, rank)

    def _output_views(self, bound: Bound, inputs: Sequence[DeviceArray], results: Sequence[Any], device: Device) -> list[DeviceArray]:
        self._signature.check_count(results)
        made: list[DeviceArray] = []
        for k, (name, r, (shape, dtype)) in enumerate(zip(self._signature.output_names, results, bound.outputs)):
            view = output_array(r, name, shape, dtype, device)
            own = self._donation.pairs.get(k)
            others = [v for j, v in enumerate(inputs) if j != own or v.address != view.address]
            if any(view.overlaps(v) for v in (*others, *made, *self._weights)):
                raise InputError(f"output {name} overlaps another buffer of the call")
            made.append(view)
        return made

    # --- programs ---------------------------------------------------------------------------------------------------------------

    def _fail(self, native: CudaNative, status: tuple[int, int, int]) -> None:
        _, number, value = status
        guarded = [k for k in native.kernels if k.guarded]
        told = [k for k in guarded if kernel_number(k.symbol) == number] or guarded
        where = "; ".join([f"{k.name}{k.where}" for k in told][:3])
        raise InputError(f"an index read at run time, {value}, lies outside of its axis, in {where}: check the values of integer inputs")

    def _bind(self, shapes: Sequence[tuple[int, ...]]) -> Bound:
        key = tuple(shapes)
        return self._bound.get(key) or self._bind_new(key)

    def _bind_new(self, key: tuple[tuple[int, ...], ...]) -> Bound:
        with self._lock:
            if key in self._bound:
                return self._bound[key]
            if self._when_empty is not None and any(0 in s for s in key):
                bound: Bound = self._when_empty(key)._bind(key)
            else:
                bound = Bound(self._origin.specialise(bind_dims(self._origin.interface, key)), self._origin.device, weakref.WeakMethod(self._ready))
            if self._origin.present and not bound.empty:
                bound.loaded()
            self._bound[key] = bound
            while len(self._bound) > MAX_SPECIALISATIONS:
                self._bound.popitem(last=False)
            return bound

    def _ready(self) -> list[LoadedProgram]:
        """The programs that are on the device."""
        return [b.ready for b in list(self._bound.values()) if b.ready is not None]

    def when_empty(self, compile_for: Callable[[Sequence[tuple[int, ...]]], Any]) -> None:
        """`compile_for(shapes)` makes the executable that takes calls with an empty input of symbolic size."""
        self._when_empty = compile_for

    def prepare(self, shapes: Sequence[tuple[int, ...]]) -> CudaNative:
        """Compile for input shapes ahead of the first call. InputError where shapes can only be a guess: a segment with open dims."""
        inputs = self._origin.interface.inputs
        if len(shapes) != len(inputs):
            raise InputError(f"{len(shapes)} shapes for {len(inputs)} inputs")
        if not self._ahead and self._origin.interface.dims:
            raise InputError(f"{self._origin.interface.name}: device programs are made for the sizes of a call, which nobody knows yet")
        check_fits([(f"input {n}", s, v.type.dtype.numpy) for n, s, v in zip(self._signature.input_names, shapes, inputs)])
        return self._bind(shapes).native

    # --- files ------------------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str] | BinaryIO, small: bool = False, archs: Sequence[str] = ()) -> None:
        """Write the model to a file that `dnnc.load` reads: its graph, and the machine code of the programs so far. Loading runs the passes again.

        Args:
            path: the file; it is replaced at once, so that no reader sees half of it. Or an open binary file.
            small: makes no difference.
            archs: other architectures, such as "sm_80", for which the programs are compiled now and put in as well. On a device of an
                architecture that is not in the file, loading compiles.

        Raises:
            ArtifactError: the file cannot be written.
            TargetError: there is no such architecture.
        """
        from dnnc.artifacts import save_device

        if self._parameters is not None:
            raise ArtifactError("a program of a device is saved without parameters: compile it again without parameters=, from the graph `frozen()`")
        cubins: dict[str, bytes] = {}
        checked: set[str] = set()
        with self._lock:
            shapes = list(self._bound)
        others = [self._origin.elsewhere(a).prepare(s) for a in dict.fromkeys(archs) if a != self.target.arch for s in shapes]
        for native in (*others, *self.natives):
            cubins.update(native.cubins)
            checked |= set(native.cubins) - set(native.checks)
        origin = self._origin
        names = origin.inputs, origin.outputs
        save_device(path, origin.graph(), names, origin.options, (cubins, checked), None if origin.onnx is None else origin.onnx())


class BoundCall:
    """`call()` runs a bound program and returns when it is queued, in the order of the stream on which it was bound (on NumPy arrays: when it
    is done). `call.check()` waits, and raises what a call would have raised of the data."""

    __slots__ = ("_fail", "_frame", "_keep", "_launch", "_stream")

    def __init__(self, launch: Callable[[int], None], stream: int, frame: Frame | None, keep: Any, fail: Any) -> None:
        self._launch, self._stream, self._frame, self._keep, self._fail = launch, stream, frame, keep, fail

    def __call__(self) -> None:
        self._launch(self._stream)

    def check(self) -> None:
        """InputError: an index that was read at run time lay outside of its axis."""
        if self._frame is not None:
            status = self._frame.outcome(self._stream)
            if status[0]:
                self._fail(self._frame.loaded.native, status)


def address_of(stream: Any) -> int:
    """The address of a stream of CuPy or torch, or one that is given as such. InputError for anything else."""
    for name in ("ptr", "cuda_stream", "handle"):
        if hasattr(stream, name):
            return int(getattr(stream, name))
    if not isinstance(stream, int):
        raise InputError(f"stream={stream!r}: expected a CuPy or torch stream, or its address as an int")
    return stream


def _follow(device: Device, first: int, then: int) -> None:
    """What comes on one stream from now on waits for what is on the other."""
    event = device.new_event()
    device.record(event, first)
    device.wait(event, then)


__all__ = ["BoundCall", "Bound", "DeviceExecutable", "DeviceOrigin", "Kind"]
