"""All parameters as one vector, and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dnnc.array.core import Array
from dnnc.array.manipulation import concat, reshape
from dnnc.ir.errors import InputError
from dnnc.nn.functional.operands import array
from dnnc.nn.parameter import overwrite


def parameters_to_vector(parameters: Iterable[Array]) -> Array:
    """The elements of all parameters, one after the other. InputError: there are none."""
    parts = [reshape(array("parameters_to_vector", "parameters", p), (-1,)) for p in parameters]
    if not parts:
        raise InputError("parameters_to_vector: there are no parameters")
    return concat(parts)


def vector_to_parameters(vec: Any, parameters: Iterable[Array]) -> None:
    """Write the elements of a vector into parameters, in order, each in its dtype.

    Raises:
        InputError: it has more or fewer elements than they have together; then nothing is written.
    """
    x, params = array("vector_to_parameters", "vec", vec), list(parameters)
    size = sum(p.size for p in params)
    if x.ndim != 1 or x.size != size:
        raise InputError(f"vector_to_parameters: vec has shape {x.shape}, expected ({size},)")
    at = 0
    for p in params:
        overwrite(p, reshape(x[at : at + p.size], p.shape).astype(p.dtype))
        at += p.size
