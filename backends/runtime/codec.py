"""Checked JSON codec of records: dataclasses of numbers, texts, bytes, dtypes, records, tuples and dicts."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar, Union

from dnnc.ir.dtype import BY_NAME, DType

T = TypeVar("T")
LIMIT = 1 << 63


def dumps(x: Any) -> bytes:
    """A record as JSON text."""
    return json.dumps(encode(x), separators=(",", ":")).encode()


def loads(cls: type[T], data: bytes) -> T:
    """What `dumps` wrote. ValueError: it is none of that type."""
    return decode(cls, json.loads(data))


def encode(x: Any) -> Any:
    """Records as JSON data."""
    if isinstance(x, DType):  # which exists once for each name
        return x.name
    if dataclasses.is_dataclass(x):
        return {f.name: encode(getattr(x, f.name)) for f in dataclasses.fields(x)}
    if isinstance(x, Mapping):
        return {k: encode(v) for k, v in x.items()}
    if isinstance(x, bytes):
        return x.hex()
    return [encode(v) for v in x] if isinstance(x, (tuple, list)) else x


def decode(cls: type[T], data: Any) -> T:
    """JSON data as a record. ValueError says what is expected where, and what is there."""
    reader: Read = _reader(typing.cast(Any, cls))
    return reader(data, "")  # type: ignore[no-any-return]


Read = Callable[[Any, str], Any]


@cache
def _reader(t: Any) -> Read:
    """The function that reads a type: made once, for there are thousands of small records."""
    if t is DType:
        return _converted("the name of a dtype", BY_NAME.__getitem__)
    if dataclasses.is_dataclass(t):
        return _record(t)
    origin, args = typing.get_origin(t), typing.get_args(t)
    if origin in (Union, types.UnionType):
        return _either(args)
    if origin is tuple:
        return _list(_reader(args[0])) if args[-1] is ... else _fixed([_reader(a) for a in args])
    if origin in (dict, Mapping):
        return _mapping(_reader(args[1]))
    if t is Any:
        return lambda data, where: data
    if t is bytes:
        return _converted("hexadecimal digits", bytes.fromhex)
    return _plain(t)


def _plain(t: Any) -> Read:
    def read(data: Any, where: str) -> Any:
        if type(data) is not t or (t is int and not -LIMIT <= data < LIMIT):
            raise _wrong(where, {int: "a 64-bit integer", str: "text", bool: "true or false"}[t], data)
        return data

    return read


def _converted(expected: str, convert: Callable[[str], Any]) -> Read:
    def read(data: Any, where: str) -> Any:
        try:
            return convert(data)
        except (KeyError, ValueError, TypeError):
            raise _wrong(where, expected, data) from None

    return read


def _either(options: tuple[Any, ...]) -> Read:
    readers = [None if o is type(None) else _reader(o) for o in options]

    def read(data: Any, where: str) -> Any:
        error: ValueError | None = None
        for reader in readers:
            try:
                if reader is not None:
                    return reader(data, where)
                if data is None:
                    return None
            except ValueError as e:
                error = error or e
        assert error is not None
        raise error

    return read


def _list(item: Read) -> Read:
    def read(data: Any, where: str) -> Any:
        if type(data) is not list:
            raise _wrong(where, "a list", data)
        return tuple([item(v, f"{where}[{k}]") for k, v in enumerate(data)])

    return read


def _fixed(items: list[Read]) -> Read:
    def read(data: Any, where: str) -> Any:
        if type(data) is not list or len(data) != len(items):
            raise _wrong(where, f"a list of {len(items)}", data)
        return tuple([item(v, f"{where}[{k}]") for k, (item, v) in enumerate(zip(items, data))])

    return read


def _mapping(item: Read) -> Read:
    def read(data: Any, where: str) -> Any:
        if type(data) is not dict:
            raise _wrong(where, "an object", data)
        return {k: item(v, f"{where}.{k}") for k, v in data.items()}

    return read


def _record(cls: Any) -> Read:
    hints = typing.get_type_hints(cls)
    readers = [(f.name, _reader(hints[f.name])) for f in dataclasses.fields(cls)]
    names = {name for name, _ in readers}
    more = {f.name: f.default for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING}

    def read(data: Any, where: str) -> Any:
        """What an earlier version did not write has its default."""
        if type(data) is not dict or not names - more.keys() <= data.keys() <= names:
            raise _wrong(where, f"an object with {', '.join(sorted(names))}", data)
        return cls(*[r(data[name], f"{where}.{name}") if name in data else more[name] for name, r in readers])

    return read


def _wrong(where: str, expected: str, data: Any) -> ValueError:
    got = f"an object with {', '.join(map(str, list(data)[:20]))}" if isinstance(data, dict) else repr(data)[:80]
    return ValueError(f"{where.lstrip('.') or 'the whole'}: expected {expected}, got {got}")
