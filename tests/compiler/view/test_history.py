"""From which imported nodes later ones come, and what passes changed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from dnnc.backends.registry import open_backend
from dnnc.compile_program import context_of
from dnnc.ir.errors import Loc
from dnnc.ir.graph import Graph
from dnnc.ir.shapes import specialise
from dnnc.options import CompileOptions
from dnnc.passes.base import PassManager
from dnnc.passes.pipelines import PASSES
from dnnc.tools.sample_graphs import graph_of
from dnnc.view.history import History, every_node
from support.random_graphs import random_graph


def followed(graph: Graph) -> History:
    """What is noted while all passes run, which change the graph."""
    history = History()
    ctx = context_of(CompileOptions(), open_backend("llvm", 1))
    PassManager().run(graph, PASSES, replace(ctx, dump=history))
    return history


TWICE = """def g(x: f32[4, 8], y: f32[4, 8], *, w: f32[16, 8], u: f32[16, 8], b: f32[16]):
    h = gemm(relu(x), w, b, trans_b=True)
    return add(h, gemm(tanh(y), u, b, trans_b=True))"""


@pytest.mark.parametrize("places", ["of each node", "one line"])
def test_parts_of_a_decomposed_node_come_from_it(places: str) -> None:
    g = graph_of(TWICE)
    for k, n in enumerate(g.nodes()):
        n.locs = (Loc(f"node {k}") if places == "of each node" else Loc("", file="model.py", line=7),)
    gemms = [k for k, n in enumerate(g.nodes()) if n.op.name == "gemm"]
    history = followed(g)
    products = [sorted(history.origins[n]) for n in g.nodes() if n.op.name == "matmul"]
    assert sorted(products) == [[k] for k in gemms]
    decomposed = [c for c in history.changes if any(" = gemm(" in line for line in c.before)]
    assert len(decomposed) == 2, "each is a change of its own"
    assert all(" = matmul(" in "".join(c.after) for c in decomposed)
    assert sorted(k for c in decomposed for k in c.origins) == gemms


def test_folded_nodes_are_removed_and_nothing_takes_their_place() -> None:
    g = graph_of("def g(x: f32[4, 4], *, w: f32[4, 4]):\n    return matmul(x, sqrt(abs(w)))")
    history = followed(g)
    folded = {line.split(" = ")[1].split("(")[0] for c in history.changes if not c.after for line in c.before}
    assert {"sqrt", "abs"} <= folded


@pytest.mark.parametrize("seed", range(6))
def test_changes_lead_from_the_imported_graph_to_the_last_one(seed: int) -> None:
    """Take away what each change replaced, add what it brought: every line of the last graph, and no other."""
    graph = specialise(random_graph(seed)[0], {})
    lines, count = Counter(map(repr, every_node(graph))), len(every_node(graph))
    history = followed(graph)
    for c in history.changes:
        assert not Counter(c.before) - lines, "it replaced what is there"
        lines = lines - Counter(c.before) + Counter(c.after)
        assert c.origins <= set(range(count))
    assert lines == Counter(map(repr, every_node(graph)))
    assert set(history.origins) == set(every_node(graph))
