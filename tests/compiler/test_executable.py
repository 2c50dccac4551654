"""An executable as an object: its calls, how many programs it keeps, what `verify="model"` finds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.backends.runtime.link import ConstantBlock
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.program_cache import MAX_INSTANCES, MAX_PROGRAMS
from dnnc.tools.accuracy import check_model, first_difference, longest_reduction
from dnnc.tools.sample_graphs import graph_of

SUM = "def g(x: f32[3, 5], y: f32[3, 5]):\n    return add(x, y)"
ROWS = "def g(x: f32[N, 4]):\n    return softmax(x)"


def compiled(text: str, **options: Any) -> Any:
    return dnnc.compile(graph_of(text), **{"cache": False, **options})


def ones(*shape: int) -> Any:
    return np.ones(shape, np.float32)


# --- what it takes ----------------------------------------------------------------------------------------------------


def test_signature() -> None:
    f = compiled("def g(x: f32[N, 4], i: i64[2*N]):\n    return relu(x), i, equal(i, i)")
    assert f.inputs == (
        dnnc.driver.TensorSpec("x", "float32", ("N", 4)),
        dnnc.driver.TensorSpec("i", "int64", ("2*N",)),
    )
    assert [(s.name, s.dtype) for s in f.outputs] == [("v0", "float32"), ("i", "int64"), ("v1", "bool")]


def test_position_keyword_and_dict_are_the_same_call() -> None:
    f = compiled(SUM)
    x, y = ones(3, 5), 2 * ones(3, 5)
    for got in (f(x, y), f(x, y=y), f(y=y, x=x), f({"y": y, "x": x}), f.run([x, y]), f.run({"y": y, "x": x})):
        np.testing.assert_array_equal(got, 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((ones(3, 5),), r"the model has 2 inputs \(x, y\), got 1 array"),
        (
            (ones(3, 5), np.ones((3, 5), np.int64)),
            r"input y: expected float32, got int64; convert it with .astype\('float32'\)",
        ),
        ((ones(3, 5), ones(15)), r"input y: expected 2 dimensions, got shape \(15,\)"),
        ((ones(3, 5), ones(3, 6)), r"y: axis 1 of f32\[3, 5\] must be 5, got 6 in shape \[3, 6\]"),
        ((ones(3, 5), "text"), r"input y: expected an array of float32, got str"),
        ((ones(3, 5), [[1.0], [2.0, 3.0]]), r"input y: expected an array of float32, got list"),
        ((ones(3, 5), None), "input y"),
    ],
)
def test_refused_arguments(given: tuple[Any, ...], message: str) -> None:
    with pytest.raises(dnnc.InputError, match=message):
        compiled(SUM)(*given)


@pytest.mark.slow
def test_relations_between_sizes_are_checked() -> None:
    f = compiled("def g(x: f32[N, 4], y: f32[2*N, 4]):\n    return concat(x, y, axis=0)", dims={"N": (1, 9)})
    assert f(ones(2, 4), ones(4, 4)).shape == (6, 4)
    with pytest.raises(dnnc.InputError, match=r"y: axis 0 of f32\[2\*N, 4\] must be 4 = 2\*N with N=2, got 5"):
        f(ones(2, 4), ones(5, 4))


def test_bounds_of_the_options_hold() -> None:
    f = compiled(ROWS, dims={"N": (2, 8)})
    assert f(ones(8, 4)).shape == (8, 4)
    for n in (1, 9):
        with pytest.raises(dnnc.InputError, match=f"dim N of f32.* must be at least 2, at most 8; got {n}"):
            f(ones(n, 4))
    with pytest.raises(dnnc.InputError, match="leaves it no size"):
        dnnc.compile(parse("N: dim[1, 4]\n" + ROWS), dims={"N": (5, 8)}, cache=False)
    with pytest.raises(dnnc.InputError, match="no symbolic dim 'M'"):
        compiled(ROWS, dims={"M": (5, 8)})


def test_strided_and_converted_inputs() -> None:
    f = compiled(SUM)
    big = np.arange(60, dtype=np.float32).reshape(6, 10)
    np.testing.assert_array_equal(f(big[::2, ::2], big[::-2, 1::2]), big[::2, ::2] + big[::-2, 1::2])
    np.testing.assert_array_equal(f(big[:3, :5].tolist(), np.zeros((3, 5), ">f4").astype("f4")), big[:3, :5])
    h = compiled("def g(x: f32, i: i64, b: bool):\n    return x, i, b")
    assert [np.asarray(r).item() for r in h(2.5, 7, True)] == [2.5, 7, True]


# --- what it gives ----------------------------------------------------------------------------------------------------


def test_zero_sizes() -> None:
    f = compiled(
        "def g(x: f32[0, 4], y: f32[3, 4]):\n    a = relu(x)\n    return a, concat(a, y, axis=0), reduce_sum(x, "
        "axes=(0,))"
    )
    a, b, c = f(ones(0, 4), ones(3, 4))
    assert a.shape == (0, 4) and (b == 1).all() and b.shape == (3, 4)
    np.testing.assert_array_equal(c, np.zeros(4))
    alone = compiled("def g(x: f32[0, 4], *, w: f32[4, 3]):\n    return matmul(x, w)")
    assert alone(ones(0, 4)).shape == (0, 3)


@pytest.mark.slow
def test_outputs_that_need_memory_of_their_own() -> None:
    text = """def g(x: f32[2, 3], *, k: f32[2] = [5.0, 6.0]):
    r = relu(x)
    v = reshape(r, shape=(3, 2))
    return x, k, r, v, reshape(x, shape=(6,)), r, k"""
    for level in (0, 1, 3):
        f = dnnc.compile(parse(text), cache=False, opt_level=level)
        x = np.arange(6, dtype=np.float32).reshape(2, 3)
        outs = f(x)
        for got, want in zip(outs, (x, [5, 6], x, x.reshape(3, 2), x.reshape(6), x, [5, 6])):
            np.testing.assert_array_equal(got, want)
        for a in outs:
            a[...] = -1  # nobody else's memory
        np.testing.assert_array_equal(f(x)[1], [5, 6])
        assert x[1, 2] == 5 and sum(np.shares_memory(a, b) for a in outs for b in outs) == len(outs)


# --- buffers ----------------------------------------------------------------------------------------------------------


def test_refused_buffers() -> None:
    f = compiled("def g(x: f32[3, 5]):\n    return relu(x), neg(x)")
    x, a, b = ones(3, 5), ones(3, 5), ones(3, 5)
    assert f.run([x], [a, b])[1] is b
    whole = np.zeros(40, np.float32)
    frozen = np.zeros((3, 5), np.float32)
    frozen.flags.writeable = False
    for given, message in [
        ([a], "the model has 2 outputs, got 1 buffer"),
        ([a, a], "output v1 overlaps another buffer"),
        ([x, b], "output v0 overlaps another buffer"),
        ([whole[:15].reshape(3, 5), whole[10:25].reshape(3, 5)], "output v1 overlaps another buffer"),
        (
            [a, np.zeros((3, 5))],
            r"output v1: expected a writable contiguous array float32 \(3, 5\), got float64 \(3, 5\)",
        ),
        ([a, np.zeros((5, 3), np.float32).T], r"got float32 \(3, 5\) \(not contiguous\)"),
        ([a, frozen], r"got float32 \(3, 5\) \(read-only\)"),
        ([a, [[0.0]]], "got a list"),
    ]:
        with pytest.raises(dnnc.InputError, match=message):
            f.run([x], given)
    f.run([x], [whole[:15].reshape(3, 5), whole[15:30].reshape(3, 5)])  # neighbours do not overlap
    assert (whole[:15] == 1).all() and (whole[15:30] == -1).all() and (whole[30:] == 0).all()


def test_bind_takes_only_what_it_can_keep() -> None:
    f = compiled(SUM)
    x, y, out = ones(3, 5), ones(3, 5), ones(3, 5)
    call = f.bind({"y": y, "x": x}, [out])
    x[:], y[:] = 5, 6
    call()
    assert (out == 11).all()
    for wrong in ([[1.0] * 5] * 3, ones(5, 3).T):
        with pytest.raises(dnnc.InputError, match="input x: bind needs a contiguous array"):
            f.bind([wrong, y], [out])
        with pytest.raises(dnnc.InputError, match="input x: bind needs a contiguous array"):
            f.bind({"x": wrong, "y": y}, [out])


# --- programs ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_programs_and_plans_are_bounded() -> None:
    f = compiled(ROWS)
    for n in range(1, MAX_PROGRAMS + 5):
        assert f(ones(n, 4)).shape == (n, 4)
    assert len(f.programs) == MAX_PROGRAMS
    assert {id(b.program) for b in f.cache.instances.values()} == {
        id(n) for n in f.programs
    }  # what is dropped is not kept by its plans
    g = compiled(ROWS, dims={"N": (1, 2 * MAX_INSTANCES)})
    for n in range(1, MAX_INSTANCES + 9):
        assert g(ones(n, 4)).shape == (n, 4)
    assert len(g.programs) == 1 and len(g.cache.instances) == MAX_INSTANCES


@pytest.mark.slow
def test_sizes_at_which_a_value_is_empty_have_programs_of_their_own() -> None:
    g = parse(
        "N: dim[2, 64]\ndef g(x: f32[3, N]):\n    a = relu(slice(x, starts=(0, 2), steps=(1, 1), shape=(3, N - 2)))\n  "
        "  return reduce_sum(a, axes=(1,)), a"
    )
    f = dnnc.compile(g, dims={"N": (2, 64)}, cache=False)
    for n, programs in ((3, 1), (9, 1), (64, 1), (2, 2)):
        x = np.random.default_rng(n).standard_normal((3, n)).astype(np.float32)
        for got, want in zip(f(x), run(g, [x], "float64")):
            assert got.shape == want.shape and np.abs(got - want).max(initial=0) < 1e-5
        assert len(f.programs) == programs


@pytest.mark.slow
def test_a_size_that_a_window_does_not_fit_is_refused_at_the_call() -> None:
    f = compiled("def g(x: f32[1, 2, N], *, w: f32[16, 2, 5]):\n    return conv(x, w)", dims={"N": (4, 64)})
    assert f(ones(1, 2, 5)).shape == (1, 16, 1)
    with pytest.raises(dnnc.ShapeError, match=r"a window of 5 \(dilation 1\) does not fit into 4"):
        f(ones(1, 2, 4))
    assert f(ones(1, 2, 64)).shape == (1, 16, 60)


def test_a_cache_folder_that_cannot_be_written(tmp_path: Path) -> None:
    locked = tmp_path / "file"
    locked.write_text("not a folder")
    for folder in (locked / "below", tmp_path / "ro"):
        if folder.name == "ro":
            folder.mkdir()
            os.chmod(folder, 0o500)
        f = compiled(SUM, cache=folder)
        assert (f(ones(3, 5), ones(3, 5)) == 2).all()
        assert f.programs[0].compiled == 1


# --- whole models against the interpreter -----------------------------------------------------------------------------

NET = """def g(x: f32[4, 8], i: i64[3], *, w: f32[8, 20], e: f32[1, 6]):
    h = relu(matmul(x, w))
    return softmax(h), gather(e, i, axis=0)"""


@pytest.mark.parametrize("verify", [False, "kernels", "model"])
def test_verify(verify: Any) -> None:
    f = compiled(NET, verify=verify)
    x, i = ones(4, 8), np.zeros(3, np.int64)
    for got, want in zip(f(x, i), run(graph_of(NET), [x, i], "float64")):
        assert np.abs(got - want).max() < 1e-6


@pytest.mark.slow
def test_verify_model_names_the_output_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = ConstantBlock.block

    def spoiled(constants: ConstantBlock) -> Any:
        block = usual(constants)
        block.view(np.float32)[:] = 1
        return block

    monkeypatch.setattr(ConstantBlock, "block", spoiled)
    compiled(NET, verify="kernels")  # the kernels are right, their weights are not
    with pytest.raises(
        dnnc.AccuracyError, match=r"output v1 of the compiled model is off: element .* the float64 reference says"
    ):
        compiled(NET, verify="model")


def test_verify_model_looks_at_each_new_program(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        "dnnc.compile_program.check_model",
        lambda call, graph, dims, names, asked: seen.append({v.name: n for v, n in dims.items()}),
    )
    f = compiled(ROWS, verify="model")
    f(ones(3, 4)), f(ones(5, 4)), f(ones(3, 4))
    assert seen == [{"N": 3}, {"N": 5}]


def test_what_rounding_explains_is_no_difference() -> None:
    g = parse(
        "def g(x: f32[4, 64]):\n    s = reduce_sum(x, axes=(1,))\n    return s, floor(mul(s, 1000.0)), argmax(x, "
        "axis=1)"
    )
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    good = run(g, [x])
    assert first_difference(g, [x], good) is None
    for k, delta in ((0, 1e-2), (2, 1)):
        bad = [a.copy() for a in good]
        bad[k][1] += delta
        found = first_difference(g, [x], bad)
        assert found is not None and found[0] == k and "element (1,)" in found[1]
    short = [good[0][:2], *good[1:]]
    assert first_difference(g, [x], short) == (0, "float32[2] where f32[4] was expected")


def test_check_model_takes_indices_that_fit() -> None:
    g = parse("def g(x: f32[1, 3], i: i64[2]):\n    return gather(x, i, axis=0)")
    check_model(lambda x, i: x[i], g, {}, ["y"])
    with pytest.raises(dnnc.AccuracyError, match="output y of the compiled model is off"):
        check_model(lambda x, i: x[i] + 1, g, {}, ["y"])


@pytest.mark.family("cases")
@pytest.mark.parametrize(
    ("expression", "terms"),
    [
        ("matmul(x, w)", 24),
        ("conv(reshape(x, shape=(1, 4, 24)), reshape(w, shape=(6, 4, 5)))", 20),
        ("reduce_mean(x, axes=(0, 1))", 96),
        ("softmax(x)", 24),
        ("cumsum(x, axis=0)", 24),
        ("relu(x)", 1),
    ],
)
def test_longest_reduction(expression: str, terms: int) -> None:
    assert longest_reduction(parse(f"def g(x: f32[4, 24], w: f32[24, 5]):\n    return {expression}"), {}) == terms
