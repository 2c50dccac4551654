"""Windows of sparse convolutions: where taps read, how images are cut, what it costs."""

from __future__ import annotations

import pytest

from dnnc.ir.graph.text import parse
from dnnc.ir.target import WIDE_CORE
from dnnc.passes.rewrites.sparse_windows import Window, code_cycles, span_of, tilings, window_of

WINDOWS = (
    Window(1, 64, (56, 56), (3, 3), (1, 1), (1, 1)),
    Window(2, 20, (7, 5), (3, 5), (2, 1), (1, 2)),
    Window(1, 17, (9, 30), (5, 1), (2, 2), (1, 1)),
    Window(1, 16, (2, 3), (2, 3), (3, 2), (1, 1)),
)


@pytest.mark.parametrize("w", WINDOWS)
def test_taps_read_what_their_results_need(w: Window) -> None:
    for number, (phase, *places) in enumerate(w.taps):
        taps = divmod(number, w.kernel[1])
        for k, tap, place, stride, dilation in zip(range(2), taps, places, w.strides, w.dilations):
            assert w.phases[phase][k] + stride * place == dilation * tap and place <= w.halo[k]
    t = tilings(w, 16, 1 << 20)[0]
    last = (t.high - 1) * t.pitch + t.wide - 1  # of the results of a tile
    assert len(set(t.offsets)) == len(w.taps) and max(t.offsets) + 16 * last < 16 * t.row


@pytest.mark.parametrize("w", WINDOWS)
@pytest.mark.parametrize("lanes", [8, 16])
def test_tiles_cover_an_image(w: Window, lanes: int) -> None:
    found = tilings(w, lanes, 300 << 10)
    assert found
    for t in found:
        assert t.down * t.across == lanes and t.wide * t.across >= w.results[1]
        assert t.down * t.high * t.strips >= w.results[0] > t.down * t.high * (t.strips - 1)
        assert w.channels * t.row * 4 * lanes <= 300 << 10 or len({s.row for s in found}) == 1


def test_a_span_holds_whole_channels() -> None:
    w = WINDOWS[0]
    assert span_of(w, 100, 64) == 64 * 9
    assert span_of(w, 8000, 64) % 9 == 0 and 0 < span_of(w, 8000, 64) < 64 * 9
    assert code_cycles(w, 8000, 64, 16, WIDE_CORE) < code_cycles(w, 16000, 64, 16, WIDE_CORE)


@pytest.mark.parametrize(
    ("attrs", "taken"),
    [
        ("pads=(1, 1, 1, 1)", True),
        ("strides=(2, 2)", True),
        ("dilations=(2, 2)", True),
        ("strides=(2, 2), dilations=(2, 1)", False),
        ("group=2", False),
    ],
)
def test_which_convolutions_have_windows(attrs: str, taken: bool) -> None:
    channels = 8 if "group" in attrs else 16
    g = parse(f"""def g(x: f32[1, 16, 9, 9], w: f32[16, {channels}, 3, 3]):
    y = conv(x, w, {attrs})
    return y""")
    assert (window_of(next(iter(g.nodes()))) is not None) == taken
