"""Large transposed copies in parts: the graph, and the same bits."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.target import TargetFacts
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites import split_transposes as module

CPU, GPU = (PassContext(facts=TargetFacts(serial_rows=serial)) for serial in (True, False))


def graph(rows: int, columns: int) -> str:
    return f"def g(x: f32[{rows}, {columns}], w: f32[{rows}, 128]):\n    return matmul(transpose(x, perm=(1, 0)), w)"


@pytest.mark.parametrize(
    ("rows", "columns", "parts"),
    [
        (512, 200, [96, 96, 8]),
        (512, 96, []),  # too small
        (256, 400, []),  # so few rows are read across the cache where they are
        (512, 3200, [288] * 11 + [32]),  # no more parts than `MOST_PARTS`
    ],
)
def test_parts(rows: int, columns: int, parts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART", 1 << 16)
    g = parse(graph(rows, columns))
    xs = [np.random.default_rng(k).standard_normal(v.type.shape) for k, v in enumerate(g.inputs)]
    (want,) = run(g, xs, "float64")
    assert module.split_transposes(g, CPU) == bool(parts)
    assert [n.output.type.shape[0] for n in g.nodes() if n.op.name == "matmul"] == (parts or [columns])
    (got,) = run(g, xs, "float64")
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
    assert not module.split_transposes(parse(graph(rows, columns)), GPU)
