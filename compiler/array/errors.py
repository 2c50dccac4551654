"""Errors that are Python's own as well: array code expects IndexError and ValueError where the standard's users do."""

from __future__ import annotations

from dnnc.ir.errors import InputError


class IndexInputError(InputError, IndexError):
    """A key does not fit to an array."""


class ValueInputError(InputError, ValueError):
    """Arrays do not fit to each other, or to what a function needs."""


class TypeInputError(InputError, TypeError):
    """An array is not of the kind that a function takes."""
