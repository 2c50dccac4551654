"""Shapes with symbolic dims: broadcasting, binding to sizes of arrays, fixing dims of a whole graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dnnc.ir.bounds import nonneg
from dnnc.ir.dtype import i64
from dnnc.ir.errors import InputError, ShapeError, count
from dnnc.ir.expr import Expr, Var, const, factors, free, substitute, terms, unwrap, value, var
from dnnc.ir.graph.attributes import complete
from dnnc.ir.graph.builder import infer
from dnnc.ir.graph.core import Copies, Graph, Node, Value
from dnnc.ir.types import Dim, TensorType

Bindings = dict[Var, int]


def normalize_axis(axis: int, rank: int) -> int:
    """The axis counted from the front. ShapeError outside [-rank, rank)."""
    if not -rank <= axis < rank:
        raise ShapeError(
            f"axis {axis} is outside [{-rank}, {rank - 1}] of a tensor of rank {rank}"
            if rank
            else f"axis {axis}: a scalar has no axes"
        )
    return axis % rank


def normalize_axes(axes: Sequence[int], rank: int) -> tuple[int, ...]:
    """Several axes counted from the front, in the given order. ShapeError where one is out of range or given twice."""
    out = tuple(normalize_axis(a, rank) for a in axes)
    if len(set(out)) != len(out):
        raise ShapeError(f"axes {tuple(axes)} name one axis of {rank} twice")
    return out


def broadcast_shapes(*shapes: Sequence[Dim]) -> tuple[Dim, ...]:
    """Broadcast: aligned at the right, 1 stretches, equal dims unify. ShapeError: dims differ, or may differ."""
    rank = max(map(len, shapes), default=0)
    out: list[Dim] = [1] * rank
    for s in shapes:
        for k, d in enumerate(s, rank - len(s)):
            if out[k] is d or out[k] == d or d == 1:
                continue
            if out[k] != 1:
                raise _no_broadcast(shapes, out[k], d)
            out[k] = d
    return tuple(out)


def _no_broadcast(shapes: Sequence[Sequence[Dim]], a: Dim, b: Dim) -> ShapeError:
    shown = " and ".join(f"[{', '.join(map(str, s))}]" for s in shapes)
    hint = (
        ""
        if isinstance(a, int) and isinstance(b, int)
        else "; they are not known to be equal: fix or unify the dims (dims={...})"
    )
    return ShapeError(f"shapes {shown} do not broadcast: {a} against {b}{hint}")


# --- binding dims to sizes --------------------------------------------------------------------------------------------


def resolve(d: Any, env: Mapping[Expr, Expr]) -> Any:
    """A dim, or anything an attribute may be made of, with the variables of env replaced; a subgraph stays as it is."""
    if isinstance(d, Expr):
        return unwrap(substitute(d, env))
    if isinstance(d, tuple):
        return tuple(resolve(x, env) for x in d)
    if isinstance(d, TensorType):
        return d if d.static else TensorType(d.dtype, tuple(resolve(x, env) for x in d.shape), d.encoding)
    return d


def as_env(bindings: Mapping[Var, int]) -> dict[Expr, Expr]:
    """Bindings in the form that `resolve` takes."""
    return {v: const(n) for v, n in bindings.items()}


def bind_dims(g: Graph, shapes: Sequence[Sequence[int]], known: Mapping[Var, int] | None = None) -> Bindings:
    """The values of symbolic dims at inputs of these shapes; `known` holds what is bound already (for a subgraph).

    InputError: a rank, a size, or a relation between dims does not hold; names the input, the dim and what was
    expected.
    """
    bound: Bindings = dict(known or {})
    if len(shapes) != len(g.inputs):
        raise InputError(
            f"graph {g.name} has {count(len(g.inputs), 'input')} ({', '.join(v.name for v in g.inputs)}), "
            f"{count(len(shapes), 'shape')} "
            "are given"
        )
    for v, s in zip(g.inputs, shapes):
        bind_variables(bound, v, s)
    for v, s in zip(g.inputs, shapes):
        bind_shape(bound, v, s)
    return bound


def bind_variables(bound: Bindings, v: Value, shape: Sequence[int]) -> None:
    """Bind the dims of a type that are plain variables."""
    if len(shape) != v.type.rank:
        raise InputError(f"input {v.name}: expected {v.type} (rank {v.type.rank}), got an array of shape {list(shape)}")
    for d, n in zip(v.type.shape, shape):
        if isinstance(d, Var) and d not in bound:
            bound[d] = n
            _check_facts(bound, v, d, n)


def bind_shape(bound: Bindings, v: Value, shape: Sequence[int]) -> None:
    """Bind what the shape of `v` tells, check the rest. InputError names value, axis and expected relation."""
    bind_variables(bound, v, shape)
    for k, (d, n) in enumerate(zip(v.type.shape, shape)):
        if d is n or d == n:
            continue
        want = d if isinstance(d, int) else _solve(bound, v, d, n)
        if want != n:
            relation = (
                ""
                if isinstance(d, int)
                else f" = {d!r} with {', '.join(f'{x.name}={bound[x]}' for x in _sorted(d) if x in bound)}"
            )
            raise InputError(f"{v.name}: axis {k} of {v.type} must be {want}{relation}, got {n} in shape {list(shape)}")


def _sorted(d: Expr) -> list[Var]:
    return sorted(free(d), key=lambda x: x.name)


def _solve(bound: Bindings, v: Value, d: Expr, n: int) -> int:
    """Return d's value; one unbound variable in which d is linear is bound so that d == n if possible."""
    rest = substitute(d, as_env({x: bound[x] for x in free(d) if x in bound}))
    if isinstance(rest, Expr) and len(free(rest)) == 1:
        (x,) = free(rest)
        ts, c0 = terms(rest)
        if len(ts) == 1 and factors(ts[0][0]) == (x,) and (n - c0) % ts[0][1] == 0:
            bound[x] = (n - c0) // ts[0][1]
            _check_facts(bound, v, x, bound[x])
            return n
    got = value(rest)
    if got is None:
        unknown = ", ".join(x.name for x in _sorted(rest))
        raise InputError(f"{v.name}: the size {n} of {d!r} does not tell {unknown}; give it a value with dims={{...}}")
    return got


def _check_facts(bound: Bindings, v: Value, x: Var, n: int) -> None:
    lo, hi = (None if b is None else value(resolve(b, as_env(bound))) for b in (x.lo, x.hi))
    if (lo is not None and n < lo) or (hi is not None and n > hi) or n % x.div:
        upper = "" if hi is None else f", at most {hi}"
        divisor = "" if x.div == 1 else f", divisible by {x.div}"
        raise InputError(
            f"{v.name}: dim {x.name} of {v.type} must be at least {lo if lo is not None else 0}{upper}{divisor}; got "
            f"{n}"
        )


# --- fixing dims of a graph -------------------------------------------------------------------------------------------


def specialise(g: Graph, dims: Mapping[str, int]) -> Graph:
    """A new graph in which these dims are numbers: types are inferred anew, constants are shared.

    InputError: no dim has that name, or its declared bounds exclude the number. ShapeError: the graph has no valid
    types at these sizes.
    """
    bound: Bindings = {}
    for name, n in dims.items():
        x = g.dims.get(name)
        if x is None:
            raise InputError(f"graph {g.name} has no symbolic dim {name!r}; it has {', '.join(g.dims) or 'none'}")
        bound[x] = int(n)
    for x, n in bound.items():
        where = next((v for v in g.inputs if x in v.type.shape), Value(x.name, TensorType(i64, ())))
        _check_facts(bound, where, x, n)
    return _specialise(g, _with_bounds(g, as_env(bound)))


def bound_dims(g: Graph, bounds: Mapping[str, tuple[int, int | None]]) -> Graph:
    """Return a graph whose dims have these (inclusive) bounds too. InputError: no such dim, or no size left."""
    env: dict[Expr, Expr] = {}
    for name, (low, high) in bounds.items():
        x = g.dims.get(name)
        if x is None:
            raise InputError(f"graph {g.name} has no symbolic dim {name!r}; it has {', '.join(g.dims) or 'none'}")
        lo = max(low, x.lo) if isinstance(x.lo, int) else low
        hi = x.hi if high is None else min(high, x.hi) if isinstance(x.hi, int) else high
        if isinstance(hi, int) and lo > hi:
            raise InputError(
                f"dim {name} of graph {g.name} must be in [{x.lo}, {x.hi}]: [{low}, {high}] leaves it no size"
            )
        env[x] = var(name, x.dtype, lo, hi, x.div)
    return _specialise(g, _with_bounds(g, env)) if any(v is not x for x, v in env.items()) else g


def without_unused_dims(g: Graph) -> Graph:
    """A graph without the dims that none of its types and attributes has: no array of a call tells their size."""
    if not g.dims:
        return g
    used = Graph()
    used.declare(*(v.type for v in (*g.inputs, *g.constants, *g.parameters)))
    for n in g.nodes():
        used.declare(
            *(o.type for o in n.outputs), *(a for a in n.attrs.values() if not isinstance(a, (int, str, float)))
        )
    if used.dims.keys() == g.dims.keys():
        return g
    new = g.copy()
    new.dims = {name: x for name, x in g.dims.items() if name in used.dims}
    return new


def nonempty_lows(g: Graph) -> dict[str, int]:
    """Lower bounds of dims from which on no size in the graph can be shown to be 0 or less: `N - 2` needs N >= 3.

    A dim keeps the bound that it has where the others suffice. Empty if nothing needs raising, or it does not help.
    """
    sizes = {
        d for n in g.nodes() for v in n.outputs for d in v.type.shape if isinstance(d, Expr) and not isinstance(d, Var)
    }
    own = {x: x.lo for x in g.dims.values() if isinstance(x.lo, int)}

    def holds(lows: Mapping[Var, int]) -> bool:
        env: dict[Expr, Expr] = {x: var(x.name, x.dtype, lo, x.hi, x.div) for x, lo in lows.items()}
        return all(nonneg(const(resolve(d, env)) - 1) for d in sizes)

    def raised(by: int) -> dict[Var, int]:
        return {x: min(lo + by, x.hi) if isinstance(x.hi, int) else lo + by for x, lo in own.items()}

    if holds(own):
        return {}
    enough = next((2**k for k in range(13) if holds(raised(2**k))), None)
    if enough is None:
        return {}
    lows = raised(next(by for by in range(enough // 2 + 1, enough + 1) if holds(raised(by))) if enough < 64 else enough)
    for x, lo in own.items():
        lows = {**lows, x: lo} if holds({**lows, x: lo}) else lows
    return {x.name: lo for x, lo in lows.items() if lo != own[x]}


def _with_bounds(g: Graph, env: dict[Expr, Expr]) -> dict[Expr, Expr]:
    """Dims whose bounds mention a replaced dim become new dims with the new bounds."""
    out = dict(env)
    for x in g.dims.values():  # a dim is declared after those in its bounds
        if x not in out and any(isinstance(b, Expr) and not free(b).isdisjoint(out) for b in (x.lo, x.hi)):
            out[x] = var(x.name, x.dtype, resolve(x.lo, out), resolve(x.hi, out), x.div)
    return out


def _specialise(g: Graph, env: dict[Expr, Expr], known: Copies | None = None) -> Graph:
    known = {} if known is None else known
    new = Graph(g.name)
    new.declare(*(resolve(x, env) for x in g.dims.values()))
    values: dict[Value | None, Value] = {}
    for v in g.inputs:
        values[v] = new.add_input(v.name, resolve(v.type, env), v.locs)
    g.copy_parameters(new, values, known)  # whose sizes are numbers
    for v, a in g.constants.items():
        c = values[v] = new.constant(a, v.name, v.locs, v.type)
        g.share_digest(v, new, c)
    for n in g.nodes():
        attrs = {k: _specialise(a, env, known) if isinstance(a, Graph) else resolve(a, env) for k, a in n.attrs.items()}
        inputs = [values.get(v) for v in n.inputs]
        attrs = complete(n.op, attrs)
        types = [_keep_encoding(t, o.type) for t, o in zip(infer(n.op, inputs, attrs, n.locs), n.outputs)]
        m = new.append(Node(n.op, inputs, attrs, types, n.locs, [o.name for o in n.outputs]))
        for o, p in zip(n.outputs, m.outputs):
            p.locs = o.locs
            values[o] = p
    new.outputs = [values[v] for v in g.outputs]
    new.donated, new.held, new.internal = dict(g.donated), dict(g.held), dict(g.internal)
    return new


def _keep_encoding(t: TensorType, old: TensorType) -> TensorType:
    return TensorType(t.dtype, t.shape, old.encoding) if t.row_major and not old.row_major else t


def concrete_shape(t: TensorType, env: Mapping[Expr, Expr]) -> tuple[int, ...]:
    """A shape with its symbolic dims filled in."""
    out = []
    for d in t.shape:
        n = value(substitute(const(d), env))
        assert n is not None, f"{d!r} is not fixed by the dims of the call"
        out.append(n)
    return tuple(out)
