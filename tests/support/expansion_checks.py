"""Checks of expansions of elementary functions: interpreted in float32 against Python's functions in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.ir.expr import Op, walk
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.stmt import Kernel, exprs, walk_stmts
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.passes.lower.expand import EXPANSIONS, decompose

Array = np.ndarray[Any, Any]
INF, NAN = math.inf, math.nan
TABLES = ("piece", "scale")  # of CPUs with AVX-512


@dataclass(frozen=True)
class Function:
    """A function and what is expected of its expansion.

    The error is at most `ulps` units in the last place in all `regions`, the `special` arguments have the results
    beside them, and near each of the `edges`, where two pieces of the definition meet, there is no step back of more
    than the error. `supported`: the intrinsics of the target.
    """

    name: str
    exact: Callable[[float], float]
    ulps: float
    regions: tuple[Array, ...]
    special: tuple[tuple[float, float], ...]
    edges: tuple[float, ...] = ()
    supported: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "-".join((self.name, *self.supported))

    def __call__(self, x: Array, lanes: int = 1) -> Array:
        return apply(self.name, x, lanes, self.supported)

    def check_error(self) -> None:
        for x in self.regions:
            off = ulps(self(x), np.array([self.exact(v) for v in x.tolist()]))
            assert off.max() <= self.ulps, f"{self}({x[off.argmax()]!r}) is off by {off.max():.2f} ulp"

    def check_special_values(self) -> None:
        x, want = (np.array(column, np.float32) for column in zip(*self.special))
        got = self(x)
        same = (np.isnan(got) & np.isnan(want)) | ((got == want) & (np.signbit(got) == np.signbit(want)))
        assert same.all(), f"{self} of {x[~same]} is {got[~same]} instead of {want[~same]}"

    def check_nan_outside_of_the_domain_only(self) -> None:
        x = magnitudes(-149, 127.99)
        outside = np.array([not self.has(v) for v in x.tolist()])
        wrong = np.isnan(self(x)) != outside
        assert not wrong.any(), f"{self} of {x[wrong]} is {self(x)[wrong]}"

    def has(self, x: float) -> bool:
        """Is a number in the domain?"""
        try:
            self.exact(x)
        except OverflowError:
            return True
        except ValueError:
            return x == -1.0 and self.name in ("log1p", "atanh")  # poles
        return True

    def check_monotone_at_edges(self) -> None:
        for edge in self.edges:
            y = self(np.sort(np.float32(edge) * (1 + np.arange(-64, 64) * 2.0**-23)).astype(np.float32))
            assert (np.diff(y) >= -2 * np.spacing(np.abs(y[:-1]))).all(), f"{self} falls at {edge}"

    def check_vectors_are_scalars(self) -> None:
        x = np.concatenate(
            [grid(-9, 9, 300), np.array([v for v, _ in self.special], np.float32), np.zeros(16, np.float32)]
        )
        x = x[: x.size // 16 * 16]
        assert np.array_equal(self(x, 1), self(x, 16), equal_nan=True)

    def check_everything_left_has_a_spelling(self) -> None:
        k = decompose(kernel(self.name, 8), self.supported)
        assert not calls(k) & {*EXPANSIONS, *TABLES} - {*self.supported}
        assert show_kernel(parse_kernel(show_kernel(k))) == show_kernel(k)


CHECKS = [getattr(Function, name) for name in vars(Function) if name.startswith("check_")]


def kernel(name: str, n: int, lanes: int = 1) -> Kernel:
    at = f"{lanes}*i:+{lanes}" if lanes > 1 else "i"
    return parse_kernel(
        f"def k(x: f32[{n}], y: f32[{n}]):\n    for i in range({n // lanes}):\n        y[{at}] = {name}(x[{at}])\n"
    )


def apply(name: str, x: Array, lanes: int = 1, supported: tuple[str, ...] = ()) -> Array:
    y = np.full_like(x, NAN)
    k = decompose(kernel(name, x.size, lanes), supported)
    assert name not in calls(k) and ("piece" in calls(k)) == bool(supported)
    run_kernel(verify_kernel(k), {"x": x, "y": y})
    return y


def calls(k: Kernel) -> set[str]:
    """The intrinsics that a kernel uses."""
    return {x.name for f in k.funcs for s in walk_stmts(f.body) for e in exprs(s) for x in walk(e) if isinstance(x, Op)}


def grid(low: float, high: float, points: int = 4000) -> Array:
    """Points at equal distances with jitter, and both ends."""
    x = np.linspace(low, high, points) + np.random.default_rng(0).uniform(-0.5, 0.5, points) * (high - low) / points
    return np.concatenate([np.clip(x, low, high), [low, high]]).astype(np.float32)


def magnitudes(low: float, high: float) -> Array:
    """Both signs of numbers of all magnitudes between 2^low and 2^high."""
    x = np.exp2(grid(low, high, 3000).astype(np.float64))
    return np.concatenate([x, -x]).astype(np.float32)


def ulps(got: Array, want: Array) -> Array:
    """Distances in units in the last place of the float32 nearest to the wanted number."""
    return np.abs(got.astype(np.float64) - want) / np.spacing(np.abs(want.astype(np.float32))).astype(np.float64)  # type: ignore[no-any-return]
