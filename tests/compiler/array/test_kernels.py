"""User-defined kernels: C's operators, binding of types and arguments, reductions, errors with a place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from array_samples import check, sample

import dnnc
import dnnc.array as xp
from dnnc.array.core import Array
from dnnc.array.lazy import PROGRAMS_MADE, placeholder
from dnnc.array.structure import graph_of
from dnnc.ir.dtype import f32
from dnnc.ir.errors import DnncError, InputError, ParseError, UnsupportedError
from dnnc.ir.types import TensorType
from support.devices import compile_interpreted

F32 = np.float32


def one(expression: str, inputs: str, result: str, *args: Any) -> Any:
    """What an expression gives."""
    return dnnc.elementwise_kernel(inputs, f"{result} z", f"z = {expression}")(*args)


# --- operators and types ----------------------------------------------------------------------------------------------


def test_operators_have_the_precedence_of_c() -> None:
    x, y, q = sample("float32", seed=1), sample("float32", seed=2), sample("int32", seed=3)
    d = x - y
    check(one("(x - y) * (x - y)", "T x, T y", "T", x, y), d * d)
    check(one("x - y * x / 2 - -y", "T x, T y", "T", x, y), x - y * x / F32(2) + y)
    check(
        one("x < y == y > x && !(x == 0) || q > 3", "T x, T y, int32 q", "bool", x, y, q),
        ((x < y) == (y > x)) & (x != 0) | (q > 3),
    )
    check(
        one("x > 0 ? y > 0 ? 1 : 2 : x < -1 ? 3 : 4", "T x, T y", "int8", x, y),
        np.where(x > 0, np.where(y > 0, 1, 2), np.where(x < -1, 3, 4)).astype("int8"),
    )
    check(one("q & 6 | q << 2 ^ ~q >> 1", "int32 q", "int32", q), q & 6 | q << 2 ^ ~q >> 1)


def test_integers_divide_as_in_c() -> None:
    a, b = np.array([7, -7, 7, -7, 6], np.int32), np.array([2, 2, -2, -2, 3], np.int32)
    check(one("a / b", "T a, T b", "T", a, b), np.array([3, -3, -3, 3, 2], np.int32))
    check(one("a % b", "T a, T b", "T", a, b), np.array([1, -1, 1, -1, 0], np.int32))
    check(one("7 / 2 * 1.0", "T a", "float64", a), np.full(5, 3.0))


@pytest.mark.parametrize(
    ("types", "expression", "args", "result", "expected"),
    [
        (
            "int8 a, int8 b",
            "a * b",
            (np.int8([100]), np.int8([100])),
            "int32",
            10000,
        ),  # narrow integers are computed as int
        ("int32 a, uint32 b", "a < b", (np.int32([-1]), np.uint32([1])), "bool", False),  # unsigned wins
        ("int64 a, uint32 b", "a < b", (np.int64([-1]), np.uint32([1])), "bool", True),  # unless the other one is wider
        (
            "int64 a, float32 b",
            "a + b",
            (np.int64([1 << 24]), F32([1.0])),
            "float64",
            float(1 << 24),
        ),  # float wins over all integers
        ("float32 a, float64 b", "a * b", (F32([3]), np.float64([0.1])), "float64", 3 * 0.1),
        (
            "float32 a, float32 b",
            "a * 0.1 + b",
            (F32([3]), F32([0])),
            "float64",
            float(F32(3) * F32(0.1)),
        ),  # literals do not widen
        ("float32 a, float32 b", "a * (double)0.1 + b", (F32([3]), F32([0])), "float64", 3 * 0.1),
        ("int32 a, int32 b", "a * 0.5 + b", (np.int32([3]), np.int32([1])), "float64", 2.5),
        ("float32 a, float32 b", "(int)a + static_cast<int>(b) + int(2.9f)", (F32([-1.9]), F32([1.9])), "int32", 2),
        ("float32 a, float32 b", "(unsigned char)-1 + (unsigned int)0 + (bool)a", (F32([0.5]), F32([0])), "int64", 256),
        ("bool a, bool b", "a + b", (np.array([True]), np.array([True])), "int32", 2),
        (
            "int32 a, int32 b",
            "-(uint16)1 + 0x10 + 5 / 0.5 * 1e-1f + a * b",
            (np.int32([0]), np.int32([0])),
            "float32",
            16.0,
        ),
        ("int32 a, int32 b", "a << b", (np.int32([1]), np.int32([31])), "int64", -(1 << 31)),
        ("uint8 a, int32 b", "-a + b", (np.uint8([3]), np.int32([1])), "int32", -2),
    ],
)
def test_types_follow_c(types: str, expression: str, args: tuple[Any, ...], result: str, expected: Any) -> None:
    check(one(expression, types, result, *args), np.array([expected], result))


@pytest.mark.slow
def test_functions() -> None:
    x, y = sample("float64", low=0.2, high=0.9, seed=4), sample("float64", seed=5)
    names = (
        "exp exp2 expm1 log log2 log10 log1p sqrt sin cos tan sinh cosh tanh floor ceil trunc rint isnan isinf "
        "isfinite signbit fabs abs"
    ).split()
    names += ["asin", "acos", "atan", "asinh", "atanh"]
    fields = "; ".join(f"z{k} = {n}(x)" for k, n in enumerate(names))
    kinds = ["bool" if n in ("isnan", "isinf", "isfinite", "signbit") else "T" for n in names]
    got = dnnc.elementwise_kernel("T x", ", ".join(f"{t} z{k}" for k, t in enumerate(kinds)), fields)(x)
    xp.evaluate(*got)
    for n, g in zip(names, got):
        check(
            g, getattr(np, n.replace("asin", "arcsin").replace("acos", "arccos").replace("atan", "arctan"))(x), ulps=64
        )
    pairs = {
        "min": "minimum",
        "max": "maximum",
        "pow": "power",
        "fmod": "fmod",
        "atan2": "arctan2",
        "hypot": "hypot",
        "copysign": "copysign",
    }
    text = "; ".join(f"z{k} = {n}(x, y)" for k, n in enumerate(pairs))
    for g, n in zip(
        dnnc.elementwise_kernel("T x, T y", ", ".join(f"T z{k}" for k in range(7)), text)(x, y), pairs.values()
    ):
        check(g, getattr(np, n)(x, y), ulps=64)
    check(one("fma(x, y, 2.0) + rsqrt(x) + pow(y, 2)", "T x, T y", "T", x, y), x * y + 2 + 1 / np.sqrt(x) + y * y)


def test_functions_where_c_differs() -> None:
    halves = np.array([-2.5, -0.5, 0.49999997, 0.5, 1.5, 2.5, np.inf, -1.2], F32)
    check(one("round(x)", "T x", "T", halves), np.array([-3, -1, 0, 1, 2, 3, np.inf, -1], F32))
    a, b = np.array([np.nan, 1, 2], F32), np.array([3, np.nan, 1], F32)
    check(one("fmin(a, b)", "T a, T b", "T", a, b), np.fmin(a, b))
    check(one("max(a, b)", "T a, T b", "T", a, b), np.maximum(a, b))
    check(one("sqrt(q)", "int32 q", "float64", np.int32([2])), np.sqrt([2.0]))
    check(one("expf(x)", "T x", "float64", F32([1])), np.exp(F32([1])).astype("float64"), ulps=1e9)
    check(one("x > 0 ? INFINITY : (float)M_PI", "T x", "T", halves), np.where(halves > 0, np.inf, np.pi).astype(F32))


# --- statements and arguments -----------------------------------------------------------------------------------------


def test_local_variables_and_several_outputs() -> None:
    k = dnnc.elementwise_kernel(
        "T x, float32 y", "T low, float64 high, bool less",
        """
        const T d = x - y, s = x + y;  // two of one type
        auto h = 0.5; int whole;
        whole = d; h *= s;
        low = whole < 0 ? -whole : whole; /* of T */
        high = h; high += 1;
        less = d < 0
        """,
        "parts",
    )  # fmt: skip
    x, y = sample("float32", seed=6), sample("float32", (5,), seed=7)
    low, high, less = k(xp.asarray(x), xp.asarray(y))
    check(low, np.abs((x - y).astype(np.int32)).astype(F32))
    check(high, (F32(0.5) * (x + y)).astype(np.float64) + 1)
    check(less, x - y < 0)


def test_arguments_broadcast_and_numbers_take_the_type_of_arrays() -> None:
    k = dnnc.elementwise_kernel("T x, T y", "T z", "z = x")
    x = sample("float32", (3, 1))
    assert k(x, np.ones((4,), F32)).shape == (3, 4)
    check(k(x, np.ones((4,), F32)), np.broadcast_to(x, (3, 4)))
    check(k(x, 2), x)
    assert k(1, 2).dtype == np.int64 and k(1, 2.5).dtype == np.float64 and k(1, 2.5).shape == ()
    check(one("1.5", "T x", "T", x), np.full((3, 1), 1.5, F32))
    for args in ((x, x.astype(float)), (np.int32([1]), 2.5), (x,), (x, "2"), (x * 1j, x * 1j), (x, 2j)):
        with pytest.raises(InputError, match="kernel 'kernel'"):
            k(*args)
    with pytest.raises(InputError, match="array of float64, expected float32"):
        one("x", "float32 x", "float32", np.ones(2))


def test_kernels_fuse_with_what_stands_around_them() -> None:
    x = xp.asarray(sample("float32", (6, 7), seed=8))
    k = dnnc.elementwise_kernel("T x, T y", "T z", "z = (x - y) * (x - y) * (1.0 / 3)")
    before = PROGRAMS_MADE.compiled
    y = xp.exp(k(x * 2, 1.5)) + 1
    assert PROGRAMS_MADE.compiled == before
    a = np.asarray(x)
    d = a * F32(2) - F32(1.5)
    check(y, np.exp(d * d * F32(1 / 3)) + F32(1), ulps=64)
    np.asarray(xp.exp(k(x * 3, 2.5)) + 1)
    assert PROGRAMS_MADE.compiled == before + 1  # one program, whatever the numbers
    assert len(PROGRAMS_MADE.last.notes) == 1  # of one kernel


def test_graphs_of_kernels_are_of_known_ops() -> None:
    x = xp.asarray(sample("float32", (4, 3)))
    y = dnnc.reduction_kernel("T x", "T y", "x * x", "a + b", "y = sqrt(a)", "0")(x, axis=1)
    graph, _ = graph_of(y._parts)
    assert [n.op.name for n in graph.nodes()] == ["mul", "reduce_sum", "sqrt"]


def test_kernels_run_on_both_targets() -> None:
    x = sample("float32", (3, 20), seed=11)
    p = placeholder(TensorType(f32, x.shape))
    half = dnnc.elementwise_kernel("T x, T y", "T z", "T d = x - y; z = d > 0 ? d * d * 0.5 : exp(d)")
    norm = dnnc.reduction_kernel("T x", "T y", "x * x", "a + b", "y = sqrt(a)", "0")
    array = Array((p,), np.dtype(F32))
    graph, _ = graph_of(norm(half(array, array + array), axis=1)._parts, [p])
    expected = np.sqrt((np.where(-x > 0, x * x * F32(0.5), np.exp(-x)) ** 2).sum(1))
    gpu = compile_interpreted(graph, (["x"], ["y"]))
    assert gpu.source("cuda").count("__global__") == 1
    for f in (dnnc.compile(graph, target="llvm"), gpu):
        np.testing.assert_allclose(f(x), expected, rtol=2e-6)


# --- reductions -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_reductions() -> None:
    x, y = sample("float32", (3, 4, 5), seed=9), sample("float32", (5,), seed=10)
    norm = dnnc.reduction_kernel("T x, T y", "T z", "x * y", "a + b", "z = sqrt(abs(a))", "0", "norm")
    check(norm(x, y, axis=1), np.sqrt(np.abs((x * y).sum(1))), ulps=64)
    check(norm(x, y), np.sqrt(np.abs((x * y).sum(dtype=np.float64))).astype(F32), ulps=256)
    check(norm(x, y, axis=(0, -1), keepdims=True), np.sqrt(np.abs((x * y).sum((0, 2), keepdims=True))), ulps=64)
    check(norm(x, y, axis=()), np.sqrt(np.abs(x * y)))
    for text, function in (("a * b", np.prod), ("b + a", np.sum), ("min(a, b)", np.min), ("max(a, b)", np.max)):
        check(dnnc.reduction_kernel("T x", "T z", "x", text, "z = a", None)(x, axis=2), function(x, axis=2), ulps=64)
    both = dnnc.reduction_kernel("T x", "T z, bool big", "2", "a + b", "z = a; big = a > 7", 0)(x, axis=1)
    check(both[0], np.full((3, 5), 8, F32))
    check(both[1], np.ones((3, 5), bool))


@pytest.mark.slow
def test_types_of_reductions() -> None:
    q = np.array([[100, 100, 3], [1, -1, 0]], np.int8)
    wraps = dnnc.reduction_kernel("T x", "T z", "x", "a + b", "z = a", "0")
    check(wraps(q, axis=1), np.array([203 - 256, 0], np.int8))
    wide = dnnc.reduction_kernel("T x", "T z", "x", "a + b", "z = a / 2", "0", reduce_type="int")
    check(wide(q, axis=1), np.array([101, 0], np.int8))
    for text, function in (("a && b", np.all), ("a || b", np.any), ("a + b", np.any), ("min(a, b)", np.all)):
        check(dnnc.reduction_kernel("T x", "bool z", "x > 0", text, "z = a")(q, axis=1), function(q > 0, axis=1))
    check(
        dnnc.reduction_kernel("T x", "int32 z", "x", "a || b", "z = a", "0")(q, axis=0), np.array([1, 1, 1], np.int32)
    )


def test_identities() -> None:
    x = sample("float32", (2, 3), low=-3, high=-1)
    empty = np.zeros((2, 0), F32)
    for text, identity, expected in (
        ("a + b", "0", 0),
        ("a * b", "1", 1),
        ("max(a, b)", "-INFINITY", -np.inf),
        ("min(a, b)", "(float)1e30", 1e30),
    ):
        check(
            dnnc.reduction_kernel("T x", "T z", "x", text, "z = a", identity)(empty, axis=1), np.full(2, expected, F32)
        )
    check(dnnc.reduction_kernel("T x", "T z", "x", "max(a, b)", "z = a", "0")(x, axis=1), np.zeros(2, F32))
    check(dnnc.reduction_kernel("T x", "T z", "x", "max(a, b)", "z = a", "-INFINITY")(x, axis=1), x.max(1))
    check(
        dnnc.reduction_kernel("T x", "T z", "x", "min(a, b)", "z = a", "INFINITY")(np.zeros((1, 0), np.int8), axis=1),
        np.int8([127]),
    )
    with pytest.raises(InputError, match="no elements along axis"):
        dnnc.reduction_kernel("T x", "T z", "x", "max(a, b)", "z = a", None)(empty, axis=1)
    with pytest.raises(InputError, match="the identity of 'a \\+ b' is 0, got 1"):
        dnnc.reduction_kernel("T x", "T z", "x", "a + b", "z = a", "1")


# --- errors -----------------------------------------------------------------------------------------------------------


def place(error: DnncError) -> str:
    """What stands above the caret."""
    *_, line, caret = str(error).split("\n")
    return line[caret.index("^") :]


@pytest.mark.parametrize(
    ("text", "at", "kind", "message"),
    [
        ("z = x +", "", ParseError, "expected a value, but the text ends"),
        ("z = x $ 1", "$ 1", ParseError, "no part of the notation"),
        ("z = x y", "y", ParseError, "expected ';', got 'y'"),
        ("z = (x", "", ParseError, r"expected '\)'"),
        ("z = x;\nz = w + 1", "w + 1", ParseError, "line 2, column 5: there is no 'w' here; there are x, y, z"),
        ("y = x", "y = x", ParseError, "'y' is an input"),
        ("z += x", "z += x", ParseError, "'z' has no value yet"),
        ("T t; z = t", "t", ParseError, "'t' has no value yet"),
        ("T x = y; z = x", "x = y; z = x", ParseError, "'x' is taken"),
        ("T t = x", "", ParseError, "nothing is assigned to the output 'z'"),
        ("z = pow(x)", "pow(x)", ParseError, "expects 2 operands, got 1"),
        ("z = 99999999999999999999", "99999999999999999999", ParseError, "64 bits"),
        ("z = 012", "012", ParseError, "no integer"),
        ("auto t; z = x", "; z = x", ParseError, "auto"),
        ("z = gamma(x)", "gamma(x)", UnsupportedError, "no function 'gamma'; there are abs"),
        ("z = x[i]", "[i]", UnsupportedError, "cannot be indexed"),
        ("z = i", "i", UnsupportedError, "at which index"),
        ("z = _ind.size()", "_ind.size()", UnsupportedError, "at which index"),
        ("z = x.real()", ".real()", UnsupportedError, "no members"),
        ("for (int k = 0; k < 3; k += 1) z = x", "for (int k = 0; k < 3; k += 1) z = x", UnsupportedError, "no loops"),
        ("if (x > 0) z = x", "if (x > 0) z = x", UnsupportedError, "use c \\? x : y"),
        ("T *p = x", "*p = x", UnsupportedError, "no pointers"),
        ("z = *(float*)x", "*(float*)x", UnsupportedError, "no pointers"),
        ("z = x; z++", "++", UnsupportedError, "use \\+= 1"),
        ("{ z = x; }", "{ z = x; }", UnsupportedError, "blocks"),
    ],
)
def test_errors_show_the_place(text: str, at: str, kind: type[DnncError], message: str) -> None:
    with pytest.raises(kind, match=message) as e:
        dnnc.elementwise_kernel("T x, T y", "T z", text, "mine")
    assert place(e.value) == at
    assert "kernel 'mine'" in str(e.value)


@pytest.mark.parametrize(
    ("inputs", "outputs", "kind", "message"),
    [
        ("raw T x", "T z", UnsupportedError, "raw parameters"),
        ("T *x", "T z", UnsupportedError, "pointers"),
        ("complex64 x", "float32 z", UnsupportedError, "complex numbers"),
        ("float x", "float32 z", ParseError, "C's float is float32"),
        ("T x,", "T z", ParseError, "expected a type and a name"),
        ("T x, T x", "T z", ParseError, "'x' is given twice"),
        ("T i", "T z", ParseError, "cannot be called 'i'"),
        ("", "T z", ParseError, "at least one parameter"),
        ("T x", "U z", ParseError, "no input tells what U is"),
    ],
)
def test_errors_of_parameters(inputs: str, outputs: str, kind: type[DnncError], message: str) -> None:
    with pytest.raises(kind, match=message):
        dnnc.elementwise_kernel(inputs, outputs, "z = x")


def test_errors_of_reductions() -> None:
    make = dnnc.reduction_kernel
    with pytest.raises(UnsupportedError, match="combined by"):
        make("T x", "T z", "x", "a - b", "z = a")
    with pytest.raises(UnsupportedError, match="combined by"):
        make("T x", "T z", "x", "a + a", "z = a")
    with pytest.raises(ParseError, match="one expression"):
        make("T x", "T z", "x = 3", "a + b", "z = a")
    with pytest.raises(ParseError, match="no 'x' here; there are a, z"):
        make("T x", "T z", "x", "a + b", "z = a * x")
    with pytest.raises(ParseError, match="expected a number"):
        make("T x", "T z", "x", "a + b", "z = a", "1 - 1")
    with pytest.raises(InputError, match="axis"):
        make("T x", "T z", "x", "a + b", "z = a")(np.ones(3), axis=1)


def test_operators_that_do_not_take_a_type_show_the_place() -> None:
    k = dnnc.elementwise_kernel("T x", "T z", "z = 1 + x % 2")
    check(k(np.int32([3])), np.int32([2]))
    with pytest.raises(ParseError, match="fmod") as e:
        k(F32([3]))
    assert place(e.value) == "% 2"
