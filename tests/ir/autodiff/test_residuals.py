"""What is kept for a reverse graph: the least bytes from which the rest is cheap to compute."""

from __future__ import annotations

from dnnc.ir.autodiff.invariants import hoist, trim
from dnnc.ir.autodiff.residuals import kept, nominal_bytes
from dnnc.ir.expr import dim
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.core import Graph, Value
from dnnc.ir.graph.text import parse
from dnnc.ir.graph.verify import verify

TEXT = """
def f(x: f32[8], w: f32[8, 8]):
    a: f32[8] = matmul(x, w)
    b: f32[8] = tanh(a)
    c: f32[8] = mul(b, b)
    d: f32[1] = reduce_sum(c, axes=(0,), keepdims=True)
    e: f32[8, 8] = mul(w, b)
    return d, e
"""


def named(g: Graph) -> dict[str, Value]:
    return {v.name: v for v in (*g.inputs, *(o for n in g.nodes() for o in n.outputs))}


def names(found: list[Value]) -> list[str]:
    return sorted(v.name for v in found)


def test_cheap_values_are_computed_again_and_costly_ones_kept() -> None:
    g = parse(TEXT)
    v = named(g)
    at_hand = {v["w"]}
    assert names(kept([v["e"]], at_hand)) == ["b"]  # 32 bytes rather than 256
    assert names(kept([v["c"]], at_hand)) == ["c"]  # as many bytes as b, and nothing to compute
    assert names(kept([v["c"], v["b"]], at_hand)) == ["b"]
    assert names(kept([v["c"], v["d"]], at_hand)) == ["c", "d"]  # a sum is heavy
    assert names(kept([v["b"]], at_hand, again=True)) == ["b"]
    assert names(kept([v["b"], v["d"]], at_hand)) == ["b", "d"]
    assert names(kept([v["b"], v["d"]], at_hand, again=True)) == ["b"]
    assert names(kept([v["c"]], at_hand, stored=[v["b"]])) == ["b"]  # it is there anyway
    assert kept([v["e"], v["a"]], {*at_hand, v["x"], v["b"], v["a"]}) == []


def test_symbolic_sizes_count_as_usual_ones() -> None:
    g = Graph()
    x = g.add_input("x", parse("def f(x: f32[3]):\n    return x").inputs[0].type)
    wide = Builder(g).expand(x, shape=(dim("N", 1, 1000), 3))
    assert nominal_bytes(wide.type) == 64 * 12 and nominal_bytes(x.type) == 12
    assert names(kept([wide], ())) == ["x"]


def test_invariants_leave_a_body() -> None:
    body = parse(
        """
def body(k: i64, h: f32[4], w: f32[4, 4], s: f32):
    t: f32[4, 4] = transpose(w, perm=(1, 0))
    u: f32[4, 4] = exp(t)
    big: f32[9, 4, 4] = expand(w, shape=(9, 4, 4))
    sums: f32[4, 4] = reduce_sum(big, axes=(0,), keepdims=False)
    y: f32[4] = matmul(h, u)
    z: f32[4] = mul(y, s)
    q: f32[4] = matmul(z, sums)
    return q
"""
    )
    made = hoist(body, body.inputs[2:])
    verify(body)
    assert [n.op.name for n in made.graph.nodes()] == ["transpose", "exp"]
    assert names(list(made.given)) == ["w"] and len(made.inputs) == 1
    assert [n.op.name for n in body.nodes()] == ["expand", "reduce_sum", "matmul", "mul", "matmul"]


def test_results_that_nobody_reads_leave_loops_and_branches() -> None:
    g = parse(
        """
def f(c: bool, x: f32[3], y: f32[5, 3], z: f32[5, 3], w: f32[3]):
    def step(k: i64, h: f32[3], a: f32[3], b: f32[3], s: f32[3]):
        d: f32[3] = add(h, a)
        e: f32[3] = mul(b, s)
        return d, e, a
    (u, v, o) = loop(None, None, x, y, z, w, body=step, carried=1, scanned=2, length=5, backward=BACK)
    def then(p: f32[3], q: f32[3]):
        r: f32[3] = exp(q)
        return p, r
    def other(p: f32[3], q: f32[3]):
        return p, q
    (i, j) = cond(c, u, w, then=then, other=other) @ (f32[3], f32[3])
    return i, o
""".replace("BACK", "(True, False, True, False)")
    )
    trim(g)
    verify(g)
    loop, cond = g.nodes()
    assert [v.name for v in loop.inputs if v] == ["x", "y"] and len(loop.outputs) == 2
    assert loop.attrs["backward"] == (True, False) and loop.attrs["scanned"] == 1
    assert [v.name for v in cond.inputs if v] == ["c", "u"] and len(cond.outputs) == 1
