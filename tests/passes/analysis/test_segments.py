"""segments: what runs on the host, how few segments there are, their order, what crosses borders."""

from __future__ import annotations

import pytest

from dnnc.ir.dtype import f32, i64
from dnnc.ir.expr import dim
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.text import parse
from dnnc.ir.graph.verify import verify
from dnnc.ir.op import OpDef, Trait
from dnnc.ir.types import tensor
from dnnc.passes.analysis.segments import HostStep, Segment, is_host, needs_host, prepare, split
from dnnc.passes.base import PassContext


def shown(text: str) -> list[str]:
    """The ops of each step: natives of one segment together."""
    g = parse(text)
    steps = split(g)
    for s in steps:
        if isinstance(s, Segment):
            verify(s.graph)
            assert [v.type for v in s.inputs] == [v.type for v in s.graph.inputs][: len(s.inputs)]
            assert [v.name for v in s.outputs] == [v.name for v in s.graph.outputs]
    assert sum(1 if isinstance(s, HostStep) else len(s.graph) for s in steps) == len(g)
    return [s.node.op.name if isinstance(s, HostStep) else " ".join(n.op.name for n in s.graph.nodes()) for s in steps]


def test_no_host_node() -> None:
    g = parse("def f(x: f32[N]):\n    y = exp(x)\n    return y\n")
    assert not needs_host(g)
    assert len(split(g)) == 1


def test_the_host_first_makes_one_segment() -> None:
    text = """
def f(x: f32[3], t: str[3], c: f32[4], k: str[2]):
    n = relu(x)
    s = string_index(t, k)
    w = gather(c, s)
    y = add(n, w)
    return y
"""
    assert shown(text) == ["string_index", "relu gather add"]


def test_native_first_then_the_host() -> None:
    text = """
n: dim[0, 3]
def f(x: f32[3], c: i64):
    a = relu(x)
    t = truncate(a, c, size=n)
    b = exp(x)
    return t, b
"""
    assert shown(text) in (["relu exp", "truncate"], ["relu", "truncate", "exp"])
    assert len([s for s in shown(text) if s != "truncate"]) == 1  # exp waits for nobody and nobody for it: one segment


def test_a_native_node_goes_back_to_its_readers() -> None:
    text = """
n: dim[0, 3]
def f(x: f32[3], z: f32[3], c: i64):
    a = relu(x)
    b = exp(z)
    t = truncate(a, c, size=n)
    s = reduce_sum(t, axes=(0,))
    y = mul(b, s)
    return y
"""
    assert shown(text) == ["relu", "truncate", "exp reduce_sum mul"]


def test_what_follows_its_producer_stays_with_it() -> None:
    """exp(a) is only read by the second segment, but a is made in the first: it fuses there."""
    text = """
n: dim[0, 3]
def f(x: f32[3], c: i64):
    a = relu(x)
    b = exp(a)
    t = truncate(a, c, size=n)
    s = reduce_sum(t, axes=(0,))
    y = mul(b, s)
    return y
"""
    assert shown(text) == ["relu exp", "truncate", "reduce_sum mul"]


def test_host_nodes_that_alternate() -> None:
    text = """
n: dim[0, 9]
m: dim[0, 9]
def f(x: f32[9], c: i64, d: i64):
    a = truncate(x, c, size=n)
    b = exp(a)
    e = truncate(b, d, size=m)
    y = exp(e)
    return y
"""
    assert shown(text) == ["truncate", "exp", "truncate", "exp"]


def test_a_size_alone_orders_nodes() -> None:
    """iota reads nothing; that its size is made by a host node shows in its type only."""
    g = parse("""
n: dim[0, 9]
def f(x: i64[4]):
    c = reduce_sum(x, axes=(0,))
    m = measure(c, size=n)
    y = iota(shape=(n,))
    return y
""")
    first, measure, last = split(g)
    assert isinstance(first, Segment) and isinstance(measure, HostStep) and isinstance(last, Segment)
    assert [x.name for x in last.carried] == ["n"] and str(last.graph.inputs[-1].type) == "u8[n, 0]"
    assert last.inputs == ()


def test_dims_that_inputs_do_not_show_are_carried() -> None:
    g = parse("""
n: dim[0, N]
def f(x: f32[N], s: f32, t: str[n]):
    q = string_concat(t, t)
    b = expand(s, shape=(N,))
    y = mul(b, s)
    return y, q
""")
    (segment,) = (s for s in split(g) if isinstance(s, Segment))
    assert [v.name for v in segment.inputs] == ["s"] and [x.name for x in segment.carried] == ["N"]


def test_constants_are_shared_not_passed() -> None:
    g = parse(
        'def f(t: str[3], *, c: f32[3] = [1.0, 2.0, 3.0], k: str[1] = ["a"]):\n    s = string_index(t, k)\n    y = '
        "gather(c, s)\n    return y\n"
    )
    host, segment = split(g)
    assert isinstance(host, HostStep) and isinstance(segment, Segment)
    (c,) = segment.graph.constants.values()
    assert c.base is next(a for v, a in g.constants.items() if v.name == "c").base


def test_movement_of_strings_is_the_hosts() -> None:
    g = parse(
        "def f(t: str[4], x: f32[4]):\n    r = reshape(t, shape=(2, 2))\n    y = reshape(x, shape=(2, 2))\n    return "
        "r, y\n"
    )
    assert [is_host(n) for n in g.nodes()] == [True, False]
    assert needs_host(parse("def f(t: str[4]):\n    return t\n"))


def test_control_flow_around_host_nodes() -> None:
    inner = parse(
        'def body(t: str[2], *, k: str[1] = ["a"]):\n    s = string_index(t, k)\n    y = gather(k, s)\n    return s\n'
    )
    op = OpDef(
        "apply",
        lambda *xs, body: body.outputs[0].type,
        host=None,
        reference=lambda *xs, body: body(*xs)[0],
        decompose=lambda b, x, body: x,
    )
    g = Graph("f")
    x = g.add_input("x", tensor(i64, 2))
    node = Builder(g).node(op, [x], {"body": inner})
    g.outputs = list(node.outputs)
    assert is_host(node) and needs_host(g)


@pytest.mark.parametrize("text", ["def f(x: f32[3]):\n    y = nested(x)\n    return y\n"])
def test_decompositions_with_host_nodes_are_expanded_first(text: str) -> None:
    n = dim("n", 0, 3)

    def cut(b: Builder, x: object) -> object:
        return b.truncate(x, b.constant(2, dtype=i64), size=n)

    op = OpDef("nested", lambda x: tensor(f32, n), decompose=cut, traits=frozenset((Trait.PURE, Trait.HOST)))
    from dnnc.ir.ops import OPS

    g = parse(text, ops={**OPS, "nested": op})
    assert needs_host(g)
    prepare(g, PassContext())
    verify(g)
    assert [m.op.name for m in g.nodes()] == ["truncate"]
