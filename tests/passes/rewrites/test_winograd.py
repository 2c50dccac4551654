"""Which convolutions are computed by Winograd's algorithm: the choice, the layout that tells of it, and the plain nest
that reads such weights.
"""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.backends.runtime.link import pack
from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.ir.target import CoreRates
from dnnc.passes.base import PassContext, PassManager
from dnnc.passes.lower.nests import lower
from dnnc.passes.pipelines import PASSES
from dnnc.passes.rewrites.layout import assign_layouts
from dnnc.passes.rewrites.winograd import cycles, winograd_tile

RNG = np.random.default_rng(0)


def conv(
    c: int,
    o: int,
    h: int | str,
    w: int | str,
    attrs: str = "pads=(1, 1, 1, 1)",
    *,
    n: int | str = 1,
    dtype: str = "f32",
    k: int = 3,
) -> Graph:
    weights = RNG.standard_normal((o, c, k, k)).astype(np.float16 if dtype == "f16" else np.float32)
    text = (
        f"def g(x: {dtype}[{n}, {c}, {h}, {w}], *, w: {dtype}[{o}, {c}, {k}, {k}]):\n    y = conv(x, w, {attrs})\n"
        "    return y"
    )
    return parse(text, {"w": weights})


def tile(g: Graph) -> int:
    return winograd_tile(next(iter(g.nodes())), 16, CoreRates())


@pytest.mark.parametrize(
    "size,want",
    [
        ((64, 64, 56, 56), 4),
        ((128, 128, 28, 28), 4),
        ((32, 32, 112, 112), 4),
        ((256, 256, 14, 14), 2),
        ((512, 512, 14, 14), 2),
        ((128, 32, 7, 7), 0),
    ],
)
def test_sizes(size: tuple[int, int, int, int], want: int) -> None:
    assert tile(conv(*size)) == want


def test_larger_images_never_take_smaller_tiles() -> None:
    found = [tile(conv(64, 64, h, h)) for h in (4, 7, 14, 28, 56, 112)]
    assert found == sorted(found) and found[0] < found[-1]


def test_the_estimate_is_linear_in_images() -> None:
    one, four = (next(iter(conv(64, 64, 56, 56, n=n).nodes())) for n in (1, 4))
    assert all(
        cycles(four, 16, t, CoreRates()) == pytest.approx(4 * cycles(one, 16, t, CoreRates())) for t in (0, 2, 4)
    )


@pytest.mark.parametrize(
    "g",
    [
        conv(64, 64, 56, 56, "strides=(2, 2)"),
        conv(64, 64, 56, 56, "dilations=(2, 2)"),
        conv(64, 64, 56, 56, "pads=(-1, 0, 0, 0)"),
        conv(64, 64, 56, 56, k=5),
        conv(64, 64, 56, 56, k=1),
        conv(64, 64, "H", 56),
        conv(64, 64, 56, "W"),
        conv(64, 64, 56, 56, dtype="f16"),
    ],
)
def test_others_stay_direct(g: Graph) -> None:
    assert tile(g) == 0


def layouts(g: Graph, numerics: str = "standard") -> str:
    PassManager().run(g, PASSES, PassContext(numerics=numerics))
    return str(g)


def test_strict_numerics_and_weights_that_are_no_constants() -> None:
    assert "winograd4 2 3 0/16" in layouts(conv(64, 64, 56, 56))
    assert "winograd4 2 3 0/16" in layouts(conv(64, 64, 56, 56, n="N"))
    assert "winograd" not in layouts(conv(64, 64, 56, 56), "strict")
    given = "def g(x: f32[1, 64, 56, 56], w: f32[64, 64, 3, 3]):\n    y = conv(x, w, pads=(1, 1, 1, 1))\n    return y"
    assert "winograd" not in layouts(parse(given))


@pytest.mark.parametrize("chosen", [2, 4])
def test_the_plain_nest_reads_such_weights(chosen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no template schedules still means the convolution."""
    monkeypatch.setattr("dnnc.passes.rewrites.layout.winograd_tile", lambda *_: chosen)
    g = conv(16, 20, 5, 6)
    assign_layouts(g, 16)
    n = next(x for x in g.nodes() if x.op.name == "conv")
    low = lower(g, [n], n.outputs)
    verify_kernel(low.kernel)
    x = RNG.standard_normal((1, 16, 5, 6)).astype(np.float32)
    weights = g.constants[low.params[1]]
    found = np.full([int(str(d)) for d in n.output.type.physical], np.nan, np.float32)
    args = [pack(x, low.params[0].type), pack(weights, low.params[1].type), found]
    run_kernel(low.kernel, dict(zip((b.name for b in low.kernel.entry.buffers), args)))
    (want,) = run(_plain(weights), [x], "float64")
    assert np.abs(found - pack(want, n.output.type)).max() < 1e-4 * np.abs(want).max()


def _plain(weights: np.ndarray) -> Graph:
    return parse(
        "def g(x: f32[1, 16, 5, 6], *, w: f32[20, 16, 3, 3]):\n    y = conv(x, w, pads=(1, 1, 1, 1))\n    return y",
        {"w": weights},
    )
