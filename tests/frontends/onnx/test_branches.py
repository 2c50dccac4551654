"""If: branches that the inputs exclude are no error; branches of different types are chosen by value."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

import dnnc

HEAD = '<ir_version: 8, opset_import: ["" : 17]> '
Array = np.ndarray[Any, Any]


def compiled(text: str, **options: Any) -> Any:
    return dnnc.compile(parser.parse_model(HEAD + text), cache=False, threads=1, **options)


def yes_no(then: str, other: str, rank: int = 1) -> str:
    shape = "[" + ",".join(f"d{k}" for k in range(rank)) + "]"
    return (
        f"<then_branch = yes () => (float{shape} a) {{ {then} }}, else_branch = no () => (float{shape} b) {{ "
        f"{other} }}>"
    )


BY_SHAPE = f"""g (float[B,T] x) => (float[B,M] y) {{
    s = Shape (x)  k = Constant <value_int=1> ()  n = Gather (s, k)  l = Constant <value_int=512> ()  c = Equal (n, l)
    y = If (c) {yes_no("a = MatMul (x, w)", "b = MatMul (x, v)", 2)} }}"""


@pytest.mark.parametrize("target", ["llvm", "reference"])
def test_a_condition_on_shapes_chooses_the_only_branch_that_fits(target: str) -> None:
    """A speech model with one branch for each sampling rate: the weights of each fit frames of one length."""
    rng = np.random.default_rng(1)
    w, v = rng.standard_normal((512, 3)).astype(np.float32), rng.standard_normal((256, 3)).astype(np.float32)
    model = parser.parse_model(HEAD + BY_SHAPE)
    model.graph.initializer.extend([onnx.numpy_helper.from_array(w, "w"), onnx.numpy_helper.from_array(v, "v")])
    f = dnnc.compile(model, target=target, cache=False, threads=1)
    for size, weight in ((512, w), (256, v), (512, w)):
        x = rng.standard_normal((2, size)).astype(np.float32)
        np.testing.assert_allclose(f(x), x @ weight, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("target", ["llvm", "reference"])
def test_branches_of_different_shapes_are_chosen_by_the_value_of_the_condition(target: str) -> None:
    text = f"""g (float[1,4] x) => (float[] y) {{ m = ReduceSum <keepdims=0> (x)  z = Constant <value_float=0.0> ()
        c = Greater (m, z)
        y = If (c) {yes_no("a = Squeeze (x)", "b = Neg (x)")} }}"""
    f = compiled(text, target=target)
    x = np.float32([[1, 2, 3, 4]])
    for k in range(1, 6):
        np.testing.assert_array_equal(f(k * x), k * x[0])
        np.testing.assert_array_equal(f(-k * x), k * x)
    assert f.deferred and len(f.variants) == 2  # one for each branch, not for each input


def test_branches_of_different_dtypes() -> None:
    text = """g (float[3] x, bool c) => (float[3] y) { r = If (c) <then_branch = yes () => (float[3] a) { a = Neg (x) },
        else_branch = no () => (int64[3] b) { b = Cast <to=7> (x) }>  y = Cast <to=1> (r) }"""
    f = compiled(text)
    x = np.float32([1.5, -2.5, 3.5])
    np.testing.assert_array_equal(f(x, np.bool_(True)), -x)
    np.testing.assert_array_equal(f(x, np.bool_(False)), np.trunc(x))


def test_a_branch_that_does_not_fit_is_an_error_where_it_is_live() -> None:
    """The message names the node and the branch; the other branch works before and after."""
    text = f"""g (float[2,4] x, float[2,3] w, bool c) => (float[] y) {{
        y = If (c) {yes_no("a = MatMul (x, w)", "b = Neg (x)", 2)} }}"""
    f = compiled(text)
    x, w = np.ones((2, 4), np.float32), np.ones((2, 3), np.float32)
    for _ in range(2):
        np.testing.assert_array_equal(f(x, w, np.bool_(False)), -x)
        with pytest.raises(dnnc.DnncError, match=r"(?s)MatMul.*in the then_branch of an If"):
            f(x, w, np.bool_(True))


def test_two_branches_that_do_not_fit_are_an_error_at_once() -> None:
    text = f"""g (float[2,4] x, float[2,3] w, bool c) => (float[] y) {{
        y = If (c) {yes_no("a = MatMul (x, w)", "b = Add (x, w)", 2)} }}"""
    with pytest.raises(dnnc.DnncError, match=r"(?s)MatMul.*then_branch"):
        compiled(text)


@pytest.mark.slow
def test_nested_branches() -> None:
    inner = (
        yes_no("a = Squeeze (h)", "b = Exp (h)")
        .replace("yes", "yes2")
        .replace("no ", "no2 ")
        .replace(" a", " p")
        .replace(" b", " q")
    )
    text = f"""g (float[1,3] x, bool c, bool d) => (float[] y) {{ y = If (c) <then_branch = yes () => (float[] a) {{
        h = Neg (x)  a = If (d) {inner} }},
        else_branch = no () => (float[1,3] b) {{ b = Abs (x) }}> }}"""
    f = compiled(text)
    x = np.float32([[1, -2, 3]])
    for _ in range(2):
        np.testing.assert_array_equal(f(x, np.bool_(True), np.bool_(True)), -x[0])
        np.testing.assert_allclose(f(x, np.bool_(True), np.bool_(False)), np.exp(-x), rtol=1e-6)
        for d in (True, False):
            np.testing.assert_array_equal(f(x, np.bool_(False), np.bool_(d)), np.abs(x))


@pytest.mark.slow
def test_a_branch_within_a_loop() -> None:
    """Each iteration has a condition of its own, computed from what it carries."""
    body = f"""step (int64 i, bool keep, float[k] v) => (bool keep2, float[m] v2) {{ keep2 = Identity (keep)
        s = ReduceSum <keepdims=0> (v)
        z = Constant <value_float=10.0> ()  c = Less (s, z)  v2 = If (c)
            {yes_no("a = Concat <axis=0> (v, v)", "b = Neg (v)")} }}"""
    text = f"""g (float[2] x) => (float[] y) <int64 trips = {{3}}, bool go = {{1}}> {{
        y = Loop (trips, go, x) <body = {body}> }}"""
    f = compiled(text)
    for x in (np.float32([1, 1]), np.float32([4, 4]), np.float32([20, 1]), np.float32([1, 1])):
        want = x
        for _ in range(3):
            want = np.concatenate([want, want]) if want.sum() < 10 else -want
        np.testing.assert_array_equal(f(x), want)


@pytest.mark.parametrize("value,shape", [("each = Neg (v)", (0, 2)), ("each = MatMul (v, big)", (0, 7))])
def test_the_body_of_a_loop_that_never_runs(value: str, shape: tuple[int, ...]) -> None:
    """It need not fit its inputs: what it would stack then has the type that it declares."""
    body = f"""step (int64 i, bool keep, float[2] v) => (bool keep2, float[2] v2, float[{shape[1]}] each)
        {{ keep2 = Identity (keep)  v2 = Neg (v)  {value} }}"""
    head = "g (float[2] x, float[5,7] big) => (float[2] y, float[n,m] all) <int64 trips = {0}, bool go = {1}>"
    f = compiled(f"{head} {{ y, all = Loop (trips, go, x) <body = {body}> }}")
    x = np.float32([1, 2])
    y, every = f(x, np.ones((5, 7), np.float32))
    np.testing.assert_array_equal(y, x)
    assert every.shape == shape and every.dtype == np.float32


def test_a_scan_of_no_rows() -> None:
    body = "step (float[2] s, float[2] r) => (float[2] t, float[2] each) { t = Add (s, r)  each = Mul (t, r) }"
    f = compiled(
        f"g (float[2] x, float[0,2] rows) => (float[2] y, float[0,2] all) "
        f"{{ y, all = Scan <num_scan_inputs=1, body = {body}> (x, rows) }}"
    )
    x = np.float32([1, 2])
    y, every = f(x, np.ones((0, 2), np.float32))
    np.testing.assert_array_equal(y, x)
    assert every.shape == (0, 2)
