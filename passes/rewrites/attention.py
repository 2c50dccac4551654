"""Recognise attention spelled out in products, a softmax and what stands between, and put the one op in their place.

    matmul(softmax(add(mul(matmul(q, k), 0.125), mask)), v)       ->   attention(q, transpose(k), v, mask, scale=0.125)
    matmul(where(isnan(p), 0, p), v), where p is such a softmax   ->   attention(..., masked_rows="zero")

The scores, the largest values of a transformer, then never leave a kernel. For targets that have a kernel for it
(`ctx.facts.fuses_attention`); runs on the canonical graph, before precision: its scores are float32 inside. On others
the op is two products and a softmax, whose kernels are far faster than a nest over all of it.
"""

from __future__ import annotations

from dnnc.ir.autodiff.rules.common import narrow
from dnnc.ir.autodiff.rules.matmul import attention_weights
from dnnc.ir.dtype import f32
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.shapes import broadcast_shapes
from dnnc.passes.base import PassContext
from dnnc.passes.rewrite import Match, Rule, producer, rewrite

LARGEST_HEAD = 256  # elements of a query: more do not fit into the registers of a tile


def attention(graph: Graph, ctx: PassContext) -> bool:
    """Replace the pattern above wherever its scores have no other reader. Nothing happens with strict numerics."""
    return rewrite(graph, (Rule(to_attention, ("matmul",), exact=False),), ctx) if ctx.facts.fuses_attention else False


def attention_parts(graph: Graph, ctx: PassContext) -> bool:
    """Replace the op by its parts for targets without a kernel for it. Nothing happens with strict numerics."""
    parts = (Rule(from_attention, ("attention",), exact=False),)
    return rewrite(graph, parts, ctx) if not ctx.facts.fuses_attention else False


def from_attention(m: Match) -> Value:
    """attention(q, k, v, mask, scale=s) -> matmul(softmax(add(mul(matmul(q, transpose(k)), s), mask)), v)"""
    y: Value = m.b.matmul(narrow(m.b, attention_weights(m.b, m.root), m.root.output.type.dtype), m.operand(m.root, 2))
    return y


def to_attention(m: Match) -> Value:
    """matmul(softmax(add(mul(matmul(q, k), s), mask)), v) -> attention(q, transpose(k), v, mask, scale=s)"""
    v, (weights, masked_rows) = m.operand(m.root, 1), _weights(m, m.operand(m.root, 0))
    scores = m.operand(weights, 0)
    rank = scores.type.rank
    m.require(weights.attrs["axis"] % rank == rank - 1, "the softmax is not over the keys")
    ok = scores.type.dtype.is_float and scores.type.dtype.bytes <= 4
    m.require(ok, "{} is no type of tensor cores", scores.type.dtype)
    scores, mask = _masked(m, scores)
    scores, scale = _scaled(m, scores)
    product = m.sole(m.node(scores, "matmul"))
    q, k = m.operand(product, 0), m.operand(product, 1)
    (q, of_q), (k, of_k) = _scaled(m, q), _scaled(m, k)
    ok = q.type.rank == k.type.rank == v.type.rank == rank >= 3
    m.require(ok, "operands have ranks {}, {} and {}", q.type.rank, k.type.rank, v.type.rank)
    m.require(q.type.shape[:-2] == k.type.shape[:-2] == v.type.shape[:-2], "batches are broadcast")
    heads = (q.type.shape[-1], v.type.shape[-1])
    m.require(all(isinstance(d, int) and 0 < d <= LARGEST_HEAD for d in heads), "heads of {} and {} elements", *heads)
    if mask is not None and mask.type.dtype is not f32:
        mask = m.b.cast(mask, to=f32)
    swap = (*range(rank - 2), rank - 1, rank - 2)
    masks = () if mask is None else (mask,)
    made: Value = m.b.attention(
        q, _transposed(m, k, swap), v, *masks, scale=scale * of_q * of_k, masked_rows=masked_rows
    )
    return made


def _weights(m: Match, v: Value) -> tuple[Node, str]:
    """The softmax, and what becomes of rows without keys: `where(isnan(p), 0, p)` makes them zero."""
    if producer(v, "where") is None:
        return m.sole(m.node(v, "softmax")), "nan"
    choice = m.sole(m.node(v, "where"))
    test, p = m.sole(m.node(m.operand(choice, 0), "isnan")), m.node(m.operand(choice, 2), "softmax")
    ok = m.operand(test, 0) is p.output and m.number(m.operand(choice, 1)) == 0
    m.require(ok, "the choice is not one of zero for what is no number")
    ok = {u for u, _ in p.output.uses} == {test, choice} and p.output not in m.outputs
    m.require(ok, "{} has other readers", p.output.name)
    return p, "zero"


def _masked(m: Match, scores: Value) -> tuple[Value, Value | None]:
    """`add(scores, mask)` as its parts. Which operand is the mask: the one that is no product."""
    n = producer(scores, "add")
    if n is None:
        return scores, None
    m.sole(n)
    m.matched.append(n)
    for k in (0, 1):
        x, mask = m.operand(n, k), m.operand(n, 1 - k)
        if (
            x.type.shape == scores.type.shape
            and _leads_to_product(x)
            and broadcast_shapes(scores.type.shape, mask.type.shape) == scores.type.shape
        ):
            return x, mask
    return scores, None


def _leads_to_product(v: Value) -> bool:
    at: Value | None = v
    while (n := producer(at, "mul", "div")) is not None:
        at = next((x for x in n.inputs if x is not None and x.node is not None and x.type.shape == v.type.shape), None)
    return producer(at, "matmul") is not None


def _scaled(m: Match, v: Value) -> tuple[Value, float]:
    """`mul(x, number)` or `div(x, number)` as x and the factor; other values as they are, times 1."""
    n = producer(v, "mul", "div")
    if n is None:
        return v, 1.0
    divides = producer(v, "div") is not None
    constants = [k for k in (0, 1) if n.inputs[k] in m.graph.constants and n.inputs[k].type.size == 1]  # type: ignore[union-attr]
    if not constants or (divides and constants[-1] != 1):
        return v, 1.0
    number = float(m.number(m.operand(n, constants[-1])))
    if not number:
        return v, 1.0
    m.matched.append(n)
    return m.operand(n, 1 - constants[-1]), 1.0 / number if divides else number


def _transposed(m: Match, v: Value, perm: tuple[int, ...]) -> Value:
    """transpose(v), or what v is a transpose of: two in a row are one, also with a reshape of the batch between."""
    made: Value | None = None
    if (n := producer(v, "transpose")) is not None:
        both = tuple(n.attrs["perm"][p] for p in perm)
        x = m.operand(n, 0)
        made = x if both == tuple(range(len(both))) else m.b.transpose(x, perm=both)
    elif (n := producer(v, "reshape")) is not None:
        x = m.operand(n, 0)
        turned = producer(x, "transpose")
        rank = x.type.rank
        swap = (*range(rank - 2), rank - 1, rank - 2)
        if turned is not None and tuple(turned.attrs["perm"]) == swap and x.type.shape[-2:] == v.type.shape[-2:]:
            made = m.b.reshape(m.operand(turned, 0), shape=(*v.type.shape[:-2], v.type.shape[-1], v.type.shape[-2]))
    if made is None:
        made = m.b.transpose(v, perm=perm)
    return made
