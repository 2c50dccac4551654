"""Checks of what users give to public functions: each says what was expected and what came instead."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dnnc.ir.errors import DnncError, InputError, a_type, count


def function(fn: Any, what: str, args: Sequence[Any] | None = None, named: Mapping[str, Any] | None = None) -> None:
    """InputError where something cannot be called or, with `args`, not with these arguments."""
    if not callable(fn):
        raise InputError(f"{what}: expected a function, got {a_type(fn)}")
    if args is None:
        return
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # of a builtin nothing is known
        return
    try:
        signature.bind(*args, **(named or {}))
    except TypeError as e:
        name = getattr(fn, "__name__", type(fn).__name__)
        raise InputError(
            f"{what}: {name}{signature} cannot take {count(len(args) + len(named or {}), 'argument')}: {e}"
        ) from None


def names(given: Any, what: str, error: type[DnncError] = InputError) -> tuple[str, ...]:
    """One name or a sequence of names."""
    found = (
        (given,)
        if isinstance(given, str)
        else tuple(given)
        if isinstance(given, (list, tuple, set, frozenset))
        else (None,)
    )
    if not all(isinstance(n, str) for n in found):
        raise error(f"{what}={_short(given)}: expected a name or a sequence of names")
    return found


def integer(n: Any, what: str, low: int, error: type[DnncError] = InputError) -> int:
    """An integer of at least `low`, of Python or NumPy."""
    if isinstance(n, bool) or not hasattr(n, "__index__") or getattr(n, "shape", ()) != () or int(n) < low:
        raise error(f"{what}={_short(n)}: expected an integer of at least {low}")
    return int(n)


def operators(given: Any, what: str) -> dict[str, Any]:
    """Definitions of operators by `domain::Operator`: functions, or texts of the operator IR."""
    if not isinstance(given, Mapping):
        raise InputError(f'{what}={_short(given)}: expected a mapping such as {{"my.domain::MyOp": function}}')
    for name, definition in given.items():
        domain, _, op = name.partition("::") if isinstance(name, str) else ("", "", "")
        if not domain or not op.isidentifier():
            raise InputError(
                f"{what}: {_short(name)} names no operator; expected domain::Operator, as in my.domain::MyOp"
            )
        if not callable(definition) and not isinstance(definition, str):
            raise InputError(
                f"{what}[{name!r}]: expected a function of arrays or the text of a kernel in operator IR, got "
                f"{a_type(definition)}"
            )
    return dict(given)


def path(given: Any, what: str, error: type[DnncError] = InputError) -> str:
    """The path of a file as text."""
    if not isinstance(given, (str, os.PathLike)):
        raise error(f"{what}={_short(given)}: expected a path, got {a_type(given)}")
    return str(os.fspath(given))


def sequence(given: Any, what: str, error: type[DnncError] = InputError) -> tuple[Any, ...]:
    """A list or a tuple."""
    if not isinstance(given, (list, tuple)):
        raise error(f"{what}: expected a list or tuple, got {a_type(given)}")
    return tuple(given)


def optional_function(fn: Callable[..., Any] | None, what: str, error: type[DnncError] = InputError) -> None:
    """A function or None."""
    if fn is not None and not callable(fn):
        raise error(f"{what}: expected a function or None, got {a_type(fn)}")


def _short(x: Any) -> str:
    text = repr(x)
    return text if len(text) <= 60 and "\n" not in text else a_type(x)
