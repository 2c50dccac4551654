"""Derivatives of array code, each beside its closed form: products with a Hessian, gradients of gradients, gradients of
single examples, through a long scan with checkpoints, and through an ODE solver that stops by itself.

    python examples/gradients.py [--size 64] [--steps 1000]

Every line ends with the largest relative difference from the closed form, or from central differences of the solver.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import dnnc
import dnnc.array as xp

rng = np.random.default_rng(0)
CHECKPOINT = 32  # steps between states that are kept


def report(what: str, got: Any, want: Any, beside: str = "") -> None:
    got, want = np.asarray(got), np.asarray(want)
    error = np.abs(got - want).max() / np.abs(want).max()
    print(f"{what}: {beside}{error:.1e}")


def hessian_product(size: int) -> None:
    """f(x) = sum of exp(a_i . x): H v = A^T (exp(A x) * (A v)), without the matrix H."""
    a, x, v = rng.standard_normal((size, size)) / size, rng.standard_normal(size), rng.standard_normal(size)

    def f(x: xp.Array) -> xp.Array:
        return xp.sum(xp.exp(xp.asarray(a) @ x))

    product = dnnc.jit(lambda x, v: dnnc.jvp(dnnc.grad(f), (x,), (v,))[1])
    report("product of Hessian and vector", product(x, v), a.T @ (np.exp(a @ x) * (a @ v)))


def gradients_of_gradients() -> None:
    """Derivatives of sin, one after the other: cos, -sin, -cos, sin."""
    f: Callable[..., Any] = xp.sin
    for k, want in enumerate((np.cos, lambda x: -np.sin(x), lambda x: -np.cos(x), np.sin)):
        f = dnnc.grad(f)
        report(f"derivative {k + 1} of sin", f(0.7), want(0.7))


def gradients_of_examples(size: int) -> None:
    """One gradient for each row of a batch, in one program: 2 (x w - y) x."""
    w, xs, ys = rng.standard_normal(8), rng.standard_normal((size, 8)), rng.standard_normal(size)

    def loss(w: xp.Array, x: xp.Array, y: xp.Array) -> xp.Array:
        return (x @ w - y) ** 2

    each = dnnc.jit(dnnc.vmap(dnnc.grad(loss), in_axes=(None, 0, 0)))
    report("gradients of single examples", each(w, xs, ys), 2 * (xs @ w - ys)[:, None] * xs)


def long_scan(size: int, steps: int) -> None:
    """h <- a h + x_t: the last state is the sum of a^(T-1-t) x_t. Its gradient by `a` reads every state: with
    checkpoints it keeps one in 32, and computes the others again.
    """
    decay = rng.uniform(0.99, 1.0, size)
    xs = rng.standard_normal((steps, size))

    def last(a: xp.Array, xs: xp.Array, every: int | None) -> xp.Array:
        def step(h: xp.Array, x: xp.Array) -> tuple[xp.Array, None]:
            return a * h + x, None

        return xp.sum(dnnc.scan(step, xp.zeros(size), xs, checkpoint=every)[0])

    age = np.arange(steps - 1, -1, -1)[:, None]
    want = (age * decay ** np.maximum(age - 1, 0) * xs).sum(0)
    specs = [dnnc.Spec((size,), "float64"), dnnc.Spec((steps, size), "float64")]
    arenas = []
    for every in (None, CHECKPOINT):
        program = dnnc.compile(dnnc.grad(lambda a, xs, every=every: last(a, xs, every)), inputs=specs)
        made = program(decay, xs)
        arenas.append(program.report.programs[-1].memory.arena)
    report(f"gradient through {steps} steps", made, want, f"{arenas[1] / arenas[0]:.3f} of the memory, ")


def solver() -> None:
    """exp(k) by Heun's method with steps that adapt, in a loop whose number of steps the values decide."""

    def solve(k: xp.Array) -> xp.Array:
        def going(state: Any) -> xp.Array:
            return state[0] < 1.0

        def step(state: Any) -> Any:
            t, y = state
            h = dnnc.stop_gradient(xp.minimum(1.0 - t, 1e-2 / xp.abs(k * y)))  # the grid is no part of the problem
            slope = k * y
            return t + h, y + h * (slope + k * (y + h * slope)) / 2

        return dnnc.while_loop(going, step, (xp.zeros(()), xp.ones(())), bound=1000)[1]

    k = 1.3
    value, gradient = dnnc.jit(dnnc.value_and_grad(solve))(k)
    report("solution of the ODE", value, np.exp(k), "error of the method ")
    report("its derivative", gradient, np.exp(k), "error of the method ")
    report("the same in forward mode", dnnc.jvp(solve, (k,), (1.0,))[1], gradient)


def main(argv: Sequence[str] | None = None) -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--size", type=int, default=64)
    ap.add_argument("--steps", type=int, default=1000)
    a = ap.parse_args(argv)
    hessian_product(a.size)
    gradients_of_gradients()
    gradients_of_examples(a.size)
    long_scan(a.size, a.steps)
    solver()


if __name__ == "__main__":
    main()
