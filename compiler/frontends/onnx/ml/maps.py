"""Converters of ZipMap, DictVectorizer and CastMap of ai.onnx.ml. A map is an array with static keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dnnc.frontends.onnx.call import Call, Item, of_value
from dnnc.frontends.onnx.ml.linear import strings
from dnnc.ir.dtype import f32, i64, string
from dnnc.ir.errors import ModelError, count
from dnnc.ir.graph import Value

Converter = Callable[[Call], Any]
CASTS = {"TO_FLOAT": f32, "TO_INT64": i64, "TO_STRING": string}


def zip_map(c: Call) -> Item:
    """A map of the classes' labels for each row."""
    keys: tuple[Any, ...] = c.integers("classlabels_int64s") or c.texts("classlabels_strings") or ()
    x = c.x()
    x = c.b.reshape(x, shape=(1, x.type.shape[0])) if x.type.rank == 1 else x
    if x.type.rank != 2 or x.type.shape[1] != len(keys):
        raise ModelError(f"{count(len(keys), 'label')} for the columns of {x.type}; there must be as many")
    item = of_value(x, c.item(0).origins)
    item.keys = tuple(keys)
    return item


def _map(c: Call) -> tuple[tuple[Any, ...], Value]:
    item = c.item(0)
    if item.keys is None or item.type.rank != 1:
        raise ModelError(f"the input must be a map, it is {item.type}")
    return item.keys, c.x()


def _picked(c: Call, values: Value, places: Sequence[int]) -> Any:
    """The values at these places as a row, 0 (or an empty string) where a place is -1."""
    nothing = strings(c, [""]) if values.type.dtype is string else c.const(np.zeros(1), values.type.dtype)
    index = np.array([len(c.item(0).keys or ()) if p < 0 else p for p in places], np.int64)
    row = c.b.gather(c.b.concat(values, nothing, axis=0), c.b.constant(index), axis=0)
    return c.b.reshape(row, shape=(1, len(places)))


def dict_vectorizer(c: Call) -> Any:
    """The values of the words of a vocabulary, in its order, as one row."""
    words: tuple[Any, ...] = c.integers("int64_vocabulary") or c.texts("string_vocabulary") or ()
    keys, values = _map(c)
    unknown = [k for k in keys if k not in words]
    if unknown:
        raise ModelError(f"the map has the key {unknown[0]!r}, which the vocabulary has not")
    return _picked(c, values, [keys.index(w) if w in keys else -1 for w in words])


def cast_map(c: Call) -> Any:
    """Return the values ordered by key as one row; with `map_form` SPARSE each at the place of its key."""
    keys, values = _map(c)
    form, to = c.text("map_form", "DENSE"), CASTS.get(c.text("cast_to", "TO_FLOAT"))
    if form not in ("DENSE", "SPARSE") or to is None:
        raise ModelError(
            f"attribute map_form is DENSE or SPARSE, cast_to one of {', '.join(CASTS)}; got {form!r}, "
            f"{c.text('cast_to')!r}"
        )
    if form == "DENSE":
        places = sorted(range(len(keys)), key=lambda k: keys[k])
    else:
        size = c.integer("max_map", 1)
        if any(not 0 <= k < size for k in keys):
            raise ModelError(f"a key of the map is outside of [0, {size}), which attribute max_map says")
        places = [keys.index(k) if k in keys else -1 for k in range(size)]
    row = (
        _picked(c, values, places)
        if form == "DENSE" or values.type.dtype is not string
        else _picked(c, _converted(c, values, to), places)
    )
    return row if row.type.dtype is to else _converted(c, row, to)


def _converted(c: Call, v: Value, to: Any) -> Any:
    if v.type.dtype is to:
        return v
    if v.type.dtype is string:
        return c.b.from_string(v, to=to)
    return c.b.to_string(v) if to is string else c.b.cast(v, to=to)


MAPS: dict[str, Converter] = {"CastMap": cast_map, "DictVectorizer": dict_vectorizer, "ZipMap": zip_map}
