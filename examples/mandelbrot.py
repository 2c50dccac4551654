"""The Mandelbrot set with dnnc.while_loop, as text.

    python examples/mandelbrot.py [--size 72] [--steps 60] [--device cuda:0]

For each point c of the plane: how often can z = z * z + c be repeated until |z| > 2? The loop ends when all points have
left, or after `--steps`. That depends on the contents of arrays, so Python cannot decide it while the function is
traced; `dnnc.while_loop` makes it a loop of the program. Look at `escape`, which is written for a single point:
`dnnc.vmap` turns it into one for all of them, whose loop runs until the last one is done, while those that are done
keep their count.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import dnnc
import dnnc.array as xp

SHADES = " .:-=+*#%@"
State = dict[str, Any]


def escape(c: xp.Array, limit: xp.Array) -> xp.Array:
    """The number of steps that one point c, a complex number, stays within radius 2, at most `limit`."""

    def inside(s: State) -> xp.Array:
        return (s["n"] < limit) & (xp.real(s["z"]) ** 2 + xp.imag(s["z"]) ** 2 <= 4)

    def step(s: State) -> State:
        return {"z": s["z"] * s["z"] + c, "n": s["n"] + 1}

    return dnnc.while_loop(inside, step, {"z": c * 0, "n": xp.zeros_like(limit)})["n"]


# in_axes: the rows of c one by one, and of each row the points; the limit is the same for all.
mandelbrot = dnnc.jit(dnnc.vmap(dnnc.vmap(escape, in_axes=(0, None)), in_axes=(0, None)))


def by_numpy(c: np.ndarray, limit: int) -> np.ndarray:
    """The same in plain NumPy."""
    z, n = np.zeros_like(c), np.zeros(c.shape, np.int64)
    for _ in range(limit):
        inside = np.abs(z) <= 2
        n += inside
        z = np.where(inside, z * z + c, z)
    return n


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The Mandelbrot set with dnnc.while_loop.")
    parser.add_argument("--size", type=int, default=72, help="characters in a line")
    parser.add_argument(
        "--steps", type=int, default=60, help="steps, at least 2, after which a point counts as one of the set"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda:0")
    args = parser.parse_args(argv)
    re, im = (
        np.linspace(-2.1, 0.7, args.size),
        np.linspace(-1.15, 1.15, args.size // 3 | 1),
    )  # a character is twice as high as wide
    c = re + 1j * im[:, None]

    steps = mandelbrot(xp.asarray(c, device=args.device), xp.asarray(args.steps, device=args.device)).numpy()
    for row in np.log2(steps) / np.log2(args.steps):
        print("".join(SHADES[int(v * (len(SHADES) - 1))] for v in row))

    # A point near the border may leave a step earlier or later: there rounding errors double with every step.
    same = float((steps == by_numpy(c, args.steps)).mean())
    assert same > 0.98, f"only {same:.1%} of the points are as NumPy has them"
    area = (steps == args.steps).mean() * (re[-1] - re[0]) * (im[-1] - im[0])
    print(
        f"{c.size} points, {(steps == args.steps).sum()} of them in the set, whose area is about {area:.2f} (1.51 in "
        "truth)"
    )
    print(f"{same:.1%} of the points as NumPy has them")


if __name__ == "__main__":
    main()
