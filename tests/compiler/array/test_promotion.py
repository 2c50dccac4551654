"""Dtypes of arrays: each is one object, however it is asked for, and what is none of them is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from array_samples import ALL

import dnnc
import dnnc.array as xp
from dnnc.array.promotion import NAMES, dtype_of


@pytest.mark.parametrize("name", NAMES)
def test_a_dtype_is_one_object(name: str) -> None:
    """Operators take the short way where the types of their operands are the same object."""
    own = np.dtype(name)
    for given in (
        name,
        own,
        own.type,
        own.newbyteorder("="),
        own.newbyteorder("S"),
        own.newbyteorder("<"),
        own.newbyteorder(">"),
    ):
        assert dtype_of(given) is own


@pytest.mark.parametrize("name", ALL)
def test_arrays_of_a_type_share_its_object(name: str) -> None:
    a = np.zeros(3, name)
    swapped = a.astype(a.dtype.newbyteorder("S"))
    for x in (
        xp.asarray(a),
        xp.asarray(a, copy=False),
        xp.asarray(swapped),
        xp.zeros(3, dtype=name),
        xp.asarray(a)[1:],
        xp.asarray(a) == xp.asarray(a),
    ):
        assert x.dtype is np.dtype(x.dtype.name)


def test_python_types() -> None:
    assert [dtype_of(t) for t in (bool, int, float, complex)] == [np.bool_, np.int64, np.float64, np.complex128]


@pytest.mark.parametrize(
    "given", [None, "text", "f2,f4", object, np.dtype("M8[s]"), np.dtype("S4"), np.dtype("O"), np.longdouble, 7]
)
def test_what_is_no_dtype_is_named(given: Any) -> None:
    with pytest.raises(dnnc.InputError, match=r"dnnc\.array has no dtype .*; there are bool, int8"):
        dtype_of(given)
