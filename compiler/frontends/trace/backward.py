"""Define-by-run gradients: `loss.backward()` on lazy arrays, with Python's own control flow between them.

An array that requires a gradient marks its value as the root of a history. What is computed from a root is tracked: it
keeps the call that made it, also after its contents are there. `backward` makes a graph of the history, differentiates
it, and reads values that were computed already where they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from dnnc.array.core import NUMBERS, Array, scalar
from dnnc.array.creation import asarray
from dnnc.array.lazy import Call, Lazy, buffer
from dnnc.array.sizes import same_shape
from dnnc.frontends.trace.functions import Replay
from dnnc.frontends.trace.regions import key_of
from dnnc.ir.autodiff.reverse import pullback
from dnnc.ir.errors import GradientError, InputError
from dnnc.ir.graph import Graph, Node, Value


def begin(x: Array) -> None:
    """Let an array require a gradient. GradientError unless it holds real floats."""
    (value, *rest) = x._parts
    if rest or not value.type.dtype.is_float:
        raise GradientError(f"requires_grad: the array is {x.dtype}, expected real floats")
    if value.traced:
        raise GradientError("requires_grad: within a traced function take dnnc.grad in place of backward")
    made = Lazy(value.type, data=buffer(value), device=value.device)
    made.tracked, made.root = True, weakref.ref(x)
    x._set((made,))


def end(x: Array) -> None:
    """Let an array require no gradient any more; what was computed from it still knows its value."""
    value = x._parts[0]
    x._set((Lazy(value.type, data=buffer(value), device=value.device),))


def made_by(x: Lazy) -> Call | None:
    """The call in a value's history; None for roots and for what is not tracked."""
    if not x.tracked or getattr(x, "root", None) is not None:
        return None
    call = x.call or getattr(x, "origin", None)
    return call if call is not None and call.tracked else None


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
    h = _History(value)
    if not h.roots:
        raise GradientError(
            "backward: the array depends on no array that requires a gradient; set x.requires_grad = True before "
            "computing with x"
        )
    g = h.graph
    cotangent = g.add_input("cotangent", value.type)
    known = {**h.known, cotangent: seed}
    found = pullback(g, {h.value(value): cotangent}, list(h.roots))
    wanted = [(root, c) for root, c in zip(h.roots.values(), found) if c is not None]
    for (root, _), made in zip(wanted, Replay(g, known).values([c for _, c in wanted])):
        x = root()
        if x is not None:
            made.tracked = False
            new = Array((made,), x.dtype)
            x.grad = new if x.grad is None else x.grad + new


def _seed(y: Array, gradient: Any) -> Lazy:
    if gradient is None:
        return scalar(1.0, y.dtype)._parts[0]
    a = scalar(gradient, y.dtype) if isinstance(gradient, NUMBERS) else asarray(gradient)
    if a.dtype != y.dtype or not same_shape(a.shape, y.shape):
        raise InputError(f"backward: the gradient must be {y.dtype} of shape {y.shape}, got {a.dtype} of {a.shape}")
    return a._parts[0]


class _History:
    """The graph of what a tracked value was computed from. Its inputs are roots, and values without a history."""

    def __init__(self, last: Lazy) -> None:
        self.graph = Graph("history")
        self.roots: dict[Value, weakref.ref[Any]] = {}
        self.known: dict[Value, Lazy] = {}
        self._values: dict[Any, Value] = {}
        stack = [last]
        while stack:
            x = stack[-1]
            call = made_by(x)
            if self._key(x) in self._values:
                stack.pop()
                continue
            missing = (
                [] if call is None else [i for i in call.inputs if i is not None and self._key(i) not in self._values]
            )
            stack += missing[::-1]
            if not missing:
                self._enter(x, call)

    @staticmethod
    def _key(x: Lazy) -> Any:
        call = made_by(x)
        return (id(call), x.index) if call is not None else key_of(x)

    def value(self, x: Lazy) -> Value:
        return self._values[self._key(x)]

    def _enter(self, x: Lazy, call: Call | None) -> None:
        if call is None:
            v = self.graph.add_input(f"x{len(self.graph.inputs)}", x.type)
            root = getattr(x, "root", None) if x.tracked else None
            if root is not None:
                self.roots[v] = root
            self._values[self._key(x)], self.known[v] = v, x
            return
        inputs = [None if i is None else self.value(i) for i in call.inputs]
        node = self.graph.append(Node(call.op, inputs, call.attrs, call.types, call.locs))
        for k, v in enumerate(node.outputs):
            self._values[id(call), k] = v
        self.known[node.outputs[x.index]] = x


def unchain(y: Array) -> None:
    """See `Array.unchain_backward`."""
    for x in list(_behind(y._parts[0])):
        call = x.call or getattr(x, "origin", None)
        if call is not None:
            call.tracked = False
        x.tracked, x.origin = False, None


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
