"""Gradients of convolutions and pooling: against PyTorch, at ties, with symbolic sizes, and by the kernels meant."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import dnnc
from dnnc.ir.autodiff.reverse import pullback
from dnnc.ir.dtype import f64
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.types import TensorType

# images, filters, strides, pads (begins, ends), dilations, group
CASES = [
    ((2, 16, 9, 8), (24, 16, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    ((2, 16, 9, 8), (16, 16, 3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 1),
    ((1, 16, 11, 10), (8, 16, 1, 1), (2, 3), (0, 0, 0, 0), (1, 1), 1),
    ((2, 3, 17, 16), (16, 3, 7, 7), (2, 2), (3, 2, 3, 4), (1, 1), 1),
    ((2, 12, 10, 13), (20, 12, 3, 2), (3, 2), (0, 2, 1, 0), (2, 3), 1),
    ((2, 16, 9, 9), (16, 1, 3, 3), (2, 1), (1, 1, 1, 1), (1, 1), 16),
    ((1, 12, 7, 8), (8, 3, 3, 3), (1, 2), (1, 0, 1, 1), (1, 1), 4),
    ((1, 16, 8, 8), (32, 8, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 2),
    ((3, 8, 19), (16, 8, 5), (2,), (2, 1), (1,), 1),
    ((1, 8, 5, 6, 7), (8, 8, 3, 2, 3), (1, 2, 2), (1, 0, 1, 1, 1, 0), (1, 1, 1), 1),
]


def gradients(build: Any, *shapes: tuple[int, ...]) -> Graph:
    """The graph of the cotangents of all operands of an op; the result's is the last input."""
    g = Graph("g")
    operands = [g.add_input(f"x{k}", TensorType(f64, s)) for k, s in enumerate(shapes)]
    y = build(Builder(g), *operands)
    seed = g.add_input("seed", y.type)
    g.outputs = [c for c in pullback(g, {y: seed}, operands) if c is not None]
    return g


def padded(x: torch.Tensor, pads: tuple[int, ...]) -> torch.Tensor:
    rank = len(pads) // 2
    return F.pad(x, [p for k in reversed(range(rank)) for p in (pads[k], pads[rank + k])])


@pytest.mark.parametrize(("x", "w", "strides", "pads", "dilations", "group"), CASES)
def test_convolution_as_pytorch(
    x: tuple[int, ...],
    w: tuple[int, ...],
    strides: tuple[int, ...],
    pads: tuple[int, ...],
    dilations: tuple[int, ...],
    group: int,
) -> None:
    sides: dict[str, Any] = {"strides": strides, "pads": pads, "dilations": dilations, "group": group}
    g = gradients(lambda b, *v: b.conv(*v, **sides), x, w, (w[0],))
    arrays = [np.random.default_rng(0).standard_normal(v.type.shape) for v in g.inputs]
    a, b, c = (torch.tensor(v, requires_grad=True) for v in arrays[:3])
    conv = (F.conv1d, F.conv2d, F.conv3d)[len(strides) - 1]
    y = conv(padded(a, pads), b, c, strides, 0, dilations, group)
    want = torch.autograd.grad(y, (a, b, c), torch.tensor(arrays[3]))
    for got, expected in zip(run(g, arrays, "float64"), want):
        np.testing.assert_allclose(got, expected.numpy(), rtol=0, atol=1e-12 * float(expected.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize(("x", "w", "strides", "pads", "dilations", "group"), CASES)
def test_compiled_convolution(
    x: tuple[int, ...],
    w: tuple[int, ...],
    strides: tuple[int, ...],
    pads: tuple[int, ...],
    dilations: tuple[int, ...],
    group: int,
) -> None:
    sides: dict[str, Any] = {"strides": strides, "pads": pads, "dilations": dilations, "group": group}
    g = gradients(lambda b, *v: b.conv(*v, **sides), x, w)
    narrow = parse(str(g).replace("f64[", "f32["))
    arrays = [np.random.default_rng(1).standard_normal(v.type.shape).astype(np.float32) for v in narrow.inputs]
    want = run(narrow.copy(), arrays, "float64")
    for got, expected in zip(dnnc.compile(narrow, threads=2, cache=False)(*arrays), want):
        assert float(np.abs(np.asarray(got) - expected).max()) < 2e-6 * float(np.abs(expected).max())


@pytest.mark.slow
def test_filters_are_summed_in_tiles() -> None:
    """Stretches of pixels, the sums of all taps in memory in between; the layout is that of the filters."""
    text = """\
def g(x: f32[2, 16, 28, 28], g: f32[2, 24, 28, 28]):
    y = conv_backward_filter(x, g, kernel=(3, 3), pads=(1, 1, 1, 1))
    return y
"""
    f = dnnc.compile(parse(text), target="llvm", cache=False)
    assert "backward_filter(" in str(f.report)
    x, g = (np.random.default_rng(2).standard_normal((2, n, 28, 28)).astype(np.float32) for n in (16, 24))
    want = run(parse(text), [x, g], "float64")[0]
    assert float(np.abs(np.asarray(f(x, g)) - want).max()) < 2e-6 * float(np.abs(want).max())


@pytest.mark.slow
@pytest.mark.parametrize("size, kernel", [(1, 1), (2, 2)])
def test_filters_of_one_panel_over_one_pixel(size: int, kernel: int) -> None:
    """One block of channels on either side: there is nothing to share among threads."""
    text = f"""\
def g(x: f32[8, 16, {size}, {size}], g: f32[8, 16, 1, 1]):
    y = conv_backward_filter(x, g, kernel=({kernel}, {kernel}))
    return y
"""
    f = dnnc.compile(parse(text), target="llvm", threads=2, cache=False)
    x, g = (np.random.default_rng(2).standard_normal((8, 16, n, n)).astype(np.float32) for n in (size, 1))
    want = run(parse(text), [x, g], "float64")[0]
    assert float(np.abs(np.asarray(f(x, g)) - want).max()) < 2e-6 * float(np.abs(want).max())


@pytest.mark.slow
def test_gradient_of_symbolic_batch() -> None:
    text = """\
def g(x: f32[N, 8, 9, 9], w: f32[16, 8, 3, 3], s: f32[N, 16, 5, 5]):
    y = conv(x, w, strides=(2, 2), pads=(1, 1, 1, 1))
    return y
"""
    g = parse(text)
    x, w, s = g.inputs
    g.outputs = [c for c in pullback(g, {g.outputs[0]: s}, [x, w]) if c is not None]
    f = dnnc.compile(g.copy(), cache=False)
    for n in (1, 3):
        rng, shapes = np.random.default_rng(n), ((n, 8, 9, 9), (16, 8, 3, 3), (n, 16, 5, 5))
        arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
        want = run(g.copy(), arrays, "float64")
        for got, expected in zip(f(*arrays), want):
            assert float(np.abs(np.asarray(got) - expected).max()) < 2e-6 * float(np.abs(expected).max())


def test_pooling_takes_the_first_of_equal_maxima() -> None:
    """As PyTorch; numbers are rounded, so that many windows have several."""
    sides: dict[str, Any] = {"kernel": (3, 2), "strides": (2, 2), "pads": (1, 1, 1, 1)}
    g = gradients(lambda b, x: b.max_pool(x, **sides), (2, 3, 9, 8))
    rng = np.random.default_rng(3)
    x = np.round(rng.standard_normal((2, 3, 9, 8)))
    seed = rng.standard_normal(g.inputs[1].type.shape)
    given = torch.tensor(x, requires_grad=True)
    F.max_pool2d(given, (3, 2), 2, 1).backward(torch.tensor(seed))
    (got,) = run(g, [x, seed], "float64")
    assert given.grad is not None
    np.testing.assert_allclose(got, given.grad.numpy(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("include", [False, True])
def test_average_pooling(include: bool) -> None:
    sides: dict[str, Any] = {"kernel": (3, 2), "strides": (2, 1), "pads": (1, 1, 1, 1), "count_include_pad": include}
    g = gradients(lambda b, x: b.avg_pool(x, **sides), (2, 3, 8, 7))
    arrays = [np.random.default_rng(4).standard_normal(v.type.shape) for v in g.inputs]
    given = torch.tensor(arrays[0], requires_grad=True)
    F.avg_pool2d(given, (3, 2), (2, 1), 1, count_include_pad=include).backward(torch.tensor(arrays[1]))
    (got,) = run(g, arrays, "float64")
    assert given.grad is not None
    np.testing.assert_allclose(got, given.grad.numpy(), rtol=0, atol=1e-14)


def test_batch_norm_in_training_mode() -> None:
    g = gradients(lambda b, *v: b.batch_norm_training(*v, epsilon=1e-3)[0], (4, 3, 5, 2), (3,), (3,))
    arrays = [np.random.default_rng(5).standard_normal(v.type.shape) for v in g.inputs]
    x, scale, bias = (torch.tensor(v, requires_grad=True) for v in arrays[:3])
    y = F.batch_norm(x, None, None, scale, bias, training=True, eps=1e-3)
    want = torch.autograd.grad(y, (x, scale, bias), torch.tensor(arrays[3]))
    for got, expected in zip(run(g, arrays, "float64"), want):
        np.testing.assert_allclose(got, expected.numpy(), rtol=0, atol=1e-12)
