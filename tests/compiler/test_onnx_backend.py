"""dnnc behind ONNX's own backend interface, driven by ONNX's own test runner."""

from __future__ import annotations

import unittest
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, parser
from onnx.backend.test import BackendTest

import dnnc.onnx_backend as backend
from dnnc.backends.cuda.device import device_problem
from dnnc.ir.errors import InputError, TargetError, UnsupportedError

MODEL = parser.parse_model(
    '<ir_version: 8, opset_import: ["" : 17]> g (float[2,3] x, float[3] b) => (float[2,3] y, float[2] s) { y = Add (x, '
    "b)  s = ReduceSum <keepdims=0> (y, one) }"
)
MODEL.graph.initializer.append(numpy_helper.from_array(np.array([1], np.int64), "one"))
X, B = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(3, np.float32)
CASES = [
    "relu",
    "conv_with_strides_padding",
    "split_equal_parts_1d_opset13",
    "softmax_axis_0",
    "cast_FLOAT_to_FLOAT16",
    "if",
    "add_bcast",
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy in the suite's own references
def test_cases_of_the_suite() -> None:
    tests = BackendTest(backend, __name__)
    for name in CASES:
        tests.include(f"^test_{name}_c")  # on the CPU and on CUDA
    result = unittest.TestResult()
    tests.test_suite.run(result)
    assert not result.errors and not result.failures, (result.errors + result.failures)[0][1]
    ran = result.testsRun - len(result.skipped)
    assert ran == len(CASES)  # those on CUDA are skipped: the device is not supported


def test_prepare_once_run_often() -> None:
    rep = backend.prepare(MODEL)
    for given in ([X, B], {"x": X, "b": B}):
        y, s = rep.run(given)
        np.testing.assert_array_equal(y, X + 1)
        np.testing.assert_array_equal(s, (X + 1).sum(1))
    with pytest.raises(InputError, match="has the inputs x, b; 1 are given"):
        rep.run([X])
    with pytest.raises(InputError, match="no options, got speed"):
        rep.run([X, B], speed=2)


def test_inputs_with_initializers_may_be_given_or_not() -> None:
    m = onnx.ModelProto()
    m.CopyFrom(MODEL)
    m.graph.initializer.append(numpy_helper.from_array(B, "b"))
    for given in ([X], [X, B], X, {"x": X}):
        np.testing.assert_array_equal(backend.run_model(m, given)[0], X + 1)


def test_bytes_and_options() -> None:
    (y, _) = backend.run_model(MODEL.SerializeToString(), [X, B], "CPU:0", target="reference")
    np.testing.assert_array_equal(y, X + 1)


@pytest.mark.slow
def test_run_node() -> None:
    (y,) = backend.run_node(helper.make_node("Clip", ["x", "", "high"], ["y"]), [X, np.array(2, np.float32)])
    np.testing.assert_array_equal(y, np.minimum(X, 2))
    node = helper.make_node("Softmax", ["x"], ["y"])
    new, old = (backend.run_node(node, [X.reshape(1, 2, 3)], **o)[0].sum() for o in ({}, {"opset_version": 1}))
    assert new == pytest.approx(2) and old == pytest.approx(1)  # opset 1 flattens from axis 1 on
    values, at = backend.run_node(helper.make_node("TopK", ["x", "k"], ["v", "i"]), [X, np.array([1], np.int64)])
    assert values.tolist() == [[2], [5]] and at.dtype == np.int64
    with pytest.raises(InputError, match="has the inputs x; 2 arrays are given"):
        backend.run_node(node, [X, X])


def test_devices() -> None:
    assert backend.supports_device("CPU") and backend.supports_device("CPU:0")
    assert (
        backend.supports_device("CUDA") == (not device_problem())
        and not backend.supports_device("")
        and not backend.supports_device("CUDA:x")
    )
    with pytest.raises(TargetError, match="device 'CUDA:99'"):
        backend.prepare(MODEL, "CUDA:99")


def test_compatibility() -> None:
    other: Any = onnx.ModelProto()
    other.CopyFrom(MODEL)
    other.graph.node[0].op_type = "Addd"
    assert (
        backend.is_compatible(MODEL)
        and not backend.is_compatible(other)
        and not backend.is_compatible(MODEL, "CUDA:99")
    )
    with pytest.raises(UnsupportedError, match="Addd"):
        backend.prepare(other)
