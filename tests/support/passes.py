"""Checks of passes on texts: `check_pass` makes a pair into five tests, `check_no_match` asks why not."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from dnnc.ir.expr import value
from dnnc.ir.graph import Graph, Node
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.graph.verify import verify
from dnnc.ir.shapes import as_env, resolve
from dnnc.ir.types import TensorType
from dnnc.passes.base import PassContext, pass_context

Array = np.ndarray[Any, Any]
PassFunction = Callable[[Graph, PassContext], bool]
SPECIAL = (0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 3e38)  # two denormals of float32


def check_pass(
    run_pass: PassFunction,
    before: str,
    after: str,
    constants: Mapping[str, Array] | None = None,
    seed: int = 0,
    ctx: PassContext | None = None,
    exact: bool = False,
    eps: float | None = None,
) -> Graph:
    """Run a pass on `before` and compare with `after`.

    Both graphs are verified; the texts must agree, names that somebody chose included; both must give the same numbers
    on random inputs; a second run must change nothing; the result must survive printing and parsing.

    Args:
        run_pass: a pass's function.
        before: graph text, which may be written by hand (nested calls, no types).
        after: likewise.
        constants: data of constants by name, for those that are not inline; for both texts.
        seed: of the random inputs.
        ctx: what the pass gets; default pass_context().
        exact: inputs contain infinities, NaN, signed zeros and denormals, and results must be equal to the bit (NaN to
            NaN).
        eps: of the type in which the pass lets values be stored, where that is not the outputs' own.

    Returns:
        The graph after the pass, for further questions.
    """
    ctx = ctx or pass_context()
    old, g, want = (parse(text, constants) for text in (before, before, after))
    verify(g)
    verify(want)
    assert run_pass(g, ctx) is True, f"the pass says that it changed nothing:\n{g}"
    verify(g)
    diff = "\n".join(difflib.unified_diff(_numbered(want), _numbered(g), "expected", "got", lineterm=""))
    assert not diff, diff
    inputs = random_inputs(old, seed, SPECIAL if exact else ())
    compare(run(old, inputs), run(g, inputs), exact, eps)
    text = str(g)
    assert run_pass(g, ctx) is False and str(g) == text, f"a second run still changes something:\n{text}\nto\n{g}"
    assert str(parse(text, _data(g))) == text
    return g


def check_no_match(
    run_pass: PassFunction,
    text: str,
    reason: str,
    constants: Mapping[str, Array] | None = None,
    ctx: PassContext | None = None,
) -> None:
    """Run a pass on a graph that it must leave alone, and find `reason` among its rules' reasons."""
    reasons: list[str] = []

    def explain(rule: str, n: Node, why: str) -> None:
        reasons.append(f"{rule} at {n.outputs[0].name}: {why}")

    g = parse(text, constants)
    verify(g)
    old = str(g)
    assert run_pass(g, replace(ctx or pass_context(), explain=explain)) is False, f"the pass changed the graph to\n{g}"
    assert str(g) == old
    assert any(reason in r for r in reasons), f"no reason contains {reason!r}; there are\n" + "\n".join(reasons)


def _numbered(g: Graph) -> list[str]:
    """The lines of the text with unnamed values (v3, c, c_1) numbered in the order of their occurrence."""
    names: dict[str, str] = {}
    return re.sub(r"\b(v\d+|c(_\d+)?)\b", lambda m: names.setdefault(m[0], f"v{len(names)}"), str(g)).splitlines()


# --- numbers ----------------------------------------------------------------------------------------------------------


def random_inputs(g: Graph, seed: int = 0, special: tuple[float, ...] = ()) -> list[Array]:
    """Inputs for a graph: normal floats (a third of them special numbers if given), integers of -4 to 9, or 0 to 9 if
    unsigned, bools.

    A symbolic dim takes its smallest size of at least 2 that its facts allow.
    """
    rng = np.random.default_rng(seed)
    env: dict[Any, int] = {}
    for v in g.dims.values():
        low = value(resolve(v.lo, as_env(env))) if v.lo is not None else 0
        env[v] = -(-max(low or 0, 2) // v.div) * v.div
        high = value(resolve(v.hi, as_env(env))) if v.hi is not None else None
        env[v] = env[v] if high is None else min(env[v], high // v.div * v.div)
    return [_draw(rng, resolve(v.type, as_env(env)), special) for v in g.inputs]


def _draw(rng: np.random.Generator, t: TensorType, special: tuple[float, ...]) -> Array:
    shape = tuple(int(str(d)) for d in t.shape)
    if t.dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(np.bool_)
    if t.dtype.is_int:
        return rng.integers(max(-4, t.dtype.range[0]), min(10, t.dtype.range[1] + 1), shape).astype(t.dtype.numpy)
    a = rng.standard_normal(shape)
    if special:
        a = np.where(rng.random(shape) < 1 / 3, rng.choice(special, shape), a)
    with np.errstate(all="ignore"):
        return np.asarray(a).astype(t.dtype.numpy)


def compare(want: list[Array], got: list[Array], exact: bool = False, eps: float | None = None) -> None:
    """AssertionError unless both are the same arrays: to the bit, or within 32 eps (the dtype's, if none is given) of
    the largest number.
    """
    assert len(want) == len(got)
    for k, (a, b) in enumerate(zip(want, got)):
        assert a.dtype == b.dtype and a.shape == b.shape, (
            f"output {k}: {a.dtype}{list(a.shape)} became {b.dtype}{list(b.shape)}"
        )
        if a.dtype.kind in "biuOUST":
            assert np.array_equal(a, b), f"output {k} differs"
            continue
        x, y = a.astype(np.float64), b.astype(np.float64)
        assert np.array_equal(np.isnan(x), np.isnan(y)), f"output {k}: NaN at other places"
        if exact:
            same = np.isnan(x) | ((x == y) & (np.signbit(x) == np.signbit(y)))
            assert same.all(), f"output {k}: {x[~same][:4]} became {y[~same][:4]}"
            continue
        finite = np.isfinite(x)
        scale = np.max(np.abs(x), where=finite, initial=0.0)
        bound = 32 * (eps or {8: 2.0**-52, 4: 2.0**-23, 2: 2.0**-8, 1: 2.0**-3}[a.dtype.itemsize]) * scale
        off = np.where(finite, np.abs(x - y) > bound, x != y) & ~np.isnan(x)
        assert not off.any(), f"output {k}: {x[off][:4]} became {y[off][:4]}, the bound is {bound}"


def _data(g: Graph) -> dict[str, Array]:
    """The constants by hash, subgraphs included."""
    out = {g.digest(v): a for v, a in g.constants.items()}
    for n in g.nodes():
        for s in n.subgraphs():
            out.update(_data(s))
    return out
