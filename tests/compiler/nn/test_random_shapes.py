"""Random geometries of convolutions and pools, and further functions, against PyTorch in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import dnnc
import dnnc.array as xp
import dnnc.nn.functional as F
from dnnc import nn
from dnnc.array.errors import TypeInputError, ValueInputError
from dnnc.ir.errors import InputError, ShapeError, UnsupportedError


def both(name: str, *args: Any, **named: Any) -> None:
    """Values and gradients of all arrays."""
    given = [torch.tensor(a, requires_grad=True) if isinstance(a, np.ndarray) else a for a in args]
    ours = [xp.asarray(a) if isinstance(a, np.ndarray) else a for a in args]
    for x in ours:
        if isinstance(x, xp.Array):
            x.requires_grad = True
    want, got = getattr(torch.nn.functional, name)(*given, **named), getattr(F, name)(*ours, **named)
    np.testing.assert_allclose(np.asarray(got), want.detach().numpy(), 1e-8, 1e-10)
    seed = np.random.default_rng(1).standard_normal(tuple(want.shape))
    want.backward(torch.tensor(seed))
    got.backward(seed)
    for x, t in zip(ours, given):
        if torch.is_tensor(t):
            np.testing.assert_allclose(np.asarray(x.grad), t.grad.numpy(), 1e-8, 1e-10)


@pytest.mark.family("random")
@pytest.mark.parametrize("seed", range(40))
def test_convolutions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rank, transposed = int(rng.integers(1, 4)), bool(rng.integers(0, 2))
    groups, n = int(rng.choice([1, 1, 2, 3])), int(rng.integers(1, 4))
    c, o = groups * int(rng.integers(1, 4)), groups * int(rng.integers(1, 4))
    kernel, stride, dilation = (tuple(map(int, rng.integers(1, high, rank))) for high in (4, 4, 3))
    padding = tuple(int(rng.integers(0, d * (k - 1) + 1)) for k, d in zip(kernel, dilation))
    sizes = [d * (k - 1) + 1 + int(rng.integers(0, 5)) for k, d in zip(kernel, dilation)]
    named: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    shape = (c, o // groups, *kernel) if transposed else (o, c // groups, *kernel)
    if transposed:
        named["output_padding"] = tuple(int(rng.integers(0, max(s, d))) for s, d in zip(stride, dilation))
        reach = zip(sizes, stride, padding, dilation, kernel)
        if any((m - 1) * s - 2 * p + d * (k - 1) + 1 < 1 for m, s, p, d, k in reach):
            named["padding"] = (0,) * rank
    x = rng.standard_normal((n, c, *sizes))
    x = x[0] if seed % 5 == 0 else x
    bias = rng.standard_normal(o) if seed % 3 else None
    both(f"conv{'_transpose' if transposed else ''}{rank}d", x, rng.standard_normal(shape), bias, **named)


@pytest.mark.family("random")
@pytest.mark.parametrize("seed", range(40))
def test_pools(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    rank, largest = int(rng.integers(1, 4)), bool(rng.integers(0, 2))
    kernel, stride = (tuple(map(int, rng.integers(1, 4, rank))) for _ in range(2))
    named: dict[str, Any] = {"stride": stride, "padding": tuple(int(rng.integers(0, k // 2 + 1)) for k in kernel)}
    dilation = tuple(map(int, rng.integers(1, 3, rank))) if largest else (1,) * rank
    if largest:
        named["dilation"] = dilation
    else:
        named["count_include_pad"] = bool(rng.integers(0, 2))
    named["ceil_mode"] = bool(rng.integers(0, 2))
    sizes = [d * (k - 1) + 1 + int(rng.integers(0, 6)) for k, d in zip(kernel, dilation)]
    x = rng.standard_normal((2, 3, *sizes))
    both(f"{'max' if largest else 'avg'}_pool{rank}d", x[0] if seed % 4 == 0 else x, kernel, **named)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [2, 3])
def test_unpooling_puts_maxima_where_they_came_from(rank: int) -> None:
    x = np.random.default_rng(rank).standard_normal((2, 3, 8, 6, 4)[: 2 + rank])
    for window, size in ((3, 2, 1), x.shape), ((2,), None):  # windows that overlap, and that do not
        made = []
        for library, a in (torch.nn, torch.tensor(x, requires_grad=True)), (nn, leaf(x)):
            pool = getattr(library, f"MaxPool{rank}d")(*window, return_indices=True)
            y = getattr(library, f"MaxUnpool{rank}d")(*window)(*pool(a), output_size=size)
            (y * y).sum().backward()
            made.append((np.asarray(y.detach() if library is torch.nn else y), np.asarray(a.grad)))
        np.testing.assert_array_equal(made[0][0], made[1][0])
        if window == (2,):
            np.testing.assert_array_equal(made[0][1], made[1][1])
    y = F.max_unpool1d(xp.ones((2, 1, 2)), xp.asarray([[[0, 4]], [[-1, 3]]]), 2)  # beyond a plane of four
    assert y.tolist() == [[[1, 0, 0, 0]], [[0, 0, 0, 1]]]
    with pytest.raises(InputError, match="output_size"):
        getattr(F, f"max_unpool{rank}d")(*pool(leaf(x)), 2, output_size=(99,) * rank)


def leaf(x: Any) -> xp.Array:
    a = xp.asarray(x)
    a.requires_grad = True
    return a


@pytest.mark.parametrize("rank, size", [(1, 4), (2, (5, None)), (3, (3, 2, 4))])
def test_places_of_adaptive_maxima(rank: int, size: Any) -> None:
    x = np.random.default_rng(rank).integers(0, 4, (2, 3, 7, 6, 5)[: 2 + rank]).astype(np.float64)  # with equal ones
    want = getattr(torch.nn.functional, f"adaptive_max_pool{rank}d")(torch.tensor(x), size, return_indices=True)
    got = getattr(F, f"adaptive_max_pool{rank}d")(xp.asarray(x), size, return_indices=True)
    for a, b in zip(got, want):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


@pytest.mark.slow
def test_places_of_maxima() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 7, 6))
    want = torch.nn.functional.max_pool2d(torch.tensor(x), 3, 2, 1, return_indices=True)
    got = F.max_pool2d(xp.asarray(x), 3, 2, 1, return_indices=True)
    for w, g in zip(want, got):
        assert np.array_equal(np.asarray(g), w.numpy())


@pytest.mark.slow
def test_pools_over_any_axes() -> None:
    x = np.random.default_rng(0).standard_normal((2, 6, 4, 5))
    got = np.asarray(F.max_pool(xp.asarray(x), (3, 2), axes=(1, 3)))
    assert np.array_equal(got, x[..., :4].reshape(2, 2, 3, 4, 2, 2).max((2, 5)))
    got = np.asarray(F.avg_pool(xp.asarray(x), (2, 3, 2, 2), 1, axes=(0, 1, 2, 3)))  # more axes than one op has
    window = np.lib.stride_tricks.sliding_window_view(x, (2, 3, 2, 2))
    np.testing.assert_allclose(got, window.mean((4, 5, 6, 7)), 1e-12)
    assert np.array_equal(np.asarray(F.maxout(xp.asarray(x), 2)), x.reshape(2, 3, 2, 4, 5).max(2))
    y = xp.asarray(x)
    y.requires_grad = True
    xp.sum(F.max_pool(y, 3, axes=1)).backward()
    assert float(xp.sum(y.grad)) == 2 * 2 * 4 * 5 and set(np.asarray(y.grad).ravel()) == {0.0, 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("flat", [False, True])
def test_ctc(flat: bool) -> None:
    rng = np.random.default_rng(0)
    logits, labels = rng.standard_normal((9, 3, 5)), rng.integers(1, 5, (3, 4))
    labels[1, 1] = labels[1, 0]
    lengths, counts = np.array([9, 7, 8]), np.array([4, 3, 0])
    given = np.concatenate([row[:k] for row, k in zip(labels, counts)]) if flat else labels
    for reduction in ("mean", "sum", "none"):
        a = torch.tensor(logits, requires_grad=True)
        more = [torch.tensor(v) for v in (given, lengths, counts)]
        want = torch.nn.functional.ctc_loss(torch.log_softmax(a, 2), *more, reduction=reduction)
        x = xp.asarray(logits)
        x.requires_grad = True
        got = F.ctc_loss(F.log_softmax(x, 2), given, lengths, counts, reduction=reduction)
        np.testing.assert_allclose(np.asarray(got), want.detach().numpy(), 1e-9)
        want.sum().backward()
        xp.sum(got).backward()
        np.testing.assert_allclose(np.asarray(x.grad), a.grad.numpy(), 1e-7, 1e-9)
    y = F.log_softmax(xp.asarray(logits[:, 0]), 1)
    assert np.asarray(F.ctc_loss(y, labels[0], 2, 4)) == np.inf
    assert float(F.ctc_loss(y, labels[0], 2, 4, zero_infinity=True)) == 0


@pytest.mark.slow
def test_accuracy_and_one_hot() -> None:
    scores = xp.asarray([[0.1, 0.9, 0.0], [0.8, 0.1, 0.1], [0.2, 0.3, 0.5]])
    target = np.array([1, 2, 0])
    assert float(F.accuracy(scores, target)) == pytest.approx(1 / 3)
    assert float(F.accuracy(scores, target, topk=2)) == pytest.approx(1 / 3)
    assert float(F.accuracy(scores, target, topk=3, ignore_index=0)) == 1
    assert F.one_hot(target, 4).tolist() == np.eye(4, dtype=int)[target].tolist() == F.one_hot(target, 4).tolist()
    assert F.one_hot(target).shape == (3, 3)


@pytest.mark.slow
def test_traced_for_all_sizes() -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((4, 3, 3, 3))

    def net(x: Any, t: Any) -> Any:
        h = F.max_pool2d(F.relu(F.conv2d(x, w, padding=1)), 2)
        h = F.group_norm(F.batch_norm(h, None, None, training=True), 2)
        return F.cross_entropy(xp.mean(h, axis=(2, 3)), t)

    f = dnnc.jit(net, dynamic={"x": {0: "N"}, "t": {0: "N"}})
    for n in (2, 5):
        x, t = rng.standard_normal((n, 3, 8, 8)), rng.integers(0, 4, n)
        np.testing.assert_allclose(float(f(x, t)), float(net(xp.asarray(x), t)), 1e-9)
    assert f.traces == 1


def test_wrong_arguments() -> None:
    x, w = xp.ones((2, 3, 8, 8)), xp.ones((4, 3, 3, 3))
    with pytest.raises(TypeInputError, match="conv2d: expected arrays of one dtype, got input float64, weight float32"):
        F.conv2d(x, w.astype("float32"))
    with pytest.raises(TypeInputError, match="relu: input must hold float numbers, got int64"):
        F.relu(xp.asarray([1, 2]))
    with pytest.raises(TypeInputError, match="linear: weight must be an array, got a str"):
        F.linear(x, "w")
    with pytest.raises(ValueInputError, match=r"conv2d: input must have 3 or 4 axes, got shape \(2, 3\)"):
        F.conv2d(xp.ones((2, 3)), w)
    with pytest.raises(ValueInputError, match=r"stride=\(1, 2, 3\): expected an integer of at least 1, or 2 of them"):
        F.conv2d(x, w, stride=(1, 2, 3))
    with pytest.raises(ValueInputError, match="padding='same' needs stride 1"):
        F.conv2d(x, w, stride=2, padding="same")
    with pytest.raises(ShapeError, match=r"8 channels|3 channels"):
        F.conv2d(xp.ones((2, 8, 8, 8)), w)
    with pytest.raises(ValueInputError, match=r"class indices of input \(2, 3\) must have shape \(2,\), got \(3,\)"):
        F.cross_entropy(xp.ones((2, 3)), xp.asarray([0, 1, 2]))
    with pytest.raises(ValueInputError, match="reduction='average': expected 'mean', 'sum', 'none'"):
        F.mse_loss(x, x, reduction="average")
    with pytest.raises(ValueInputError, match=r"padding .* is more than half of the window"):
        F.max_pool2d(x, 2, padding=2)
    with pytest.raises(ValueInputError, match="training needs more than one value for each channel"):
        F.batch_norm(xp.ones((1, 3)), None, None, training=True)
    with pytest.raises(ValueInputError, match="give either attn_mask or is_causal"):
        F.scaled_dot_product_attention(x, x, x, xp.ones((8, 8)), is_causal=True)
    with pytest.raises(UnsupportedError, match="max_norm"):
        F.embedding(xp.asarray([1]), xp.ones((2, 2)), max_norm=1.0)
    with pytest.raises(TypeError, match=r"missing 1 required positional argument"):
        F.softmax(x)
