"""The pass manager: records, verification, dumps, blame; the list of passes as text; the rewrite driver; Python time on
large graphs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dnnc.ir.dtype import f32
from dnnc.ir.errors import InputError, InternalError, ShapeError, VerifyError
from dnnc.ir.graph import Graph, Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.text import parse
from dnnc.ir.graph.verify import verify
from dnnc.ir.op import Trait
from dnnc.ir.types import tensor
from dnnc.passes.base import Pass, PassContext, PassManager, count_nodes, graphs, is_pure, parse_passes, totals
from dnnc.passes.rewrite import Match, Rule, bits, rewrite, uniform
from dnnc.passes.rewrites.canonicalize import canonicalize
from dnnc.passes.rewrites.cse import cse
from dnnc.passes.rewrites.dce import dce
from dnnc.passes.rewrites.decompose import decompose
from dnnc.passes.rewrites.fold import fold
from dnnc.passes.rewrites.fold_batch_norm import fold_batch_norm
from dnnc.passes.rewrites.idioms import idioms
from support.times import growth

TABLE = (Pass("fold", fold, "constants first"), Pass("cse", cse, "equal nodes"), Pass("dce", dce, "what is left over"))
TEXT = "def f(x: f32[3]):\n    return add(exp(x), exp(x))\n"


def failing(error: Exception) -> Pass:
    def run(graph: Graph, ctx: PassContext) -> bool:
        raise error

    return Pass("broken", run, "fails")


def test_records_say_what_each_pass_did() -> None:
    g, manager = parse(TEXT), PassManager()
    assert manager.run(g, TABLE, PassContext()) is True
    assert [(r.name, r.nodes_before, r.nodes_after, r.changed) for r in manager.records] == [
        ("fold", 3, 3, False),
        ("cse", 3, 2, True),
        ("dce", 2, 2, False),
    ]
    assert all(r.seconds >= 0 for r in manager.records)
    assert str(manager.records[1]).endswith("3 -> 2 nodes") and str(manager.records[2]).endswith(
        "2 -> 2 nodes, unchanged"
    )
    assert manager.run(g, TABLE, PassContext()) is False and len(manager.records) == 6
    assert set(totals(manager.records)) == {"fold", "cse", "dce"}


def test_dumps_before_the_first_and_after_each() -> None:
    seen: list[tuple[str, str]] = []
    g = parse(TEXT)
    PassManager().run(g, TABLE[:2], PassContext(dump=lambda name, graph: seen.append((name, str(graph)))))
    assert [name for name, _ in seen] == ["before fold", "after fold", "after cse"]
    assert seen[0][1].count("exp") == 2 and seen[2][1].count("exp") == 1


def test_a_pass_that_breaks_the_graph_is_named() -> None:
    def run(graph: Graph, ctx: PassContext) -> bool:
        graph.outputs[0] = Value("stray", tensor(f32, 3))
        return True

    with pytest.raises(VerifyError, match="pass loses broke the graph: graph f: the output stray"):
        PassManager().run(parse(TEXT), [Pass("loses", run, "")], PassContext(check=True))


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (KeyError("axis"), InternalError, "pass broken: KeyError: 'axis'; please report"),
        (InternalError("no"), InternalError, "pass broken: no"),
        (ShapeError("2 against 3"), ShapeError, "pass broken: 2 against 3"),
    ],
)
def test_a_failing_pass_is_named(error: Exception, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        PassManager().run(parse(TEXT), [failing(error)], PassContext())


def test_passes_from_text() -> None:
    assert [p.name for p in parse_passes(" dce, fold,dce,", TABLE)] == ["dce", "fold", "dce"]
    assert parse_passes("", TABLE) == []
    with pytest.raises(InputError, match=r"there is no pass 'fild'; did you mean fold\? There are: fold, cse, dce"):
        parse_passes("cse,fild", TABLE)


# --- nested graphs ----------------------------------------------------------------------------------------------------


def nested(effect: bool = False) -> Graph:
    """A graph with an op that runs a subgraph."""
    from dnnc.ir.op import OpDef
    from dnnc.ir.ops import OPS

    def type_(x: Any, *, body: Graph) -> Any:
        return x

    traits = frozenset() if effect else frozenset((Trait.PURE,))
    ops = {**OPS, "apply": OpDef("apply", type_, host=lambda x, body: body(x)[0], traits=frozenset((Trait.PURE,)))}
    ops["note"] = OpDef("note", lambda x: x, host=lambda x: x, traits=traits)
    text = """\
def f(x: f32[3]):
    def body(h: f32[3]):
        a: f32[3] = neg(h)
        b: f32[3] = neg(a)
        c: f32[3] = note(b)
        return c
    y: f32[3] = apply(x, body=body)
    return y
"""
    return parse(text, ops=ops)


def test_subgraphs_come_first_and_count() -> None:
    g = nested()
    assert [s.name for s in graphs(g)] == ["body", "f"]
    assert count_nodes(g) == 4
    assert canonicalize(g, PassContext()) and count_nodes(g) == 2


def test_an_effect_inside_makes_the_whole_node_impure() -> None:
    assert [is_pure(n) for n in nested().nodes()] == [True]
    assert [is_pure(n) for n in nested(effect=True).nodes()] == [False]


# --- the driver -------------------------------------------------------------------------------------------------------


def test_a_cycle_of_rules_is_found() -> None:
    def there(m: Match) -> Value:
        return m.b.sub(*m.root.inputs)  # type: ignore[no-any-return]

    def back(m: Match) -> Value:
        return m.b.add(*m.root.inputs)  # type: ignore[no-any-return]

    g = parse("def f(x: f32[3], y: f32[3]):\n    return add(x, y)\n")
    with pytest.raises(InternalError, match="rewriting does not end"):
        rewrite(g, (Rule(there, ("add",)), Rule(back, ("sub",))), PassContext())


def test_a_rule_may_not_change_the_type() -> None:
    def shrink(m: Match) -> Value:
        return m.operand(m.root, 1)

    g = parse("def f(x: f32[3], y: f32[1]):\n    return add(x, y)\n")
    with pytest.raises(InternalError, match=r"rule shrink replaces .* by a f32\[1\]"):
        rewrite(g, (Rule(shrink, ("add",)),), PassContext())


def test_a_rule_asks_before_it_builds() -> None:
    def late(m: Match) -> Value:
        v: Value = m.b.neg(m.operand(m.root, 0))
        m.require(False, "too late")
        return v

    with pytest.raises(InternalError, match="rule late built nodes before it gave up"):
        rewrite(parse(TEXT), (Rule(late, ("exp",)),), PassContext())


def test_a_replacement_carries_all_locations_and_the_name() -> None:
    from dnnc.ir.errors import Loc

    g = Graph("f")
    x = g.add_input("x", tensor(f32, 4))
    b = Builder(g, locs=(Loc("first", "Reshape", 13),))
    y = b.reshape(x, shape=(2, 2))
    b.locs = (Loc("second", "Reshape", 13),)
    z = b.reshape(y, shape=(1, 4))
    b.locs = (Loc("third", "Exp", 13),)
    g.outputs = [b.exp(z)]
    name = z.name
    assert canonicalize(g, PassContext())
    (merged, _) = g.nodes()
    assert sorted(loc.name for loc in merged.locs) == ["first", "second"] and merged.output.name == name


def test_uniform_looks_at_bits() -> None:
    assert uniform(np.full((2, 3), 2.5, np.float32)) == 2.5
    assert uniform(np.array([0.0, -0.0, 0.0])) is None
    assert uniform(np.array([1, 1], np.int8)) == 1 and uniform(np.array([True, True])) is True
    assert uniform(np.array([], np.float32)) is None and uniform(np.array(["a", "a"], object)) is None
    assert np.isnan(uniform(np.array([np.nan, np.nan])))
    assert bits(np.array([1.0], np.float32))[0] == 0x3F800000


# --- speed ------------------------------------------------------------------------------------------------------------


def layers(count: int) -> Graph:
    """A stack of blocks of 15 nodes with the idioms, copies and constants that exporters leave."""
    g = Graph("stack")
    x = g.add_input("x", tensor(f32, 8, 32))
    b = Builder(g)
    rng = np.random.default_rng(0)
    for _ in range(count // 15):
        w = b.constant(rng.standard_normal((32, 32)).astype(np.float32))
        h = b.add(b.constant(rng.standard_normal(32).astype(np.float32)), b.matmul(x, w))
        h = b.reshape(b.reshape(h, shape=(2, 4, 32)), shape=(8, 32))
        mean = b.reduce_mean(h, axes=(-1,), keepdims=True)
        d = b.sub(h, mean)
        v = b.reduce_mean(b.pow(d, 2.0), axes=(-1,), keepdims=True)
        y = b.div(d, b.sqrt(b.add(v, 1e-5)))
        x = b.mul(b.mul(y, 0.5), b.add(b.erf(b.div(y, 1.4142135)), 1.0))
    g.outputs = [x]
    return g


ALL = [Pass(f.__name__, f, "") for f in (fold, fold_batch_norm, decompose, canonicalize, cse, idioms, dce)]


def run_all(g: Graph) -> None:
    PassManager().run(g, ALL, PassContext())


@pytest.mark.slow
def test_large_graphs_take_little_time() -> None:
    g = layers(1500)
    run_all(g)
    verify(g)
    assert len(g) == 1500 // 15 * 4  # matmul, add, normalization, gelu
    small, large = growth(layers, run_all, 1500, 3000, 2.3)
    assert small < 1.0, f"1,500 nodes take {small:.2f} s"
    assert large < 2.3 * small, f"3,000 nodes take {large / small:.1f} times as long as 1,500"
