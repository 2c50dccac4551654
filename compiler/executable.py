"""A compiled model as a callable: arrays in, arrays out. The only one, for all targets."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, Union, cast

import numpy as np

import dnnc
from dnnc.backends.base import Instance
from dnnc.backends.runtime.arrays import is_device_array, to_host
from dnnc.donation import Donation, donated
from dnnc.ir.errors import InputError, UnsupportedError
from dnnc.ir.graph import Graph
from dnnc.memory import check_fits
from dnnc.options import CompileOptions
from dnnc.parameters import Parameters, frozen
from dnnc.program_cache import ModelCompiler, ProgramCache
from dnnc.report import Report
from dnnc.report.layout import cut
from dnnc.signature import Signature, TensorSpec, described, shapes_of

if TYPE_CHECKING:
    from dnnc.backends.runtime.program import Program
    from dnnc.backends.runtime.sources import Sources
    from dnnc.hybrid import HybridProgram
    from dnnc.import_cache import ImportCache
    from dnnc.ir.target import TargetFacts
    from dnnc.tools.profile import Profile

Array = np.ndarray[Any, Any]
Results = Union[Array, Any]  # one output is an array; Any stands for a tuple, and for arrays of other libraries
WIDTH = 160  # characters of a repr


class Bound(Protocol):
    """What `Executable.bind` returns."""

    def __call__(self) -> object: ...

    def check(self) -> None: ...


class Executable:
    """A compiled model: `y = f(x)`, `f(name=x)` or `f({"input.1": x})`; one output is an array, several are a tuple.

    Inputs are NumPy arrays of the exact dtypes (lists and Python scalars convert); results are fresh arrays. Several
    threads may call at once. A model with symbolic dims is specialised to each shape it meets, the last ones kept.

    On a CUDA device the first input decides the kind of the results: NumPy arrays give NumPy arrays; arrays on the
    device (CuPy, torch, `__cuda_array_interface__`, DLPack) give their library's arrays, in the caller's stream.
    """

    def __init__(self, compiler: ModelCompiler, parameters: Parameters | None = None) -> None:
        self._compiler, self._parameters = compiler, parameters
        self._signature = Signature(compiler.interface, compiler.inputs, compiler.outputs)
        names = compiler.inputs, compiler.outputs
        pairs = donated(compiler.interface, names, compiler.options.donate) if compiler.imports is None else {}
        self._donation = Donation(pairs, list(compiler.inputs), bool(compiler.interface.held)) if pairs else None
        self._collect = self._signature.collect
        self._imports: ImportCache | None = compiler.imports
        self.cache = ProgramCache(compiler)
        self._instance = self.cache.instance
        self._device_calls = compiler.device_calls(self._signature, self._donation, self.cache)
        self._plain = self._donation is None and self._imports is None and self._device_calls is None

    # --- what it is ---------------------------------------------------------------------------------------------------

    @property
    def options(self) -> CompileOptions:
        """How it was compiled."""
        return self._compiler.options

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Names, dtypes and shapes; of sequences, optionals and maps the type in place of the dtype."""
        return self._signature.inputs if self._imports is None else self._imports.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Names, dtypes and shapes. Data-dependent sizes are symbolic; call-dependent types are known after it."""
        return self._signature.outputs if self._imports is None else self._imports.outputs

    @property
    def parameters(self) -> tuple[TensorSpec, ...]:
        """The arrays that it was compiled with `parameters=` for; see `refit`."""
        return self._parameters.specs if self._parameters is not None else ()

    @property
    def programs(self) -> list[Program | HybridProgram]:
        """The programs compiled so far, the newest at the end."""
        with self.cache.lock:
            return list(self.cache.programs.values())

    @property
    def variants(self) -> list[Executable]:
        """A model read for the inputs of a call: its variants by kind of input, the last one used at the end."""
        return [] if self._imports is None else self._imports.variants

    @property
    def resolved(self) -> Executable:
        """Return what ran the last call: this, or its variant for the inputs. InputError before the first call."""
        return self if self._imports is None else self._imports.last

    @property
    def deferred(self) -> bool:
        """Is the model read for the inputs of a call?"""
        return self._imports is not None

    @property
    def graph(self) -> Graph:
        """The imported graph before any pass, with the dims that were fixed."""
        return self._compiler.graph

    @property
    def target(self) -> TargetFacts:
        """The facts of the machine that its code is for."""
        return self._compiler.target  # type: ignore[no-any-return]

    @property
    def report(self) -> Report:
        """What the compilation did: passes, kernels, memory, time; print it."""
        return replace(self._compiler.report(self._signature, self.programs), view=partial(_write_page, self))

    def source(self, stage: str, kernel: str | None = None) -> str:
        """Return the last program's text ("graph", "operator", "llvm", "asm", "cuda", "ptx"), or one kernel's.

        InputError lists the kernels, or the open dims: a symbolic model has no program before its first call.
        """
        return self._compiler.source(self.last_program(), stage, kernel)

    def sources(self, program: Program) -> Sources:
        """The texts of one of its programs; see `dnnc.backends.runtime.sources.Sources`."""
        return self._compiler.sources(program)  # type: ignore[no-any-return]

    def last_program(self) -> Program | HybridProgram | None:
        """The newest program. InputError names the dims that are open where there is none."""
        programs = self.programs
        if not programs and self._imports is None:
            raise InputError(
                f"no program is compiled yet: call the model first, or give dims={{...}} for "
                f"{', '.join(self._compiler.interface.dims)}"
            )
        return programs[-1] if programs else None

    def __repr__(self) -> str:
        """One line: `<Executable for llvm: image float32[N, 1, 8, 8] -> logits float32[N, 10]>`."""
        took, gave = (
            ", ".join(f"{s.name} {s.dtype}[{', '.join(map(str, s.shape))}]" for s in specs)
            for specs in (self.inputs, self.outputs)
        )
        return f"<Executable for {self.options.target}: {cut(f'{took} -> {gave}', WIDTH - 40)}>"

    # --- calls --------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **named: Any) -> Results:
        """Run the model. InputError names the input, expected and got; TargetError: no such device."""
        if not self._plain:
            return self._run(args, named)
        arrays = self._collect(args, named)
        results = self._instance(tuple([a.shape for a in arrays])).call(arrays)
        return results[0] if len(results) == 1 else tuple(results)

    def run(self, inputs: Any, outputs: Sequence[Any] | None = None, stream: Any = None) -> Results:
        """Run into contiguous buffers of the right shape and dtype that overlap no input; without them as a call.

        The buffer of an output that takes the memory of a donated input may be that input.

        Args:
            inputs: in order, or by name.
            outputs: buffers for the results, of the inputs' kind.
            stream: for arrays on a device, the stream in whose order to run: a CuPy or torch stream, or its address;
                default: the current one of the first input's library.
        """
        if self._imports is not None:
            return self._imports.run(*self._imports.arguments(inputs), outputs)
        return self._run(self._signature.arguments(inputs), {}, outputs, stream)

    def _run(self, args: tuple[Any, ...], named: Mapping[str, Any], outputs: Any = None, stream: Any = None) -> Any:
        if self._imports is not None:
            return self._imports.run(args, named, outputs)
        values = self._signature.in_order(args, named)
        if self._device_calls is not None and values and is_device_array(values[0]):
            results = self._device_calls.run(values, outputs, stream, self._parameters)
        else:
            arrays = self._arrays(values)
            instance = self.cache.instance(tuple([a.shape for a in arrays]))
            results = self._execute(
                instance, arrays, None if outputs is None else self._buffers(instance, arrays, outputs)
            )
        return results[0] if len(results) == 1 else tuple(results)

    def _arrays(self, values: Sequence[Any]) -> list[Array]:
        """Arguments as arrays on the host."""
        if self._device_calls is not None:
            if self._donation is not None:
                self._donation.check_side(values, False)
            values = [to_host(v) if is_device_array(v) else v for v in values]
        return self._signature.convert(values)

    def _buffers(self, instance: Instance, arrays: Sequence[Array], outputs: Any) -> list[Array]:
        """Buffers of the caller. InputError where one does not fit."""
        results = self._signature.buffers(outputs)
        if instance.outputs is not None:
            self._signature.check_outputs(
                instance.outputs, [*arrays, *self._weights], results, self._donation.pairs if self._donation else {}
            )
        return results

    def _execute(self, instance: Instance, arrays: Sequence[Array], results: list[Array] | None) -> list[Array]:
        """A call into these results, or fresh ones."""
        if self._donation is not None:
            return self._donation.run(instance, arrays, results, self._weights)
        if results is None:
            return instance.call(arrays)
        instance.into(arrays, results)
        return results

    @property
    def _weights(self) -> Sequence[Array]:
        """What parameters hold: memory of others that kernels may read as it is."""
        return () if self._parameters is None else self._parameters.on_host

    def bind(self, inputs: Any, outputs: Sequence[Any]) -> Bound:
        """Return a function that runs on these very buffers, copying nothing. It keeps the buffers alive.

        On a device it returns when its work is queued on the stream of the binding. It may run concurrently with calls,
        but not with itself. Its method `check()` waits, and raises errors of data such as a wrong index.
        """
        if self._imports is not None:
            raise UnsupportedError("bind: the model is read anew for the inputs of each call; use `run` with outputs")
        values = self._signature.in_order(self._signature.arguments(inputs), {})
        if self._device_calls is not None and values and is_device_array(values[0]):
            return self._device_calls.bind(values, outputs, self._parameters)
        arrays = self._arrays(values)
        for a, b, name in zip(arrays, values, self._signature.input_names):
            if a is not b:
                raise InputError(f"input {name}: bind needs a contiguous array that it can keep; got {described(b)}")
        instance = self.cache.instance(tuple([a.shape for a in arrays]))
        results = self._buffers(instance, arrays, outputs)
        run: Callable[..., Any] = instance.into if self._donation is None else partial(self._execute, instance)
        call = partial(run, arrays, results)
        setattr(call, "check", _checked)  # noqa: B010  # as calls on a device have
        return cast(Bound, call)

    def profile(self, *args: Any, repeats: int | None = None, **named: Any) -> Profile:
        """Profile a call on these inputs by kernel, as a printable table. `repeats`: default about a second."""
        if self._imports is not None:
            return self._imports.profile(args, named, repeats)
        return self._compiler.profile(self, lambda: self._arrays(self._signature.in_order(args, named)), repeats)

    def prepare(self, shapes: Sequence[tuple[int, ...]]) -> Program | HybridProgram:
        """Compile for input shapes ahead of the first call; returns the program."""
        names, inputs = self._signature.input_names, self._compiler.interface.inputs
        sizes = tuple(shapes_of(shapes, names))
        check_fits([(f"input {n}", s, v.type.dtype.numpy) for n, s, v in zip(names, sizes, inputs)])
        instance = self.cache.instance(sizes)
        self._compiler.prepare(instance, sizes)
        return instance.program  # type: ignore[no-any-return]

    def prepare_variants(self) -> None:
        """Compile a model that is read for the inputs of a call ahead of the first one, where all is known."""
        if self._imports is not None:
            self._imports.prepare()

    # --- parameters ---------------------------------------------------------------------------------------------------

    def refit(self, changed: Mapping[str, Any] | None = None) -> None:
        """Replace the arrays of parameters, or pick up changes that were written into them. Nothing is compiled.

        Args:
            changed: arrays by name, of the same shapes and dtypes, which are shared where they are contiguous. All
                parameters are packed anew, also those that are not named.

        Raises:
            InputError: there is no such parameter, or an array does not fit; then everything is as it was.
        """
        if self._parameters is None:
            raise InputError("refit: the model has no parameters; compile it with parameters=")
        with self.cache.lock:
            self._parameters.refit(changed or {})
            self._compiler.refitted(list(self.cache.instances.values()))

    def frozen(self) -> Graph:
        """The imported graph with the current parameters as constants."""
        return self.graph if self._parameters is None else frozen(self.graph, self._parameters.held)

    def _without_parameters(self) -> Executable:
        """The model with what its parameters are now as constants, compiled anew."""
        g, options = self.frozen(), self.options  # sizes that were fixed and outputs that were added are in the graph
        dims = {n: d for n, d in options.dims.items() if n in g.dims}
        return self._compiler.compile_again(g, replace(options, dims=dims, outputs=()))

    # --- files --------------------------------------------------------------------------------------------------------

    def save(
        self,
        path: str | os.PathLike[str] | BinaryIO,
        small: bool = False,
        archs: Sequence[str] = (),
        compress: bool = False,
    ) -> None:
        """Write a file that `dnnc.load` reads: the programs compiled so far, and the model to compile others.

        Args:
            path: the file; it is replaced at once, so that no reader sees half of it. Or an open binary file.
                Parameters are constants in it.
            small: leave out weights in the order that kernels read them. Loading then takes as long as the passes do.
            archs: of a model for a CUDA device, other architectures, such as "sm_80", for which the programs are
                compiled now and put in as well. On a device of an architecture that is not in the file, loading
                compiles.
            compress: as `small`, with coded sections: weights that are zero or share few values take few bits, texts
                and machine code are deflated. Nothing is lost. Code of more than 32 KB is left out, and
                generated when the model is loaded.

        Raises:
            ArtifactError: the file cannot be written.
            TargetError: there is no such architecture.
        """
        if self._parameters is not None:
            self._without_parameters().save(path, small, archs, compress)
            return
        with self.cache.lock:
            programs = dict(self.cache.programs)
        if not compress:
            self._compiler.save(path, programs, small, archs)
            return
        from dnnc.artifact.compressed import write_compressed  # loads what writes, which a call does without

        plain = io.BytesIO()
        self._compiler.save(plain, programs, True, archs)
        write_compressed(path, plain)

    def __reduce__(self) -> Any:
        if self._parameters is not None:
            raise InputError(
                "an executable with parameters cannot be pickled or copied, for they belong to their owner: "
                "f.save(path) writes it with their values as constants, and dnnc.load(path) reads that"
            )
        file = io.BytesIO()
        self.save(file)
        return _restored, (file.getvalue(), self.options.cache, dict(self.options.custom_ops))


def _write_page(f: Executable, path: Any, profile: Profile | None) -> None:
    from dnnc.view import write_html  # loads the passes, which a call does without

    write_html(f, path, profile)


def _restored(data: bytes, cache: Any, custom_ops: Any) -> Executable:
    return dnnc.load(io.BytesIO(data), cache=cache, custom_ops=custom_ops)


def _checked() -> None:
    """A call on the host is done when it returns, and has raised what there was to raise."""
