"""Which outputs the loops over one of them can store."""

from __future__ import annotations

import pytest

from dnnc.passes.analysis.outputs import main_output, places_in
from dnnc.tools.sample_graphs import graph_of

ROWS = """
def g(x: f32[4, 1, 6, 4]):
    y: f32[4, 1, 6, 4] = softmax(x, axis=2)
    m: f32[4, 1, 1, 4] = reduce_mean(x, axes=(2,), keepdims=True)
    n: f32[4, 4] = reshape(neg(m), shape=(4, 4))
    t: u8[4, 1, 6, 4] = cast(greater(y, 0.5), to=u8)
    o: f32[4, 6, 4] = reshape(y, shape=(4, 6, 4))
    z: f32[1, 6, 4] = slice(o, starts=(0, 0, 0), steps=(1, 1, 1), shape=(1, 6, 4))
    return {names}"""


@pytest.mark.parametrize(
    ("names", "main", "places"),
    [
        ("y, t", "t", {"y": (0, None, 2, 3)}),
        ("m, n, y", "y", {"m": (0, None, None, 3), "n": (0, 3)}),
        ("m, n", "n", {"m": (0, None, None, 1)}),
        ("o, m", None, {}),  # the rows are those of x, whose shape no output has
        ("y, z", None, {}),
    ],
)
def test_one_nest_for_several_outputs(names: str, main: str | None, places: dict[str, tuple[int | None, ...]]) -> None:
    g = graph_of(ROWS.format(names=names))
    nodes = list(g.nodes())
    values = {v.name: v for n in nodes for v in n.outputs}
    found = main_output(nodes, g.outputs)
    assert (None if found is None else found.name) == main
    for name, axes in places.items():
        assert found is not None and places_in(nodes, found, values[name]) == axes


def test_layouts_are_those_of_one_memory() -> None:
    g = graph_of(
        """
def g(x: f32[1, 16, 4, 4] @ "0 1/8 2 3 1%8"):
    y: f32[1, 16, 4, 4] @ "0 1/8 2 3 1%8" = relu(x)
    z: f32[1, 16, 4, 4] @ "0 1/8 2 3 1%8" = neg(x)
    w = pack(z, layout=None)
    return y, z, w"""
    )
    y, z, w = g.outputs
    nodes = list(g.nodes())
    assert main_output(nodes, [y, z]) is z and main_output(nodes, [y, w]) is None
