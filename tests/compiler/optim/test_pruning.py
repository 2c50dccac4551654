"""Pruning while training: masks that updates keep, in a compiled step and in define-by-run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dnnc
import dnnc.array as xp
from dnnc import nn, optim
from dnnc.ir.errors import InputError

RNG = np.random.default_rng(0)
X = RNG.standard_normal((16, 12)).astype(np.float32)
Y = RNG.standard_normal((16, 4)).astype(np.float32)


def loss_of(params: Any, x: Any, y: Any) -> Any:
    h = xp.tanh(x @ params["a"] + params["b"])
    return ((h @ params["c"] - y) ** 2).mean()


def params() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    shapes = {"a": (12, 8), "b": (8,), "c": (8, 4)}
    return {n: (0.3 * rng.standard_normal(s)).astype(np.float32) for n, s in shapes.items()}


def zeros(p: Any) -> dict[str, float]:
    return {n: float((np.asarray(a) == 0).mean()) for n, a in p.items()}


def test_the_cubic_schedule() -> None:
    hook = optim.GradualPruning(optim.SGD(lr=0.1), 0.8, begin=10, end=20, initial=0.2)
    assert [hook.at(t) for t in (0, 9, 10, 20, 50)] == pytest.approx([0, 0, 0.2, 0.8, 0.8])
    assert hook.at(15) == pytest.approx(0.8 - 0.6 / 8) and hook.every == 1
    assert optim.GradualPruning(optim.SGD(), 0.5, end=1000).every == 50


@pytest.mark.parametrize("make", [
    lambda: optim.Adam(lr=1e-2), lambda: optim.SGD(lr=0.05, momentum=0.9, weight_decay=1e-3),
])  # fmt: skip
@pytest.mark.slow
def test_a_compiled_step_keeps_its_masks(make: Any, tmp_path: Any) -> None:
    optimizer = make()
    hook = optim.GradualPruning(optimizer, 0.75, begin=1, end=7, every=2, keep="c")
    step = dnnc.train_step(loss_of, optimizer, params())
    losses, seen = [], []
    for _ in range(12):
        losses.append(float(step(X, Y)))
        seen.append(zeros(step.params)["a"])
    assert seen[-1] == 0.75 and hook.sparsity == 0.75 and seen == sorted(seen) and zeros(step.params)["c"] == 0
    assert losses[-1] < losses[0] and step.traces == 1
    step.save(tmp_path / "s.npz")
    again = make()
    optim.GradualPruning(again, 0.75, begin=1, end=7, every=2, keep="c")
    other = dnnc.train_step(loss_of, again, params())
    other.load(tmp_path / "s.npz")
    assert [float(step(X, Y)) for _ in range(3)] == [float(other(X, Y)) for _ in range(3)]
    assert zeros(other.params)["a"] == 0.75


@pytest.mark.slow
def test_define_by_run_and_the_compiled_step_are_alike() -> None:
    p = {n: xp.asarray(a) for n, a in params().items()}
    for a in p.values():
        a.requires_grad = True
    optimizer = optim.Adam(p, lr=1e-2)
    optim.GradualPruning(optimizer, 0.5, end=4, every=1, scope="lamp")
    compiled = optim.Adam(lr=1e-2)
    optim.GradualPruning(compiled, 0.5, end=4, every=1, scope="lamp")
    step = dnnc.train_step(loss_of, compiled, params())
    for _ in range(8):
        optimizer.zero_grad()
        loss = loss_of(p, xp.asarray(X), xp.asarray(Y))
        loss.backward()
        optimizer.step()
        step(X, Y)
    want = step.params
    for n, a in p.items():
        assert np.allclose(a.numpy(), np.asarray(want[n]), atol=1e-5)
    total = sum(a.size for n, a in p.items() if n != "b")
    assert sum((p[n].numpy() == 0).sum() for n in ("a", "c")) == total // 2


@pytest.mark.slow
def test_zeros_stay_when_a_pruned_model_is_trained_on() -> None:
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3))
    model = dnnc.to_onnx(net.eval(), inputs=[dnnc.Spec((2, 4, 6, 6))])
    pruned = dnnc.prune(model, method="2:4", measure=False)
    module = nn.from_onnx(pruned.model)
    optimizer = optim.SGD(lr=0.05)
    optim.KeepZeros(optimizer)
    step = dnnc.train_step(lambda m, x: (m(x) ** 2).mean(), optimizer, module)
    before = {n: a.numpy() == 0 for n, a in module.named_parameters()}
    x = RNG.standard_normal((2, 4, 6, 6)).astype(np.float32)
    losses = [float(step(x)) for _ in range(4)]
    assert losses[-1] < losses[0]
    after = {n: a.numpy() == 0 for n, a in module.named_parameters()}
    assert all((after[n] == z).all() for n, z in before.items() if z.ndim > 1)
    assert sum(z.mean() == 0.5 for z in after.values()) == 2


@pytest.mark.slow
def test_half_precision_keeps_its_masks() -> None:
    optimizer = optim.Adam(lr=1e-2)
    optim.GradualPruning(optimizer, 0.5, end=3, every=1)
    half = {n: a.astype(np.float16) for n, a in params().items()}
    step = dnnc.train_step(loss_of, optimizer, half)
    for _ in range(6):
        step(X.astype(np.float16), Y.astype(np.float16))
    assert zeros(step.params)["a"] == 0.5


def test_mistakes() -> None:
    optimizer = optim.SGD(lr=0.1)
    for options, message in (
        (dict(end=0), "end"), (dict(end=5, initial=0.95), "at least initial"), (dict(end=5, every=0), "every"),
        (dict(end=5, method="random"), "expected \"magnitude\""), (dict(end=5, sparsity=1.5), "sparsity"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            optim.GradualPruning(optimizer, **options)
    optim.GradualPruning(optimizer, 0.5, end=10)
    with pytest.raises(InputError, match="pruned already"):
        optim.KeepZeros(optimizer)
    with pytest.raises(InputError, match="expected an optimizer"):
        optim.KeepZeros("adam")  # type: ignore[arg-type]
    begun = optim.SGD(lr=0.1)
    dnnc.train_step(loss_of, begun, params())
    with pytest.raises(InputError, match="has made steps"):
        optim.GradualPruning(begun, 0.5, end=10)


@pytest.mark.slow
def test_a_pattern_that_fits_nothing() -> None:
    optimizer = optim.SGD(lr=0.1)
    optim.GradualPruning(optimizer, 0.5, end=2, keep="zz*")
    step = dnnc.train_step(loss_of, optimizer, params())
    with pytest.raises(InputError, match="no parameter with two axes fits 'zz\\*'"):
        for _ in range(3):
            step(X, Y)


@pytest.mark.slow
def test_values_of_a_codebook_are_trained() -> None:
    net = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 4))
    model = dnnc.to_onnx(net.eval(), inputs=[dnnc.Spec((16, 12))])
    pruned = dnnc.prune(model, sparsity=0.5, bits=3, measure=False)
    module = nn.from_onnx(pruned.model)
    optimizer = optim.Adam(lr=1e-2)
    optim.KeepZeros(optimizer, shared=True)
    before = {n: a.numpy() for n, a in module.named_parameters() if a.ndim > 1}
    step = dnnc.train_step(lambda m, x, y: ((m(x) - y) ** 2).mean(), optimizer, module)
    losses = [float(step(X, Y)) for _ in range(30)]
    assert losses[-1] < 0.95 * losses[0]
    for n, a in module.named_parameters():
        if n in before:
            assert np.unique(a.numpy()).size <= 8 and ((a.numpy() == 0) == (before[n] == 0)).all()
            assert (a.numpy() != before[n]).any()


def test_gradients_of_equal_weights_are_summed() -> None:
    from dnnc.optim.clusters import of_clusters

    codes = np.array([[0, 3, 0], [255, 3, 3]], np.uint8)
    g = RNG.standard_normal((2, 3)).astype(np.float32)
    got = of_clusters(xp.asarray(g), xp.asarray(codes)).numpy()
    for c in (0, 3, 255):
        assert np.allclose(got[codes == c], g[codes == c].sum(), atol=1e-6)
