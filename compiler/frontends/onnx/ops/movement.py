"""Converters of operators that move elements: reshape, transpose, concat, split, slice, pad, tile and their kin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dnnc.frontends.onnx.call import Call, Item, number
from dnnc.frontends.onnx.sizes import computed, computed_expand, computed_reshape, computed_slice, sizes
from dnnc.ir.bounds import bounds
from dnnc.ir.errors import ModelError, count
from dnnc.ir.expr import Expr, const, terms, unwrap, value
from dnnc.ir.graph import Value
from dnnc.ir.ops.slices import normalize_slice
from dnnc.ir.shapes import normalize_axis
from dnnc.ir.types import Dim, product

Converter = Callable[[Call], Any]


def reshape(c: Call) -> Any:
    """0 copies a dim unless allowzero is set, -1 is what remains."""
    if c.has(1) and computed(c, 1):
        return computed_reshape(c)
    x = c.x()
    target = c.dims(1, "the target shape") if c.has(1) else c.integers("shape") or ()
    out: list[Dim] = []
    for k, d in enumerate(target):
        if isinstance(d, int) and d == 0 and not c.flag("allowzero"):
            if k >= x.type.rank:
                raise ModelError(f"the target shape {list(target)} copies dim {k}, which {x.type} does not have")
            d = x.type.shape[k]
        out.append(d)
    shape = open_dim(x.type.shape, out)
    return x if shape == x.type.shape else c.b.reshape(x, shape=shape)


def open_dim(old: Sequence[Dim], new: Sequence[Dim]) -> tuple[Dim, ...]:
    """The target shape with its -1 worked out, where dims that both shapes have leave a quotient that is exact."""
    if sum(d == -1 for d in new if isinstance(d, int)) != 1:
        return tuple(new)
    left, right = list(old), [d for d in new if not (isinstance(d, int) and d == -1)]
    for d in list(right):
        if d in left and d != 0:
            left.remove(d)
            right.remove(d)
    total, known = const(product(left)), const(product(right))
    found = quotient(total, known)
    return tuple(new) if found is None else tuple(found if isinstance(d, int) and d == -1 else d for d in new)


def quotient(total: Expr, known: Expr) -> Dim | None:
    """total / known where it is sure that nothing remains."""
    (above, c), (below, d) = terms(total), terms(known)
    if len(below) == 1 and d == 0 and below[0][1] != 0 and all(k % below[0][1] == 0 for _, k in above) and c == 0:
        k = below[0][1]  # (k*a) / (k*b) -> a / b
        total, known = sum((t * (n // k) for t, n in above), const(0)), below[0][0]
    if value(known) == 0 or (bounds(known)[0] or 0) < 1:
        return None
    found = total // known
    return unwrap(found) if found * known is total else None


def transpose(c: Call) -> Value:
    x = c.x()
    perm = c.integers("perm") or tuple(reversed(range(x.type.rank)))
    return x if perm == tuple(range(x.type.rank)) else c.b.transpose(x, perm=perm)


def concat(c: Call) -> Value:
    xs = c.all()
    axis = c.integer("axis", 1 if c.opset < 4 else 0)
    return xs[0] if len(xs) == 1 else c.b.concat(*xs, axis=axis)


def flatten(c: Call) -> Any:
    return c.b.flatten(c.x(), axis=c.integer("axis", 1))


def axes_of(c: Call) -> tuple[int, ...] | None:
    """Axes as input 1 (since opset 13) or as attribute."""
    return c.ints_in(1, "axes") if c.has(1) else c.integers("axes")


def squeeze(c: Call) -> Any:
    """Without axes all dims of size 1 go, so it must be known which these are."""
    axes = axes_of(c)
    for d in c.x().type.shape if axes is None else ():
        if isinstance(d, Expr) and (bounds(d)[0] or 0) <= 1:
            number(d, "a dim that Squeeze without axes drops if it is 1")
    return c.b.squeeze(c.x(), axes=axes)


def unsqueeze(c: Call) -> Any:
    return c.b.unsqueeze(c.x(), axes=axes_of(c) or ())


def expand(c: Call) -> Any:
    return computed_expand(c) if computed(c, 1) else c.b.expand(c.x(), shape=c.dims(1, "the target shape"))


def tile(c: Call) -> Any:
    x = c.x()
    if c.opset < 6:
        (times,), (axis,) = c.dims(1, "tiles"), c.ints_in(2, "axis")
        return c.b.tile(x, repeats=tuple(times if k == axis else 1 for k in range(x.type.rank)))
    return c.b.tile(x, repeats=sizes(c, 1, "repeats"))


def identity(c: Call) -> list[Item | None]:
    """The input, which may be an absent optional value."""
    return [c.items[0]]


# --- slices -----------------------------------------------------------------------------------------------------------


def _cut(
    c: Call,
    x: Value,
    starts: Sequence[Dim],
    ends: Sequence[Dim],
    axes: Sequence[int] | None,
    steps: Sequence[int] | None,
) -> Value:
    attrs = normalize_slice(x.type.shape, starts, ends, axes, steps)
    whole = (
        attrs["shape"] == x.type.shape and all(s == 0 for s in attrs["starts"]) and all(s == 1 for s in attrs["steps"])
    )
    return x if whole else c.b.slice(x, **attrs)


def slice_(c: Call) -> Any:
    x = c.x()
    if c.opset < 10:
        starts, ends, axes = c.integers("starts") or (), c.integers("ends") or (), c.integers("axes")
        return _cut(c, x, starts, ends, axes, None)
    axes = c.ints_in(3, "axes") if c.has(3) else None
    steps = c.ints_in(4, "steps") if c.has(4) else None
    if computed(c, 1) or computed(c, 2):
        return computed_slice(c, axes, steps)
    first, last = c.dims(1, "starts"), c.dims(2, "ends")
    if len(first) != len(last) or len(axes or first) != len(first) or len(steps or first) != len(first):
        raise ModelError(f"starts, ends, axes and steps differ in length: {first}, {last}, {axes}, {steps}")
    return _cut(c, x, first, last, axes, steps)


def split(c: Call) -> Any:
    """Split. Sizes: attribute, or input 1 (opset 1, 13+); without them parts are equal, the last may be smaller."""
    x = c.x()
    axis = normalize_axis(c.integer("axis", 0), x.type.rank)
    sizes: Sequence[Dim] | None = c.dims(1, "split") if c.has(1) else c.integers("split")
    sizes = sizes if sizes is not None else even_parts(x.type.shape[axis], c.integer("num_outputs", len(c.outputs)))
    return split_parts(c, x, axis, sizes)


def even_parts(n: Dim, parts: int) -> list[Dim]:
    """n in equal parts, rounded up, the last one smaller."""
    if parts < 1:
        raise ModelError(f"num_outputs must be positive, got {parts}")
    if isinstance(n, Expr):
        if unwrap(const(n) % parts) != 0:
            number(n, f"the dim that is split into {parts} parts")
        return [unwrap(const(n) // parts)] * parts
    size = -(-n // parts)
    return [max(min(size, n - k * size), 0) for k in range(parts)]


def split_parts(c: Call, x: Value, axis: int, sizes: Sequence[Dim]) -> tuple[Value, ...]:
    n = x.type.shape[axis]
    if any(isinstance(s, int) and s < 0 for s in sizes):
        raise ModelError(f"the parts {list(sizes)} of axis {axis} have a negative size")
    total = unwrap(sum((const(s) for s in sizes), const(0)))
    if isinstance(total, int) and isinstance(n, int) and total != n:
        raise ModelError(f"the parts {list(sizes)} of axis {axis} do not add up to {n} of {x.type}")
    out, at = [], const(0)
    for s in sizes:
        out.append(_cut(c, x, (unwrap(at),), (unwrap(at + s),), (axis,), None))
        at = at + s
    return tuple(out)


# --- pad --------------------------------------------------------------------------------------------------------------


def pad(c: Call) -> Any:
    x = c.x()
    rank, mode = x.type.rank, c.text("mode", "constant")
    if c.opset < 11:
        pads: tuple[Dim, ...] = c.integers("pads" if c.opset >= 2 else "paddings") or (0,) * 2 * rank
        fill: Value | None = c.const(c.number("value", 0.0), x.type.dtype)
    else:
        pads, fill = c.dims(1, "pads"), c.opt(2)
    if c.has(3):
        axes = [normalize_axis(a, rank) for a in c.ints_in(3, "axes")]
        if len(pads) != 2 * len(axes):
            raise ModelError(f"{count(len(axes), 'axis', 'axes')} need {2 * len(axes)} pads, got {list(pads)}")
        full: list[Dim] = [*(0,) * 2 * rank]
        for k, a in enumerate(axes):
            full[a], full[rank + a] = pads[k], pads[len(axes) + k]
        pads = tuple(full)
    if len(pads) == 2 * rank and all(p == 0 for p in pads):
        return x
    return c.b.pad(x, fill if mode == "constant" else None, pads=pads, mode=mode)


def center_crop_pad(c: Call) -> Any:
    """Each axis cut or padded on both sides to its target size; an odd rest goes to the end."""
    x = c.x()
    axes = [normalize_axis(a, x.type.rank) for a in c.integers("axes") or range(x.type.rank)]
    begin, end = [0] * x.type.rank, [0] * x.type.rank
    for a, wanted in zip(axes, c.ints_in(1, "the target shape")):
        more = wanted - number(x.type.shape[a], f"dim {a}")
        # a crop starts at floor(rest / 2), a pad begins with floor(rest / 2)
        begin[a] = more // 2 if more > 0 else -(-more // 2)
        end[a] = more - begin[a]
    return c.b.pad(x, pads=(*begin, *end))


# --- blocks -----------------------------------------------------------------------------------------------------------


def depth_to_space(c: Call) -> Any:
    return c.b.depth_to_space(c.x(), block=c.integer("blocksize"), mode=c.text("mode", "DCR"))


def space_to_depth(c: Call) -> Any:
    x, block = c.x(), c.integer("blocksize")
    y = c.b.space_to_depth(x, block=block)
    if c.text("mode", "DCR") == "DCR":
        return y
    # CRD: channels vary slowest, not the position within the block
    n, channels, h, w = y.type.shape
    y = c.b.reshape(y, shape=(n, block * block, x.type.shape[1], h, w))
    return c.b.reshape(c.b.transpose(y, perm=(0, 2, 1, 3, 4)), shape=(n, channels, h, w))


TENSOR: dict[str, Converter] = {
    "Reshape": reshape,
    "Transpose": transpose,
    "Concat": concat,
    "Flatten": flatten,
    "Squeeze": squeeze,
    "Unsqueeze": unsqueeze,
    "Expand": expand,
    "Tile": tile,
    "Identity": identity,
    "Slice": slice_,
    "Split": split,
    "Pad": pad,
    "CenterCropPad": center_crop_pad,
    "DepthToSpace": depth_to_space,
    "SpaceToDepth": space_to_depth,
}
