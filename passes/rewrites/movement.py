"""Rules for movement ops in `canonicalize`: identities vanish, moves join or get cheaper; exact unless noted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dnnc.ir.graph import Node, Value
from dnnc.ir.op import Trait
from dnnc.ir.ops import OPS
from dnnc.ir.ops.common import same_dim
from dnnc.ir.ops.reduce import all_axes
from dnnc.ir.shapes import normalize_axis
from dnnc.passes.rewrite import Match, Rule, producer

# element-wise ops of several operands, which broadcast, and matmul, which broadcasts its batch dims
BROADCASTING = tuple(
    n for n, op in OPS.items() if Trait.ELEMENTWISE in op.traits and op.compute and len(op.samples[0].inputs) > 1
)


def _zero(dims: Sequence[Any]) -> bool:
    return all(same_dim(d, 0) for d in dims)


def _straight_slice(n: Node) -> bool:
    return _zero(n.attrs["starts"]) and all(
        s == 1 or same_dim(d, 1) for s, d in zip(n.attrs["steps"], n.attrs["shape"])
    )


# is a node, whose result has its operand's type, a plain copy?
_COPIES: dict[str, Callable[[Node], bool]] = {
    "identity": lambda n: True,
    "reshape": lambda n: True,
    "expand": lambda n: True,
    "tile": lambda n: True,
    "cast": lambda n: True,
    "concat": lambda n: len(n.inputs) == 1,
    "transpose": lambda n: list(n.attrs["perm"]) == sorted(n.attrs["perm"]),
    "slice": _straight_slice,
    "pad": lambda n: _zero(n.attrs["pads"]),
    "clip": lambda n: n.attrs["low"] is None and n.attrs["high"] is None,
}


def drop_copy(m: Match) -> Value:
    """identity(x) -> x; reshape, expand, tile, cast, concat, transpose, slice, pad, clip that change nothing -> x"""
    m.require(_COPIES[m.root.op.name](m.root), "{} moves elements", m.root.op.name)
    return m.keeps_type(m.operand(m.root, 0))


def plain_shape(m: Match) -> Value:
    """reshape(x, shape=(2, -1)) -> reshape(x, shape=(2, 12))"""
    shape = m.root.output.type.shape
    m.require(m.root.attrs["shape"] != shape, "the shape has no open dim")
    return m.b.reshape(m.operand(m.root, 0), shape=shape)  # type: ignore[no-any-return]


def merge_reshapes(m: Match) -> Value:
    """reshape(reshape(x)) -> reshape(x)"""
    x = m.operand(m.node(m.operand(m.root, 0), "reshape"), 0)
    return m.b.reshape(x, shape=m.root.output.type.shape)  # type: ignore[no-any-return]


def merge_transposes(m: Match) -> Value:
    """transpose(transpose(x, perm=p), perm=q) -> transpose(x, perm=p[q])"""
    inner = m.node(m.operand(m.root, 0), "transpose")
    perm = tuple(inner.attrs["perm"][k] for k in m.root.attrs["perm"])
    return m.b.transpose(m.operand(inner, 0), perm=perm)  # type: ignore[no-any-return]


def cancel_transposes(m: Match) -> Value:
    """transpose(mul(transpose(x, perm=(0, 2, 1)), s), perm=(0, 2, 1)) -> mul(x, transpose(s)) for constant s"""
    perm, rank = m.root.attrs["perm"], m.root.output.type.rank
    chain: list[
        tuple[Node, int]
    ] = []  # from the last to the first, with the operand that comes from the other transpose
    v = m.operand(m.root, 0)
    while v.node is not None and producer(v, "transpose") is None:
        n = m.sole(v.node)
        made = [k for k, u in enumerate(n.inputs) if u is not None and not m.graph.variance(u).call_invariant]
        ok = Trait.ELEMENTWISE in n.op.traits and len(n.outputs) == 1 and len(made) == 1
        m.require(ok, "{} is not made by an element-wise node of constants", v.name)
        chain.append((n, made[0]))
        v = m.operand(n, made[0])
        ok = len(v.type.shape) == rank and all(same_dim(a, b) for a, b in zip(v.type.shape, n.output.type.shape))
        m.require(ok, "{} is broadcast", v.name)
    inner = m.node(v, "transpose")
    ok = len(chain) > 0 and [inner.attrs["perm"][k] for k in perm] == [*range(rank)]
    m.require(ok, "the transposes do not cancel each other")

    def turned(c: Value | None) -> Value | None:
        if c is None or c.type.rank == 0:
            return c
        return m.b.transpose(m.b.reshape(c, shape=(1,) * (rank - c.type.rank) + c.type.shape), perm=perm)  # type: ignore[no-any-return]

    y = m.operand(inner, 0)
    for n, k in reversed(chain):
        y = m.b.node(n.op, [y if j == k else turned(c) for j, c in enumerate(n.inputs)], n.attrs).output
    return y


def transpose_to_reshape(m: Match) -> Value:
    """transpose(x: f32[1, 4, 1, 5], perm=(1, 0, 3, 2)) -> reshape(x, shape=(4, 1, 5, 1)): only size-1 dims move"""
    x = m.operand(m.root, 0)
    wide = [k for k in m.root.attrs["perm"] if not same_dim(x.type.shape[k], 1)]
    m.require(wide == sorted(wide), "axes {} with more than one element change places", tuple(wide))
    return m.b.reshape(x, shape=m.root.output.type.shape)  # type: ignore[no-any-return]


def transpose_of_product(m: Match) -> Value:
    """transpose(matmul(transpose(x), y)) -> matmul(transpose(y), x) for matrices that are not constant"""
    product = m.sole(m.node(m.operand(m.root, 0), "matmul"))
    a, b = m.operand(product, 0), m.operand(product, 1)
    m.require(a.type.rank > 1 and b.type.rank > 1, "an operand is a vector")
    m.require(m.root.attrs["perm"] == _swapped(m.root.output.type.rank), "more than the last two axes change places")
    inner = m.node(a, "transpose")
    m.require(inner.attrs["perm"] == _swapped(a.type.rank), "the left operand is not a matrix that was turned")
    m.require(
        not m.graph.variance(b).call_invariant, "{} is prepared before the call, which needs it on the right", b.name
    )
    turned = m.b.transpose(b, perm=_swapped(b.type.rank))
    return m.b.node(product.op, [turned, m.operand(inner, 0)], product.attrs).output


def _swapped(rank: int) -> tuple[int, ...]:
    return (*range(rank - 2), rank - 1, rank - 2)


def merge_expands(m: Match) -> Value:
    """expand(expand(x)) -> expand(x)"""
    x = m.operand(m.node(m.operand(m.root, 0), "expand"), 0)
    return m.b.expand(x, shape=m.root.output.type.shape)  # type: ignore[no-any-return]


def merge_slices(m: Match) -> Value:
    """slice(slice(x)) -> slice(x)"""
    inner = m.node(m.operand(m.root, 0), "slice")
    a, b = inner.attrs, m.root.attrs
    m.require(all(isinstance(d, int) for d in (*a["starts"], *b["starts"])), "a start is symbolic")
    starts = tuple(s + t * k for s, t, k in zip(a["starts"], a["steps"], b["starts"]))
    steps = tuple(s * t for s, t in zip(a["steps"], b["steps"]))
    return m.b.slice(m.operand(inner, 0), starts=starts, steps=steps, shape=b["shape"])  # type: ignore[no-any-return]


def drop_expand(m: Match) -> Value:
    """add(expand(x), y) -> add(x, y) where y alone gives the result its shape; likewise all ops that broadcast"""
    for k, v in enumerate(m.root.inputs):
        repeated = producer(v, "expand")
        if repeated is not None:
            inputs = [*m.root.inputs]
            inputs[k] = repeated.inputs[0]
            if m.fits(inputs):
                m.node(v, "expand")
                return m.like(inputs)
    return _no(m, "no operand is an expand that the others make superfluous")


def sink_expand(m: Match) -> Value:
    """where(expand(c), 0.0, 1.0) -> expand(where(c, 0.0, 1.0)) where only expand gives the shape"""
    inputs = [m.node(v, "expand").inputs[0] if producer(v, "expand") is not None else v for v in m.root.inputs]
    m.require(len(m.matched) > 1, "no operand is an expand")
    m.require(m.shrinks(inputs), "another operand gives the result its shape")
    return m.expanded(m.like(inputs))


def hoist_units(m: Match) -> Value:
    """reshape(equal(x: i32[7, 1], y: i32[9]), shape=(7, 1, 9)) -> equal(reshape(x), reshape(y)): no operand is full"""
    n = m.node(m.operand(m.root, 0), *BROADCASTING)
    old, new = n.output.type.shape, m.root.output.type.shape
    m.require(_differ_by_units(old, new), "not only dims of size 1 come or go")
    m.require(_of_broadcasts(m.sole(n)), "an operand is as large as the result")

    def reshaped(v: Value | None) -> Value | None:
        if v is None or not v.type.shape:
            return v
        own = iter([d for d, e in zip((1,) * (len(old) - v.type.rank) + v.type.shape, old) if not same_dim(e, 1)])
        return m.b.reshape(v, shape=tuple(d if same_dim(d, 1) else next(own) for d in new))  # type: ignore[no-any-return]

    return m.b.node(n.op, [reshaped(v) for v in n.inputs], n.attrs).output


def _differ_by_units(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Are two shapes the same but for dims of size 1?"""
    left, right = ([d for d in shape if not same_dim(d, 1)] for shape in (a, b))
    return len(left) == len(right) and all(map(same_dim, left, right))


def _of_broadcasts(n: Node) -> bool:
    """Is each operand smaller than the result, or made of such ones for this node alone?"""
    return all(
        v is None
        or not _differ_by_units(v.type.shape, n.output.type.shape)
        or (
            (made := producer(v, *BROADCASTING)) is not None
            and len({u for u, _ in v.uses}) == 1
            and _of_broadcasts(made)
        )
        for v in n.inputs
    )


def flatten_concat(m: Match) -> Value:
    """concat(concat(a, b), c) -> concat(a, b, c) along one axis, where nobody else reads the inner one"""
    axis = normalize_axis(m.root.attrs["axis"], m.root.output.type.rank)
    inputs: list[Value | None] = []
    for v in m.root.inputs:
        n = producer(v, "concat")
        same = n is not None and normalize_axis(n.attrs["axis"], n.output.type.rank) == axis
        if same and n is not None and len(n.output.uses) == 1 and n.output not in m.outputs:
            inputs += m.node(v, "concat").inputs
        else:
            inputs.append(v)
    m.require(len(inputs) > len(m.root.inputs), "no operand is a concat along axis {} that is read here alone", axis)
    return m.b.node(m.root.op, inputs, m.root.attrs).output


def drop_empty(m: Match) -> Value:
    """concat(a, b: f32[0, 4], c, axis=0) -> concat(a, c, axis=0)"""
    axis = normalize_axis(m.root.attrs["axis"], m.root.output.type.rank)
    kept = [v for v in m.root.inputs if v is not None and not same_dim(v.type.shape[axis], 0)]
    m.require(0 < len(kept) < len(m.root.inputs), "no operand is empty, or all are")
    return m.b.node(m.root.op, kept, m.root.attrs).output


def gather_to_slice(m: Match) -> Value:
    """gather(x, 3, axis=1) -> reshape(slice(x)) for constant indices at equal steps: no run-time lookup. Indices with
    steps of their own along each axis, as of windows, make an unfold.
    """
    x, indices = m.operand(m.root, 0), m.constant(m.operand(m.root, 1)).astype(np.int64)
    axis = normalize_axis(m.root.attrs["axis"], x.type.rank)
    n = x.type.shape[axis]
    if not isinstance(n, int):
        return _no(m, "axis {} has the symbolic size {}", axis, n)
    indices = np.where(indices < 0, indices + n, indices)
    ok = indices.size > 0 and bool(((0 <= indices) & (indices < n)).all())
    m.require(ok, "an index is outside the {} elements of axis {}", n, axis)
    line = indices.reshape(-1)
    step = int(line[1] - line[0]) if line.size > 1 else 1
    if step == 0 or not (np.diff(line) == step).all():
        steps = [int(np.diff(indices, axis=k).flat[0]) if d > 1 else 0 for k, d in enumerate(indices.shape)]
        alike = all((np.diff(indices, axis=k) == s).all() for k, s in enumerate(steps))
        m.require(alike and indices.ndim > 1, "the indices do not stand at equal steps")
        return m.b.unfold(  # type: ignore[no-any-return]
            x, axis=axis, start=int(line[0]), steps=tuple(steps), shape=indices.shape
        )
    starts, by, shape = [0] * x.type.rank, [1] * x.type.rank, list(x.type.shape)
    starts[axis], by[axis], shape[axis] = int(line[0]), step, line.size
    b = m.b
    y = b.slice(x, starts=tuple(starts), steps=tuple(by), shape=tuple(shape))
    return b.reshape(y, shape=m.root.output.type.shape)  # type: ignore[no-any-return]


def gather_of_one_index(m: Match) -> Value:
    """gather_nd(x, i: i64[7, 1]) -> gather(x, reshape(i), axis=0)"""
    x, indices = m.operand(m.root, 0), m.operand(m.root, 1)
    ok = m.root.attrs["batch_dims"] == 0 and same_dim(indices.type.shape[-1], 1)
    m.require(ok, "{} holds more than one index for each element", indices.name)
    return m.b.gather(x, m.b.reshape(indices, shape=indices.type.shape[:-1]), axis=0)  # type: ignore[no-any-return]


def reduce_of_units(m: Match) -> Value:
    """reduce_max(x: f32[5, 1], axes=(1,)) -> reshape(x): only dims of size 1 are reduced"""
    x = m.operand(m.root, 0)
    axes = all_axes(m.root.attrs["axes"], x.type.rank)
    m.require(all(same_dim(x.type.shape[a], 1) for a in axes), "the reduced axes {} have more than one element", axes)
    return m.b.reshape(x, shape=m.root.output.type.shape)  # type: ignore[no-any-return]


def sum_of_units(m: Match) -> Value:
    """reduce_mean(x: f32[5, 1], axes=(1,)) -> reshape(x): differs for x = -0.0, as a sum starts from 0.0"""
    return reduce_of_units(m)


def pad_into_conv(m: Match) -> Value:
    """conv(pad(x, pads=(0, 0, 1, 1, 0, 0, 1, 1)), w, pads=(0, 0, 0, 0)) -> conv(x, w, pads=(1, 1, 1, 1))"""
    pad = m.node(m.operand(m.root, 0), "pad")
    rank = pad.output.type.rank
    m.require(pad.attrs["mode"] == "constant", "the pad mode is {}", pad.attrs["mode"])
    if len(pad.inputs) > 1 and pad.inputs[1] is not None:
        m.require(m.number(pad.inputs[1]) == 0, "the padding is not 0")
    begin, end = pad.attrs["pads"][:rank], pad.attrs["pads"][rank:]
    m.require(_zero((*begin[:2], *end[:2])), "it pads the batch or the channels")
    own = m.root.attrs["pads"] or (0,) * (2 * (rank - 2))
    ok = all(isinstance(p, int) and p >= 0 for p in (*begin, *end, *own))
    m.require(ok, "a size of the padding is negative or symbolic")
    pads = tuple(p + q for p, q in zip((*begin[2:], *end[2:]), own))
    return m.b.node(m.root.op, [pad.inputs[0], *m.root.inputs[1:]], {**m.root.attrs, "pads": pads}).output


def _no(m: Match, reason: str, *args: Any) -> Value:
    m.require(False, reason, *args)
    raise AssertionError


MOVEMENT_RULES: tuple[Rule, ...] = (
    Rule(drop_copy, tuple(_COPIES)),
    Rule(merge_reshapes, ("reshape",)),
    Rule(plain_shape, ("reshape",)),
    Rule(hoist_units, ("reshape",)),
    Rule(merge_transposes, ("transpose",)),
    Rule(cancel_transposes, ("transpose",)),
    Rule(transpose_to_reshape, ("transpose",)),
    Rule(transpose_of_product, ("transpose",)),
    Rule(merge_expands, ("expand",)),
    Rule(merge_slices, ("slice",)),
    Rule(drop_expand, (*BROADCASTING, "matmul", "attention")),
    Rule(sink_expand, (*BROADCASTING, "cast", "logical_not")),
    Rule(drop_empty, ("concat",)),
    Rule(flatten_concat, ("concat",)),
    Rule(gather_to_slice, ("gather",)),
    Rule(gather_of_one_index, ("gather_nd",)),
    Rule(reduce_of_units, ("reduce_prod", "reduce_max", "reduce_min")),
    Rule(sum_of_units, ("reduce_sum", "reduce_mean"), exact=False),
    Rule(pad_into_conv, ("conv",)),
)
