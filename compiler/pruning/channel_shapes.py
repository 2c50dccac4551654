"""What operators that move elements do with channels: reshapes, slices, concatenations, and shapes that are computed.

Rules as in `channel_rules`. Where a node names channels or their number in an operand, an edit follows what stays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from dnnc.pruning.channel_rules import REDUCTIONS, Rule, binary
from dnnc.pruning.lays import Array, Entry, Extent, Lay, Left, Written, channels_of, number
from dnnc.quantization.onnx_graph import attribute

if TYPE_CHECKING:
    from dnnc.pruning.channels import Channels

Lays = Lay | list[Lay | None] | None
Sizes = tuple[int | str | None, ...]
COUNTING = frozenset(("Reshape", "Expand", "Resize"))  # read shapes whose entries follow


def rule(n: onnx.NodeProto) -> Rule | None:
    """The rule of a node."""
    if n.domain not in ("", "ai.onnx"):
        return None
    return reduce if n.op_type in REDUCTIONS else RULES.get(n.op_type)


def numbers(old: Array, found: Sequence[tuple[int, Array]]) -> Callable[[Left], Array]:
    """An operand whose entries count atoms: [(entry, atoms)]."""

    def made(left: Left) -> Array:
        out = old.copy()
        for at, atoms in found:
            out.reshape(-1)[at] = left(atoms).sum()
        return out

    return made


# --- parts ------------------------------------------------------------------------------------------------------------


def concat(c: Channels, n: onnx.NodeProto) -> Lays:
    """Operands in a row: along the channels, or along another axis, where all have the same channels."""
    if any(v in c.entries for v in n.input) or all(_integers(c, v) for v in n.input):
        return _concat_entries(c, n)
    found = [c.known(v) for v in n.input]
    lays = [x for x in found if x is not None]
    rank = c.rank(n.input[0])
    if not lays or rank is None or any(x.axis != lays[0].axis for x in lays):
        return None
    axis = int(attribute(n, "axis", 0))
    if (axis if axis < 0 else axis - rank) != lays[0].axis:
        if len(lays) < len(found):
            return None
        for other in lays[1:]:
            c.join(lays[0].atoms, other.atoms)
        return lays[0]
    parts = []
    for v, x in zip(n.input, found):
        if x is None:
            size = c.extent(v, lays[0].axis) if v not in c.model.constants else None
            if not size:
                return None
            x = Lay(lays[0].axis, c.kept(f"{n.name} (Concat)", size))
        else:
            c.span(x.atoms)
        parts.append(x.atoms)
    return Lay(lays[0].axis, np.concatenate(parts))


def split(c: Channels, n: onnx.NodeProto) -> Lays:
    """Parts along the channels, whose sizes follow, or along another axis."""
    x, rank = c.known(n.input[0]), c.rank(n.input[0])
    if x is None or rank is None:
        return None
    if int(attribute(n, "axis", 0)) % rank != rank + x.axis:
        return [x] * len(n.output)
    sizes = c.constant(n, 1)
    if sizes is None:
        if len(n.input) > 1 and n.input[1]:
            return None
        each = -(-x.atoms.size // len(n.output))
        sizes = np.array([min(each, x.atoms.size - k * each) for k in range(len(n.output))])
    parts = np.split(x.atoms, np.cumsum(sizes)[:-1])
    for p in parts:
        c.span(p)
    c.edit(n, 1, lambda left: np.array([left(p).sum() for p in parts], np.int64))
    return [Lay(x.axis, p) for p in parts]


def slice_(c: Channels, n: onnx.NodeProto) -> Lays:
    """A part along the channels, whose ends follow, or along other axes."""
    if n.input[0] in c.entries:
        return _slice_entries(c, n)
    x, rank = c.known(n.input[0]), c.rank(n.input[0])
    starts, ends, axes, steps = (c.constant(n, k) for k in range(1, 5))
    if x is None or rank is None or (axes is None and len(n.input) > 3 and n.input[3]):
        return None
    if axes is not None:
        along = [int(a) % rank for a in axes.reshape(-1)]
    elif starts is not None:
        along = list(range(starts.size))
    else:
        return None
    at = rank + x.axis
    if at not in along:
        return x
    k = along.index(at)
    if starts is None or ends is None or (steps is None and len(n.input) > 4 and n.input[4]):
        return None
    if steps is not None and steps.reshape(-1)[k] != 1:
        return None
    begin, end, _ = slice(int(starts.reshape(-1)[k]), int(ends.reshape(-1)[k])).indices(x.atoms.size)
    atoms = x.atoms[begin:end]
    if not atoms.size:
        return None
    if atoms.size < x.atoms.size:
        c.span(atoms)
    for operand, old, upto in ((1, starts, begin), (2, ends, end)):
        if 0 < upto < x.atoms.size:
            c.edit(n, operand, numbers(old, [(k, x.atoms[:upto])]))
    return Lay(x.axis, atoms)


def gather(c: Channels, n: onnx.NodeProto) -> Lays:
    """Some channels by their numbers, which follow, or positions along another axis."""
    if n.input[0] in c.entries:
        return _gather_entries(c, n)
    x, rank, inner = c.known(n.input[0]), c.rank(n.input[0]), c.rank(n.input[1])
    if x is None or rank is None or inner is None or c.known(n.input[1]) is not None:
        return None
    axis, at = int(attribute(n, "axis", 0)) % rank, rank + x.axis
    if axis != at:
        moved = at + inner - 1 if axis < at else at
        return Lay(moved - (rank + inner - 1), x.atoms)
    index = c.constant(n, 1)
    if index is None or index.ndim != 1 or not index.size:
        return None
    atoms, every = x.atoms[index], x.atoms
    c.span(atoms)

    def made(left: Left) -> Array:
        stays = left(every)
        return (np.cumsum(stays) - 1)[index[left(atoms)]].astype(index.dtype)

    c.edit(n, 1, made)
    return Lay(x.axis, atoms)


# --- axes -------------------------------------------------------------------------------------------------------------


def flatten(c: Channels, n: onnx.NodeProto) -> Lays:
    """[N, C, ...] -> [N, C ...]"""
    x, shape = c.along(n.input[0], 1), c.shape(n.input[0])
    sizes = [d for d in shape[2:] if d is not None] if shape is not None else []
    if x is None or shape is None or len(sizes) < len(shape) - 2 or attribute(n, "axis", 1) != 1:
        return None
    return Lay(-1, np.repeat(x.atoms, math.prod(sizes)))


def reshape(c: Channels, n: onnx.NodeProto) -> Lays:
    """Channels that stay an axis, become a part of one, or are cut into several, of which they lie along one."""
    if n.input[0] in c.entries:
        return _same_entries(c, n)
    x, given = c.known(n.input[0]), c.sizes(n.input[0])
    target = entries(c, n.input[1])
    if x is None or given is None or target is None:
        return None
    if attribute(n, "allowzero", 0) and any(number(e) == 0 for e in target):
        return None
    at = len(given) + x.axis
    want = _extents(c, n, given, target)
    group = None if want is None else _group(given, at, want)
    if want is None or group is None:
        return None
    a, b, i, j = group
    sizes, parts = ([d for d in dims if isinstance(d, int)] for dims in (given[a:b], want[i:j]))
    atoms = np.broadcast_to(x.atoms.reshape([-1 if k == at - a else 1 for k in range(b - a)]), sizes).reshape(parts)
    axes = [k for k, d in enumerate(parts) if d > 1]
    if not axes:
        return None
    number_ = c.taken if isinstance(c.taken, int) else c.taken.get(n.name, 0)
    axis = axes[min(number_, len(axes) - 1)]
    flat = c.tied(atoms, axis)
    if len(axes) > 1:
        c.choices[n.name] = len(axes), flat
    own = target[i + axis]
    for k, e in enumerate(target):
        copied = number(e) == 0 and k == at
        if k != i + axis and (copied or channels_of(e) is not None):
            return None
        if k == i + axis and number(e) == 0 and (k != at or b - a > 1 or j - i > 1):
            return None
    if number(own) not in (0, -1) and not _counts(c, n, 1, i + axis, own, flat):
        return None
    return Lay(i + axis - len(want), flat)


def _counts(c: Channels, n: onnx.NodeProto, operand: int, at: int, own: Entry, atoms: Array) -> bool:
    """Can an entry of a target follow the number of these atoms?"""
    if number(own) != atoms.size:
        return False
    name = n.input[operand]
    if name in c.model.constants:
        c.edit(n, operand, numbers(c.model.constants[name], [(at, atoms)]))
    elif isinstance(own, int):
        return False
    else:
        c.count_must_be(own, n.name, atoms)
    return True


def _extents(c: Channels, n: onnx.NodeProto, given: Sizes, target: list[Entry]) -> Sizes | None:
    """The shape of a Reshape's result."""
    found = c.sizes(n.output[0])
    if found is not None and n.output[0] in c.model.open:
        return found
    out: list[int | str | None] = []
    for k, e in enumerate(target):
        size: int | str | None = number(e)
        if isinstance(e, Extent) and size is None:
            size = (c.sizes(e.value) or ())[e.axis] if e.ratio == 1 else None
        if size == 0:
            size = given[k] if k < len(given) else None
        if size in (None, -1) and found is not None and len(found) == len(target) and isinstance(found[k], int):
            size = found[k]
        out.append(None if size == -1 else size)
    unknown = [k for k, d in enumerate(out) if d is None]
    numbers_ = [d for d in (*given, *out) if isinstance(d, int)]
    if len(unknown) == 1 and number(target[unknown[0]]) == -1 and len(numbers_) == len(given) + len(out) - 1:
        rest = math.prod(numbers_[len(given) :])
        out[unknown[0]] = math.prod(numbers_[: len(given)]) // rest if rest else None
    return tuple(out)


def _group(given: Sizes, at: int, want: Sizes) -> tuple[int, int, int, int] | None:
    """The fewest axes with the channels that become axes of as many elements: given[a:b] -> want[i:j]."""

    def count(dims: Sizes) -> int | None:
        known = [d for d in dims if isinstance(d, int)]
        return math.prod(known) if len(known) == len(dims) else None

    def same(p: Sizes, q: Sizes) -> bool:
        return (count(p) is not None and count(p) == count(q)) or (p == q and None not in p)

    r, s = len(given), len(want)
    spans = sorted(itertools.product(range(at + 1), range(at + 1, r + 1)), key=lambda ab: ab[1] - ab[0])
    for a, b in spans:
        for i, j in sorted(itertools.combinations(range(s + 1), 2), key=lambda ij: ij[1] - ij[0]):
            size = count(given[a:b])
            if size is None or size != count(want[i:j]):
                continue
            if same(given[b:], want[j:]) or same(given[:a], want[:i]):
                return a, b, i, j
    return None


def _axes(c: Channels, n: onnx.NodeProto, more: int = 0) -> list[int] | None:
    """Axes that a node names, from the left; None where they are not constant."""
    given = attribute(n, "axes", None)
    if given is None:
        found = c.constant(n, 1)
        given = None if found is None else found.reshape(-1).tolist()
    rank = c.rank(n.input[0])
    if given is None or rank is None:
        return None
    return [int(a) % (rank + len(given) * more) for a in given]


def reduce(c: Channels, n: onnx.NodeProto) -> Lays:
    """Over other axes than that of the channels; Squeeze too."""
    if n.input[0] in c.entries:
        return _same_entries(c, n) if n.op_type == "Squeeze" else None
    keeps = n.op_type in REDUCTIONS and attribute(n, "keepdims", 1)
    x, axes = c.known(n.input[0]), _axes(c, n)
    at = c.place(x, n.input[0])
    if x is None or axes is None or at is None or at in axes:
        return None
    return x if keeps else Lay(x.axis + sum(a > at for a in axes), x.atoms)


def unsqueeze(c: Channels, n: onnx.NodeProto) -> Lays:
    """New axes."""
    if n.input[0] in c.entries:
        return _same_entries(c, n)
    x, axes, rank = c.known(n.input[0]), _axes(c, n, 1), c.rank(n.input[0])
    if x is None or axes is None or rank is None:
        return None
    old = [k for k in range(rank + len(axes)) if k not in axes]
    return Lay(old[rank + x.axis] - rank - len(axes), x.atoms)


def transpose(c: Channels, n: onnx.NodeProto) -> Lays:
    """Axes in another order."""
    x, rank = c.known(n.input[0]), c.rank(n.input[0])
    if x is None or rank is None:
        return None
    perm = list(attribute(n, "perm", list(range(rank))[::-1]))
    return Lay(perm.index(rank + x.axis) - rank, x.atoms)


def expand(c: Channels, n: onnx.NodeProto) -> Lays:
    """Extents of 1 that become others, beside the channels."""
    x, rank, target = c.known(n.input[0]), c.rank(n.input[0]), entries(c, n.input[1])
    if x is None or rank is None or target is None:
        return None
    at = len(target) + x.axis
    own = target[at] if at >= 0 else 1
    if any(channels_of(e) is not None for k, e in enumerate(target) if k != at):
        return None
    if number(own) == 1 and channels_of(own) is None:
        return x
    return x if _counts(c, n, 1, at, own, x.atoms) else None


def tile(c: Channels, n: onnx.NodeProto) -> Lays:
    """Copies along other axes."""
    x, rank, times = c.known(n.input[0]), c.rank(n.input[0]), entries(c, n.input[1])
    if x is None or rank is None or times is None or len(times) != rank:
        return None
    own = times[rank + x.axis]
    return x if number(own) == 1 and all(channels_of(e) is None for e in times) else None


def depth_to_space(c: Channels, n: onnx.NodeProto) -> Lays:
    """Channels that become pixels of blocks: those of one result go together."""
    x, size = c.along(n.input[0], 1), int(attribute(n, "blocksize", 1)) ** 2
    if x is None:
        return None
    columns = attribute(n, "mode", b"DCR") == b"CRD"
    return Lay(x.axis, c.tied(x.atoms.reshape((-1, size) if columns else (size, -1)), 0 if columns else 1))


def space_to_depth(c: Channels, n: onnx.NodeProto) -> Lays:
    """Pixels of blocks that become channels."""
    x = c.along(n.input[0], 1)
    return None if x is None else Lay(x.axis, np.tile(x.atoms, int(attribute(n, "blocksize", 1)) ** 2))


def resize(c: Channels, n: onnx.NodeProto) -> Lays:
    """Other places, the same channels."""
    x, axes = c.along(n.input[0], 1), attribute(n, "axes", None)
    if x is None:
        return None
    at = 1 if axes is None else next((k for k, a in enumerate(axes) if a % -(x.axis - 1) == 1), None)
    if n.op_type == "Resize" and len(n.input) > 3 and n.input[3]:
        sizes = entries(c, n.input[3])
        if sizes is None or any(channels_of(e) is not None for k, e in enumerate(sizes) if k != at):
            return None
        if at is None:
            return x
        return x if _counts(c, n, 3, at, sizes[at], x.atoms) else None
    scales = c.constant(n, 2 if n.op_type == "Resize" else 1)
    if scales is None or (at is not None and (scales.size <= at or scales[at] != 1)):
        return None
    return x


def pad(c: Channels, n: onnx.NodeProto) -> Lays:
    """Places beside those of other axes."""
    x, pads = c.known(n.input[0]), c.constant(n, 1)
    at = c.place(x, n.input[0])
    if at is None or pads is None or (len(n.input) > 3 and n.input[3]):
        return None
    return x if not pads[at] and not pads[at + pads.size // 2] else None


# --- shapes that are computed -----------------------------------------------------------------------------------------


def entries(c: Channels, v: str) -> list[Entry] | None:
    """What is known of a value of a few integers."""
    if v in c.model.constants:
        a = c.model.constants[v]
        return [int(k) for k in a.reshape(-1)] if a.dtype.kind == "i" and a.ndim < 2 else None
    return c.entries.get(v)


def _integers(c: Channels, v: str) -> bool:
    return v in c.model.constants and c.model.constants[v].dtype.kind == "i"


def shape_of(c: Channels, n: onnx.NodeProto) -> Lays:
    """Extents of the operand's axes."""
    shape, x = c.shape(n.input[0]), c.known(n.input[0])
    if shape is None:
        return None
    at = c.place(x, n.input[0])
    every: list[Entry] = [
        Extent(n.input[0], k, x.atoms) if x is not None and k == at else Extent(n.input[0], k) if d is None else d
        for k, d in enumerate(shape)
    ]
    end = attribute(n, "end", None)
    c.entries[n.output[0]] = every[slice(int(attribute(n, "start", 0)), None if end is None else int(end))]
    return []


def _put(c: Channels, n: onnx.NodeProto, found: list[Entry] | None) -> Lays:
    """The entries of a result; its operands' channels stay where they are not known."""
    if found is None:
        return None
    c.entries[n.output[0]] = found
    return []


def _same_entries(c: Channels, n: onnx.NodeProto) -> Lays:
    return None if any(n.output[1:]) else _put(c, n, c.entries.get(n.input[0]))


def cast(c: Channels, n: onnx.NodeProto) -> Lays:
    """Another type: entries of shapes stay what they are as integers."""
    if n.input[0] not in c.entries:
        return c.known(n.input[0])
    whole = n.op_type == "Identity" or attribute(n, "to", 0) in (onnx.TensorProto.INT64, onnx.TensorProto.INT32)
    return _same_entries(c, n) if whole else None


def _concat_entries(c: Channels, n: onnx.NodeProto) -> Lays:
    out: list[Entry] = []
    for k, v in enumerate(n.input):
        found = entries(c, v)
        if found is None:
            size = (c.shape(v) or (None,))[0]
            if size is None or c.known(v) is not None:
                return None
            found = [None] * size
        if v in c.model.constants:
            found = [Written(e, n.name, k, at) if isinstance(e, int) else e for at, e in enumerate(found)]
        out += found
    return _put(c, n, out)


def _slice_entries(c: Channels, n: onnx.NodeProto) -> Lays:
    starts, ends, steps = (c.constant(n, k) for k in (1, 2, 4))
    if starts is None or ends is None or starts.size != 1 or (steps is None and len(n.input) > 4 and n.input[4]):
        return None
    step = 1 if steps is None else int(steps.reshape(-1)[0])
    found = c.entries[n.input[0]]
    return _put(c, n, found[slice(int(starts.reshape(-1)[0]), int(ends.reshape(-1)[0]), step)])


def _gather_entries(c: Channels, n: onnx.NodeProto) -> Lays:
    index, found = c.constant(n, 1), c.entries[n.input[0]]
    if index is None or index.ndim > 1 or any(not -len(found) <= k < len(found) for k in index.reshape(-1)):
        return None
    return _put(c, n, [found[int(k)] for k in index.reshape(-1)])


def scaled_entries(c: Channels, n: onnx.NodeProto) -> Lays:
    """Products and quotients of an entry and a number; results that depend on no channels are just not known."""
    found = [entries(c, v) for v in n.input]
    if any(f is None for f in found) or not any(v in c.entries for v in n.input):
        return None
    a, b = (f for f in found if f is not None)
    if all(channels_of(e) is None for e in (*a, *b)):
        return _put(c, n, [None] * max(len(a), len(b)))
    if len(a) != 1 or len(b) != 1:
        return None
    e, k = (a[0], number(b[0])) if channels_of(a[0]) is not None else (b[0], number(a[0]))
    if not isinstance(e, Extent) or channels_of(b[0] if e is a[0] else a[0]) is not None or not k or k < 0:
        return None
    if n.op_type == "Mul":
        return _put(c, n, [Extent(e.value, e.axis, e.atoms, e.ratio * k)])
    exact = n.op_type == "Div" and e is a[0] and e.size is not None and e.size % k == 0
    return _put(c, n, [Extent(e.value, e.axis, e.atoms, e.ratio * Fraction(1, k))]) if exact else None


def arithmetic(c: Channels, n: onnx.NodeProto) -> Lays:
    """Of entries of shapes, or of values."""
    return scaled_entries(c, n) if any(v in c.entries for v in n.input) else binary(c, n)


RULES: dict[str, Any] = {
    "Concat": concat, "Split": split, "Slice": slice_, "Gather": gather, "Flatten": flatten, "Reshape": reshape,
    "Squeeze": reduce, "Unsqueeze": unsqueeze, "Transpose": transpose, "Expand": expand, "Tile": tile,
    "DepthToSpace": depth_to_space, "SpaceToDepth": space_to_depth, "Resize": resize, "Upsample": resize, "Pad": pad,
    "Shape": shape_of, "Cast": cast, "Identity": cast, **dict.fromkeys(("Add", "Sub", "Mul", "Div"), arithmetic),
}  # fmt: skip
