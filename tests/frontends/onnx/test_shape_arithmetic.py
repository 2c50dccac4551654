"""Shapes that a model computes with operators: nothing of it may be left in the graph, and the dims must be right."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, parser

from dnnc.frontends.onnx import NeedsValues, read
from dnnc.ir.errors import ModelError, ShapeError, UnsupportedError
from dnnc.ir.graph import Graph, interp
from dnnc.ir.shapes import specialise


def parse(text: str, opset: int = 17) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]>\n{text}')


def ops(g: Graph) -> list[str]:
    return [n.op.name for n in g.nodes()]


def dims(g: Graph) -> list[str]:
    return [str(o.type) for o in g.outputs]


# --- heads split and joined: the idiom of every exported transformer --------------------------------------------------

HEADS = """
heads (float[batch, seq, 768] x) => (float[a, b, c, d] y) {
    shape = Shape(x)
    zero = Constant<value_int = 0>()
    one = Constant<value_int = 1>()
    b = Gather<axis = 0>(shape, zero)
    s = Gather<axis = 0>(shape, one)
    axes = Constant<value_ints = [0]>()
    b1 = Unsqueeze(b, axes)
    s1 = Unsqueeze(s, axes)
    twelve = Constant<value_ints = [12]>()
    rest = Constant<value_ints = [-1]>()
    target = Concat<axis = 0>(b1, s1, twelve, rest)
    split = Reshape(x, target)
    y = Transpose<perm = [0, 2, 1, 3]>(split)
}
"""


def test_reshape_holds_dims() -> None:
    g = read(parse(HEADS))
    assert ops(g) == ["reshape", "transpose"]
    (reshape, _) = g.nodes()
    assert [str(d) for d in reshape.attrs["shape"]] == ["batch", "seq", "12", "64"]
    x = np.random.default_rng(0).normal(size=(2, 5, 768)).astype(np.float32)
    (y,) = interp.run(g, [x])
    np.testing.assert_array_equal(y, x.reshape(2, 5, 12, 64).transpose(0, 2, 1, 3))
    assert str(specialise(g, {"batch": 1, "seq": 7}).outputs[0].type) == "f32[1, 12, 7, 64]"


def test_dims_can_be_fixed_and_bounded() -> None:
    g = read(parse(HEADS), dims={"batch": 3, "seq": (1, 128)})
    assert dims(g) == ["f32[3, 12, seq, 64]"] and g.dims["seq"].hi == 128


# --- each operator over dims ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ("n = Shape(x)", "[A, B]"),
        ("n = Shape<start = 1>(x)", "[B]"),
        ("s = Shape(x)  p = Constant<value_ints = [0]>()  q = Constant<value_ints = [1]>()  n = Slice(s, p, q)", "[A]"),
        ("s = Size(x)  r = Constant<value_ints = [1]>()  n = Reshape(s, r)", "[A*B]"),
        ("s = Shape(x)  n = ReduceProd(s)", "[A*B]"),
        ("s = Shape(x)  two = Constant<value_int = 2>()  n = Mul(s, two)", "[2*A, 2*B]"),
        ("s = Shape(x)  two = Constant<value_int = 2>()  t = Mul(s, two)  n = Div(t, two)", "[A, B]"),
        ("s = Shape(x)  one = Constant<value_int = 1>()  t = Add(s, one)  n = Sub(t, one)", "[A, B]"),
        (
            "s = Shape(x)  f = Cast<to = 1>(s)  two = Constant<value_float = 2.0>()  g = Mul(f, two)  h = Floor(g)  n "
            "= Cast<to = 7>(h)",
            "[2*A, 2*B]",
        ),
        (
            "s = Shape(x)  m = Constant<value_ints = [-1, -1]>()  e = Equal(s, m)  o = Constant<value_ints = [1, 1]>() "
            " n = Where(e, o, s)",
            "[A, B]",
        ),
        ("s = Shape(x)  o = Constant<value_ints = [1, 1]>()  n = Max(s, o)", "[A, B]"),
        ("s = Shape(x)  l, r = Split<axis = 0>(s)  n = Concat<axis = 0>(r, l)", "[B, A]"),
    ],
)
def test_folding(body: str, want: str) -> None:
    text = f"t (float[A, B] x) => (float[p] y) {{ {body.replace('  ', chr(10))}\n y = ConstantOfShape(n) }}"
    g = read(parse(text))
    assert ops(g) == ["full"]
    assert (
        str(g.outputs[0].type) == f"f32{want}"
        or f"f32[{', '.join(map(repr, g.outputs[0].type.shape))}]" == f"f32{want}"
    )


def test_range_of_a_dim() -> None:
    g = read(
        parse(
            "r (float[N, 4] x) => (int64[m] y) { s = Shape<end = 1>(x)  z = Constant<value_int = 0>()  o = "
            "Constant<value_int = 1>()  n = Squeeze(s)  y = Range(z, n, o) }"
        )
    )
    assert ops(g) == ["iota"] and dims(g) == ["i64[N]"]


def test_a_dim_as_data() -> None:
    """A dim that is computed with, not only used as a shape."""
    g = read(
        parse("s (float[N, 4] x) => (float[N, 4] y) { s = Shape<end = 1>(x)  f = Cast<to = 1>(s)  y = Div(x, f) }")
    )
    x = np.ones((5, 4), np.float32)
    np.testing.assert_allclose(interp.run(g, [x])[0], x / 5)


def test_a_shape_as_output() -> None:
    g = read(parse("s (float[N, 4] x) => (int64[2] y) { y = Shape(x) }"))
    np.testing.assert_array_equal(interp.run(g, [np.zeros((3, 4), np.float32)])[0], [3, 4])


def test_constants_are_folded() -> None:
    g = read(
        parse(
            "c (float[2] x) => (float[2] y) { a = Constant<value_floats = [1.0, 2.0]>()  b = Exp(a)  d = Neg(b)  y = "
            "Add(x, d) }"
        )
    )
    assert ops(g) == ["add"]


# --- what operators imply of dims -------------------------------------------------------------------------------------


def test_a_table_bounds_a_dim() -> None:
    """512 rows sliced to S and added to S rows: S is at most 512."""
    text = """
    t (float[S, 8] x, float[512, 8] table) => (float[S, 8] y) {
        z = Constant<value_ints = [0]>()
        s = Shape<end = 1>(x)
        rows = Slice(table, z, s)
        y = Add(x, rows)
    }"""
    g = read(parse(text))
    assert g.dims["S"].hi == 512 and dims(g) == ["f32[S, 8]"]


def test_equal_dims_unify() -> None:
    g = read(parse("u (float[A, 4] x, float[B, 4] z) => (float[c, 4] y) { y = Add(x, z) }"))
    assert len({str(v.type) for v in (*g.inputs, *g.outputs)}) == 1


def test_matmul_fixes_a_dim() -> None:
    g = read(parse("u (float[N, K] x, float[16, 4] z) => (float[N, 4] y) { y = MatMul(x, z) }"))
    assert str(g.inputs[0].type) == "f32[N, 16]"


def test_sums_of_dims() -> None:
    """past + present == total, as a decoder's mask says."""
    text = (
        "u (float[P] past, float[S] now, float[T] mask) => (float[T] y) "
        "{ all = Concat<axis = 0>(past, now)  y = Add(all, mask) }"
    )
    g = read(parse(text))
    assert repr(g.inputs[2].type.shape[0]) in ("P + S", "S + P") or repr(g.inputs[0].type.shape[0]) in (
        "T - S",
        "-S + T",
    )


def test_numbers_that_differ_are_an_error() -> None:
    with pytest.raises(ShapeError, match=r"plus|y \(Add, opset 17\)"):
        read(parse("u (float[3, 4] x, float[2, 4] z) => (float[3, 4] y) { y = Add(x, z) }"))


@pytest.mark.parametrize("dim", ["?", "-1", "", None, -7])
def test_anonymous_dims_are_symbols_of_their_own(dim: Any) -> None:
    m = parse("a (float[N, 4] x, float[N, 4] z) => (float[N, 4] y, float[N, 4] w) { y = Relu(x)  w = Relu(z) }")
    for i in m.graph.input:
        d = i.type.tensor_type.shape.dim[0]
        d.Clear()
        if isinstance(dim, int):
            d.dim_value = dim
        elif dim is not None:
            d.dim_param = dim
    g = read(m)
    assert [str(v.type) for v in g.inputs] == ["f32[x_d0, 4]", "f32[z_d0, 4]"]


def test_odd_dim_names_are_mangled() -> None:
    m = parse("a (float[N, 4] x) => (float[N, 4] y) { y = Relu(x) }")
    m.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "past + 1"
    (v,) = read(m).inputs
    assert str(v.type) == "f32[past___1, 4]"


# --- shapes that only data tells --------------------------------------------------------------------------------------

RUNTIME = "r (float[2, 6] x, int64[2] target) => (float[a, b] y) { y = Reshape(x, target) }"


def test_a_shape_that_is_an_input() -> None:
    with pytest.raises(NeedsValues, match="target") as e:
        read(parse(RUNTIME))
    assert e.value.inputs == ("target",) and isinstance(e.value, UnsupportedError)
    g = read(parse(RUNTIME), values={"target": np.array([4, 3])})
    assert dims(g) == ["f32[4, 3]"] and [v.name for v in g.inputs] == ["x", "target"]


def test_values_reach_through_arithmetic() -> None:
    text = (
        "r (float[2, 6] x, int64[2] t) => (float[a, b] y) "
        "{ two = Constant<value_int = 2>()  u = Div(t, two)  y = Reshape(x, u) }"
    )
    with pytest.raises(NeedsValues) as e:
        read(parse(text))
    assert e.value.inputs == ("t",)
    assert dims(read(parse(text), values={"t": np.array([8, 6])})) == ["f32[4, 3]"]


def test_nonzero_of_a_known_mask() -> None:
    text = "r (bool[4] m, float[4] x) => (float[a] y) { i = NonZero(m)  t = Squeeze(i)  y = Gather(x, t) }"
    with pytest.raises(NeedsValues):
        read(parse(text))
    g = read(parse(text), values={"m": np.array([True, False, True, False])})
    np.testing.assert_array_equal(interp.run(g, [np.ones(4, bool), np.arange(4, dtype=np.float32)])[0], [0, 2])


def test_values_of_the_wrong_dtype() -> None:
    with pytest.raises(ModelError, match=r"'target'.*float32"):
        read(parse(RUNTIME), values={"target": np.array([4, 3], np.float32)})


def test_an_input_without_a_shape() -> None:
    m = parse("a (float[N] x) => (float[N] y) { y = Relu(x) }")
    m.graph.input[0].type.CopyFrom(onnx.helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    with pytest.raises(UnsupportedError, match="'x' has no shape"):
        read(m)
    assert dims(read(m, shapes={"x": (3, None)})) == ["f32[3, x_d1]"]


# --- control flow that the shape decides ------------------------------------------------------------------------------


def test_if_on_a_known_condition() -> None:
    text = """
    i (float[1, 4] x) => (float[p] y) {
        s = Shape<end = 1>(x)
        one = Constant<value_ints = [1]>()
        c = Equal(s, one)
        d = Squeeze(c)
        y = If(d) <
            then_branch = t () => (float[p] a) { ax = Constant<value_ints = [0]>()  a = Squeeze(x, ax) },
            else_branch = e () => (float[p, q] b) { b = Identity(x) }
        >
    }"""
    g = read(parse(text))
    assert ops(g) == ["squeeze"] and dims(g) == ["f32[4]"]


@pytest.mark.parametrize(
    "trips,condition,message",
    [
        ("float t", "bool c", "number of iterations of a Loop must be one integer, got f32"),
        ("int64[3] t", "bool c", "number of iterations of a Loop must be one integer, got i64[3]"),
        ("int64[0] t", "bool c", "number of iterations of a Loop must be one integer, got i64[0]"),
        ("int64 t", "float c", "condition of a Loop must be one bool, got f32"),
        ("int64 t", "bool[2] c", "condition of a Loop must be one bool, got bool[2]"),
    ],
)
@pytest.mark.parametrize("known", [False, True])
def test_a_loop_takes_one_number_and_one_bool(trips: str, condition: str, message: str, known: bool) -> None:
    body = """ y = Loop(t, c, x) <
            body = b (int64 i, bool k, float[3] s) => (bool d, float[3] u) { u = Neg(s)  v = Exp(u)  w = Exp(v)
                d = Identity(k) }
        > }"""
    given = f"<{trips} = {{{_one_of(trips)}}}, {condition} = {{{_one_of(condition)}}}>" if known else ""
    inputs = "float[3] x" if known else f"float[3] x, {trips}, {condition}"
    with pytest.raises(ModelError, match=re.escape(message)):
        read(parse(f"l ({inputs}) => (float[3] y) {given} {{ {body}"))


def _one_of(declared: str) -> str:
    """As many ones as the type has elements."""
    n = re.search(r"\[(\d)\]", declared)
    return ", ".join("1" * (int(n[1]) if n else 1))


def test_an_if_takes_one_bool() -> None:
    for c in ("float c", "bool[2] c"):
        branches = (
            "then_branch = t () => (float[4] a) { a = Neg(x) }, else_branch = e () => (float[4] b) { b = Exp(x) }"
        )
        text = f"i (float[4] x, {c}) => (float[4] y) {{ y = If(c) <{branches}> }}"
        with pytest.raises(ModelError, match="condition of an If must be one bool"):
            read(parse(text))


def test_a_loop_of_known_length_is_unrolled() -> None:
    text = """
    l (float[3] x) => (float[3] y, float[n, 3] all) {
        trips = Constant<value_int = 4>()
        go = Constant<value = bool {1}>()
        y, all = Loop(trips, go, x) <
            body = b (int64 i, bool c, float[3] s) => (bool d, float[3] t, float[3] u) {
                f = Cast<to = 1>(i)
                t = Add(s, f)
                u = Identity(t)
                d = Identity(c)
            }
        >
    }"""
    y, history = interp.run(read(parse(text)), [np.zeros(3, np.float32)])
    np.testing.assert_array_equal(y, [6, 6, 6])
    np.testing.assert_array_equal(history[:, 0], [0, 1, 3, 6])


PADDED = """
padded (float[batch, seq] x) => (float[batch, n] y) {
    shape = Shape<start = 1, end = 2>(x)
    minus = Constant<value_ints = [-1]>()
    block = Constant<value_ints = [8]>()
    less = Mul(minus, shape)
    rest = Mod(less, block)
    none = Constant<value_ints = [0]>()
    pads = Concat<axis = 0>(none, none, none, rest)
    y = Pad(x, pads)
}
"""


@pytest.mark.parametrize("seq", [1, 7, 8, 9, 16])
def test_pads_up_to_a_multiple(seq: int) -> None:
    """The remainder of a negative size is that of the floor's division."""
    g = specialise(read(parse(PADDED)), {"batch": 2, "seq": seq})
    (y,) = interp.run(g, [np.ones((2, seq), np.float32)])
    assert y.shape == (2, -(-seq // 8) * 8) and y.sum() == 2 * seq


def test_a_remainder_of_the_truncating_division_is_no_size() -> None:
    """fmod of a negative size is negative, and is not known as an expression."""
    with pytest.raises(UnsupportedError, match="pads must be known"):
        read(parse(PADDED.replace("Mod(", "Mod<fmod = 1>(")))
