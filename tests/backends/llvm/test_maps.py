"""Data movement: nests cut at boundaries are copies, rows and columns change places in registers, steps are
shuffles; and the numbers are right.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from kernels import TARGET, program
from native_check import one_node, run_native

from dnnc.backends.llvm.emit import emit_kernel
from dnnc.backends.llvm.features import parse_target
from dnnc.backends.llvm.templates.maps import MAX_PARTS, best_cuts
from dnnc.driver import compile
from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.stmt import For, Kernel
from dnnc.ir.loops.text import show_kernel
from dnnc.tools.sample_graphs import graph_of

WIDE = "llvm -mcpu=skylake-avx512 -threads=2"  # where a test names lanes, blocks or steps: they differ between CPUs


def kernel(g: Graph, op: str, target: str = "") -> Kernel:
    """The kernel of the group that holds an op."""
    p = program(g, parse_target(target) if target else TARGET)
    return next(s.kernel for s in p.steps if any(n.op.name == op for n in s.group.nodes))


def names(g: Graph, target: str) -> list[str]:
    """What the kernels of a program are called, in order."""
    return [s.kernel.entry.name for s in program(g, parse_target(target)).steps]


def same(g: Graph, *targets: str) -> None:
    """The numbers of the graph, moved and not computed, are the interpreter's."""
    rng = np.random.default_rng(0)
    xs = [(rng.standard_normal([int(d) for d in v.type.shape]) * 50).astype(v.type.dtype.numpy) for v in g.inputs]
    (want,) = run(g, xs)
    for target in targets or ("llvm",):
        (got,) = run_native(g.copy(), xs, target)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("op", ["argmax", "argmin"])
def test_places_across_memory_are_found_in_vectors(op: str) -> None:
    """Of the largest channel of each pixel: a lane for each pixel, without a branch."""
    k = kernel(one_node(op, ["f32 2 9 8 40"], axis=1), op, WIDE)
    assert "if " not in show_kernel(k) and re.search(r"y\[.*:\+8\] = acc", show_kernel(k))


@pytest.mark.parametrize("op", ["argmax", "argmin"])
def test_places_along_rows_are_found_in_vectors(op: str) -> None:
    g = one_node(op, ["f32 3 70"], axis=1)
    k = kernel(g, op, WIDE)
    assert "if " not in show_kernel(k) and "hmin" in show_kernel(k)
    same(g)


@pytest.mark.parametrize("op,shape", [("softmax", "3 19 5"), ("log_softmax", "40 9"), ("softmax", "2 17 2")])
def test_short_rows_are_lanes(op: str, shape: str) -> None:
    """Each lane has a row; vectors are loaded and stored in the order of memory, without gathers."""
    g = one_node(op, [f"f32 {shape}"], axis=-1)
    assert "llvm.masked" not in emit_kernel(kernel(g, op, WIDE), "k")
    x = np.random.default_rng(3).standard_normal([int(d) for d in shape.split()]).astype(np.float32)
    np.testing.assert_allclose(run_native(g.copy(), [x], WIDE)[0], run(g, [x])[0], rtol=2e-6, atol=2e-6)


def test_short_rows_in_place_are_lanes() -> None:
    """A softmax that overwrites its operand: rows of one vector are read and written by one thread."""
    g = graph_of(
        """def f(x: f32[400, 8, 8], y: f32[400, 8, 7], z: f32[400, 7, 8]):
    return matmul(softmax(matmul(x, y), axis=2), z)"""
    )
    k = kernel(g, "softmax", WIDE)
    assert len(k.entry.buffers) == 1 and "masked" not in emit_kernel(k, "k") and "parallel" in show_kernel(k)


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
def test_borders_that_repeat_an_image_leave_copies(mode: str) -> None:
    """Nothing limits an index of what is read."""
    k = kernel(one_node("pad", ["f32 2 9 17 40"], pads=(0, 0, 1, 2, 0, 0, 2, 2), mode=mode), "pad", WIDE)
    assert not re.search(r"min\(|max\(|%", show_kernel(k))


@pytest.mark.parametrize("axis", [1, 2])
def test_a_concatenation_is_copies(axis: int) -> None:
    shapes = [[3, 20, 33] for _ in range(3)]
    for k, s in enumerate(shapes):
        s[axis] += 7 * k
    g = one_node("concat", [f"f32 {s[0]} {s[1]} {s[2]}" for s in shapes], axis=axis)
    text = show_kernel(kernel(g, "concat"))
    assert "select" not in text and "min(" not in text and "lanes" not in text
    same(g)


def test_a_concatenation_of_many_asks_little() -> None:
    """More parts than a kernel has nests: each nest asks for the few boundaries that are left in it."""
    sizes = [1 + 29 * k % 40 for k in range(40)]
    g = one_node("concat", [f"f32 {n}" for n in sizes], axis=0)
    body = kernel(g, "concat").entry.body
    assert len(body) == MAX_PARTS and max(str(nest).count("select") for nest in body) <= 6
    same(g)
    assert best_cuts([4, 8, 90, 91], 100, 1) == [90] and best_cuts([4, 8, 90, 91], 100, 9) == [4, 8, 90, 91]


def test_nests_of_one_kernel_are_all_parallel_or_none() -> None:
    for rows, kinds in ((300, {"parallel"}), (3, {"range"})):
        body = kernel(one_node("concat", [f"f32 2 {rows} 40", "f32 2 1 40", "f32 2 9 40"], axis=1), "concat").entry.body
        assert len(body) == 3 and {s.kind for s in body if isinstance(s, For)} == kinds


def test_a_border_is_filled_and_the_rest_copied() -> None:
    g = one_node("pad", ["f32 2 32 13 19"], pads=(2, 1, 1, 1, 0, 0, 2, 0))
    text = show_kernel(kernel(g, "pad"))
    assert "select" not in text and "= 0.0" in text and "parallel" in text
    same(g)


@pytest.mark.slow
@pytest.mark.family("choices")
@pytest.mark.parametrize("channels", [16, 24, 36, 3])
def test_channels_in_blocks_become_rows_by_tiles(channels: int) -> None:
    ones = np.eye(16, dtype=np.float32)[np.arange(channels) % 16]
    w = np.maximum(ones, np.float32(1e-30))[:, :, None, None]  # no zeros: those may be skipped
    g = graph_of(f"def g(x: f32[1, 16, 9, 20], *, w: f32[{channels}, 16, 1, 1]):\n    return conv(x, w)")
    g.constants[next(iter(g.constants))] = w
    if channels >= 8:
        k = [s.kernel for s in program(g).steps if s.kernel.entry.name == "pack"][-1]
        text = show_kernel(k)
        assert ("zip_low" in text or "interleave_low" in text) and "lanes" not in text
    same(g, "llvm", "llvm -mcpu=haswell")


@pytest.mark.parametrize("strides", [(2, 2), (4,), (1, 8), (3, 2)])
def test_phases_take_turns_by_zipping(strides: tuple[int, ...]) -> None:
    sizes = [9, 20][-len(strides) :]
    dims = " ".join(map(str, sizes))
    g = one_node("interleave", [f"f32 2 {3 * int(np.prod(strides))} {dims}"], strides=strides, channels=3)
    text = show_kernel(kernel(g, "interleave"))
    assert "zip_low" in text and "lanes" not in text
    same(g, "llvm", "llvm -mcpu=haswell")


def test_phases_of_whole_blocks_are_whole_vectors() -> None:
    g = graph_of(
        """def g(x: f32[1, 16, 6, 5], *, w: f32[16, 24, 2, 2], v: f32[16, 24, 1, 1]):
    return conv(relu(conv_transpose(x, w, strides=(2, 2))), v)"""
    )
    text = show_kernel(kernel(g, "interleave"))
    assert "zip_low" not in text and "//" not in text and "%" not in text


@pytest.mark.slow
def test_channels_in_blocks_are_joined_as_they_lie() -> None:
    g = graph_of(
        """def g(x: f32[1, 16, 6, 20], *, w: f32[24, 16, 1, 1], v: f32[40, 16, 1, 1], u: f32[16, 64, 1, 1]):
    return conv(concat(conv(x, w), conv(x, v), axis=1), u)"""
    )
    assert names(g, WIDE) == ["pack", "conv", "conv", "concat", "conv", "pack"]
    text = show_kernel(kernel(g, "concat", WIDE))
    assert "select" not in text and "lanes" not in text and ":+8]" in text


@pytest.mark.parametrize("step", [2, 3, 4, 18])
@pytest.mark.parametrize("dtype", ["f32", "i8", "f64"])
def test_steps_are_shuffles(step: int, dtype: str) -> None:
    g = one_node("slice", [f"{dtype} 3 {64 * step}"], starts=(0, step - 1), steps=(1, step), shape=(3, 64))
    assert ("llvm.masked.gather" in emit_kernel(kernel(g, "slice"), "k")) == (step == 18)
    same(g)


def test_the_index_of_a_row_is_no_vector() -> None:
    """Rows are read in vectors of their own type, however wide the index is that is one for a whole row."""
    rows = show_kernel(kernel(one_node("gather", ["f32 30 64", "i64 9"], axis=0), "gather", WIDE))
    assert ":+16]" in rows
    short = show_kernel(kernel(one_node("gather", ["f32 30 4", "i64 9"], axis=0), "gather", WIDE))
    assert ":+16]" not in short


def test_rows_across_memory_are_reduced_side_by_side() -> None:
    g = graph_of(
        """def g(x: f32[1, 16, 9, 20], *, w: f32[16, 16, 1, 1]):
    return softmax(conv(x, w), axis=1)"""
    )
    assert names(g, WIDE) == ["pack", "conv", "pack", "softmax"]
    assert "acc: f32[16] @ register" in show_kernel(kernel(g, "softmax", WIDE))


def test_phases_of_less_than_a_block_are_zipped_as_rows() -> None:
    g = graph_of(
        """def g(x: f32[1, 16, 6, 20], *, w: f32[16, 16, 1, 1], v: f32[16, 1, 2, 2]):
    return sigmoid(conv_transpose(conv(x, w), v, strides=(2, 2)))"""
    )
    assert names(g, WIDE) == ["pack", "conv", "conv", "interleave_sigmoid"]
    assert "lanes" not in show_kernel(kernel(g, "interleave", WIDE))


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize(
    "text",
    [
        "softmax(x)",
        "log_softmax(x)",
        "cumsum(x, axis=1)",
        "reduce_sum(exp(x), axes=(1,))",
        "concat(x, x, axis=1)",
        "neg(x)",
    ],
)
def test_rows_without_elements(text: str, level: int) -> None:
    g = parse(f"def f(x: f32[3, 0]):\n    y = {text}\n    return y\n")
    x = np.zeros((3, 0), np.float32)
    np.testing.assert_array_equal(compile(g, cache=False, threads=1, opt_level=level)(x), run(g, [x])[0])


LONG_FUNCTION = "def g(x: f32[{n}]):\n    return add(mul(tanh(add(mul(x, 2.0), 1.0)), exp(neg(x))), x)"
LENGTHS = {
    3: 16,
    64: 64,
    100: 16,
    1000: 16,
    1024: 64,
    10_000: 64,
    65_536: 64,
    70_003: 64,
}  # and the lanes of its vectors


@pytest.mark.parametrize("n", LENGTHS)
def test_vectors_of_long_functions_go_in_lockstep(n: int) -> None:
    """Of all lengths: less than a vector, whole steps, a last step with idle lanes, and last elements apart."""
    g = parse(LONG_FUNCTION.format(n=n))
    text = show_kernel(kernel(g.copy(), "tanh", WIDE))
    assert (":+64" in text) == (LENGTHS[n] == 64) and (n % 64 == 0 or n < 65_536 or text.count(" in parallel(") == 2)
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    (got,) = run_native(g, [x], "llvm")
    v = x.astype(np.float64)
    want = np.tanh(2 * v + 1) * np.exp(-v) + v
    np.testing.assert_allclose(got, want, rtol=0, atol=8 * 2.0**-24 * float((np.exp(-v) + np.abs(v)).max()))


def test_last_elements_of_each_long_part_are_apart() -> None:
    """Three nests, none a multiple of a vector: a part's tail stands behind the part, not at the end."""
    g = parse("def g(x: f32[100003]):\n    return mul(pad(x, pads=(70005, 66001)), 3.0)")
    assert show_kernel(kernel(g.copy(), "pad")).count(" in parallel(") == 6
    x = np.random.default_rng(0).standard_normal(100003).astype(np.float32)
    (got,) = run_native(g, [x], "llvm")
    np.testing.assert_array_equal(got, np.pad(x, (70005, 66001)) * np.float32(3))


def test_tiles_of_two_nests_over_a_symbolic_size() -> None:
    """12 channels are a vector and a part of one; loops of both tiles have equal names."""
    g = parse("def g(x: i32[n, 12, 4, 5], w: i32[4, 6, 2, 1]):\n    return conv(x, w, strides=(1, 2), group=2)")
    steps = program(g, parse_target("llvm -mcpu=haswell -threads=2")).steps
    text = next(show_kernel(s.kernel) for s in steps if s.kernel.entry.name == "pack")
    assert text.count("i32[8, 8] @ register") == 8 and "unroll(1)" not in text
