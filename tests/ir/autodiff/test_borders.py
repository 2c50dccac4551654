"""Gradients of pad: a border is a selection of elements, whose transpose a matrix says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.pullbacks import WAYS, compiled, ops, pulled

CASES = [
    ((4,), (2, 1)),
    ((4,), (0, 3)),
    ((5, 3), (2, 1, 0, 2)),
    ((3, 4), (-1, 2, 1, 0)),
    ((3, 4), (1, -2, -1, 3)),
    ((2, 3, 4), (0, 1, 2, 0, 2, 1)),
    ((3,), (7, 8)),
    ((1, 2), (2, 1, 3, 1)),
    ((6,), (-2, -3)),
]


def wanted(g: Any, shape: tuple[int, ...], pads: tuple[int, ...], mode: Any) -> Any:
    """What each element has sent to the places of the result comes back, by an array that says which it was."""
    rank = len(shape)
    more = [(max(b, 0), max(e, 0)) for b, e in zip(pads[:rank], pads[rank:])]
    source = np.pad(np.arange(np.prod(shape)).reshape(shape), more, mode)
    cut = tuple(slice(max(-b, 0), n - max(-e, 0)) for b, e, n in zip(pads[:rank], pads[rank:], source.shape))
    out = np.zeros(int(np.prod(shape)))
    np.add.at(out, source[cut].reshape(-1), g.reshape(-1))
    return out.reshape(shape)


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
@pytest.mark.parametrize("shape,pads", CASES)
@pytest.mark.parametrize("run", WAYS)
def test_borders(shape: tuple[int, ...], pads: tuple[int, ...], mode: str, run: Any) -> None:
    rng = np.random.default_rng(0)
    rank = len(shape)
    x = rng.standard_normal(shape)
    g = rng.standard_normal([n + b + e for n, b, e in zip(shape, pads[:rank], pads[rank:])])
    build = lambda b, x: b.pad(x, pads=pads, mode=mode)  # noqa: E731
    found = run(build, [x], g)
    np.testing.assert_allclose(found[0], wanted(g, shape, pads, mode), rtol=1e-12, atol=1e-12)
    if shape != (3,) and shape != (1, 2):
        assert not any("vjp" in op for op in ops(pulled(build, [x], [0])))  # nothing is scattered


@pytest.mark.parametrize("run", WAYS)
def test_a_constant_border(run: Any) -> None:
    rng = np.random.default_rng(0)
    x, fill, g = rng.standard_normal((3, 2)), np.array(0.5), rng.standard_normal((4, 3))
    build = lambda b, x, fill: b.pad(x, fill, pads=(-1, 1, 2, 0))  # noqa: E731
    found = run(build, [x, fill], g, (0, 1))
    np.testing.assert_allclose(found[0], np.concatenate([np.zeros((1, 2)), g[:2, 1:]]), rtol=1e-12)
    np.testing.assert_allclose(found[1], g[:2, 0].sum() + g[2:].sum(), rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
@pytest.mark.parametrize("pads", [(2, 1, 2, 1), (9, 0, 9, 0)])
def test_kernels_for_gpus(pads: tuple[int, ...], mode: str) -> None:
    """The second one folds so often that updates are scattered."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 4)).astype(np.float32)
    g = rng.standard_normal([n + b + e for n, b, e in zip(x.shape, pads[:2], pads[2:])]).astype(np.float32)
    (found,) = compiled(lambda b, x: b.pad(x, pads=pads, mode=mode), [x], g, target="cuda-interpreted")
    np.testing.assert_allclose(found, wanted(g, x.shape, pads, mode), rtol=1e-5, atol=1e-5)
