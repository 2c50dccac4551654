"""From a model to an Executable: a frontend reads the model, `dnnc.compile_graph` compiles its graph."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dnnc.backends.base import Progress
from dnnc.backends.registry import backend_class
from dnnc.bound import of_function, of_graph
from dnnc.compile_graph import compile_graph, open_dims
from dnnc.executable import Executable
from dnnc.frontends.onnx import NeedsValues, read_model
from dnnc.frontends.onnx.parameters import bound_weights
from dnnc.frontends.onnx.serialize import take_apart
from dnnc.frontends.onnx.signature import declared
from dnnc.frontends.trace import trace
from dnnc.frontends.trace.onnx_operators import load_with
from dnnc.import_cache import Condition, ImportCache, ImportCompiler, ImportInputs, Variant
from dnnc.ir import checks
from dnnc.ir.errors import InputError, ShapeError, UnsupportedError, a_type
from dnnc.ir.form import ARRAY
from dnnc.ir.graph import Graph
from dnnc.ir.target import parse_target
from dnnc.options import CompileOptions, make_options
from dnnc.signature import TensorSpec
from dnnc.tune_option import resolved

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from dnnc.options import Options

__all__ = ["Executable", "TensorSpec", "compile"]


def compile(
    model: Any,
    progress: Progress | bool | None = None,
    *,
    inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    parameters: Mapping[str, Any] | Sequence[str] | bool | None = None,
    **options: Unpack[Options],
) -> Executable:
    """Compile a model.

    Args:
        model: path to an .onnx file, its bytes, an onnx.ModelProto, a dnnc.ir Graph, a function of array code, a
            torch.nn.Module, or a program of torch.export.
        progress: True shows a bar on a terminal or in a notebook; a function is called with (stage, done, of).
        inputs: for a function, the arguments of `dnnc.trace`, a Spec for each array; or a dict of them by argument
            name.
        parameters: weights that are bound by reference and may change, see `Executable.refit`. For a function: a dict
            by argument names, or any names for captured arrays of dnnc.array. For an ONNX model: names of initializers,
            a dict of arrays for them, or True for all float ones. For a graph: constants or inputs likewise.
        **options: see CompileOptions.

    Returns:
        A callable; see Executable.

    Raises:
        DnncError: a subclass that names the fault of the model, the options or the target.
    """
    opts = make_options(options)
    if progress is True:
        from dnnc.report.bar import Bar  # loads rich

        with Bar() as bar:
            return compile(model, bar, inputs=inputs, parameters=parameters, **options)
    progress = None if progress is False else progress
    checks.optional_function(progress, "progress")
    check_parameters(parameters)
    if is_torch(model):
        from dnnc.torch.program import compile_module  # loads torch, an optional package

        module: Any = compile_module(
            model, inputs, progress, opts, options
        )  # a TorchProgram is called as PyTorch calls a module
        return module  # type: ignore[no-any-return]
    bound: Mapping[str, Any] | None = None
    if inputs is not None or inspect.isroutine(model) or hasattr(model, "__wrapped__"):
        model, bound = traced_graph(model, inputs, parameters)
        opts = open_dims(opts, model)
    elif isinstance(model, Graph) and parameters:
        model, bound = of_graph(model, () if isinstance(parameters, bool) else parameters)
    if parameters and isinstance(opts.tune, (int, float)):
        raise InputError(
            "tune: a search takes no parameters; tune the model without them, and give the log to this compilation"
        )
    if isinstance(opts.tune, (int, float)):
        return tuned_first(model, opts.tune, progress, options)
    opts = resolved(opts)
    if isinstance(model, Graph):
        return compile_graph(
            model, ([v.name for v in model.inputs], [v.name for v in model.outputs]), opts, progress, parameters=bound
        )
    if isinstance(model, (str, os.PathLike, bytes, bytearray)) or type(model).__name__ == "ModelProto":
        return (
            compile_onnx(model, opts, progress) if not parameters else compile_bound(model, parameters, opts, progress)
        )
    raise InputError(
        f"cannot compile {a_type(model)}: expected a path to an .onnx file, its bytes, a ModelProto, a dnnc.ir.Graph, "
        "or a function and its inputs"
    )


def check_parameters(parameters: Any) -> None:
    """InputError for what is neither a dict of arrays by name, nor a sequence of names, nor a bool."""
    if isinstance(parameters, Mapping):
        checks.names(list(parameters), "parameters")
    elif isinstance(parameters, str):
        raise InputError(
            f"parameters={parameters!r}: expected a sequence of names, such as [{parameters!r}], or a dict of arrays"
        )
    elif parameters is not None and not isinstance(parameters, bool):
        checks.names(parameters, "parameters")


def is_torch(model: Any) -> bool:
    """Is this a module of PyTorch, or a program that it has exported? torch is not imported to say so."""
    return any(
        f"{c.__module__}.{c.__name__}"
        in ("torch.nn.modules.module.Module", "torch.export.exported_program.ExportedProgram")
        for c in type(model).__mro__
    )


def traced_graph(
    fn: Any, inputs: Sequence[Any] | Mapping[str, Any] | None, parameters: Any = None
) -> tuple[Graph, Mapping[str, Any]]:
    """Trace a function of array code: its graph and parameters. InputError where it cannot be traced."""

    if not callable(fn):
        raise InputError(f"inputs: only a function takes them, not {a_type(fn)}; sizes of a model are given by dims")
    if inputs is None:
        raise InputError(
            "a function needs inputs=[...], a dnnc.Spec(shape, dtype) for each array; dnnc.jit finds them at each call"
        )
    if isinstance(inputs, Mapping):
        checks.names(list(inputs), "inputs")
    else:
        inputs = checks.sequence(inputs, "inputs")
    if parameters is None:
        return trace(fn, **inputs) if isinstance(inputs, Mapping) else trace(fn, *inputs), {}
    if not isinstance(parameters, Mapping):
        raise InputError("parameters: of a function they are a dict of arrays, by the names of its arguments")
    return of_function(fn, inputs, parameters)


def tuned_first(model: Any, budget: float, progress: Progress | None, options: Mapping[str, Any]) -> Executable:
    """Search for `budget` seconds, then compile with the winners."""
    from dnnc.tune_session import Event, tune  # loads the tuner

    def tell(e: Event) -> None:
        if progress is not None:
            progress("tune", min(int(e.progress.seconds), int(budget)), int(budget))

    tuned = tune(model, budget=budget, callbacks=[tell], **{n: v for n, v in options.items() if n != "tune"})
    compiled: Executable = tuned.compile(progress)
    return compiled


def compile_onnx(model: Any, opts: CompileOptions, progress: Progress | None) -> Executable:
    """Compile what `dnnc.frontends.onnx.read` takes."""

    start = time.perf_counter()
    opened = load_with(model, opts.custom_ops)
    said = declared(opened)
    unknown = sorted(set(opts.dims) - set(said.dims))
    if unknown:
        raise InputError(
            f"dims: the model has no symbolic size {', '.join(unknown)}; it has {', '.join(said.dims) or 'none'}"
        )

    def deferred(asks: tuple[str, ...] = ()) -> Executable:
        kept = snapshot(model)
        return Executable(
            ImportCompiler(ImportCache(said, asks, reader(kept, opts, progress), needs), opts, lambda: take_apart(kept))
        )

    if not said.plain:
        f = deferred()
        f.prepare_variants()
        return f
    try:
        imported = read_model(opened, dims=opts.dims)
    except (NeedsValues, ShapeError) as e:
        by_condition = isinstance(e, NeedsValues) and e.condition is not None
        asks = e.inputs if isinstance(e, NeedsValues) and not by_condition else ()
        # symbolic sizes may not show what numbers will (that two paths end with equal sizes); a model of fixed sizes is
        # simply wrong
        if not asks and not said.dims and not by_condition:
            raise
        return deferred(asks)
    if any(r is not ARRAY for r in imported.results):  # though nothing is declared of them
        return deferred()
    del opened  # its weights are in the graph
    names = list(imported.inputs), list(imported.outputs)
    seconds = time.perf_counter() - start
    kept = snapshot(model) if said.dims or imported.graph.dims else None
    onnx = (lambda: take_apart(kept)) if imported.graph.dims else None
    f = compile_graph(imported.graph, names, replace(opts, dims=_left(opts, imported.graph)), progress, seconds, onnx)
    if said.dims and backend_class(parse_target(opts.target).kind).compiles:
        # the import takes symbolic dims to be at least 1, which lets shapes simplify; empty inputs get a program of
        # their own
        read = rereader(kept, opts, progress)
        f.cache.when_empty = lambda shapes: read({}, dict(zip(names[0], shapes)))
    return f


def snapshot(model: Any) -> Any:
    """A model that is read again later, for other shapes: the caller may change a ModelProto or a bytearray by then."""
    if isinstance(model, bytearray):
        return bytes(model)
    if type(model).__name__ == "ModelProto":
        copied = type(model)()
        copied.CopyFrom(model)
        return copied
    return model


def compile_bound(
    model: Any, parameters: Mapping[str, Any] | Sequence[str] | bool, opts: CompileOptions, progress: Progress | None
) -> Executable:
    """Compile an ONNX model with parameters. UnsupportedError where sizes depend on their contents."""

    start = time.perf_counter()
    opened = load_with(model, opts.custom_ops)
    while True:
        changed, bound = bound_weights(opened, parameters)
        try:
            made = read_model(changed, dims=opts.dims)
            break
        except NeedsValues as e:
            own = set(e.inputs) & set(bound)
            if not own or not isinstance(parameters, bool):
                what = f"the contents of {', '.join(sorted(own))} steer it" if own else str(e)
                raise UnsupportedError(
                    f"parameters: the model cannot be compiled with weights that are not known: {what}"
                ) from e
            parameters = [n for n in bound if n not in own]
    names = list(made.inputs), list(made.outputs)
    options = replace(opts, dims=_left(opts, made.graph))
    return compile_graph(made.graph, names, options, progress, time.perf_counter() - start, None, bound)


def needs(error: Exception) -> tuple[str, ...]:
    """The inputs whose contents a reading asks for."""

    return error.inputs if isinstance(error, NeedsValues) else ()


def reader(
    model: Any, opts: CompileOptions, progress: Progress | None
) -> Callable[[ImportInputs], Variant | Condition]:
    """Return a function that compiles an ONNX model for a call, or the condition that must be known first."""

    def read(given: ImportInputs) -> Variant | Condition:
        try:
            made = read_model(
                load_with(model, opts.custom_ops),
                values=given.values,
                shapes=given.shapes,
                forms=given.forms,
                decisions=given.decisions,
            )
        except NeedsValues as e:
            if e.condition is None:
                raise
            small = replace(opts, dims={}, outputs=(), donate={})
            return Condition(
                e.condition.name,
                compile_graph(e.condition.graph, (list(e.condition.inputs), ["condition"]), small, progress),
            )
        if not made.outputs and not opts.outputs:
            return Variant(None, made.results)
        names = list(made.inputs), list(made.outputs)
        return Variant(compile_graph(made.graph, names, replace(opts, dims={}), progress), made.results)

    return read


Reread = Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], Executable]


def rereader(model: Any, opts: CompileOptions, progress: Progress | None) -> Reread:
    """A function that reads and compiles an ONNX model for the contents of some inputs and the shapes of all."""

    def read(values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Executable:
        made = read_model(load_with(model, opts.custom_ops), values=values, shapes=shapes)
        return compile_graph(made.graph, (list(made.inputs), list(made.outputs)), replace(opts, dims={}), progress)

    return read


def _left(opts: CompileOptions, graph: Graph) -> dict[str, Any]:
    """Bounds of dims that the import did not use up."""
    return {n: d for n, d in opts.dims.items() if n in graph.dims}
