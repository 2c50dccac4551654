"""Wrong models, files and arrays: each is a DnncError that names the culprit, at little cost."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import dnnc
from dnnc import memory
from dnnc.ir.errors import ArtifactError, DnncError, InputError, ModelError, ShapeError, UnsupportedError
from support.times import in_a_quiet_round, quiet

HEAD = '<ir_version: 8, opset_import: ["" : 17]> '


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def model(text: str) -> onnx.ModelProto:
    return parser.parse_model(HEAD + text)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"a" * (8 << 20), "looks like text"),
        (bytes(8 << 20), "not an ONNX model"),
        (np.random.default_rng(0).bytes(1 << 20), "not an ONNX model"),
        (b"\x80\x04cos\nsystem\n(S'exit 1'\ntR.", "not an ONNX model|no graph"),  # a pickle
    ],
    ids=["empty", "text", "zeros", "random", "pickle"],
)
def test_other_files(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(data)
    with pytest.raises(ModelError, match=message):
        dnnc.compile(tmp_path / "m.onnx", cache=False)
    with pytest.raises(ArtifactError, match=r"m\.onnx is not a saved model"):
        dnnc.load(tmp_path / "m.onnx")


def test_files_that_are_too_large_for_a_protobuf(tmp_path: Path) -> None:
    with open(tmp_path / "m.onnx", "wb") as f:
        f.truncate(5 << 30)  # no bytes on disk
    with pytest.raises(ModelError, match="5368709120 bytes; a protobuf has less"):
        dnnc.compile(tmp_path / "m.onnx", cache=False)


@pytest.mark.parametrize("path", ["a" * 5000, "a\0b", "/dev/zero", "/", "/proc/self/mem"])
def test_paths(path: str) -> None:
    with pytest.raises(ModelError):
        dnnc.compile(path, cache=False)
    with pytest.raises(ArtifactError):
        dnnc.load(path)


def test_a_name_that_is_nearly_right(tmp_path: Path) -> None:
    (tmp_path / "digits.onnx").touch()
    with pytest.raises(ModelError, match=r"there is no file .*digit\.onnx; did you mean .*digits\.onnx\?"):
        dnnc.compile(tmp_path / "digit.onnx")
    with pytest.raises(ModelError, match=r"there is no file \S*$"):
        dnnc.compile(tmp_path / "other.onnx")


@pytest.mark.parametrize("other", [None, 0, b"\xff\0", ["m"], object()])
def test_what_is_no_path(other: Any) -> None:
    with pytest.raises((InputError, ModelError)):
        dnnc.compile(other, cache=False)
    with pytest.raises(ArtifactError):
        dnnc.load(other)


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "g (float[1] x) => (float[a,b] y) <int64[2] s={4000000,3000000}> { y = Expand(x, s) }",
            r"4\.8e\+04 GB.*output y \[4000000, 3000000\]",
        ),
        (
            "g (float[1] x) => (float[a,b] y) <int64[2] s={4000000,3000000}> { e = ConstantOfShape(s) y = Add(e, x) }",
            "output y",
        ),
        (
            "g (float[1] x) => (float[a,b] y) <int64[2] s={4611686018427387904,4611686018427387904}> { y = Expand(x, "
            "s) }",
            "more elements than an array",
        ),
        (
            "g (float[3] x) => (float[a] y) <int64[2] p={0,4611686018427387904}> { y = Pad(x, p) }",
            "more elements than an array",
        ),
        (
            "g (float[1,1,3,3] x, float[1,1,1,1] w) => (float[a,b,c,d] y) { y = Conv<pads=[0,0,1000000,1000000]>(x, w) "
            "}",
            "output y",
        ),
        ("g (float[1099511627776] x) => (float[a] y) <int64[1] z={0}> { y = ReduceMax(x) }", "input x"),
        (
            "g (int64[1] x) => (int64[a] y) <int64 a={0}, int64 b={4000000000000}, int64 c={1}> { r = Range(a, b, c) y "
            "= Add(r, x) }",
            "4000000000000 elements",
        ),
    ],
    ids=["expand", "constant", "overflow", "pad", "conv", "input", "range"],
)
@in_a_quiet_round
def test_more_than_there_is_memory(text: str, message: str, cache: Path) -> None:
    start = time.perf_counter()
    with pytest.raises(DnncError, match=message):
        dnnc.compile(model(text), cache=cache)
    quiet(time.perf_counter() - start < 5)


def test_the_limit_is_that_of_the_process(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    f = dnnc.compile(model("g (float[N] x) => (float[N,M] y) <int64[2] s={1,1048576}> { u = Unsqueeze(x, one) y = "
                           "Expand(u, s) }".replace(
        "<int64[2] s", "<int64[1] one={1}, int64[2] s")), cache=cache)  # fmt: skip
    monkeypatch.setattr(memory, "memory", lambda: 1 << 29)
    assert f(np.ones(2, np.float32)).shape == (2, 1 << 20)
    with pytest.raises(InputError, match=r"needs .* GB of memory, this machine has 0\.537 GB: output"):
        f(np.ones(200, np.float32))


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("g (float[3] x) => (float[a] y) <int64[1] s={-2}> { y = Tile(x, s) }", ShapeError, "Tile.*negative"),
        (
            "g (float[3] x) => (float[a] y, float[b] z) <int64[2] s={-1,4}> { y, z = Split(x, s) }",
            ModelError,
            r"Split.*\[-1, 4\].*negative",
        ),
        (
            "g (float[3] x) => (float[a] y, float[b] z) <int64[2] s={1,1}> { y, z = Split(x, s) }",
            ModelError,
            "Split.*do not add up to 3",
        ),
        ("g (float[3] x) => (float[a] y) { y = Softmax<axis=2>(x) }", ShapeError, "axis 2"),
        ("g (float[2,3] x) => (float[a,b] y) { y = Transpose<perm=[0,0]>(x) }", DnncError, "Transpose"),
        ("g (float[2,3] x) => (float[a,b] y) <int64[2] s={4,2}> { y = Reshape(x, s) }", ShapeError, "Reshape"),
        ("g (float[2,3] x, float[4,5] z) => (float[a,b] y) { y = MatMul(x, z) }", ShapeError, "MatMul"),
        ("g (float[2,3] x, int64[2,3] z) => (float[a,b] y) { y = Add(x, z) }", DnncError, "Add"),
        ("g (float[3] x) => (float[3] y) { y = com.acme.Thing(x) }", UnsupportedError, "com.acme"),
    ],
)
def test_nodes_that_do_not_fit(text: str, error: type[DnncError], message: str, cache: Path) -> None:
    with pytest.raises(error, match=message):
        dnnc.compile(model(text), cache=cache)


@pytest.mark.parametrize("dims", [[-1], [1 << 62, 1 << 62], [1 << 40], [(1 << 63) - 1]])
@pytest.mark.parametrize("raw", [True, False])
def test_dims_of_initializers(dims: list[int], raw: bool) -> None:
    t = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=dims)
    if raw:
        t.raw_data = b"\0" * 8
    else:
        t.float_data.extend([0, 0])
    m = model("g (float[2] x) => (float[2] y) { y = Add(x, w) }".replace("w)", "x)"))
    m.graph.node[0].input[1] = "w"
    m.graph.initializer.append(t)
    with pytest.raises(ModelError, match=r"'w'.*(negative|need)"):
        dnnc.compile(m, cache=False)


@in_a_quiet_round
def test_functions_that_call_each_other_deeply() -> None:
    """30 functions, each of which calls the one before twice: 2^30 nodes when inlined."""
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    functions = [helper.make_function("local", "f0", ["a"], ["b"], [helper.make_node("Neg", ["a"], ["b"])], imports)]
    for k in range(1, 31):
        nodes = [helper.make_node(f"f{k - 1}", [a], [b], domain="local") for a, b in (("a", "t"), ("t", "b"))]
        functions.append(helper.make_function("local", f"f{k}", ["a"], ["b"], nodes, imports))
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xy"]
    graph = helper.make_graph([helper.make_node("f30", ["x"], ["y"], domain="local")], "g", info[:1], info[1:])
    start = time.perf_counter()
    with pytest.raises(ModelError, match=r"functions.*nodes"):
        dnnc.compile(helper.make_model(graph, functions=functions, opset_imports=imports), cache=False)
    quiet(time.perf_counter() - start < 10)


# --- indices ----------------------------------------------------------------------------------------------------------

INDEXED = {
    "Gather": ("int64[2] i", "Gather(x, i)"),
    "GatherElements": ("int64[2] i", "GatherElements(x, i)"),
    "GatherND": ("int64[2,1] i", "GatherND(x, i)"),
    "ScatterElements": ("int64[2] i, float[2] u", "ScatterElements(x, i, u)"),
    "ScatterND": ("int64[2,1] i, float[2] u", "ScatterND(x, i, u)"),
    "adding": ("int64[2] i, float[2] u", 'ScatterElements<reduction="add">(x, i, u)'),
}


@pytest.mark.parametrize("name", INDEXED)
def test_indices_out_of_range_at_run_time(name: str, cache: Path) -> None:
    inputs, call = INDEXED[name]
    f = dnnc.compile(model(f"g (float[3] x, {inputs}) => (float[k] result) {{ result = {call} }}"), cache=cache)
    x, u = np.arange(3, dtype=np.float32), [np.full(2, 7, np.float32)] * ("u" in inputs)
    shape = (2, 1) if "ND" in name else (2,)
    for bad in (3, -4, 1 << 40, -(1 << 63)):
        with pytest.raises(
            InputError,
            match=rf"outside of its axis.*{'Scatter' if u else 'Gather'}.*check the values of integer inputs",
        ):
            f(x, np.array([0, bad]).reshape(shape), *u)
    got = f(x, np.array([-3, 2]).reshape(shape), *u)  # the executable still works, and negative ones count from the end
    if not u:
        np.testing.assert_array_equal(got, [0, 2])
    else:
        np.testing.assert_array_equal(got, [7, 1, 9] if name == "adding" else [7, 1, 7])


@pytest.mark.parametrize("name", ["Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND"])
@pytest.mark.parametrize("bad", [3, -4, 1 << 40])
def test_constant_indices_out_of_range(name: str, bad: int) -> None:
    inputs, call = INDEXED[name]
    m = model(f"g (float[3] x, {inputs}) => (float[k] y) {{ y = {call} }}")
    del m.graph.input[1]
    m.graph.initializer.append(
        numpy_helper.from_array(np.array([0, bad]).reshape((2, 1) if "ND" in name else (2,)), "i")
    )
    with pytest.raises(
        ModelError,
        match=rf"node y \({name}, opset 17\): index {bad} lies outside of axis 0 of f32\[3\]; expected -3 to 2",
    ):
        dnnc.compile(m, cache=False)


def test_slices_are_clamped_as_the_standard_says(cache: Path) -> None:
    m = model(
        "g (float[5] x) => (float[a] y) <int64[1] s={-100}, int64[1] e={9223372036854775807}, int64[1] z={0}, int64[1] "
        "t={2}> { y = Slice(x, s, e, z, t) }"
    )
    np.testing.assert_array_equal(dnnc.compile(m, cache=cache)(np.arange(5, dtype=np.float32)), [0, 2, 4])


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        np.ones((2, 3)),
        np.ones((3, 2), np.float32),
        np.ones(6, np.float32),
        np.ones((2, 3), ">f4"),
        "abc",
        None,
        [[1, 2], [3]],
        object(),
    ],
)
def test_arrays_that_do_not_fit(given: Any, cache: Path) -> None:
    f = dnnc.compile(model("g (float[2,3] image) => (float[2,3] y) { y = Neg(image) }"), cache=cache)
    with pytest.raises(InputError, match="image"):
        f(given)
    with pytest.raises(InputError, match="no input 'imago'; its inputs are image"):
        f(imago=np.ones((2, 3), np.float32))
    for args in ((), (np.ones((2, 3), np.float32),) * 2):
        with pytest.raises(InputError, match=r"1 input \(image\), got (0|2) arrays"):
            f(*args)


@pytest.mark.parametrize(
    "shape", ["1, 4611686018427387904, 0, 4", "0, 4611686018427387904", "4611686018427387904, 4611686018427387904"]
)
def test_a_shape_that_no_array_has(shape: str) -> None:
    with pytest.raises(DnncError, match=r"more elements than an array can have|too large|needs .* of memory"):
        dnnc.compile(model(f"m (float[{shape}] x) => (float[{shape}] y) {{ y = Neg (x) }}"), cache=False)
