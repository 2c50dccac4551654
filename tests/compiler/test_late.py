"""Models compiled at the call: inputs that are shapes, sizes that only numbers show to be equal."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import onnx.parser
import pytest

import dnnc
from dnnc.executable import Executable
from dnnc.import_cache import MAX_VARIANTS

RESHAPE = """<ir_version: 8, opset_import: ["": 17]>
m (float[A, B] x, int64[R] shape) => (float[C, D] y, float[E, F] z) {
    r = Relu (x)
    y = Reshape (r, shape)
    z = Neg (r)
}"""
TWO = """<ir_version: 8, opset_import: ["": 17]>
m (float[N] x, int64[2] a, int64[2] b) => (float[P, Q] y) {
    r = Reshape (x, a)
    y = Expand (r, b)
}"""
X = np.arange(-6, 6, dtype=np.float32).reshape(3, 4)


def late(text: str, **options: Any) -> Executable:
    f = dnnc.compile(onnx.parser.parse_model(text), **{"cache": False, **options})
    assert f.deferred
    return f


def shape(*dims: int) -> Any:
    return np.array(dims, np.int64)


@pytest.mark.parametrize("target", ["llvm", "reference"])
def test_a_shape_that_is_an_input(target: str) -> None:
    f = late(RESHAPE, target=target)
    assert [(s.name, s.dtype) for s in f.inputs] == [("x", "float32"), ("shape", "int64")]
    assert [s.name for s in f.outputs] == ["y", "z"] and f.variants == []
    for want in ((4, 3), (2, 6), (12, 1), (4, 3)):
        y, z = f(X, shape(*want))
        np.testing.assert_array_equal(y, np.maximum(X, 0).reshape(want))
        np.testing.assert_array_equal(z, -np.maximum(X, 0))
    assert len(f.variants) == 3
    assert f.outputs[1].shape == (3, 4)


def test_a_wildcard_in_the_contents() -> None:
    f = late(RESHAPE)
    assert f(X, shape(2, -1))[0].shape == (2, 6)
    assert f(X, shape(0, 2, 2))[0].shape == (3, 2, 2)  # 0 keeps a size; the rank is the contents', too


def test_positions_names_and_dicts() -> None:
    f = late(RESHAPE)
    for got in (
        f(X, shape=shape(4, 3)),
        f(shape=shape(4, 3), x=X),
        f({"x": X, "shape": [4, 3]}),
        f.run([X, shape(4, 3)]),
    ):
        np.testing.assert_array_equal(got[0], np.maximum(X, 0).reshape(4, 3))
    assert len(f.variants) == 1
    out = [np.empty((4, 3), np.float32), np.empty((3, 4), np.float32)]
    assert f.run({"x": X, "shape": shape(4, 3)}, out)[0] is out[0] and out[0][3, 2] == 5


@pytest.mark.parametrize(
    ("args", "named", "message"),
    [
        ((X,), {}, "the model has the inputs x, shape; given are x"),
        ((X,), {"shpae": shape(4, 3)}, "given are x, shpae"),
        ((X, shape(4, 3)), {"x": X}, "the model has the inputs x, shape"),
        ((X.astype(np.float64), shape(4, 3)), {}, "input x: expected float32, got float64"),
        ((X, np.array([4.0, 3.0])), {}, "input shape: expected int64, got float64"),
        ((X[0], shape(4, 3)), {}, "input x: expected 2 dimensions"),
    ],
)
def test_refused_arguments(args: tuple[Any, ...], named: dict[str, Any], message: str) -> None:
    with pytest.raises(dnnc.InputError, match=message):
        late(RESHAPE)(*args, **named)


def test_contents_that_do_not_fit_are_an_error_each_time() -> None:
    f = late(RESHAPE)
    for _ in range(2):
        with pytest.raises(dnnc.DnncError, match=r"(?i)reshape"):
            f(X, shape(5, 3))
    assert f(X, shape(4, 3))[0].shape == (4, 3)


def test_contents_of_several_inputs() -> None:
    f = late(TWO)
    x = np.arange(3, dtype=np.float32)
    np.testing.assert_array_equal(f(x, shape(3, 1), shape(3, 4)), np.repeat(x[:, None], 4, 1))
    np.testing.assert_array_equal(f(x, shape(1, 3), shape(2, 3)), np.repeat(x[None], 2, 0))
    assert len(f.variants) == 2


def test_programs_are_bounded() -> None:
    f = late(RESHAPE, target="reference")
    for n in range(1, MAX_VARIANTS + 4):
        assert f(np.ones((n, 2), np.float32), shape(2, n))[0].shape == (2, n)
    assert len(f.variants) == MAX_VARIANTS


@pytest.mark.slow
def test_threads_share_programs() -> None:
    f = late(RESHAPE)
    wrong: list[int] = []

    def work(k: int) -> None:
        want = ((4, 3), (2, 6))[k % 2]
        for _ in range(40):
            if not np.array_equal(f(X, shape(*want))[0], np.maximum(X, 0).reshape(want)):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and len(f.variants) == 2
