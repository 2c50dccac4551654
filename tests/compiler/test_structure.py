"""Sequences, optionals and maps as inputs and outputs: lists, None and dicts."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import dnnc
from dnnc.import_cache import MAX_VARIANTS
from dnnc.ir.dtype import f32, i64, string
from dnnc.ir.form import ARRAY, NOTHING, Form, Kind
from dnnc.structure import assemble, flatten

HEAD = '<ir_version: 8, opset_import: ["": 17]>\n'
DOUBLE = "m (seq(float[N]) xs, float[N] d) => (seq(float[N]) ys, int64 n) {\n"
DOUBLE += (
    "ys = SequenceMap (xs, d) <body: graph = b (float[N] a, float[N] c) => (float[N] e) { e = Add (a, c) }>\n"
    " n = SequenceLength (xs) }"
)
MAYBE = "m (float[3] x, optional(float[3]) b) => (float[3] y) { h = OptionalHasElement (b)\n"
MAYBE += "y = If (h) <then_branch: graph = t () => (float[3] p) { e = OptionalGetElement (b)\n p = Add (x, e) }, "
MAYBE += "else_branch: graph = f () => (float[3] q) { q = Neg (x) }> }"
PARTS = (
    "m (float[6] x) => (seq(float[P]) ys) "
    "{ n = Constant <value: tensor = int64 {4}> ()\n ys = SplitToSequence <axis = 0> (x, n) }"
)
CHOICE = "m (float[4] a, float[4] b, int64 k) => (float[4] y) { s = SequenceConstruct (a, b)\n y = SequenceAt (s, k) }"
NESTED = "m (optional(seq(float[N])) s) => (optional(seq(float[N])) t) { t = Identity (s) }"


def compiled(text: str, **options: Any) -> Any:
    return dnnc.compile(onnx.parser.parse_model(HEAD + text), **{"cache": False, **options})


def arrays(*lengths: int) -> list[np.ndarray]:
    return [np.arange(n, dtype=np.float32) for n in lengths]


@pytest.mark.parametrize("target", ["llvm", "reference"])
def test_a_list_in_and_a_list_out(target: str) -> None:
    f = compiled(DOUBLE, target=target)
    d = np.array([10, 20, 30], np.float32)
    for count in (3, 1, 0, 3):
        ys, n = f(arrays(*[3] * count), d)
        assert isinstance(ys, list) and len(ys) == count and n == count and n.dtype == np.int64
        for y in ys:
            np.testing.assert_array_equal(y, np.arange(3) + d)
    assert len(f.variants) == 3  # one for each length
    assert [(s.name, s.dtype) for s in f.inputs] == [("xs", "seq(float32)"), ("d", "float32")]
    assert next((s.name, s.dtype) for s in f.outputs) == ("ys", "seq(float32)")


def test_items_of_different_lengths() -> None:
    f = compiled("m (seq(float[N]) xs) => (float[M] y) { y = ConcatFromSequence <axis = 0> (xs) }")
    np.testing.assert_array_equal(f(arrays(3, 1, 4)), [0, 1, 2, 0, 0, 1, 2, 3])
    np.testing.assert_array_equal(f({"xs": tuple(arrays(2))}), [0, 1])


def test_an_optional_value_may_be_left_out() -> None:
    f = compiled(MAYBE)
    x, b = np.array([1, 2, 3], np.float32), np.array([5, 5, 5], np.float32)
    np.testing.assert_array_equal(f(x, b), x + b)
    for got in (f(x), f(x, None), f(x=x), f({"x": x}), f(x, b=None), f.run([x])):
        np.testing.assert_array_equal(got, -x)
    assert len(f.variants) == 2


def test_nothing_out() -> None:
    f = compiled(NESTED)
    assert f(None) is None and f.variants == []
    assert f([]) == []
    got = f(arrays(2, 3))
    assert [g.tolist() for g in got] == [[0, 1], [0, 1, 2]]


def test_fixed_shapes_compile_ahead() -> None:
    f = compiled(PARTS)
    assert f.deferred and len(f.variants) == 1
    assert [y.tolist() for y in f(np.arange(6, dtype=np.float32))] == [[0, 1, 2, 3], [4, 5]]
    assert len(f.variants) == 1
    with pytest.raises(dnnc.ModelError, match="do not add up"):
        compiled(PARTS.replace("int64 {4}", "int64[2] {4, 4}"))


def test_a_computed_position_is_a_gather() -> None:
    f = compiled(CHOICE)
    assert not f.deferred
    a, b = arrays(4)[0], -arrays(4)[0]
    for k, want in ((0, a), (1, b), (-1, b), (-2, a)):
        np.testing.assert_array_equal(f(a, b, np.int64(k)), want)
    with pytest.raises(dnnc.InputError, match="outside of its axis"):
        f(a, b, np.int64(2))


def test_programs_are_bounded_and_the_last_used_stay() -> None:
    f = compiled("m (seq(float[N]) xs) => (float[M] y) { y = ConcatFromSequence <axis = 0> (xs) }", target="reference")
    f(arrays(1))
    first = f.variants[0]
    for n in range(2, MAX_VARIANTS + 3):
        f(arrays(n))
        f(arrays(1))
    assert len(f.variants) == MAX_VARIANTS and f.variants[-1] is first


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            (np.zeros(3, np.float32), np.zeros(3, np.float32)),
            r"input xs: expected a list \(seq\(float32\)\), got a ndarray",
        ),
        ((None, np.zeros(3, np.float32)), "input xs: expected a list .* got None"),
        (([np.zeros(3)], np.zeros(3, np.float32)), r"input xs\[0\]: expected float32, got float64"),
        (([None], np.zeros(3, np.float32)), r"input xs\[0\]: expected an array of float32, got None"),
        (([np.zeros(3, np.float32)],), "the model has the inputs xs, d; given are xs"),
    ],
)
def test_refused_arguments(args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(dnnc.InputError, match=message):
        compiled(DOUBLE, target="reference")(*args)


def test_buffers_take_arrays_only() -> None:
    f = compiled(PARTS)
    with pytest.raises(dnnc.InputError, match="for which no buffer can be given"):
        f.run([np.zeros(6, np.float32)], [np.zeros(4, np.float32)])


@pytest.mark.slow
def test_a_report_comes_with_the_first_call() -> None:
    f = compiled(DOUBLE)
    with pytest.raises(dnnc.InputError, match=r"compiled for the structure of xs \(seq\(float32\)\)"):
        _ = f.report
    f(arrays(3), np.ones(3, np.float32))
    assert f.report.name == "m" and f.profile(arrays(3), np.ones(3, np.float32), repeats=1) is not None


def test_saved_and_loaded(tmp_path: Any) -> None:
    f = compiled(DOUBLE)
    f.save(tmp_path / "m.dnnc")
    g = dnnc.load(tmp_path / "m.dnnc", cache=False)
    ys, n = g(arrays(2, 2), np.ones(2, np.float32))
    assert n == 2 and [y.tolist() for y in ys] == [[1, 2], [1, 2]]


def test_an_unknown_rank_is_that_of_the_call() -> None:
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Neg", ["x"], ["y"])],
        "m",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, None)],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
    )
    f = dnnc.compile(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), cache=False
    )
    for shape in ((), (3,), (2, 2)):
        assert f(np.ones(shape, np.float32)).shape == shape


# --- values to arrays and back ----------------------------------------------------------------------------------------


def test_maps_are_arrays_with_keys() -> None:
    kind = Kind("map", f32, key=string)
    leaves: dict[str, np.ndarray] = {}
    form = flatten({"b": 2.0, "a": 1.0}, kind, "m", leaves)
    assert form == Form("dict", keys=("b", "a")) and leaves["m"].dtype == np.float32 and leaves["m"].tolist() == [2, 1]
    assert assemble(form, iter([np.array([5, 6], np.float32)])) == {"b": 5, "a": 6}
    rows = assemble(Form("dicts", keys=(7, 8)), iter([np.arange(4, dtype=np.float32).reshape(2, 2)]))
    assert rows == [{7: 0, 8: 1}, {7: 2, 8: 3}]
    with pytest.raises(dnnc.InputError, match=r"input m: expected a dict \(map\(str, f32\)\), got a list"):
        flatten([1.0], kind, "m", {})
    with pytest.raises(dnnc.InputError, match="expected keys of i64, got 'a'"):
        flatten({"a": 1.0}, Kind("map", f32, key=i64), "m", {})


def test_trees_round_trip() -> None:
    kind = Kind("sequence", element=Kind("optional", element=Kind("sequence", element=Kind("tensor", f32))))
    value = [[np.ones(2, np.float32)], None, []]
    leaves: dict[str, np.ndarray] = {}
    form = flatten(value, kind, "x", leaves)
    assert form == Form("list", (Form("list", (ARRAY,)), NOTHING, Form("list")))
    assert list(leaves) == ["x[0][0]"]
    back = assemble(form, iter(leaves.values()))
    assert back[1:] == [None, []] and back[0][0] is leaves["x[0][0]"]
    assert str(kind) == "seq(optional(seq(float32)))"


def test_strings_of_any_kind_become_text() -> None:
    leaves: dict[str, np.ndarray] = {}
    flatten(
        [np.array(["a", "bc"]), np.array([b"\xc3\xa9"]), ["x"]],
        Kind("sequence", element=Kind("tensor", string)),
        "s",
        leaves,
    )
    assert [a.tolist() for a in leaves.values()] == [["a", "bc"], ["\u00e9"], ["x"]]
    assert all(a.dtype == object for a in leaves.values())
