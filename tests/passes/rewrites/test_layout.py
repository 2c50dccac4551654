"""Layouts: which values are blocked, where `pack` nodes stand, and the same numbers as without."""

from __future__ import annotations

import numpy as np
import pytest

import dnnc
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.graph.verify import verify
from dnnc.ir.tolerances import bound
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.dce import dce
from dnnc.passes.rewrites.decompose import decompose
from dnnc.passes.rewrites.layout import assign_layouts
from dnnc.tools.sample_graphs import graph_of
from support.passes import compare
from support.random_graphs import random_graph

BLOCKED = '@ "0 1/16 2 3 1%16"'


def laid_out(text: str) -> list[str]:
    """The statements of a graph after the pass, types apart."""
    g = graph_of(text)
    assign_layouts(g, 16)
    verify(g)
    dce(g, PassContext())
    lines = str(g).splitlines()
    body = [x.strip() for x in lines if " = " in x and x.startswith("    ") and "const(" not in x]
    return [
        x.split(":")[0]
        + (" blocked" if BLOCKED in x.split(" = ")[0] else "")
        + " = "
        + x.split(" = ", 1)[1].split("(")[0]
        for x in body
    ]


def test_a_chain_stays_blocked_between_its_borders() -> None:
    text = """def g(x: f32[1, 16, 8, 8], *, w: f32[32, 16, 3, 3], v: f32[16, 32, 1, 1]):
    a = relu(conv(x, w, pads=(1, 1, 1, 1)))
    b = max_pool(a, kernel=(2, 2), strides=(2, 2))
    c = conv(b, v)
    return c"""
    assert [x.split(" = ")[1] for x in laid_out(text)] == ["pack", "conv", "relu", "max_pool", "conv", "pack"]
    assert all(" blocked" in x for x in laid_out(text)[:-1])


def test_a_window_over_channels_reads_rows_between_blocks() -> None:
    text = """def g(x: f32[1, 16, 8, 8], *, w: f32[32, 16, 3, 3]):
    return max_pool(lrn(relu(conv(x, w, pads=(1, 1, 1, 1))), size=5), kernel=(2, 2), strides=(2, 2))"""
    made = laid_out(text)
    assert [x.split(" = ")[1] for x in made] == ["pack", "conv", "relu", "pack", "lrn", "pack", "max_pool", "pack"]
    assert [" blocked" in x for x in made] == [True, True, True, False, False, True, True, False]


@pytest.mark.parametrize(
    "size,made", [(16, ["pack", "resize", "conv", "pack"]), (9, ["resize", "pack", "conv", "pack"])]
)
def test_an_image_is_packed_before_it_is_enlarged(size: int, made: list[str]) -> None:
    text = f"""def g(x: f32[1, 16, 8, 8], *, w: f32[16, 16, 1, 1]):
    y = resize(x, shape=(1, 16, {size}, {size}), coords=((1, 0, 1), (1, 0, 1), (8, 0, {size}), (8, 0, {size})))
    return conv(y, w)"""
    assert [x.split(" = ")[1] for x in laid_out(text)] == made


@pytest.mark.family("shapes")
@pytest.mark.parametrize("shape,window,made", [
    ((1, 8, 9, 9), "kernel=(3, 3), pads=(1, 1, 1, 1)", ["pack", "max_pool", "pack"]),
    ((1, 2, 9, 9), "kernel=(3, 3), pads=(1, 1, 1, 1)", ["max_pool"]),
    ((1, 8, 9, 9), "kernel=(1, 1)", ["max_pool"]),
    ((1, 8, 9, 9), "kernel=(9, 9)", ["max_pool"]),
    ((1, 8, 300), "kernel=(200,)", ["max_pool"]),
])  # fmt: skip
def test_small_windows_of_several_channels_are_computed_in_blocks(
    shape: tuple[int, ...], window: str, made: list[str]
) -> None:
    assert [
        x.split(" = ")[1] for x in laid_out(f"def f(x: f32{list(shape)}):\n    return max_pool(x, {window})")
    ] == made


def test_first_layers_read_rows() -> None:
    ops = [
        x.split(" = ")[1] for x in laid_out("def g(x: f32[1, 3, 8, 8], *, w: f32[16, 3, 3, 3]):\n    return conv(x, w)")
    ]
    assert ops == ["conv", "pack"]


def test_a_plain_operand_is_packed_once() -> None:
    text = """def g(x: f32[1, 16, 4, 4], z: f32[1, 16, 4, 4], *, w: f32[16, 16, 1, 1]):
    a = add(conv(x, w), z)
    b = mul(a, z)
    return conv(b, w)"""
    assert [x.split(" = ")[1] for x in laid_out(text)].count("pack") == 3  # x, z once, the output


def test_pooling_to_one_pixel_leaves_the_blocks() -> None:
    text = """def g(x: f32[1, 16, 4, 4], *, w: f32[32, 16, 1, 1]):
    return reduce_mean(conv(x, w), axes=(2, 3))"""
    assert [x.split(" = ")[1] for x in laid_out(text)] == ["pack", "conv", "reduce_mean"]


def test_matrices_of_panels() -> None:
    g = graph_of("def g(x: f32[4, 8], *, w: f32[8, 40]):\n    return matmul(x, w)")
    assign_layouts(g, 16)
    assert 'f32[8, 40] @ "1/16 0 1%16"' in str(g)


@pytest.mark.family("cases")
@pytest.mark.parametrize(
    ("x", "y", "packed"),
    [
        ("2, 17, 8", "y", True),
        ("2, 16, 8", "y", False),  # as few rows read each matrix as it lies
        ("2, 1, 8", "y", False),
        ("5, 2, 4, 8", "y", True),  # 20 rows each
        ("2, N, 8", "y", True),
        ("2, 1, 8", "transpose(z, perm=(0, 2, 1))", True),  # turned and packed at once
    ],
)
def test_matrices_that_are_made_at_run_time(x: str, y: str, packed: bool) -> None:
    h = parse(f"def g(x: f32[{x}], y: f32[2, 8, 40], z: f32[2, 40, 8]):\n    return matmul(x, {y})")
    assign_layouts(h, 8)
    assert ('layout=layout("0 2/8 1 2%8"))' in str(h)) == packed


def test_the_pass_settles() -> None:
    g = graph_of("def g(x: f32[1, 16, 4, 4], *, w: f32[32, 16, 1, 1]):\n    return relu(conv(x, w))")
    assert assign_layouts(g, 16)
    before = str(g)
    assert not assign_layouts(g, 16)
    assert str(g) == before


NUMBERS = [
    "def g(x: f32[1, 24, 7, 9], *, w: f32[40, 24, 3, 3], b: f32[40]):\n    return relu(conv(x, w, b, pads=(1, 1, 1, "
    "1)))",
    "def g(x: f32[2, 20, 6, 6], *, w: f32[20, 1, 3, 3]):\n    return conv(x, w, group=20, pads=(1, 1, 1, 1), "
    "strides=(2, 2))",
    "def g(x: f32[1, 16, 6, 6], *, w: f32[32, 8, 3, 3]):\n    return conv(x, w, group=2)",
    "def g(x: f32[1, 20, 6, 9], *, w: f32[3, 20, 3, 3], b: f32[3]):\n    return sigmoid(conv(x, w, b, pads=(1, 1, 1, "
    "1)))",
    "def g(x: f32[2, 48, 70], *, w: f32[1, 48, 7]):\n    return tanh(conv(x, w, pads=(9, 9), dilations=(3,)))",
    "def g(x: f32[1, 32, 5, 6, 7], *, w: f32[6, 32, 1, 1, 1], v: f32[6, 6, 1, 1, 1]):\n    return conv(conv(x, w), v)",
    "def g(x: f32[1, 40, 6, 6], *, w: f32[72, 5, 3, 3], b: f32[72]):\n    return relu(conv(x, w, b, group=8, pads=(1, "
    "1, 1, 1)))",
    "def g(x: f32[2, 60, 20], *, w: f32[60, 20, 7]):\n    return add(conv(x, w, group=3, pads=(6, 6), dilations=(2,)), "
    "x)",
    "def g(x: f32[1, 10, 6, 5, 4], *, w: f32[50, 2, 3, 2, 1]):\n    return conv(x, w, group=5, strides=(2, 1, 1))",
    "def g(x: f32[1, 16, 30], *, w: f32[32, 16, 5]):\n    return conv(x, w, pads=(4, 0), dilations=(1,))",
    "def g(x: f32[1, 16, 5, 5], *, w: f32[16, 16, 1, 1], v: f32[32, 16, 1, 1]):\n    return concat(conv(x, w), "
    "relu(conv(x, v)), x, axis=1)",
    "def g(x: f32[1, 16, 5, 5], *, w: f32[24, 16, 3, 3], v: f32[24, 24, 3, 3]):\n    return conv(conv(x, w), v, "
    "pads=(2, 2, 2, 2), dilations=(2, 2))",
    "def g(x: f32[1, 16, 8, 8], *, w: f32[20, 16, 3, 3], s: f32[20, 1, 1]):\n    return mul(sigmoid(add(conv(x, w), "
    "s)), 2.0)",
]


@pytest.mark.family("cases")
@pytest.mark.parametrize("text", NUMBERS)
def test_numbers(text: str) -> None:
    g = graph_of(text)
    rng = np.random.default_rng(5)
    x = rng.standard_normal([int(d) for d in g.inputs[0].type.shape]).astype(np.float32)  # type: ignore[arg-type]
    want = run(g, [x], "float64")[0]
    got = dnnc.compile(g, cache=False)(x)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= bound(g.outputs[0].type.dtype, 1000, want)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "def g(x: i32[1, 20, 9, 9], w: i32[24, 20, 3, 3], v: i32[40, 24, 1, 1]):\n    return conv(conv(x, w, pads=(1, "
        "1, 1, 1)), v)",
        "def g(x: i32[17, 50], w: i32[50, 40]):\n    return matmul(x, w)",
    ],
)
def test_integers_lie_in_blocks_and_stay_exact(text: str) -> None:
    g = graph_of(text)
    rng = np.random.default_rng(6)
    arrays = [rng.integers(-200, 200, [int(d) for d in v.type.shape]).astype(np.int32) for v in g.inputs]  # type: ignore[arg-type]
    assert np.array_equal(dnnc.compile(g, cache=False)(*arrays), run(g, arrays)[0])
    assert assign_layouts(g, 16)
    assert all(not n.inputs[1].type.row_major for n in g.nodes() if n.op.name != "pack")  # type: ignore[union-attr]


def statements(text: str, strict: bool = True) -> list[str]:
    """The nodes of a graph after the pass, with types."""
    g = graph_of(text)
    assign_layouts(g, 16, strict)
    verify(g)
    return [repr(n) for n in g.nodes()]


def test_types_of_a_chain() -> None:
    text = """def g(x: f32[1, 16, 8, 8], *, w: f32[32, 16, 3, 3], b: f32[32]):
    a = relu(conv(x, w, b, pads=(1, 1, 1, 1)))
    return add(a, 1.0)"""
    assert statements(text) == [
        'v2: f32[1, 16, 8, 8] @ "0 1/16 2 3 1%16" = pack(x, layout=layout("0 1/16 2 3 1%16"))',
        'v0: f32[1, 32, 8, 8] @ "0 1/16 2 3 1%16" = conv(v2, w_0, b_0, pads=(1, 1, 1, 1))',
        'a: f32[1, 32, 8, 8] @ "0 1/16 2 3 1%16" = relu(v0)',
        'v1: f32[1, 32, 8, 8] @ "0 1/16 2 3 1%16" = add(a, c)',
        "v3: f32[1, 32, 8, 8] = pack(v1, layout=None)",
    ]


def test_few_outputs_are_rows_of_blocks_of_inputs() -> None:
    assert statements(
        "def g(x: f32[1, 20, 6, 6], *, w: f32[3, 20, 3, 3], b: f32[3]):\n    return relu(conv(x, w, b))"
    ) == [
        'v2: f32[1, 20, 6, 6] @ "0 1/16 2 3 1%16" = pack(x, layout=layout("0 1/16 2 3 1%16"))',
        "v0: f32[1, 3, 4, 4] = conv(v2, w_0, b)",
        "v1: f32[1, 3, 4, 4] = relu(v0)",
    ]


def test_groups_of_whole_blocks() -> None:
    assert statements("def g(x: f32[1, 16, 6, 6], *, w: f32[32, 8, 3, 3]):\n    return conv(x, w, group=2)") == [
        'v1: f32[1, 16, 6, 6] @ "0 1/16 2 3 1%16" = pack(x, layout=layout("0 1/16 2 3 1%16"))',
        'v0: f32[1, 32, 4, 4] @ "0 1/16 2 3 1%16" = conv(v1, w_0, group=2, panel=16)',
        "v2: f32[1, 32, 4, 4] = pack(v0, layout=None)",
    ]


GROUPS = "def g(x: f32[1, 36, 6, 6], *, w: f32[72, 12, 1, 1]):\n    return conv(x, w, group=3)"


def test_groups_that_share_a_block() -> None:
    """Three groups of 24 outputs: the second panel of 16 has outputs of two groups."""
    g = graph_of(GROUPS)
    w = next(iter(g.constants.values()))
    assign_layouts(g, 16)
    conv = next(n for n in g.nodes() if n.op.name == "conv")
    spread = g.constants[conv.inputs[1]][..., 0, 0]  # type: ignore[index]
    assert conv.attrs["panel"] == 16 and spread.shape == (72, 24)
    zero = np.zeros((8, 12), np.float32)
    kernel = w[..., 0, 0]
    assert np.array_equal(spread[:16, :12], kernel[:16]) and not spread[:16, 12:].any()
    assert np.array_equal(spread[16:32], np.block([[kernel[16:24], zero], [zero, kernel[24:32]]]))


@pytest.mark.family("shapes")
@pytest.mark.parametrize(
    ("sizes", "lanes", "strict", "way"),
    [
        (
            (64, 64, 3, 16),
            16,
            False,
            "apart",
        ),  # four inputs of a group are four shuffles, sixteen products with a dense block
        ((64, 64, 3, 8), 16, False, "apart"),
        ((64, 64, 1, 8), 16, False, "panel"),  # no taps share a shuffle
        ((64, 64, 1, 8), 16, True, "apart"),
        ((64, 64, 3, 8), 8, False, "panel"),  # whole vectors of one group
        ((32, 64, 3, 32), 16, False, "apart"),  # two outputs for each input
        ((24, 48, 3, 24), 16, False, "panel"),  # three panels, two of which would share a block
        ((32, 96, 3, 32), 16, False, "apart"),  # three outputs for each input: three panels share a block
        ((32, 96, 3, 16), 16, False, "apart"),
        ((32, 16, 3, 8), 16, False, "panel"),  # two blocks of inputs for a panel
        ((24, 24, 3, 8), 16, False, "panel"),  # groups of three straddle the blocks
    ],
)
def test_groups_narrower_than_a_vector(sizes: tuple[int, int, int, int], lanes: int, strict: bool, way: str) -> None:
    channels, made, k, group = sizes
    text = (
        f"def g(x: f32[1, {channels}, 6, 21], *, w: f32[{made}, {channels // group}, {k}, {k}]):\n"
        f"    return conv(x, w, group={group})"
    )
    g = graph_of(text)
    assign_layouts(g, lanes, strict)
    (conv,) = (n for n in g.nodes() if n.op.name == "conv")
    assert conv.attrs["panel"] == (lanes if way == "panel" else 0) and not conv.output.type.row_major
    x = np.random.default_rng(4).standard_normal((1, channels, 6, 21)).astype(np.float32)
    want = run(graph_of(text), [x], "float64")[0]
    for target in ("llvm", "llvm -mcpu=haswell"):
        got = dnnc.compile(graph_of(text), cache=False, target=target, numerics="strict" if strict else "standard")(x)
        assert np.abs(got - want).max() <= bound(g.outputs[0].type.dtype, 200, want)


def test_strict_numerics_keep_the_groups_apart() -> None:
    """An infinity of another group times zero is NaN."""
    assert [x.split(" = ")[1] for x in statements(GROUPS)] == ["conv(x, w, group=3)"]
    g = graph_of(GROUPS)
    x = np.ones((1, 36, 6, 6), np.float32)
    x[0, 12] = np.inf
    got = dnnc.compile(g, cache=False, numerics="strict")(x)
    assert np.isfinite(got[:, :24]).all() and np.isfinite(got[:, 48:]).all() and not np.isfinite(got[:, 24:48]).any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parameter", "input"])
def test_groups_with_weights_that_change(kind: str) -> None:
    text = GROUPS if kind == "parameter" else GROUPS.replace(" *,", "")
    g = graph_of(text)
    rng = np.random.default_rng(7)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((1, 36, 6, 6), (72, 12, 1, 1)))
    f = dnnc.compile(g, cache=False, parameters={"w": w} if kind == "parameter" else None)
    got = f(x) if kind == "parameter" else f(x, w)
    want = run(graph_of(GROUPS.replace(" *,", "")), [x, w], "float64")[0]
    assert np.abs(got - want).max() <= bound(g.outputs[0].type.dtype, 12, want)


def test_weights_are_relabelled_not_copied_by_nodes() -> None:
    g = graph_of(
        "def g(x: f32[1, 16, 8, 8], *, w: f32[40, 16, 3, 3], d: f32[40, 1, 3, 3]):\n    return conv(conv(x, w), d, "
        "group=40)"
    )
    assign_layouts(g, 16)
    layouts = {str(v.type.encoding) for n in g.nodes() if n.op.name == "conv" for v in n.inputs[1:2] if v is not None}
    assert layouts == {"0/16 1/16 2 3 1%16 0%16", "0/16 1 2 3 0%16"}
    assert sum(n.op.name == "pack" for n in g.nodes()) == 2  # of the input and the output


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("too few channels", "def g(x: f32[1, 4, 6, 6], *, w: f32[1, 4, 3, 3]):\n    return conv(x, w)"),
        ("another dtype", "def g(x: f64[1, 16, 6, 6], y: f64[16, 16, 1, 1]):\n    return conv(x, y)"),
        ("a vector", "def g(x: f32[8, 16], *, w: f32[16, 1]):\n    return matmul(x, w)"),
    ],
)
def test_left_as_they_are(what: str, text: str) -> None:
    g = graph_of(text)
    assert not assign_layouts(g, 16), what


def test_packs_that_meet_cancel() -> None:
    text = """def g(x: f32[1, 16, 8, 8], *, w: f32[16, 16, 1, 1]):
    a = softmax(conv(x, w), axis=1)
    b = conv(a, w)
    return conv(b, w)"""
    ops = [x.split(" = ")[1].split("(")[0] for x in statements(text)]
    assert ops == ["pack", "conv", "pack", "softmax", "pack", "conv", "conv", "pack"]


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_random_graphs_keep_their_meaning(lanes: int) -> None:
    blocked = 0
    for seed in range(40):
        g, inputs = random_graph(seed, 14)
        want = run(g, inputs)
        decompose(g, PassContext())
        assign_layouts(g, lanes)
        verify(g)
        compare(want, run(g, inputs))
        assert not assign_layouts(g, lanes), f"seed {seed}"
        assert all(v.type.row_major for v in (*g.inputs, *g.outputs))
        blocked += sum(not v.type.row_major for n in g.nodes() for v in n.outputs)
    assert blocked > 40


@pytest.mark.parametrize(
    "made,ops",
    [(32, ["pack", "conv", "interleave", "relu", "pack"]), (36, ["pack", "conv", "pack", "interleave", "relu"])],
)
def test_phases_of_whole_blocks_take_turns_as_they_lie(made: int, ops: list[str]) -> None:
    text = f"""def g(x: f32[1, 16, 8, 8], *, w: f32[{made}, 16, 3, 3]):
    a = interleave(conv(x, w, pads=(1, 1, 1, 1)), strides=(1, 2), channels={made // 2})
    return relu(a)"""
    lines = laid_out(text)
    assert [x.split(" = ")[1] for x in lines] == ops
    assert all(" blocked" in x for x in lines[: len(ops) - 1]) == (made == 32)


def test_statistics_of_a_batch_read_and_normalize_blocks() -> None:
    g = parse(
        """def g(x: f32[2, 16, 6, 6], w: f32[24, 16, 1, 1]):
    y = conv(x, w)
    return mean_variance_norm(y, axes=(0, 2, 3)), reduce_sum(y, axes=(0, 2, 3)), reduce_sum(y, axes=(0,))"""
    )
    assign_layouts(g, 16)
    verify(g)
    lies = {n.op.name + str(n.attrs["axes"]): n.inputs[0].type.row_major for n in g.nodes() if "axes" in n.attrs}
    assert lies == {"mean_variance_norm(0, 2, 3)": False, "reduce_sum(0, 2, 3)": False, "reduce_sum(0,)": True}
