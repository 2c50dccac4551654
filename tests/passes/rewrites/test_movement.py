"""Rules on ops that move elements: each fires on its pattern, is exact, and says why where it does not."""

from __future__ import annotations

import pytest

from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.canonicalize import canonicalize
from dnnc.passes.rewrites.movement import BROADCASTING
from support.passes import check_no_match, check_pass

STRICT = PassContext(numerics="strict")

FIRES = {
    "drop_copy": [
        ("x: f32[2, 3]", "exp(identity(x))", "exp(x)"),
        ("x: f32[2, 3]", "exp(reshape(x, shape=(2, 3)))", "exp(x)"),
        ("x: f32[2, 3]", "exp(expand(x, shape=(1, 3)))", "exp(x)"),
        ("x: f32[2, 3]", "exp(tile(x, repeats=(1, 1)))", "exp(x)"),
        ("x: f32[2, 3]", "exp(cast(x, to=f32))", "exp(x)"),
        ("x: f32[2, 3]", "exp(concat(x, axis=0))", "exp(x)"),
        ("x: f32[2, 3]", "exp(transpose(x, perm=(0, 1)))", "exp(x)"),
        ("x: f32[2, 1]", "exp(slice(x, starts=(0, 0), steps=(1, -1), shape=(2, 1)))", "exp(x)"),
        ("x: f32[2, 3]", "exp(pad(x, pads=(0, 0, 0, 0)))", "exp(x)"),
        ("x: f32[2, 3]", "exp(clip(x))", "exp(x)"),
        ("x: f32[N, 3]", "exp(reshape(x, shape=(N, 3)))", "exp(x)"),
    ],
    "merge_reshapes": [
        ("x: f32[2, 6]", "reshape(reshape(x, shape=(3, 4)), shape=(12,))", "reshape(x, shape=(12,))"),
        ("x: f32[N, 6]", "reshape(reshape(x, shape=(N, 2, 3)), shape=(2*N, 3))", "reshape(x, shape=(2*N, 3))"),
        ("x: f32[2, 6]", "exp(reshape(reshape(x, shape=(12,)), shape=(2, 6)))", "exp(x)"),
    ],
    "plain_shape": [("x: f32[2, 6]", "reshape(x, shape=(3, -1))", "reshape(x, shape=(3, 4))")],
    "hoist_units": [
        (
            "x: i32[7, 1], y: i32[1, 9]",
            "cast(reshape(equal(x, y), shape=(7, 1, 9)), to=f32)",
            "cast(equal(reshape(x, shape=(7, 1, 1)), reshape(y, shape=(1, 1, 9))), to=f32)",
        ),
        (
            "x: f32[7, 1], y: f32[9]",
            "reshape(mul(add(x, y), x), shape=(1, 7, 9, 1))",
            "mul(add(reshape(x, shape=(1, 7, 1, 1)), reshape(y, shape=(1, 1, 9, 1))), reshape(x, shape=(1, 7, 1, 1)))",
        ),
    ],
    "merge_transposes": [
        ("x: f32[2, 3, 4]", "transpose(transpose(x, perm=(2, 0, 1)), perm=(2, 0, 1))", "transpose(x, perm=(1, 2, 0))"),
        ("x: f32[2, 3]", "exp(transpose(transpose(x, perm=(1, 0)), perm=(1, 0)))", "exp(x)"),
    ],
    "cancel_transposes": [
        (
            "x: f32[2, 3, 4]",
            "transpose(mul(exp(transpose(x, perm=(0, 2, 1))), 2.0), perm=(0, 2, 1))",
            "mul(exp(x), 2.0)",
        ),
        (
            "x: f32[2, 3, 4], *, s: f32[3] = [1, 2, 3]",
            "transpose(sub(s, transpose(x, perm=(0, 2, 1))), perm=(0, 2, 1))",
            "sub(reshape(s, shape=(1, 3, 1)), x)",
        ),
    ],
    "transpose_to_reshape": [
        ("x: f32[1, 4, 1, 5]", "transpose(x, perm=(1, 0, 3, 2))", "reshape(x, shape=(4, 1, 5, 1))"),
        ("x: f32[1, N]", "transpose(x, perm=(1, 0))", "reshape(x, shape=(N, 1))"),
    ],
    "transpose_of_product": [
        (
            "x: f32[5, 3], y: f32[5, 4]",
            "transpose(matmul(transpose(x, perm=(1, 0)), y), perm=(1, 0))",
            "matmul(transpose(y, perm=(1, 0)), x)",
        ),
        (
            "x: f32[2, 5, 3], y: f32[5, N]",
            "transpose(matmul(transpose(x, perm=(0, 2, 1)), y), perm=(0, 2, 1))",
            "matmul(transpose(y, perm=(1, 0)), x)",
        ),
    ],
    "merge_expands": [
        ("x: f32[1, 3]", "expand(expand(x, shape=(2, 3)), shape=(4, 2, 3))", "expand(x, shape=(4, 2, 3))")
    ],
    "merge_slices": [
        (
            "x: f32[9, 4]",
            "slice(slice(x, starts=(1, 0), steps=(2, 1), shape=(4, 4)), starts=(3, 1), steps=(-1, 2), shape=(3, 2))",
            "slice(x, starts=(7, 1), steps=(-2, 2), shape=(3, 2))",
        )
    ],
    "drop_expand": [
        ("x: f32[3], y: f32[2, 3]", "add(y, expand(x, shape=(2, 3)))", "add(y, x)"),
        ("x: bool[1, 3], y: f32[2, 3], z: f32", "where(expand(x, shape=(2, 3)), y, z)", "where(x, y, z)"),
        ("x: f32[1, 2, 3], y: f32[4, 3, 5]", "matmul(expand(x, shape=(4, 2, 3)), y)", "matmul(x, y)"),
    ],
    "sink_expand": [
        (
            "c: bool[1, 3], *, a: f32 = 0, b: f32 = 1",
            "where(expand(c, shape=(2, 3)), a, b)",
            "expand(where(c, a, b), shape=(2, 3))",
        ),
        ("x: f32[3], y: f32[1, 3]", "add(y, expand(x, shape=(2, 3)))", "expand(add(y, x), shape=(2, 3))"),
        ("x: f32[3]", "cast(expand(x, shape=(2, 3)), to=i32)", "expand(cast(x, to=i32), shape=(2, 3))"),
    ],
    "drop_empty": [("x: f32[2, 3], y: f32[0, 3]", "concat(y, x, exp(x), axis=0)", "concat(x, exp(x), axis=0)")],
    "flatten_concat": [
        ("x: f32[2], y: f32[3], z: f32[1]", "concat(z, concat(x, y, axis=-1), axis=0)", "concat(z, x, y, axis=0)")
    ],
    "gather_to_slice": [
        (
            "x: f32[2, 5], *, i: i64[2, 3] = [[0, 1, 2], [2, 3, 4]]",
            "gather(x, i, axis=1)",
            "unfold(x, axis=1, start=0, steps=(2, 1), shape=(2, 3))",
        ),
        (
            "x: f32[2, 5, 3], *, i: i64 = -1",
            "gather(x, i, axis=1)",
            "reshape(slice(x, starts=(0, 4, 0), steps=(1, 1, 1), shape=(2, 1, 3)), shape=(2, 3))",
        ),
        (
            "x: f32[2, 5], *, i: i64[3] = [4, 2, 0]",
            "gather(x, i, axis=-1)",
            "slice(x, starts=(0, 4), steps=(1, -2), shape=(2, 3))",
        ),
    ],
    "gather_of_one_index": [
        ("x: f32[30, 3], i: i64[2, 4, 1]", "gather_nd(x, i)", "gather(x, reshape(i, shape=(2, 4)), axis=0)"),
    ],
    "reduce_of_units": [
        ("x: f32[5, 1, 2]", "reduce_prod(x, axes=(1,))", "reshape(x, shape=(5, 2))"),
        ("x: f32[5, 2]", "exp(reduce_max(x, axes=()))", "exp(x)"),
    ],
    "pad_into_conv": [
        (
            "x: f32[1, 2, 4, 5], w: f32[3, 2, 3, 3]",
            "conv(pad(x, pads=(0, 0, 1, 0, 0, 0, 2, 1)), w, pads=(0, 1, 1, 0), strides=(2, 1))",
            "conv(x, w, pads=(1, 1, 3, 1), strides=(2, 1))",
        )
    ],
}


@pytest.mark.parametrize(
    ("rule", "parameters", "before", "after"), [(rule, *case) for rule, cases in FIRES.items() for case in cases]
)
def test_rule_fires_exactly(rule: str, parameters: str, before: str, after: str) -> None:
    kept = parameters if "*, i: i64" not in parameters else parameters.split(", *,")[0]  # the indices are gone
    exact = rule != "pad_into_conv" and "matmul" not in before  # sums of more terms, or of zeros times infinities
    check_pass(
        canonicalize,
        f"def f({parameters}):\n    return {before}\n",
        f"def f({kept}):\n    return {after}\n",
        ctx=STRICT,
        exact=exact,
    )


def test_sums_of_one_term_are_left_alone_in_strict_numerics() -> None:
    text = "def f(x: f32[5, 1, 2]):\n    return reduce_mean(x, axes=(1,))\n"
    check_pass(canonicalize, text, "def f(x: f32[5, 1, 2]):\n    return reshape(x, shape=(5, 2))\n")
    check_no_match(canonicalize, text, "sum_of_units at v0: it changes how results are rounded", ctx=STRICT)


STAYS = [
    ("x: f32[2, 3]", "transpose(x, perm=(1, 0))", "axes (1, 0) with more than one element change places"),
    (
        "x: f32[2, 3], y: f32[3, 2]",
        "transpose(mul(transpose(x, perm=(1, 0)), y), perm=(1, 0))",
        "is not made by an element-wise node of constants",
    ),
    (
        "x: f32[2, 3, 4]",
        "transpose(exp(transpose(x, perm=(1, 2, 0))), perm=(1, 2, 0))",
        "the transposes do not cancel each other",
    ),
    ("x: f32[2, 2]", "slice(x, starts=(1, 0), steps=(-1, 1), shape=(2, 2))", "slice moves elements"),
    ("x: f32[2, 2]", "pad(x, pads=(1, 0, -1, 0))", "pad moves elements"),
    ("x: f32[4]", "reshape(exp(x), shape=(2, 2))", "is not made by reshape"),
    ("x: f32[3], y: f32[1, 3]", "exp(add(y, x))", "no operand is an expand that the others make superfluous"),
    ("x: f32[2]", "concat(concat(x, x, axis=0), x, axis=0), concat(x, x, axis=0)", ""),
    ("x: f32[4], *, i: i64[3] = [0, 1, 3]", "gather(x, i)", "the indices do not stand at equal steps"),
    ("x: f32[4], *, i: i64[2] = [1, 1]", "gather(x, i)", "the indices do not stand at equal steps"),
    ("x: f32[4], *, i: i64 = 4", "gather(x, i)", "an index is outside the 4 elements of axis 0"),
    ("x: f32[N], *, i: i64 = 0", "gather(x, i)", "axis 0 has the symbolic size N"),
    ("x: f32[4], i: i64", "gather(x, i)", "i is not a constant"),
    ("x: f32[5, 3], i: i64[4, 2]", "gather_nd(x, i)", "i holds more than one index for each element"),
    ("x: f32[4, 3], i: i64[4, 1]", "gather_nd(x, i, batch_dims=1)", "i holds more than one index for each element"),
    ("x: f32[5, 2]", "reduce_sum(x, axes=(1,))", "the reduced axes (1,) have more than one element"),
    (
        "x: f32[1, 2, 4], w: f32[3, 2, 3]",
        'conv(pad(x, pads=(0, 0, 1, 0, 0, 1), mode="edge"), w)',
        "the pad mode is edge",
    ),
    (
        "x: f32[1, 2, 4], w: f32[3, 2, 3], *, v: f32 = 1.0",
        "conv(pad(x, v, pads=(0, 0, 1, 0, 0, 1)), w)",
        "the padding is not 0",
    ),
    (
        "x: f32[1, 1, 4], w: f32[3, 2, 3]",
        "conv(pad(x, pads=(0, 1, 0, 0, 0, 0)), w)",
        "it pads the batch or the channels",
    ),
    (
        "x: f32[1, 2, 5], w: f32[3, 2, 3]",
        "conv(pad(x, pads=(0, 0, -1, 0, 0, 0)), w)",
        "a size of the padding is negative",
    ),
]


@pytest.mark.parametrize(("parameters", "body", "reason"), [s for s in STAYS if s[2]])
def test_rule_says_why_it_does_not_fire(parameters: str, body: str, reason: str) -> None:
    check_no_match(canonicalize, f"def f({parameters}):\n    return {body}\n", reason)


def test_a_concat_that_others_read_is_not_flattened() -> None:
    text = "def f(x: f32[2], y: f32[3]):\n    c = concat(x, y, axis=0)\n    return concat(c, x, axis=0), c\n"
    check_no_match(canonicalize, text, "no operand is a concat along axis 0 that is read here alone")


def test_ops_that_broadcast() -> None:
    assert {"add", "pow", "where", "prelu", "less", "logical_and"} <= set(BROADCASTING)
    assert not {"exp", "batch_norm", "clip", "concat"} & set(BROADCASTING)
