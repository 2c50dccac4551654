"""Converters of decision trees: TreeEnsemble, and TreeEnsembleRegressor and -Classifier before it.

A model's nodes become the normal form of `dnnc.ir.ops.trees`, in which `x[feature] <= split` is the only question: `x <
v` asks about the next smaller number, `>` and `>=` exchange the branches, equality and membership become a search tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.frontends.onnx.call import Call, number
from dnnc.frontends.onnx.ml.linear import labelled, labels_of, transformed
from dnnc.frontends.onnx.tensors import Array
from dnnc.ir.dtype import DType, f32, f64, i64
from dnnc.ir.errors import ModelError, count
from dnnc.ir.graph import Value
from dnnc.ir.ops.trees import MAX_STEPS

Converter = Callable[[Call], Any]
LEQ, LT, GTE, GT, EQ, NEQ, MEMBER, LEAF = range(8)
MODES = {
    "BRANCH_LEQ": LEQ,
    "BRANCH_LT": LT,
    "BRANCH_GTE": GTE,
    "BRANCH_GT": GT,
    "BRANCH_EQ": EQ,
    "BRANCH_NEQ": NEQ,
    "LEAF": LEAF,
}
TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")
AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")


@dataclass
class Nodes:
    """A model's trees: each node's feature, split, mode, children, and whether NaN counts as a yes."""

    feature: Array
    split: Array
    mode: Array
    yes: Array
    no: Array
    missing: Array
    roots: Array
    members: dict[int, list[float]]  # of nodes that ask for membership


@dataclass(frozen=True)
class Forest:
    """Trees in normal form; the leaves are nodes 0, 1, ..., and `leaves` says which nodes of the model they are."""

    links: Array  # i32[nodes, 4]
    splits: Array
    roots: Array
    depth: int
    leaves: Array


# --- to normal form ---------------------------------------------------------------------------------------------------


def normal_form(n: Nodes, dtype: DType) -> Forest:
    """The trees with `<=` as the only question, asked in `dtype`."""
    count = len(n.mode)
    _check(n, count)
    split = n.split.astype(dtype.numpy)
    first, second, nan_first = n.yes.copy(), n.no.copy(), n.missing.astype(bool)
    turned = (n.mode == GTE) | (n.mode == GT)
    first[turned], second[turned], nan_first[turned] = n.no[turned], n.yes[turned], ~nan_first[turned]
    second[turned & np.isnan(split)] = n.no[turned & np.isnan(split)]
    below = (n.mode == LT) | (n.mode == GTE)
    split[below] = _before(split[below])
    at = np.arange(count)
    leaf = n.mode == LEAF
    first[leaf], second[leaf] = at[leaf], at[leaf]
    rows = np.stack([np.where(leaf, 0, n.feature), first, second, nan_first], 1).astype(np.int64)
    special = np.flatnonzero(np.isin(n.mode, (EQ, NEQ, MEMBER)))
    if len(special):
        more, splits = rows.tolist(), list(split)
        for i in special.tolist():
            _search(n, i, more, splits, dtype)
        rows, split = np.array(more, np.int64), np.array(splits, dtype.numpy)
    return _ordered(rows, split, n.roots)


def _check(n: Nodes, count: int) -> None:
    sizes = {len(a) for a in (n.feature, n.split, n.mode, n.yes, n.no, n.missing)}
    if len(sizes) != 1 or not count or not len(n.roots):
        raise ModelError(
            f"the attributes of the nodes must be of one length and name at least one tree; got lengths {sorted(sizes)}"
        )
    inner = n.mode != LEAF
    for what, a in (("child", n.yes[inner]), ("child", n.no[inner]), ("root", n.roots)):
        if ((a < 0) | (a >= count)).any():
            raise ModelError(
                f"a {what} of a tree is node {int(a[(a < 0) | (a >= count)][0])}; there are nodes 0 to {count - 1}"
            )
    if (n.feature[inner] < 0).any():
        raise ModelError("a node asks for a feature below 0")


def _before(v: Array) -> Array:
    """The next smaller numbers; NaN, which nothing is less than or equal to, where there is none."""
    with np.errstate(over="ignore"):
        below = np.nextafter(v, np.asarray(-np.inf, v.dtype))
    return np.where(v == -np.inf, np.nan, below).astype(v.dtype)


def _search(n: Nodes, i: int, rows: list[list[int]], splits: list[Any], dtype: DType) -> None:
    """Replace membership node i by a balanced search tree over the ends of the intervals [value, value]."""
    inside, outside = (int(n.no[i]), int(n.yes[i])) if n.mode[i] == NEQ else (int(n.yes[i]), int(n.no[i]))
    nan = outside if n.mode[i] == NEQ or not n.missing[i] else inside
    given = n.members.get(i, []) if n.mode[i] == MEMBER else [float(n.split[i])]
    ends: list[Any] = []
    kinds = [outside]
    for v in np.unique(np.array(given, dtype.numpy)):
        if np.isnan(v):
            continue
        low = _before(np.array([v], dtype.numpy))[0]
        if ends and ends[-1] == low:
            ends[-1] = v  # the values are neighbours: one interval
            continue
        ends += [low, v] if not np.isnan(low) else [v]
        kinds = [*kinds, inside, outside] if not np.isnan(low) else [inside, outside]
    if ends and ends[-1] == np.inf:
        ends, kinds = ends[:-1], kinds[:-1]  # all that is not less is infinity
    feature = int(n.feature[i])

    def build(low: int, high: int) -> int:
        """The node that tells the intervals low to high apart."""
        if low == high:
            return kinds[low]
        middle = (low + high) // 2
        children = build(low, middle), build(middle + 1, high)
        rows.append([feature, *children, 0])
        splits.append(ends[middle])
        return len(rows) - 1

    root = build(0, len(kinds) - 1)
    rows[i], splits[i] = [feature, nan, root, 1], dtype.numpy.type(np.nan)


def _ordered(rows: Array, split: Array, roots: Array) -> Forest:
    """The forest with its leaves first, and its depth."""
    at = np.arange(len(rows))
    leaf = (rows[:, 1] == at) & (rows[:, 2] == at)
    order = np.concatenate([at[leaf], at[~leaf]])
    place = np.empty_like(at)
    place[order] = at
    depth, level = 0, np.unique(roots)
    while not leaf[level].all():
        depth += 1
        if depth > len(rows):
            raise ModelError("the nodes of a tree lead back to a node above them")
        level = level[~leaf[level]]
        level = np.unique(rows[level, 1:3])
    links = np.stack([rows[order, 0], place[rows[order, 1]], place[rows[order, 2]], rows[order, 3]], 1)
    return Forest(links.astype(np.int32), split[order], place[roots], depth, order[: int(leaf.sum())])


# --- reading attributes -----------------------------------------------------------------------------------------------


def _floats(c: Call, name: str, default: int | None = None) -> Array | None:
    """Floats from the attribute or, in double precision, from its variant `_as_tensor`."""
    tensor = c.tensor(f"{name}_as_tensor")
    if tensor is not None and tensor.size:
        return tensor.reshape(-1)
    given = c.numbers(name)
    return np.asarray(given, np.float32) if given else None if default is None else np.zeros(default, np.float32)


def _ints(c: Call, name: str, count: int | None = None) -> Array:
    given = c.integers(name)
    if not given and count is not None:
        return np.zeros(count, np.int64)
    return np.asarray(given or (), np.int64)


class _Ids:
    """Places of the nodes by (tree, node)."""

    def __init__(self, trees: Array, nodes: Array) -> None:
        if len(trees) != len(nodes):
            raise ModelError(
                f"attributes nodes_treeids and nodes_nodeids have {len(trees)} and "
                f"{count(len(nodes), 'entry', 'entries')}"
            )
        self.place = {key: k for k, key in enumerate(zip(trees.tolist(), nodes.tolist()))}
        if len(self.place) != len(nodes):
            raise ModelError("a node stands in a tree twice")

    def find(self, trees: Array, nodes: Array) -> Array:
        out = [self.place.get(key, -1) for key in zip(trees.tolist(), nodes.tolist())]
        return np.array(out, np.int64)


def _nodes(c: Call) -> tuple[Nodes, _Ids]:
    """The trees of TreeEnsembleRegressor and -Classifier. The first node of a tree is its root."""
    trees, names = _ints(c, "nodes_treeids"), c.texts("nodes_modes") or ()
    unknown = sorted(set(names) - set(MODES))
    if unknown:
        raise ModelError(f"attribute nodes_modes must hold {', '.join(MODES)}; got {unknown[0]!r}")
    ids, count = _Ids(trees, _ints(c, "nodes_nodeids")), len(names)
    if len(trees) != count:
        raise ModelError(f"attributes nodes_treeids and nodes_modes have {len(trees)} and {count} entries")
    mode = np.array([MODES[m] for m in names], np.int64)
    yes, no = (_ints(c, f"nodes_{w}nodeids", count) for w in ("true", "false"))
    values = _floats(c, "nodes_values", count)
    assert values is not None
    inner = mode != LEAF
    yes, no = (np.where(inner, ids.find(trees, a), 0) if len(a) == count else a for a in (yes, no))
    _, roots = np.unique(trees, return_index=True)
    feature, missing = _ints(c, "nodes_featureids", count), _ints(c, "nodes_missing_value_tracks_true", count)
    return Nodes(feature, values, mode, yes, no, missing, roots, {}), ids


def _votes(c: Call, kind: str, ids: _Ids, forest: Forest) -> tuple[Array, Array]:
    """Weights and classes [leaves, most] of `class_*` or `target_*`; class -1 where a leaf has fewer votes."""
    classes, weights = _ints(c, f"{kind}_ids"), _floats(c, f"{kind}_weights", 0)
    trees, nodes = _ints(c, f"{kind}_treeids"), _ints(c, f"{kind}_nodeids")
    assert weights is not None
    if not len(classes) == len(weights) == len(trees) == len(nodes):
        raise ModelError(
            f"the attributes {kind}_* must be of one length, got {len(classes)}, {len(weights)}, {len(trees)} and "
            f"{len(nodes)}"
        )
    return gathered_votes(ids.find(trees, nodes), classes, weights, forest)


def gathered_votes(at: Array, classes: Array, weights: Array, forest: Forest) -> tuple[Array, Array]:
    """Votes at nodes of the model as rows of the forest's leaves; votes at other nodes do not count."""
    row = np.full(max(int(at.max(initial=-1)), int(forest.leaves.max(initial=-1))) + 2, -1)
    row[forest.leaves] = np.arange(len(forest.leaves))
    row = row[at]
    keep = row >= 0
    row, classes, weights = row[keep], classes[keep], weights[keep]
    order = np.argsort(row, kind="stable")
    row, classes, weights = row[order], classes[order], weights[order]
    start = np.searchsorted(row, np.arange(len(forest.leaves)))
    column = np.arange(len(row)) - start[row]
    most = int(column.max(initial=0)) + 1
    shown, who = np.zeros((len(forest.leaves), most), weights.dtype), np.full((len(forest.leaves), most), -1, np.int32)
    shown[row, column], who[row, column] = weights, classes
    return shown, who


# --- building ---------------------------------------------------------------------------------------------------------


def _compared(c: Call, split: Array) -> DType:
    """What rows and splits are compared in: f64 where one of them is."""
    return f64 if c.type_of(0).dtype is f64 or split.dtype == np.float64 else f32


def _leaf(c: Call, forest: Forest, dtype: DType) -> Value:
    """The leaf that each row reaches in each tree."""
    x = c.x()
    if x.type.rank == 1:
        x = c.b.reshape(x, shape=(1, x.type.shape[0]))
    features, needed = x.type.shape[1], int(forest.links[:, 0].max(initial=0)) + 1
    if isinstance(features, int) and features < needed:
        raise ModelError(f"the trees look at {needed} features, the input is {x.type}")
    x = c.cast(x, dtype)
    at: Value = c.b.constant(forest.roots[None].astype(np.int32))
    links, splits = c.b.constant(forest.links), c.b.constant(forest.splits)
    for done in range(0, max(forest.depth, 1), MAX_STEPS):
        at = c.b.tree_descend(x, at, links, splits, steps=min(MAX_STEPS, max(forest.depth, 1) - done))
    return at


def _scores(c: Call, forest: Forest, votes: tuple[Array, Array], count: int, aggregate: str, dtype: DType) -> Value:
    weights, classes = votes
    if (classes >= count).any():
        raise ModelError(f"a leaf votes for {int(classes.max())}; there are {count} targets or classes")
    if aggregate not in AGGREGATES:
        raise ModelError(f"attribute aggregate_function must be one of {', '.join(AGGREGATES)}; got {aggregate!r}")
    combine = {"MIN": "min", "MAX": "max"}.get(aggregate, "sum")
    leaf = _leaf(c, forest, dtype)
    y: Value = c.b.tree_vote(leaf, c.b.constant(weights), c.b.constant(classes), count=count, combine=combine)
    return c.b.div(y, float(len(forest.roots))) if aggregate == "AVERAGE" else y


def _based(c: Call, y: Value, base: Array | None) -> Any:
    if base is None:
        return y
    if base.size not in (1, y.type.shape[1]):
        raise ModelError(f"attribute base_values has {base.size} numbers for {y.type.shape[1]} targets or classes")
    return c.b.add(y, c.const(base, y.type.dtype))


def regressor(c: Call) -> Any:
    nodes, ids = _nodes(c)
    dtype = _compared(c, nodes.split)
    forest = normal_form(nodes, dtype)
    aggregate = c.text("aggregate_function", "SUM")
    y = _scores(c, forest, _votes(c, "target", ids, forest), c.integer("n_targets", 1), aggregate, dtype)
    return c.cast(transformed(c, _based(c, y, _floats(c, "base_values")), c.text("post_transform", "NONE")), f32)


def classifier(c: Call) -> Any:
    """Labels, each of the best class, and scores."""
    nodes, ids = _nodes(c)
    dtype = _compared(c, nodes.split)
    forest = normal_form(nodes, dtype)
    votes = _votes(c, "class", ids, forest)
    labels, base, transform = labels_of(c), _floats(c, "base_values"), c.text("post_transform", "NONE")
    voted = np.unique(votes[1][votes[1] >= 0])
    y = _scores(c, forest, votes, max(len(labels), int(voted.max(initial=0)) + 1), "SUM", dtype)
    if len(labels) <= 2 and len(voted) == 1:
        index, y = _binary(c, y, int(voted[0]), votes, base, transform)
        return labelled(c, index, labels), c.cast(y, f32)
    eligible = _based(c, y, base) if base is not None else _eligible(c, y, forest, votes, dtype)
    y = _based(c, y, base)
    index = c.b.argmax(eligible, axis=1, keepdims=False)
    return labelled(c, index, labels), c.cast(transformed(c, y, transform), f32)


def _eligible(c: Call, y: Value, forest: Forest, votes: tuple[Array, Array], dtype: DType) -> Value:
    """Scores among which the best one is sought: a class without any vote does not win over negative ones."""
    weights, classes = votes
    if (weights[classes >= 0] >= 0).all():
        return y
    count = number(y.type.shape[1], "the number of classes")
    voters = _scores(c, forest, (np.ones_like(weights), classes), count, "SUM", dtype)
    chosen: Value = c.b.where(c.b.greater(voters, 0.0), y, c.const(-np.inf, y.type.dtype))
    return chosen


def _binary(
    c: Call, y: Value, voted: int, votes: tuple[Array, Array], base: Array | None, transform: str
) -> tuple[Value, Any]:
    """Two classes with votes of `voted` alone: probabilities split at 1/2, others at 0; class 0 is the opposite."""
    y = c.b.slice(y, starts=(0, voted), steps=(1, 1), shape=(y.type.shape[0], 1))
    if base is not None and base.size:
        y = c.b.add(y, c.const(base[-1], y.type.dtype))
    probability = bool((votes[0] >= 0).all())
    index = c.b.cast(c.b.greater(c.b.reshape(y, shape=(y.type.shape[0],)), 0.5 if probability else 0.0), to=i64)
    if voted == 1:
        nothing = c.b.full(shape=y.type.shape, value=0.0, dtype=y.type.dtype)
        return index, transformed(c, c.b.concat(nothing, y, axis=1), transform)
    if transform == "PROBIT":
        return index, transformed(c, y, transform)
    if probability and transform != "LOGISTIC":
        return index, c.b.concat(c.b.sub(c.const(1.0, y.type.dtype), y), y, axis=1)
    both = c.b.concat(c.b.neg(y), y, axis=1)
    return index, transformed(c, both, transform) if transform == "LOGISTIC" else both


# --- opset 5 ----------------------------------------------------------------------------------------------------------


def ensemble(c: Call) -> Any:
    """TreeEnsemble: inner nodes and leaves apart; leaves become nodes after the inner ones."""
    splits, modes = c.tensor("nodes_splits"), c.tensor("nodes_modes")
    weights, targets = c.tensor("leaf_weights"), _ints(c, "leaf_targetids")
    if splits is None or modes is None or weights is None:
        raise ModelError("attributes nodes_splits, nodes_modes and leaf_weights must be tensors")
    count, leaves = len(modes), weights.size
    ends = [_ints(c, f"nodes_{w}leafs") for w in ("true", "false")]
    ids = [_ints(c, f"nodes_{w}nodeids") for w in ("true", "false")]
    if any(len(a) != count for a in (*ends, *ids)) or targets.size != leaves:
        raise ModelError(f"the attributes nodes_* must have {count} entries, leaf_targetids {leaves}")
    for end, a in zip(ends, ids):
        if ((a < 0) | (a >= np.where(end != 0, leaves, count))).any():
            raise ModelError(
                f"a node leads to a node or leaf that does not exist; there are {count} nodes and {leaves} leaves"
            )
    yes, no = (np.where(end != 0, a + count, a) for end, a in zip(ends, ids))
    extra = np.zeros(leaves, np.int64)
    feature, missing = _ints(c, "nodes_featureids", count), _ints(c, "nodes_missing_value_tracks_true", count)
    mode = np.concatenate([modes.reshape(-1).astype(np.int64), np.full(leaves, LEAF)])
    parts = [np.concatenate([a, extra]) for a in (feature, splits.reshape(-1), yes, no, missing)]
    members = _members(modes.reshape(-1), c.tensor("membership_values"))
    nodes = Nodes(
        parts[0], parts[1].astype(splits.dtype), mode, parts[2], parts[3], parts[4], _ints(c, "tree_roots"), members
    )
    dtype = c.type_of(0).dtype
    forest = normal_form(nodes, dtype if dtype is f64 else f32)
    votes = gathered_votes(np.arange(leaves) + count, targets, weights.reshape(-1).astype(forest.splits.dtype), forest)
    aggregate = AGGREGATES[c.integer("aggregate_function", 1)]
    y = _scores(c, forest, votes, c.integer("n_targets", 1), aggregate, dtype if dtype is f64 else f32)
    return c.cast(transformed(c, y, TRANSFORMS[c.integer("post_transform", 0)]), dtype)


def _members(modes: Array, values: Array | None) -> dict[int, list[float]]:
    """The sets of the nodes that ask for membership, in their order, each ended by NaN."""
    sets: list[list[float]] = [[]]
    for v in () if values is None else values.reshape(-1).tolist():
        if v != v:
            sets.append([])
        else:
            sets[-1].append(v)
    asking: Sequence[int] = np.flatnonzero(modes == MEMBER).tolist()
    if len(asking) > len(sets) or any(sets[len(asking) + 1 :]):
        raise ModelError(
            f"{count(len(asking), 'node')} ask for membership, attribute membership_values has {len(sets) - 1} sets"
        )
    return dict(zip(asking, sets))


TREES: dict[str, Converter] = {
    "TreeEnsemble": ensemble,
    "TreeEnsembleRegressor": regressor,
    "TreeEnsembleClassifier": classifier,
}
