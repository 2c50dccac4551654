"""Groups with several outputs: which are joined, in which order they run, and the same numbers on both targets."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

import dnnc
from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.tolerances import bound
from dnnc.passes.planning.fuse import plan_fusion
from dnnc.passes.planning.inplace import find_inplace
from support.devices import install
from support.random_rows import random_rows

ADAM = """
def g(p: f32[{s}], m: f32[{s}], v: f32[{s}], d: f32[{s}], rate: f32):
    m2 = add(mul(m, 0.9), mul(d, 0.1))
    v2 = add(mul(v, 0.999), mul(mul(d, d), 0.001))
    p2 = sub(p, mul(rate, div(m2, add(sqrt(v2), 0.00000001))))
    return p2, m2, v2"""
BATCH_NORM = """
def g(x: f32[8, 16, 5, 5], rm: f32[16], rv: f32[16]):
    m = reduce_mean(x, axes=(0, 2, 3), keepdims=True)
    d = sub(x, m)
    var = reduce_mean(mul(d, d), axes=(0, 2, 3), keepdims=False)
    r1 = add(mul(rm, 0.9), mul(reshape(m, shape=(16,)), 0.1))
    r2 = add(mul(rv, 0.9), mul(var, 0.1))
    inv = reshape(reciprocal(sqrt(add(var, 0.001))), shape=(1, 16, 1, 1))
    return mul(d, inv), r1, r2"""
LAYER_NORM = """
def g(x: f32[{s}], w: f32[{n}], b: f32[{n}]):
    m = reduce_mean(x, axes=(1,), keepdims=True)
    d = sub(x, m)
    var = reduce_mean(mul(d, d), axes=(1,), keepdims=True)
    inv = reciprocal(sqrt(add(var, 0.00001)))
    y = layer_norm(x, w, b)
    return y, m, inv"""
WINDOW = "kernel=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1), dilations=None"

JOINED = {
    "an update of three arrays": (ADAM.format(s="37, 33"), "m2, v2, p2"),
    "sizes that are not known": (ADAM.format(s="n, 33"), "m2, v2, p2"),
    "a norm with the numbers of its rows": (LAYER_NORM.format(s="48, 100", n=100), "m, inv, y"),
    "numbers of columns": (
        """
def g(x: f32[48, 100]):
    m = reduce_mean(x, axes=(0,), keepdims=True)
    d = sub(x, m)
    s = reduce_mean(mul(d, d), axes=(0,), keepdims=False)
    return div(d, sqrt(add(s, 0.001))), reshape(m, shape=(100,)), s""",
        "m, s, v3",
    ),
    "running statistics, through views": (BATCH_NORM, "r1, r2, v9"),
    "numbers alone": (
        "def g(x: f32[64, 30]):\n    return reduce_min(x, axes=(1,)), reduce_max(x, axes=(1,), keepdims=False)",
        "v0, v1",
    ),
    "an operand that two read": (
        "def g(x: f32[48, 100]):\n    return sin(x), cast(greater(x, 0.5), to=u8)",
        "v0, v2",
    ),
    "windows at the same places": (
        f"def g(x: f32[2, 8, 17, 17]):\n    return max_pool(x, {WINDOW}), max_pool_index(x, {WINDOW})",
        "v0, v1",
    ),
    "an index, and what stands there": (
        """
def g(x: f32[9, 20], k: u64[9, 4]):
    i = cast(bitwise_and(k, 3), to=i64)
    return gather_elements(x, i, axis=1), i""",
        "i, v1",
    ),
}
APART = {
    "another kernel runs between them": (
        """
def g(x: f32[32, 32], w: f32[32, 32]):
    h = relu(x)
    return add(h, matmul(h, w)), neg(h)""",
        ["relu + neg -> h, v2", "matmul + add -> v1"],
    ),
    "a kernel between them, through a third group": (
        """
def g(x: f32[32, 32], w: f32[32, 32]):
    h = relu(x)
    s = softmax(matmul(h, w), axis=0)
    return add(exp(h), s)""",
        ["relu -> h", "matmul -> v0", "softmax + exp + add -> v2"],
    ),
    "other shapes": (
        "def g(x: f32[8, 16], y: f32[1, 16]):\n    h = relu(y)\n    return add(x, h), h",
        ["relu -> h", "add -> v0"],
    ),
    "what takes long is not computed again for each pass over a row": (
        "def g(x: f32[40, 60], w: f32[60], b: f32[60]):\n    h = gelu(x)\n    return h, layer_norm(h, w, b)",
        ["gelu -> h", "layer_norm -> v0"],
    ),
    "rows of other axes": (
        "def g(x: f32[40, 60]):\n    return reduce_max(x, axes=(0,)), reduce_max(x, axes=(1,))",
        ["reduce_max -> v0", "reduce_max -> v1"],
    ),
    "few long rows": (
        "def g(x: f32[2, 70000]):\n    return reduce_min(x, axes=(1,)), reduce_max(x, axes=(1,))",
        ["reduce_min -> v0", "reduce_max -> v1"],
    ),
    "elements at other places": (
        "def g(x: f32[16, 16]):\n    h = relu(x)\n    return h, neg(transpose(h, perm=(1, 0)))",
        ["relu -> h", "transpose + neg -> v1"],
    ),
    "another window": (
        f"def g(x: f32[2, 8, 17, 17]):\n    return max_pool(x, {WINDOW}), "
        f"max_pool_index(x, {WINDOW.replace('(2, 2)', '(1, 1)')})",
        ["max_pool -> v0", "max_pool_index -> v1"],
    ),
}


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`target="cuda"` is the interpreter here."""
    install(monkeypatch)
    yield


def groups(g: Graph) -> list[str]:
    return [
        f"{' + '.join(n.op.name for n in grp.nodes)} -> {', '.join(v.name for v in grp.outputs)}"
        for grp in plan_fusion(g).groups
    ]


def drawn(g: Graph, seed: int = 0, size: int = 7) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = [[d if isinstance(d, int) else size for d in v.type.shape] for v in g.inputs]
    return [
        (np.abs(rng.standard_normal(s)) if v.type.dtype.is_float else rng.integers(0, 4, s)).astype(v.type.dtype.numpy)
        for v, s in zip(g.inputs, shapes)
    ]


def check(g: Graph, target: str, seed: int = 0, **options: object) -> int:
    """Compare every result with float64; the number of kernels that are no copies to another layout."""
    xs = drawn(g, seed)
    wanted = run(g, xs, "float64")
    f = dnnc.compile(g.copy(), target=target, cache=False, **options)  # type: ignore[arg-type]
    got = f(*(x.copy() for x in xs))
    for v, a, want in zip(g.outputs, got if isinstance(got, tuple) else (got,), wanted, strict=True):
        assert a.shape == want.shape and a.dtype == v.type.dtype.numpy
        assert np.abs(a.astype(np.float64) - want).max() <= bound(v.type.dtype, 1000, np.append(want, 1.0)), v.name
    return sum(s.nest.name != "pack" for s in f.programs[0].scheduled.kernels)


# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", JOINED)
def test_one_kernel(name: str) -> None:
    text, outputs = JOINED[name]
    g = parse(text)
    assert [s.split(" -> ")[1] for s in groups(g)] == [outputs]
    for target in ("llvm", "cuda"):
        assert check(g, target) == 1
    check(g, "llvm", numerics="strict")


@pytest.mark.slow
@pytest.mark.parametrize("name", APART)
def test_several_kernels(name: str) -> None:
    text, expected = APART[name]
    g = parse(text)
    assert groups(g) == expected
    check(g, "llvm")


@pytest.mark.slow
def test_elements_that_rows_are_reduced_of_are_stored_with_the_rows_where_threads_keep_them() -> None:
    """A CPU computes them again for each pass over the row, which takes longer than another pass over memory."""
    g = parse(
        """
def g(x: f32[40, 60], y: f32[40, 60]):
    h = add(x, y)
    d = sub(h, reduce_mean(h, axes=(1,), keepdims=True))
    return h, d, reduce_max(h, axes=(1,))"""
    )
    one, two = (plan_fusion(g, serial_rows=serial).groups for serial in (False, True))
    assert [[v.name for v in grp.outputs] for grp in one] == [["h", "d", "v1"]]
    assert [[v.name for v in grp.outputs] for grp in two] == [["h"], ["d", "v1"]]
    assert check(g, "cuda") == 1 and check(g, "llvm") == 2


def test_a_group_runs_before_what_reads_its_results_though_its_last_node_comes_later() -> None:
    g = parse(
        """
def g(x: f32[32, 32], w: f32[32, 32]):
    h = relu(x)
    y = matmul(h, w)
    z = neg(h)
    return y, z"""
    )
    assert groups(g) == ["relu + neg -> h, z", "matmul -> y"]
    check(g, "llvm")


def test_a_group_that_leaves_another_one_may_have_had_its_number() -> None:
    """The quotient is stored with the sum that reads it, and then apart from it where one thread walks a row."""
    g = parse(
        """
def g(x0: f32[2, 1, 77], x1: f32[3, 1], w0: f32[2, 3, 77]):
    v0: f32[2, 3, 77] = div(x0, x1)
    v1: f32[2, 3, 77] = div(w0, x1)
    v2: f32[2, 1, 77] = reduce_sum(v1, axes=(1,), keepdims=True)
    v4: f32[2, 3, 77] = mul(v1, v0)
    v5: f32[2, 3, 77] = neg(v4)
    v6: f32[1, 3, 1] = reduce_sum(v5, axes=(0, 2), keepdims=True)
    return v2, v6"""
    )
    made = [[v.name for grp in plan_fusion(g, serial_rows=s).groups for v in grp.outputs] for s in (False, True)]
    assert made == [["v1", "v6", "v2"], ["v1", "v2", "v6"]]
    check(g, "llvm")


@pytest.mark.slow
def test_groups_that_would_read_each_others_results_stay_apart() -> None:
    """The way from one part of a group to another leads through a group that begins behind both."""
    g = parse(
        """
def g(x0: f32[2, 6, 5, 4], x1: f32[6], w0: f32[2, 6, 5, 4]):
    v1 = reshape(x0, shape=(2, 3, 2, 5, 4))
    v2 = mean_variance_norm(v1, axes=(2, 3, 4))
    v3 = reshape(v2, shape=(2, 6, 5, 4))
    v4 = reshape(x1, shape=(6, 1, 1))
    v7 = reduce_sum(w0, axes=(0, 2, 3), keepdims=True)
    v10 = mul(w0, v4)
    v11 = mul(w0, v3)
    v12 = reduce_sum(v11, axes=(0, 2, 3), keepdims=True)
    v15 = reshape(v10, shape=(2, 3, 2, 5, 4))
    v16 = reduce_mean(v1, axes=(2, 3, 4), keepdims=True)
    v17 = sub(v1, v16)
    v18 = mul(v17, v17)
    v19 = reduce_mean(v18, axes=(2, 3, 4), keepdims=True)
    v20 = add(v19, 0.00001)
    v21 = sqrt(v20)
    v22 = reciprocal(v21)
    v23 = mul(v17, v22)
    v24 = mul(v15, v23)
    v25 = reduce_sum(v24, axes=(2, 3, 4), keepdims=True)
    v26 = div(v25, 40.0)
    v27 = mul(v23, v26)
    v28 = reduce_sum(v15, axes=(2, 3, 4), keepdims=True)
    v29 = div(v28, 40.0)
    v30 = sub(v15, v29)
    v31 = sub(v30, v27)
    v32 = mul(v31, v22)
    v33 = reshape(v32, shape=(2, 6, 5, 4))
    return v33, v12, v7"""
    )
    check(g, "llvm")


def test_what_the_ladder_cuts_is_a_kernel_of_its_own() -> None:
    g = parse(ADAM.format(s="37, 33"))
    cut = {n for n in g.nodes() if n.outputs[0].name == "m2"}
    plan = plan_fusion(g, cut=cut)
    assert [[v.name for v in grp.outputs] for grp in plan.groups] == [["m2"], ["v2", "p2"]]


def test_without_fusion_every_node_is_alone() -> None:
    plan = plan_fusion(parse(ADAM.format(s="37, 33")), fuse=False)
    assert all(len(grp.nodes) == len(grp.outputs) == 1 for grp in plan.groups)


# --- in place ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("target", ["llvm", "cuda"])
@pytest.mark.parametrize("shape", ["37, 33", "n, 33", "100000"])
def test_an_update_in_place(target: str, shape: str) -> None:
    """Each state is read by several results, and overwritten after the last of these."""
    g = parse(ADAM.format(s=shape))
    xs = drawn(g)
    plain = dnnc.compile(g.copy(), target=target, cache=False)(*(x.copy() for x in xs))
    f = dnnc.compile(g.copy(), target=target, cache=False, donate={"p": "p2", "m": "m2", "v": "v2"})
    got = f(*xs)
    program = f.programs[0].scheduled
    assert {y.name: x.name for y, x in program.memory.inplace.items()} == {"p2": "p", "m2": "m", "v2": "v"}
    (step,) = program.kernels
    assert len(step.params) == 5
    for k, (a, want) in enumerate(zip(got, plain)):
        assert a is xs[k] and np.array_equal(a, want)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["llvm", "cuda"])
def test_running_statistics_in_place(target: str) -> None:
    g = parse(BATCH_NORM)
    xs = drawn(g)
    plain = dnnc.compile(g.copy(), target=target, cache=False)(*(x.copy() for x in xs))
    names = [v.name for v in g.outputs]
    f = dnnc.compile(g.copy(), target=target, cache=False, donate={"rm": names[1], "rv": names[2]})
    got = f(*xs)
    assert len(f.programs[0].scheduled.memory.inplace) == 2 and len(f.programs[0].scheduled.steps) == 1
    assert got[1] is xs[1] and got[2] is xs[2] and all(np.array_equal(a, b) for a, b in zip(got, plain))


def test_results_that_read_each_others_memory() -> None:
    """x and y change places: only one of them can be overwritten."""
    g = parse("def g(x: f32[40], y: f32[40]):\n    return add(y, 1.0), add(mul(x, y), 2.0)")
    g.donated = {0: 0, 1: 1}
    found = find_inplace(g, plan_fusion(g))
    assert len(found) == 1
    xs = drawn(g)
    want = run(g, xs, "float64")
    names = [v.name for v in g.outputs]
    g.donated = {}
    got = dnnc.compile(g, cache=False, donate={"x": names[0], "y": names[1]})(*xs)
    for a, b in zip(got, want):
        assert np.abs(a - b).max() < 1e-5


def test_elements_of_rows_are_not_overwritten_while_rows_are_read() -> None:
    g = parse(
        """
def g(p: f32[64, 30], d: f32[64, 30]):
    q = sub(p, d)
    return q, reduce_sum(mul(q, q), axes=(1,))"""
    )
    assert groups(g) == ["sub + mul + reduce_sum -> q, v1"]
    g.donated = {0: 0}
    assert groups(g) == ["sub -> q", "mul + reduce_sum -> v1"]
    assert [x.name for x in find_inplace(g, plan_fusion(g)).values()] == ["p"]


@pytest.mark.slow
def test_an_update_reads_its_gradient_once_with_the_statistics_of_it() -> None:
    """Rows are reduced of the gradient, which nothing overwrites: parameter and moment are overwritten as before."""
    g = parse(
        """
def g(p: f32[64, 30], m: f32[64, 30], d: f32[64, 30]):
    m2 = add(mul(m, 0.9), d)
    return sub(p, mul(m2, 0.1)), m2, reduce_max(abs(d), axes=(1,))"""
    )
    xs = drawn(g)
    plain = dnnc.compile(g.copy(), cache=False)(*(x.copy() for x in xs))
    first, second, _ = (v.name for v in g.outputs)
    f = dnnc.compile(g.copy(), cache=False, donate={"p": first, "m": second})
    got = f(*xs)
    program = f.programs[0].scheduled
    assert len(program.steps) == 1 and len(program.memory.inplace) == 2
    assert got[0] is xs[0] and got[1] is xs[1] and all(np.array_equal(a, b) for a, b in zip(got, plain))


# --- random graphs ----------------------------------------------------------------------------------------------------


def with_more_results(g: Graph, rng: random.Random) -> Graph:
    """The graph with some values within it as results."""
    values = [n.outputs[0] for n in g.nodes() if n.outputs[0] not in g.outputs and n.op.name != "reshape"]
    g.outputs += rng.sample(values, min(len(values), rng.randint(1, 4)))
    return g


def random_elements(seed: int) -> str:
    rng = random.Random(seed)
    shape = rng.choice(("13, 40", "7", "3, 5, 17", "129, 3", "4096"))
    values = ["x", "y", "z"]
    lines = []
    for k in range(rng.randint(4, 14)):
        a, b = rng.choice(values), rng.choice(values)
        lines.append(
            f"    v{k} = "
            + rng.choice(
                (f"add({a}, {b})", f"mul({a}, tanh({b}))", f"sub({a}, 0.5)", f"max({a}, {b})", f"sqrt(abs({a}))")
            )
        )
        values.append(f"v{k}")
    arguments = ", ".join(f"{v}: f32[{shape}]" for v in "xyz")
    return f"def g({arguments}):\n" + "\n".join(lines) + f"\n    return {values[-1]}"


@pytest.mark.family("random")
@pytest.mark.parametrize("seed", range(24))
def test_random_elements(seed: int) -> None:
    g = with_more_results(parse(random_elements(seed)), random.Random(seed))
    check(g, "llvm", seed)
    if seed % 4 == 0:
        check(g, "cuda", seed)


@pytest.mark.family("random")
@pytest.mark.parametrize("seed", range(24))
def test_random_rows(seed: int) -> None:
    g = with_more_results(parse(random_rows(seed)), random.Random(seed))
    check(g, "llvm", seed)
    if seed % 4 == 0:
        check(g, "cuda", seed)


@pytest.mark.slow
@pytest.mark.family("random")
@pytest.mark.parametrize("seed", range(8))
def test_random_rows_of_blocked_images(seed: int) -> None:
    g = with_more_results(parse(random_rows(seed, blocked=True)), random.Random(seed))
    check(g, "llvm", seed)
    if seed % 4 == 0:
        check(g, "cuda", seed)


@pytest.mark.parametrize(
    ("channels", "expected"),
    [
        (64, ["abs + reduce_max + reduce_mean + add -> v1, v2, v3"]),
        # lanes that are no channel have no number to be stored
        (72, ["abs + reduce_max + reduce_mean -> v1, v2", "add -> v3"]),
        (16, ["abs + reduce_max -> v1", "reduce_mean -> v2", "add -> v3"]),  # one thread would have all rows
    ],
)
def test_rows_of_blocked_images(channels: int, expected: list[str]) -> None:
    image = f'f32[8, {channels}, 16, 16] @ "0 1/16 2 3 1%16"'
    axes = "axes=(0, 2, 3), keepdims=False"
    g = parse(
        f"def g(x: {image}, p: {image}):\n    v0: {image} = abs(x)\n    v1: f32[{channels}] = reduce_max(v0, {axes})\n"
        f"    v2: f32[{channels}] = reduce_mean(x, {axes})\n    v3: {image} = add(p, x)\n    return v1, v2, v3"
    )
    assert groups(g) == expected


@pytest.mark.parametrize(("layers", "joined"), [(1, True), (6, False)])
def test_what_is_computed_again_is_not_dragged_ahead(layers: int, joined: bool) -> None:
    chain = "".join(f"    h{k + 1} = relu(matmul(h{k}, w))\n" for k in range(layers))
    g = parse(
        "def g(x: f32[64, 64], w: f32[64, 64], v: f32[64, 64], s: f32[64]):\n"
        "    b = mul(reduce_mean(matmul(x, v), axes=(0,), keepdims=False), s)\n    h0 = relu(mul(x, b))\n"
        f"{chain}    b2 = mul(reduce_mean(matmul(w, v), axes=(0,), keepdims=False), s)\n"
        f"    return h{layers}, relu(mul(x, b2))"
    )
    groups = [{n.outputs[0].name for n in grp.nodes} for grp in plan_fusion(g).groups]
    assert any({"b", "b2"} <= names for names in groups) == joined


@pytest.mark.slow
@pytest.mark.parametrize("target", ["llvm", "cuda"])
def test_what_others_read_rounded_is_stored_rounded(target: str) -> None:
    g = parse("""
def g(x: f32[8, 64], s: f32[64], b: f32[64], w: f16[64, 64], r: f16[8, 64]):
    n: f32[8, 64] = layer_norm(x, s, b)
    q: i32[8, 64] = cast(round(mul(n, 16.0)), to=i32)
    y: f16[8, 64] = add(matmul(r, w), cast(n, to=f16))
    return y, q
""")
    assert [s.split(" -> ")[0] for s in groups(g)] == ["layer_norm + mul + round + cast + cast", "matmul + add"]
    assert check(g, target) == 2
