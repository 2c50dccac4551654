"""Hopper's matrix products from lowered groups: layers, images, heads; interpreted, and compiled for sm_90a."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dnnc.backends.cuda.emit import emit_kernel, launch_of
from dnnc.backends.cuda.nvrtc import compile_cuda
from dnnc.backends.cuda.spelling import supported
from dnnc.backends.cuda.target import FACTS, GpuTarget
from dnnc.backends.cuda.templates.contraction import wgmma
from dnnc.ir.errors import VerifyError
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.passes.lower.expand import decompose
from dnnc.passes.lower.nests import lower
from dnnc.passes.schedule.problem import Problem, classify

Array = np.ndarray[Any, Any]
H200 = GpuTarget()


def problem_of(text: str, inplace: str = "") -> Problem:
    graph = parse(text)
    nodes = list(graph.nodes())
    value = next((v for v in graph.inputs if v.name == inplace), None)
    return classify(nodes, lower(graph, nodes, graph.outputs, {graph.outputs[0]: value} if value else {}))


LAYER = """
def layer(x: {x}, w: {w}, b: {t}[{n}], r: {y}):
    h: {y} = matmul(x, w)
    s: {y} = add(h, b)
    g: {y} = {act}(s)
    z: {y} = add(g, r)
    return z
"""


def layer(x: tuple[int, ...], w: tuple[int, ...], t: str = "f16", act: str = "relu") -> str:
    def shape(*s: int) -> str:
        return f"{t}[{', '.join(map(str, s))}]"

    return LAYER.format(x=shape(*x), w=shape(*w), y=shape(*x[:-1], w[-1]), n=w[-1], t=t, act=act)


def check(problem: Problem, t: str, **knobs: int) -> None:
    """The scheduled kernel against the naive one; small tiles, where the template would offer others."""
    made = dict(wgmma.candidates(problem, H200)[0]) | {"bm": 64, "bn": 64, "stages": 2, "split": 1} | knobs
    kernel = verify_kernel(wgmma.apply(problem, made, GpuTarget(sms=2)))
    rng = np.random.default_rng(0)
    args = {
        b.name: rng.standard_normal([int(d.value) for d in b.shape]).astype(b.dtype.numpy)
        for b in problem.kernel.entry.buffers
    }  # type: ignore[attr-defined]
    found, want = ({name: v.copy() for name, v in args.items()} for _ in range(2))
    run_kernel(problem.kernel, want)
    run_kernel(kernel, found)
    out = problem.kernel.entry.buffers[-1].name
    np.testing.assert_allclose(*(x[out].astype(np.float64) for x in (found, want)), atol=0.05 if t == "f16" else 0.5)
    assert all((found[name].view(np.uint8) == v.view(np.uint8)).all() for name, v in args.items() if name != out)


@pytest.mark.parametrize(
    "x, w, t, act",
    [
        ((2, 16, 72), (72, 72), "f16", "relu"),
        ((40, 64), (64, 80), "bf16", "tanh"),
        ((2, 24, 64), (2, 64, 64), "f16", "sigmoid"),
    ],
)
def test_layers(x: tuple[int, ...], w: tuple[int, ...], t: str, act: str) -> None:
    check(problem_of(layer(x, w, t, act)), t)


def test_a_transposed_factor_is_read_in_place() -> None:
    text = """
def scores(q: f16[2, 32, 64], k: f16[2, 40, 64]):
    t: f16[2, 64, 40] = transpose(k, perm=(0, 2, 1))
    s: f16[2, 32, 40] = matmul(q, t)
    return s
"""
    p = problem_of(text)
    product = wgmma.product_of(p)
    assert (
        product is not None
        and not product.b_rows_are_k
        and (product.batch, product.m, product.n, product.k) == (2, 32, 40, 64)
    )
    check(p, "f16")


def test_a_sum_is_updated_in_place() -> None:
    text = (
        "def f(x: f16[72, 64], w: f16[64, 72], r: f16[72, 72]):\n    h: f16[72, 72] = matmul(x, w)\n"
        "    y: f16[72, 72] = add(h, r)\n    return y\n"
    )
    p = problem_of(text, inplace="r")
    assert p.inplace
    product = wgmma.product_of(p)
    assert product is not None and product.beside == (product.c,)
    rng = np.random.default_rng(0)
    args = {
        b.name: rng.standard_normal([int(d.value) for d in b.shape]).astype(b.dtype.numpy)
        for b in p.kernel.entry.buffers
    }  # type: ignore[attr-defined]
    found, want = ({name: v.copy() for name, v in args.items()} for _ in range(2))
    run_kernel(p.kernel, want)
    run_kernel(
        verify_kernel(wgmma.apply(p, {"bm": 64, "bn": 64, "stages": 2, "group": 8, "split": 1}, GpuTarget(sms=2))),
        found,
    )
    assert not (want[product.c.name] == args[product.c.name]).all()
    np.testing.assert_allclose(
        found[product.c.name].astype(np.float64), want[product.c.name].astype(np.float64), atol=0.05
    )


CONV = """
def f(x: {t}[{n}, {c}, {h}, {h}] @ "0 2 3 1", w: {t}[{o}, {c}, {k}, {k}] @ "0 2 3 1", b: {t}[{o}], r: {y}):
    h: {y} = conv(x, w, b, strides=({s}, {s}), pads=({p}, {p}, {p}, {p}), dilations=({d}, {d}))
    a: {y} = add(h, r)
    y: {y} = relu(a)
    return y
"""


def conv(n: int, c: int, h: int, o: int, k: int, s: int = 1, p: int = 0, d: int = 1, t: str = "f16") -> str:
    out = (h + 2 * p - d * (k - 1) - 1) // s + 1
    return CONV.format(n=n, c=c, h=h, o=o, k=k, s=s, p=p, d=d, t=t, y=f'{t}[{n}, {o}, {out}, {out}] @ "0 2 3 1"')


@pytest.mark.slow
@pytest.mark.family("shapes")
@pytest.mark.parametrize(
    "text, windowed, split",
    [
        (conv(2, 64, 6, 72, 3, p=1), True, 1),
        (
            conv(1, 72, 9, 64, 3, s=2, p=1),
            True,
            2,
        ),  # channels that do not fill a row of 128 bytes, and steps shared by two blocks
        (conv(1, 64, 8, 64, 3, p=2, d=2, t="bf16"), True, 1),
        (conv(2, 64, 6, 64, 1, s=2), True, 1),
        (conv(2, 64, 6, 64, 1), False, 1),  # a matrix product
    ],
)
def test_convolutions(text: str, windowed: bool, split: int) -> None:
    p = problem_of(text)
    assert wgmma.candidates(p, H200)
    product = wgmma.product_of(p)
    assert product is not None and (product.window is not None) == windowed
    check(p, "bf16" if "bf16" in text else "f16", split=split)


def image_conv(
    n: int,
    c: int,
    inside: Sequence[int],
    o: int,
    taps: Sequence[int],
    s: int = 1,
    pads: Sequence[int] = (),
    d: int = 1,
    block: int = 1,
) -> str:
    """With 1 to 3 axes, padded by as much on both sides. `block`: input channels lie in rows of whole blocks."""
    rank = len(inside)
    pads = pads or (0,) * rank
    out = [(h + 2 * p - d * (k - 1) - 1) // s + 1 for h, k, p in zip(inside, taps, pads)]
    rows = f'@ "0 {" ".join(str(k) for k in range(2, rank + 2))} 1"'
    filled = rows if block == 1 else rows.replace(' 1"', f' 1/{block} 1%{block}"')
    x, w, y = (
        f"f16[{', '.join(map(str, v))}] {lay}"
        for v, lay in (((n, c, *inside), filled), ((o, c, *taps), filled), ((n, o, *out), rows))
    )
    attrs = f"strides={(s,) * rank}, pads={(*pads, *pads)}, dilations={(d,) * rank}"
    return (
        f"def f(x: {x}, w: {w}, b: f16[{o}]):\n    h: {y} = conv(x, w, b, {attrs})\n    y: {y} = relu(h)\n"
        "    return y\n"
    )


@pytest.mark.slow
@pytest.mark.family("shapes")
@pytest.mark.parametrize(
    "text, axes",
    [
        (image_conv(2, 64, (40,), 64, (3,), pads=(3,), d=3), 1),
        (image_conv(2, 64, (37,), 64, (4,), s=2, pads=(1,)), 1),
        (image_conv(1, 64, (3, 5, 4), 64, (3, 3, 3), pads=(1, 1, 1)), 3),
        (image_conv(1, 64, (4, 6, 5), 64, (3, 3, 3), s=2, pads=(1, 1, 1)), 3),
        (image_conv(2, 64, (3, 5, 4), 64, (1, 3, 3), pads=(0, 1, 1)), 2),  # each slice is an image
        (image_conv(2, 64, (5, 4, 4), 64, (3, 1, 1), pads=(1, 0, 0)), 2),  # a slice is a row
    ],
)
def test_images_of_one_to_three_axes(text: str, axes: int) -> None:
    p = problem_of(text)
    product = wgmma.product_of(p)
    assert product is not None and product.window is not None and len(product.window.shape) == axes
    check(p, "f16", split=1)
    knobs = {"bm": 64, "bn": 64, "stages": 2, "group": 8, "split": 1}
    kernel = wgmma.apply(p, knobs, H200)
    text = emit_kernel(kernel, "conv", H200)
    assert f"tma_im2col{axes + 2}(" in text and compile_cuda(text, "sm_90a").spills == 0
    assert all(len(m.corners) == axes for m in launch_of(kernel).maps if m.param == "x0")


def test_filters_that_reach_too_far() -> None:
    """A descriptor of three axes has 5 bits for each corner: other templates take such filters."""
    assert wgmma.product_of(problem_of(image_conv(1, 64, (80, 4, 4), 64, (3, 3, 3), pads=(20, 1, 1), d=1))) is None
    assert wgmma.product_of(problem_of(image_conv(1, 64, (300,), 64, (3,), pads=(99,), d=99))) is not None
    assert wgmma.product_of(problem_of(conv(1, 64, 40, 64, 3, s=9))) is None


@pytest.mark.slow
def test_what_is_added_is_fetched_before_it_is_needed() -> None:
    kernel = wgmma.apply(
        problem_of(conv(2, 64, 9, 136, 1)), {"bm": 128, "bn": 128, "stages": 2, "group": 8, "split": 1}, H200
    )
    lines = [line.strip() for line in show_kernel(kernel).split("\n")]
    assert sum(line.startswith("tma_fetch(addr(x3[") for line in lines) == 1
    text = emit_kernel(kernel, "conv", H200)
    assert "tma_fetch_2d(" in text and compile_cuda(text, "sm_90a").spills == 0
    assert next(m for m in launch_of(kernel).maps if m.param == "x3").box == (128, 64)


@pytest.mark.slow
def test_the_map_of_an_image() -> None:
    kernel = wgmma.apply(
        problem_of(conv(2, 64, 9, 64, 3, s=2, p=1)), {"bm": 128, "bn": 64, "stages": 2, "group": 8, "split": 1}, H200
    )
    m = next(m for m in launch_of(kernel).maps if m.param == "x0")
    assert (m.shape, m.box, m.steps, m.swizzle) == ((2, 9, 9, 64), (128, 1, 1, 64), (1, 2, 2, 1), 128)
    assert m.corners == (
        (-1, -1),
        (-1, -1),
    )  # the filter's corner walks from one pixel before the image to two before its last one, by twos
    text = emit_kernel(kernel, "conv", H200)
    assert "tma_im2col4(" in text and compile_cuda(text, "sm_90a").spills == 0


def test_results_of_32_bits() -> None:
    text = (
        "def f(x: f16[40, 64], w: f16[64, 72]):\n    h: f16[40, 72] = matmul(x, w)\n"
        "    y: f32[40, 72] = cast(h, to=f32)\n    return y\n"
    )
    p = problem_of(text)
    assert wgmma.candidates(p, H200)
    check(p, "f16")


def test_a_result_with_rows_of_any_length() -> None:
    text = (
        "def f(x: f16[40, 64], w: f16[71, 64]):\n    y: f16[40, 71] = matmul(x, transpose(w, perm=(1, 0)))\n"
        "    return y\n"
    )
    p = problem_of(text)
    found = wgmma.candidates(p, H200)
    assert all(dict(k)["split"] == 1 for k in found)
    long = (
        "def f(x: f16[40, 4096], w: f16[71, 4096]):\n    y: f16[40, 71] = matmul(x, transpose(w, perm=(1, 0)))\n"
        "    return y\n"
    )
    assert {dict(k)["split"] for k in wgmma.candidates(problem_of(long), H200)} == {1}
    assert {dict(k)["split"] for k in wgmma.candidates(problem_of(long.replace("71", "72")), H200)} == {1, 2, 4, 8}
    check(p, "f16")


def graph_problem(text: str, **constants: Array) -> Problem:
    graph = parse(text, constants=constants)
    nodes = list(graph.nodes())
    return classify(nodes, lower(graph, nodes, graph.outputs), graph.constants)


@pytest.mark.slow
def test_weights_are_read_while_the_kernel_before_ends() -> None:
    """Constants are; what a kernel may have written is not, nor is anything stored before the wait."""
    text = "def f(x: f16[40, 320], {}w: f16[320, 64]):\n    y: f16[40, 64] = matmul(x, w)\n    return y\n"
    rng = np.random.default_rng(0)
    constant = graph_problem(text.format("*, "), w=rng.standard_normal((320, 64)).astype(np.float16))
    knobs = {"bm": 64, "bn": 64, "stages": 3, "group": 8, "split": 1}
    for p, early in ((constant, True), (problem_of(text.format("")), False)):
        lines = show_kernel(wgmma.apply(p, knobs, H200)).split("\n")
        loads = [k for k, line in enumerate(lines) if "tma_load(addr(sb[" in line]
        waits = [k for k, line in enumerate(lines) if line.strip() == "pdl_wait()"]
        assert len(waits) == 2 and (loads[0] < waits[1]) == early
        assert all(waits[1] < k for k, line in enumerate(lines) if "tma_load(addr(sa[" in line)
        assert all(waits[0] < k for k, line in enumerate(lines) if "tma_store(" in line)
        check(p, "f16", stages=3)
        check(p, "f16", stages=8)


@pytest.mark.slow
def test_weights_of_a_shared_sum_are_read_early() -> None:
    """Each block of a cluster begins with those of its own part."""
    text = "def f(x: f16[40, 256], *, w: f16[256, 64]):\n    y: f16[40, 64] = matmul(x, w)\n    return y\n"
    p = graph_problem(text, w=np.random.default_rng(0).standard_normal((256, 64)).astype(np.float16))
    lines = show_kernel(wgmma.apply(p, {"bm": 64, "bn": 64, "stages": 3, "group": 8, "split": 2}, H200)).split("\n")
    loads = [
        line
        for line in lines[: max(k for k, line in enumerate(lines) if line.strip() == "pdl_wait()")]
        if "tma_load(" in line
    ]
    assert len(loads) == 1 and "addr(sb[" in loads[0] and "part" in loads[0]
    check(p, "f16", stages=3, split=2)


HEADS = """
def f(x: f16[{b}, 24, {k}], w: f16[{k}, 128], b: f16[128]):
    h: f16[{b}, 24, 128] = matmul(x, w)
    s: f16[{b}, 24, 128] = add(h, b)
    r: f16[{b}, 24, {heads}, {size}] = reshape(s, shape=({b}, 24, {heads}, {size}))
    y: f16[{b}, {heads}, 24, {size}] = transpose(r, perm=(0, 2, 1, 3))
    return y
"""


@pytest.mark.family("cases")
@pytest.mark.parametrize("b, heads, bn", [(1, 2, 128), (2, 2, 64), (1, 1, 64), (1, 4, 128), (2, 16, 64)])
def test_results_that_lie_head_by_head(b: int, heads: int, bn: int) -> None:
    """Boxes of 64 columns where a head has as many and there is one batch; else a tile's rows are stored in vectors."""
    p = problem_of(HEADS.format(b=b, heads=heads, size=128 // heads, k=64))
    product = wgmma.product_of(p)
    assert (
        product is not None
        and product.cols == ((heads, 128 // heads) if heads > 1 else ())
        and (product.batch, product.m) == (1, b * 24)
    )
    assert product.in_vectors and product.in_boxes == (b == 1 and heads <= 2)
    check(p, "f16", bn=bn)


QKV = """
def f(x: {t}[{b}, {s}, 64], w: {t}[64, 384], b: {t}[384]):
    h: {t}[{b}, {s}, 384] = matmul(x, w)
    a: {t}[{b}, {s}, 384] = add(h, b)
    r: {t}[{b}, {s}, 3, 2, 64] = reshape(a, shape=({b}, {s}, 3, 2, 64))
    y: {t}[3, {b}, 2, {s}, 64] = transpose(r, perm=(2, 0, 3, 1, 4))
    return y
"""


@pytest.mark.slow
@pytest.mark.parametrize("b, s, t, bn", [(3, 23, "f16", 128), (2, 64, "bf16", 64), (2, 40, "f16", 256)])
def test_queries_keys_and_values_of_a_batch(b: int, s: int, t: str, bn: int) -> None:
    """Tiles go on where a batch ends; boxes are stored where no tile crosses that."""
    p = problem_of(QKV.format(b=b, s=s, t=t))
    product = wgmma.product_of(p)
    assert product is not None and (product.rows, product.cols, product.in_boxes) == ((b, s), (3, 2, 64), s == 64)
    kernel = show_kernel(wgmma.apply(p, dict(wgmma.candidates(p, H200)[0]), H200))
    assert ("tma_store" in kernel) == (s == 64)
    check(p, t, bn=bn)


def test_vectors_are_read_when_all_have_filled_their_buffer() -> None:
    p = problem_of(QKV.format(b=2, s=40, t="f16"))
    text = show_kernel(wgmma.apply(p, {"bm": 64, "bn": 128, "stages": 2, "group": 8, "split": 1}, GpuTarget(sms=1)))
    broken = parse_kernel(text.replace("named_barrier(w + 1, 128)", "syncwarp()"))
    rng = np.random.default_rng(0)
    args = {
        x.name: rng.standard_normal([int(d.value) for d in x.shape]).astype(x.dtype.numpy) for x in broken.entry.buffers
    }  # type: ignore[attr-defined]
    with pytest.raises(VerifyError, match=r"race|nobody has written"):
        run_kernel(broken, args)


@pytest.mark.slow
def test_heads_that_share_a_sum_are_stored_by_threads() -> None:
    check(problem_of(HEADS.format(b=1, heads=2, size=64, k=256)), "f16", split=2)


def test_heads_that_are_no_whole_vectors_are_left_to_other_templates() -> None:
    assert wgmma.candidates(problem_of(HEADS.format(b=1, heads=32, size=4, k=64)), H200) == []


@pytest.mark.family("choices")
@pytest.mark.parametrize(
    "text, target",
    [
        (layer((64, 64), (64, 64), "f32"), H200),
        (layer((64, 64), (64, 64)), FACTS["sm_80"]),
        (layer((8, 64), (64, 64)), H200),  # few rows: bandwidth
        (layer((64, 64), (64, 60)), H200),  # rows of 120 bytes that the copy engine would have to read
        (layer((64, 60), (60, 64)), H200),
        (conv(1, 12, 8, 64, 3), H200),  # pixels of 24 bytes
        (conv(1, 64, 8, 64, 3).replace(' @ "0 2 3 1"', ""), H200),  # channels first
    ],
)
def test_others_are_left_to_other_templates(text: str, target: GpuTarget) -> None:
    assert wgmma.candidates(problem_of(text), target) == []


@pytest.mark.family("cases")
@pytest.mark.parametrize(
    "bn, resident",
    [(128, 3), pytest.param(64, 4, marks=pytest.mark.slow), pytest.param(256, 2, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("act", ["gelu", pytest.param("sigmoid", marks=pytest.mark.slow)])
def test_blocks_that_share_a_multiprocessor_have_registers(bn: int, resident: int, act: str) -> None:
    p = problem_of(layer((8192, 64), (64, 512), act=act))
    knobs = next(dict(k) for k in wgmma.candidates(p, H200) if (dict(k)["bn"], dict(k)["resident"]) == (bn, resident))
    kernel = verify_kernel(decompose(wgmma.apply(p, knobs, H200), supported("standard")))
    launch = launch_of(kernel)
    assert launch.block[0] == 160 and launch.grid[0] == min(132 * resident, 128 * 512 // bn)
    assert resident * (launch.shared_bytes + 1024) <= H200.shared_per_sm
    text = emit_kernel(kernel, "gemm", H200)
    c = compile_cuda(text, "sm_90a")
    assert f"__launch_bounds__(160, {resident})" in text
    assert c.spills == 0 and c.local_bytes == 0 and "serialized" not in c.log
    assert -(-c.registers // 8) * 8 * launch.block[0] * resident <= H200.registers


@pytest.mark.slow
def test_vectors_and_boxes_of_heads_compile() -> None:
    for size, effect in ((40, "st<8>("), (64, "tma_store_5d(")):
        text = emit_kernel(
            wgmma.apply(
                problem_of(QKV.format(b=2, s=size, t="f16")),
                {"bm": 64, "bn": 128, "stages": 2, "group": 8, "split": 1},
                H200,
            ),
            "qkv",
            H200,
        )
        c = compile_cuda(text, "sm_90a")
        assert effect in text and c.spills == 0 and c.local_bytes == 0
