"""Linear models, support vectors, encodings and maps of ai.onnx.ml, against ONNX Runtime on random inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from against import both, compare, feeds, node_model, ours, run_dnnc, run_ort, words
from onnx import TensorProto

from dnnc.ir.errors import DnncError, ModelError

pytestmark = pytest.mark.family("cases")

RNG = np.random.default_rng(3)
I64, STRING = TensorProto.INT64, TensorProto.STRING
MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")


def f(*shape: int) -> Any:
    return np.asarray(RNG.standard_normal(shape), np.float32)


# --- linear models ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("transform", ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO"])
def test_linear(transform: str) -> None:
    x = f(7, 4)
    weights, offsets = f(12).tolist(), f(3).tolist()
    both("LinearRegressor", [x], coefficients=weights, intercepts=offsets, targets=3, post_transform=transform)
    three = {"coefficients": weights, "intercepts": offsets, "classlabels_ints": [4, 5, 6]}
    both("LinearClassifier", [x], 2, kinds={0: I64}, post_transform=transform, multi_class=1, **three)
    two = {"coefficients": weights[:8], "intercepts": offsets[:2], "classlabels_strings": ["no", "yes"]}
    both("LinearClassifier", [x], 2, kinds={0: STRING}, post_transform=transform, **two)
    both("LinearRegressor", [x], coefficients=weights[:4], intercepts=[0.25])


def test_linear_with_one_row_for_two_classes() -> None:
    attrs = {"coefficients": f(4).tolist(), "intercepts": [0.1], "classlabels_ints": [0, 1]}
    both("LinearClassifier", [f(9, 4)], 2, kinds={0: I64}, post_transform="LOGISTIC", **attrs)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["LINEAR", "POLY", "RBF", "SIGMOID"])
def test_support_vectors(kernel: str) -> None:
    x = f(7, 4)
    base = {"kernel_type": kernel, "kernel_params": [0.3, 0.2, 3.0]}
    both(
        "SVMRegressor", [x], n_supports=5, support_vectors=f(20).tolist(), coefficients=f(5).tolist(), rho=[0.2], **base
    )
    both(
        "SVMRegressor",
        [x],
        n_supports=5,
        support_vectors=f(20).tolist(),
        coefficients=f(5).tolist(),
        rho=[0.2],
        one_class=1,
        **base,
    )
    three = {
        "vectors_per_class": [2, 1, 3],
        "support_vectors": f(24).tolist(),
        "coefficients": f(12).tolist(),
        "rho": f(3).tolist(),
    }
    both("SVMClassifier", [x], 2, kinds={0: I64}, classlabels_ints=[3, 1, 2], **three, **base)
    two = {"vectors_per_class": [2, 3], "support_vectors": f(20).tolist(), "coefficients": f(5).tolist(), "rho": [0.1]}
    both("SVMClassifier", [x], 2, kinds={0: I64}, classlabels_ints=[0, 1], **two, **base)


@pytest.mark.slow
def test_support_vectors_with_probabilities() -> None:
    x = f(9, 4)
    base = {"kernel_type": "RBF", "kernel_params": [0.3, 0.0, 3.0]}
    two = {"vectors_per_class": [2, 3], "support_vectors": f(20).tolist(), "coefficients": f(5).tolist(), "rho": [0.1]}
    three = {
        "vectors_per_class": [2, 1, 3],
        "support_vectors": f(24).tolist(),
        "coefficients": f(12).tolist(),
        "rho": f(3).tolist(),
    }
    cases = (
        (STRING, {"classlabels_strings": ["a", "b"], "prob_a": [-1.5], "prob_b": [0.1], **two}),
        (I64, {"classlabels_ints": [0, 1, 2], "prob_a": [-1.5, -1.0, -2.0], "prob_b": [0.1, 0.0, 0.2], **three}),
    )
    for kind, attrs in cases:
        model = node_model("SVMClassifier", [x], 2, "ai.onnx.ml", 1, kinds={0: kind}, **attrs, **base)
        (label, score), (want_label, want) = run_dnnc(model, feeds([x])), run_ort(model, feeds([x]))
        assert label.tolist() == want_label.tolist()
        np.testing.assert_allclose(
            score, want, atol=0.005
        )  # an iteration that stops early there, the exact solution here
        np.testing.assert_allclose(score.sum(1), 1, atol=1e-5)


def test_linear_support_vectors() -> None:
    both(
        "SVMRegressor",
        [f(7, 4)],
        coefficients=f(4).tolist(),
        rho=[0.3],
        kernel_type="LINEAR",
        n_supports=0,
        kernel_params=[0.0, 0.0, 0.0],
    )
    both(
        "SVMClassifier",
        [f(7, 4)],
        2,
        kinds={0: I64},
        kernel_params=[0.0, 0.0, 0.0],
        coefficients=f(12).tolist(),
        rho=[0.3],
        kernel_type="LINEAR",
        classlabels_ints=[0, 1, 2],
    )


# --- encodings --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_element_by_element() -> None:
    x = f(5, 4)
    both("Binarizer", [x], threshold=0.25)
    both("Scaler", [x], offset=f(4).tolist(), scale=f(4).tolist())
    both("Scaler", [x], offset=[0.5], scale=[2.0])
    for norm in ("MAX", "L1", "L2"):
        y = x.copy()
        y[2] = 0
        both("Normalizer", [y], norm=norm)
    y = x.copy()
    y[1, 2] = np.nan
    both("Imputer", [y], imputed_value_floats=[7.0], replaced_value_float=float("nan"))
    both(
        "Imputer",
        [np.arange(12).reshape(3, 4)],
        kinds={0: I64},
        imputed_value_int64s=[7, 8, 9, 10],
        replaced_value_int64=5,
    )
    both("ArrayFeatureExtractor", [x, np.array([3, 0], np.int64)])
    both("ArrayFeatureExtractor", [x[0], np.array([1, 1, 2], np.int64)])
    both("FeatureVectorizer", [f(5, 2), f(5, 3)], inputdimensions=[2, 3])


def test_feature_vectorizer_cuts_and_fills_up() -> None:
    a, b = f(2, 3), f(2, 2)
    (got,) = ours("FeatureVectorizer", [a, b], opset=1, inputdimensions=[2, 4])
    assert np.array_equal(got, np.hstack([a[:, :2], b, np.zeros((2, 2))]).astype(np.float32))


@pytest.mark.slow
def test_labels_of_numbers() -> None:
    x = np.array([[3, 1], [7, -5]], np.int64)
    both("LabelEncoder", [x], keys_int64s=[1, 3, 9], values_floats=[0.5, 1.5, 2.5], default_float=-1.0)
    some = np.array([1.5, np.nan, -0.0, 9.0], np.float32)
    (got,) = ours("LabelEncoder", [some], kinds={0: I64}, keys_floats=[9.0, float("nan"), 0.0], values_int64s=[4, 5, 6])
    assert got.tolist() == [-1, 5, 6, 4]  # NaN is a key like any other
    keys = RNG.permutation(1000)
    both(
        "LabelEncoder",
        [RNG.integers(-5, 1005, 300)],
        kinds={0: I64},
        keys_int64s=keys.tolist(),
        values_int64s=RNG.integers(0, 99, 1000).tolist(),
    )
    (got,) = ours(
        "LabelEncoder",
        [np.array([1, 2, 2], np.int64)],
        kinds={0: I64},
        keys_int64s=[2, 1, 2],
        values_int64s=[10, 20, 30],
    )
    assert got.tolist() == [20, 30, 30]  # the last of equal keys counts


@pytest.mark.slow
def test_labels_of_words() -> None:
    x = words("b", "zz", "a")
    both("LabelEncoder", [x], kinds={0: I64}, keys_strings=["a", "b"], values_int64s=[10, 20], default_int64=-7)
    both("LabelEncoder", [x], kinds={0: STRING}, keys_strings=["a", "b"], values_strings=["x", "y"])
    both("LabelEncoder", [np.array([2, 5], np.int64)], kinds={0: STRING}, keys_int64s=[2], values_strings=["two"])
    both("LabelEncoder", [x], 1, 1, {0: I64}, classes_strings=["a", "b"], default_int64=-7)
    both(
        "LabelEncoder",
        [np.array([1, 4], np.int64)],
        1,
        1,
        {0: STRING},
        classes_strings=["a", "b"],
        default_string="none",
    )
    both("CategoryMapper", [x], 1, 1, {0: I64}, cats_strings=["a", "b"], cats_int64s=[7, 5], default_int64=-2)
    both(
        "CategoryMapper",
        [np.array([5, 6], np.int64)],
        1,
        1,
        {0: STRING},
        cats_strings=["a", "b"],
        cats_int64s=[7, 5],
        default_string="?",
    )


@pytest.mark.slow
def test_one_hot_encoder() -> None:
    both("OneHotEncoder", [np.array([[3, 1], [7, 5]], np.int64)], opset=1, cats_int64s=[7, 3, 1], zeros=1)
    both("OneHotEncoder", [np.array([3.0, 1.0], np.float32)], opset=1, cats_int64s=[7, 3, 1], zeros=0)
    both("OneHotEncoder", [words("b", "q")], opset=1, cats_strings=["a", "b"], zeros=1)
    with pytest.raises(DnncError, match="index"):
        ours("OneHotEncoder", [np.array([3, 4], np.int64)], opset=1, cats_int64s=[7, 3, 1], zeros=0)


@pytest.mark.slow
def test_lookup_of_many_sizes() -> None:
    from dnnc.ir.ops import OPS

    for n in (1, 2, 3, 7, 8, 9, 100):
        keys = np.sort(RNG.permutation(300)[:n])
        x = RNG.integers(-2, 302, 200)
        want = np.array([np.flatnonzero(keys == v)[0] if v in keys else -1 for v in x])
        assert np.array_equal(OPS["lookup"].reference(x, keys), want)
        (got,) = ours(
            "LabelEncoder",
            [x],
            kinds={0: I64},
            keys_int64s=keys.tolist(),
            values_int64s=list(range(n)),
            default_int64=-1,
        )
        assert np.array_equal(got, want)


# --- maps -------------------------------------------------------------------------------------------------------------


def map_model(op: str, key: int, value: int, out: int, **attrs: Any) -> Any:
    from onnx import helper

    node = helper.make_node(op, ["x"], ["y"], domain="ai.onnx.ml", **attrs)
    kind = helper.make_map_type_proto(key, helper.make_tensor_type_proto(value, []))
    graph = helper.make_graph(
        [node], "g", [helper.make_value_info("x", kind)], [helper.make_tensor_value_info("y", out, None)]
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("ai.onnx.ml", 3), helper.make_opsetid("", 17)], ir_version=8
    )


def test_zip_map() -> None:
    from onnx import helper

    x = f(3, 2)
    for keys in ({"classlabels_int64s": [10, 20]}, {"classlabels_strings": ["no", "yes"]}):
        key = I64 if "classlabels_int64s" in keys else STRING
        kind = helper.make_sequence_type_proto(
            helper.make_map_type_proto(key, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
        )
        node = helper.make_node("ZipMap", ["x"], ["y"], domain="ai.onnx.ml", **keys)
        info = helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 2])
        graph = helper.make_graph([node], "g", [info], [helper.make_value_info("y", kind)])
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("ai.onnx.ml", 3), helper.make_opsetid("", 17)], ir_version=8
        )
        assert run_dnnc(model, {"x": x})[0] == run_ort(model, {"x": x})[0]


def test_dict_vectorizer() -> None:
    model = map_model(
        "DictVectorizer", STRING, TensorProto.FLOAT, TensorProto.FLOAT, string_vocabulary=["a", "c", "b", "z"]
    )
    for given in ({"a": 4.0, "c": 8.0}, {"z": 1.5}, {"b": 2.0, "z": 1.0, "a": 9.0}):
        compare(run_dnnc(model, {"x": given})[0], run_ort(model, {"x": given})[0])
    with pytest.raises(ModelError, match="the key 'q'"):
        run_dnnc(model, {"x": {"q": 1.0}})


def test_cast_map() -> None:
    given = {7: 1.5, 2: 2.25, 4: -3.0}
    dense = map_model("CastMap", I64, TensorProto.FLOAT, TensorProto.FLOAT, map_form="DENSE", cast_to="TO_FLOAT")
    sparse = map_model("CastMap", I64, TensorProto.FLOAT, I64, map_form="SPARSE", cast_to="TO_INT64", max_map=9)
    for model in (dense, sparse):
        compare(run_dnnc(model, {"x": given})[0], run_ort(model, {"x": given})[0])
    words_ = map_model("CastMap", I64, STRING, TensorProto.FLOAT, map_form="SPARSE", cast_to="TO_FLOAT", max_map=9)
    (got,) = run_dnnc(words_, {"x": {k: str(v) for k, v in given.items()}})
    assert got.dtype == np.float32 and got.tolist() == [[0, 0, 2.25, 0, -3, 0, 0, 1.5, 0]]
    with pytest.raises(ModelError, match="max_map"):
        run_dnnc(sparse, {"x": {9: 1.0}})
