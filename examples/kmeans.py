"""k-means with @dnnc.jit: Lloyd's algorithm on points around four centers.

    python examples/kmeans.py [--size 2000] [--steps 50] [--device cuda:0]

`step` is array code: the distances of all points to all centers, the nearest center of each point, the mean of the
points of each center. The loop around it is Python's, since it ends when the data says so. The first call traces and
compiles the function, the others run the program; `step.traces` counts. Its number of points is open (`dynamic=`), so
the second, smaller set of points runs the same program (on GPUs there is one for each size). Look at the sum of squared
distances, which never rises.
"""

from __future__ import annotations

import argparse

import numpy as np

import dnnc
import dnnc.array as xp

CENTERS = np.float32([[0, 0], [4, 1], [1, 5], [6, 6]])
STARTS = np.float32([[2, 0], [2, 2], [2, 4], [4, 4]])


@dnnc.jit(dynamic={"points": {0: "n"}})
def step(points: xp.Array, centers: xp.Array) -> tuple[xp.Array, xp.Array, xp.Array]:
    """The next centers f32[k, 2] of points f32[n, 2], each point's nearest, the sum of squared distances."""
    distance = xp.sum((points[:, None, :] - centers) ** 2, axis=2)
    nearest = xp.argmin(distance, axis=1)
    member = xp.astype(
        nearest[:, None] == xp.arange(centers.shape[0]), points.dtype
    )  # of n points and k centers: 1 where it is the nearest
    mean = xp.matrix_transpose(member) @ points / xp.maximum(xp.sum(member, axis=0), 1)[:, None]
    return mean, nearest, xp.sum(xp.min(distance, axis=1))


def k_means(points: xp.Array, centers: xp.Array, steps: int, verbose: bool = True) -> tuple[xp.Array, xp.Array, float]:
    """Centers, the nearest one of each point and the sum of squared distances to these, after as many steps as it takes
    until the centers stay, `steps` at most.
    """
    for k in range(steps):
        moved, nearest, total = step(points, centers)
        if verbose:
            print(f"  step {k}: sum of squared distances {float(total):10.2f}")
        change = float(xp.max(xp.abs(moved - centers)))  # looked at, so this is computed now
        centers = moved
        if change < 1e-5:
            break
    return centers, nearest, float(total)


def by_numpy(points: np.ndarray, centers: np.ndarray, steps: int) -> tuple[np.ndarray, float]:
    """The same in plain NumPy, in float64."""
    for _ in range(steps):
        distance = ((points[:, None] - centers) ** 2).sum(2)
        nearest = distance.argmin(1)
        moved = np.array([points[nearest == k].mean(0) for k in range(len(centers))])
        change = np.abs(moved - centers).max()
        centers = moved
        if change < 1e-5:
            break
    return centers, distance.min(1).sum()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="k-means with @dnnc.jit.")
    parser.add_argument("--size", type=int, default=2000, help="number of points, at least 50")
    parser.add_argument("--steps", type=int, default=50, help="steps at most")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:0")
    args = parser.parse_args(argv)
    rng = np.random.default_rng(0)
    points = (CENTERS[rng.integers(4, size=args.size)] + rng.normal(0, 0.6, (args.size, 2))).astype(np.float32)

    print(f"{args.size} points around 4 centers")
    start = xp.asarray(STARTS, device=args.device)
    centers, nearest, total = k_means(xp.asarray(points, device=args.device), start, args.steps)
    counts = np.bincount(nearest.numpy(), minlength=4)
    for found, n in zip(centers.numpy(), counts):
        true = CENTERS[((CENTERS - found) ** 2).sum(1).argmin()]
        print(f"  {n:5} points around {found.round(2)}, drawn around {true}")

    half = points[: args.size // 2]
    fewer, _, left = k_means(xp.asarray(half, device=args.device), start, args.steps, verbose=False)
    for data, ours, sum_of_ours in ((points, centers, total), (half, fewer, left)):
        expected, least = by_numpy(data.astype(np.float64), STARTS, args.steps)
        np.testing.assert_allclose(ours.numpy(), expected, atol=1e-3)
        np.testing.assert_allclose(sum_of_ours, least, rtol=1e-4)
    print(f"centers and distances are NumPy's, of all points and of half of them; traces of `step`: {step.traces}")


if __name__ == "__main__":
    main()
