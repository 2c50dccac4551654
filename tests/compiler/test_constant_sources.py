"""Constants of a program are named by what they are of the model's weights; only what is none of these is kept."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.constant_sources import Sources, elements, model_constants
from dnnc.ir.dtype import from_numpy
from dnnc.ir.graph import Graph

rng = np.random.default_rng(0)
W = rng.standard_normal((300, 80), np.float32)
V = rng.standard_normal((300, 64), np.float32)
K = rng.standard_normal((24, 16, 5, 5), np.float32)
W[3, 5], W[0, 0] = np.nan, -0.0

FOUND = {
    "itself": W,
    "a part": W[16:, 3:],
    "transposed": np.ascontiguousarray(W.T),
    "channels last": np.ascontiguousarray(K.transpose(0, 2, 3, 1)),
    "with an axis of one": np.ascontiguousarray(W.T)[:, None],
    "in half precision": W.astype(np.float16),
    "transposed in bfloat16": np.ascontiguousarray(V.T.astype(ml_dtypes.bfloat16)),
    "side by side": np.concatenate([V, W, V], 1),
    "below each other, transposed": np.concatenate([W.T, V.T], 0),
}
KEPT = {
    "another number": np.where(W > 2, 1, W),
    "another zero": np.where(W == 0, np.float32(0), W),
    "scaled": W * np.float32(1.25),
    "half of it known": np.concatenate([V, W * 2], 1),
    "small": V[:3] * 2,
}


@pytest.mark.parametrize("name", [*FOUND, *KEPT])
def test_sources(name: str, tmp_path: Path) -> None:
    a, cache, g = FOUND.get(name, KEPT.get(name)), KernelCache(tmp_path), Graph()
    assert a is not None
    for w in (W, V, K):
        g.constant(w)
    found = Sources(g)
    source = found.of(a, from_numpy(a.dtype))
    assert bool(source.pieces) == (name in FOUND) and len(found.inside) == (a.nbytes if name == "small" else 0)
    assert sum(k.nbytes for k in found.kept.values()) == (a.nbytes if name in KEPT and name != "small" else 0)
    for key, data in found.kept.items():
        cache.put(key, data.tobytes())
    again = Graph()
    for w in (W, V, K):
        again.constant(np.asfortranarray(w))  # however the next process holds them
    got = elements(source, from_numpy(a.dtype), a.shape, dict(model_constants(again)), bytes(found.inside), cache)
    assert got.dtype == a.dtype and got.shape == a.shape and got.tobytes() == a.tobytes()
