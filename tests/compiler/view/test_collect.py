"""The data of a view: both graphs hang together, for models of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc import nn, optim
from dnnc.ir.graph.text import parse
from dnnc.nn import functional as F
from dnnc.tools.sample_graphs import graph_of
from dnnc.view.collect import View, collect
from dnnc.view.scopes import WIDE, numbered, tree
from support.random_graphs import random_graph

ROOT = Path(__file__).resolve().parents[3]
DIGITS = ROOT / "examples" / "digits.onnx"

CONV = """def g(x: f32[1, 16, 8, 8], *, w: f32[16, 16, 3, 3], v: f32[16, 16, 1, 1], b: f32[16]):
    s = conv(x, v)
    h = conv(x, w, b, pads=(1, 1, 1, 1))
    return relu(add(h, s))"""


def check(view: View) -> None:
    """Numbers mean what is there; data flows forward; each kernel belongs to nodes of the model."""
    nodes, steps = len(view.nodes), len(view.steps)
    assert all(0 <= source < k for k, s in enumerate(view.steps) for source, _ in s["from"])
    assert all(source in range(nodes) for n in view.nodes for source, _ in n["from"])
    for s in view.steps:
        assert s["scope"] in range(len(view.scopes)) and set(s.get("origins", ())) <= set(range(nodes))
        assert s["step"] != "kernel" or view.kernels[s["kernel"]]["symbol"]
        assert s.get("outer", -1) < steps
    for c in view.changes:
        assert set(c["nodes"]) <= set(range(nodes)) and -1 <= c["pass"] < len(view.passes)
    for n in view.nodes:
        assert n["scope"] in range(len(view.scopes))
    stages = ("naive", "operator", *view.stages)
    used = [k[s] for k in view.kernels for s in stages if s in k]
    assert sorted(used) == list(range(len(view.texts)))
    for m in view.memory:
        for names, size, first, last, at in m["slots"]:
            assert names and size >= 0 and first <= last < len(m["alive"]) and at + size <= m["arena"]
        alive = [sum(n for _, n, a, b, _ in m["slots"] if a <= k <= b) for k in range(len(m["alive"]))]
        assert all(a <= b for a, b in zip(m["alive"], alive)), "pieces are written one after the other"


@pytest.mark.slow
def test_a_branch_is_told_why_it_is_a_kernel_of_its_own() -> None:
    view = collect(dnnc.compile(graph_of(CONV), cache=False))
    check(view)
    (branch,) = [s for s in view.steps if s["ops"] == ["conv"]]
    assert "contraction" in branch["why"]
    (whole,) = [s for s in view.steps if "relu" in s["ops"]]
    assert len(whole["origins"]) == 3
    last = view.steps[-1]
    assert last["why"] == "its result is an output of the graph"
    kernel = view.kernels[whole["kernel"]]
    assert "conv" in view.texts[kernel["naive"]] and "define" in view.texts[kernel["llvm"]]


def test_times_are_those_of_the_profile() -> None:
    f = dnnc.compile(str(DIGITS), dims={"N": 2})
    x = np.zeros((2, 1, 8, 8), np.float32)
    p = f.profile(x, repeats=3)
    view = collect(f, p, "digits")
    check(view)
    assert view.title == "digits" and view.ceilings["flops"] == p.ceilings.flops
    timed = [s["seconds"] for s in view.steps if s["step"] == "kernel"]
    assert timed == [c.seconds for c in p.calls]
    assert {k["symbol"]: k["seconds"] for k in view.kernels} == {k.symbol: k.seconds for k in p.kernels}


@pytest.mark.slow
def test_saved_and_symbolic_models(tmp_path: Path) -> None:
    f = dnnc.compile(str(DIGITS), dims={"N": (1, 64)})
    f(np.zeros((3, 1, 8, 8), np.float32))
    check(collect(f))
    f.save(tmp_path / "m.dnnc")
    loaded = dnnc.load(tmp_path / "m.dnnc")
    loaded(np.zeros((3, 1, 8, 8), np.float32))
    view = collect(loaded)
    check(view)
    assert [s["ops"] for s in view.steps] == [s["ops"] for s in collect(f).steps]


def test_loops_have_their_body_within() -> None:
    def total(x: Any) -> Any:
        return dnnc.scan(lambda c, row: (c + row.sum(), c * 2), x.sum() * 0, x)[0]

    graph = dnnc.trace(total, dnnc.Spec((5, 4)))
    view = collect(dnnc.compile(graph, cache=False))
    check(view)
    loops = [k for k, s in enumerate(view.steps) if s["step"] == "control"]
    assert not loops or any(s.get("outer") == loops[0] for s in view.steps)


def hosted() -> Any:
    """A graph whose result has as many elements as its input has nonzeros."""
    return parse("n: dim[0, 8]\ndef g(x: f32[8]):\n    return cast(nonzero(relu(x), size=n), to=f32)")


def test_nodes_on_the_host_are_steps() -> None:
    f = dnnc.compile(hosted(), cache=False)
    f(np.ones(8, np.float32))
    view = collect(f)
    check(view)
    assert [s["step"] for s in view.steps].count("host") == len(f.report.host) > 0


def test_interpreted_models_have_their_graph() -> None:
    view = collect(dnnc.compile(graph_of(CONV), target="reference"))
    check(view)
    assert len(view.nodes) == 4 and not view.steps


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Any) -> Any:
        return self.b(F.relu(self.a(x)))


@pytest.mark.slow
def test_forward_nodes_are_linked_to_their_gradients() -> None:
    net = Net()
    step = dnnc.train_step(lambda m, x, y: F.mse_loss(m(x), y), optim.SGD(net.parameters(), lr=0.1), net)
    step(np.zeros((4, 8), np.float32), np.zeros((4, 4), np.float32))
    view = collect(step.programs[-1])
    check(view)
    backward = [k for k, n in enumerate(view.nodes) if n["loc"].startswith("derivative of ")]
    forward = [k for k, n in enumerate(view.nodes) if n["op"] == "relu"]
    linked = view.nodes[forward[0]]["pairs"]
    assert linked and set(linked) <= set(backward)
    assert all(forward[0] in view.nodes[k]["pairs"] for k in linked)
    assert {"forward", "backward", "update"} <= {name.split(".")[0] for name, _ in view.scopes}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_graphs(seed: int) -> None:
    graph, arrays = random_graph(seed)
    f = dnnc.compile(graph, verify=False)
    f(*arrays)
    check(collect(f))


# --- layers -----------------------------------------------------------------------------------------------------------


def test_layers_are_folded_by_their_names() -> None:
    scopes, home = numbered(tree([("encoder", "layer.0", "dense")] * 2 + [("encoder", "layer.1", "dense")] * 2 + [()]))
    assert [name for name, _ in scopes] == ["", "encoder", "layer.0.dense", "layer.1.dense"]
    assert [home[k] for k in range(5)] == [2, 2, 3, 3, 0]


@pytest.mark.parametrize("count", [1, 59, 61, 1000, 10_000])
def test_no_scope_is_too_wide(count: int) -> None:
    scopes, home = numbered(tree([()] * count))
    members = [sum(outer == k for _, outer in scopes) + list(home.values()).count(k) for k in range(len(scopes))]
    assert max(members) <= WIDE and len(home) == count
