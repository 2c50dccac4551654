"""The graph: walking while it changes, uses, names, order, copies, hashes; and the builder that fills it."""

from __future__ import annotations

import time

import numpy as np
import pytest

from dnnc.ir.dtype import bf16, f32, i32
from dnnc.ir.errors import InternalError, Loc, ShapeError, UnsupportedError
from dnnc.ir.expr import dim
from dnnc.ir.graph import Graph, Node, Value, digest, identifier
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.text import parse
from dnnc.ir.graph.verify import verify
from dnnc.ir.op import OpDef
from dnnc.ir.types import tensor
from support.times import in_a_quiet_round, quiet

Ops = dict[str, OpDef]


def _chain(ops: Ops, length: int = 3) -> tuple[Graph, list[Node]]:
    g = Graph("f")
    b = Builder(g, ops=ops)
    y = g.add_input("x", tensor(f32, 4))
    for _ in range(length):
        y = b.exp(y)
    g.outputs = [y]
    return g, list(g.nodes())


# --- walking and links ------------------------------------------------------------------------------------------------


def test_nodes_come_in_order_both_ways(ops: Ops) -> None:
    g, nodes = _chain(ops)
    assert len(g) == 3 and list(g.nodes(reverse=True)) == nodes[::-1]
    assert [n.output.name for n in nodes] == ["v0", "v1", "v2"]


@pytest.mark.parametrize("reverse", [False, True])
def test_walk_survives_erasing_any_nodes(ops: Ops, reverse: bool) -> None:
    g, _ = _chain(ops, 6)
    seen = []
    for n in g.nodes(reverse):
        seen.append(n)
        if len(seen) == 2:  # the current node and its neighbours on both sides go away
            for m in [n, n.next, n.prev]:
                assert m is not None
                g.replace_all_uses(m.output, g.inputs[0])
                g.erase(m)
    assert len(seen) == 5 and len(g) == 3
    verify(g)


def test_walk_sees_what_is_inserted_behind_the_current_node(ops: Ops) -> None:
    g, nodes = _chain(ops)
    seen = []
    for n in g.nodes():
        seen.append(n)
        if n is nodes[1]:
            Builder(g, before=n, ops=ops).exp(g.inputs[0])  # in front: not visited
            Builder(g, before=nodes[2], ops=ops).exp(g.inputs[0])
    assert len(seen) == 4 and len(g) == 5
    verify(g)


def test_insert_before_and_append(ops: Ops) -> None:
    g, nodes = _chain(ops, 1)
    first = Builder(g, before=nodes[0], ops=ops).exp(g.inputs[0])
    last = Builder(g, ops=ops).exp(first)
    assert [n.output for n in g.nodes()] == [first, nodes[0].output, last]
    with pytest.raises(InternalError, match="already in graph f"):
        g.append(nodes[0])


# --- uses and rewriting -----------------------------------------------------------------------------------------------


def test_uses_follow_the_operands(ops: Ops) -> None:
    g = Graph()
    b = Builder(g, ops=ops)
    x, y = g.add_input("x", tensor(f32, 4)), g.add_input("y", tensor(f32, 4))
    s = b.add(x, x)
    e = b.exp(x)
    assert list(x.uses) == [(s.node, 0), (s.node, 1), (e.node, 0)] and g.users(x) == [s.node, e.node]
    s.node.set_input(1, y)
    assert list(x.uses) == [(s.node, 0), (e.node, 0)] and g.users(y) == [s.node]
    s.node.set_input(1, None)
    assert not y.uses


def test_replace_all_uses(ops: Ops) -> None:
    g = parse("def f(x: f32[4]):\n    a = exp(x)\n    y = exp(a)\n    return y, a\n", ops=ops)
    a, y = g.outputs[1], g.outputs[0]
    a.locs, y.locs = (Loc("a"), Loc("both")), (Loc("both"), Loc("y"))
    g.replace_all_uses(a, y)  # y itself goes on reading a
    assert y.node is not None and y.node.inputs == [a]
    assert g.outputs == [y, y] and [str(p) for p in y.locs] == ["both", "y", "a"]
    verify(g)


def test_an_output_keeps_its_name(ops: Ops) -> None:
    g, nodes = _chain(ops)
    g.rename(nodes[-1].output, "result")
    new = Builder(g, ops=ops).exp(g.inputs[0])
    g.replace_all_uses(nodes[-1].output, new)
    g.erase(nodes[-1])
    assert g.outputs == [new] and new.name == "result"
    verify(g)


def test_replacement_in_front_of_its_own_input(ops: Ops) -> None:
    """y = exp(x): all readers of x but the new nodes read exp(exp(x))."""
    g, nodes = _chain(ops, 2)
    b = Builder(g, before=nodes[0], ops=ops)
    inner = b.exp(g.inputs[0])
    outer = b.exp(inner)
    g.replace_all_uses(g.inputs[0], outer, keep=[inner.node])
    assert nodes[0].inputs == [outer] and inner.node.inputs == [g.inputs[0]]
    verify(g)


def test_values_in_use_cannot_be_erased(ops: Ops) -> None:
    g, nodes = _chain(ops)
    for n in nodes:
        with pytest.raises(InternalError, match="is still read"):
            g.erase(n)
    c = g.constant(1.0)
    s = Builder(g, ops=ops).exp(c)
    with pytest.raises(InternalError, match="is still read"):
        g.erase_constant(c)
    g.erase(s.node)
    g.erase_constant(c)
    assert not g.constants and g.fresh_name("c") == "c"


# --- names and dims ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, name",
    [
        ("input.1", "input_1"),
        ("123", "v123"),
        ("", "v"),
        ("for", "for_"),
        ("a b/c:0", "a_b_c_0"),
        ("é", "_"),
        ("x", "x"),
    ],
)
def test_identifiers(given: str, name: str) -> None:
    assert identifier(given) == name and name.isidentifier()


def test_names_are_unique_and_reused_when_free(ops: Ops) -> None:
    g = Graph("torch-jit")
    names = [g.add_input(n, tensor(f32)).name for n in ("a.b", "a_b", "a b", "v0")]
    assert names == ["a_b", "a_b_0", "a_b_1", "v0"] and g.name == "torch_jit"
    y = Builder(g, ops=ops).exp(g.inputs[0])
    assert y.name == "v1"
    g.rename(y, "a_b")
    assert y.name == "a_b_2" and g.fresh_name() == "v1"


def test_dims_are_declared_as_they_appear() -> None:
    g = Graph()
    n, m = dim("N", 1, 64, 8), dim("M")
    g.add_input("x", tensor(f32, n + m, 2))
    assert g.dims == {"M": m, "N": n}
    with pytest.raises(
        ShapeError, match=r"the dim N stands for two dims, one in \[1, 64\] divisible by 8, one in \[1, None\]"
    ):
        g.add_input("y", tensor(f32, dim("N")))


# --- order ------------------------------------------------------------------------------------------------------------


# --- constants, copies, hashes ----------------------------------------------------------------------------------------


def test_constants_are_shared_and_read_only() -> None:
    a = np.arange(4, dtype=np.float32)
    g = Graph()
    v = g.constant(a)
    held = g.constants[v]
    assert np.shares_memory(held, a) and not held.flags.writeable and a.flags.writeable
    assert v.type == tensor(f32, 4)


def test_digest_depends_on_dtype_shape_and_content() -> None:
    a = np.arange(6, dtype=np.int32)
    others = [
        a.reshape(2, 3),
        a.astype(np.uint32),
        a + 1,
        a.view(np.float32),
        a[:5],
        np.array(["a", "bc"], object),
        np.array(["ab", "c"], object),
    ]
    hashes = [digest(x) for x in [a, *others]]
    assert len(set(hashes)) == len(hashes)
    assert (
        digest(np.asfortranarray(a.reshape(2, 3)))
        == digest(a.reshape(2, 3))
        == digest(np.stack([a, a], 1)[:, 0].reshape(2, 3))
    )
    assert digest(np.zeros((), bf16.numpy)) != digest(np.zeros((0, 2), bf16.numpy))


def test_a_constant_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from dnnc.ir.graph import core as graph

    calls = []
    monkeypatch.setattr(graph, "digest", lambda a: calls.append(a) or "sha256:0")
    g = Graph()
    v = g.constant(np.zeros(9))
    g.outputs = [v]
    assert g.structural_hash() == g.structural_hash() == g.copy().structural_hash() and len(calls) == 1
    g.constants[v] = np.ones(9)
    g.structural_hash()
    assert len(calls) == 2


NESTED = """\
N: dim[1, 64, 8]
def f(x: f32[N, 2], *, c: f32[2] = [1.0, 2.0]):
    s: f32[N, 2] = add(x, c)
    def body(h: f32[N, 2]):
        e: f32[N, 2] = exp(h)
        return e
    y: f32[N, 2] = repeat(s, body=body, times=2)
    return y
"""


def test_copy_is_independent(ops: Ops) -> None:
    g = parse(NESTED, ops=ops)
    h = g.copy()
    assert str(h) == str(g) == NESTED and h.structural_hash() == g.structural_hash()
    verify(h)
    first = next(iter(h.nodes()))
    h.replace_all_uses(first.output, h.inputs[0])
    h.erase(first)
    body = next(s for n in h.nodes() for s in n.subgraphs())
    body.outputs = [body.inputs[0]]
    verify(h)
    assert str(g) == NESTED


@pytest.mark.parametrize(
    "old, new",
    [
        ("exp(h)", "square(h)"),
        ("[1.0, 2.0]", "[1.0, 3.0]"),
        ("times=2", "times=3"),
        ("dim[1, 64, 8]", "dim[1, 32, 8]"),
        ("return y", "return s"),
        ("f32", "f64"),
    ],
)
def test_hash_sees_every_change(old: str, new: str, ops: Ops) -> None:
    assert parse(NESTED.replace(old, new), ops=ops).structural_hash() != parse(NESTED, ops=ops).structural_hash()


def test_hash_ignores_names_and_locations(ops: Ops) -> None:
    g = parse(
        NESTED.replace("s:", "other:")
        .replace("(s,", "(other,")
        .replace("body", "loop_body")
        .replace("loop_body=", "body="),
        ops=ops,
    )
    next(iter(g.nodes())).locs = (Loc("a"),)
    assert g.structural_hash() == parse(NESTED, ops=ops).structural_hash()


# --- builder ----------------------------------------------------------------------------------------------------------


def test_builder_infers_types_and_returns_values(ops: Ops) -> None:
    g = Graph()
    b = Builder(g, ops=ops)
    x = g.add_input("x", tensor(f32, dim("N"), 3))
    y = b.matmul(x, b.constant(np.zeros((3, 5), np.float32), "w"))
    assert isinstance(y, Value) and str(y.type) == "f32[N, 5]"
    assert b.op("exp", y).node.op is ops["exp"] and b.op(ops["exp"], y).type == y.type
    values, order = b.topk(y, k=2)
    assert (str(values), str(order)) == ("v3: f32[N, 2]", "v4: i64[N, 2]")
    assert values.node.attrs == {"k": 2, "axis": -1}  # defaults are filled in


def test_numbers_take_the_dtype_of_the_values_beside_them(ops: Ops) -> None:
    g = Graph()
    b = Builder(g, ops=ops)
    x, n = g.add_input("x", tensor(bf16, 2)), g.add_input("n", tensor(i32, 2))
    b.add(x, 1.5)
    b.mul(2, n)
    b.add(x, np.zeros(2, bf16.numpy))
    assert [str(v) for v in g.constants] == ["c: bf16", "c_0: i32", "c_1: bf16[2]"]
    with pytest.raises(ShapeError, match=r"the number 0\.5 stands beside i32 operands"):
        b.add(n, 0.5)


def test_builder_carries_locations(ops: Ops) -> None:
    g = Graph()
    b = Builder(g, locs=(Loc("conv1", "Conv", 13),), ops=ops)
    y = b.exp(b.constant(1.0))
    assert y.locs == y.node.locs == b.locs == next(iter(g.constants)).locs


def test_builder_errors_say_op_types_and_place(ops: Ops) -> None:
    g = Graph()
    b = Builder(g, locs=(Loc("fc", "MatMul", 9),), ops=ops)
    x = g.add_input("x", tensor(f32, 2, 3))
    with pytest.raises(
        ShapeError, match=r"^matmul\(f32\[2, 3\], f32\[2, 3\]\) at fc \(MatMul, opset 9\): inner dims differ"
    ):
        b.matmul(x, x)
    with pytest.raises(ShapeError, match=r"^softmax\(f32\[2, 3\], axis=2\) at fc .*: axis 2 is outside"):
        b.softmax(x, axis=2)
    with pytest.raises(ShapeError, match="negative dim"):
        b.topk(x, k=-1)
    with pytest.raises(ShapeError, match="wrong operands or attributes"):
        b.exp(x, x)
    with pytest.raises(UnsupportedError, match="no op 'sofmax'; did you mean softmax"):
        b.op("sofmax", x)
    with pytest.raises(AttributeError, match="no op sofmax"):
        b.sofmax(x)
    with pytest.raises(InternalError, match="arrays are operands"):
        b.note(x, dims=np.zeros(2))
    assert len(g) == 0


@in_a_quiet_round
def test_large_graphs_are_cheap(ops: Ops) -> None:
    """1,500 nodes are built and verified in under 100 ms of processor time (typically 20)."""
    start = time.process_time()
    g = Graph()
    b = Builder(g, ops=ops)
    x = y = g.add_input("x", tensor(f32, 8, 16))
    for _ in range(750):
        y = b.add(b.softmax(y, axis=1), x)
    g.outputs = [y]
    verify(g)
    assert len(g) == 1500
    quiet(time.process_time() - start < 0.1)
