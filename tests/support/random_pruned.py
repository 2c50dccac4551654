"""Random layers with pruned weights against the interpreter in float64: patterns, sizes, windows, formats, CPUs.

    python -m support.random_pruned 10000 [first seed]

Weights are sparse wherever there is a kernel for them. A CPU without vectors of 512 bits multiplies in loops, others
run code for each nonzero.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import dnnc
from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run as interpret
from dnnc.ir.graph.text import parse
from dnnc.passes.rewrites import sparse as rules
from support.random_sparse import Array, numbers, pattern
from support.seeds import main

CPUS = ("", "", "", "haswell", "x86-64")
CHANNELS = (16, 17, 20, 24, 32, 40, 64, 96, 100)
SIZES = (0, 1, 2, 3, 5, 7, 8, 12, 14, 17, 20, 28)


def weights(rng: np.random.Generator, *shape: int) -> Array:
    """Random ones, some of which are not 0: single ones, or blocks of output and input channels."""
    if rng.random() < 0.4:
        sizes = [int(rng.choice((1, 2, 4, 8, 16, 32))), int(rng.choice((1, 4, 8, 16)))]
        high, wide = (-(-n // k) for n, k in zip(shape, sizes))
        blocks = rng.random((high, wide, *shape[2:])) < rng.choice((0.05, 0.2, 0.5))
        blocks[-1, 0] = True
        mask = blocks.repeat(sizes[0], 0).repeat(sizes[1], 1)[: shape[0], : shape[1]]
        return numbers(rng, shape, np.dtype(np.float32)) * mask
    matrix = pattern(rng, shape[0], int(np.prod(shape[1:])))
    if not matrix.any() or matrix.mean() > rules.MOST_DENSITY:
        matrix &= rng.random(matrix.shape) < 0.3
        matrix[-1, rng.integers(matrix.shape[1])] = True
    return numbers(rng, shape, np.dtype(np.float32)) * matrix.reshape(shape)


def divisor(rng: np.random.Generator, n: int) -> int:
    return int(rng.choice([k for k in range(1, n + 1) if n % k == 0]))


def turned(rng: np.random.Generator, name: str, shape: list[int], axis: int) -> str:
    """Its channels, which are an axis, as two or three axes that change places: heads, and shuffled pixels."""
    k = divisor(rng, shape[axis])
    parts = [k, shape[axis] // k]
    if rng.random() < 0.5:
        k = divisor(rng, parts[1])
        parts[1:] = [k, parts[1] // k]
    wide = (*shape[:axis], *parts, *shape[axis + 1 :])
    last = int(rng.integers(2))  # axes that stay the last, as vectors
    perm = (*(int(i) for i in rng.permutation(len(wide) - last)), *range(len(wide) - last, len(wide)))
    return f"transpose(reshape({name}, shape={wide}), perm={perm})"


def layer(rng: np.random.Generator) -> Graph:
    """A convolution or a product with a bias and ReLU, behind a dense convolution, or behind and in front of others."""
    c, o = (int(rng.choice(CHANNELS)) for _ in range(2))
    b = numbers(rng, (o,), np.dtype(np.float32))
    if rng.random() < 0.3:
        m, w = int(rng.choice((1, 3, 8, 17, 40, 100))), weights(rng, o, c).T.copy()
        text = f"""def g(x: f32[{m}, {c}], *, w: f32[{c}, {o}], b: f32[{o}]):
    y = relu(add(matmul(x, w), b))
    z = {turned(rng, "y", [m, o], 1) if rng.random() < 0.5 else "sigmoid(y)"}
    return z"""
        return parse(text, {"w": w, "b": b})
    kernel = (int(rng.choice((1, 3, 3, 3, 5))), int(rng.choice((1, 3, 3, 3, 5))))
    stride, dilation = ((2, 1), (1, 2), (1, 1), (1, 1))[rng.integers(4)]
    pads = [int(rng.integers(k // 2 * dilation + 1)) for k in (*kernel, *kernel)]
    least = [dilation * (k - 1) + 1 for k in kernel]
    high, wide = (int(rng.choice(SIZES)) + k for k in least)
    arrays = {"w": weights(rng, o, c, *kernel), "b": b, "a": numbers(rng, (c, c, 1, 1), np.dtype(np.float32))}
    image = ("x", "conv(x, a)")[rng.integers(2)]
    end = "relu(y)"
    if rng.random() < 0.4:
        arrays["v"] = weights(rng, 24, o, 1, 1)
        end = "conv(y, v)"
    images = int(rng.integers(1, 3))
    if rng.random() < 0.2:
        sides = [(n + pads[k] + pads[k + 2] - least[k]) // stride + 1 for k, n in enumerate((high, wide))]
        end = turned(rng, "y", [images, o, *sides], 1)
    declared = ", ".join(f"{n}: f32[{', '.join(map(str, a.shape))}]" for n, a in arrays.items())
    text = f"""def g(x: f32[{images}, {c}, {high}, {wide}], *, {declared}):
    y = relu(conv({image}, w, b, strides=({stride}, {stride}), pads={tuple(pads)}, dilations=({dilation}, {dilation})))
    z = {end}
    return z"""
    return parse(text, arrays)


def run(seed: int) -> str:
    """One layer; the templates that it took. AssertionError or DnncError: it is wrong."""
    rng = np.random.default_rng(seed)
    g = layer(rng)
    x = numbers(rng, [int(str(d)) for d in g.inputs[0].type.shape], np.dtype(np.float32))
    (want,) = interpret(g.copy(), [x], "float64")
    cpu = CPUS[rng.integers(len(CPUS))]
    target = f"llvm{f' -mcpu={cpu}' if cpu else ''} -threads={rng.integers(1, 4)}"
    f: Any = dnnc.compile(g, target=target, cache=False, verify=False)
    error, allowed = np.abs(f(x) - want).max(), 2e-5 * max(float(np.abs(want).max()), 1e-3)
    assert error <= allowed, f"{target}: off by {error}, allowed {allowed}; {f.report}"
    assert "does not apply" not in str(f.report), f"{target}: {f.report}"
    words = {"code": "straight-line", "loops": "CSR", "blocks": ": sparse, blocks", "windows": "sparse_windows("}
    return " ".join(name for name, part in words.items() if part in str(f.report))


if __name__ == "__main__":
    rules.GAIN = rules.WINDOW_GAIN = rules.UNKNOWN_GAIN = 0.0
    main(run, "layers", 100, sys.argv[1:])
