"""Define-by-run gradients: `loss.backward()` on lazy arrays, with Python's own control flow between them.

An array that requires a gradient marks its value as the root of a history. What is computed from a root is tracked: it
keeps the call that made it, also after its contents are there. `backward` records one call, whose body is the
derivative of the history: made once for each structure of histories (ops, attributes, types, wiring, roots) and found
again by it. Its operands are the history's values that it reads, be they computed or not.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

from dnnc.array.core import Array, fresh, scalar
from dnnc.array.creation import asarray
from dnnc.array.lazy import DEEPEST, PROGRAMS, Call, Lazy, Step, Untracked, buffer, materialise, results
from dnnc.array.operators import NUMBERS
from dnnc.array.sizes import same_shape
from dnnc.array.structure import END, ROOT, TRACKED
from dnnc.ir.autodiff.reverse import pullback
from dnnc.ir.errors import GradientError, InputError
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.expand import extract, reached
from dnnc.ir.lru import LRU
from dnnc.ir.ops import OPS


def begin(x: Array) -> None:
    """Let an array require a gradient. GradientError unless it holds real floats."""
    (value, *rest) = x._parts
    if rest or not value.type.dtype.is_float:
        raise GradientError(f"requires_grad: the array is {x.dtype}, expected real floats")
    if value.traced:
        raise GradientError("requires_grad: within a traced function take dnnc.grad in place of backward")
    _root(x, Lazy(value.type, data=buffer(value), device=value.device))


def again(x: Array, before: Lazy, parts: Sequence[Lazy]) -> None:
    """Let an array take another value, and require a gradient as before. It is computed with the step that wrote it."""
    value = parts[0]
    if value.traced or value.call is None or value.depth >= DEEPEST:
        x._set(parts)
        begin(x)
        return
    made = Lazy(value.type, value.call, value.index)
    made.step = before.step
    take(x, made)


def _root(x: Array, value: Lazy) -> None:
    value.tracked, value.root = ROOT, weakref.ref(x)
    x._set((value,))


def take(x: Array, value: Lazy) -> None:
    """Let an array take a value that nobody else holds. It requires a gradient if it did."""
    before = x._parts[0]
    if before.tracked == ROOT and before.root() is x:
        value.tracked, value.root, value.owner = ROOT, before.root, before.root
        x._parts, x._pairs = (value,), None
    else:
        x._set((value,))


def end(x: Array) -> None:
    """Let an array require no gradient any more; what was computed from it still knows its value."""
    value = x._parts[0]
    x._set((Lazy(value.type, data=buffer(value), device=value.device),))


def made_by(x: Lazy) -> Call | None:
    """The call in a value's history; None for roots and for what is not tracked."""
    if x.tracked != TRACKED:
        return None
    call = x.origin if x.call is None else x.call
    return call if call.tracked else None


def backward(y: Array, gradient: Any) -> None:
    """See `Array.backward`."""
    value = y._parts[0]
    if value.traced:
        raise GradientError("backward: within a traced function take dnnc.grad in place of backward")
    if len(y._parts) > 1 or not value.type.dtype.is_float:
        raise GradientError(f"backward: the array is {y.dtype}, expected real floats")
    if gradient is None and y.ndim:
        raise GradientError(
            f"backward: an array of shape {y.shape} needs the gradient of its shape; or reduce it with sum or mean"
        )
    seed = _seed(y, gradient)
    h = History(value)
    if not h.roots:
        raise GradientError(
            "backward: the array depends on no array that requires a gradient; set x.requires_grad = True before "
            "computing with x"
        )
    materialise(h.roots)  # those that were written to: the step before is a program of its own
    found = PULLBACKS.find(h.key)
    if found is None:
        found = PULLBACKS[h.key] = Pullback(h, value)
    h.digest = found.digest
    made = found.gradients(h, seed)
    refs = [h.roots[k].root for k in found.wanted]
    step = Step(weakref.ref(y), [r for r in refs if r is not None], h)
    value.step = step
    for root in h.roots:
        root.step = step
    for ref, g in zip(refs, made):
        x = ref() if ref is not None else None
        if x is not None:
            g.step = step
            x._grad = fresh(g) if x._grad is None else x._grad + fresh(g)


def _seed(y: Array, gradient: Any) -> Lazy:
    if gradient is None:
        return scalar(1.0, y.dtype)._parts[0]
    a = scalar(gradient, y.dtype) if isinstance(gradient, NUMBERS) else asarray(gradient)
    if a.dtype != y.dtype or not same_shape(a.shape, y.shape):
        raise InputError(f"backward: the gradient must be {y.dtype} of shape {y.shape}, got {a.dtype} of {a.shape}")
    return a._parts[0]


class History:
    """What a tracked value was computed from, in one walk.

    `calls` (with numbers of their first results of `count`, and as `order`) and `leaves` in the order in which they are
    met; `roots`: the leaves that require a gradient; `key`: equal for values that are computed by the same ops in the
    same way of operands of the same types; `digest`: of the key.
    """

    __slots__ = ("along", "calls", "count", "digest", "key", "leaves", "made", "order", "roots")

    def __init__(self, last: Lazy) -> None:
        calls: dict[Call, int] = {}  # by number of the first result
        leaves: dict[Lazy, int] = {}
        made: dict[Any, Lazy] = {}  # results of calls; of the first one by the call alone
        key: list[Any] = []
        first = made_by(last)
        stack = [] if first is None else [first]
        if first is None:
            leaves[last] = 0
        else:
            made[(first, last.index) if last.index else first] = last
        count, behind = 0, TRACKED
        self.along: list[weakref.ref[Lazy]] = []
        self.digest = ""
        while stack:
            call = stack[-1]
            if call in calls:
                stack.pop()
                continue
            before = len(stack)
            words: list[Any] = [call.key]
            for i in call.inputs:
                if i is None:
                    words.append(-1)
                    continue
                c = None if i.tracked != behind else i.call or i.origin
                if c is None or not c.tracked:
                    words.append(-2 - leaves.setdefault(i, len(leaves)))
                    continue
                if i.index:
                    made[c, i.index] = i
                else:
                    made[c] = i
                number = calls.get(c)
                if number is None:
                    stack.append(c)
                else:
                    words.append(number + i.index)
            if len(stack) == before:
                stack.pop()
                calls[call] = count
                count += len(call.types)
                key += words
                if call.along:
                    self.along += call.along
        self.roots = [x for x in leaves if x.tracked]
        key.append(END)
        for x in leaves:
            key += (x.type.dtype.name, x.type.shape, x.tracked)
        key.append(last.index)
        self.calls, self.order, self.count = calls, list(calls), count
        self.leaves, self.made, self.key = list(leaves), made, tuple(key)

    def pending(self) -> bool:
        """Is nothing of it computed?"""
        return all(map(CALL, self.made.values()))

    def values(self, places: Sequence[Place]) -> list[Lazy]:
        """The values at places of the history."""
        leaves, order, made = self.leaves, self.order, self.made
        return [
            leaves[-1 - at]
            if at < 0
            else made.get((order[at], k) if k else order[at]) or Lazy(order[at].types[k], order[at], k)
            for at, k in places
        ]


CALL = attrgetter("call")
Place = tuple[int, int]  # the number of a call and of its result; or -1, -2, ... for the leaves


class Pullback:
    """The derivative of a history as one call, for all histories of its structure.

    `reads`: the places of its operands, which the cotangent of the last value follows; `wanted`: which roots have a
    gradient, by number.
    """

    def __init__(self, h: History, last: Lazy) -> None:
        g = Graph("gradient")
        places: dict[Value, Place] = {}
        known: dict[Any, Value] = {}
        for k, x in enumerate(h.leaves):
            v = known[x] = g.add_input(f"x{k}", x.type)
            places[v] = -1 - k, 0
        roots = [known[x] for x in h.roots]
        for k, call in enumerate(h.calls):
            inputs = [None if i is None else known[_source(i)] for i in call.inputs]
            node = g.append(Node(call.op, inputs, dict(call.attrs), call.types, call.locs))
            for j, v in enumerate(node.outputs):
                known[call, j], places[v] = v, (k, j)
        cotangent = g.add_input("cotangent", last.type)
        found = pullback(g, {known[_source(last)]: cotangent}, roots)
        self.wanted = [k for k, c in enumerate(found) if c is not None]
        cotangents = [c for c in found if c is not None]
        every = reached(cotangents, places)
        given = [v for v in places if v in every]
        self.reads = [places[v] for v in given]
        self.body = extract(g, "gradient", [*given, cotangent], cotangents)
        self.types = tuple(v.type for v in cotangents)
        self.attrs = {"body": self.body}
        self.key = ("call", self.body.structural_hash())
        self.digest = hashlib.sha256(repr(h.key).encode()).hexdigest()

    def gradients(self, h: History, seed: Lazy) -> list[Lazy]:
        """The gradients of the wanted roots of a history of this structure."""
        call = Untracked(OPS["call"], (*h.values(self.reads), seed), self.attrs, self.types, self.key)
        if call.traced:
            call.trace()
        return results(call)


def _source(x: Lazy) -> Any:
    """What tells a value of a history from others."""
    call = made_by(x)
    return x if call is None else (call, x.index)


PULLBACKS: LRU[Any, Pullback] = LRU(PROGRAMS)


def unchain(y: Array) -> None:
    """See `Array.unchain_backward`.

    A value that is not computed yet is computed with the step that is under way, else at once: the expressions of
    later steps begin with its contents, and do not grow.
    """
    value = y._parts[0]
    for x in list(_behind(value)):
        (x.call or x.origin).tracked = 0
        x.tracked = 0
        if x.call is None:
            del x.origin
    if value.call is None or value.step is not None:
        return
    step = _under_way(value)
    if step is None:
        materialise([value])
        return
    step.roots.append(weakref.ref(y))
    value.step = step


def _under_way(last: Lazy) -> Step | None:
    """A step that is not computed yet, with an array that a value is computed of."""
    seen: set[int] = set()
    stack = [last]
    while stack:
        x = stack.pop()
        if x.step is not None and x.step.values():
            return x.step
        if x.call is not None and id(x) not in seen:
            seen.add(id(x))
            stack += [i for i in x.call.inputs if i is not None]
    return None


def _behind(last: Lazy) -> Iterator[Lazy]:
    """The tracked values in a history, but for its roots."""
    seen: set[int] = set()
    stack = [last]
    while stack:
        x = stack.pop()
        call = made_by(x)
        if call is None or id(x) in seen:
            continue
        seen.add(id(x))
        stack += [i for i in call.inputs if i is not None]
        yield x
