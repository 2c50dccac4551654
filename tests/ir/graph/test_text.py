"""Graph text: exact round trips, the handwritten forms that are accepted, and errors with their places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dnnc.ir.dtype import BY_NAME, bf16, f32, i64
from dnnc.ir.errors import Loc, ModelError, ParseError
from dnnc.ir.expr import dim, maximum
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.constant_text import load_constants, save_constants
from dnnc.ir.graph.text import parse
from dnnc.ir.graph.verify import verify
from dnnc.ir.op import OpDef
from dnnc.ir.types import Dense, TensorType, parse_layout, tensor

Ops = dict[str, OpDef]


ROUND_TRIPS = [
    "def f(x: f32[2]):\n    return x\n",
    "def f(x: f32[2]):\n    return x, x\n",
    "def f():\n    return\n",
    "def f(*, c: f32 = 1e-05):\n    return c\n",
    "def f(x: f32[N, 2*N + 1, (N + 3) // 4]):\n    y: f32[N, 2*N + 1, (N + 3) // 4] = exp(x)\n    return y\n",
    "N: dim[0]\nM: dim[1, 4*N, 2]\ndef f(x: f32[M, N], y: f32[max(M, N)]):\n    return x, y\n",
    "N: dim[1, None, 8]\ndef f(x: f32[N]):\n    return x\n",
    'def f(x: f32[1, 64] @ "0 1/16 1%16"):\n    y: f32[1, 64] @ "0 1/16 1%16" = exp(x)\n    return y\n',
    "def f(x: f32[2, 5]):\n    (v, i) = topk(x, k=3) @ (f32[2, 3], i64[2, 3])\n    return v, i\n",
    "def f(x: f32[2, 5]):\n    (v, i) = topk(x, k=K) @ (f32[2, K], i64[2, K])\n    return v, i\n",
    "def f(x: f32[2], hi: f32):\n    y: f32[2] = clip(x, None, hi)\n    return y\n",
    'def f(x: f32[2]):\n    y: f32[2] = note(x, text="it\'s\\n", dims=(1, N, (2, -1), ()), scale=-inf, to=bf16, '
    "flag=True)\n    return y\n",
    'def f(x: f32[2]):\n    y: f32[2] = note(x, layout=layout("0/16 0%16"), to=f32[2, 3], dims=(4,))\n    return y\n',
    "def f(*, a: i8[2, 2] = [[1, -128], [127, 0]], b: bool[2] = [True, False], s: str[2] = ['a', 'b c'], z: i64[0, 3] "
    "= []):\n    return a, b, s, z\n",
    "def f(*, a: f64[3] = [0.1, -0.0, 1e-320], b: bf16[2] = [0.1, 3e+38], c: c64[1] = [(1.0, -0.0)], d: f16 = "
    "65500.0):\n    return a, b, c, d\n",
    """\
def f(x: f32[N]):
    def body(h: f32[N], *, one: f32 = 1.0):
        def inner(h: f32[N]):
            e: f32[N] = exp(h)
            return e
        g: f32[N] = repeat(h, body=inner, times=2)
        h2: f32[N] = add(g, one)
        return h2
    y: f32[N] = repeat(x, body=body, times=3)
    return y
""",
]


@pytest.mark.parametrize("text", ROUND_TRIPS)
def test_round_trip(text: str, ops: Ops) -> None:
    g = parse(text, ops=ops)
    verify(g)
    assert str(g) == text
    assert parse(str(g), ops=ops).structural_hash() == g.structural_hash()


def test_handwritten_text_is_completed(ops: Ops) -> None:
    """Nested calls get names, results types, numbers become constants."""
    g = parse(
        "def f(x: f32[N, 3]):\n    v0 = softmax(add(exp(x), 1.0), axis=-1)\n    a, b = topk(v0, k=2)\n    return a, "
        "add(v0, [1, 2, 3])\n",
        ops=ops,
    )
    verify(g)
    assert str(g) == (
        "def f(x: f32[N, 3], *, c: f32 = 1.0, c_0: f32[3] = [1.0, 2.0, 3.0]):\n"
        "    v1: f32[N, 3] = exp(x)\n"
        "    v2: f32[N, 3] = add(v1, c)\n"
        "    v0: f32[N, 3] = softmax(v2)\n"
        "    (a, b) = topk(v0, k=2) @ (f32[N, 2], i64[N, 2])\n"
        "    v3: f32[N, 3] = add(v0, c_0)\n"
        "    return a, v3\n"
    )


def test_long_signatures_are_broken_into_lines(ops: Ops) -> None:
    params = [f"input_{k}: f32[2, 3, 4]" for k in range(8)]
    g = parse(f"def f({', '.join(params)}):\n    return input_0\n", ops=ops)
    assert str(g).splitlines() == ["def f(", *(f"    {p}," for p in params), "):", "    return input_0"]
    assert str(parse(str(g), ops=ops)) == str(g)


def test_locations_are_shown_on_request_only(ops: Ops) -> None:
    g = Graph("f")
    b = Builder(g, locs=(Loc("conv\n1", "Conv", 13), Loc("", file="a.py", line=3)), ops=ops)
    g.outputs = [b.exp(g.add_input("x", tensor(f32, 2)))]
    assert str(g) == "def f(x: f32[2]):\n    v0: f32[2] = exp(x)\n    return v0\n"
    assert (
        g.text(locs=True)
        == "def f(x: f32[2]):\n    v0: f32[2] = exp(x)  # conv 1 (Conv, opset 13); a.py:3\n    return v0\n"
    )
    assert str(parse(g.text(locs=True), ops=ops)) == str(g)


def test_subgraphs_of_one_name_are_told_apart(ops: Ops) -> None:
    g = Graph("f")
    x = g.add_input("x", tensor(f32, 2))
    two = OpDef("two", lambda x, *, a, b: x, host=lambda x, *, a, b: x)
    bodies = [Graph("body"), Graph("body")]
    for body in bodies:
        body.outputs = [body.add_input("h", tensor(f32, 2))]
    g.outputs = [Builder(g, ops=ops).op(two, x, a=bodies[0], b=bodies[1])]
    again = parse(str(g), ops=ops | {"two": two})
    assert "two(x, a=body, b=body_1)" in str(g) and str(again) == str(g)


# --- constants --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in BY_NAME if BY_NAME[n].kind in "fiub"])
def test_inline_constants_keep_every_bit(name: str, ops: Ops) -> None:
    t = BY_NAME[name]
    rng = np.random.default_rng(1)
    for bits in rng.integers(0, 256, (20, 3 * t.bytes), np.uint8):
        a = (bits % 2 == 0) if t.kind == "b" else (bits % 4).astype(t.numpy) if t.bits < 8 else bits.view(t.numpy)
        g = Graph("f")
        g.outputs = [g.constant(a)]
        again = parse(str(g), {g.digest(g.outputs[0]): a}, ops)
        assert next(iter(again.constants.values())).tobytes() == a.tobytes(), str(g)
        assert str(again) == str(g)


def test_a_nan_with_a_payload_is_not_written_as_nan(ops: Ops) -> None:
    g = Graph("f")
    g.outputs = [g.constant(np.array([0x7FC00001], np.uint32).view(np.float32))]
    assert 'const("sha256:' in str(g)


def test_side_file(tmp_path: Path, ops: Ops) -> None:
    g = Graph("f")
    arrays = [
        np.arange(20, dtype=np.float32),
        np.arange(12).astype(bf16.numpy).reshape(3, 4),
        np.array([f"w{i}" for i in range(9)], object),
    ]
    g.outputs = [g.constant(a, f"c{i}") for i, a in enumerate([*arrays, np.float32(1)])]
    body = Graph("body")
    inner = body.constant(np.ones((3, 3), np.int8))
    body.outputs = [body.add_input("h", tensor(f32, 20)), inner]
    keep = OpDef("keep", lambda x, *, body: x, host=lambda x, *, body: x)
    g.outputs.append(Builder(g, ops=ops).op(keep, g.outputs[0], body=body))
    save_constants(g, tmp_path / "g.npz")
    loaded = load_constants(tmp_path / "g.npz")
    assert len(loaded) == 4  # the scalar is in the text
    again = parse(str(g), loaded, {"keep": keep})
    assert str(again) == str(g) and again.structural_hash() == g.structural_hash()
    for a, b in zip(g.constants.values(), again.constants.values(), strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b)


def test_a_side_file_of_somebody_else(tmp_path: Path) -> None:
    """Arrays by name serve; what is no archive, or a damaged one, is an error of the model."""
    w = np.arange(20, dtype=np.float32)
    np.savez(tmp_path / "g.npz", w=w)
    g = parse("def f(*, w: f32[20]):\n    return w\n", load_constants(tmp_path / "g.npz"))
    assert np.array_equal(next(iter(g.constants.values())), w)
    whole = (tmp_path / "g.npz").read_bytes()
    for k, data in enumerate((b"", b"text", whole[:60], whole[:-30], whole[:100] + b"x" * 40 + whole[140:])):
        (tmp_path / f"{k}.npz").write_bytes(data)
        with pytest.raises(ModelError, match=f"{k}.npz holds no constants"):
            load_constants(tmp_path / f"{k}.npz")
    np.save(tmp_path / "one.npy", w)
    with pytest.raises(ModelError):
        load_constants(tmp_path / "one.npy")


def test_constants_by_name_and_by_hash(ops: Ops) -> None:
    w = np.arange(12, dtype=np.float32).reshape(3, 4)
    text = "def f(*, w: f32[3, 4]):\n    return w\n"
    g = parse(text, {"w": w}, ops)
    assert next(iter(g.constants.values())) is not w and np.shares_memory(next(iter(g.constants.values())), w)
    for data in ({"w": w}, {g.digest(g.outputs[0]): w}):
        assert str(parse(str(g), data, ops)) == str(g)
    with pytest.raises(ParseError, match=r"line 1, column 10: the data of constant w .* is not among the 0 arrays"):
        parse(str(g), ops=ops)
    with pytest.raises(ParseError, match="has hash sha256"):
        parse(str(g), {"w": w + 1}, ops)
    with pytest.raises(ParseError, match=r"declared f32\[3, 4\], its data is float64 \[3, 4\]"):
        parse(text, {"w": w.astype(np.float64)}, ops)


# --- errors -----------------------------------------------------------------------------------------------------------

ERRORS = [
    ("def f(x: f32[2]:\n    return x\n", 1, None, "never closed|invalid syntax|must be"),
    ("", 1, 1, "expected dim declarations, then one `def"),
    ("x = 1\n", 1, 1, "expected dim declarations, then one `def"),
    ("N = 3\ndef f():\n    return\n", 1, 1, "expected a dim such as"),
    ("N: int\ndef f():\n    return\n", 1, 4, "expected dim or dim"),
    ("N: dim[1, 2, 0]\ndef f():\n    return\n", 1, 4, "positive divisor"),
    ("N: dim[1]\nN: dim[2]\ndef f():\n    return\n", 2, 1, "declared twice"),
    ("f32: dim[1]\ndef f():\n    return\n", 1, 1, "means something else"),
    ("def f(x):\n    return x\n", 1, 1, "x needs a type"),
    ("def f(x: q32[2]):\n    return x\n", 1, 10, "unknown dtype q32"),
    ("def f(x: f32[2.5]):\n    return x\n", 1, 14, "not a dim: 2.5"),
    ("def f(x: f32[N // 0]):\n    return x\n", 1, 14, "positive divisors"),
    ('def f(x: f32[2] @ "a"):\n    return x\n', 1, 19, "is not a layout"),
    ("def f(x: f32[2] = 3):\n    return x\n", 1, 1, "plain inputs"),
    ("def f(x: f32[2], x: f32[3]):\n    return x\n", 1, 18, "x is defined twice"),
    ("def f(x: f32[2]):\n    x = exp(x)\n    return x\n", 2, 5, "x is defined twice"),
    ("def f(x: f32[2]):\n    return z\n", 2, 12, "unknown value z"),
    ("def f(x: f32[2]):\n    return None\n", 2, 12, "expected op"),
    ("def f(x: f32[2]):\n    y = exp(x)\n", 2, 5, "the last statement must be `return"),
    ("def f(x: f32[2]):\n    y = exq(x)\n    return y\n", 2, 9, r"there is no op 'exq'; did you mean exp"),
    ("def f(x: f32[2]):\n    y = x + x\n    return y\n", 2, 9, "expected op"),
    ("def f(x: f32[2]):\n    exp(x)\n    return x\n", 2, 5, "expected `NAME: type = op"),
    ("def f(x: f32[2]):\n    y: f32[3] = exp(x)\n    return y\n", 2, 8, r"the text says f32\[3\], exp gives f32\[2\]"),
    (
        "def f(x: f32[2]):\n    y = softmax(x, axis=1)\n    return y\n",
        2,
        9,
        r"softmax\(f32\[2\], axis=1\): axis 1 is outside \[-1, 0\]",
    ),
    ("def f(x: f32[2]):\n    y = softmax(x, axes=1)\n    return y\n", 2, 9, "unexpected keyword argument 'axes'"),
    ("def f(x: f32[2]):\n    y = exp(x, x)\n    return y\n", 2, 9, "wrong operands or attributes"),
    ("def f(x: f32[2]):\n    y = note(x, text={})\n    return y\n", 2, 22, "not a dim"),
    ("def f(x: f32[2]):\n    a, b = exp(x)\n    return a\n", 2, 5, "exp has 1 output; 2 names"),
    (
        "def f(x: f32[2]):\n    y = exp(topk(x, k=1))\n    return y\n",
        2,
        13,
        "topk has 2 outputs and cannot stand inside",
    ),
    ("def f(x: i32[2]):\n    y = add(x, 1.5)\n    return y\n", 2, 16, "no element of a i32 constant"),
    ("def f():\n    y = add(1, 2)\n    return y\n", 2, 13, "takes its dtype from a value"),
    (
        "def f(*, c: f32[2] = [1.0]):\n    return c\n",
        1,
        22,
        r"c: expected the elements of f32\[2\], got 1 in shape \[1\]",
    ),
    ("def f(*, c: u8 = 256):\n    return c\n", 1, 18, "256 is outside the range of u8"),
    ("def f(*, c: f32[2, 2] = [[1.0], [2.0, 3.0]]):\n    return c\n", 1, 25, "different lengths"),
    ("def f(*, c: f32[N] = [1.0]):\n    return c\n", 1, 10, "symbolic dims"),
]


@pytest.mark.parametrize("text, line, column, message", ERRORS)
def test_errors_say_where(text: str, line: int, column: int | None, message: str, ops: Ops) -> None:
    with pytest.raises(ParseError, match=message) as e:
        parse(text, ops=ops)
    assert str(e.value).startswith(f"line {line}, column {column}:" if column else f"line {line}, column ")


def test_text_is_never_executed(ops: Ops) -> None:
    with pytest.raises(ParseError):
        parse("def f(x: f32[2]):\n    y = note(x, text=__import__('os').getcwd())\n    return y\n", ops=ops)


def test_types_in_text() -> None:
    n = dim("N")
    cases: list[tuple[TensorType, str]] = [
        (tensor(f32), "f32"),
        (tensor(i64, n, maximum(n, 3)), "i64[N, max(3, N)]"),
        (
            tensor(f32, 1, 60, 7, 7, encoding=Dense(parse_layout("0 1/16 2 3 1%16"))),
            'f32[1, 60, 7, 7] @ "0 1/16 2 3 1%16"',
        ),
    ]
    for t, text in cases:
        assert str(t) == text
        assert parse(f"def f(x: {text}):\n    return x\n", ops={}).inputs[0].type == t


def test_numpy_attributes_print_as_python_numbers(ops: Ops) -> None:
    g = Graph("f")
    attrs: dict[str, Any] = {"dims": [np.int64(1), 2], "scale": np.float32(0.5), "flag": np.bool_(True)}
    y = Builder(g, ops=ops).note(g.add_input("x", tensor(f32, 2)), **attrs)
    assert repr(y.node) == "v0: f32[2] = note(x, dims=(1, 2), scale=0.5, flag=True)"
