"""Sorting, transforms, linear algebra, trees, random bits, strings and ops with data-dependent shapes."""

from __future__ import annotations

import numpy as np

from dnnc.export.arithmetic import where
from dnnc.export.call import Call, Convert
from dnnc.export.movement import moved
from dnnc.export.writer import ELEMENTS, Writer
from dnnc.ir.dtype import boolean, i64, string, u8, u32, u64
from dnnc.ir.errors import UnsupportedError
from dnnc.ir.ops.random import MASK, MULTIPLIERS, ROUNDS, WEYL
from dnnc.ir.types import Dim, product


def counted(w: Writer, n: Dim) -> str:
    """0, 1, ... n - 1."""
    return w.op("Range", w.number(0, i64), w.scalar(n), w.number(1, i64))  # type: ignore[no-any-return]


# --- sorting ----------------------------------------------------------------------------------------------------------


def sort(c: Call) -> list[str]:
    axis, w = c.attrs["axis"], c.w
    kept = c.attrs["keep"]
    run = (
        i64 if c.dtype.kind in "iub" and c.dtype is not u64 else w.type_for("TopK", c.dtype)
    )  # of integers ONNX Runtime sorts few others
    k = w.dim(c.type().shape[axis % c.type().rank] if kept is None else kept)
    values, places = w.op(
        "TopK", w.cast(c.x(), c.dtype, run), k, outputs=2, axis=axis, largest=int(c.attrs["descending"]), sorted=1
    )
    return [w.cast(values, run, c.dtype), places]


def lookup(c: Call) -> str:
    """The last of the keys that are equal, as there is no other; -1 for none."""
    w, keys = c.w, c.type(1).shape[0]
    hit = w.typed("Equal", c.dtype, w.op("Unsqueeze", c.x(0), w.ints([-1])), c.x(1), keeps=False)
    places = where(w, hit, counted(w, keys), w.number(-1, i64), i64)
    return w.op("ReduceMax", places, w.ints([-1]), keepdims=0)  # type: ignore[no-any-return]


# --- transforms and matrices ------------------------------------------------------------------------------------------


def dft(c: Call) -> str:
    w, t, x = c.w, c.dtype, c.x()
    axis, length = c.attrs["axis"] % c.type().rank, c.attrs["length"]
    if c.attrs["inverse"] and c.attrs["onesided"]:
        return _to_real(c, axis)
    run = w.type_for("DFT", t)
    given = None if length is None else w.number(length, i64)
    inverse, onesided = int(c.attrs["inverse"]), int(c.attrs["onesided"])
    made = w.op("DFT", w.cast(x, t, run), given, w.number(axis, i64), inverse=inverse, onesided=onesided)
    return w.cast(made, run, t)


def _to_real(c: Call, axis: int) -> str:
    """Half of a spectrum to real numbers: the other half is its mirror image, conjugated."""
    w, t, size = c.w, c.dtype, int(str(c.type().shape[axis]))
    n = c.attrs["length"] if c.attrs["length"] is not None else 2 * (size - 1)
    half, rank = n // 2 + 1, c.type().rank
    run = w.type_for("DFT", t)
    x = w.cast(c.x(), t, run)
    if c.type().shape[-1] == 1:  # no imaginary parts
        x = w.op("Pad", x, w.ints([*(0,) * rank, *(0,) * (rank - 1), 1]))
    if size > half:
        x = w.op("Slice", x, w.ints([0]), w.ints([half]), w.ints([axis]))
    elif size < half:
        x = w.op("Pad", x, w.ints([*(0,) * rank, *(half - size if k == axis else 0 for k in range(rank))]))
    if n - half:
        turned = w.op("Slice", x, w.ints([n - half]), w.ints([0]), w.ints([axis]), w.ints([-1]))
        x = w.op("Concat", x, w.op("Mul", turned, w.constant([1, -1], run)), axis=axis)
    full = w.op("DFT", x, None, w.number(axis, i64), inverse=1)
    return w.cast(w.op("Slice", full, w.ints([0]), w.ints([1]), w.ints([rank - 1])), run, t)


def clear_column(c: Call) -> str:
    """One Gauss-Jordan step: masks pick the pivot's row and the row that changes places with it."""
    w, t, column = c.w, c.dtype, c.attrs["column"]
    n, ends = int(str(c.type().shape[1])), [column + 1]
    below = w.op("Slice", c.x(), w.ints([column, column]), w.ints([n, column + 1]), w.ints([1, 2]))
    at = w.op("Add", w.op("ArgMax", w.op("Abs", below), axis=1, keepdims=1), w.number(column, i64))
    rows = w.constant(np.arange(n).reshape(n, 1), i64)
    chosen = w.op("Equal", at, rows)
    row = w.op("ReduceSum", where(w, chosen, c.x(), w.number(0, t), t), w.ints([1]), keepdims=1)
    here = w.op("Slice", c.x(), w.ints([column]), w.ints(ends), w.ints([1]))
    y = where(w, chosen, here, c.x(), t)
    share = w.op("Div", row, w.op("Slice", row, w.ints([column]), w.ints(ends), w.ints([2])))
    rest = w.op("Sub", y, w.op("Mul", w.op("Slice", y, w.ints([column]), w.ints(ends), w.ints([2])), share))
    return where(w, w.constant(np.arange(n).reshape(n, 1) == column, boolean), share, rest, t)


# --- trees ------------------------------------------------------------------------------------------------------------


def tree_descend(c: Call) -> str:
    w, t = c.w, c.dtype
    node = w.op("Expand", w.cast(c.x(1), c.type(1).dtype, i64), w.dims(c.out.shape))
    links = w.cast(c.x(2), c.type(2).dtype, i64)
    columns = [w.op("Gather", links, w.number(k, i64), axis=1) for k in range(4)]
    for _ in range(c.attrs["steps"]):
        feature, first, second, missing = (w.op("Gather", column, node) for column in columns)
        seen = w.op("GatherElements", c.x(0), feature, axis=1)
        below = w.typed("LessOrEqual", t, seen, w.op("Gather", c.x(3), node), keeps=False)
        lost = w.op(
            "And", w.typed("IsNaN", t, seen, keeps=False), w.op("Not", w.op("Equal", missing, w.number(0, i64)))
        )
        node = w.op("Where", w.op("Or", below, lost), first, second)
    return node  # type: ignore[no-any-return]


def tree_vote(c: Call) -> str:
    """Votes as [rows, trees, votes, classes]; those for another class count as nothing."""
    w, t, combine = c.w, c.out.dtype, c.attrs["combine"]
    leaf, last = w.cast(c.x(0), c.type(0).dtype, i64), w.ints([-1])
    weights = w.op("Unsqueeze", w.op("Gather", c.x(1), leaf), last)
    classes = w.op("Unsqueeze", w.cast(w.op("Gather", c.x(2), leaf), c.type(2).dtype, i64), last)
    hit = w.op("Equal", classes, counted(w, c.attrs["count"]))
    nothing = {"sum": 0.0, "min": np.inf, "max": -np.inf}[combine]
    reduce = {"sum": "ReduceSum", "min": "ReduceMin", "max": "ReduceMax"}[combine]
    made = w.op(reduce, where(w, hit, weights, w.number(nothing, t), t), w.ints([1, 2]), keepdims=0)
    if combine == "sum":
        return made  # type: ignore[no-any-return]
    voted = w.op("ReduceMax", w.cast(hit, boolean, i64), w.ints([1, 2]), keepdims=0)
    return where(w, w.op("Equal", voted, w.number(1, i64)), made, w.number(0, t), t)


# --- random numbers ---------------------------------------------------------------------------------------------------


def random_bits(c: Call) -> str:
    """Philox 4x32-10 in 64-bit arithmetic: four words for each counter, in order."""
    w, n = c.w, product(c.out.shape)
    blocks = w.op("Div", w.op("Add", w.scalar(n), w.number(3, i64)), w.number(4, i64))
    counter = w.cast(w.op("Range", w.number(0, i64), blocks, w.number(1, i64)), i64, u64)
    mask, shift = w.number(MASK, u64), w.number(32, u64)
    zero = w.op("Mul", counter, w.number(0, u64))

    def low(x: str) -> str:
        return w.op("BitwiseAnd", x, mask)  # type: ignore[no-any-return]

    def high(x: str) -> str:
        return w.op("BitShift", x, shift, direction="RIGHT")  # type: ignore[no-any-return]

    def mixed(*xs: str) -> str:
        return w.op("BitwiseXor", w.op("BitwiseXor", xs[0], xs[1]), xs[2])  # type: ignore[no-any-return]

    keys = w.cast(c.x(), u32, u64)
    k = [w.op("Gather", keys, w.number(j, i64)) for j in (0, 1)]
    words = [low(counter), high(counter), zero, zero]
    for _ in range(ROUNDS):
        p, q = (w.op("Mul", words[2 * j], w.number(m, u64)) for j, m in enumerate(MULTIPLIERS))
        words = [mixed(high(q), words[1], k[0]), low(q), mixed(high(p), words[3], k[1]), low(p)]
        k = [low(w.op("Add", x, w.number(g, u64))) for x, g in zip(k, WEYL)]
    table = w.op("Concat", *(w.op("Unsqueeze", x, w.ints([1])) for x in words), axis=1)
    flat = w.op("Slice", w.op("Reshape", table, w.ints([-1])), w.ints([0]), w.dim(n))
    return w.op("Reshape", w.cast(flat, u64, u32), w.dims(c.out.shape), allowzero=1)  # type: ignore[no-any-return]


def to_power(c: Call) -> str:
    return c.w.op(  # type: ignore[no-any-return]
        "Cast", c.x(), to=ELEMENTS["f8e8m0"], saturate=int(c.attrs["saturate"]), round_mode=c.attrs["rounding"]
    )


# --- strings ----------------------------------------------------------------------------------------------------------


def string_split(c: Call) -> list[str]:
    most = c.attrs["maxsplit"]
    return c.w.op(  # type: ignore[no-any-return]
        "StringSplit", c.x(), outputs=2, delimiter=c.attrs["delimiter"] or None, maxsplit=None if most < 0 else most
    )


def string_normalize(c: Call) -> str:
    a = c.attrs
    stop = list(a["stopwords"]) or None
    return c.w.op(  # type: ignore[no-any-return]
        "StringNormalizer",
        c.x(),
        case_change_action=a["case"].upper(),
        is_case_sensitive=int(a["sensitive"]),
        stopwords=stop,
    )


def string_index(c: Call) -> str:
    """The first of the keys that are equal; -1 for none."""
    w, keys = c.w, c.type(1).shape[0]
    hit = w.typed("Equal", string, w.op("Unsqueeze", c.x(0), w.ints([-1])), c.x(1), keeps=False)
    first = w.op("ReduceMin", where(w, hit, counted(w, keys), w.scalar(keys), i64), w.ints([-1]), keepdims=0)
    return where(w, w.op("Equal", first, w.scalar(keys)), w.number(-1, i64), first, i64)


# --- sizes that only the data tells -----------------------------------------------------------------------------------


def truncate(c: Call) -> str:
    count = c.w.op("Reshape", c.w.cast(c.x(1), c.type(1).dtype, i64), c.w.ints([1]))
    return moved(c, "Slice", c.w.ints([0]), count, c.w.ints([c.attrs["axis"]]))


def view(c: Call) -> str:
    target = c.w.cast(c.x(1), c.type(1).dtype, i64)
    return c.w.op("Reshape", c.x(0), target, allowzero=0 if c.attrs["copy_zeros"] else 1)  # type: ignore[no-any-return]


def measure(c: Call) -> str:
    """Nothing but a size: that many rows without elements."""
    count = c.w.op("Reshape", c.w.cast(c.x(), c.type().dtype, i64), c.w.ints([1]))
    empty = c.w.constant(np.empty((1, 0)), u8)
    return c.w.op("Expand", empty, c.w.op("Concat", count, c.w.ints([0]), axis=0))  # type: ignore[no-any-return]


def nonzero(c: Call) -> str:
    return c.w.op("NonZero", c.w.cast(c.x(), c.dtype, c.w.type_for("NonZero", c.dtype)))  # type: ignore[no-any-return]


def unique(c: Call) -> list[str]:
    w = c.w
    run = (
        i64 if c.dtype.kind in "iub" and c.dtype is not u64 else w.type_for("Unique", c.dtype)
    )  # ONNX Runtime has no other integers
    made = w.op("Unique", w.cast(c.x(), c.dtype, run), outputs=4, axis=c.attrs["axis"], sorted=int(c.attrs["sorted"]))
    return [w.cast(made[0], run, c.dtype), *made[1:]]


def non_max_suppression(c: Call) -> str:
    return c.w.op("NonMaxSuppression", *c.inputs, center_point_box=int(c.attrs["center"]))  # type: ignore[no-any-return]


def decode_image(c: Call) -> str:
    formats = {"rgb": "RGB", "bgr": "BGR", "gray": "Grayscale"}
    return c.w.op("ImageDecoder", c.x(), pixel_format=formats[c.attrs["pixels"]])  # type: ignore[no-any-return]


def from_string(c: Call) -> str:
    if c.attrs["to"].kind not in "fiu":
        raise UnsupportedError(f"ONNX's Cast makes no {c.attrs['to']} of strings")
    return c.w.op("Cast", c.x(), to=ELEMENTS[c.attrs["to"].name])  # type: ignore[no-any-return]


REST: dict[str, Convert] = {
    "sort": sort,
    "lookup": lookup,
    "dft": dft,
    "det": lambda c: c.w.typed("Det", c.dtype, c.x()),
    "clear_column": clear_column,
    "tree_descend": tree_descend,
    "tree_vote": tree_vote,
    "random_bits": random_bits,
    "to_power": to_power,
    "string_equal": lambda c: c.w.op("Equal", c.x(0), c.x(1)),
    "string_concat": lambda c: c.w.op("StringConcat", c.x(0), c.x(1)),
    "string_match": lambda c: c.w.op("RegexFullMatch", c.x(), pattern=c.attrs["pattern"]),
    "string_split": string_split,
    "string_normalize": string_normalize,
    "string_index": string_index,
    "to_string": lambda c: c.w.op("Cast", c.x(), to=ELEMENTS["str"]),
    "from_string": from_string,
    "nonzero": nonzero,
    "compress": lambda c: moved(c, "Compress", c.x(1), axis=c.attrs["axis"]),
    "unique": unique,
    "non_max_suppression": non_max_suppression,
    "truncate": truncate,
    "view": view,
    "measure": measure,
    "decode_image": decode_image,
}
