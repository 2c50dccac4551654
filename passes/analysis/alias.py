"""Which values lie in the memory of others: a view in its source's, a contiguous slice within what it is cut from, and
the operands of a concatenation within its result, where their kernels then write at once.

    v = reshape(x)                 ->  v at x + 0
    s = slice(x: f32[1, 64, 7, 7], channels 32..63)     ->  s at x + 6272
    c = concat(a, b, axis=1)       ->  a at c + 0, b at c + a.nbytes; the concat itself is no kernel

Only where the region is contiguous (all axes in front have one element) and of known size. Kernels get pointers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dnnc.ir.expr import const, value
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.types import TensorType
from dnnc.passes.analysis.kinds import is_view, kind_of

WORTH = 16384  # bytes of a concatenation of cheap operands below which one kernel for all beats one for each
Alias = tuple[Value, int]  # the value in whose memory another one lies, and at which byte


@dataclass(frozen=True)
class Aliases:
    """`of[v]`: where v lies, when not in memory of its own (an alias of an alias is not resolved: `root` does that).
    `made`: the results of nodes that are no kernels: views, slices, concatenations whose operands are written in place.
    """

    of: Mapping[Value, Alias]
    made: frozenset[Value]


def find_aliases(graph: Graph, copy: Callable[[Node, int], Value] | None = None, align: int = 1) -> Aliases:
    """Aliases of a graph with layouts, `align` bytes apart. `copy(node, k)` copies concatenation operand k."""
    nodes = list(graph.nodes())
    found: dict[Value, Alias] = {}
    for n in nodes:
        if is_view(n):
            found[n.output] = (_source(n), 0)
    pinned = {root(found, v)[0] for v in graph.outputs}  # these get memory of their own
    for n in nodes:
        at = slice_offset(n)
        if at is not None and at % align == 0 and n.output not in pinned:
            found[n.output] = (_source(n), at)
    made = set(found)
    owned: set[Value] = set()
    for n in nodes:
        parts = parts_of(n, found, made, pinned | owned) or []
        parts = [] if any(at % align for _, at in parts) else parts
        if copy is not None:
            parts = [(copy(n, k) if v is None else v, at) for k, (v, at) in enumerate(parts)]
        if parts and all(v is not None for v, _ in parts):
            made.add(n.output)
            found.update((v, (n.output, at)) for v, at in parts if v is not None)
            owned.update(v for v, _ in parts if v is not None)
    return Aliases(found, frozenset(made))


def root(aliases: Mapping[Value, Alias], v: Value) -> Alias:
    """The value that owns the memory in which v lies, and the byte at which it begins there."""
    at = 0
    while v in aliases:
        v, offset = aliases[v]
        at += offset
    return v, at


def _source(n: Node) -> Value:
    x = n.inputs[0]
    assert x is not None
    return x


def slice_offset(n: Node) -> int | None:
    """The byte at which a slice begins in its operand; None where it is not one stretch of it."""
    if n.op.name != "slice" or any(s != 1 for s in n.attrs["steps"]):
        return None
    x, y = _source(n).type, n.output.type
    axes = [k for k, (a, b) in enumerate(zip(x.shape, y.shape)) if a != b]
    starts = n.attrs["starts"]
    if (
        len(axes) != 1
        or x.encoding != y.encoding
        or not isinstance(x.nbytes, int)
        or not isinstance(starts[axes[0]], int)
    ):
        return None
    axis = axes[0]
    size = _stretch(x, axis)
    block = x.encoding.block(axis)
    if size is None or starts[axis] % block or value(const(y.shape[axis]) % block) != 0:
        return None
    return int(starts[axis]) // block * size


def _stretch(t: TensorType, axis: int) -> int | None:
    """Return the bytes of a step (or block) along an axis that is outermost but for axes of size 1."""
    parts = [p.axis for p in t.layout.parts] if t.layout is not None else list(range(t.rank))
    for at, (k, extent) in enumerate(zip(parts, t.physical)):
        if k == axis:
            inner = 1
            for d in t.physical[at + 1 :]:
                if not isinstance(d, int):
                    return None
                inner *= d
            return inner * t.dtype.bytes
        if extent != 1:
            return None
    return None


def parts_of(
    n: Node, aliases: Mapping[Value, Alias], made: set[Value], taken: set[Value]
) -> list[tuple[Value | None, int]] | None:
    """The operands of a concatenation that may be made in place: for each the value that owns its memory (None: it
    needs a copy), and its place in the result. None where the concatenation needs a kernel, or is better off with one
    (small, cheap operands). `made`: values that need no kernel; `taken`: those that have their place elsewhere.
    """
    if n.op.name != "concat" or len(n.inputs) < 2:
        return None
    y = n.output.type
    axis = n.attrs["axis"] % y.rank
    operands = [v for v in n.inputs if v is not None]
    sizes = [v.type.nbytes for v in operands if isinstance(v.type.nbytes, int)]
    if _stretch(y, axis) is None or len(sizes) < len(operands) or any(v.type.encoding != y.encoding for v in operands):
        return None
    block = y.encoding.block(axis)
    if any(value(const(v.type.shape[axis]) % block) != 0 for v in operands):
        return None
    out: list[tuple[Value | None, int]] = []
    at, cheap = 0, False
    for v, size in zip(operands, sizes):
        part, inside = root(aliases, v)
        free = (
            inside == 0 and part.node is not None and kind_of(part.node) != "host" and part.type.nbytes == v.type.nbytes
        )
        free = free and part not in taken and not any(part is p for p, _ in out)
        cheap = cheap or part.node is None or (kind_of(part.node) == "map" and part not in made)
        out.append((part if free else None, at))
        at += size
    return out if at >= WORTH or not cheap else None
