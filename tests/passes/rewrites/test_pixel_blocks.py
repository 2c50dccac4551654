"""Which images lie in vectors of pixels."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.ir.graph.text import parse
from dnnc.ir.sparse import Sparse
from dnnc.passes.rewrites.pixel_blocks import choose


@pytest.mark.parametrize(
    ("width", "between", "found"),
    [
        (32, "relu(a)", {"a", "b"}),
        (7, "relu(a)", set()),  # vectors would be half empty
        (32, "conv(a, d, pads=(1, 1, 1, 1))", set()),  # dense on both sides
    ],
)
def test_images_between_sparse_convolutions(width: int, between: str, found: set[str]) -> None:
    rng = np.random.default_rng(0)
    w = np.where(rng.random((32, 32, 1, 1)) < 0.1, 1.0, 0.0).astype(np.float32)
    d = np.ones((32, 32, 3, 3), np.float32)
    g = parse(
        f"""def g(x: f32[1, 32, 32, {width}], *, w: f32[32, 32, 1, 1], d: f32[32, 32, 3, 3]):
    p = conv(x, d, pads=(1, 1, 1, 1))
    a = conv(p, w)
    b = {between}
    y = conv(b, w)
    return y""",
        {"w": w, "d": d},
    )
    sparse = {n: Sparse.of(w, 0, group=24) for n in g.nodes() if n.op.name == "conv" and n.inputs[1].name == "w"}
    assert {v.name for v in choose(g, 16, sparse)} == found
