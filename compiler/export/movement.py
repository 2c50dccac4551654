"""What moves elements: shapes, slices, gathers, scatters, and tensors from nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from dnnc.export.arithmetic import where
from dnnc.export.call import Call, Convert
from dnnc.export.writer import ELEMENTS, MIN, tensor
from dnnc.ir.dtype import DType, boolean, f32, i32, i64
from dnnc.ir.errors import UnsupportedError
from dnnc.ir.expr import const, unwrap
from dnnc.ir.types import Dim

# --- shapes -----------------------------------------------------------------------------------------------------------


def reshape(c: Call) -> str:
    """A dim that is symbolic may be left to the operator where the others are numbers."""
    shape = c.out.shape
    unknown = [k for k, d in enumerate(shape) if not isinstance(d, int)]
    if len(unknown) == 1 and all(d != 0 for k, d in enumerate(shape) if k not in unknown):
        return c.w.op("Reshape", c.x(), c.w.ints([-1 if k in unknown else int(str(d)) for k, d in enumerate(shape)]))  # type: ignore[no-any-return]
    zeros = any(isinstance(d, int) and d == 0 for d in shape) or bool(unknown)
    return c.w.op("Reshape", c.x(), c.w.dims(shape), allowzero=1 if zeros else None)  # type: ignore[no-any-return]


def expand(c: Call) -> str:
    return moved(c, "Expand", c.w.dims(c.out.shape))


def moved(c: Call, op: str, *rest: str | None, **attrs: Any) -> str:
    """An operator that moves elements of the first operand."""
    run = c.w.type_for(op, c.dtype)
    made: str = c.w.op(op, c.w.cast(c.x(), c.dtype, run), *rest, **attrs)
    return c.w.cast(made, run, c.dtype)


def transpose(c: Call) -> str:
    return moved(c, "Transpose", perm=list(c.attrs["perm"]))


def concat(c: Call) -> str:
    return c.w.typed("Concat", c.dtype, *c.inputs, axis=c.attrs["axis"])


def slices(c: Call) -> str:
    """Ends are where a further step would begin; those in front of an axis are the least number there is."""
    starts, steps, shape = c.attrs["starts"], c.attrs["steps"], c.out.shape
    axes = [k for k, d in enumerate(c.type().shape) if starts[k] != 0 or steps[k] != 1 or d is not shape[k]]
    if not axes:
        return c.w.op("Identity", c.x())  # type: ignore[no-any-return]
    ends = [_end(starts[k], steps[k], shape[k]) for k in axes]
    begins = c.w.dims([starts[k] for k in axes])
    return moved(c, "Slice", begins, c.w.dims(ends), c.w.ints(axes), c.w.ints([steps[k] for k in axes]))


def _end(start: Dim, step: int, size: Dim) -> Dim:
    if step > 0:
        return unwrap(const(start) + const(size) * step)  # type: ignore[no-any-return]
    if isinstance(start, int) and isinstance(size, int):
        return end if (end := start + size * step) >= 0 else MIN
    if unwrap(const(start) + 1 + const(size) * step) == 0:  # all the way to the front
        return MIN
    raise UnsupportedError(
        f"a slice backwards from {start} of {size} elements has no form in ONNX: fix its dims by dims="
    )


def dynamic_slice(c: Call) -> str:
    """Places are clamped into the axis one by one, so each axis is gathered."""
    x, shape = c.x(), c.out.shape
    steps = c.attrs["steps"] or (1,) * len(shape)
    starts = c.w.cast(c.x(1), c.type(1).dtype, i64)
    for k, (size, step, n) in enumerate(zip(shape, steps, c.type().shape)):
        if size is n and step == 1 and c.array(1) is not None and c.array(1)[k] == 0:
            continue
        count = c.w.op("Range", c.w.number(0, i64), c.w.scalar(size), c.w.number(1, i64))
        at = c.w.op("Add", c.w.op("Gather", starts, c.w.ints([k])), c.w.op("Mul", count, c.w.number(step, i64)))
        last = c.w.op("Sub", c.w.dim(n), c.w.ints([1]))
        x = c.w.op("Gather", x, c.w.op("Max", c.w.op("Min", at, last), c.w.ints([0])), axis=k)
    return x


def pad(c: Call) -> str:
    mode = c.attrs["mode"]
    fill = c.maybe(1)
    run = c.w.type_for("Pad", c.dtype)
    if fill is not None:
        fill = c.w.op("Reshape", c.w.cast(fill, c.dtype, run), c.w.ints([]))
    made = c.w.op("Pad", c.w.cast(c.x(), c.dtype, run), c.w.dims(c.attrs["pads"]), fill, mode=mode)
    return c.w.cast(made, run, c.dtype)


def tile(c: Call) -> str:
    return moved(c, "Tile", c.w.dims(c.attrs["repeats"]))


def interleave(c: Call) -> str:
    """Phases of channels become rows and columns."""
    strides, rank = c.attrs["strides"], len(c.attrs["strides"])
    n, channels, *sizes = c.type().shape
    share = int(str(channels)) // int(np.prod(strides))
    y = c.w.op("Reshape", c.x(), c.w.dims((n, *strides, share, *sizes)))
    y = c.w.op("Transpose", y, perm=[0, 1 + rank, *(axis for k in range(rank) for axis in (2 + rank + k, 1 + k))])
    y = c.w.op("Reshape", y, c.w.dims((n, share, *c.out.shape[2:])))
    return (  # type: ignore[no-any-return]
        y
        if share == c.attrs["channels"]
        else c.w.op("Slice", y, c.w.ints([0]), c.w.ints([c.attrs["channels"]]), c.w.ints([1]))
    )


# --- places -----------------------------------------------------------------------------------------------------------


def indices(c: Call, k: int, only: DType | None = None) -> str:
    """Indices in a type that ONNX takes: i32 or i64."""
    t = c.type(k).dtype
    return c.x(k) if t in ((only,) if only else (i32, i64)) else c.w.cast(c.x(k), t, only or i64)


def gather(c: Call) -> str:
    return moved(c, "Gather", indices(c, 1), axis=c.attrs["axis"])


def unfold(c: Call) -> str:
    """A lookup of constant places."""
    shape, steps = c.attrs["shape"], c.attrs["steps"]
    at = c.attrs["start"] + sum(k * s for k, s in zip(np.ogrid[tuple(slice(m) for m in shape)], steps))
    return moved(c, "Gather", c.w.constant(np.broadcast_to(at, shape), i64), axis=c.attrs["axis"])


def gather_elements(c: Call) -> str:
    return moved(c, "GatherElements", indices(c, 1), axis=c.attrs["axis"])


def gather_nd(c: Call) -> str:
    return moved(c, "GatherND", indices(c, 1, i64), batch_dims=c.attrs["batch_dims"])


def scatter(op: str, only: DType | None, *names: str) -> Convert:
    def convert(c: Call) -> str:
        run = c.w.type_for(op, c.dtype)
        x, updates = c.w.cast(c.x(0), c.dtype, run), c.w.cast(c.x(2), c.dtype, run)
        made = c.w.op(op, x, indices(c, 1, only), updates, **{n: c.attrs[n] for n in names})
        return c.w.cast(made, run, c.dtype)

    return convert


def one_hot(c: Call) -> str:
    """By comparison with 0, 1, ...: index -1 is the last, and what lies outside is nowhere."""
    w, axis, depth = c.w, c.attrs["axis"] % c.out.rank, c.attrs["depth"]
    at = w.op("Unsqueeze", w.cast(c.x(0), c.type(0).dtype, i64), w.ints([axis]))
    count = w.op("Range", w.number(0, i64), w.scalar(depth), w.number(1, i64))
    column = w.op("Reshape", count, w.ints([-1, *(1,) * (c.out.rank - 1 - axis)]))
    hit = w.op("Or", w.op("Equal", at, column), w.op("Equal", w.op("Add", at, w.dim(depth)), column))
    t = c.out.dtype
    off, on = (w.op("Gather", c.x(1), w.number(k, i64)) for k in (0, 1))
    return where(w, hit, on, off, t)


def trilu(c: Call) -> str:
    return moved(c, "Trilu", c.w.number(c.attrs["k"], i64), upper=int(c.attrs["upper"]))


def reverse_sequence(c: Call) -> str:
    axes = {n: c.attrs[n] % c.type().rank for n in ("batch_axis", "time_axis")}
    if set(axes.values()) != {0, 1}:
        return _refuse("reverse_sequence along other axes than the first two")
    return moved(c, "ReverseSequence", c.w.cast(c.x(1), c.type(1).dtype, i64), **axes)


def _refuse(what: str) -> str:
    raise UnsupportedError(f"{what} has no form in ONNX")


# --- from nothing -----------------------------------------------------------------------------------------------------


def full(c: Call) -> str:
    value, t = c.attrs["value"], c.attrs["dtype"]
    if isinstance(value, (int, float)):
        run = f32 if t.is_float and t.bits < 16 else i64 if t.is_int else t
        one = tensor(np.array([value], run.numpy), run, "value")
        return c.w.cast(c.w.op("ConstantOfShape", c.w.dims(c.out.shape), value=one), run, t)
    return c.w.cast(c.w.op("Expand", c.w.scalar(value), c.w.dims(c.out.shape)), i64, t)


def iota(c: Call) -> str:
    w, shape, axis = c.w, c.out.shape, c.attrs["axis"]
    count = w.op("Range", w.number(0, i64), w.scalar(shape[axis]), w.number(1, i64))
    row = w.op("Reshape", count, w.ints([-1, *(1,) * (len(shape) - 1 - axis)]))
    return w.cast(row if len(shape) == 1 else w.op("Expand", row, w.dims(shape)), i64, c.out.dtype)


def eye(c: Call) -> str:
    w = c.w
    rows, columns = (w.op("Range", w.number(0, i64), w.scalar(d), w.number(1, i64)) for d in c.out.shape)
    column = w.op("Unsqueeze", w.op("Add", rows, w.number(c.attrs["k"], i64)), w.ints([1]))
    hit = w.op("Equal", column, columns)
    return w.op("Cast", hit, to=ELEMENTS[c.out.dtype.name])  # type: ignore[no-any-return]


# --- resampling -------------------------------------------------------------------------------------------------------


def resize(c: Call) -> str:
    """Resize each axis: nearest by a gather, else by a product with constant weights, so sizes are numbers."""
    sizes = [
        (k, n, m)
        for k, (n, m, at) in enumerate(zip(c.type().shape, c.out.shape, c.attrs["coords"]))
        if at != (1, 0, 1) or n != m
    ]
    if not all(isinstance(d, int) for _, n, m in sizes for d in (n, m)):
        return _refuse("a resize of symbolic sizes")
    w, t = c.w, c.dtype
    wide = t.computed if t.is_float else t
    x = w.cast(c.x(), t, wide)
    for k, n, m in sizes:
        matrix = _axis_matrix(c, k, int(str(n)), int(str(m)), wide)
        if c.attrs["mode"] == "nearest":
            x = w.op("Gather", x, w.ints([int(i) for i in matrix.argmax(1)]), axis=k)
        else:
            x = _along(c, x, k, w.constant(matrix.T, wide))
    fill = c.attrs["extrapolation"]
    if fill is not None and sizes:
        x = where(w, w.constant(_inside(c), boolean), x, w.number(fill, wide), wide)
    return w.cast(x, wide, t)


def _inside(c: Call) -> Any:
    """Which elements of the result have their place within the operand, in a shape that broadcasts to it."""
    inside: Any = np.ones((1,) * c.out.rank, np.bool_)
    for k, (n, m, (mul, add, div)) in enumerate(zip(c.type().shape, c.out.shape, c.attrs["coords"])):
        if (mul, add, div) != (1, 0, 1):
            at = np.arange(int(str(m))) * mul + add
            inside = inside & ((at >= 0) & (at <= (int(str(n)) - 1) * div)).reshape(
                [-1 if j == k else 1 for j in range(c.out.rank)]
            )
    return inside


def _axis_matrix(c: Call, axis: int, n: int, m: int, t: DType) -> Any:
    """What the op makes of the unit vectors of one axis: [m, n]."""
    reference = c.node.op.reference
    assert reference is not None
    attrs = {**c.attrs, "extrapolation": None, "shape": (n, m), "coords": ((1, 0, 1), c.attrs["coords"][axis])}
    return np.asarray(reference(np.eye(n, dtype=np.float64 if t is not f32 else np.float32), **attrs)).T


def _along(c: Call, x: str, axis: int, matrix: str) -> str:
    """A product along an axis, which stands last meanwhile."""
    rank = c.type().rank
    perm = [*(k for k in range(rank) if k != axis), axis]
    if axis == rank - 1:
        return c.w.op("MatMul", x, matrix)  # type: ignore[no-any-return]
    turned = c.w.op("MatMul", c.w.op("Transpose", x, perm=perm), matrix)
    return c.w.op("Transpose", turned, perm=[perm.index(k) for k in range(rank)])  # type: ignore[no-any-return]


MOVEMENT: dict[str, Convert] = {
    "reshape": reshape,
    "squeeze": reshape,
    "unsqueeze": reshape,
    "flatten": reshape,
    "transpose": transpose,
    "expand": expand,
    "tile": tile,
    "concat": concat,
    "slice": slices,
    "dynamic_slice": dynamic_slice,
    "pad": pad,
    "depth_to_space": lambda c: moved(c, "DepthToSpace", blocksize=c.attrs["block"], mode=c.attrs["mode"]),
    "space_to_depth": lambda c: moved(c, "SpaceToDepth", blocksize=c.attrs["block"]),
    "interleave": interleave,
    "pack": lambda c: c.w.op("Identity", c.x()),
    "within_bound": lambda c: c.w.op("Identity", c.x()),  # ONNX has no errors: its Loop ends at the bound
    "gather": gather,
    "unfold": unfold,
    "gather_elements": gather_elements,
    "gather_nd": gather_nd,
    "scatter_elements": scatter("ScatterElements", None, "axis", "reduction"),
    "scatter_nd": scatter("ScatterND", i64, "reduction"),
    "one_hot": one_hot,
    "trilu": trilu,
    "reverse_sequence": reverse_sequence,
    "full": full,
    "iota": iota,
    "eye": eye,
    "resize": resize,
}
