"""Rules of ops that hold a function: computed again for its gradient, or with a gradient that its author gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dnnc.ir.autodiff.reverse import pullback, zeros
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.core import Node, Value
from dnnc.ir.graph.expand import inline

Given = Sequence["Value | None"]


def no_cotangent(b: Builder, n: Node, cotangents: Given, needed: Sequence[int]) -> Mapping[int, Value]:
    return {}


def no_tangent(b: Builder, n: Node, tangents: Given) -> list[Value | None]:
    return [None] * len(n.outputs)


def recomputed(b: Builder, n: Node, cotangents: Given, needed: Sequence[int]) -> Mapping[int, Value]:
    """Of the value; the token has none."""
    (g,) = cotangents
    return {0: g} if g is not None and 0 in needed else {}


def checkpoint(b: Builder, n: Node, cotangents: Given, needed: Sequence[int]) -> Mapping[int, Value]:
    """The body runs again, on operands that are marked as of this moment, and then backward."""
    g = b.graph
    token = next(c for c in cotangents if c is not None)
    marked = [
        v if v is None or g.variance(v).call_invariant else b.recomputed(v, token) for v in n.inputs
    ]  # what depends on constants alone is worth keeping
    body = n.attrs["body"].copy()
    inner = list(body.inputs)
    seeds = {
        o: body.add_input(f"cotangent{k}", o.type) for k, o in enumerate(body.outputs) if cotangents[k] is not None
    }
    found = pullback(body, seeds, [inner[k] for k in needed], n.locs)
    body.outputs = [v for v in found if v is not None]
    made = iter(inline(b, body, [*marked, *(c for c in cotangents if c is not None)]))
    return {k: next(made) for k, v in zip(needed, found) if v is not None}


def custom_vjp(b: Builder, n: Node, cotangents: Given, needed: Sequence[int]) -> Mapping[int, Value]:
    """The results come from the forward rule, which gives the residuals of the backward rule too."""
    g = b.graph
    assert n.graph is g
    forward, backward = n.attrs["forward"], n.attrs["backward"]
    made = inline(Builder(g, n, n.locs), forward, n.inputs)
    results = len(n.outputs)
    for old, new in zip(n.outputs, made):
        g.replace_all_uses(old, new)
    g.erase(n)
    given = [zeros(b, v.type) if c is None else c for v, c in zip(made, cotangents)]
    found = inline(b, backward, [*made[results:], *given])
    return {k: found[k] for k in needed}
