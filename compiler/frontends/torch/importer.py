"""From a torch fx graph of ATen operators to the graph IR. Every result is checked against torch's type."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from dnnc.frontends.torch.call import Call
from dnnc.frontends.torch.dims import Dims
from dnnc.frontends.torch.operators import IGNORED, REFUSED, TABLE
from dnnc.frontends.torch.reals import real
from dnnc.frontends.torch.source import located, source_of
from dnnc.frontends.torch.tensors import array_of, dtype_of
from dnnc.ir.dtype import u32
from dnnc.ir.errors import DnncError, InternalError, UnsupportedError
from dnnc.ir.expr import Expr
from dnnc.ir.graph import Graph, Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.types import TensorType

KEY = "random_key"  # the name of an input u32[2] that random operators draw by


@dataclass(frozen=True)
class Read:
    """A graph that was read. `inputs`: their placeholders; `results`: output numbers, dims or plain values.

    A graph with random operators has the input `KEY` beside the placeholders' inputs.
    """

    graph: Graph
    inputs: tuple[str, ...]
    results: tuple[Any, ...]


@dataclass(frozen=True)
class Output:
    """Result number `index` of the graph."""

    index: int


def read_fx(
    module: fx.GraphModule,
    dims: Dims,
    names: Mapping[str, str] | None = None,
    constants: Mapping[str, Any] | None = None,
    random: bool = False,
) -> Read:
    """The graph of a program.

    Args:
        module: in ATen operators, without mutation; nodes know their results (`meta["val"]`).
        dims: what sizes are.
        names: what to call inputs, by placeholder.
        constants: tensors, by placeholder, that are no inputs.
        random: may operators draw random numbers, by a key that the caller draws for each call?

    Raises:
        UnsupportedError: an operator that has no form in graphs; says which, where in the user's code, and what to do.
    """
    reader = Reader(module, dims, names or {}, constants or {}, random)
    for node in module.graph.nodes:
        reader.read(node)
    return reader.done()


class Reader:
    """`env` holds of each fx node a Value, a dim or number, a tuple of them, or None."""

    def __init__(
        self,
        module: fx.GraphModule,
        dims: Dims,
        names: Mapping[str, str],
        constants: Mapping[str, Any],
        random: bool = False,
    ) -> None:
        self.module, self.dims, self.names, self.constants = module, dims, names, constants
        self.keys = Keys(self) if random else None
        self.graph = Graph("program")
        self.b = Builder(self.graph)
        self.env: dict[fx.Node, Any] = {}
        self.inputs: list[str] = []
        self.results: tuple[Any, ...] = ()

    def read(self, node: fx.Node) -> None:
        self.b.locs = source_of(node)
        try:
            if node.op == "placeholder":
                self.env[node] = self._placeholder(node)
            elif node.op == "get_attr":
                self.env[node] = self._attribute(node)
            elif node.op == "call_function":
                self.env[node] = self._call(node)
            elif node.op == "output":
                self._output(node)
            else:
                raise UnsupportedError(f"{node.op} {node.target}: expected a program in ATen operators")
        except DnncError as e:
            located(e, node)
            raise

    # --- what comes in ---

    def _placeholder(self, node: fx.Node) -> Any:
        fake = node.meta.get("val")
        if isinstance(fake, torch.Tensor):
            if node.name in self.constants:
                return self._constant(self.constants[node.name], node.name)
            if fake.layout is not torch.strided or fake.is_complex():
                raise UnsupportedError(
                    f"input {node.name} is a {fake.layout} tensor of {fake.dtype}; expected a dense one of real numbers"
                )
            self.inputs.append(node.name)
            name = self.names.get(node.name, node.name)
            return self.graph.add_input(
                name, TensorType(dtype_of(fake.dtype), self.dims.shape(fake.shape)), self.b.locs
            )
        return self._number(fake)

    def _attribute(self, node: fx.Node) -> Any:
        found: Any = self.module
        for part in str(node.target).split("."):
            found = getattr(found, part)
        return self._constant(found, node.name) if isinstance(found, torch.Tensor) else found

    def _constant(self, t: Any, name: str) -> Value:
        if isinstance(t, np.ndarray):
            return self.graph.constant(t, name, self.b.locs)
        if t.dtype.is_complex or t.layout is not torch.strided:
            raise UnsupportedError(f"{name} is a {t.layout} tensor of {t.dtype}; expected a dense one of real numbers")
        with unset_fake_temporarily():  # torch compiles in a mode in which tensors have no contents
            return self.graph.constant(array_of(t), name, self.b.locs)

    def _number(self, v: Any) -> Any:
        """A number, a size, or what else stands in a schema that is no tensor."""
        if isinstance(v, torch.SymInt):
            return self.dims.of(v)
        if isinstance(v, torch.SymBool):
            return self.dims.value(v)
        if isinstance(v, torch.SymFloat):
            e = self.dims.known_part(v.node.expr)
            return real(self.b, self.dims, e) if e.free_symbols else float(e)
        return v

    # --- calls ---

    def _call(self, node: fx.Node) -> Any:
        target: Any = node.target
        if target is operator.getitem:
            of, k = node.args
            return self._resolved(of)[k]
        fake = node.meta.get("val")
        if isinstance(fake, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)):
            return _Later(self, fake)
        if not isinstance(target, torch._ops.OpOverload):
            raise UnsupportedError(f"{_title(target)} has no form in a graph{_advice(_title(target))}")
        name = target._schema.name.removeprefix("aten::")
        if name in IGNORED:
            return None
        convert = TABLE.get(name)
        if convert is None:
            raise UnsupportedError(f"{_title(target)} has no form in a graph{_advice(name)}")
        outs = [o for o in fake] if isinstance(fake, (tuple, list)) else [fake]
        wanted = _wanted(node) if isinstance(fake, (tuple, list)) else frozenset((0,))
        args, fakes = self._arguments(node, target)
        made = convert(Call(self.b, target, args, fakes, outs, self.dims, wanted, self.keys))
        if isinstance(fake, (tuple, list)):
            made = tuple(made)
            for k in wanted:
                self._check(node, made[k], outs[k])
            return made
        self._check(node, made, fake)
        return made

    def _arguments(self, node: fx.Node, target: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        args: dict[str, Any] = {}
        fakes: dict[str, Any] = {}
        for k, a in enumerate(target._schema.arguments):
            given = node.args[k] if k < len(node.args) else node.kwargs.get(a.name, a.default_value)
            args[a.name], fakes[a.name] = self._resolved(given), _fake(given)
        return args, fakes

    def _resolved(self, a: Any) -> Any:
        if isinstance(a, fx.Node):
            v = self.env[a]
            return v.get() if isinstance(v, (_Later, Refused)) else v
        if isinstance(a, (tuple, list)):
            return [self._resolved(x) for x in a]
        return a

    def _check(self, node: fx.Node, made: Any, fake: Any) -> None:
        """InternalError where a converter made another type than torch says: better no program than a wrong one."""
        if fake is None:
            return
        want = TensorType(dtype_of(fake.dtype), self.dims.shape(fake.shape))
        if (
            not isinstance(made, Value)
            or made.type.dtype is not want.dtype
            or made.type.rank != want.rank
            or _differ(made.type, want)
        ):
            raise InternalError(f"{_title(node.target)} was read as {getattr(made, 'type', made)}, torch says {want}")

    # --- what goes out ---

    def _output(self, node: fx.Node) -> None:
        flat = node.args[0] if isinstance(node.args[0], (tuple, list)) else (node.args[0],)
        results: list[Any] = []
        for a in flat:
            v = self._resolved(a)
            if isinstance(v, Value):
                results.append(Output(len(self.graph.outputs)))
                self.graph.outputs.append(v)
            else:
                results.append(v)
        self.results = tuple(results)

    def done(self) -> Read:
        return Read(self.graph, tuple(self.inputs), self.results)


class _Later:
    """A number that torch computed from sizes; looked at where something needs it: some are only asserted about."""

    def __init__(self, reader: Reader, fake: Any) -> None:
        self.reader, self.fake = reader, fake

    def get(self) -> Any:
        return self.reader._number(self.fake)


class Keys:
    """A key for each random operator of a graph: the input's, its second word one more from operator to operator."""

    def __init__(self, reader: Reader) -> None:
        self.reader, self.drawn = reader, 0
        self.given: Value | None = None

    def next(self) -> Value:
        b = self.reader.b
        if self.given is None:
            self.given = self.reader.graph.add_input(KEY, TensorType(u32, (2,)))
            self.reader.inputs.append(KEY)
        self.drawn += 1
        step: Value = b.add(self.given, b.constant(np.array([0, self.drawn], np.uint32)))
        return step


@dataclass(frozen=True)
class Refused:
    """The result of a node that has no form in a graph, and is of no type that an input could have."""

    why: str

    def get(self) -> Any:
        raise UnsupportedError(self.why)


class Probe(Reader):
    """Reads what has a form in graphs. `refused` says of each other node why it has none."""

    def __init__(self, module: fx.GraphModule, dims: Dims) -> None:
        super().__init__(module, dims, {}, {}, random=True)
        self.refused: dict[fx.Node, str] = {}

    def read(self, node: fx.Node) -> None:
        if node.op == "output":
            return
        try:
            super().read(node)
        except Exception as e:  # whatever it is, eager PyTorch can run the node
            title, why = _title(node.target), str(e) if isinstance(e, DnncError) else repr(e)
            self.refused[node] = why if title in why else f"{title}: {why}"
            fake = node.meta.get("val")
            many = isinstance(fake, (tuple, list))
            self.env[node] = tuple(self._stand_in(f) for f in fake or ()) if many else self._stand_in(fake)

    def _stand_in(self, fake: Any) -> Any:
        """An input in the place of a result that is computed elsewhere."""
        try:
            if not isinstance(fake, torch.Tensor):
                return self._number(fake)
            if fake.layout is not torch.strided:
                return Refused(f"a {fake.layout} tensor")
            return self.graph.add_input("elsewhere", TensorType(dtype_of(fake.dtype), self.dims.shape(fake.shape)))
        except DnncError as e:
            return Refused(str(e))


def refused(module: fx.GraphModule, dims: Dims) -> dict[fx.Node, str]:
    """The nodes of a program that have no form in graphs, and why."""
    probe = Probe(module, dims)
    for node in module.graph.nodes:
        probe.read(node)
    return probe.refused


def _fake(a: Any) -> Any:
    if isinstance(a, fx.Node):
        return a.meta.get("val")
    if isinstance(a, (tuple, list)):
        return [_fake(x) for x in a]
    return a


def _wanted(node: fx.Node) -> frozenset[int]:
    """Which results of several are read."""
    return frozenset(int(str(u.args[1])) for u in node.users if u.target is operator.getitem and u.users)


def _differ(a: TensorType, b: TensorType) -> bool:
    """Do two shapes surely differ? Symbolic sizes may be written in two ways."""
    return any(isinstance(m, int) and isinstance(n, int) and m != n for m, n in zip(a.shape, b.shape))


def _title(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return getattr(target, "__name__", str(target))


def _advice(name: str) -> str:
    known: Sequence[str] = [v for k, v in REFUSED.items() if k == name]
    return (
        f": {known[0]}"
        if known
        else "; write it in operators that have one (docs/pytorch.md), or keep it outside of what is compiled"
    )


__all__ = ["KEY", "Expr", "Output", "Read", "read_fx", "refused"]
