"""Convolutions by patches of the image in shared memory: random geometries interpreted (values, races, bounds), and
compiled without spills.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from dnnc.backends.cuda.emit import emit_kernel, launch_of
from dnnc.backends.cuda.nvrtc import compile_many
from dnnc.backends.cuda.target import FACTS, GpuTarget
from dnnc.backends.cuda.templates import templates
from dnnc.backends.cuda.templates.contraction import patch
from dnnc.backends.cuda.templates.contraction.patch_depthwise import Slab
from dnnc.backends.cuda.templates.contraction.patch_image import Image
from dnnc.backends.runtime.link import pack
from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.stmt import Eval, Kernel, Store, walk_stmts
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.passes.lower.nests import lower
from dnnc.passes.planning.fuse import plan_fusion
from dnnc.passes.schedule.problem import Knobs, Problem, classify

H200 = GpuTarget()
BOUNDS = {"f16": 2e-3, "bf16": 1e-2, "f32": 3e-6}
Ints = Sequence[int]


def listed(values: Ints) -> str:
    return ", ".join(map(str, values))


def problem(
    t: str,
    n: int,
    channels: int,
    outs: int,
    groups: int,
    inside: Ints,
    taps: Ints,
    stride: int = 1,
    pad: int = 0,
    dilation: int = 1,
    block: int = 1,
) -> tuple[Graph, Problem]:
    """relu(conv(x, w) + b + z) with channels last; `channels` and `outs` are those of a group, `block` pads the rows of
    channels. Filters of a depthwise convolution have their channels last too.
    """
    r, order = len(inside), " ".join(str(k) for k in range(2, 2 + len(inside)))
    rows = f'@ "0 {order} 1"' if block == 1 else f'@ "0 {order} 1/{block} 1%{block}"'
    depthwise = channels == outs == 1 < groups
    filters = rows if not depthwise else f'@ "1 {order} 0"' if block == 1 else f'@ "1 {order} 0/{block} 0%{block}"'
    out = [(h + 2 * pad - (k - 1) * dilation - 1) // stride + 1 for h, k in zip(inside, taps)]
    y = f"{t}[{listed((n, outs * groups, *out))}] " + (rows if depthwise else f'@ "0 {order} 1"')
    attrs = ", ".join(
        f"{k}=({listed((v,) * m)},)"
        for k, v, m in (("strides", stride, r), ("pads", pad, 2 * r), ("dilations", dilation, r))
    )
    g = parse(f"""def g(x: {t}[{listed((n, channels * groups, *inside))}] {rows},
        w: {t}[{listed((outs * groups, channels, *taps))}] {filters},
      b: {t}[{outs * groups}], z: {y}):
    h: {y} = conv(x, w, b, {attrs}, group={groups})
    i: {y} = add(h, z)
    y: {y} = relu(i)
    return y""")
    (group,) = plan_fusion(g).groups
    return g, classify(group.nodes, lower(g, group.nodes, group.outputs), set(g.inputs[1:3]))


def first_layer(
    t: str, n: int, channels: int, outs: int, inside: Ints, taps: Ints, stride: int, pad: int
) -> tuple[Graph, Problem]:
    """relu(conv(x, w) + b) of an image whose channels lie in planes."""
    r, order = len(inside), " ".join(str(k) for k in range(2, 2 + len(inside)))
    out = [(h + 2 * pad - k) // stride + 1 for h, k in zip(inside, taps)]
    y = f'{t}[{listed((n, outs, *out))}] @ "0 {order} 1"'
    g = parse(f"""def g(x: {t}[{listed((n, channels, *inside))}], w: {t}[{listed((outs, channels, *taps))}],
        b: {t}[{outs}]):
    h: {y} = conv(x, w, b, strides=({listed((stride,) * r)},), pads=({listed((pad,) * 2 * r)},))
    y: {y} = relu(h)
    return y""")
    (group,) = plan_fusion(g).groups
    return g, classify(group.nodes, lower(g, group.nodes, group.outputs), set(g.inputs[1:]))


def image(p: Problem) -> Image:
    found = patch.image_of(p, H200)
    assert found is not None
    return found


def check(g: Graph, p: Problem, knobs: Knobs) -> Kernel:
    """The kernel, interpreted and compared with the graph."""
    kernel = verify_kernel(patch.apply(p, dict(knobs), H200))
    shown = show_kernel(kernel)
    assert show_kernel(parse_kernel(shown)) == shown
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal([int(d) for d in v.type.shape]).astype(v.type.dtype.numpy) for v in g.inputs]  # type: ignore[call-overload]
    (want,) = run(g, arrays, "float64")
    y = g.outputs[0].type
    got = np.full(y.physical, 7).astype(y.dtype.numpy)
    by_value = {v: pack(a, v.type) for v, a in zip(g.inputs, arrays)}
    run_kernel(kernel, {b.name: by_value.get(v, got) for v, b in zip(p.lowered.params, kernel.entry.buffers)})
    expected = pack(np.asarray(want), y)
    assert np.abs(got.astype(np.float64) - expected).max() <= BOUNDS[y.dtype.name] * max(1.0, np.abs(expected).max()), (
        knobs
    )
    return kernel


CASES = {
    "ResNeXt's narrow groups": ("f16", 1, 4, 4, 8, (6, 7), (3, 3), 1, 1),
    "groups of 8, stride 2": ("bf16", 2, 8, 8, 3, (7, 6), (3, 3), 2, 1),
    "groups of 24": ("f16", 1, 24, 24, 2, (5, 5), (3, 3), 1, 1),
    "twelve channels, outputs no multiple of 8": ("f16", 1, 12, 20, 3, (5, 4), (3, 3), 1, 1, 2),
    "ordinary cores": ("f32", 2, 8, 12, 2, (6, 5), (3, 3), 1, 1),
    "a channel multiplier": ("f32", 1, 1, 3, 8, (6, 6), (3, 3), 1, 1),
    "a channel multiplier in halves": ("f16", 1, 1, 2, 8, (6, 6), (3, 3), 1, 1),
    "a long row": ("f16", 1, 16, 16, 1, (70,), (7,), 1, 9, 3),
    "groups of a row": ("f32", 1, 6, 6, 4, (40,), (16,), 1, 8),
    "a volume": ("f16", 1, 8, 8, 2, (3, 5, 4), (3, 3, 3), 1, 1),
    "a filter of one tap": ("f16", 2, 8, 16, 4, (4, 5), (1, 1)),
    "depthwise": ("f16", 2, 1, 1, 24, (9, 8), (3, 3), 1, 1),
    "depthwise, stride 2": ("f32", 1, 1, 1, 16, (9, 9), (5, 5), 2, 2),
    "depthwise, more taps in a row than are unrolled": ("bf16", 1, 1, 1, 16, (50,), (19,), 1, 9),
    "depthwise, dilated": ("f32", 1, 1, 1, 8, (10, 9), (3, 3), 1, 2, 2),
    "depthwise, a volume": ("f16", 1, 1, 1, 16, (3, 5, 8), (3, 3, 3), 1, 1),
}


@pytest.mark.slow
@pytest.mark.family("random")
@pytest.mark.parametrize("name", CASES)
def test_interpreted(name: str) -> None:
    """The best guess, and the last and a middle one of all shapes that fit."""
    g, p = problem(*CASES[name])
    found = patch.ranked(image(p), H200)
    for k in sorted({0, len(found) // 2, len(found) - 1}):
        check(g, p, found[k][1].knobs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        ("f16", 2, 3, 16, (11, 9), (7, 7), 2, 3),
        ("f32", 1, 1, 8, (40,), (5,), 1, 2),
        ("bf16", 1, 3, 8, (3, 6, 5), (3, 3, 3), 1, 1),
    ],
)
def test_first_layers(case: tuple[str, int, int, int, Ints, Ints, int, int]) -> None:
    """Three channels lie in planes: they become chunks of four, the last one 0."""
    g, p = first_layer(*case)
    read = image(p)
    assert (read.planes, read.channels) == (case[2], 4)
    found = patch.ranked(read, H200)
    for k in (0, len(found) // 2):
        check(g, p, found[k][1].knobs)


@pytest.mark.slow
def test_rows_of_channels_that_are_padded() -> None:
    g, p = problem("f16", 1, 20, 16, 1, (5, 6), (3, 3), 1, 1, block=8)
    assert image(p).channels == 24
    check(g, p, patch.ranked(image(p), H200)[0][1].knobs)
    g, p = problem("f16", 1, 1, 1, 54, (8, 6), (3, 3), 1, 1, block=8)
    assert image(p).row == 56
    kernel = check(g, p, patch.ranked(image(p), H200)[0][1].knobs)
    stores = [x for x in walk_stmts(kernel.entry.body) if isinstance(x, Store) and x.buf.name == "y"]
    assert {x.lanes > 1 for x in stores} == {
        True,
        False,
    }  # vectors where none of their channels is padding, else one element after the other


def test_bank_conflicts_are_counted() -> None:
    """Eight lanes for four pixels of 32 bytes: their runs begin in one bank. Padded pixels lie apart."""
    _, p = problem("f16", 1, 1, 1, 16, (56, 64), (7, 7), 1, 3)
    slab = Slab(image(p), (1, 64), 16, 4, 2)
    assert slab._visits(16) == 4 and slab.pitch == 24 and slab.visits == 2


@pytest.mark.family("long")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_geometries(seed: int) -> None:
    rng, done = random.Random(seed), 0
    while done < 12:
        rank = rng.choice((1, 2, 2, 3))
        inside = [rng.randint(5, 60)] if rank == 1 else [rng.randint(3, 9 if rank == 2 else 5) for _ in range(rank)]
        taps = [rng.choice((1, 2, 3, 5) if rank < 3 else (1, 2, 3)) for _ in range(rank)]
        stride, pad, dilation = rng.choice((1, 1, 2, 3)), rng.choice((0, 1, 2)), rng.choice((1, 1, 2))
        if any(h + 2 * pad <= (k - 1) * dilation for h, k in zip(inside, taps)):
            continue
        channels, outs, groups = (
            rng.choice((1, 2, 4, 8, 12, 16, 24, 40)),
            rng.choice((2, 3, 4, 8, 12, 16, 20)),
            rng.choice((1, 2, 3, 5, 8)),
        )
        if rng.random() < 0.3:
            channels, outs, groups = 1, 1, rng.choice((8, 16, 24, 40))
        g, p = problem(
            rng.choice(("f16", "bf16", "f32")),
            rng.choice((1, 2)),
            channels,
            outs,
            groups,
            inside,
            taps,
            stride,
            pad,
            dilation,
        )
        read = patch.image_of(p, H200)
        if read is not None:  # loops of one iteration may leave nothing of a group
            found = patch.ranked(read, H200)
            for _, shape in [found[0], rng.choice(found)] if found else []:
                check(g, p, shape.knobs)
            done += 1


def test_which_convolutions() -> None:
    """Groups as ResNeXt has them; depthwise ones; none whose channels lie first."""
    _, narrow = problem("f16", 1, 4, 4, 32, (56, 56), (3, 3), 1, 1)
    assert (
        image(narrow).fold == 2 and dict(patch.candidates(narrow, H200)[0])["bn"] == 8
    )  # two groups of four fill a vector
    _, depthwise = problem("f16", 1, 1, 1, 64, (56, 56), (31, 31), 1, 15)
    assert image(depthwise).depthwise and patch.candidates(depthwise, H200)
    g = parse("def g(x: f16[1, 32, 9, 9], w: f16[32, 4, 3, 3]):\n    return conv(x, w, group=8)")
    (group,) = plan_fusion(g).groups
    assert patch.image_of(classify(group.nodes, lower(g, group.nodes, group.outputs)), H200) is None


def test_a_product_is_taken_where_it_promises_more() -> None:
    """Many channels and rows: tiles of a matrix product use what they fetch more often."""
    _, p = problem("f16", 32, 256, 256, 1, (28, 28), (3, 3), 1, 1)
    assert patch.image_of(p, H200) is not None and not patch.candidates(p, H200)


def test_rounded_products_are_compared_with() -> None:
    """Where float32 may be rounded, tensor cores multiply it as well: patches must promise more than these."""
    _, p = problem("f32", 32, 32, 32, 32, (14, 14), (3, 3), 1, 1)
    assert patch.product_cost(p, H200, True) < patch.product_cost(p, H200, False)
    (rounded,) = (t for t in templates(H200, rounded=True) if t.name == "patch")
    assert bool(rounded.candidates(p)) == (patch.ranked(image(p), H200)[0][0] < patch.product_cost(p, H200, True))


def test_filters_come_before_the_kernel_ahead_has_ended() -> None:
    """Where they are constants and the architecture can begin early; otherwise `overlapped` puts the wait first."""
    _, p = problem("f16", 1, 8, 8, 4, (6, 7), (3, 3), 1, 1)
    knobs = dict(patch.ranked(image(p), H200)[0][1].knobs)
    names = [
        [s.name for s in walk_stmts(patch.apply(p, knobs, FACTS[a]).entry.body) if isinstance(s, Eval)]
        for a in ("sm_80", "sm_90a")
    ]
    assert "pdl_wait" not in names[0]
    assert names[1].index("cp_async") < names[1].index("pdl_wait")


COMPILED = (
    ("f16", 1, 4, 4, 32, (56, 56), (3, 3), 1, 1),
    ("bf16", 32, 8, 8, 32, (28, 28), (3, 3), 1, 1),
    ("f16", 32, 32, 32, 32, (7, 7), (3, 3), 1, 1),
    ("f16", 32, 64, 64, 8, (14, 14), (3, 3), 1, 1),
    ("f16", 1, 64, 64, 1, (12800,), (11,), 1, 25, 5),
    ("f32", 32, 16, 16, 32, (14, 14), (3, 3), 1, 1),
    ("f32", 1, 1, 2, 32, (56, 56), (3, 3), 1, 1),
    ("f16", 32, 1, 1, 96, (56, 56), (7, 7), 1, 3),
    ("f32", 1, 1, 1, 64, (56, 56), (31, 31), 1, 15),
)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_compiles_without_spills(arch: str) -> None:
    target, made = FACTS[arch], {}
    (template,) = (t for t in templates(target) if t.name == "patch")
    for case in COMPILED:
        _, p = problem(*case)
        for _, shape in patch.ranked(patch.image_of(p, target), target)[:40:13]:  # type: ignore[arg-type]
            made[f"patch_{len(made)}"] = verify_kernel(template.apply(p, dict(shape.knobs)))
    for symbol, c in compile_many({s: (emit_kernel(k, s, target), arch) for s, k in made.items()}).items():
        assert c.spills == 0 and c.local_bytes == 0, f"{symbol}: {c.log}"
        assert c.registers * launch_of(made[symbol]).block[0] <= target.registers
