"""Sequences, optionals and maps exist only while a model is read: a static structure over tensors.

A sequence is an item with `items`, an absent optional is None. A map is an item whose value holds one element for each
of its `keys`; a sequence of maps with equal keys one row for each of them. A call's values decide how it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dnnc.frontends.onnx.call import Call, Item, materialize, number, of_array, of_value
from dnnc.frontends.onnx.ops.movement import even_parts, split_parts
from dnnc.ir.dtype import f32
from dnnc.ir.errors import ModelError, UnsupportedError
from dnnc.ir.form import ARRAY, NOTHING, Form, Kind, item_name
from dnnc.ir.graph import Value
from dnnc.ir.shapes import normalize_axis
from dnnc.ir.types import TensorType

Converter = Callable[[Call], Any]
MAX_CHOICES = 64  # items of a sequence among which a computed position chooses

# --- inputs and outputs of a model ------------------------------------------------------------------------------------


def structured_input(name: str, kind: Kind, form: Form | None, leaf: Callable[[str, Kind], Item]) -> Item | None:
    """Return a non-tensor input's item, tensors by `leaf(name, kind)`. UnsupportedError: unknown structure."""
    if form is None:
        raise UnsupportedError(
            f"input {name!r} is {_article(kind)}, whose structure is known at the call only; give one "
            f"(forms={{{name!r}: Form(...)}})"
        )
    if form.kind == "nothing":
        return None
    if kind.kind == "optional":
        assert kind.element is not None
        return structured_input(name, kind.element, form, leaf)
    if kind.kind == "sequence":
        assert kind.element is not None
        parts = [structured_input(item_name(name, k), kind.element, f, leaf) for k, f in enumerate(form.items)]
        if any(p is None for p in parts):
            raise UnsupportedError(f"input {name!r} is a sequence with absent items")
        return sequence([p for p in parts if p is not None], dtype=kind.element.dtype)
    item = leaf(name, kind)
    if kind.kind == "map":
        item.keys = form.keys
    return item


def _article(kind: Kind) -> str:
    return {"sequence": "a sequence", "optional": "an optional value", "map": "a map"}.get(
        kind.kind, "a tensor of unknown rank"
    )


def structured_output(item: Item | None, name: str, leaf: Callable[[Item, str], None]) -> Form:
    """The form of an output; `leaf(item, name)` makes an output of each of its tensors, in order."""
    if item is None:
        return NOTHING
    if item.items is not None:
        return Form("list", tuple(structured_output(i, item_name(name, k), leaf) for k, i in enumerate(item.items)))
    leaf(item, name)
    if item.keys is None:
        return ARRAY
    return Form("dict" if item.type.rank == 1 else "dicts", keys=item.keys)


# --- sequences --------------------------------------------------------------------------------------------------------


def sequence(items: Sequence[Item], origins: frozenset[str] = frozenset(), dtype: Any = None) -> Item:
    """A sequence; an empty one has the given dtype."""
    kind = items[0].type if items else TensorType(dtype or f32, ())
    return Item(kind, items=tuple(items), origins=origins)


def _items(c: Call, i: int = 0) -> tuple[Item, ...]:
    it = c.item(i)
    if it.items is None:
        raise ModelError(f"input {i} must be a sequence, it is {it.type}")
    return it.items


def _position(c: Call, i: int, length: int, default: int) -> int:
    k = int(c.scalar(i, "the position")) if c.has(i) else default
    at = k + length if k < 0 else k
    if not 0 <= at < max(length, default + 1):
        raise ModelError(f"position {k} is outside a sequence of {length}")
    return at


def sequence_construct(c: Call) -> Item:
    return sequence([c.item(i) for i in range(len(c.items))])


def sequence_empty(c: Call) -> Item:
    return Item(TensorType(c.dtype("dtype", f32), ()), items=())


def sequence_at(c: Call) -> Item:
    """One item. A computed position chooses among items of one type by a gather from all of them."""
    items = _items(c)
    if (
        0 < len(items) <= MAX_CHOICES
        and not c.item(1).constant
        and all(i.items is None and i.type == items[0].type for i in items)
    ):
        rows = [c.b.unsqueeze(materialize(i, c.b), axes=(0,)) for i in items]
        every = rows[0] if len(rows) == 1 else c.b.concat(*rows, axis=0)
        at = c.x(1)
        return of_value(
            c.b.gather(every, at if at.type.rank == 0 else c.b.reshape(at, shape=()), axis=0), c.item(1).origins
        )
    return items[_position(c, 1, len(items), len(items) - 1)]


def sequence_insert(c: Call) -> Item:
    items = list(_items(c))
    items.insert(_position(c, 2, len(items), len(items)), c.item(1))
    return sequence(items)


def sequence_erase(c: Call) -> Item:
    items = list(_items(c))
    dtype = c.item(0).type.dtype
    del items[_position(c, 1, len(items), len(items) - 1)]
    return sequence(items, dtype=dtype)


def sequence_length(c: Call) -> Item:
    return of_array(np.int64(len(_items(c))))


def split_to_sequence(c: Call) -> Item:
    """Parts of given sizes, of one size (the last may be smaller), or rows."""
    x = c.x()
    axis = normalize_axis(c.integer("axis", 0), x.type.rank)
    if not c.has(1):
        n = number(x.type.shape[axis], "the dim that is split into a sequence")
        parts = split_parts(c, x, axis, [1] * n)
        keep = c.flag("keepdims", True)
        return sequence([of_value(p if keep else c.b.squeeze(p, axes=(axis,))) for p in parts], dtype=x.type.dtype)
    sizes: Sequence[Any] = c.dims(1, "split")
    if c.rank(1) == 0:
        n, size = (
            number(x.type.shape[axis], "the dim that is split into a sequence"),
            number(sizes[0], "the size of a part"),
        )
        sizes = [min(size, n - k) for k in range(0, n, size)] if size > 0 else even_parts(n, 0)
    return sequence([of_value(p) for p in split_parts(c, x, axis, sizes)], dtype=x.type.dtype)


def concat_from_sequence(c: Call) -> Value:
    xs = [materialize(i, c.b) for i in _items(c)]
    if not xs:
        raise ModelError("an empty sequence has nothing to concatenate")
    axis = c.integer("axis")
    if c.flag("new_axis"):
        axis = normalize_axis(axis, xs[0].type.rank + 1)
        xs = [c.b.unsqueeze(x, axes=(axis,)) for x in xs]
    return xs[0] if len(xs) == 1 else c.b.concat(*xs, axis=axis)


def optional(c: Call) -> Any:
    return [c.items[0] if c.items else None]


def optional_get(c: Call) -> Item:
    if not c.has(0):
        raise ModelError("the optional value is absent, so there is no element to get")
    return c.item(0)


def optional_has(c: Call) -> Item:
    return of_array(np.bool_(c.has(0)))


SEQUENCE: dict[str, Converter] = {
    "SequenceConstruct": sequence_construct,
    "SequenceEmpty": sequence_empty,
    "SequenceAt": sequence_at,
    "SequenceInsert": sequence_insert,
    "SequenceErase": sequence_erase,
    "SequenceLength": sequence_length,
    "SplitToSequence": split_to_sequence,
    "ConcatFromSequence": concat_from_sequence,
    "Optional": optional,
    "OptionalGetElement": optional_get,
    "OptionalHasElement": optional_has,
}
