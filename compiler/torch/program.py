"""Programs of torch as callables: tensors in, tensors out, weights shared with the module that owns them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

import dnnc
from dnnc.backends.registry import backend_class
from dnnc.compile_graph import compile_graph
from dnnc.frontends.torch.export import Fixed, Program, examples, exported, read_program
from dnnc.frontends.torch.importer import Output
from dnnc.frontends.torch.tensors import array_of, tensor_of
from dnnc.ir.errors import InputError
from dnnc.ir.expr import Expr, const, substitute, value
from dnnc.ir.graph import Graph
from dnnc.ir.shapes import bind_dims
from dnnc.ir.target import parse_target
from dnnc.ir.types import Encoding
from dnnc.options import CompileOptions
from dnnc.parameters import frozen, with_parameters
from dnnc.passes.analysis.segments import needs_host

Progress = Callable[[str, int, int], None]
_version = attrgetter("_version")
_address = torch.Tensor.data_ptr
LARGEST = 1 << 40  # of a size that torch leaves open


class Weights:
    """Tensors that a program was made with: where they lie, and how often they had been written to."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        self.counted = [t for t in tensors if not t.is_inference()]  # torch does not count writes to the others
        self.note()

    def note(self) -> None:
        """They are now as the program has seen them."""
        self.addresses = list(map(_address, self.tensors))
        self.versions = sum(map(_version, self.counted))

    def written(self) -> bool:
        return bool(sum(map(_version, self.counted)) != self.versions)

    def moved(self) -> bool:
        return list(map(_address, self.tensors)) != self.addresses


def bind(
    graph: Graph,
    names: Sequence[str],
    weights: Mapping[str, torch.Tensor],
    opts: CompileOptions,
    progress: Progress | None = None,
    held: Mapping[int, Encoding | None] | None = None,
    internal: Mapping[int, Encoding | None] | None = None,
) -> Any:
    """Compile a graph with these inputs as weights, repacked by `refit` where the target can; else constants.

    `held`, `internal`: see `compile_graph`; `held` counts the inputs that are no weights.
    """
    outputs = [v.name for v in graph.outputs]
    arrays = {n: array_of(t) for n, t in weights.items()}
    crossing: dict[str, Any] = {"held": held, "internal": internal}
    if not arrays:
        return compile_graph(graph, (list(names), outputs), opts, progress, **crossing)
    backend = backend_class(parse_target(opts.target).kind)
    if backend.compiles and not backend.numbered and not needs_host(graph):
        return compile_graph(graph, (list(names), outputs), opts, progress, parameters=arrays, **crossing)
    graph, left = constant(graph, names, arrays)
    return compile_graph(graph, (left, outputs), opts, progress, **crossing)


def constant(graph: Graph, names: Sequence[str], arrays: Mapping[str, Any]) -> tuple[Graph, list[str]]:
    """The graph with these inputs as constants, and the names of the others."""
    if not arrays:
        return graph, list(names)
    made, left, bound = with_parameters(graph, names, arrays)
    return frozen(made, bound.held), left


class TorchProgram:
    """A compiled module: takes what the module takes, and gives what it gives.

    Tensors give tensors, NumPy arrays give NumPy arrays. `executable` is the program in arrays (its `report`,
    `profile`, `save`, ...); weights are the module's own: `refit()` after they were changed in place by means that
    torch does not count, such as `p.data`.
    """

    def __init__(self, program: Program, executable: Any) -> None:
        self.executable, self._program = executable, program
        self._weights = (
            Weights(list(program.parameters.values()))
            if hasattr(executable, "refit") and executable.parameters
            else None
        )
        self._kept = [k for k, n in enumerate(program.inputs) if isinstance(n, str)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it. InputError names what does not fit."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._program.arguments:
            raise InputError(
                f"the program was made for (arguments, keywords) of the structure {shown(self._program.arguments)}, "
                f"got {shown(spec)}"
            )
        for k, n in enumerate(self._program.inputs):
            if isinstance(n, Fixed) and n.value is not leaves[k] and n.value != leaves[k]:
                raise InputError(
                    f"argument {k} was {n.value!r} when the module was read, and is a part of the program; got "
                    f"{leaves[k]!r}"
                )
        if self._weights is not None and (self._weights.written() or self._weights.moved()):
            self.refit()
        given = [leaves[k] for k in self._kept]
        tensors = any(isinstance(x, torch.Tensor) for x in leaves)
        made = self.executable(*(_array(x) for x in given))
        many = made if isinstance(made, tuple) else (made,)
        return pytree.tree_unflatten(
            [self._result(r, many, given, tensors) for r in self._program.results], self._program.structure
        )

    def refit(self) -> None:
        """Look at the module's weights again. Nothing is compiled."""
        if self._weights is None:
            raise InputError("refit: the weights are constants of this program; compile it again")
        self.executable.refit({n: array_of(t) for n, t in self._program.parameters.items()})
        self._weights.note()

    def _result(self, r: Any, made: Sequence[Any], given: Sequence[Any], tensors: bool) -> Any:
        if isinstance(r, Output):
            x = made[r.index]
            return tensor_of(x) if tensors and isinstance(x, np.ndarray) else x
        if isinstance(r, Expr):
            sizes = bind_dims(self.executable.graph, [tuple(x.shape) for x in given])
            return value(substitute(r, {v: const(n) for v, n in sizes.items()}))
        return r

    def __repr__(self) -> str:
        return f"<TorchProgram of {self.executable!r}>"

    def __reduce__(self) -> Any:
        raise InputError(
            "a compiled module cannot be pickled or copied, for its weights are the module's: f.save(path) writes it "
            "with their values as constants, and dnnc.load(path) reads that; or pickle the module and compile it again"
        )

    def __getattr__(self, name: str) -> Any:
        """inputs, outputs, report, profile, source, save, ...: those of the executable."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.executable, name)


def shown(spec: Any) -> str:
    """A structure with its leaves as stars."""
    return str(pytree.tree_unflatten(["*"] * spec.num_leaves, spec)).replace("'*'", "*")


def _array(x: Any) -> Any:
    return array_of(x) if isinstance(x, torch.Tensor) and not x.is_cuda else x


def compile_module(
    model: Any, inputs: Any, progress: Progress | None, opts: CompileOptions, options: Mapping[str, Any]
) -> TorchProgram:
    """Compile a module, or what torch.export made of one; see `dnnc.compile`."""
    if inputs is None and isinstance(model, torch.nn.Module):
        raise InputError(
            "a module needs inputs=[...], a tensor as an example or a dnnc.Spec(shape, dtype) for each argument; "
            "torch.compile finds them"
        )
    args, kwargs, dynamic = examples(inputs)
    program = read_program(exported(model, args, kwargs, dynamic), dynamic)
    names = [v.name for v in program.graph.inputs]
    if opts.tune is not None and not isinstance(opts.tune, str):
        graph, _ = constant(program.graph, names, {n: array_of(t) for n, t in program.parameters.items()})
        return TorchProgram(program, dnnc.compile(graph, progress, **options))
    return TorchProgram(program, bind(program.graph, names, program.parameters, opts, progress))


def for_all_sizes(graph: Graph, opts: CompileOptions) -> CompileOptions:
    """Options for one program that serves all sizes within torch's bounds."""
    bounds = {
        n: (v.lo if isinstance(v.lo, int) else 0, v.hi if isinstance(v.hi, int) else LARGEST)
        for n, v in graph.dims.items()
    }
    return replace(opts, dims={**bounds, **opts.dims})
