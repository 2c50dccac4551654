"""Boosted trees in NumPy: the same scores as XGBoost, as a tree says node by node, through a file."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dnnc.autotune.model.features import NAMES, VERSION
from dnnc.autotune.model.forest import DEEPEST, Forest, from_boosters, load
from dnnc.autotune.search.choose import shipped
from dnnc.ir.errors import TuneError

Array = np.ndarray[Any, Any]
COLUMNS = 9


def random_forest(seed: int, trees: int = 7, depth: int = 4, members: int = 3) -> Forest:
    rng = np.random.default_rng(seed)
    shape = (trees, 2**depth - 1)
    feature, threshold = rng.integers(0, COLUMNS, shape).astype(np.int16), rng.standard_normal(shape).astype(np.float32)
    leaf = rng.standard_normal((trees, 2**depth)).astype(np.float32)
    return Forest(feature, threshold, leaf, (np.arange(trees) % members).astype(np.int16), {"unit": 0.5})


def rows(n: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).standard_normal((n, COLUMNS)).astype(np.float32)


def by_hand(f: Forest, x: Array) -> Array:
    """[rows, members]: each tree walked from its root."""
    out = np.zeros((len(x), f.members))
    for r, row in enumerate(x):
        for t in range(len(f.feature)):
            node = 0
            while node < f.feature.shape[1]:
                node = 2 * node + (1 if row[f.feature[t, node]] < f.threshold[t, node] else 2)
            out[r, f.member[t]] += f.leaf[t, node - f.feature.shape[1]]
    return out * f.facts["unit"]


@cache
def xgboost() -> Any:
    """Loaded where it is needed: it takes longer than to collect all tests of this folder."""
    import xgboost

    return xgboost


def trained(seed: int = 0, depth: int = 5, rounds: int = 20) -> Any:
    x = rows(300)
    y = x[:, 0] * 2 + np.abs(x[:, 1]) - (x[:, 2] > 0.3) * x[:, 3]
    settings = {
        "max_depth": depth,
        "base_score": 0.0,
        "seed": seed,
        "subsample": 0.7,
        "nthread": 1,
        "min_child_weight": 6,
    }
    return xgboost().train(settings, xgboost().DMatrix(x, y), rounds)


@pytest.mark.parametrize("depth", [1, 4, 7])
def test_votes_are_those_of_the_trees(depth: int) -> None:
    f, x = random_forest(depth, depth=depth), rows(40)
    want = by_hand(f, x)
    assert f.depth == depth and f.members == 3
    assert np.allclose(f.votes(x), want, atol=1e-6)
    assert np.allclose(f.predict(x), want.mean(1)) and np.allclose(f.spread(x), (want - want.mean(0)).std(1))


def test_a_row_is_scored_alone_as_among_others() -> None:
    f, x = random_forest(3), rows(30)
    assert np.array_equal(f.predict(x)[4:5], f.predict(x[4:5]))


def test_equal_to_xgboost() -> None:
    """Trees of uneven depth, values at the very thresholds included."""
    boosters = [trained(s) for s in range(2)]
    f, x = from_boosters(boosters), rows(500, seed=5)
    splits = f.threshold[np.isfinite(f.threshold)]
    x[: len(splits), f.feature[np.isfinite(f.threshold)][0]] = splits[: len(x)]
    for k, b in enumerate(boosters):
        assert np.allclose(f.votes(x)[:, k], b.predict(xgboost().DMatrix(x)), atol=1e-5)
    assert f.members == 2 and len(f.feature) == 40


def test_a_tree_that_is_one_leaf() -> None:
    x = rows(50)
    b = xgboost().train(
        {"max_depth": 3, "base_score": 0.0, "gamma": 1e9, "nthread": 1}, xgboost().DMatrix(x, x[:, 0] + 3), 4
    )
    f = from_boosters([b])
    assert f.depth == 0 and np.allclose(f.predict(x), b.predict(xgboost().DMatrix(x)), atol=1e-6)


@pytest.mark.slow
def test_a_tree_too_deep_is_refused() -> None:
    x = rows(3000)
    b = xgboost().train(
        {"max_depth": 14, "min_child_weight": 0, "base_score": 0.0, "nthread": 1},
        xgboost().DMatrix(x, x[:, 0] * x[:, 1]),
        1,
    )
    with pytest.raises(TuneError, match=f"at most {DEEPEST}"):
        from_boosters([b])


def test_a_file_keeps_everything(tmp_path: Path) -> None:
    f, x = random_forest(2), rows(25)
    f.save(tmp_path / "m.npz")
    again = load(tmp_path / "m.npz")
    assert np.array_equal(again.predict(x), f.predict(x)) and np.array_equal(again.spread(x), f.spread(x))
    assert again.facts["unit"] == 0.5
    f.save(tmp_path / "n.npz")
    assert (tmp_path / "m.npz").read_bytes() == (tmp_path / "n.npz").read_bytes()


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.npz"
    with pytest.raises(TuneError, match="no saved cost model"):
        load(path)
    path.write_bytes(b"PK\x03\x04 but torn")
    with pytest.raises(TuneError, match="no saved cost model"):
        load(path)
    np.savez(path, feature=np.zeros(3))
    with pytest.raises(TuneError, match="no saved cost model"):
        load(path)
    about = np.frombuffer(json.dumps({"format": 99}).encode(), np.uint8)
    np.savez(path, facts=about, **{n: np.zeros((1, 1)) for n in ("feature", "threshold", "leaf", "member")})
    with pytest.raises(TuneError, match="format 99"):
        load(path)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_what_ships_fits_this_version(kind: str) -> None:
    """A model of other columns would be left aside without a word: train.py makes it anew."""
    file = Path(__file__).parents[3] / "autotune" / "pretrained" / f"{kind}.npz"
    forest = shipped(kind)
    if not file.exists():
        assert forest is None
        return
    assert load(file).facts["features"] == VERSION, (
        f"the features have changed: python benchmarks/autotune/train.py {kind}"
    )
    assert forest is not None and forest.facts["kind"] == kind and forest.feature.max() < len(NAMES)
    assert file.stat().st_size < 2 << 20
