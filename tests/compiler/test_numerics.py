"""The three modes of `numerics`: what is bit-identical in strict mode, and what fast mode gives up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.backends.llvm.entry import can_flush
from dnnc.ir.dtype import BY_NAME
from dnnc.ir.graph import Graph
from dnnc.tools.sample_graphs import graph_of

# Shapes with tails, long reductions, and work enough for several threads.
NETS = {
    "mlp": "def g(x: f32[37, 515], *, w: f32[515, 129], b: f32[129], v: f32[129, 65]):\n    return "
    "softmax(matmul(relu(add(matmul(x, w), b)), v)), x",
    "conv": """def g(x: f32[1, 3, 45, 45], *, w: f32[20, 3, 3, 3], v: f32[33, 20, 1, 1]):
    return reduce_mean(conv(relu(conv(x, w, strides=(2, 2), pads=(1, 1, 1, 1))), v), axes=(2, 3))""",
    "norm": "def g(x: f32[7, 1031], *, s: f32[1031]):\n    return layer_norm(x, s), reduce_sum(x, axes=(0, 1)), "
    "reduce_sum(mul(x, x), axes=(0,))",
    "chain": "def g(x: f32[3, 4097], *, s: f32[4097]):\n    return tanh(div(sub(exp(x), s), add(sigmoid(x), 1.5)))",
}


def run(g: Graph, x: Any, **options: Any) -> list[bytes]:
    made = dnnc.compile(g, **options)(x)
    return [np.asarray(a).tobytes() for a in (made if isinstance(made, tuple) else (made,))]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.family("cases")
@pytest.mark.parametrize("name", NETS)
def test_strict_results_are_the_same_bits_for_every_number_of_threads_and_every_run(name: str, cache: Path) -> None:
    g = graph_of(NETS[name])
    x = np.random.default_rng(1).standard_normal([int(str(d)) for d in g.inputs[0].type.shape]).astype(np.float32)
    one = dnnc.compile(g, numerics="strict", threads=1, cache=cache)
    two = dnnc.compile(g, numerics="strict", threads=2, cache=cache)
    fresh = run(g, x, numerics="strict", threads=2, cache=False)  # a second compilation
    assert run(g, x, numerics="strict", threads=1, cache=cache) == fresh
    for _ in range(3):
        for f in (one, two):
            made = f(x)
            assert [a.tobytes() for a in (made if isinstance(made, tuple) else (made,))] == fresh


def test_strict_keeps_what_the_graph_says() -> None:
    g = graph_of(
        "def g(x: f32[4, 8], *, w: f32[8, 8]):\n    return div(matmul(x, w), 3.0), mul(sub(add(x, 1e8), 1e8), 1.0)"
    )
    x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    y, z = dnnc.compile(g, numerics="strict", cache=False)(x)
    (want, _) = dnnc.compile(g, target="reference")(x)
    np.testing.assert_allclose(y, want, rtol=1e-6)
    assert not z.any()  # nothing was reassociated: x is lost in 1e8


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1, 3])
def test_windows_of_one_channel_beside_the_image(level: int) -> None:
    """A row of the window ends where the image does: its length is an expression that may look negative."""
    g = graph_of(
        "def g(x: f32[2, 5, 1, 16], *, w: f32[5, 1, 1, 3], v: f32[1, 5, 1, 5]):\n    return conv_transpose(x, w), "
        "conv(x, v, pads=(0, 4, 0, 4))"
    )
    x = np.random.default_rng(0).standard_normal((2, 5, 1, 16)).astype(np.float32)
    found = dnnc.compile(g, numerics="strict", opt_level=level, cache=False)(x)
    for got, want in zip(found, dnnc.compile(g, target="reference")(x)):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3, 5])
def test_windows_over_channels_in_blocks(size: int) -> None:
    g = graph_of(
        f"def g(x: f32[1, 16, 6, 7], *, w: f32[40, 16, 3, 3]):\n    return lrn(conv(x, w), size={size}, alpha=0.1)"
    )
    x = np.random.default_rng(0).standard_normal((1, 16, 6, 7)).astype(np.float32)
    got = dnnc.compile(g, opt_level=3, threads=1, cache=False)(x)
    np.testing.assert_allclose(got, dnnc.compile(g, target="reference")(x), rtol=1e-3, atol=1e-4)


# --- denormals --------------------------------------------------------------------------------------------------------

TINY = "def g(x: f32[4096], i: i32[4096]):\n    return mul(x, 0.5), add(i, 1)"
X = np.full(4096, 1e-39, np.float32)
I = np.arange(4096, dtype=np.int32)  # noqa: E741


@pytest.mark.slow
@pytest.mark.family("cases")
@pytest.mark.parametrize("numerics", ["strict", "standard", "fast"])
@pytest.mark.parametrize("threads", [1, 2])
def test_denormals(numerics: str, threads: int, cache: Path, tmp_path: Path) -> None:
    f = dnnc.compile(graph_of(TINY), numerics=numerics, threads=threads, cache=cache)
    f.save(tmp_path / "m.dnnc")
    for g in (f, dnnc.load(tmp_path / "m.dnnc", threads=threads)):
        y, k = g(X, I)
        expected = np.zeros_like(X) if numerics == "fast" and can_flush() else X * np.float32(0.5)
        np.testing.assert_array_equal(y, expected)
        np.testing.assert_array_equal(k, I + 1)  # integers are not touched
        assert (g.programs[-1].flush, "ldmxcsr" in g.source("llvm")) == (
            numerics == "fast",
            numerics == "fast" and can_flush(),
        )
        assert g.profile(X, I, repeats=2) is not None


@pytest.mark.slow
@pytest.mark.parametrize("target", ["llvm", "llvm -mcpu=x86-64"])
def test_small_formats_keep_their_denormals(target: str, cache: Path) -> None:
    """Those are float32's normal numbers; and a copy takes no detour over a float32 that is flushed."""
    for name in ("f4e2m1", "f8e4m3fn", "f8e4m3fnuz", "f8e5m2", "f8e5m2fnuz", "f8e8m0", "f16", "bf16"):
        t = BY_NAME[name]
        x = np.arange(1 << t.bits, dtype=np.uint16 if t.bits == 16 else np.uint8).view(t.numpy)
        g = graph_of(
            f"def g(x: {name}[{len(x)}]):\n    return slice(x, starts=({len(x) - 1},), steps=(-1,), "
            f"shape=({len(x)},)), cast(x, to=f32)"
        )
        copied, wide = dnnc.compile(g, target=target, numerics="fast", threads=1, cache=cache)(x)
        np.testing.assert_array_equal(wide, x.astype(np.float32), err_msg=name)
        np.testing.assert_array_equal(copied[::-1].astype(np.float32), x.astype(np.float32), err_msg=name)


def test_the_control_register_is_set_back(cache: Path) -> None:
    f = dnnc.compile(graph_of(TINY), numerics="fast", threads=1, cache=cache)
    f(X, I)
    assert (X * np.float32(0.5)).all()  # on this thread denormals are numbers again
    slow = dnnc.compile(graph_of(TINY), numerics="standard", threads=2, cache=cache)
    assert slow(X, I)[0].all()  # and on those of the pool


@pytest.mark.slow
def test_other_numbers_are_as_in_standard_mode(cache: Path) -> None:
    g = graph_of(NETS["mlp"])
    x = np.random.default_rng(1).standard_normal((37, 515)).astype(np.float32)
    assert run(g, x, numerics="fast", cache=cache) == run(g, x, numerics="standard", cache=cache)


def test_what_is_computed_in_float32_and_stored_in_float64(tmp_path: Path) -> None:
    """The kernel check allows what the coarser type rounds on the way, and no more."""
    f = dnnc.compile(
        graph_of("def g(x: f64[1003]):\n    return cast(exp(cast(x, to=f32)), to=f64)"), cache=tmp_path / "cache"
    )
    x = np.linspace(-3, 3, 1003)
    y = f(x)
    assert y.dtype == np.float64 and 0 < np.abs(y - np.exp(x)).max() < 32 * np.finfo(np.float32).eps * np.exp(3)
