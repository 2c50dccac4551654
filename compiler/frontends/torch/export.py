"""`nn.Module`s and `torch.export` programs as graphs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.utils import _pytree as pytree

from dnnc.frontends.torch.decompose import for_export
from dnnc.frontends.torch.dims import Dims
from dnnc.frontends.torch.importer import Read, read_fx
from dnnc.frontends.torch.tensors import FROM_NAME, tensor_of
from dnnc.ir.dtype import from_numpy
from dnnc.ir.errors import InputError, ModelError, UnsupportedError, a_type
from dnnc.ir.graph import Graph


@dataclass(frozen=True)
class Fixed:
    """An argument that is a part of the program: a number, a string."""

    value: Any


@dataclass(frozen=True)
class Program:
    """A program of torch as a graph.

    graph: its first inputs are those of the program, those named in `parameters` are its weights.
    inputs: of each leaf of the arguments, in order, the graph's input, or Fixed.
    parameters: tensors by the name of their graph input.
    arguments: the structure of (args, kwargs); results: that of what it returns, and of each leaf an Output, a dim or a
        plain value.
    """

    graph: Graph
    inputs: tuple[str | Fixed, ...]
    parameters: dict[str, torch.Tensor]
    arguments: Any
    structure: Any
    results: tuple[Any, ...]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's warnings about its own code: copies of TreeSpec, and flat weights of recurrent layers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
        warnings.filterwarnings(
            "ignore", r"The tensor attributes? ([\w.]*_flat_weights\[\d+\](, )?)+ w(as|ere) assigned", UserWarning
        )
        yield


def exported(
    module: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, dynamic_shapes: Any
) -> ExportedProgram:
    if isinstance(module, ExportedProgram):
        return module
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"expected a torch.nn.Module or an ExportedProgram, got {a_type(module)}")
    try:
        with torch.no_grad(), quiet():
            return torch.export.export(module, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes)
    except Exception as e:  # torch raises a dozen of its own kinds, whose text says what to do
        raise ModelError(f"torch.export.export cannot export {type(module).__name__}: {e}") from e


def examples(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return a module's example arguments, keyword arguments and dynamic sizes from `inputs=` of dnnc.compile.

    Tensors and arrays are examples; a `dnnc.Spec` stands for any tensor of its shape, strings name dynamic sizes.
    """
    by_name = isinstance(inputs, Mapping)
    given = dict(inputs) if by_name else tuple(inputs if inputs is not None else ())
    sizes: dict[str, Any] = {}

    def example(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return tensor_of(np.ascontiguousarray(x))
        return (
            x
            if not _is_spec(x)
            else torch.zeros([_size(d, sizes) for d in x.shape], dtype=FROM_NAME[from_numpy(x.dtype).name])
        )

    made = pytree.tree_map(example, given)
    dynamic = pytree.tree_map(
        lambda x: {k: _dim(d) for k, d in enumerate(x.shape) if not isinstance(d, int)} if _is_spec(x) else None, given
    )
    if not sizes:
        dynamic = None
    return ((), made, dynamic) if by_name else (made, {}, dynamic)


def _is_spec(x: Any) -> bool:
    return not isinstance(x, (torch.Tensor, np.ndarray)) and hasattr(x, "shape") and hasattr(x, "dtype")


def _size(d: Any, sizes: dict[str, Any]) -> int:
    """A size for an example: each name has its own, which no other size is likely to be."""
    if isinstance(d, int):
        return d
    return int(sizes.setdefault(str(d), 5 + 2 * len(sizes)))


def _dim(d: Any) -> Any:
    return torch.export.Dim(str(d))


def read_program(
    program: ExportedProgram, dynamic_shapes: Any = None, known: Mapping[str, int] | None = None
) -> Program:
    """The graph of an exported program."""
    with quiet():
        program = program.run_decompositions(for_export())
    signature = program.graph_signature
    for spec in signature.output_specs:
        if spec.kind is not OutputKind.USER_OUTPUT:
            raise UnsupportedError(
                f"the module writes to {spec.target!r}, which a compiled program does not: call .eval() first if these "
                "are statistics of training, "
                f"return the new value, or use torch.compile(model, backend='dnnc'), which writes it back"
            )
    names, weights = _inputs(program)
    fixed = {p: t for p, t in weights.items() if t[0] is None}
    read = read_fx(
        program.graph_module,
        Dims(known, _names(program, dynamic_shapes), {str(s): r for s, r in program.range_constraints.items()}),
        {p: n for p, (n, _) in weights.items() if n},
        {p: t for p, (_, t) in fixed.items()},
    )
    taken = dict(zip(read.inputs, (v.name for v in read.graph.inputs)))
    parameters = {taken[p]: t for p, (n, t) in weights.items() if n and p in taken}
    used = tuple(n if isinstance(n, Fixed) else taken[n] for n in names)
    return Program(
        _user_first(read, used), used, parameters, program.call_spec.in_spec, program.call_spec.out_spec, read.results
    )


def _inputs(program: ExportedProgram) -> tuple[list[str | Fixed], dict[str, tuple[str | None, torch.Tensor]]]:
    """Placeholders of the arguments; and by placeholder (name, tensor) of parameters, name None for constants."""
    user: list[str | Fixed] = []
    weights: dict[str, tuple[str | None, torch.Tensor]] = {}
    for spec in program.graph_signature.input_specs:
        if isinstance(spec.arg, ConstantArgument):
            user.append(Fixed(spec.arg.value))
            continue
        name = spec.arg.name
        if spec.kind is InputKind.USER_INPUT:
            user.append(name)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            assert spec.target is not None
            state = program.state_dict if spec.target in program.state_dict else program.constants
            weights[name] = (spec.target, state[spec.target])
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            assert spec.target is not None
            weights[name] = (None, program.constants[spec.target])
        else:
            raise UnsupportedError(
                f"input {name} of the exported program is a {spec.kind.name}; expected tensors and numbers"
            )
    return user, weights


def _user_first(read: Read, used: Sequence[str | Fixed]) -> Graph:
    """The graph with the program's own arguments in front of its weights; torch has them behind."""
    own = set(used)
    inputs = read.graph.inputs
    read.graph.inputs = [*(v for v in inputs if v.name in own), *(v for v in inputs if v.name not in own)]
    return read.graph


def _names(program: ExportedProgram, dynamic_shapes: Any) -> dict[str, str]:
    """What users call symbolic sizes: the names of their `torch.export.Dim`s."""
    names: dict[str, str] = {}
    if dynamic_shapes is None:
        return names
    flat = pytree.tree_leaves(dynamic_shapes, is_leaf=_is_shape)
    fakes = [n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"]
    user = [
        f
        for f, s in zip(fakes, program.graph_signature.input_specs)
        if s.kind is InputKind.USER_INPUT and isinstance(f, torch.Tensor)
    ]
    for shape, fake in zip(flat, user):
        sizes = shape.items() if isinstance(shape, dict) else enumerate(shape or ())
        for k, d in sizes:
            size = fake.shape[k]
            label = getattr(d, "__name__", "")
            if label.isidentifier() and isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                names.setdefault(str(size.node.expr), label)
    return names


def _is_shape(x: Any) -> bool:
    """Is this the shape of one tensor within `dynamic_shapes`?"""
    if x is None:
        return True
    if isinstance(x, dict):
        return bool(x) and all(isinstance(k, int) for k in x)
    return (
        isinstance(x, (tuple, list))
        and all(d is None or isinstance(d, int) or not isinstance(d, (dict, tuple, list)) for d in x)
        and bool(x)
    )
