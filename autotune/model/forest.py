"""Boosted trees without the library that grew them: what ships with dnnc, and how it predicts.

In: boosters of XGBoost, once; later a file of less than 2 MB. Out: scores of schedules, their spread, and what else was
found in training (the margin that a prediction must exceed). A tree is stored as a complete one of its depth: node k
has its children at 2k+1 and 2k+2, and a leaf that lies higher repeats below. So trees are walked by level for all rows.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dnnc.ir.errors import TuneError

Array = np.ndarray[Any, Any]
FORMAT = 1
DEEPEST = 10  # levels: a complete tree of more would be large


@dataclass(frozen=True, eq=False)
class Forest:
    """Trees of several members, each of which predicts on its own."""

    feature: Array  # int16 [trees, 2^depth - 1], the column that a node asks
    threshold: Array  # float32 of the same shape: below goes left
    leaf: Array  # float32 [trees, 2^depth]
    member: Array  # int16 [trees], whose a tree is; members count from 0
    # what training found: "features" (their version), "kind", "unit", "margins" and others for people
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        return int(self.leaf.shape[1]).bit_length() - 1

    @property
    def members(self) -> int:
        return int(self.member.max(initial=-1)) + 1

    def predict(self, x: Array) -> Array:
        """Features float32 [n, F] -> scores float64 [n]: log speed, comparable within a task."""
        return self.votes(x).mean(1)  # type: ignore[no-any-return]

    def spread(self, x: Array) -> Array:
        """Return the members' standard deviation [n], a score's uncertainty; scores relative to their mean over x."""
        return self.judge(x)[1]

    def judge(self, x: Array) -> tuple[Array, Array]:
        """What predict and spread say, of one walk through the trees."""
        votes = self.votes(x)
        return votes.mean(1), (votes - votes.mean(0)).std(1)

    def votes(self, x: Array) -> Array:
        """The score that each member gives, float64 [n, members]."""
        found = np.zeros((len(x), self.members))
        values = self.leaves(np.ascontiguousarray(x, np.float32)).astype(np.float64)
        for k in range(self.members):
            found[:, k] = values[:, self.member == k].sum(1)
        return found * float(self.facts.get("unit", 1.0))

    def leaves(self, x: Array) -> Array:
        """What each tree says, float32 [n, trees]."""
        trees, nodes = self.feature.shape
        tree = np.arange(trees, dtype=np.int32)
        rows = (np.arange(len(x), dtype=np.int32) * x.shape[1])[:, None]
        flat, feature, threshold = x.ravel(), self.feature.ravel(), self.threshold.ravel()
        down = 1 - tree * nodes  # node n of tree t is at t * nodes + n, its left child at t * nodes + 2 * n + 1
        at = np.broadcast_to(tree * nodes, (len(x), trees))
        for _ in range(self.depth):
            right = flat.take(rows + feature.take(at)) >= threshold.take(at)
            at = 2 * at + down
            at += right
        return self.leaf.ravel().take(at + (tree - nodes))  # type: ignore[no-any-return]

    def save(self, path: str | os.PathLike[str]) -> None:
        about = json.dumps({"format": FORMAT, **self.facts}, sort_keys=True)
        facts = np.frombuffer(about.encode(), np.uint8)
        with open(path, "wb") as f:
            np.savez_compressed(
                f, facts=facts, feature=self.feature, threshold=self.threshold, leaf=self.leaf, member=self.member
            )


def load(path: str | os.PathLike[str]) -> Forest:
    """Read a saved forest. TuneError where the file is none of this format."""
    try:
        with np.load(path, allow_pickle=False) as z:
            facts = json.loads(z["facts"].tobytes())
            feature, threshold, leaf, member = (z[n] for n in ("feature", "threshold", "leaf", "member"))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as e:
        raise TuneError(
            f"{os.fspath(path)} is no saved cost model ({e}); benchmarks/autotune/train.py makes one"
        ) from e
    if facts.get("format") != FORMAT:
        raise TuneError(
            f"{os.fspath(path)}: a cost model of format {facts.get('format')}, expected {FORMAT}; train it again"
        )
    return Forest(feature, threshold, leaf, member, facts)


def from_boosters(boosters: Sequence[Any], facts: Mapping[str, Any] | None = None) -> Forest:
    """A forest of XGBoost boosters, a member each. TuneError where a tree is deeper than DEEPEST."""
    trees = [
        (m, t)
        for m, b in enumerate(boosters)
        for t in json.loads(bytes(b.save_raw("json")))["learner"]["gradient_booster"]["model"]["trees"]
    ]
    depth = max((_depth(t, 0) for _, t in trees), default=0)
    if depth > DEEPEST:
        raise TuneError(
            f"a tree of {depth} levels; a saved forest has at most {DEEPEST}, so train with max_depth={DEEPEST}"
        )
    nodes = 2**depth - 1
    feature, threshold = np.zeros((len(trees), nodes), np.int16), np.full((len(trees), nodes), np.inf, np.float32)
    leaf = np.zeros((len(trees), nodes + 1), np.float32)
    for k, (_, t) in enumerate(trees):
        _fill(t, 0, 0, (feature[k], threshold[k], leaf[k]))
    return Forest(feature, threshold, leaf, np.array([m for m, _ in trees], np.int16), dict(facts or {}))


def _depth(t: Mapping[str, Any], node: int) -> int:
    left, right = t["left_children"][node], t["right_children"][node]
    return 0 if left == -1 else 1 + max(_depth(t, left), _depth(t, right))


def _fill(t: Mapping[str, Any], node: int, at: int, into: tuple[Array, Array, Array]) -> None:
    """Copy the tree below a node; a leaf takes the left way down."""
    feature, threshold, leaf = into
    below = t["left_children"][node] != -1
    if at >= len(feature):
        leaf[at - len(feature)] = t["split_conditions"][node]
        return
    if below:
        feature[at], threshold[at] = t["split_indices"][node], t["split_conditions"][node]
    _fill(t, t["left_children"][node] if below else node, 2 * at + 1, into)
    if below:
        _fill(t, t["right_children"][node], 2 * at + 2, into)
