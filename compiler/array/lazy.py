"""Lazy values: what an array is before anybody looks at it.

A Lazy is one result of an op that has not run (`call`), a buffer (`data`), or neither: a placeholder, which stands for an argument of a traced
function. `materialise` makes one program of all that is asked for and replaces it by buffers; `graph_of` makes the same graph for a trace.

Programs are found again by their structure: ops, attributes, types and wiring. Data is no part of it, numbers of the user's included: they are
operands without axes, so `x * 0.1` and `x * 0.2` share a program. Results of which an array still knows become results of the program too,
where computing them again would cost: those of products, reductions and sorts at once, element-wise ones the second time.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np

from dnnc.array.lines import no_data, user_line
from dnnc.ir.builder import complete, infer
from dnnc.ir.dtype import from_numpy
from dnnc.ir.errors import InputError, Loc
from dnnc.ir.expr import var
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.op import OpDef
from dnnc.ir.ops import OPS
from dnnc.ir.types import TensorType

Array = np.ndarray[Any, Any]
FLAT_SIZE = 1 << 18  # elements up to which one program serves all sizes; beyond, knowing the size is worth a program
PROGRAMS = 512  # programs kept in a process
DEEPEST = 64  # calls on top of each other: chains that nobody looks at are computed piece by piece, and pieces of a loop are one program
HEAVY = ("contraction", "reduction", "loops", "host", "sized")  # traits of ops that are not computed twice
HEAVY_OPS = frozenset(("sort", "cumsum", "cumprod", "dft", "det", "inverse", "scatter_nd", "scatter_elements"))


class Call:
    """One application of an op. `key` is what a program's structure says of it.

    A traced one has a `number`, larger than those of the calls before, and the line of the user's code in `locs`.
    """

    __slots__ = ("attrs", "heavy", "inputs", "key", "locs", "number", "op", "types")
    counted = itertools.count(1)

    def __init__(self, op: OpDef, inputs: tuple[Lazy | None, ...], attrs: dict[str, Any], types: tuple[TensorType, ...]) -> None:
        self.op, self.inputs, self.attrs, self.types = op, inputs, attrs, types
        self.key = (op.name, *attrs.values())
        self.number = 0
        self.locs: tuple[Loc, ...] = ()
        self.heavy = op.name in HEAVY_OPS or any(t in op.traits for t in HEAVY) or any(x is not None and x.heavy for x in inputs)

    def trace(self) -> None:
        """Say where in the user's code, and in which order of the trace, this is."""
        self.number, self.locs = next(self.counted), (user_line()[0],)


class Lazy:
    """One value; see above. `owner` is a weak reference to the array that shows it to the user."""

    __slots__ = ("call", "data", "depth", "index", "owner", "seen", "traced", "type")

    depth: int
    traced: bool

    def __init__(self, type: TensorType, call: Call | None = None, index: int = 0, data: Array | None = None) -> None:
        self.type, self.call, self.index, self.data = type, call, index, data
        inputs = () if call is None else tuple(x for x in call.inputs if x is not None)
        self.depth = 0 if call is None else 1 + max((x.depth for x in inputs), default=0)
        self.traced = any(x.traced for x in inputs) if call is not None else data is None  # does it depend on a placeholder?
        self.seen = False  # computed once within a program that did not keep it
        self.owner: weakref.ref[Any] | None = None

    @property
    def heavy(self) -> bool:
        return self.call is not None and self.call.heavy

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape  # type: ignore[return-value]


def leaf(data: Any) -> Lazy:
    """A buffer as a value. It is kept, not copied, if it is contiguous."""
    a = np.ascontiguousarray(data) if np.ndim(data) else np.asarray(data)
    return Lazy(TensorType(from_numpy(a.dtype), a.shape), data=a)


def placeholder(type: TensorType) -> Lazy:
    """An argument of a function that is traced."""
    return Lazy(type)


def apply(name: str, *inputs: Lazy | None, **attrs: Any) -> Lazy:
    """The result of an op with one. ShapeError where the operands' types do not fit."""
    return apply_all(name, *inputs, **attrs)[0]


def apply_all(name: str, *inputs: Lazy | None, **attrs: Any) -> tuple[Lazy, ...]:
    """The results of an op."""
    op = OPS[name]
    full = complete(op, attrs)
    call = Call(op, inputs, full, tuple(infer(op, inputs, full)))  # type: ignore[arg-type]  # a rule reads the types alone
    made = tuple(Lazy(t, call, k) for k, t in enumerate(call.types))
    if made[0].traced:
        call.trace()
    if not made[0].traced and any(0 in t.shape for t in call.types):  # nothing to compute
        return tuple(Lazy(t, data=np.empty(x.shape, t.dtype.numpy)) if 0 in t.shape else x for t, x in zip(call.types, made))
    if made[0].depth >= DEEPEST and not made[0].traced:
        materialise([x for x in inputs if x is not None and x.call is not None])
        return tuple(Lazy(t, call, k) for k, t in enumerate(call.types))
    return made


# --- structure ----------------------------------------------------------------------------------------------------------------


def _reached(roots: Iterable[Lazy]) -> tuple[list[Call], list[Lazy], dict[int, Lazy]]:
    """The calls that values need, operands first; the values without a call; and all values met, by identity."""
    calls: dict[int, Call] = {}
    leaves: dict[int, Lazy] = {}
    met: dict[int, Lazy] = {}
    stack = [x for x in reversed(list(roots))]
    while stack:
        x = stack[-1]
        call = x.call
        if call is None:
            leaves[id(x)] = x
        elif id(call) not in calls:
            todo = [i for i in call.inputs if i is not None and (id(i) not in leaves if i.call is None else id(i.call) not in calls)]
            if todo:
                stack.extend(reversed(todo))
                continue
            calls[id(call)] = call
        stack.pop()
        met[id(x)] = x
    for c in calls.values():
        for i in c.inputs:
            if i is not None:
                met[id(i)] = i
    return list(calls.values()), list(leaves.values()), met


def _flat_shape(calls: Sequence[Call], leaves: Sequence[Lazy], outputs: Sequence[Lazy]) -> tuple[int, ...] | None:
    """The shape of all arrays in an element-wise expression, where a program that sees vectors of any size serves: the same for all shapes."""
    shape = outputs[0].shape
    size = math.prod(shape)
    if not shape or not 0 < size <= FLAT_SIZE or any(x.shape not in (shape, ()) for x in leaves) or any(x.shape != shape for x in outputs):
        return None
    for c in calls:
        flat = "elementwise" in c.op.traits or (c.op.name == "full" and not c.types[0].shape)
        if not flat or any(t.shape not in (shape, ()) for t in c.types):
            return None
    return shape if any(x.shape for x in leaves) else None


def _structure(calls: Sequence[Call], leaves: Sequence[Lazy], outputs: Sequence[Lazy], flat: bool = False) -> Any:
    """Equal for what one program computes. `flat`: whatever the shape of its arrays."""
    number: dict[Any, int] = {id(x): k for k, x in enumerate(leaves)}
    key: list[Any] = [(x.type.dtype.name, bool(x.type.shape) if flat else x.type.shape) for x in leaves]
    for c in calls:
        key.append((c.key, *(-1 if x is None else number[id(x)] if x.call is None else number[id(x.call), x.index] for x in c.inputs)))
        for k in range(len(c.types)):
            number[id(c), k] = len(number)
    return (*key, *(number[id(x)] if x.call is None else number[id(x.call), x.index] for x in outputs))


def graph_of(outputs: Sequence[Lazy], inputs: Sequence[Lazy] = (), name: str = "expression", flat: bool = False) -> tuple[Graph, list[Lazy]]:
    """A graph that computes values.

    Args:
        outputs: what it gives.
        inputs: placeholders or buffers that are its first inputs, in this order; what else it reads becomes further inputs.
        name: of the graph.
        flat: are arrays with axes to be vectors of one symbolic size?

    Returns:
        The graph, and the values that its inputs stand for.
    """
    calls, leaves, _ = _reached(outputs)
    order = [*inputs, *(x for x in leaves if all(x is not i for i in inputs))]
    g = Graph(name)
    size = var("N", lo=1)

    def type_(t: TensorType) -> TensorType:
        return TensorType(t.dtype, (size,)) if flat and t.shape else t

    known: dict[Any, Value] = {id(x): g.add_input(f"x{k}", type_(x.type)) for k, x in enumerate(order)}

    def value(x: Lazy | None) -> Value | None:
        return None if x is None else known[id(x)] if x.call is None else known[id(x.call), x.index]

    for c in calls:
        node = g.append(Node(c.op, [value(x) for x in c.inputs], c.attrs, [type_(t) for t in c.types], c.locs))
        for k, made in enumerate(node.outputs):
            known[id(c), k] = made
    g.outputs = [v for x in outputs if (v := value(x)) is not None]
    return g, order


# --- programs -----------------------------------------------------------------------------------------------------------------

Program = Callable[[Sequence[Array]], list[Array]]


class Programs:
    """The programs of this process by their structure, the last PROGRAMS used."""

    def __init__(self) -> None:
        self.made: OrderedDict[Any, Any] = OrderedDict()  # None: there is no flat one
        self.lock = threading.RLock()
        self.compiled = 0  # programs made so far
        self.last: Any = None

    def get(self, calls: Sequence[Call], leaves: Sequence[Lazy], outputs: Sequence[Lazy]) -> Program:
        key = _structure(calls, leaves, outputs)
        with self.lock:
            found = self.made.get(key)
            if found is None:
                found = self._enter(key, compiler().compile(lambda: graph_of(outputs, leaves)[0], repr(key)))
            else:
                self.made.move_to_end(key)
            self.last = found
            return found  # type: ignore[no-any-return]

    def _enter(self, key: Any, program: Any) -> Any:
        self.made[key] = program
        self.compiled += program is not None
        if len(self.made) > PROGRAMS:
            self.made.popitem(last=False)
        return program

    def run(self, calls: Sequence[Call], leaves: Sequence[Lazy], outputs: Sequence[Lazy]) -> list[Array]:
        """The contents of `outputs`."""
        data = [x.data for x in leaves if x.data is not None]
        shape = _flat_shape(calls, leaves, outputs)
        if shape is not None:
            key = "flat", _structure(calls, leaves, outputs, flat=True)
            with self.lock:
                if key not in self.made:
                    self._enter(key, compiler().compile_flat(lambda: graph_of(outputs, leaves, flat=True)[0], repr(key)))
                found = self.made[key]
            if found is not None:
                self.last = found
                return found.flat(data, shape, math.prod(shape))  # type: ignore[no-any-return]
        return self.get(calls, leaves, outputs)(data)


@cache
def compiler() -> Any:
    """What makes programs in this process; loaded at the first one."""
    from dnnc.array.light import Compiler

    return Compiler()


PROGRAMS_MADE = Programs()


def materialise(roots: Sequence[Lazy]) -> None:
    """Compute values: afterwards each has its buffer.

    Raises:
        InputError: a value depends on an argument of a function that is being traced, and has no buffer yet.
    """
    wanted = list({id(x): x for x in roots if x.call is not None}.values())
    if any(x.traced for x in roots):
        raise InputError(no_data())
    if not wanted:
        return
    calls, leaves, met = _reached(wanted)
    outputs = [*wanted, *_kept(met, wanted)]
    results = PROGRAMS_MADE.run(calls, leaves, outputs)
    for x, r in zip(outputs, results):
        x.data, x.call, x.depth = r, None, 0


def _kept(met: dict[int, Lazy], wanted: Sequence[Lazy]) -> list[Lazy]:
    """What else is worth keeping: values that the user still holds and that would be computed again."""
    asked = {id(x) for x in wanted}
    out = []
    for k, x in met.items():
        if x.call is None or k in asked or x.owner is None or x.owner() is None:
            continue
        if x.seen or x.heavy:
            out.append(x)
        x.seen = True
    return out


def buffer(x: Lazy) -> Array:
    """The contents of a value."""
    if x.data is None:
        materialise([x])
    assert x.data is not None
    return x.data
