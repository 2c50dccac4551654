"""Rules of loops and branches.

A loop of known length is reversed by `loops`. One with a condition, or with a number of iterations that only the data
tells, first becomes one of known length whose body is a branch; one with checkpoints becomes two nested ones. A branch
becomes a branch over the pullbacks of its bodies. In forward mode the bodies compute tangents beside values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dnnc.ir.autodiff.forward import pushforward
from dnnc.ir.autodiff.invariants import trim
from dnnc.ir.autodiff.loops import LoopReverse
from dnnc.ir.autodiff.residuals import kept
from dnnc.ir.autodiff.reverse import pullback, zeros
from dnnc.ir.dtype import boolean, i64
from dnnc.ir.errors import GradientError
from dnnc.ir.expr import const, unwrap
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.core import Graph, Node, Value
from dnnc.ir.graph.expand import extract, inline, prune, reached
from dnnc.ir.types import TensorType

Given = Sequence["Value | None"]


def loop_vjp(b: Builder, n: Node, cotangents: Given, needed: Sequence[int]) -> Mapping[int, Value]:
    length, every = n.attrs["length"], n.attrs["checkpoint"]
    if length == 0:
        return {k: c for k in needed if k < 2 + n.attrs["carried"] and (c := cotangents[k - 2]) is not None}
    if any(v is not None for v in n.inputs[:2]):
        if length is None:
            raise GradientError(
                "a loop that runs for as long as a condition holds, or as often as the data says, keeps a row of what "
                "its reverse needs for each iteration: give it a bound, as in while_loop(..., bound=100)"
            )
        return _through(b, n, _bounded, cotangents, needed)
    if every > 1 and (not isinstance(length, int) or length > every):
        return _through(b, n, _in_parts, cotangents, needed)
    return LoopReverse(b, n, cotangents, needed, again=every > 0).run()


def _through(
    b: Builder, n: Node, definition: Callable[..., Sequence[Value]], cotangents: Given, needed: Sequence[int]
) -> Mapping[int, Value]:
    """The cotangents of a node that is replaced by others."""
    g = b.graph
    stand = [None if v is None else g.add_input(v.name, v.type) for v in n.inputs]  # operands may depend on each other
    made = definition(Builder(g, n, n.locs), *stand, **n.attrs)
    results = list(n.outputs)
    for old, new in zip(results, made):
        g.adopt(old, new)
    g.erase(n)
    seeds = {o: c for o, c in zip(results, cotangents) if c is not None}
    wanted = [v for k in needed if (v := stand[k]) is not None]
    found = pullback(g, seeds, wanted, n.locs)
    for v, operand in zip(stand, n.inputs):
        if v is not None and operand is not None:
            found = [operand if c is v else c for c in found]
            g.replace_all_uses(v, operand)
            g.inputs.remove(v)
            g.release([v.name])
    return {k: c for k, c in zip(needed, found) if c is not None}


def within_bound_vjp(b: Builder, n: Node, cotangents: Given, needed: Sequence[int]) -> Mapping[int, Value]:
    (c,) = cotangents
    return {0: c} if c is not None and 0 in needed else {}


# --- loops in other forms ---------------------------------------------------------------------------------------------


def _bounded(
    b: Builder,
    trips: Value | None,
    condition: Value | None,
    *rest: Value,
    body: Graph,
    carried: int,
    scanned: int,
    length: Any,
    backward: tuple[bool, ...],
    checkpoint: int,
) -> Sequence[Value]:
    """All iterations up to the bound run; those after the last one pass the state on.

    while c: s = f(s)   ->   for k in range(length): c, s = f(s) if c else (c, s)
    """
    g = Graph(body.name)
    number, going = g.add_input("number", TensorType(i64, ())), g.add_input("going", TensorType(boolean, ()))
    own = [g.add_input(v.name, v.type) for v in body.inputs[1:]]
    inner = Builder(g, None, b.locs)
    runs = going
    if trips is not None:
        last = g.add_input("trips", trips.type)
        runs = inner.logical_and(going, inner.less(number, last))
    then, other = body.copy(), Graph("pass")
    if condition is None:
        then.outputs = [then.constant(True), *then.outputs]
    states = [other.add_input(v.name, v.type) for v in body.inputs][1 : 1 + carried]
    plain = Builder(other, None, b.locs)
    stacked = then.outputs[1 + carried :]
    other.outputs = [plain.constant(False), *states, *(_blank(plain, v.type) for v in stacked)]
    made = inner.op("cond", runs, number, *own, then=then, other=other)
    g.outputs = list(made) if isinstance(made, tuple) else [made]
    first = b.constant(True) if condition is None else condition
    operands = [first, *rest, *(() if trips is None else (trips,))]
    done = b.op(
        "loop",
        None,
        None,
        *operands,
        body=g,
        carried=carried + 1,
        scanned=scanned,
        length=length,
        backward=backward,
        checkpoint=checkpoint,
    )
    return done[1:]  # type: ignore[no-any-return]


def _blank(b: Builder, t: TensorType) -> Value:
    """Zeros of any dtype."""
    return b.expand(b.constant(0, dtype=t.dtype), shape=t.shape)  # type: ignore[no-any-return]


def _in_parts(
    b: Builder,
    trips: None,
    condition: None,
    *rest: Value,
    body: Graph,
    carried: int,
    scanned: int,
    length: Any,
    backward: tuple[bool, ...],
    checkpoint: int,
) -> Sequence[Value]:
    """A loop over parts of `checkpoint` iterations, then the iterations that are left.

    Of the outer loop each iteration is computed again from its first state, so only these states are kept.
    """
    count = unwrap(const(length) // checkpoint)
    done = unwrap(const(count) * checkpoint)
    left = unwrap(const(length) - done)
    stacked = len(body.outputs) - carried
    flags = backward or (False,) * (scanned + stacked)
    states, rows, captured = rest[:carried], rest[carried : carried + scanned], rest[carried + scanned :]
    attrs = {"carried": carried, "scanned": scanned, "backward": flags}

    def part(x: Value, start: Any, size: Any) -> Value:
        rank = x.type.rank - 1
        shape = (size, *x.type.shape[1:])
        return b.slice(x, starts=(start, *(0,) * rank), steps=(1,) * (1 + rank), shape=shape)  # type: ignore[no-any-return]

    # 1. the parts
    g = Graph("part")
    number = g.add_input("number", TensorType(i64, ()))
    own = [g.add_input(v.name, v.type) for v in body.inputs[1 : 1 + carried]]
    own += [
        g.add_input(v.name, TensorType(v.type.dtype, (checkpoint, *v.type.shape)))
        for v in body.inputs[1 + carried : 1 + carried + scanned]
    ]
    own += [g.add_input(v.name, v.type) for v in body.inputs[1 + carried + scanned :]]
    inner = Builder(g, None, b.locs)
    base = inner.mul(number, checkpoint)
    made = inner.op("loop", None, None, *own, base, body=_counted(body), length=checkpoint, **attrs)
    g.outputs = list(made) if isinstance(made, tuple) else [made]
    taken = [
        b.reshape(part(x, left if f else 0, done), shape=(count, checkpoint, *x.type.shape[1:]))
        for x, f in zip(rows, flags)
    ]
    first = b.op("loop", None, None, *states, *taken, *captured, body=g, length=count, checkpoint=1, **attrs)
    first = first if isinstance(first, tuple) else (first,)
    tails = [b.reshape(y, shape=(done, *y.type.shape[2:])) for y in first[carried:]]
    if left == 0:
        return [*first[:carried], *tails]
    # 2. what is left
    taken = [part(x, 0 if f else done, left) for x, f in zip(rows, flags)]
    start = b.full(shape=(), value=done, dtype=i64)
    last = b.op(
        "loop", None, None, *first[:carried], *taken, *captured, start, body=_counted(body), length=left, **attrs
    )
    last = last if isinstance(last, tuple) else (last,)
    ys = [b.concat(*((y, x) if f else (x, y)), axis=0) for x, y, f in zip(tails, last[carried:], flags[scanned:])]
    return [*last[:carried], *ys]


def _counted(body: Graph) -> Graph:
    """A body whose first iteration has the number that its last captured value is."""
    g = Graph(body.name)
    own = [g.add_input(v.name, v.type) for v in body.inputs]
    base = g.add_input("base", TensorType(i64, ()))
    b = Builder(g)
    own[0] = b.add(own[0], base)
    g.outputs = inline(b, body, own)
    return g


# --- branches ---------------------------------------------------------------------------------------------------------


def cond_vjp(b: Builder, n: Node, cotangents: Given, needed: Sequence[int]) -> Mapping[int, Value]:
    """A branch over the pullbacks; what is heavy in a branch becomes a further result, which the other leaves blank."""
    g = b.graph
    names = ("then", "other")
    bodies: dict[str, Graph] = {k: n.attrs[k].copy() for k in names}
    found: dict[str, list[Value | None]] = {}
    seeds: dict[str, dict[int, Value]] = {}
    for name, body in bodies.items():
        inner = Builder(body, None, n.locs)
        seeds[name] = {
            k: body.add_input(f"cot{k}", o.type) for k, o in enumerate(body.outputs) if cotangents[k] is not None
        }
        given: dict[Value, Value] = {}
        for k, x in seeds[name].items():
            o = body.outputs[k]
            given[o] = inner.add(given[o], x) if o in given else x
        found[name] = pullback(body, given, [body.inputs[k - 1] for k in needed], n.locs)
    live = [j for j in range(len(needed)) if any(found[name][j] is not None for name in names)]
    if not live:
        return {}
    captured = len(n.inputs) - 1
    keep: dict[str, list[Value]] = {}
    results: dict[str, list[Value]] = {}
    for name, body in bodies.items():
        inner = Builder(body, None, n.locs)
        made = [c if (c := found[name][j]) is not None else zeros(inner, body.inputs[needed[j] - 1].type) for j in live]
        at_hand = {*body.inputs[:captured], *body.constants}
        keep[name], results[name] = kept(_read(body, set(seeds[name].values()), made, at_hand), at_hand), made
    # residuals of both branches share results of one type
    slots: list[TensorType] = []
    place: dict[str, list[int]] = {}
    for name in names:
        free = list(range(len(slots)))
        place[name] = []
        for v in keep[name]:
            k = next((k for k in free if slots[k] == v.type), len(slots))
            if k == len(slots):
                slots.append(v.type)
            else:
                free.remove(k)
            place[name].append(k)
    forward, backward = {}, {}
    inputs_used: set[int] = set()
    for name, body in bodies.items():
        inner = Builder(body, None, n.locs)
        at = dict(zip(place[name], keep[name]))
        more = [at[k] if k in at else _blank(inner, t) for k, t in enumerate(slots)]
        forward[name] = extract(body, name, body.inputs[:captured], [*body.outputs, *more])
        trim(forward[name])
        source = reached(results[name], {*body.inputs, *keep[name]})
        inputs_used |= {k for k in range(captured) if body.inputs[k] in source}
    used = sorted(inputs_used)
    for name, body in bodies.items():
        at = dict(zip(place[name], keep[name]))
        saved = [at[k] if k in at else body.add_input("unused", t) for k, t in enumerate(slots)]
        backward[name] = extract(
            body, name, [*(body.inputs[k] for k in used), *saved, *seeds[name].values()], results[name]
        )
        trim(backward[name])
    operands = [n.inputs[0], *(n.inputs[1 + k] for k in used)]
    g.redefine(n, n.inputs, {**n.attrs, **forward}, [*n.outputs, *slots])
    kept_values = n.outputs[len(n.outputs) - len(slots) :]
    given_cotangents = [c for c in cotangents if c is not None]
    done = b.node(n.op, [*operands, *kept_values, *given_cotangents], backward).outputs
    return {needed[j]: o for j, o in zip(live, done)}


def _read(body: Graph, seeds: set[Value], results: Sequence[Value], at_hand: set[Value]) -> list[Value]:
    """The values that do not depend on cotangents, and that what depends on them reads."""
    moved = set(seeds)
    read = list(results)
    for n in body.nodes():
        operands = [v for v in n.inputs if v is not None]
        if not moved.isdisjoint(operands):
            moved.update(n.outputs)
            read += operands
    return list(dict.fromkeys(v for v in read if v not in moved and v not in at_hand))


# --- forward mode -----------------------------------------------------------------------------------------------------


def loop_jvp(b: Builder, n: Node, tangents: Given) -> list[Value | None]:
    """A loop that carries and scans tangents beside values, and stacks those of stacked results.

    h = loop(None, c, h0, w, body=f, carried=1)   ->   _, th = loop(None, c, h0, th0, w, tw, body=f', carried=2)

    The given loop stays: what is linear in tangents must not make values, so that it can be taken apart from them.
    """
    a = n.attrs
    ends, carried, scanned = n.inputs[1] is not None, a["carried"], a["scanned"]
    operands, given = n.inputs[2:], tangents[2:]
    moving = {k for k, t in enumerate(given) if t is not None}
    while True:  # a state that depends on a tangent has one from the beginning
        body = a["body"].copy()
        inner = Builder(body, None, n.locs)
        own = body.inputs[1 : 1 + len(operands)]
        inside = {own[k]: body.add_input(f"t_{own[k].name}", own[k].type) for k in sorted(moving)}
        floats = [k for k, o in enumerate(body.outputs[ends:]) if o.type.dtype.is_float]
        found = pushforward(body, inside, [body.outputs[ends + k] for k in floats], n.locs)
        made = {k: t for k, t in zip(floats, found) if t is not None}
        more = {k for k in made if k < carried} - moving
        if not more:
            break
        moving |= more
    first = carried + scanned
    states, rows, captured = (
        [k for k in sorted(moving) if low <= k < high]
        for low, high in ((0, carried), (carried, first), (first, len(operands)))
    )
    stacked = [k for k in made if k >= carried]
    flags = a["backward"] or (False,) * (scanned + len(n.outputs) - carried)

    def mixed(values: Sequence[Any], tangent: Callable[[int], Any]) -> list[Any]:
        """Operands, or inputs of the body; each kind is followed by its tangents."""
        return [
            *values[:carried],
            *map(tangent, states),
            *values[carried:first],
            *map(tangent, rows),
            *values[first:],
            *map(tangent, captured),
        ]

    changed = [made[k] if k in made else zeros(inner, own[k].type) for k in states]
    results = [*body.outputs[: ends + carried], *changed, *(made[k] for k in stacked)]
    joint = extract(body, body.name, [body.inputs[0], *mixed(own, lambda k: inside[own[k]])], results)
    back = (*flags[:scanned], *(flags[k - carried] for k in rows), *(flags[scanned + k - carried] for k in stacked))
    attrs = {
        **a,
        "body": joint,
        "carried": carried + len(states),
        "scanned": scanned + len(rows),
        "backward": back,
    }
    start = {k: t if (t := given[k]) is not None else zeros(b, own[k].type) for k in moving}
    done = b.node(n.op, [*n.inputs[:2], *mixed(operands, lambda k: start[k])], attrs).outputs
    out: list[Value | None] = [None] * len(n.outputs)
    for k, o in zip([*states, *stacked], done[carried:]):
        out[k] = o
    return out


def cond_jvp(b: Builder, n: Node, tangents: Given) -> list[Value | None]:
    """A branch that computes tangents, zeros where a body has none; see `loop_jvp`."""
    have = [k for k, t in enumerate(tangents) if t is not None and k]
    bodies: dict[str, Graph] = {}
    found: dict[str, list[Value | None]] = {}
    for name in ("then", "other"):
        body = bodies[name] = n.attrs[name].copy()
        own = list(body.inputs)
        given = {own[k - 1]: body.add_input(f"t_{own[k - 1].name}", own[k - 1].type) for k in have}
        floats = [k for k, o in enumerate(body.outputs) if o.type.dtype.is_float]
        made = dict(zip(floats, pushforward(body, given, [body.outputs[k] for k in floats], n.locs)))
        found[name] = [made.get(k) for k in range(len(n.outputs))]
    live = [k for k in range(len(n.outputs)) if any(ts[k] is not None for ts in found.values())]
    out: list[Value | None] = [None] * len(n.outputs)
    if not live:
        return out
    for name, body in bodies.items():
        inner = Builder(body, None, n.locs)
        body.outputs = [t if (t := found[name][k]) is not None else zeros(inner, n.outputs[k].type) for k in live]
        prune(body)
    done = b.node(n.op, [*n.inputs, *(tangents[k] for k in have)], bodies).outputs
    for k, o in zip(live, done):
        out[k] = o
    return out
