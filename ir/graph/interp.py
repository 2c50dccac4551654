"""The reference interpreter: a graph and NumPy arrays in, arrays out. What every backend is compared with.

Per node it calls the op's `reference` or `host`, or builds the op's decomposition and interprets that. Types that
registers do not hold (f16, bf16, 4-bit) reach the reference in their compute type and its result is rounded to the
declared one, as kernels do; an op with Trait.BITS gets the stored form. A reference gets subgraphs as functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from dnnc.ir.dtype import DType, f64
from dnnc.ir.errors import InputError, InternalError, count, locations
from dnnc.ir.expr import Expr
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.core import Graph, Node, Value
from dnnc.ir.op import Trait
from dnnc.ir.shapes import Bindings, as_env, bind_dims, bind_shape, resolve
from dnnc.ir.types import TensorType

Array = np.ndarray[Any, Any]
Precision = Literal["as-is", "float64"]


def run(g: Graph, inputs: Sequence[Any] | Mapping[str, Any], precision: Precision = "as-is") -> list[Array]:
    """The outputs of a graph.

    Args:
        g: any valid graph; symbolic dims take their values from the inputs' shapes.
        inputs: one array per graph input, in order or by name, of exactly the input's dtype ("float64" also takes
            float64).
        precision: "as-is" rounds every value to its declared dtype; "float64" computes all floats in float64 and rounds
            nothing.

    InputError: a missing or unknown name, a wrong dtype, or a shape that does not fit.
    """
    arrays = _ordered(g, inputs)
    with np.errstate(all="ignore"):
        return Run(precision).graph(g, [_given(v, a, precision) for v, a in zip(g.inputs, arrays)], {})


def run_node(n: Node, operands: Sequence[Array | None], bound: Bindings) -> list[Array]:
    """The outputs of one node, as `run` computes them.

    Args:
        n: a node of any op.
        operands: arrays of the operands' dtypes, None for absent ones.
        bound: values of the symbolic dims; those that only the data tells are added.

    InputError: what the data tells contradicts what the graph needs.
    """
    with np.errstate(all="ignore"):
        return Run("as-is").node(n, operands, bound)


def _ordered(g: Graph, inputs: Sequence[Any] | Mapping[str, Any]) -> list[Any]:
    names = [v.name for v in g.inputs]
    if isinstance(inputs, Mapping):
        missing, unknown = [n for n in names if n not in inputs], [n for n in inputs if n not in names]
        if missing or unknown:
            raise InputError(
                f"graph {g.name} takes {', '.join(names)}; missing: {', '.join(missing) or '-'}, unknown: "
                f"{', '.join(unknown) or '-'}"
            )
        return [inputs[n] for n in names]
    if len(inputs) != len(names):
        raise InputError(f"graph {g.name} takes {count(len(names), 'input')} ({', '.join(names)}), got {len(inputs)}")
    return list(inputs)


def _given(v: Value, x: Any, precision: Precision) -> Array:
    a = np.asarray(x)
    want = v.type.dtype
    if want.kind == "s" and a.dtype.kind in "OUST":
        return a.astype(object)
    if a.dtype == want.numpy:
        return _widen(a, want) if precision == "float64" else a
    if precision == "float64" and want.is_float and a.dtype == np.float64:
        return a
    raise InputError(f"input {v.name}: expected {want}, got {a.dtype}; convert it with .astype({want.numpy.name!r})")


def _told(n: Node, attrs: Mapping[str, Any]) -> None:
    """Raise InputError for an attribute dim that no input shape has bound, unless it is data-dependent."""
    for k, a in attrs.items():
        for d in a if isinstance(a, tuple) else (a,):
            if isinstance(d, Expr):
                raise InputError(
                    f"{n.op.name}{locations(n.locs)}: {k} needs the size {d}, which no input of the graph tells; fix "
                    "it by dims="
                )


def _widen(a: Array, dtype: DType) -> Array:
    """Floats as float64, complex numbers as complex128, anything else as it is."""
    if dtype.is_float:
        return a.astype(np.float64, copy=False)
    return a.astype(np.complex128, copy=False) if dtype.kind == "c" else a


class Run:
    """One interpretation of a graph; a subclass may change what nodes give."""

    def __init__(self, precision: Precision) -> None:
        self.precision = precision
        self.exact = precision == "float64"

    def graph(self, g: Graph, arrays: Sequence[Array], known: Bindings) -> list[Array]:
        bound = bind_dims(g, [a.shape for a in arrays], known)
        env: dict[Value, Array] = dict(zip(g.inputs, arrays))
        kept = set(g.outputs)
        left: dict[Value, int] = {}  # uses that are still to come
        for n in g.nodes():
            operands = [None if v is None else self.value(g, env, v) for v in n.inputs]
            results = self.node(n, operands, bound)
            for u in n.inputs:
                if u is not None:
                    left[u] = left.get(u, len(u.uses)) - 1
                    if not left[u] and u not in kept:
                        env.pop(u, None)
            env.update((v, a) for v, a in zip(n.outputs, results) if v.uses or v in kept)
        return [self.value(g, env, v) for v in g.outputs]

    def value(self, g: Graph, env: dict[Value, Array], v: Value) -> Array:
        a = env.get(v)
        if a is None:
            a = g.constants[v]
            env[v] = a = _widen(a, v.type.dtype) if self.exact else a
        return a

    def node(self, n: Node, operands: Sequence[Array | None], bound: Bindings) -> list[Array]:
        """The outputs of one node, in their declared dtypes and shapes; binds dims that only the data tells."""
        env = as_env(bound)
        attrs = {k: self.subgraph(a, bound) if isinstance(a, Graph) else resolve(a, env) for k, a in n.attrs.items()}
        f = n.op.reference or n.op.host
        if f is not None:
            try:
                found = f(*self.operands(n, operands), **attrs)
            except IndexError as e:
                raise InputError(
                    f"{n.op.name}{locations(n.locs)}: an index lies outside of its axis: {e}; check the values of "
                    "integer inputs"
                ) from None
            except TypeError:
                _told(n, attrs)
                raise
            several = isinstance(found, tuple) or (isinstance(found, list) and len(n.outputs) != 1)
            many: Sequence[Any] = found if several else (found,)
        else:
            many = self.decomposed(n, operands, {k: resolve(a, env) for k, a in n.attrs.items()})
        if len(many) != len(n.outputs):
            raise InternalError(
                f"{n.op.name}{locations(n.locs)}: the reference gave {count(len(many), 'output')}, the node "
                f"has {len(n.outputs)}"
            )
        return [self.result(n, v, x, bound) for v, x in zip(n.outputs, many)]

    def operands(self, n: Node, operands: Sequence[Array | None]) -> list[Array | None]:
        """What the reference sees: computed types, or stored ones for an op that looks at bits."""
        out: list[Array | None] = []
        for v, a in zip(n.inputs, operands):
            if v is None or a is None:
                out.append(None)
            elif Trait.BITS in n.op.traits:
                out.append(a.astype(v.type.dtype.numpy, copy=False))
            else:
                t = v.type.dtype
                out.append(a if self.exact or t.computed is t else a.astype(t.computed.numpy))
        return out

    def subgraph(self, g: Graph, bound: Bindings) -> Callable[..., list[Array]]:
        def call(*arrays: Any) -> list[Array]:
            if len(arrays) != len(g.inputs):
                raise InternalError(
                    f"the subgraph {g.name} takes {count(len(g.inputs), 'array')}, it is called with {len(arrays)}"
                )
            given = [self.declared(v, np.asarray(a)) for v, a in zip(g.inputs, arrays)]
            return self.graph(g, given, {x: k for x, k in bound.items() if g.dims.get(x.name) is x})

        return call

    def declared(self, v: Value, a: Array) -> Array:
        """An array in the dtype that its value says, or in float64 where all floats are."""
        want = (
            f64.numpy
            if self.exact and v.type.dtype.is_float
            else np.dtype(np.complex128)
            if self.exact and v.type.dtype.kind == "c"
            else None
        )
        return a.astype(want or v.type.dtype.numpy, copy=False)

    def result(self, n: Node, v: Value, x: Any, bound: Bindings) -> Array:
        a = self.declared(v, np.asarray(x, dtype=object if v.type.dtype.kind == "s" else None))
        try:
            bind_shape(bound, v, a.shape)
        except InputError as e:
            if Trait.SIZED in n.op.traits:
                raise InputError(
                    f"{n.op.name}{locations(n.locs)}: the data gives a size that the rest of the model does not fit: "
                    f"{e}"
                ) from e
            raise InternalError(
                f"{n.op.name}{locations(n.locs)}: the reference's result does not have the declared shape: {e}"
            ) from e
        return a

    def decomposed(self, n: Node, operands: Sequence[Array | None], attrs: dict[str, Any]) -> Sequence[Array]:
        if n.op.decompose is None:
            raise InternalError(f"{n.op.name} has neither a reference nor a decomposition")
        g = Graph(n.op.name)
        values: list[Value | None] = []
        given: list[Array] = []
        for i, (v, a) in enumerate(zip(n.inputs, operands)):
            if v is None or a is None:
                values.append(None)
                continue
            values.append(g.add_input(f"x{i}", TensorType(v.type.dtype, a.shape)))
            given.append(a)
        made = n.op.decompose(Builder(g, locs=n.locs), *values, **attrs)
        g.outputs = list(made) if isinstance(made, (tuple, list)) else [made]
        return self.graph(g, given, {})


# --- sampled outputs --------------------------------------------------------------------------------------------------


def run_at(
    g: Graph, inputs: Sequence[Any] | Mapping[str, Any], points: Sequence[Any], precision: Precision = "float64"
) -> list[Array]:
    """The outputs of a graph at some points only: what the kernel check compares.

    Element-wise nodes are evaluated at the points alone, a node with `reference_at` (matmul, conv, reductions) computes
    only the asked elements of its output; all else, and what these read, is computed whole, once.

    Args:
        g: a graph, mostly of one fused group.
        inputs: as for `run`.
        points: per output an int64 array [n, rank] of indices.
        precision: as for `run`.

    Returns:
        Per output a 1-D array of n elements.
    """
    arrays = [
        _given(v, a, "as-is" if v.type.dtype.numpy == np.asarray(a).dtype else precision)
        for v, a in zip(g.inputs, _ordered(g, inputs))
    ]
    r = Run(precision)
    lazy = _Sampled(r, g, arrays)
    with np.errstate(all="ignore"):
        return [lazy.at(v, np.asarray(p, np.int64)) for v, p in zip(g.outputs, points)]


def _pick(a: Array, points: Array) -> Array:
    return np.broadcast_to(a[tuple(points.T)], (len(points),))


class _Sampled:
    def __init__(self, run: Run, g: Graph, arrays: Sequence[Array]) -> None:
        self.run, self.g = run, g
        self.bound = bind_dims(g, [a.shape for a in arrays])
        self.raw: dict[Value, Array] = dict(
            zip(g.inputs, arrays)
        )  # in their own dtype: most of a large operand is never looked at
        self.env: dict[Value, Array] = {}
        self.sampled: dict[tuple[Value, bytes], Array] = {}

    def full(self, v: Value) -> Array:
        """The whole value; nodes it needs are computed in order, without recursion over the depth of the graph."""
        needed: set[Node] = set()
        stack = [v]
        while stack:
            x = stack.pop()
            if x not in self.env and x.node is not None and x.node not in needed:
                needed.add(x.node)
                stack.extend(i for i in x.node.inputs if i is not None)
        for n in self.g.nodes() if needed else ():
            if n in needed:
                operands = [
                    None if i is None else self.stored(i) if Trait.MOVEMENT in n.op.traits else self.whole(i)
                    for i in n.inputs
                ]
                self.env.update(zip(n.outputs, self.run.node(n, operands, self.bound)))
        return self.whole(v)

    def whole(self, v: Value) -> Array:
        """A value that is known, in the precision of the run."""
        if v in self.raw and v not in self.env:
            a = self.raw[v]
            self.env[v] = _widen(a, v.type.dtype) if self.run.exact else a
        return self.run.value(self.g, self.env, v)

    def stored(self, v: Value) -> Array:
        """A value in its own dtype where it has one: for what only moves elements, or widens those that it picks."""
        plain = v in self.raw and v not in self.env and self.raw[v].dtype.kind != "V"
        return self.raw[v] if plain else self.whole(v)

    def picked(self, v: Value) -> Array:
        return self.stored(v) if v in self.raw else self.full(v)

    def at(self, v: Value, points: Array) -> Array:
        n = v.node
        lazy = n is not None and v not in self.env and len(n.outputs) == 1
        if v in self.raw and v not in self.env:
            picked = _pick(self.raw[v], points)
            return _widen(picked, v.type.dtype) if self.run.exact else picked
        if n is None or not lazy or not (Trait.ELEMENTWISE in n.op.traits or n.op.reference_at):
            return _pick(self.full(v), points)
        key = (v, points.tobytes())
        if key not in self.sampled:
            self.sampled[key] = self.evaluate(n, v, points)
        return self.sampled[key]

    def evaluate(self, n: Node, v: Value, points: Array) -> Array:
        attrs = {k: resolve(a, as_env(self.bound)) for k, a in n.attrs.items()}
        if n.op.reference_at is not None:
            pick = (
                self.picked if Trait.CONTRACTION in n.op.traits else self.full
            )  # whose sampled references widen what they pick
            operands = self.run.operands(n, [None if i is None else pick(i) for i in n.inputs])
            return self.run.declared(v, np.asarray(n.op.reference_at(operands, points, **attrs)))
        if n.op.reference is None:  # element-wise by decomposition
            return _pick(self.full(v), points)
        operands = self.run.operands(n, [None if i is None else self.at(i, self.project(i, points)) for i in n.inputs])
        found = self.run.declared(v, np.asarray(n.op.reference(*operands, **attrs)))
        return np.broadcast_to(found, (len(points),))

    def project(self, v: Value, points: Array) -> Array:
        """Where an operand that is broadcast is read: aligned at the right, index 0 on its axes of size 1."""
        own: Array = points[:, points.shape[1] - v.type.rank :]
        stretched = [k for k, d in enumerate(v.type.shape) if isinstance(d, int) and d == 1]
        if stretched:
            own = own.copy()
            own[:, stretched] = 0
        return own
