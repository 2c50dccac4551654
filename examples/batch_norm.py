"""Variance and batch norm, each written as one expression, each one kernel.

    python examples/batch_norm.py [--size 32] [--device cuda:0]

NumPy runs `mean(square(x - mean(x, 1)), 1)` as four loops, with an array in memory after each. dnnc computes what is
looked at as one program: a reduction, what follows it element by element, and the next reduction over the same elements
end in one kernel, which reads the data from memory once and writes the result alone. Look at the names of the kernels,
and at the bytes that they read and write: of variance these are x and one number for each row, of batch norm x and the
result.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

import dnnc
import dnnc.array as xp


def variance(x: xp.Array) -> xp.Array:
    """Of each row: f32[rows, columns] -> f32[rows]."""
    return xp.mean(xp.square(x - xp.mean(x, axis=1, keepdims=True)), axis=1)


def batch_norm(x: xp.Array, scale: xp.Array, shift: xp.Array) -> xp.Array:
    """Channels of f32[images, channels, height, width] with mean 0 and variance 1 in the batch at hand, then scaled and
    shifted: as in training.
    """
    mean = xp.mean(x, axis=(0, 2, 3), keepdims=True)
    spread = xp.mean(xp.square(x - mean), axis=(0, 2, 3), keepdims=True)
    return (x - mean) / xp.sqrt(spread + 1e-5) * scale[:, None, None] + shift[:, None, None]


def show(fn: Callable[..., xp.Array], arrays: list[np.ndarray], expected: np.ndarray, device: str) -> None:
    """Compile a function for these arrays, run it, and say which kernels it has and whether NumPy agrees."""
    program = dnnc.compile(fn, inputs=arrays, target="llvm" if device == "cpu" else device)
    got = xp.asarray(program(*(xp.asarray(a, device=device) for a in arrays))).numpy()
    kernels = program.report.programs[0].kernels
    print(
        f"{fn.__name__}: {len(kernels)} kernel{'s' * (len(kernels) > 1)}, {sum(a.nbytes for a in arrays):,} bytes of "
        "inputs"
    )
    for k in kernels:
        print(f"  {k.name}: reads and writes {k.bytes:,} bytes; schedule {k.choice}")
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    print(f"  as NumPy in float64, to {np.abs(got - expected).max():.0e}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Variance and batch norm as one kernel each.")
    parser.add_argument("--size", type=int, default=32, help="channels; rows, and a quarter of the columns")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:0")
    args = parser.parse_args(argv)
    rng = np.random.default_rng(0)
    n = args.size

    x = rng.normal(3, 2, (n, 4 * n)).astype(np.float32)
    show(variance, [x], x.astype(np.float64).var(axis=1), args.device)

    images = rng.normal(3, 2, (8, n, 14, 14)).astype(np.float32)
    scale, shift = rng.uniform(0.5, 2, n).astype(np.float32), rng.normal(size=n).astype(np.float32)
    exact = images.astype(np.float64)
    mean, spread = exact.mean((0, 2, 3), keepdims=True), exact.var((0, 2, 3), keepdims=True)
    normal = (exact - mean) / np.sqrt(spread + 1e-5)
    show(batch_norm, [images, scale, shift], normal * scale[:, None, None] + shift[:, None, None], args.device)

    # Without `compile`: an array is an expression until somebody looks at it, and then becomes the same program.
    lazy = variance(xp.asarray(x, device=args.device))
    print(
        f"as a lazy array: the variances lie between {float(xp.min(lazy)):.2f} and {float(xp.max(lazy)):.2f}, around "
        "the true 4"
    )


if __name__ == "__main__":
    main()
