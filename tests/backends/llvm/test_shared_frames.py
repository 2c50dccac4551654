"""Programs of expressions whose intermediate values are large share one frame."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dnnc.array as xp
from dnnc.array.expressions import ExpressionCompiler
from dnnc.array.structure import graph_of
from dnnc.backends.llvm import expression
from dnnc.backends.runtime.results import results


@pytest.mark.slow
def test_large_arenas_share_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expression, "KEPT_ARENA", 0)
    results().release()
    compiler = ExpressionCompiler(threads=1)
    rng = np.random.default_rng(0)

    def program(n: int, k: int) -> tuple[Any, list[Any], Any]:
        x, w = (rng.standard_normal((n, n)).astype(np.float32) for _ in range(2))
        made, want = (a := xp.asarray(x)), x
        b = xp.asarray(w)
        for _ in range(k):
            made, want = made @ b, want @ w
        leaves = [a._parts[0], b._parts[0]]
        return compiler.compile(lambda: graph_of([made._parts[0]], leaves)[0]), [x, w], want

    programs = [program(16, 3), program(24, 4), program(16, 4)]
    for _ in range(2):
        for f, given, want in programs:
            (got,) = f(given)
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-2)
    assert len(results().frames) == 1
    assert all(f.free is results().frames for f, _, _ in programs)
    results().release()
    assert not results().frames
