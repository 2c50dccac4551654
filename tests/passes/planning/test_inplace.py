"""Groups that overwrite an input: found if each element is read where it is written; right when run."""

from __future__ import annotations

import numpy as np
import pytest

import dnnc
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.passes.lower.nests import lower
from dnnc.passes.planning import inplace
from dnnc.passes.planning.fuse import plan_fusion
from dnnc.passes.planning.inplace import find_inplace
from dnnc.passes.planning.memory_plan import plan_memory
from support.devices import install

CHAIN = """
def g(x: f32[7, 33], z: f32[7, 33], w: f32[33, 33], v: f32[33, 33]):
    a = matmul(x, w)
    d = matmul(a, v)
    b = {expression}
    return add(matmul(b, w), matmul(b, v)), d
"""  # a and b are operands of products, so that what makes b is a group of its own


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("relu(add(a, z))", "a"),  # read where written
        ("mul(a, sigmoid(a))", "a"),  # twice, at the same element
        ("sub(z, a)", "a"),  # z is the caller's memory
        ("add(transpose(transpose(a, perm=(1, 0)), perm=(1, 0)), z)", "a"),
        ("add(a, slice(a, starts=(0, 0), steps=(1, 1), shape=(1, 33)))", None),  # the first row is read by all
        ("softmax(a)", "a"),  # a row's numbers are there before it is stored
        ("div(a, sqrt(reduce_mean(mul(a, a), axes=(1,), keepdims=True)))", "a"),
        ("sub(a, reduce_mean(a, axes=(0,), keepdims=True))", None),  # a column is summed anew for each element
        (
            "slice(softmax(a), starts=(0, 32), steps=(1, -1), shape=(7, 33))",
            None,
        ),  # stored where another element of the row still has to be read
    ],
)
def test_which_input_is_overwritten(expression: str, expected: str | None) -> None:
    g = parse(CHAIN.format(expression=expression))
    plan = plan_fusion(g)
    found = find_inplace(g, plan)
    b = next(grp for grp in plan.groups if grp.outputs[0].name == "b")
    assert (found[b.outputs[0]].name if b.outputs[0] in found else None) == expected


ROWS = """
def g(x: f32[{m}, 8], w: f32[8, {n}], u: f32[{n}, 8], at: i64[{m}, 1]):
    a = matmul(x, w)
    p = log_softmax(a)
    return matmul(sub(exp(p), mul(p, 0.5)), u), gather_elements(p, at, axis=1)"""


@pytest.mark.parametrize("shape", [(3, 5), *(pytest.param(s, marks=pytest.mark.slow) for s in ((40, 33), (9, 1000)))])
@pytest.mark.parametrize("target", ["llvm", "llvm -mcpu=haswell", "cuda"])
def test_rows_in_place_are_right(shape: tuple[int, int], target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    m, n = shape
    g = parse(ROWS.format(m=m, n=n))
    assert "a" in {x.name for x in find_inplace(g, plan_fusion(g)).values()}
    rng = np.random.default_rng(0)
    xs = [rng.standard_normal(s).astype(np.float32) for s in ((m, 8), (8, n), (n, 8))]
    xs.append(rng.integers(0, n, (m, 1)))
    for got, want in zip(dnnc.compile(g, target=target, cache=False)(*xs), run(g, xs, "float64"), strict=True):
        assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


def test_a_value_that_is_read_later_is_kept() -> None:
    g = parse(
        "def g(x: f32[4, 40]):\n    a = softmax(x)\n    b = softmax(relu(a))\n    c = softmax(neg(a))\n    return "
        "add(b, c)"
    )
    plan = plan_fusion(g, fuse=False)
    memory = plan_memory(g, plan, find_inplace(g, plan))
    overwritten = {v.name for v in memory.inplace.values()}
    a = next(v for v in memory.place if v.name == "a")
    readers = [k for k, grp in enumerate(plan.groups) if any(a in n.inputs for n in grp.nodes)]
    assert all(plan.groups.index(grp) == max(readers) for grp in plan.groups if memory.inplace.get(grp.outputs[0]) is a)
    assert overwritten  # something is shared at all


@pytest.mark.parametrize("shape", ["40, 1, 1, 33", "1, 1, 40, 33", "40, 33, 1"])
def test_axes_of_one_element_do_not_hide_that_an_element_is_its_own(shape: str) -> None:
    g = parse(f"def g(m: f32[{shape}], d: f32[{shape}], r: f32):\n    return add(mul(m, r), d)")
    g.donated = {0: 0}
    assert [v.name for v in find_inplace(g, plan_fusion(g)).values()] == ["m"]


def test_in_place_results_are_right() -> None:
    g = parse(CHAIN.format(expression="relu(add(a, z))"))
    f = dnnc.compile(g, cache=False, threads=2)
    rng = np.random.default_rng(0)
    xs = [rng.standard_normal([int(str(d)) for d in v.type.shape]).astype(np.float32) for v in g.inputs]
    for got, want in zip(f(*xs), run(g, xs, "float64"), strict=True):
        assert np.abs(got - want).max() < 1e-3
    kernels = [s.kernel for s in f.programs[0].scheduled.steps]
    assert f.programs[0].scheduled.memory.inplace
    assert any(k.name == "add_relu" and len(k.entry.buffers) == 2 for k in kernels)


MOMENTUM = """
def g(p: f32[{n}, 96], m: f32[{n}, 96], x: f32[40, {n}], d: f32[40, 96], rate: f32):
    m2 = add(mul(m, 0.9), matmul(transpose(x, perm=(1, 0)), d))
    p2 = sub(p, mul(m2, rate))
    return p2, m2"""


@pytest.mark.parametrize(
    ("n", "donated", "expected"),
    [
        (200, {0: 0, 1: 1}, {"m2": "m", "p2": "p"}),  # the product is a kernel of its own
        (200, {}, {}),
        (16, {0: 0, 1: 1}, {"p2": "p"}),  # small: m2 is made with the product, and takes no memory of its operands
    ],
)
def test_an_update_leaves_the_product_of_its_gradient(
    n: int, donated: dict[int, int], expected: dict[str, str]
) -> None:
    g = parse(MOMENTUM.format(n=n))
    g.donated = donated
    plan = plan_fusion(g)
    assert {y.name: x.name for y, x in find_inplace(g, plan).items()} == expected
    products = [p for p in plan.groups if any(node.op.name == "matmul" for node in p.nodes)]
    assert [len(p.nodes) > 2 for p in products] == ["m2" not in expected]
    rng = np.random.default_rng(0)
    xs = [rng.standard_normal([int(str(d)) for d in v.type.shape]).astype(np.float32) for v in g.inputs]
    want = run(g, xs, "float64")
    g.donated = {}
    pairs = {"p": "p2", "m": "m2"} if donated else {}
    for got, exact in zip(dnnc.compile(g, cache=False, donate=pairs)(*(x.copy() for x in xs)), want, strict=True):
        assert np.abs(got - exact).max() < 1e-4


def test_outputs_that_are_stored_together_are_lowered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    g = parse(
        "def g(p: f32[64, 64], m: f32[64, 64], d: f32[64, 64]):\n    m2 = add(mul(m, 0.9), d)\n"
        "    return sub(p, mul(m2, 0.1)), m2"
    )
    g.donated = {0: 0, 1: 1}
    lowered: list[object] = []
    monkeypatch.setattr(inplace, "lower", lambda *a: lowered.append(a) or lower(*a))
    assert {y.name: x.name for y, x in find_inplace(g, plan_fusion(g)).items()} == {g.outputs[0].name: "p", "m2": "m"}
    assert len(lowered) == 1
