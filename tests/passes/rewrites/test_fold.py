"""fold: constants are computed in the model's own dtype, within limits."""

from __future__ import annotations

import numpy as np

from dnnc.ir.graph.text import parse
from dnnc.ir.op import OpDef, Trait
from dnnc.ir.ops import OPS
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.fold import fold
from support.passes import check_no_match, check_pass


def test_chain_of_constants() -> None:
    check_pass(
        fold,
        """
def f(x: f32[3, 2], *, w: f32[2, 3] = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], s: i64[2] = [2, 3]):
    a = transpose(w, perm=(1, 0))
    b = mul(s, add(s, s))
    i = iota(shape=(2,))
    y = add(x, a)
    return y, b, i
""",
        """
def f(x: f32[3, 2], *, a: f32[3, 2] = [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]], b: i64[2] = [8, 18], i: i64[2] = [0, 1]):
    y = add(x, a)
    return y, b, i
""",
        exact=True,
    )


def test_values_are_rounded_as_in_the_model() -> None:
    g = parse(
        "def f(*, a: f32 = 16777216.0, b: f32 = 1.0, h: f16 = 2048.0, k: f16 = 1.0):\n    return sub(add(a, b), a), "
        "add(h, k)\n"
    )
    assert fold(g, PassContext()) and len(g) == 0
    first, second = (g.constants[v] for v in g.outputs)
    assert first.dtype == np.float32 and first == 0.0  # 2^24 + 1 is no float32
    assert second.dtype == np.float16 and second == 2048.0


def test_strings_and_integers_wrap() -> None:
    g = parse("def f(*, a: i8 = 127, b: i8 = 1):\n    return add(a, b)\n")
    assert fold(g, PassContext()) and g.constants[g.outputs[0]] == -128


def test_arrays_stay_contiguous() -> None:
    g = parse(
        "def f(*, a: f32[2, 3] = [[1, 2, 3], [4, 5, 6]]):\n    return expand(transpose(a, perm=(1, 0)), shape=(4, 3, "
        "2)), a\n"
    )
    assert fold(g, PassContext())
    assert all(a.flags.c_contiguous and not a.flags.writeable for a in g.constants.values())


def test_names_and_locations_are_kept() -> None:
    g = parse(
        "def f(x: f32[2], *, a: f32[2] = [1, 2]):\n    total = add(a, a)\n    y = add(x, total)\n    return y, total\n"
    )
    assert fold(g, PassContext())
    assert [v.name for v in g.outputs] == ["y", "total"] and [v.name for v in g.constants] == ["total"]


def test_large_results_stay_unless_they_shrink() -> None:
    text = "def f(*, a: f32[8, 8]):\n    return expand(a, shape=(100, 8, 8))\n"
    data = {"a": np.ones((8, 8), np.float32)}
    check_no_match(fold, text, "the value has 25600 bytes, the limit is 1000", data, PassContext(fold_limit=1000))
    g = parse("def f(*, a: f32[8, 8]):\n    return reduce_sum(a, axes=(0,))\n", data)
    assert fold(g, PassContext(fold_limit=16))


def test_what_is_not_known_stays() -> None:
    check_no_match(fold, "def f(x: f32[2], *, c: f32 = 1.0):\n    return add(x, c)\n", "x is not a constant")
    check_no_match(fold, "def f(x: f32[N]):\n    return full(shape=(N,)), x\n", "a size is not known")
    check_no_match(
        fold,
        "def f(x: f32[N], *, c: f32[5] = [1, 2, 3, 4, 5]):\n    return slice(c, starts=(N - 1,), steps=(1,), "
        "shape=(1,)), x\n",
        "a size is not known",
    )


def test_random_ops_stay() -> None:
    ops = {**OPS, "noise": OpDef("noise", lambda x: x, host=lambda x: x, traits=frozenset((Trait.PURE, Trait.RANDOM)))}
    g = parse("def f(*, c: f32[2] = [1.0, 2.0]):\n    return noise(c)\n", ops=ops)
    assert fold(g, PassContext()) is False
