"""A handful of small ops, so that tests of the graph IR itself do not depend on the op set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dnnc.ir.dtype import BY_NAME, i64
from dnnc.ir.op import OpDef, Trait, require
from dnnc.ir.shapes import broadcast_shapes, normalize_axis
from dnnc.ir.types import TensorType

ELEMENTWISE = frozenset({Trait.PURE, Trait.ELEMENTWISE})


def _no_expression(*tensors: Any, **attrs: Any) -> Any:
    raise AssertionError("these tests run references only")


def _same(x: TensorType) -> TensorType:
    return x


def _broadcast(a: TensorType, b: TensorType) -> TensorType:
    require(a.dtype is b.dtype, "dtypes differ: {} and {}", a.dtype, b.dtype)
    return TensorType(a.dtype, broadcast_shapes(a.shape, b.shape))


def _matmul(a: TensorType, b: TensorType) -> TensorType:
    require(a.rank == b.rank == 2 and a.shape[1] == b.shape[0], "inner dims differ: {} and {}", a, b)
    return TensorType(a.dtype, (a.shape[0], b.shape[1]))


def _softmax(x: TensorType, *, axis: int = -1) -> TensorType:
    normalize_axis(axis, x.rank)
    return x


def _softmax_numpy(x: Any, *, axis: int = -1) -> Any:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def _topk(x: TensorType, *, k: Any, axis: int = -1) -> tuple[TensorType, TensorType]:
    shape = [*x.shape]
    shape[normalize_axis(axis, x.rank)] = k
    return TensorType(x.dtype, tuple(shape)), TensorType(i64, tuple(shape))


def _topk_numpy(x: Any, *, k: int, axis: int = -1) -> Any:
    order = np.argsort(-x, axis=axis, kind="stable").take(range(k), axis)
    return np.take_along_axis(x, order, axis), order


def _positive(x: TensorType, *, count: Any) -> TensorType:
    require(x.rank == 1, "positive takes a vector")
    return TensorType(x.dtype, (count,))


def _repeat(x: TensorType, *, body: Any, times: int) -> TensorType:
    require(body.inputs[0].type == x == body.outputs[0].type, "the body must map {} to itself", x)
    return x


def _repeat_numpy(x: Any, *, body: Any, times: int) -> Any:
    for _ in range(times):
        (x,) = body(x)
    return x


def _clip(x: TensorType, lo: TensorType | None = None, hi: TensorType | None = None) -> TensorType:
    return x


def _clip_numpy(x: Any, lo: Any = None, hi: Any = None) -> Any:
    return np.clip(x, lo, hi)


def _note(
    x: TensorType,
    *,
    text: str = "",
    dims: Any = (),
    scale: float = 1.0,
    to: Any = None,
    layout: Any = None,
    flag: bool = False,
) -> TensorType:
    return x


def _bits(x: TensorType) -> TensorType:
    return TensorType(BY_NAME[f"i{x.dtype.bits}"], x.shape)


def _make() -> dict[str, OpDef]:
    ops = [
        OpDef("add", _broadcast, compute=_no_expression, reference=lambda a, b: a + b, traits=ELEMENTWISE),
        OpDef("mul", _broadcast, compute=_no_expression, reference=lambda a, b: a * b, traits=ELEMENTWISE),
        OpDef("exp", _same, compute=_no_expression, reference=np.exp, traits=ELEMENTWISE),
        OpDef("square", _same, decompose=lambda b, x: b.op(found["mul"], x, x)),
        OpDef("softmax", _softmax, compute=_no_expression, reference=_softmax_numpy),
        OpDef("topk", _topk, compute=_no_expression, reference=_topk_numpy),
        OpDef("positive", _positive, compute=_no_expression, reference=lambda x, *, count: x[x > 0]),
        OpDef("repeat", _repeat, host=_repeat_numpy),
        OpDef("clip", _clip, compute=_no_expression, reference=_clip_numpy),
        OpDef("note", _note, compute=_no_expression, reference=lambda x, **attrs: x),
        OpDef(
            "bits",
            _bits,
            compute=_no_expression,
            reference=lambda x: x.view(f"i{x.dtype.itemsize}"),
            traits=frozenset({Trait.BITS}),
        ),
        OpDef(
            "matmul",
            _matmul,
            compute=_no_expression,
            reference=lambda a, b: a @ b,
            reference_at=lambda xs, p: np.einsum("nk,nk->n", xs[0][p[:, 0]], xs[1][:, p[:, 1]].T),
        ),
    ]
    found = {op.name: op for op in ops}
    return found


@pytest.fixture(scope="session")
def ops() -> dict[str, OpDef]:
    """add mul exp square softmax topk positive repeat clip note bits matmul"""
    return _make()
