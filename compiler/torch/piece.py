"""A torch graph as programs: compiled for its weights and sizes, called with tensors, giving tensors."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import fx

from dnnc.frontends.torch.dims import Dims
from dnnc.frontends.torch.importer import KEY, Read, read_fx
from dnnc.frontends.torch.tensors import array_of, tensor_of
from dnnc.ir.errors import DnncError, DnncWarning
from dnnc.ir.expr import Var
from dnnc.ir.graph.builder import Builder
from dnnc.ir.lru import LRU
from dnnc.ir.types import TensorType
from dnnc.options import CompileOptions, steps_down
from dnnc.passes.analysis.segments import needs_host
from dnnc.torch.boundary import Boundary
from dnnc.torch.memory import Given, View, number, results_of, stored
from dnnc.torch.program import Weights, bind, for_all_sizes

PROGRAMS = 16  # kept of one graph: for other weights, and for sizes that no program serves together


@dataclass(frozen=True)
class Taken:
    """An argument of a program: its position, the order of its axes in memory if not row-major, its dtype.

    `name`: of a tensor that the forward program saved; `want`: how the program reads it.
    """

    position: int
    perm: tuple[int, ...] | None
    dtype: torch.dtype
    name: str = ""
    want: TensorType | None = None


class Ready:
    """A program for certain weights, and for all sizes or certain ones."""

    __slots__ = ("bound", "call", "executable", "plain", "results", "shares", "sizes", "taken", "weights")

    def __init__(
        self,
        executable: Any,
        taken: Sequence[Taken],
        results: Sequence[Any],
        weights: Weights,
        sizes: Any,
        bound: Mapping[str, torch.Tensor],
        instance: Any = None,
    ) -> None:
        """`instance`: of the executable, where arguments or results may not lie in rows."""
        self.executable, self.taken, self.results, self.weights, self.sizes, self.bound = (
            executable,
            taken,
            results,
            weights,
            sizes,
            bound,
        )
        self.call = executable if instance is None else lambda *args: instance.call(args)
        self.plain = all(isinstance(r, Given) for r in results)
        self.shares = bool(getattr(executable, "parameters", ()))


class Piece:
    """A torch graph, compiled at the first call, which has the weights; unsupported parts fail at once.

    Args:
        module: the graph.
        options: those of compilation.
        static: numbers of the inputs that stay from call to call: weights.
        boundary: between this graph and the other half, of a graph with gradients.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        options: CompileOptions,
        static: Sequence[int] = (),
        boundary: Boundary | None = None,
    ) -> None:
        self.boundary = boundary or Boundary()
        self.module = module
        self.places = [n for n in module.graph.nodes if n.op == "placeholder"]
        self.fakes = [n.meta.get("val") for n in self.places]
        tensors = [f for f in self.fakes if isinstance(f, torch.Tensor)]
        results = [n.meta.get("val") for n in _results(module) if isinstance(n, fx.Node)]
        device = next(
            (t.device for t in [*tensors, *results] if isinstance(t, torch.Tensor) and t.device.type != "cpu"),
            torch.device("cpu"),
        )
        self.device = device
        self.options = (
            replace(options, target=str(device)) if device.type == "cuda" and options.target == "llvm" else options
        )
        self.static = list(static)
        self.weights_of: Any = (
            itemgetter(*self.static) if len(self.static) > 1 else lambda args: [args[k] for k in self.static]
        )
        self.sizes = [k for k, f in enumerate(self.fakes) if isinstance(f, torch.SymInt)]
        self.symbols = {k: str(self.fakes[k].node.expr) for k in self.sizes if self.fakes[k].node.expr.is_Symbol}
        self.open = self._check()
        self.programs: LRU[Any, Ready] = LRU(PROGRAMS)
        self.last: Ready | None = None

    # --- reading ------------------------------------------------------------------------------------------------------

    def _check(self) -> bool:
        """Does one program serve all sizes? Reads the graph, so that errors come when torch compiles, not at a call."""
        if not self.sizes:
            self.read({})
            return True
        try:
            read = self.read({})
        except DnncError:
            self.read({s: self.fakes[k].node.hint for k, s in self.symbols.items()})
            return False
        told = {d for v in read.graph.inputs for d in v.type.shape if isinstance(d, Var)}
        return all(v in told for v in read.graph.dims.values())

    def read(self, known: Mapping[str, int]) -> Read:
        read = read_fx(self.module, Dims(known), random=True)
        self.random = KEY in read.inputs
        return read

    # --- calls --------------------------------------------------------------------------------------------------------

    def __call__(self, args: list[Any]) -> list[Any]:
        ready = self.last
        weights = self.weights_of(args)
        if (
            ready is None
            or ready.sizes != self._sizes(args)
            or list(map(torch.Tensor.data_ptr, weights)) != ready.weights.addresses
        ):
            ready = self.last = self._find(args, weights)
        elif ready.weights.written():
            ready = self.last = self._again(ready, args, weights)
        if ready.executable is None:
            made = self.module.forward(*self.boundary.all_rows(self.places, args))
            return list(made) if isinstance(made, (tuple, list)) else [made]
        if self.random:
            args = [*args, drawn_key()]
        made = ready.call(*[self._argument(args[t.position], t) for t in ready.taken])
        many = made if isinstance(made, (tuple, list)) else (made,)
        return self._results(ready, many, args)

    def _sizes(self, args: Sequence[Any]) -> Any:
        return None if self.open else tuple([args[k] for k in self.sizes])

    def _find(self, args: Sequence[Any], weights: Sequence[torch.Tensor]) -> Ready:
        key = self._sizes(args), tuple(map(torch.Tensor.data_ptr, weights))
        found = self.programs.find(key)
        if found is None or found.weights.written():
            try:
                found = self._make(args, weights)
            except Exception as e:  # whatever it is, eager PyTorch can run the graph
                if not steps_down(self.options):
                    raise
                warnings.warn(f"a graph runs in eager PyTorch: {e!r}", DnncWarning, stacklevel=4)
                found = Ready(None, (), (), Weights([]), key[0], {})
                found.weights.addresses = list(key[1])
            self.programs[key] = found
        return found

    def _again(self, ready: Ready, args: Sequence[Any], weights: Sequence[torch.Tensor]) -> Ready:
        """The owner has written to weights."""
        if not ready.shares:
            return self._find(args, weights)
        ready.executable.refit(
            {n: array_of(t) for n, t in ready.bound.items()}
        )  # of a tensor that is not contiguous, a copy
        ready.weights.note()
        return ready

    def _argument(self, t: torch.Tensor, how: Taken) -> Any:
        if how.want is not None:
            return self.boundary.array(how.name, t, how.want)
        t = t.detach() if t.requires_grad else t
        t = t if how.perm is None else t.permute(how.perm)
        t = t if t.dtype is how.dtype else t.to(how.dtype)  # eager kernels do not always do what torch says of them
        if self.device.type != "cpu":
            return t.to(self.device)
        return array_of(t) if t.dtype is torch.bfloat16 or not t.is_contiguous() else t.numpy()

    def _results(self, ready: Ready, made: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        sizes = lambda: {s: args[k] for k, s in self.symbols.items()}  # noqa: E731
        found = [self._tensor(made[r.output], r.perm) if isinstance(r, Given) else r for r in ready.results]
        if ready.plain:
            return found
        return [r.make(args, found, sizes) if isinstance(r, View) else number(r, sizes) for r in found]

    def _tensor(self, x: Any, perm: tuple[int, ...] | None) -> torch.Tensor:
        t = tensor_of(x) if isinstance(x, np.ndarray) else x
        t = t.to(self.device) if t.device != self.device and self.device.type != "cpu" else t
        return t if perm is None else t.permute(perm)

    # --- programs -----------------------------------------------------------------------------------------------------

    def _make(self, args: Sequence[Any], weights: Sequence[torch.Tensor]) -> Ready:
        known = {} if self.open else {s: args[k] for k, s in self.symbols.items()}
        read = self.read(known)
        graph, order = read.graph, {n.name: k for k, n in enumerate(self.places)} | {KEY: len(self.places)}
        shared = self.boundary.open and self.device.type == "cpu" and not graph.dims and not needs_host(graph)
        b, taken, names, bound = Builder(graph), [], [v.name for v in graph.inputs], {}
        for v, place in zip(list(graph.inputs), read.inputs):
            k = order[place]
            if place == KEY:
                taken.append(Taken(k, None, torch.uint32))
            elif k in self.static:
                bound[v.name] = args[k]
            elif place in self.boundary.types:
                taken.append(Taken(k, None, self.fakes[k].dtype, place, v.type))
            else:
                taken.append(Taken(k, stored(b, v, self.fakes[k]), self.fakes[k].dtype))
        saves = self._saves() if shared else {}
        given = results_of(b, read, self.fakes, self._fake_results(), Dims(known), saves)
        if not graph.outputs:
            return Ready(lambda *_: (), (), given, Weights(weights), self._sizes(args), {})
        options = for_all_sizes(graph, self.options) if self.open else self.options
        types = self.boundary.types
        held = {i: types[t.name].encoding for i, t in enumerate(taken) if t.want is not None} if shared else {}
        internal = {r.output: saves[k] for k, r in enumerate(given) if isinstance(r, Given) and r.internal}
        known_as = {i: types[n].encoding if n in types else None for i, n in internal.items()}
        made = bind(graph, names, bound, options, held=held, internal=known_as)
        if not held and not internal:
            return Ready(made, taken, given, Weights(weights), self._sizes(args), bound)
        shapes = [[int(str(d)) for d in v.shape] for v in made.inputs]
        instance = made.cache.instance(tuple(map(tuple, shapes)))
        program = instance.program
        taken = [t if t.want is None else replace(t, want=program.inputs[i]) for i, t in enumerate(taken)]
        self.boundary.types = {**types, **{n: program.outputs[i] for i, n in internal.items() if n not in types}}
        return Ready(made, taken, given, Weights(weights), self._sizes(args), bound, instance)

    def _saves(self) -> dict[int, str]:
        """The tensors that this graph saves for the other half, by the numbers of results."""
        return {
            k: n.name
            for k, n in enumerate(_results(self.module))
            if isinstance(n, fx.Node) and n.name in self.boundary.saved and n.op != "placeholder"
        }

    def _fake_results(self) -> list[Any]:
        return [r.meta.get("val") if isinstance(r, fx.Node) else r for r in _results(self.module)]


def drawn_key() -> torch.Tensor:
    """A key u32[2] for the random numbers of a call, by torch's generator: `torch.manual_seed` decides it."""
    return torch.randint(-(1 << 31), 1 << 31, (2,), dtype=torch.int32).view(torch.uint32)


def _results(module: fx.GraphModule) -> Sequence[Any]:
    (out,) = next(n for n in module.graph.nodes if n.op == "output").args
    return out if isinstance(out, (tuple, list)) else (out,)
