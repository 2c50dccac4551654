"""Takes a call's values apart into the arrays of compiled code, and assembles results; see `dnnc.ir.form`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dnnc.ir.errors import InputError, a_type
from dnnc.ir.form import ARRAY, NOTHING, Form, Kind, item_name
from dnnc.signature import converted

Array = np.ndarray[Any, Any]


def flatten(value: Any, kind: Kind, name: str, leaves: dict[str, Array]) -> Form:
    """Return a value's form, adding named arrays to `leaves`. InputError names input and item of another kind."""
    if kind.kind == "optional":
        assert kind.element is not None
        return NOTHING if value is None else flatten(value, kind.element, name, leaves)
    if kind.kind == "sequence":
        assert kind.element is not None
        if not isinstance(value, (list, tuple)):
            raise InputError(f"input {name}: expected a list ({kind}), got {_described(value)}")
        return Form("list", tuple(flatten(v, kind.element, item_name(name, k), leaves) for k, v in enumerate(value)))
    if kind.kind == "map":
        return _flat_map(value, kind, name, leaves)
    if value is None or isinstance(value, Mapping):
        raise InputError(f"input {name}: expected an array of {kind}, got {_described(value)}")
    assert kind.dtype is not None
    leaves[name] = converted(value, name, kind.dtype.numpy, kind.rank)
    return ARRAY


def _flat_map(value: Any, kind: Kind, name: str, leaves: dict[str, Array]) -> Form:
    if not isinstance(value, Mapping):
        raise InputError(f"input {name}: expected a dict ({kind}), got {_described(value)}")
    wanted = str if kind.key is not None and kind.key.kind == "s" else (int, np.integer)
    for k in value:
        if not isinstance(k, wanted) or isinstance(k, bool):
            raise InputError(f"input {name}: expected keys of {kind.key}, got {k!r}")
    assert kind.dtype is not None
    keys = tuple(k if isinstance(k, str) else int(k) for k in value)
    leaves[name] = converted(list(value.values()), name, kind.dtype.numpy, 1)
    return Form("dict", keys=keys)


def assemble(form: Form, arrays: Iterator[Array]) -> Any:
    """The value of a form, from its arrays in order."""
    if form.kind == "nothing":
        return None
    if form.kind == "list":
        return [assemble(f, arrays) for f in form.items]
    a = next(arrays)
    if form.kind == "dict":
        return dict(zip(form.keys, a.tolist() if a.dtype == object else a))
    if form.kind == "dicts":
        return [dict(zip(form.keys, row.tolist() if row.dtype == object else row)) for row in a]
    return a


def _described(value: Any) -> str:
    return "None" if value is None else a_type(value)
