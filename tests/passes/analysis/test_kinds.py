"""The class of kernel that a node makes."""

from __future__ import annotations

import pytest

from dnnc.passes.analysis.kinds import is_view, kind_of
from dnnc.tools.sample_graphs import graph_of


@pytest.mark.parametrize(
    ("call", "kind", "view"),
    [
        ("matmul(x, x)", "contraction", False),
        ("softmax(x)", "reduction", False),
        ("cumsum(x, axis=0)", "reduction", False),
        ("relu(x)", "map", False),
        ("transpose(x, perm=(1, 0))", "map", False),
        ("reshape(x, shape=(2, 8))", "map", True),
        ("unsqueeze(x, axes=(0,))", "map", True),
    ],
)
def test_kinds(call: str, kind: str, view: bool) -> None:
    node = next(iter(graph_of(f"def g(x: f32[4, 4]):\n    return {call}").nodes()))
    assert kind_of(node) == kind and is_view(node) == view
