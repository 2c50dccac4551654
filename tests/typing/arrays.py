"""Arrays: functions, operators, methods and random numbers give arrays."""

import sys
from typing import Any

import numpy as np

if sys.version_info >= (3, 11):
    from typing import assert_type
else:
    from typing_extensions import assert_type

import dnnc
import dnnc.array as xp
from dnnc.array import Array, sparse

a = xp.asarray([[1.0, 2.0]])
key = dnnc.random.key(0)

assert_type(a, Array)
assert_type(1 + a, Array)
assert_type(a @ a.T, Array)
assert_type(-a, Array)
assert_type(a > 1, Array)
assert_type(a[0, 1:], Array)
assert_type(a.max(axis=0), Array)
assert_type(a.reshape(2), Array)
assert_type(a.astype(xp.float64), Array)
assert_type(a.shape, tuple[int, ...])
assert_type(a.ndim, int)
assert_type(a.dtype, np.dtype[Any])
assert_type(float(a[0, 0]), float)
assert_type(len(a), int)
assert_type(xp.sum(a), Array)
assert_type(xp.concat([a, a], axis=0), Array)
assert_type(xp.where(a > 0, a, 0.0), Array)
assert_type(xp.einsum("ij,kj->ik", a, a), Array)
assert_type(xp.linalg.norm(a), Array)
assert_type(xp.fft.rfft(a), Array)
assert_type(xp.histogram(a), tuple[Array, Array])
assert_type(xp.result_type(a, 1.0), np.dtype[Any])
assert_type(dnnc.random.normal(key, (3, 4)), Array)
assert_type(dnnc.random.split(key, 2), Array)
assert_type(np.asarray(a).shape, tuple[Any, ...])

s = sparse.csr_array(np.eye(3))
assert_type(s @ s, sparse.csr_array)
assert_type(s @ np.ones(3), Array)
assert_type(s.astype(np.float64), sparse.csr_array)
assert_type(s.tobsr((3, 3)), sparse.bsr_array)
assert_type(s + s, sparse.SparseArray)
assert_type(s.toarray(), Array)

print(a.bogus)  # error
a.max(axes=0)  # error
xp.concatt([a, a])  # error
s.tocsc()  # error
xp.sum(a, axes=0)  # error
dnnc.random.normal(key, shpae=(3,))  # error
