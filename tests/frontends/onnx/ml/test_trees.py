"""Trees of ai.onnx.ml: against ONNX Runtime on random inputs, against scikit-learn, and the words of the standard."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from against import both, compare, feeds, node_model, ours, run_dnnc, run_ort
from onnx import TensorProto

from dnnc.frontends.onnx.ml.trees import EQ, GT, GTE, LEAF, LEQ, LT, MEMBER, NEQ, Nodes, normal_form
from dnnc.ir.dtype import f32, f64
from dnnc.ir.errors import ModelError

RNG = np.random.default_rng(3)
I64, STRING = TensorProto.INT64, TensorProto.STRING
MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")


def f(*shape: int) -> Any:
    return np.asarray(RNG.standard_normal(shape), np.float32)


def forest(
    trees: int,
    depth: int,
    features: int,
    kind: str,
    classes: int,
    modes: tuple[str, ...] = MODES,
    several: bool = False,
) -> dict[str, Any]:
    """Attributes of random trees; inner nodes ask about small whole numbers, so that equality happens."""
    a: dict[str, list[Any]] = {
        f"nodes_{n}": []
        for n in (
            "treeids",
            "nodeids",
            "featureids",
            "values",
            "modes",
            "truenodeids",
            "falsenodeids",
            "missing_value_tracks_true",
        )
    }
    votes: dict[str, list[Any]] = {f"{kind}_{n}": [] for n in ("treeids", "nodeids", "ids", "weights")}
    for t in range(trees):
        rows: list[list[Any]] = []

        def grow(level: int, t: int = t, rows: list[list[Any]] = rows) -> int:
            at = len(rows)
            rows.append([])
            if level == depth or (level > 1 and RNG.random() < 0.2):
                rows[at] = [0, 0.0, "LEAF", 0, 0, 0]
                for k in RNG.permutation(classes)[: 1 + (several and int(RNG.integers(classes)))]:
                    for name, v in zip(votes, (t, at, int(k), float(RNG.standard_normal()))):
                        votes[name].append(v)
                return at
            yes, no = grow(level + 1), grow(level + 1)
            rows[at] = [
                int(RNG.integers(features)),
                float(RNG.integers(-2, 3)),
                str(RNG.choice(modes)),
                yes,
                no,
                int(RNG.integers(2)),
            ]
            return at

        grow(0)
        for at, row in enumerate(rows):
            for name, v in zip(a, (t, at, *row)):
                a[name].append(v)
    return {**a, **votes}


def table(rows: int, features: int) -> Any:
    x = RNG.integers(-3, 4, (rows, features)).astype(np.float32)
    x[RNG.random(x.shape) < 0.1] = np.nan
    return x


# ONNX Runtime follows the first mode for all nodes where NaN is concerned, so mixtures are tried without NaN
@pytest.mark.slow
@pytest.mark.family("cases")
@pytest.mark.parametrize("mode", [*MODES, "mixed"])
def test_regressor(mode: str) -> None:
    modes = MODES if mode == "mixed" else (mode,)
    x = table(40, 5)
    attrs = forest(7, 5, 5, "target", 2, modes, several=True)
    both(
        "TreeEnsembleRegressor",
        [np.nan_to_num(x) if mode == "mixed" else x],
        n_targets=2,
        base_values=[0.5, -1.0],
        **attrs,
    )


@pytest.mark.slow
@pytest.mark.family("cases")
@pytest.mark.parametrize("aggregate", ["SUM", "AVERAGE", "MIN", "MAX"])
@pytest.mark.parametrize("targets", [1, 3])
def test_regressor_aggregates(aggregate: str, targets: int) -> None:
    attrs = forest(6, 4, 4, "target", targets, ("BRANCH_LEQ",))
    both("TreeEnsembleRegressor", [table(20, 4)], n_targets=targets, aggregate_function=aggregate, **attrs)


@pytest.mark.slow
def test_regressor_in_double_precision() -> None:
    attrs = forest(5, 4, 4, "target", 1, ("BRANCH_LEQ",))
    x = table(20, 4).astype(np.float64)
    values, weights = (np.array(attrs.pop(n), np.float64) for n in ("nodes_values", "target_weights"))
    import onnx

    tensors = {"nodes_values_as_tensor": values + 1e-12, "target_weights_as_tensor": weights}
    both(
        "TreeEnsembleRegressor",
        [x],
        n_targets=1,
        **attrs,
        **{k: onnx.numpy_helper.from_array(v) for k, v in tensors.items()},
    )


@pytest.mark.slow
@pytest.mark.family("cases")
@pytest.mark.parametrize("transform", ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO"])
def test_classifier_of_three(transform: str) -> None:
    attrs = forest(6, 4, 4, "class", 3, ("BRANCH_LEQ",), several=True)
    both(
        "TreeEnsembleClassifier",
        [table(20, 4)],
        2,
        kinds={0: I64},
        classlabels_int64s=[5, 7, 2],
        post_transform=transform,
        base_values=[0.1, 0.2, 0.3],
        **attrs,
    )


@pytest.mark.slow
@pytest.mark.family("choices")
@pytest.mark.parametrize("transform", ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO"])
@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize("column", [0, 1])
def test_classifier_of_two_with_one_score(transform: str, positive: bool, column: int) -> None:
    attrs = forest(4, 4, 4, "class", 1, ("BRANCH_LEQ",))
    attrs["class_ids"] = [column] * len(attrs["class_ids"])
    if positive:
        attrs["class_weights"] = [abs(w) / 8 for w in attrs["class_weights"]]
    both(
        "TreeEnsembleClassifier",
        [table(20, 4)],
        2,
        kinds={0: I64},
        classlabels_int64s=[3, 8],
        post_transform=transform,
        **attrs,
    )


@pytest.mark.slow
def test_classifier_of_two_with_two_scores() -> None:
    """The label is that of the larger score. ONNX Runtime says 1 as soon as the second score is positive, and takes the
    only score of a row without votes for the second class as that of both.
    """
    attrs = forest(4, 4, 4, "class", 2, ("BRANCH_LT",), several=True)
    attrs["class_weights"] = [abs(w) for w in attrs["class_weights"]]
    x = table(20, 4)
    model = node_model(
        "TreeEnsembleClassifier", [x], 2, "ai.onnx.ml", 3, kinds={0: I64}, classlabels_int64s=[0, 1], **attrs
    )
    (label, score), (_, want) = run_dnnc(model, feeds([x])), run_ort(model, feeds([x]))
    voted = score[:, 1] != 0
    assert voted.any()
    compare(score[voted], want[voted])
    assert label.tolist() == score.argmax(1).tolist()


@pytest.mark.slow
def test_classifier_with_words() -> None:
    attrs = forest(4, 4, 4, "class", 3, ("BRANCH_GT",), several=True)
    both(
        "TreeEnsembleClassifier",
        [table(20, 4)],
        2,
        kinds={0: STRING},
        classlabels_strings=["cat", "dog", "owl"],
        **attrs,
    )


@pytest.mark.slow
def test_whole_numbers_are_compared_as_floats() -> None:
    attrs = forest(4, 4, 4, "class", 3, ("BRANCH_LEQ",), several=True)
    x = RNG.integers(-3, 4, (9, 4))
    both("TreeEnsembleClassifier", [x], 2, kinds={0: I64}, classlabels_int64s=[0, 1, 2], **attrs)


def ensemble(x: Any, dtype: Any = np.float32, **more: Any) -> dict[str, Any]:
    """Attributes of TreeEnsemble: two trees, one that asks for membership, one that is a single leaf."""
    from onnx import numpy_helper

    def t(v: Any, d: Any = dtype) -> Any:
        return numpy_helper.from_array(np.array(v, d))

    return {
        "nodes_splits": t([0.5, 0.0, 0.0, 1.0]),
        "nodes_featureids": [0, 1, 0, 2],
        "nodes_modes": t([2, 6, 0, 5], np.uint8),
        "nodes_truenodeids": [1, 0, 4, 1],
        "nodes_falsenodeids": [3, 2, 4, 3],
        "nodes_trueleafs": [0, 1, 1, 1],
        "nodes_falseleafs": [0, 1, 1, 1],
        "leaf_targetids": [0, 1, 1, 0, 1],
        "leaf_weights": t([1.5, 2.0, -3.0, 0.25, 7.0]),
        "tree_roots": [0, 2],
        "membership_values": t([1.0, 2.0, -1.0, np.nan]),
        "n_targets": 2,
        **more,
    }


@pytest.mark.slow
@pytest.mark.family("cases")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("aggregate", [0, 1, 2, 3])
def test_ensemble(dtype: Any, aggregate: int) -> None:
    x = RNG.integers(-2, 3, (30, 3)).astype(dtype)
    y = np.zeros((len(x), 2, 2))
    votes = np.zeros((len(x), 2, 2), bool)
    for n, row in enumerate(x):
        if row[0] >= 0.5:
            k, w = (0, 1.5) if row[1] in (1, 2, -1) else (1, -3.0)
        else:
            k, w = (1, 2.0) if row[2] != 1 else (0, 0.25)
        y[n, 0, k], votes[n, 0, k] = w, True
        y[n, 1, 1], votes[n, 1, 1] = 7.0, True
    join = {
        0: lambda v: v.sum() / 2,
        1: np.sum,
        2: lambda v: v.min(initial=np.inf),
        3: lambda v: v.max(initial=-np.inf),
    }[aggregate]
    want = np.array(
        [[join(y[n, votes[n, :, k], k]) if votes[n, :, k].any() else 0.0 for k in range(2)] for n in range(len(x))]
    )
    got = ours(
        "TreeEnsemble",
        [x],
        opset=5,
        kinds={0: TensorProto.DOUBLE if dtype is np.float64 else TensorProto.FLOAT},
        **ensemble(x, dtype, aggregate_function=aggregate),
    )[0]
    assert got.dtype == dtype
    np.testing.assert_allclose(got, want, rtol=1e-6)


def ask(mode: int, split: float, members: list[float], missing: int, values: Any, dtype: Any) -> list[bool]:
    """Which values answer yes, by the normal form."""
    zero = np.array([0, 0, 0])
    nodes = Nodes(
        zero,
        np.array([split, 0, 0]),
        np.array([mode, LEAF, LEAF]),
        zero + [1, 0, 0],
        zero + [2, 0, 0],
        zero + [missing, 0, 0],
        np.array([0]),
        {0: members},
    )
    forest = normal_form(nodes, dtype)
    out = []
    for v in np.asarray(values, dtype.numpy):
        at = forest.roots[0]
        for _ in range(forest.depth):
            _, first, second, nan = forest.links[at]
            at = first if v <= forest.splits[at] or (np.isnan(v) and nan) else second
        out.append(bool(forest.leaves[at] == 1))
    return out


@pytest.mark.family("cases")
@pytest.mark.filterwarnings("ignore:overflow encountered in nextafter")
@pytest.mark.parametrize("dtype", [f32, f64])
@pytest.mark.parametrize("split", [0.0, -0.0, 1.0, 1e-45, np.inf, -np.inf, 3.4028235e38])
@pytest.mark.parametrize("missing", [0, 1])
def test_every_question_in_normal_form(dtype: Any, split: float, missing: int) -> None:
    near = np.asarray(split, dtype.numpy)
    values = np.array(
        [
            0.0,
            1.0,
            -1.0,
            np.inf,
            -np.inf,
            near,
            np.nextafter(near, near.dtype.type(np.inf)),
            np.nextafter(near, near.dtype.type(-np.inf)),
        ],
        dtype.numpy,
    )
    meaning = {LEQ: np.less_equal, LT: np.less, GTE: np.greater_equal, GT: np.greater, EQ: np.equal, NEQ: np.not_equal}
    for mode, f_ in meaning.items():
        assert ask(mode, split, [], missing, values, dtype) == f_(values, near).tolist(), (mode, split)
        assert ask(mode, split, [], missing, [np.nan], dtype) == [missing == 1 or mode == NEQ]
    for members in (
        [],
        [split],
        [1.0, split, 0.0],
        [split, float(np.nextafter(near, near.dtype.type(1)))],
        [np.inf, -np.inf],
    ):
        kept = np.asarray(members, dtype.numpy)
        assert ask(MEMBER, 0.0, members, missing, values, dtype) == np.isin(values, kept).tolist(), members
        assert ask(MEMBER, 0.0, members, missing, [np.nan], dtype) == [missing == 1]


def sklearn_attributes(estimators: Any, kind: str) -> dict[str, Any]:
    a: dict[str, list[Any]] = {
        f"nodes_{n}": [] for n in ("treeids", "nodeids", "featureids", "values", "modes", "truenodeids", "falsenodeids")
    }
    votes: dict[str, list[Any]] = {f"{kind}_{n}": [] for n in ("treeids", "nodeids", "ids", "weights")}
    for t, e in enumerate(estimators):
        tree = e.tree_
        for k in range(tree.node_count):
            leaf = tree.children_left[k] < 0
            row = (
                t,
                k,
                0 if leaf else tree.feature[k],
                0.0 if leaf else tree.threshold[k],
                "LEAF" if leaf else "BRANCH_LEQ",
            )
            for name, v in zip(a, (*row, max(tree.children_left[k], 0), max(tree.children_right[k], 0))):
                a[name].append(v if isinstance(v, str) else float(v) if name == "nodes_values" else int(v))
            for c, w in enumerate(tree.value[k][0]) if leaf else ():
                share = w / tree.value[k][0].sum() / len(estimators) if kind == "class" else w / len(estimators)
                for name, v in zip(votes, (t, k, c, float(share))):
                    votes[name].append(v)
    return {**a, **votes}


@pytest.mark.slow
def test_forests_of_scikit_learn() -> None:
    from sklearn import ensemble as ensembles

    x = np.round(f(200, 6) * 4) / 4  # thresholds are then between the values in f32, too
    y = (x[:, 0] + x[:, 1] * x[:, 2] > 0).astype(int) + (x[:, 3] > 1)
    model = ensembles.RandomForestClassifier(8, max_depth=11, random_state=0).fit(x, y)
    label, score = ours(
        "TreeEnsembleClassifier",
        [x],
        2,
        3,
        {0: I64},
        classlabels_int64s=[0, 1, 2],
        **sklearn_attributes(model.estimators_, "class"),
    )
    assert (label == model.predict(x)).all()
    np.testing.assert_allclose(score, model.predict_proba(x), atol=1e-6)
    regressor = ensembles.RandomForestRegressor(8, max_depth=11, random_state=0).fit(x, x[:, 0] * x[:, 1])
    got = ours("TreeEnsembleRegressor", [x], 1, 3, n_targets=1, **sklearn_attributes(regressor.estimators_, "target"))[
        0
    ]
    np.testing.assert_allclose(got[:, 0], regressor.predict(x), atol=1e-5)


def test_wrong_trees_are_refused() -> None:
    good = forest(1, 2, 3, "target", 1, ("BRANCH_LEQ",))
    x = f(2, 3)
    loop = {**good, "nodes_truenodeids": [0] * len(good["nodes_modes"])}
    with pytest.raises(ModelError, match="lead back"):
        ours("TreeEnsembleRegressor", [x], opset=3, **loop)
    with pytest.raises(ModelError, match="a child of a tree is node -1"):
        ours("TreeEnsembleRegressor", [x], opset=3, **{**good, "nodes_falsenodeids": [99] * len(good["nodes_modes"])})
    with pytest.raises(ModelError, match="look at 3 features"):
        ours(
            "TreeEnsembleRegressor", [f(2, 2)], opset=3, **{**good, "nodes_featureids": [2] * len(good["nodes_modes"])}
        )
    with pytest.raises(ModelError, match="'BRANCH_MAYBE'"):
        ours(
            "TreeEnsembleRegressor",
            [x],
            opset=3,
            **{**good, "nodes_modes": ["BRANCH_MAYBE"] * len(good["nodes_modes"])},
        )
    with pytest.raises(ModelError, match="a leaf votes for 4"):
        ours("TreeEnsembleRegressor", [x], opset=3, **{**good, "target_ids": [4] * len(good["target_ids"])})
