"""cse: equal nodes and equal constants become one; near misses stay two."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.ir.graph.text import parse
from dnnc.ir.op import OpDef, Trait
from dnnc.ir.ops import OPS
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.cse import cse
from support.passes import check_pass


def test_chains_merge_from_the_top() -> None:
    check_pass(
        cse,
        """
def f(x: f32[2, 3], y: f32[3]):
    a = transpose(add(x, y), perm=(1, 0))
    b = transpose(add(y, x), perm=(1, 0))
    c = sub(a, b)
    return c
""",
        """
def f(x: f32[2, 3], y: f32[3]):
    v0 = add(x, y)
    a = transpose(v0, perm=(1, 0))
    c = sub(a, a)
    return c
""",
        exact=True,
    )


def test_constants_merge_by_content() -> None:
    check_pass(
        cse,
        """
def f(x: f32[2], *, a: f32[2] = [1.0, 2.0], b: f32[2] = [1.0, 2.0], c: f32[2] = [1.0, -2.0], d: i32[2] = [1, 2]):
    y = mul(add(x, a), add(x, b))
    z = add(y, c)
    return z, d
""",
        """
def f(x: f32[2], *, a: f32[2] = [1.0, 2.0], c: f32[2] = [1.0, -2.0], d: i32[2] = [1, 2]):
    v0 = add(x, a)
    y = mul(v0, v0)
    z = add(y, c)
    return z, d
""",
    )


def test_large_constants_that_look_alike() -> None:
    a = np.arange(4096, dtype=np.float32)
    b = a.copy()
    b[7] += 1  # not among the elements that are compared first
    text = (
        "def f(x: f32[4096], *, a: f32[4096], b: f32[4096], c: f32[4096]):\n"
        "    return add(add(x, a), add(add(x, b), add(x, c)))\n"
    )
    g = parse(text, {"a": a, "b": b, "c": a.copy()})
    assert cse(g, PassContext()) and [v.name for v in g.constants] == ["a", "b"] and len(g) == 4


@pytest.mark.parametrize(
    "text",
    [
        "def f(x: f32[2, 2]):\n    return softmax(x, axis=0), softmax(x, axis=1)\n",
        "def f(x: f32[2]):\n    return sub(x, exp(x)), sub(exp(x), x)\n",
        "def f():\n    return full(shape=(2,), value=0.0), full(shape=(2,), value=-0.0)\n",
        "def f():\n    return full(shape=(2,), value=1), full(shape=(2,), value=1, dtype=i32)\n",
        "def f(x: f32[1], y: f32[1]):\n    return max(x, y), max(y, x)\n",
    ],
)
def test_near_misses(text: str) -> None:
    g = parse(text)
    cse(g, PassContext())
    first, second = g.outputs
    assert first is not second


def test_outputs_that_agree_become_one_value() -> None:
    g = parse("def f(x: f32[2]):\n    a = exp(x)\n    b = exp(x)\n    return a, b\n")
    assert cse(g, PassContext()) and g.outputs[0] is g.outputs[1] and len(g) == 1


@pytest.mark.parametrize("traits", [frozenset(), frozenset((Trait.PURE, Trait.RANDOM))])
def test_random_and_effectful_ops_stay(traits: frozenset[Trait]) -> None:
    ops = {**OPS, "note": OpDef("note", lambda x: x, host=lambda x: x, traits=traits)}
    g = parse("def f(x: f32[2]):\n    return add(note(x), note(x))\n", ops=ops)
    assert cse(g, PassContext()) is False and len(g) == 3
