"""Reductions over the same rows: what is a number of a row, which of them become one kernel, and that its results are
right on both targets.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import dnnc
from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.text import show_kernel
from dnnc.ir.tolerances import bound
from dnnc.passes.analysis.rows import Rows, find_numbers, rows_of
from dnnc.passes.lower.nests import lower
from dnnc.passes.planning.fuse import plan_fusion
from dnnc.tools.sample_graphs import graph_of
from support.devices import install
from support.random_rows import random_rows

SPREAD = """def g(a: f32[{n}, {m}]):
    d = sub(a, reduce_mean(a, axes=(1,), keepdims=True))
    return reduce_mean(mul(d, d), axes=(1,), keepdims=False)"""
BATCH_NORM = """def g(x: f32[{shape}], *, w: f32[{params}], b: f32[{params}]):
    d = sub(x, reduce_mean(x, axes={axes}, keepdims=True))
    v = reduce_mean(mul(d, d), axes={axes}, keepdims=True)
    return add(mul(div(d, sqrt(add(v, 1e-5))), w), b)"""
SOFTMAX = """def g(x: f32[{shape}]):
    e = exp(sub(x, reduce_max(x, axes=({axis},), keepdims=True)))
    return div(e, reduce_sum(e, axes=({axis},), keepdims=True))"""

JOINED = {
    "mean of squares": SPREAD.format(n=64, m=100),
    "batch norm of a matrix": BATCH_NORM.format(shape="96, 32", params="1, 32", axes=(0,)),
    "batch norm of images": BATCH_NORM.format(shape="4, 9, 5, 6", params="1, 9, 1, 1", axes=(0, 2, 3)),
    "softmax": SOFTMAX.format(shape="20, 100", axis=1),
    "softmax across": SOFTMAX.format(shape="6, 20, 32", axis=1),
    "one row that is short": SOFTMAX.format(shape="1, 100", axis=1),
    "numbers without the axis, put back": """def g(x: f32[20, 50]):
    s = sqrt(add(reduce_sum(mul(x, x), axes=(1,), keepdims=False), 1.0))
    return div(x, reshape(s, shape=(20, 1)))""",
    "a leading axis needs no putting back": "def g(x: f32[40, 30]):\n    return sub(x, reduce_mean(x, axes=(0,), "
    "keepdims=False))",
    "several reductions make one number": """def g(x: f32[20, 50], y: f32[20, 50]):
    n = sqrt(mul(reduce_sum(mul(x, x), axes=(1,)), reduce_sum(mul(y, y), axes=(1,))))
    return div(reduce_sum(mul(x, y), axes=(1,)), n)""",
    "what a row op makes is reduced": "def g(x: f32[20, 50], y: f32[20, 50]):\n    return reduce_sum(mul(softmax(x), "
    "y), axes=(1,))",
    "a number that is wanted itself, and what is costly of it": """def g(x: f32[20, 30]):
    m = reduce_mean(x, axes=(1,), keepdims=True)
    return sub(x, tanh(m)), m""",
    "a row that goes elsewhere as well": """def g(x: f32[20, 30]):
    d = sub(x, reduce_mean(x, axes=(1,), keepdims=True))
    return d, reduce_sum(mul(d, d), axes=(1,))""",
    "something costly, read twice": """def g(x: f32[20, 50]):
    t = tanh(x)
    return sub(t, reduce_mean(t, axes=(1,), keepdims=True))""",
}
APART = {
    "the number of another row: columns read what rows made": (
        "def g(x: f32[30, 30]):\n    return sub(x, reduce_mean(x, axes=(1,), keepdims=False))",
        ["reduce_mean", "sub"],
    ),
    "other axes": (
        """def g(x: f32[20, 30]):
    y = sub(x, reduce_mean(x, axes=(1,), keepdims=True))
    return div(y, reduce_max(abs(y), axes=(0,), keepdims=True))""",
        ["reduce_mean", "sub + abs + reduce_max + div"],
    ),
    "a reshape of a number that another kernel needs": (
        """def g(x: f32[20, 30], *, w: f32[20, 8]):
    m = reduce_mean(x, axes=(1,), keepdims=False)
    return sub(x, reshape(m, shape=(20, 1))), matmul(reshape(m, shape=(1, 20)), w)""",
        ["reduce_mean + reshape + sub", "matmul"],
    ),
    "few long rows": (SPREAD.format(n=2, m=70000), ["reduce_mean", "sub + mul + reduce_mean"]),
    "a contraction keeps what follows it": (
        """def g(x: f32[20, 30], y: f32[20, 16], *, w: f32[16, 30]):
    return mul(relu(matmul(y, w)), reduce_max(x, axes=(1,), keepdims=True))""",
        ["reduce_max", "matmul + relu + mul"],
    ),
}


def groups(g: Graph) -> list[str]:
    return [" + ".join(n.op.name for n in grp.nodes) for grp in plan_fusion(g).groups]


@pytest.fixture(scope="module", autouse=True)
def _device() -> Iterator[None]:
    """`target="cuda"` is the interpreter here."""
    with pytest.MonkeyPatch.context() as m:
        install(m)
        yield


def check(text: str, target: str, seed: int = 0, numerics: str = "standard") -> int:
    """Compare with float64; the number of kernels."""
    g = graph_of(text)
    rng = np.random.default_rng(seed)
    inputs = [rng.standard_normal([int(d) for d in v.type.shape]).astype(np.float32) for v in g.inputs]  # type: ignore[arg-type]
    want = run(graph_of(text), inputs, "float64")
    f = dnnc.compile(g, target=target, cache=False, numerics=numerics)
    got = f(*inputs)
    for a, b in zip(got if isinstance(got, tuple) else (got,), want, strict=True):
        assert a.shape == b.shape
        assert np.abs(a - b).max() <= bound(g.outputs[0].type.dtype, 1000, np.append(b, 1.0))
    return len(f.programs[0].scheduled.steps)


# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.family("shapes")
@pytest.mark.parametrize("name", JOINED)
def test_one_kernel(name: str) -> None:
    """As written, and whatever the passes make of it."""
    assert len(groups(graph_of(JOINED[name]))) == 1
    for target in ("llvm", "cuda"):
        for numerics in ("standard", "strict"):
            assert check(JOINED[name], target, numerics=numerics) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", APART)
def test_several_kernels(name: str) -> None:
    text, expected = APART[name]
    assert groups(graph_of(text)) == expected
    check(text, "llvm")


def test_sizes_that_are_not_known_count_as_many() -> None:
    g = parse("N: dim[1, 99]\n" + SPREAD.format(n="N", m="N"))
    assert groups(g) == ["reduce_mean + sub + mul + reduce_mean"]


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_numbers_of_rows() -> None:
    g = graph_of(
        """def g(x: f32[4, 6, 5], y: f32[4, 1, 5]):
    m: f32[4, 1, 5] = reduce_mean(x, axes=(1,), keepdims=True)
    n: f32[4, 5] = reshape(neg(m), shape=(4, 5))
    o: f32[4, 6, 5] = mul(x, m)
    p: f32[4, 1, 5] = mul(y, m)
    q: f32[4, 1, 5] = exp(y)
    s: f32[4, 6, 5] = softmax(x, axis=1)
    return o, n, p, q, s"""
    )
    rows = Rows((4, 6, 5), (1,))
    found = find_numbers(g)
    assert {v.name for v in found} == {"m", "v0", "n", "p"} and set(found.values()) == {rows}
    by_name = {v.name: v for n in g.nodes() for v in n.outputs}
    assert rows_of(by_name["s"].node) == rows and rows_of(by_name["o"].node) is None  # type: ignore[arg-type]
    assert rows.of_elements(by_name["o"]) and not rows.of_elements(by_name["m"])
    assert rows.reads_own(by_name["m"]) and not rows.reads_own(
        by_name["n"]
    )  # [4, 5] would be read along the second axis


@pytest.mark.family("shapes")
@pytest.mark.parametrize(
    ("shape", "axes", "worth", "piece"),
    [
        ((64, 4096), (1,), True, True),
        ((8, 1 << 20), (1,), True, False),
        ((7, 1 << 15), (1,), False, False),
        ((1, 1 << 14), (1,), True, True),
        ((1 << 20, 7), (0,), False, False),
        ((512, 64), (0,), True, False),
    ],
)
def test_which_rows_are_worth_one_kernel(
    shape: tuple[int, ...], axes: tuple[int, ...], worth: bool, piece: bool
) -> None:
    rows = Rows(shape, axes)
    assert rows.worth() == worth and rows.lie_in_one_piece() == piece


# --- nests ------------------------------------------------------------------------------------------------------------


def nest(text: str) -> str:
    g = graph_of(text)
    (group,) = plan_fusion(g).groups
    return show_kernel(lower(g, group.nodes, group.outputs).kernel)


def test_stages_of_a_row() -> None:
    assert (
        nest(SPREAD.format(n=64, m=100))
        == """\
def reduce_mean_sub_mul_reduce_mean(x0: f32[64, 100], y: f32[64]):
    for i0 in range(64):
        acc: f32[1] @ register
        acc[0] = 0.0
        for r0 in range(100):
            acc[0] = acc[0] + x0[i0, r0]
        acc_1: f32[1] @ register
        acc_1[0] = 0.0
        for r0_1 in range(100):
            acc_1[0] = fma(x0[i0, r0_1] - acc[0] / 100.0, x0[i0, r0_1] - acc[0] / 100.0, acc_1[0])
        y[i0] = acc_1[0] / 100.0
"""
    )


def test_sums_over_images_are_not_computed_again_for_each() -> None:
    assert (
        nest("def g(x: f32[4, 9, 5, 6]):\n    return sub(x, reduce_max(x, axes=(0, 2, 3), keepdims=True))")
        == """\
def reduce_max_sub(x0: f32[4, 9, 5, 6], y: f32[4, 9, 5, 6]):
    for i1 in range(9):
        acc: f32[1] @ register
        acc[0] = f32(-inf)
        for r0 in range(4):
            for r1 in range(5):
                for r2 in range(6):
                    acc[0] = max(acc[0], x0[r0, i1, r1, r2])
        for i0 in range(4):
            for i2 in range(5):
                for i3 in range(6):
                    y[i0, i1, i2, i3] = x0[i0, i1, i2, i3] - acc[0]
"""
    )


def test_something_costly_is_computed_once_where_a_row_can_be_kept() -> None:
    text = (
        "def g(x: f32[{shape}]):\n    t = mul(tanh(x), 2.0)\n"
        "    return sub(t, reduce_max(t, axes={axes}, keepdims=True))"
    )
    assert nest(text.format(shape="20, 50", axes=(1,))).count("tanh(") == 1
    assert (
        nest(text.format(shape="20, 50", axes=(0,))).count("tanh(") == 2
    )  # columns have no row that lies in one piece
    assert nest(text.format(shape="20, 20000", axes=(1,))).count("tanh(") == 2  # too long


# --- at random --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("target", ["llvm", "cuda"])
def test_random_chains(target: str) -> None:
    alone = [
        check(random_rows(seed), target, seed, "strict" if seed % 3 == 0 else "standard") == 1 for seed in range(24)
    ]
    assert sum(alone) >= 12  # others hold something costly of a number that is given


@pytest.mark.family("random")
@pytest.mark.slow
@pytest.mark.parametrize("target", ["llvm", "cuda"])
@pytest.mark.parametrize("seed", range(100, 140))
def test_many_random_chains(target: str, seed: int) -> None:
    check(random_rows(seed), target, seed)
    check(random_rows(seed), target, seed, "strict")
