"""The graph IR: SSA values made by nodes that stand in one order, with uses kept up to date.

A Graph is closed: a node reads only values of its own graph, so a subgraph (attribute of `cond`, `loop`, `scan`) gets
all it needs as inputs. Nodes form a linked list, so passes insert and erase while they walk. Every value has a name
that is unique in its graph and a Python identifier. Constants are read-only views and are hashed once.

Parameters are values whose contents stay the same from call to call but are not known here: foreign weights. They are
values of the `prologue`, a graph from users' arrays to what kernels read, which runs when the parameters change.
"""

from __future__ import annotations

import hashlib
import keyword
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import IntEnum
from html import escape
from typing import Any

import numpy as np

from dnnc.ir import dtype as dt
from dnnc.ir.errors import InternalError, Loc, ShapeError, count
from dnnc.ir.expr import Expr, Var, free
from dnnc.ir.op import Attrs, OpDef
from dnnc.ir.types import Encoding, TensorType


class Variance(IntEnum):
    """How often a value changes, from seldom to often: it decides where work on this value alone is done.

    NEVER: a constant; the work is folded.
    REFIT: a parameter, which `Executable.refit` replaces; the work goes into the prologue.
    STEP: donated state, which each call replaces; the work is a kernel of the program.
    CALL: every other input, and what nodes compute; likewise.
    """

    NEVER = 0
    REFIT = 1
    STEP = 2
    CALL = 3

    @property
    def call_invariant(self) -> bool:
        return self <= Variance.REFIT


class Printer:
    """How graphs become text. `dnnc.ir.graph.show`, which needs the classes below, fills it in."""

    graph: Callable[[Graph, bool], str]
    node: Callable[[Node], str]
    structure: Callable[[Graph], Iterator[str]]


class Value:
    """One tensor: a graph input, a constant (both have no node), or output `index` of a node."""

    __slots__ = ("index", "locs", "name", "node", "type", "uses")

    def __init__(
        self, name: str, type: TensorType, node: Node | None = None, index: int = 0, locs: tuple[Loc, ...] = ()
    ) -> None:
        self.name, self.type, self.node, self.index, self.locs = name, type, node, index, locs
        self.uses: dict[tuple[Node, int], None] = {}  # (user, position among its inputs), in the order they arose

    def __repr__(self) -> str:
        return f"{self.name}: {self.type}"


class Node:
    """One application of an op. Change its operands through `set_input` only, which keeps the uses right."""

    __slots__ = ("attrs", "graph", "inputs", "locs", "next", "op", "outputs", "prev")

    def __init__(
        self,
        op: OpDef,
        inputs: Sequence[Value | None],
        attrs: Attrs,
        types: Sequence[TensorType],
        locs: tuple[Loc, ...] = (),
        names: Sequence[str] = (),
    ) -> None:
        """A node that is in no graph yet; `names` are wishes for the outputs' names."""
        self.op, self.attrs, self.locs = op, attrs, locs
        self.inputs: list[Value | None] = list(inputs)
        self.outputs = [Value(names[i] if i < len(names) else "", t, self, i, locs) for i, t in enumerate(types)]
        self.graph: Graph | None = None
        self.prev: Node | None = None
        self.next: Node | None = None

    @property
    def output(self) -> Value:
        """The only output."""
        if len(self.outputs) != 1:
            raise InternalError(f"{self.op.name} has {count(len(self.outputs), 'output')} where one was expected")
        return self.outputs[0]

    def set_input(self, index: int, value: Value | None) -> None:
        """Read another value at one position."""
        old = self.inputs[index]
        if old is not None:
            old.uses.pop((self, index), None)
        self.inputs[index] = value
        if value is not None and self.graph is not None:
            value.uses[self, index] = None

    def subgraphs(self) -> Iterator[Graph]:
        """The graphs among the attributes."""
        for a in self.attrs.values():
            if isinstance(a, Graph):
                yield a

    def __repr__(self) -> str:
        return Printer.node(self)


class Graph:
    """A function from arrays to arrays. `dims` holds every symbolic dim that occurs in its types and attributes."""

    def __init__(self, name: str = "main") -> None:
        self.name = identifier(name)
        self.inputs: list[Value] = []
        self.outputs: list[Value] = []
        self.constants: dict[Value, np.ndarray[Any, Any]] = {}
        self.parameters: dict[Value, Value] = {}  # -> the value of the prologue that it holds
        self.prologue: Graph | None = None
        self.donated: dict[
            int, int
        ] = {}  # outputs that take the memory of an input, which is not needed after the call; both by number
        # inputs that only the program reads and writes, by number: their encoding, None where the passes choose one
        self.held: dict[int, Encoding | None] = {}
        self.internal: dict[int, Encoding | None] = {}  # outputs that other programs alone read: the same
        self.dims: dict[str, Var] = {}
        self._first: Node | None = None
        self._last: Node | None = None
        self._count = 0
        self._names: set[str] = set()
        self._next_number: dict[str, int] = {}
        self._digests: dict[Value, tuple[np.ndarray[Any, Any], str]] = {}

    # --- walking ---

    def nodes(self, reverse: bool = False) -> Iterator[Node]:
        """The nodes in order. The current node may be erased and nodes may be inserted or erased anywhere meanwhile."""
        n = self._last if reverse else self._first
        while n is not None:
            yield n
            n = n.prev if reverse else n.next
            while n is not None and n.graph is not self:  # an erased node still knows its old neighbours
                n = n.prev if reverse else n.next

    def first_node(self) -> Node | None:
        return self._first

    def __len__(self) -> int:
        return self._count

    def users(self, value: Value) -> list[Node]:
        """The nodes that read a value, each once."""
        return list(dict.fromkeys(n for n, _ in value.uses))

    def is_output(self, value: Value) -> bool:
        return any(v is value for v in self.outputs)

    # --- names and dims ---

    def fresh_name(self, stem: str = "") -> str:
        """Return a free name: the stem as an identifier, with `_0`, `_1`, ... if taken; v0, v1, ... without a stem."""
        if stem:
            stem = identifier(stem)
            if stem not in self._names:
                return stem
        n = self._next_number.get(stem, 0)
        head = stem + "_" if stem else "v"
        while f"{head}{n}" in self._names:
            n += 1
        self._next_number[stem] = n
        return f"{head}{n}"

    def rename(self, value: Value, stem: str) -> None:
        """Call a value `stem`, or stem_0, stem_1, ... where that is taken."""
        self._names.discard(value.name)
        value.name = self._claim(stem)

    def reserve(self, names: Collection[str]) -> None:
        """Keep names from being given to new values, until `release`."""
        self._names.update(names)

    def release(self, names: Collection[str]) -> None:
        """Allow reserved names again."""
        self._names.difference_update(names)

    def _claim(self, stem: str) -> str:
        name = self.fresh_name(stem)
        self._names.add(name)
        return name

    def declare(self, *dims: Any) -> None:
        """Enter the variables of dims, tuples, types, subgraphs into `self.dims`. ShapeError for a clash of names."""
        for d in dims:
            if isinstance(d, Expr):
                for v in sorted(free(d), key=lambda v: v.name):
                    self._declare_var(v)
            elif isinstance(d, tuple):
                self.declare(*d)
            elif isinstance(d, TensorType):
                self.declare(*d.shape)
            elif isinstance(d, Graph):
                self.declare(*d.dims.values())

    def _declare_var(self, v: Var) -> None:
        known = self.dims.get(v.name)
        if known is v:
            return
        if known is not None:
            raise ShapeError(
                f"graph {self.name}: the dim {v.name} stands for two dims, one in [{known.lo}, {known.hi}] divisible "
                f"by {known.div}, "
                f"one in [{v.lo}, {v.hi}] divisible by {v.div}; rename one of them"
            )
        self.declare(v.lo, v.hi)
        self.dims[v.name] = v

    def _declare_in(self, node: Node) -> None:
        for o in node.outputs:
            for d in o.type.shape:
                if not isinstance(d, int):
                    self.declare(d)
        for a in node.attrs.values():
            if not isinstance(a, (int, str, float)):
                self.declare(a)

    # --- building ---

    def add_input(self, name: str, type: TensorType, locs: tuple[Loc, ...] = ()) -> Value:
        """A further input; its name is made an identifier and unique."""
        self.declare(*type.shape)
        v = Value(self._claim(name), type, locs=locs)
        self.inputs.append(v)
        return v

    def constant(
        self, array: Any, name: str | None = None, locs: tuple[Loc, ...] = (), type: TensorType | None = None
    ) -> Value:
        """A constant of the array, not copied, and read-only from now. `type`: needed to attach a layout only."""
        a = np.asarray(array)
        a = a.astype(object) if a.dtype.kind in "UST" else a.view()
        a.flags.writeable = False
        v = Value(self._claim(name or "c"), type or TensorType(dt.from_numpy(a.dtype), a.shape), locs=locs)
        self.constants[v] = a
        return v

    def variance(self, value: Value | None) -> Variance:
        """How often a value changes. Node results are `CALL`: constants' dependents fold, parameters' are hoisted."""
        if value in self.constants:
            return Variance.NEVER
        if value in self.parameters:
            return Variance.REFIT
        is_input = value is not None and value.node is None
        state = is_input and any(self.inputs[k] is value for k in self.donated.values())
        return Variance.STEP if state else Variance.CALL

    def bind_inputs(self, names: Collection[str]) -> None:
        """Make parameters of the inputs of these names."""
        made = self.prologue = self.prologue or Graph("prologue")
        for v in [v for v in self.inputs if v.name in names]:
            self.inputs.remove(v)
            self.parameters[v] = made.add_input(v.name, v.type, v.locs)

    def parameter(self, source: Value, type: TensorType, name: str) -> Value:
        """The parameter that holds a value of the prologue, in a layout of its own if `type` has one."""
        for v, held in self.parameters.items():
            if held is source and v.type == type:
                return v
        v = Value(self._claim(name), type, locs=source.locs)
        self.parameters[v] = source
        return v

    def erase_parameter(self, value: Value) -> None:
        """Remove a parameter that nobody reads."""
        if value.uses or self.is_output(value):
            raise InternalError(f"cannot erase the parameter {value.name}: it is still read")
        del self.parameters[value]
        self._names.discard(value.name)

    def append(self, node: Node) -> Node:
        """Put a node at the end."""
        return self._attach(node, self._last, None)

    def insert_before(self, node: Node, anchor: Node) -> Node:
        """Put a node in front of another."""
        return self._attach(node, anchor.prev, anchor)

    def _attach(self, node: Node, before: Node | None, after: Node | None) -> Node:
        if node.graph is not None:
            raise InternalError(f"{node.op.name} is already in graph {node.graph.name}")
        self._declare_in(node)
        node.graph = self
        for i, v in enumerate(node.inputs):
            if v is not None:
                v.uses[node, i] = None
        for o in node.outputs:
            o.name = self._claim(o.name)
        self._link(before, node)
        self._link(node, after)
        self._count += 1
        return node

    def _link(self, a: Node | None, b: Node | None) -> None:
        if a is None:
            self._first = b
        else:
            a.next = b
        if b is None:
            self._last = a
        else:
            b.prev = a

    # --- rewriting ---

    def erase(self, node: Node) -> None:
        """Remove a node whose outputs nobody reads."""
        for o in node.outputs:
            if o.uses or self.is_output(o):
                raise InternalError(f"cannot erase {node!r}: {o.name} is still read")
        for i, v in enumerate(node.inputs):
            if v is not None:
                v.uses.pop((node, i), None)
        for o in node.outputs:
            self._names.discard(o.name)
        before, after = node.prev, node.next
        self._link(before, after)
        node.graph = None  # prev and next stay: walks that stand on the node go on from there
        self._count -= 1

    def redefine(
        self, node: Node, inputs: Sequence[Value | None], attrs: Attrs, outputs: Sequence[Value | TensorType]
    ) -> None:
        """Give a node other operands, attributes and results; `outputs` has its own values, and types of new ones."""
        for i, v in enumerate(node.inputs):
            if v is not None:
                v.uses.pop((node, i), None)
        node.inputs, node.attrs = list(inputs), attrs
        for i, v in enumerate(node.inputs):
            if v is not None:
                v.uses[node, i] = None
        dropped = [o for o in node.outputs if o not in outputs]
        if any(o.uses or self.is_output(o) for o in dropped):
            raise InternalError(f"cannot take results from {node!r}: they are still read")
        self.release([o.name for o in dropped])
        node.outputs = [o if isinstance(o, Value) else Value(self._claim(""), o, node, locs=node.locs) for o in outputs]
        for k, o in enumerate(node.outputs):
            o.index = k
        self._declare_in(node)

    def adopt(self, old: Value, new: Value) -> None:
        """Let the node that makes `new` make `old` in its place, for all readers of either."""
        assert new.node is not None and old.node is not None
        self.replace_all_uses(new, old)
        self.release([new.name])
        old.node.outputs[old.index] = new
        new.node.outputs[new.index] = old
        old.node, old.index, new.node, new.index = new.node, new.index, old.node, old.index

    def erase_constant(self, value: Value) -> None:
        """Remove a constant that nobody reads."""
        if value.uses or self.is_output(value):
            raise InternalError(f"cannot erase the constant {value.name}: it is still read")
        del self.constants[value]
        self._digests.pop(value, None)
        self._names.discard(value.name)

    def replace_all_uses(self, old: Value, new: Value, keep: Collection[Node] = ()) -> None:
        """Let every reader of `old`, the graph's outputs included, read `new`.

        The node that makes `new` and those in `keep` go on reading `old`. `new` gets the union of the locations; an
        output keeps its name where `new` is made by a node.
        """
        if old is new:
            return
        for node, i in list(old.uses):
            if node is not new.node and node not in keep:
                node.set_input(i, new)
        if self.is_output(old):
            if new.node is not None and not self.is_output(new):
                old.name, new.name = new.name, old.name
            self.outputs = [new if v is old else v for v in self.outputs]
        new.locs = union(new.locs, old.locs)
        if new.node is not None:
            new.node.locs = union(new.node.locs, old.locs)

    def copy(self) -> Graph:
        """A copy with its own values, nodes and subgraphs; arrays are shared."""
        return self._copied({})[0]

    def copy_parameters(self, new: Graph, env: dict[Value | None, Value], known: Copies) -> None:
        """Copy parameters and prologue to another graph (`known`: an existing copy) and enter them into `env`."""
        if self.prologue is None:
            return
        if self.prologue not in known:
            known[self.prologue] = self.prologue._copied({})
        new.prologue, held = known[self.prologue]
        for v, source in self.parameters.items():
            p = env[v] = Value(new._claim(v.name), v.type, locs=v.locs)
            new.parameters[p] = held[source]

    def _copied(self, known: Copies) -> tuple[Graph, dict[Value | None, Value]]:
        """Return a copy and its values by this graph's. `known`: prologue copies, shared by graph and bodies."""
        new = Graph(self.name)
        new.dims = dict(self.dims)
        env: dict[Value | None, Value] = {}
        for v in self.inputs:
            env[v] = new.add_input(v.name, v.type, v.locs)
        self.copy_parameters(new, env, known)
        for v, a in self.constants.items():
            c = env[v] = new.constant(a, v.name, v.locs, v.type)
            self.share_digest(v, new, c)
        for n in self.nodes():
            attrs = {k: a._copied(known)[0] if isinstance(a, Graph) else a for k, a in n.attrs.items()}
            types, names = [o.type for o in n.outputs], [o.name for o in n.outputs]
            m = new.append(Node(n.op, [env.get(v) for v in n.inputs], attrs, types, n.locs, names))
            for o, p in zip(n.outputs, m.outputs):
                p.locs = o.locs
                env[o] = p
        new.outputs = [env[v] for v in self.outputs]
        new.donated, new.held, new.internal = dict(self.donated), dict(self.held), dict(self.internal)
        return new, env

    # --- hashing and text ---

    def digest(self, value: Value) -> str:
        """The content hash of a constant, `sha256:` and 16 hex digits; computed once per array."""
        array = self.constants[value]
        known = self._digests.get(value)
        if known is None or known[0] is not array:
            known = self._digests[value] = (array, digest(array))
        return known[1]

    def share_digest(self, value: Value, other: Graph, same: Value) -> None:
        """Tell another graph the hash of a constant that holds the same data, if it is known here."""
        known = self._digests.get(value)
        if known is not None and known[0] is self.constants[value]:
            other._digests[same] = (other.constants[same], known[1])

    def structural_hash(self) -> str:
        """sha256 of all but names and locations: equal for graphs with the same nodes in the same order."""
        h = hashlib.sha256()
        for line in Printer.structure(self):
            h.update(line.encode())
        return h.hexdigest()

    def text(self, locs: bool = False) -> str:
        """Return the text that `dnnc.ir.graph.text.parse` reads back; `locs` adds comments with origins."""
        return Printer.graph(self, locs)

    def __repr__(self) -> str:
        took, gave = (", ".join(f"{v.name}: {v.type}" for v in some) for some in (self.inputs, self.outputs))
        text = f"<Graph {self.name}: {count(len(self), 'node')}, ({took}) -> {gave}>"
        return text if len(text) <= 160 else text[:156] + " ...>"

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        """For notebooks: the text below a line that unfolds it."""
        lines = self.text().split("\n")
        more = f"\n... {len(lines) - SHOWN_LINES} lines more: print it" if len(lines) > SHOWN_LINES else ""
        text = escape("\n".join(lines[:SHOWN_LINES]) + more)
        return f"<details><summary><code>{escape(repr(self))}</code></summary><pre>{text}</pre></details>"


Copies = dict[Graph, tuple[Graph, dict["Value | None", Value]]]  # of prologues, with their values


SHOWN_LINES = 300  # of a text in a notebook


def identifier(name: str) -> str:
    """`name` as an ASCII Python identifier that is no keyword: other characters become `_`."""
    s = re.sub(r"[^0-9a-zA-Z_]", "_", name) or "v"
    if s[0].isdigit():
        s = "v" + s
    return s + "_" if keyword.iskeyword(s) else s


def union(a: tuple[Loc, ...], b: tuple[Loc, ...]) -> tuple[Loc, ...]:
    """Both sets of locations, in order, each once."""
    if not a or not b or a == b:
        return a or b
    return tuple(dict.fromkeys(a + b))


def digest(array: np.ndarray[Any, Any]) -> str:
    """`sha256:` and the first 16 hex digits of the hash of dtype, shape and content."""
    h = hashlib.sha256(f"{dt.from_numpy(array.dtype)}{list(array.shape)}".encode())
    if array.dtype.kind in "OUST":
        for s in array.ravel():
            data = s if isinstance(s, bytes) else str(s).encode("utf-8", "surrogatepass")
            h.update(b"%d:" % len(data) + data)
    elif array.size:
        h.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return "sha256:" + h.hexdigest()[:16]
