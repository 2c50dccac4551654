"""n bodies that attract each other: an op of one's own for the force, and leapfrog steps as one program.

    python examples/nbody.py [--size 64] [--steps 200] [--device cuda:0]

`dnnc.custom_op` takes what an element of the result is, here the sum of what all other bodies do to one of them, and
makes kernels of it that store nothing of n x n elements, which the same in array code would. `dnnc.scan` makes the
steps a loop of the program and stacks the energy after each. Look at `pull_compute`, and at the energy: leapfrog is
symplectic, so its error swings but does not grow.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

import dnnc
import dnnc.array as xp
from dnnc.ir import te
from dnnc.ir.expr import Expr
from dnnc.ir.loops.stmt import call

SOFT = 0.1  # length: pairs that are much closer pull like pairs at this distance
State = tuple[xp.Array, xp.Array, xp.Array]  # positions, velocities, accelerations, each f64[3, n]


def pull_compute(x: te.Tensor, m: te.Tensor) -> tuple[te.Tensor, te.Tensor]:
    """What each element of the results is: a sum over all bodies j. It runs once, with symbols for the indices."""
    _, n = x.dims

    def inverse_distance(i: Expr, j: Expr) -> Expr:
        d = [x[axis, j] - x[axis, i] for axis in range(3)]
        return 1 / call("sqrt", d[0] * d[0] + d[1] * d[1] + d[2] * d[2] + SOFT**2)

    def acceleration(k: Expr, i: Expr, j: Expr) -> Expr:
        s = inverse_distance(i, j)
        return m[j] * (x[k, j] - x[k, i]) * s * s * s

    def potential(i: Expr, j: Expr) -> Expr:
        return -m[j] * inverse_distance(i, j)

    return te.reduce((3, n), (n,), x.dtype, "sum", acceleration), te.reduce((n,), (n,), x.dtype, "sum", potential)


# Acceleration f64[3, n] and potential f64[n] of bodies at x f64[3, n] with masses m f64[n]; the gravitational constant
# is 1.
pull = dnnc.custom_op("pull", pull_compute)


@dnnc.jit(static="steps")
def simulate(x: xp.Array, v: xp.Array, m: xp.Array, dt: xp.Array, steps: int) -> tuple[xp.Array, xp.Array, xp.Array]:
    """Positions and velocities after `steps` leapfrog steps of dt; the energy before each and last, f64[]."""

    def energy(v: xp.Array, potential: xp.Array) -> xp.Array:
        own = -m / SOFT  # each body is one of those that pull at it
        return xp.sum(m * (xp.sum(v * v, axis=0) + potential - own)) / 2

    def step(state: State, _: None) -> tuple[State, xp.Array]:
        x, v, a = state
        half = v + a * (dt / 2)
        x = x + half * dt
        a, potential = pull(x, m)
        v = half + a * (dt / 2)
        return (x, v, a), energy(v, potential)

    a, potential = pull(x, m)
    first = energy(v, potential)
    (x, v, _), energies = dnnc.scan(step, (x, v, a), length=steps)
    return x, v, xp.concat([first[None], energies])


def by_numpy(
    x: np.ndarray, v: np.ndarray, m: np.ndarray, dt: float, steps: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """The same in plain NumPy; of the energies the last."""

    def pull(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        d = x[:, None, :] - x[:, :, None]  # to body j from body i: d[:, i, j]
        r = np.sqrt((d * d).sum(0) + SOFT**2)
        return (m / r**3 * d).sum(2), -m * m[:, None] / r

    a, pairs = pull(x)
    for _ in range(steps):
        half = v + a * (dt / 2)
        x = x + half * dt
        a, pairs = pull(x)
        v = half + a * (dt / 2)
    return x, v, (m * v * v).sum() / 2 + np.triu(pairs, 1).sum()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="n bodies that attract each other.")
    parser.add_argument("--size", type=int, default=64, help="number of bodies, at least 2")
    parser.add_argument("--steps", type=int, default=200, help="number of steps, of a hundredth each")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:0")
    args = parser.parse_args(argv)
    rng = np.random.default_rng(0)
    m = rng.uniform(0.5, 1.5, args.size) / args.size
    x, v = rng.normal(size=(3, args.size)), rng.normal(0, 0.3, (3, args.size))
    v -= v @ m[:, None] / m.sum()  # the center of mass rests
    dt = np.float64(0.01)

    given = [xp.asarray(a, device=args.device) for a in (x, v, m, dt)]
    simulate(*given, args.steps)  # compiles
    start = time.perf_counter()
    end_x, end_v, energies = (a.numpy() for a in simulate(*given, args.steps))
    spent = time.perf_counter() - start

    expected_x, expected_v, expected_energy = by_numpy(x, v, m, float(dt), args.steps)
    np.testing.assert_allclose(end_x, expected_x, atol=1e-6)
    np.testing.assert_allclose(end_v, expected_v, atol=1e-6)
    np.testing.assert_allclose(energies[-1], expected_energy, rtol=1e-8)
    error = np.abs(energies / energies[0] - 1)
    assert error.max() < 1e-2, "the energy is kept"
    print(
        f"{args.size} bodies, {args.steps} steps of {args.size**2} pairs each: {spent * 1e6 / args.steps:.0f} us a step"
    )
    print(
        f"energy {energies[0]:.6f} -> {energies[-1]:.6f}: off by {error[-1]:.1e} in the end, by {error.max():.1e} at "
        "most"
    )
    print(f"momentum {np.abs(end_v @ m).max():.1e}; positions, velocities and energy are NumPy's")


if __name__ == "__main__":
    main()
