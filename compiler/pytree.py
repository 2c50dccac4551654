"""Trees of arguments and results: dicts, lists, tuples, dataclasses. `flatten`: leaves and hashable structure."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dnnc.ir.errors import InputError, a_type


class Static:
    """What is no array and is told from others by its identity: a program is compiled for it."""


FIXED = (Static, bool, int, float, complex, str, bytes, type(None), np.dtype, enum.Enum, type)


@dataclass(frozen=True)
class Leaf:
    """The place of an array."""


@dataclass(frozen=True)
class Fixed:
    """A value that is no array. `key` separates values that Python calls equal: 1, 1.0, True, 0.0, -0.0."""

    key: Any
    value: Any = field(compare=False)


@dataclass(frozen=True)
class Branch:
    """A container: its type, the names of its children (keys, fields or positions), and these."""

    type: type
    names: tuple[Any, ...]
    children: tuple[Tree, ...]


Tree = Leaf | Fixed | Branch


def is_array(x: Any) -> bool:
    return isinstance(x, (np.ndarray, np.generic)) or hasattr(x, "__dlpack__") or hasattr(x, "__cuda_array_interface__")


def key_of(value: Any, where: str) -> Any:
    """What tells a fixed value from others. InputError where it cannot be told."""
    if isinstance(value, tuple):
        return type(value), tuple(key_of(v, where) for v in value)
    try:
        hash(value)
    except TypeError:
        raise InputError(
            f"{where}: a static argument must be hashable, {a_type(value)} is not; a tuple is, a frozen dataclass too"
        ) from None
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


@dataclass(frozen=True)
class Rules:
    """What may stand in a tree: `leaves` are further types of leaves, `any` allows values of all types."""

    leaves: tuple[type, ...] = ()
    any: bool = False


def flatten(tree: Any, path: str, rules: Rules) -> tuple[list[tuple[str, Any]], Tree]:
    """Return a tree's leaves with paths (`params.w`), and its structure. InputError: where another value stands."""
    if is_array(tree) or isinstance(tree, rules.leaves):
        return [(path, tree)], Leaf()
    parts = children(tree)
    if parts is None:
        if rules.any:
            return [], Fixed((type(tree), id(tree)), tree)
        if isinstance(tree, FIXED):
            return [], Fixed(key_of(tree, path), tree)
        raise InputError(
            f"{path or 'the argument'} is {a_type(tree)}: expected an array, a number, a string, or a dict, list, "
            "tuple or dataclass "
            f"of these; name the argument in static= if it is fixed"
        )
    made = [flatten(v, f"{path}.{n}" if path else str(n), rules) for n, v in parts]
    leaves = [leaf for found, _ in made for leaf in found]
    return leaves, Branch(type(tree), tuple(n for n, _ in parts), tuple(t for _, t in made))


def children(tree: Any) -> list[tuple[Any, Any]] | None:
    """The named parts of a container; None for what is none."""
    if type(tree) is dict:
        return list(tree.items())
    if type(tree) in (list, tuple):
        return list(enumerate(tree))
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return list(zip(tree._fields, tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [(f.name, getattr(tree, f.name)) for f in dataclasses.fields(tree)]
    return None


def unflatten(tree: Tree, leaves: Sequence[Any]) -> Any:
    """The tree with these leaves, which are in the order of `flatten`."""
    return _made(tree, iter(leaves))


def _made(tree: Tree, leaves: Iterator[Any]) -> Any:
    if isinstance(tree, Leaf):
        return next(leaves)
    if isinstance(tree, Fixed):
        return tree.value
    values = [_made(c, leaves) for c in tree.children]
    if tree.type is dict:
        return dict(zip(tree.names, values))
    if tree.type in (list, tuple):
        return tree.type(values)
    if issubclass(tree.type, tuple):
        return tree.type(*values)
    made = object.__new__(tree.type)  # fields are as they were checked already: __init__ and __post_init__ need not run
    for n, v in zip(tree.names, values):
        object.__setattr__(made, n, v)
    return made
