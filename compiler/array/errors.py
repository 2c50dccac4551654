"""Errors that are Python's own as well: array code expects IndexError and ValueError where the standard's users do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from dnnc.ir.errors import DnncError, InputError, a_type

F = TypeVar("F", bound=Callable[..., Any])


class IndexInputError(InputError, IndexError):
    """A key does not fit to an array."""


class ValueInputError(InputError, ValueError):
    """Arrays do not fit to each other, or to what a function needs."""


class TypeInputError(InputError, TypeError):
    """An array is not of the kind that a function takes."""


def public(fn: F) -> F:
    """Make a `dnnc.array` function raise InputError for callers' mistakes, not what Python raises inside.

    Python's own errors about the number and the names of arguments stay, and so does the array API's BufferError.
    """

    @functools.wraps(fn)
    def checked(*args: Any, **named: Any) -> Any:
        try:
            return fn(*args, **named)
        except (DnncError, BufferError, RecursionError):
            raise
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RuntimeError, StopIteration) as e:
            if (
                e.__traceback__ is not None and e.__traceback__.tb_next is None
            ):  # the call itself: too many arguments, an unknown keyword
                raise
            given = ", ".join([*map(a_type, args), *(f"{n}={a_type(x)}" for n, x in named.items())])
            kind = (
                IndexInputError
                if isinstance(e, LookupError)
                else ValueInputError
                if isinstance(e, ValueError)
                else TypeInputError
            )
            raise kind(
                f"{fn.__name__} cannot take ({given}): {e}; it takes arrays of dnnc.array, which asarray makes of "
                "numbers, lists and other arrays"
            ) from e

    return checked  # type: ignore[return-value]


def make_public(names: dict[str, Any]) -> None:
    """Replace the functions of a namespace by `public` ones."""
    for name, x in list(names.items()):
        if isinstance(x, FunctionType) and not name.startswith("__"):
            names[name] = public(x)
