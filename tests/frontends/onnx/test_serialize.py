"""ONNX models taken apart to be saved: large tensors leave the protobuf and come back as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper as h
import pytest

from dnnc.frontends.onnx import read
from dnnc.frontends.onnx.serialize import KEPT_INSIDE, put_together, take_apart
from dnnc.ir.errors import ModelError

F32 = onnx.TensorProto.FLOAT
RNG = np.random.default_rng(0)


def tensor(name: str, *shape: int) -> onnx.TensorProto:
    return onnx.numpy_helper.from_array(RNG.standard_normal(shape).astype(np.float32), name)


def sparse(name: str) -> onnx.SparseTensorProto:
    indices = onnx.numpy_helper.from_array(np.arange(300, dtype=np.int64), "i")
    return h.make_sparse_tensor(tensor(name, 300), indices, [20, 20])


def value(name: str, *shape: int) -> onnx.ValueInfoProto:
    return h.make_tensor_value_info(name, F32, shape)


def model(external: Path | None = None) -> onnx.ModelProto:
    """Tensors as initializers, sparse ones, attributes, in a branch and in a function."""
    w = tensor("w", 20, 20)
    if external is not None:
        (external / "data.bin").write_bytes(b"front" + w.raw_data)
        w.ClearField("raw_data")
        w.data_location = onnx.TensorProto.EXTERNAL
        for key, entry in (("location", "data.bin"), ("offset", "5"), ("length", "1600")):
            w.external_data.add(key=key, value=entry)
    branch = h.make_graph(
        [h.make_node("Constant", [], ["b"], value=tensor("k", 20, 20))], "branch", [], [value("b", 20, 20)]
    )
    body = [
        h.make_node("Constant", [], ["c"], value=tensor("in function", 20, 20)),
        h.make_node("Add", ["x", "c"], ["y"]),
    ]
    function = h.make_function("own", "plus", ["x"], ["y"], body, [h.make_opsetid("", 17)])
    nodes = [
        h.make_node("MatMul", ["x", "w"], ["m"]),
        h.make_node("Add", ["m", "s"], ["n"]),
        h.make_node("Constant", [], ["t"], sparse_value=sparse("t values")),
        h.make_node("If", ["flag"], ["j"], then_branch=branch, else_branch=branch),
        h.make_node("plus", ["n"], ["p"], domain="own"),
        h.make_node("Sum", ["p", "t", "j", "tiny"], ["y"]),
    ]
    flag = onnx.numpy_helper.from_array(np.array(True), "flag")
    inputs, outputs = [value("x", 20, 20)], [value("y", 20, 20)]
    g = h.make_graph(nodes, "g", inputs, outputs, [w, flag, tensor("tiny", 1)], sparse_initializer=[sparse("s")])
    return h.make_model(
        g, opset_imports=[h.make_opsetid("", 17), h.make_opsetid("own", 1)], functions=[function], ir_version=9
    )


def test_every_large_tensor_leaves_and_comes_back() -> None:
    m = model()
    before = m.SerializeToString(deterministic=True)
    proto, data = take_apart(m)
    assert m.SerializeToString(deterministic=True) == before
    # w, s and t with their indices, the branch twice, the function
    assert sorted(a.nbytes for a in data) == [1200, 1200, 1600, 1600, 1600, 1600, 2400, 2400]
    assert len(proto) < sum(a.nbytes for a in data) / 3
    assert put_together(proto, data).SerializeToString(deterministic=True) == before


def test_small_tensors_stay() -> None:
    w = tensor("w", KEPT_INSIDE // 4 - 1)
    g = h.make_graph([h.make_node("Add", ["x", "w"], ["y"])], "g", [value("x", *w.dims)], [value("y", *w.dims)], [w])
    proto, data = take_apart(h.make_model(g, opset_imports=[h.make_opsetid("", 17)]))
    assert data == [] and w.raw_data in proto


def test_external_data_comes_along(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(model(tmp_path).SerializeToString())
    want = str(read(path))
    proto, data = take_apart(path)
    copies: list[Any] = [a.copy() for a in data]
    (tmp_path / "data.bin").unlink()
    assert str(read(put_together(proto, copies))) == want
    with pytest.raises(ModelError, match=r"data\.bin"):
        take_apart(path)


def test_parts_that_do_not_fit() -> None:
    proto, data = take_apart(model())
    with pytest.raises(ModelError, match="its data is said to be number 7 of 7"):
        put_together(proto, data[:-1])
    with pytest.raises(ModelError):
        put_together(proto[:-7], data)
