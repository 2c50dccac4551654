"""Random operators: known answers of the generator, distributions, and that draws depend on the key alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from against import feeds, node_model, run_dnnc
from onnx import TensorProto, helper

import dnnc
from dnnc.ir.ops.random import philox

I32, I64, DOUBLE = TensorProto.INT32, TensorProto.INT64, TensorProto.DOUBLE


def draw(
    op: str,
    inputs: list[Any] | None = None,
    outputs: int = 1,
    kinds: dict[int, int] | None = None,
    threads: int = 1,
    **attrs: Any,
) -> Any:
    made = run_dnnc(
        node_model(op, inputs or [], outputs, "", kinds=kinds, **attrs), feeds(inputs or []), threads=threads
    )
    return made[0] if outputs == 1 else made


def test_known_answers() -> None:
    """Of Random123's kat_vectors for philox4x32-10."""
    words = philox(np.zeros((1, 4), np.uint32), np.zeros(2, np.uint32))
    assert [hex(w) for w in words[0].tolist()] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]
    ones = np.full((1, 4), 0xFFFFFFFF, np.uint32)
    assert [hex(w) for w in philox(ones, ones[0, :2])[0].tolist()] == [
        "0x408f276d",
        "0x41c83b0e",
        "0xa20bc7c6",
        "0x6d5451fd",
    ]
    digits = np.array([[0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]], np.uint32)
    key = np.array([0xA4093822, 0x299F31D0], np.uint32)
    assert [hex(w) for w in philox(digits, key)[0].tolist()] == ["0xd16cfe09", "0x94fdcceb", "0x5001e420", "0x24126ea1"]


@pytest.mark.slow
def test_uniform() -> None:
    y = draw("RandomUniform", shape=[300, 200], low=2.0, high=5.0, seed=1.0)
    assert y.dtype == np.float32 and y.min() >= 2 and y.max() <= 5
    counts = np.histogram(y, 30, (2, 5))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 70  # chi-square of 29 degrees: exceeded once in 30,000 times
    assert np.array_equal(y, draw("RandomUniform", shape=[300, 200], low=2.0, high=5.0, seed=1.0, threads=2))
    other = draw("RandomUniform", shape=[300, 200], low=2.0, high=5.0, seed=2.0)
    assert abs(np.corrcoef(y.ravel(), other.ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(y.ravel()[1:], y.ravel()[:-1])[0, 1]) < 0.02


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT, DOUBLE, TensorProto.FLOAT16])
def test_normal(dtype: int) -> None:
    y = draw("RandomNormal", kinds={0: dtype}, shape=[200, 200], mean=3.0, scale=2.0, seed=4.0, dtype=dtype)
    assert y.dtype == helper.tensor_dtype_to_np_dtype(dtype)
    z = (np.sort(y.astype(np.float64).ravel()) - 3) / 2
    assert (
        abs(z.mean()) < 0.02 and abs(z.std() - 1) < 0.02 and abs((z**3).mean()) < 0.06 and abs((z**4).mean() - 3) < 0.15
    )


def test_like() -> None:
    x = np.zeros((40, 50), np.float64)
    assert draw("RandomNormalLike", [x], kinds={0: DOUBLE}).dtype == np.float64
    assert draw("RandomUniformLike", [x], kinds={0: TensorProto.FLOAT}, dtype=TensorProto.FLOAT).shape == (40, 50)
    whole = np.zeros((40, 50), np.int64)
    y = draw("RandomUniformLike", [whole], dtype=TensorProto.FLOAT)
    assert 0.45 < y.mean() < 0.55


def test_bernoulli() -> None:
    p = np.repeat(np.array([0.0, 0.1, 0.5, 1.0], np.float32)[:, None], 20000, 1)
    y = draw("Bernoulli", [p], kinds={0: I32}, dtype=I32)
    assert y.dtype == np.int32 and set(np.unique(y)) == {0, 1}
    assert y[0].sum() == 0 and y[3].all() and abs(y[1].mean() - 0.1) < 0.01 and abs(y[2].mean() - 0.5) < 0.015


def test_multinomial() -> None:
    weights = np.array([[1, 2, 5], [1e-30, 1, 1]], np.float32)
    y = draw("Multinomial", [np.log(weights)], kinds={0: I64}, sample_size=20000, dtype=I64)
    assert y.shape == (2, 20000) and y.dtype == np.int64
    np.testing.assert_allclose(np.bincount(y[0], minlength=3) / 20000, [1 / 8, 2 / 8, 5 / 8], atol=0.015)
    assert set(y[1]) == {1, 2}


def dropout_model(seed: int | None) -> onnx.ModelProto:
    attrs = {} if seed is None else {"seed": seed}
    node = helper.make_node("Dropout", ["x", "r", "t"], ["y", "m"], **attrs)
    held = [
        onnx.numpy_helper.from_array(np.array(0.25, np.float32), "r"),
        onnx.numpy_helper.from_array(np.array(True), "t"),
    ]
    info = helper.make_tensor_value_info
    outputs = [info("y", TensorProto.FLOAT, None), info("m", TensorProto.BOOL, None)]
    graph = helper.make_graph([node], "g", [info("x", TensorProto.FLOAT, [100, 100])], outputs, held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def test_dropout_in_training() -> None:
    x = np.random.default_rng(0).standard_normal((100, 100)).astype(np.float32)
    y, kept = run_dnnc(dropout_model(None), {"x": x})
    assert abs(kept.mean() - 0.75) < 0.02
    np.testing.assert_allclose(y, np.where(kept, x / 0.75, 0), rtol=1e-6)
    _, seeded = run_dnnc(dropout_model(5), {"x": x})
    assert np.array_equal(seeded, np.random.RandomState(5).uniform(0, 1, x.shape) >= 0.25)


def test_draws_are_the_same_at_each_call_and_differ_between_nodes() -> None:
    nodes = [
        helper.make_node("RandomNormalLike", ["x"], [f"y{k}"], **({"seed": 1.0} if k > 1 else {})) for k in range(4)
    ]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "g", [info("x", TensorProto.FLOAT, [64])], [info(f"y{k}", TensorProto.FLOAT, [64]) for k in range(4)]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=8)
    f = dnnc.compile(model, cache=False, verify=False)
    x = np.zeros(64, np.float32)
    first, second = f(x), f(x)
    assert all(np.array_equal(a, b) for a, b in zip(first, second))
    assert not np.array_equal(first[0], first[1]) and not np.array_equal(first[0], first[2])
    assert np.array_equal(first[2], first[3])  # equal seeds


def test_without_a_shape_in_numbers() -> None:
    node = helper.make_node("RandomUniformLike", ["x"], ["y"])
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node], "g", [info("x", TensorProto.FLOAT, ["n", 3])], [info("y", TensorProto.FLOAT, ["n", 3])]
    )
    f = dnnc.compile(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=8), cache=False, verify=False
    )
    long, short = (f(np.zeros((n, 3), np.float32)) for n in (9, 4))
    assert np.array_equal(long[:4], short) and len(np.unique(long)) == 27
