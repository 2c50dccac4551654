"""Functions whose recordings are kept: the same values and gradients as if they ran, which they do once for a type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dnnc
import dnnc.array as xp
import dnnc.nn.functional as F
from dnnc.array.core import Array, apply_full, fresh, scalar
from dnnc.array.lazy import DEEPEST, apply
from dnnc.array.replay import replayed
from dnnc.ir.dtype import f32
from dnnc.nn.functional.operands import detached


def array(*shape: int, seed: int = 0, grad: bool = False) -> Array:
    x = xp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))
    x.requires_grad = grad
    return x


def counted(fn: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    runs: list[int] = []

    def ran(*args: Any, **kwargs: Any) -> Any:
        runs.append(1)
        return fn(*args, **kwargs)

    return replayed(ran), runs


CALLS: list[tuple[Any, tuple[tuple[int, ...], ...], dict[str, Any]]] = [
    (F.cross_entropy, ((4, 3), (4, 3)), {"label_smoothing": 0.1}),
    (F.layer_norm, ((4, 6),), {"normalized_shape": (6,)}),
    (F.linear, ((4, 3), (5, 3), (5,)), {}),
    (F.conv2d, ((2, 3, 6, 6), (4, 3, 3, 3)), {"padding": 1, "stride": (2, 1)}),
    (F.max_pool2d, ((2, 3, 6, 6),), {"kernel_size": 2}),
    (F.adaptive_avg_pool2d, ((2, 3, 6, 6),), {"output_size": 4}),
    (F.softplus, ((7,),), {"beta": 2.0}),
    (F.kl_div, ((4, 3), (4, 3)), {"reduction": "sum"}),
]


@pytest.mark.parametrize("fn, shapes, options", CALLS, ids=lambda c: getattr(c, "__name__", None))
def test_values_and_gradients_are_those_of_the_function(fn: Any, shapes: Any, options: dict[str, Any]) -> None:
    def values(call: Callable[..., Array]) -> list[Any]:
        out = []
        for seed in (1, 2):  # the second one is replayed
            given = [array(*s, seed=seed + k, grad=True) for k, s in enumerate(shapes)]
            y = call(*(abs(x) + 0.1 for x in given), **options)
            xp.sum(y * y).backward()
            out += [y.numpy(), *(x.grad.numpy() for x in given)]
        return out

    kept, runs = counted(lambda *args, **kwargs: getattr(fn, "__wrapped__", fn)(*args, **kwargs))
    for a, b in zip(values(kept), values(getattr(fn, "__wrapped__", fn))):
        np.testing.assert_array_equal(a, b)
    assert len(runs) == 1


def test_operands_that_are_one_array_are_told_from_two() -> None:
    kept, runs = counted(lambda x, y: xp.sum((x - y) * x))
    x, y = array(5, grad=True), array(5, seed=1)
    assert kept(x, y).numpy() == pytest.approx(float(((x - y) * x).sum()), rel=1e-6)
    assert float(kept(x, x)) == 0 and len(runs) == 2
    z = array(5, seed=2, grad=True)
    kept(z, z).backward()
    np.testing.assert_array_equal(z.grad.numpy(), np.zeros(5))
    assert len(runs) == 2


def test_what_ends_gradients_ends_them_again() -> None:
    kept, _ = counted(lambda x: xp.sum(x * detached(x)))
    kept(array(3))
    x = array(3, grad=True)
    for _ in range(2):
        x.grad = None
        kept(x + 0.0).backward()
        np.testing.assert_array_equal(x.grad.numpy(), x.numpy())


@pytest.mark.parametrize("a, b", [(0.0, -0.0), (1, True), (1, 1.0), ((1,), [1])])
def test_options_that_are_equal_and_differ(a: Any, b: Any) -> None:
    kept, _ = counted(lambda x, option: x + float(xp.copysign(xp.asarray(1.0), xp.asarray(float(np.ravel(option)[0])))))
    x = xp.zeros(2)
    kept(x, a)
    made = kept(x, b)
    assert float(made[0]) == (-1.0 if str(b) == "-0.0" else 1.0)


def test_it_runs_in_traces_and_for_other_types() -> None:
    kept, runs = counted(lambda x: x * 2 + 1)
    for x in (array(3), array(4), array(3).astype("float64"), array(3)):
        np.testing.assert_array_equal(kept(x).numpy(), (x * 2 + 1).numpy())
    assert len(runs) == 3
    f = dnnc.jit(lambda x: kept(x) * 3)
    np.testing.assert_array_equal(f(array(3)).numpy(), ((array(3) * 2 + 1) * 3).numpy())
    assert len(runs) == 4


def test_chains_that_nobody_reads_stay_bounded() -> None:
    kept, runs = counted(lambda x: x + 1)
    x = xp.zeros(2)
    for _ in range(3 * DEEPEST):
        x = kept(x)
    np.testing.assert_array_equal(x.numpy(), np.full(2, 3.0 * DEEPEST))
    assert x._parts[0].depth <= DEEPEST and 1 < len(runs) < 8


def test_a_view_of_an_operand_is_no_number() -> None:
    kept, _ = counted(lambda x: xp.reshape(x, ()) + 1.0)
    for v in (1.0, 2.0):
        assert float(kept(scalar(v, np.dtype(np.float32)))) == v + 1


def test_what_is_made_of_numbers_lives_where_the_operands_do() -> None:
    def fn(x: Array) -> tuple[Array, Array]:
        two = apply_full(x._parts[0], 2.0, x.shape)
        return fresh(apply("neg", two)), fresh(two)

    kept, runs = counted(fn)
    for _ in range(2):
        p = apply("full", shape=(3,), value=1.0, dtype=f32)
        p.device = "cuda:0"
        assert [a.device for a in kept(fresh(p))] == ["cuda:0"] * 2
    assert len(runs) == 1


def test_an_operand_that_is_written_to_is_no_result() -> None:
    kept, runs = counted(lambda x: F.relu(x, inplace=True))
    for _ in range(2):
        x = array(4)
        assert kept(x) is x and float(x.min()) == 0
    assert len(runs) == 2
