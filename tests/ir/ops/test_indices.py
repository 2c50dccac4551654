"""Ops that say that their negative indices count from the end do so: checks of kernels draw such indices for them."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from dnnc.ir.op import OpDef, Sample
from dnnc.ir.ops import OPS
from dnnc.ir.ops.common import draw

CASES = [(op, s) for op in OPS.values() if op.index is not None and op.index.wraps for s in op.samples]


@pytest.mark.parametrize(("op", "s"), CASES, ids=lambda x: getattr(x, "name", ""))
def test_negative_indices_count_from_the_end(op: OpDef, s: Sample) -> None:
    assert op.index is not None and op.reference is not None
    attrs = dict(s.attrs)
    sizes = np.array(op.index.addressed(*s.inputs, **attrs))
    arrays = draw(s, zlib.crc32(op.name.encode()))
    at = arrays[op.index.operand]
    of_one_axis = sizes.size == 1 or at.shape[-1:] == sizes.shape
    if at.dtype.kind != "i" or 0 in sizes or not of_one_axis:
        return
    positive = (at % sizes).astype(at.dtype)
    arrays[op.index.operand] = positive
    want = op.reference(*arrays, **attrs)
    arrays[op.index.operand] = (positive - sizes).astype(at.dtype)
    np.testing.assert_array_equal(op.reference(*arrays, **attrs), want)
