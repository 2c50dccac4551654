"""Reading models that are broken, or that try to read what is not theirs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from dnnc.frontends.onnx import read, read_model
from dnnc.frontends.onnx.tensors import ONNX_NUMBERS, decode
from dnnc.ir.errors import ModelError, UnsupportedError
from dnnc.ir.graph import interp


def model(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, list[object]],
    outputs: list[str],
    initial: Sequence[TensorProto] = (),
    opset: int = 17,
    **more: object,
):
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in inputs.items()]
    outs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs]
    graph = helper.make_graph(nodes, "g", infos, outs, initial)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], **more)


def plain() -> onnx.ModelProto:
    return model([helper.make_node("Relu", ["x"], ["y"])], {"x": [2, 3]}, ["y"])


# --- what is no model -------------------------------------------------------------------------------------------------


def test_path_bytes_and_proto_give_the_same_graph(tmp_path: Path) -> None:
    m = plain()
    path = tmp_path / "m.onnx"
    path.write_bytes(m.SerializeToString())
    graphs = [read(path), read(str(path)), read(m.SerializeToString()), read(m)]
    assert len({g.structural_hash() for g in graphs}) == 1


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no file .*nothing\.onnx"):
        read(tmp_path / "nothing.onnx")


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a file"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "empty"), (b"import onnx\nprint('hello')\n", "text|no graph"), (b"\x00\xff\x13" * 99, "not an ONNX model")],
)
def test_other_content(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=message):
        read(path)


def test_every_truncation_is_a_model_error() -> None:
    w = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    data = model([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": [2, 4]}, ["y"], [w]).SerializeToString()
    for n in range(0, len(data) - 1, 3):
        with pytest.raises((ModelError, UnsupportedError)):
            read(data[:n])


def test_damaged_bytes_never_give_another_error() -> None:
    data = bytearray(plain().SerializeToString())
    rng = np.random.default_rng(0)
    for _ in range(300):
        broken = bytearray(data)
        for k in rng.integers(0, len(data), 2):
            broken[k] = rng.integers(0, 256)
        try:
            read(bytes(broken))
        except (ModelError, UnsupportedError):
            pass


def test_another_type() -> None:
    with pytest.raises(ModelError, match="got int"):
        read(7)


def test_no_opset() -> None:
    m = plain()
    del m.opset_import[:]
    with pytest.raises(ModelError, match="declares no opset"):
        read(m)


# --- tensors ----------------------------------------------------------------------------------------------------------

DTYPES = [n for n in ONNX_NUMBERS.values() if n != TensorProto.STRING]


@pytest.mark.parametrize("number", DTYPES, ids=TensorProto.DataType.Name)
@pytest.mark.parametrize("raw", [True, False], ids=["raw", "typed"])
def test_every_dtype_both_ways(number: int, raw: bool) -> None:
    dtype = helper.tensor_dtype_to_np_dtype(number)
    want = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    t = (
        numpy_helper.from_array(want, "t")
        if raw
        else helper.make_tensor("t", number, [2, 3], want.astype(np.float32 if want.dtype.kind == "V" else dtype))
    )
    got = decode(t)
    assert got.dtype == dtype and got.shape == (2, 3)
    np.testing.assert_array_equal(got.astype(np.complex128), want.astype(np.complex128))


@pytest.mark.parametrize("number", [TensorProto.INT4, TensorProto.INT2], ids=["int4", "int2"])
def test_packed_integers_keep_their_sign(number: int) -> None:
    dtype = helper.tensor_dtype_to_np_dtype(number)
    want = np.array([-2, -1, 0, 1, -2]).astype(dtype)
    np.testing.assert_array_equal(decode(numpy_helper.from_array(want, "t")).astype(np.int32), [-2, -1, 0, 1, -2])


def test_strings() -> None:
    assert decode(helper.make_tensor("t", TensorProto.STRING, [2], [b"a", "ü".encode()])).tolist() == ["a", "ü"]


@pytest.mark.parametrize("raw", [True, False])
def test_less_data_than_the_shape_says(raw: bool) -> None:
    t = helper.make_tensor("w", TensorProto.FLOAT, [2], np.ones(2, np.float32).tobytes() if raw else [1.0, 2.0], raw)
    t.dims[0] = 1 << 40
    with pytest.raises(ModelError, match=r"'w'.*need"):
        decode(t)


def test_a_negative_dim() -> None:
    t = helper.make_tensor("w", TensorProto.FLOAT, [2], [1.0, 2.0])
    t.dims[0] = -2
    with pytest.raises(ModelError, match=r"'w'.*negative"):
        decode(t)


def test_an_unknown_dtype() -> None:
    t = TensorProto(name="w", data_type=99)
    with pytest.raises(UnsupportedError, match=r"'w'.*99"):
        decode(t)


def test_sparse_initializer() -> None:
    values = numpy_helper.from_array(np.array([5.0, 7.0], np.float32), "w")
    for indices in (np.array([1, 5]), np.array([[0, 1], [1, 2]])):
        m = model([helper.make_node("Add", ["x", "w"], ["y"])], {"x": [2, 3]}, ["y"])
        m.graph.sparse_initializer.append(
            helper.make_sparse_tensor(values, numpy_helper.from_array(indices.astype(np.int64), "i"), [2, 3])
        )
        (y,) = interp.run(read(m), [np.zeros((2, 3), np.float32)])
        np.testing.assert_array_equal(y, [[0, 5, 0], [0, 0, 7]])


# --- external data ----------------------------------------------------------------------------------------------------


def external(location: str, shape: tuple[int, ...] = (2, 3), **entries: object) -> onnx.ModelProto:
    t = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
    for k, v in {"location": location, **entries}.items():
        t.external_data.add(key=k, value=str(v))
    return model([helper.make_node("Add", ["x", "w"], ["y"])], {"x": list(shape)}, ["y"], [t])


def saved(folder: Path, m: onnx.ModelProto) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "m.onnx"
    path.write_bytes(m.SerializeToString())
    return path


@pytest.mark.parametrize("shape", [(2, 3), (256, 256)], ids=["read", "mapped"])
def test_external_data(tmp_path: Path, shape: tuple[int, int]) -> None:
    w = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    path = saved(tmp_path / "a", external("sub/w.bin", shape, offset=4096, length=w.nbytes))
    (tmp_path / "a/sub").mkdir()
    (tmp_path / "a/sub/w.bin").write_bytes(b"\0" * 4096 + w.tobytes())
    (y,) = interp.run(read(path), [np.ones(shape, np.float32)])
    np.testing.assert_array_equal(y, w + 1)


def test_a_missing_external_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'w'.*'w\.bin'.*not there"):
        read(saved(tmp_path, external("w.bin")))


@pytest.mark.parametrize(
    "location", ["../secret", "sub/../../secret", "/etc/hostname", "", "..", "C:/secret", "a\0b", "sub\\..\\..\\secret"]
)
def test_paths_that_leave_the_folder(tmp_path: Path, location: str) -> None:
    (tmp_path / "secret").write_bytes(b"\0" * 24)
    with pytest.raises(ModelError, match="relative to the model's folder"):
        read(saved(tmp_path / "a", external(location)))


@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_links_that_leave_the_folder(tmp_path: Path, folder: bool) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/secret").write_bytes(b"\0" * 24)
    path = saved(tmp_path / "a", external("link/secret" if folder else "link"))
    os.symlink(tmp_path / ("out" if folder else "out/secret"), tmp_path / "a/link")
    with pytest.raises(ModelError, match="leads out"):
        read(path)


def test_a_link_loop(tmp_path: Path) -> None:
    path = saved(tmp_path, external("link"))
    os.symlink(tmp_path / "link", tmp_path / "link")
    with pytest.raises(ModelError, match="not there"):
        read(path)


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    path = saved(tmp_path, external("pipe"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelError, match="not a regular file"):
        read(path)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"offset": 8}, "truncated"),
        ({"length": 12}, "12"),
        ({"offset": "-8"}, "offset"),
        ({"length": "x"}, "length"),
        ({"offset": 1 << 62}, "truncated"),
    ],
)
def test_external_sizes(tmp_path: Path, entries: dict[str, object], message: str) -> None:
    (tmp_path / "w.bin").write_bytes(b"\0" * 24)
    with pytest.raises(ModelError, match=message):
        read(saved(tmp_path, external("w.bin", **entries)))


def test_external_data_of_a_model_given_as_bytes() -> None:
    with pytest.raises(ModelError, match="give the model's path"):
        read(external("w.bin").SerializeToString())


# --- graphs -----------------------------------------------------------------------------------------------------------


def test_names_that_are_no_identifiers() -> None:
    m = model([helper.make_node("Relu", ["input.1"], ["out/0"])], {"input.1": [2]}, ["out/0"])
    found = read_model(m)
    assert found.inputs == ("input.1",) and found.outputs == ("out/0",)
    assert [v.name for v in found.graph.inputs] == ["input_1"] and [v.name for v in found.graph.outputs] == ["out_0"]


def test_inputs_with_initializers_are_constants() -> None:
    w = numpy_helper.from_array(np.full(2, 3, np.float32), "w")
    g = read(model([helper.make_node("Add", ["x", "w"], ["y"])], {"x": [2], "w": [2]}, ["y"], [w]))
    assert [v.name for v in g.inputs] == ["x"]


def test_an_undefined_value() -> None:
    with pytest.raises(ModelError, match="no value 'z'"):
        read(model([helper.make_node("Add", ["x", "z"], ["y"], name="plus")], {"x": [2]}, ["y"]))


def test_a_cycle() -> None:
    nodes = [helper.make_node("Relu", ["b"], ["a"]), helper.make_node("Relu", ["a"], ["b"])]
    with pytest.raises(ModelError, match="no value 'b'"):
        read(model(nodes, {"x": [2]}, ["b"]))


def test_a_value_made_twice() -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Neg", ["x"], ["y"])]
    with pytest.raises(ModelError, match=r"'y'.*exists already"):
        read(model(nodes, {"x": [2]}, ["y"]))


@pytest.mark.parametrize(
    ("node", "opset", "message"),
    [
        (helper.make_node("Sofmax", ["x"], ["y"], name="n1"), 17, r"n1 \(Sofmax, opset 17\).*did you mean Softmax\?"),
        (helper.make_node("Gelu", ["x"], ["y"], name="n1"), 17, r"n1 \(Gelu, opset 17\).*opset 20"),
        (helper.make_node("Relu", ["x"], ["y"], domain="com.acme"), 17, "no opset of domain 'com.acme'"),
        (helper.make_node("Relu", ["x"], ["y"]), 99, "opset 99.*newer"),
    ],
)
def test_what_is_not_supported(node: onnx.NodeProto, opset: int, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read(model([node], {"x": [2]}, ["y"], opset=opset))


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (helper.make_node("Relu", ["x"], ["y"], alpha=1.0), "'alpha' does not exist"),
        (helper.make_node("Concat", ["x"], ["y"]), "'axis' is required"),
        (helper.make_node("Add", ["x"], ["y"]), "1 are given"),
        (helper.make_node("Softmax", ["x"], ["y"], axis=1.5), "attribute axis"),
    ],
)
def test_malformed_nodes(node: onnx.NodeProto, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(model([node], {"x": [2, 3]}, ["y"]))


# --- functions --------------------------------------------------------------------------------------------------------


def with_functions(nodes: list[onnx.NodeProto], functions: list[onnx.FunctionProto]) -> onnx.ModelProto:
    m = model(nodes, {"x": [2]}, ["y"], functions=functions)
    m.opset_import.append(helper.make_opsetid("local", 1))
    return m


def function(name: str, nodes: list[onnx.NodeProto], attributes: Sequence[str] = ()) -> onnx.FunctionProto:
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    return helper.make_function("local", name, ["a"], ["b"], nodes, imports, attributes)


def test_functions_of_the_model_are_inlined() -> None:
    leaky = helper.make_node("LeakyRelu", ["a"], ["t"])
    leaky.attribute.append(onnx.AttributeProto(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT))
    inner = function("Inner", [leaky, helper.make_node("Neg", ["t"], ["b"])], ["slope"])
    outer = function(
        "Outer",
        [helper.make_node("Inner", ["a"], ["t"], domain="local", slope=0.5), helper.make_node("Neg", ["t"], ["b"])],
    )
    g = read(with_functions([helper.make_node("Outer", ["x"], ["y"], domain="local")], [inner, outer]))
    (y,) = interp.run(g, [np.array([-2, 4], np.float32)])
    np.testing.assert_array_equal(y, [-1, 4])


def test_recursive_functions() -> None:
    a = function("A", [helper.make_node("B", ["a"], ["b"], domain="local")])
    b = function("B", [helper.make_node("A", ["a"], ["b"], domain="local")])
    with pytest.raises(ModelError, match="calls itself: local:A -> local:B -> local:A"):
        read(with_functions([helper.make_node("A", ["x"], ["y"], domain="local")], [a, b]))


def test_locations() -> None:
    g = read(model([helper.make_node("Relu", ["x"], ["y"], name="act")], {"x": [2]}, ["y"]))
    (node,) = g.nodes()
    assert str(node.locs[0]) == "act (Relu, opset 17)"
