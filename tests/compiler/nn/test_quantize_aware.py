"""Fake quantization: its values, its straight-through gradient, modules that train with it, and what is exported."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import dnnc
import dnnc.array as xp
import dnnc.nn.functional as F
from dnnc import nn, optim
from dnnc.ir.errors import InputError

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(0)


def test_values_and_gradients() -> None:
    a = np.array([[-9.0, -1.0, -0.26], [0.24, 1.26, 70.0]], np.float32)
    x = xp.asarray(a)
    x.requires_grad = True
    y = F.fake_quantize(
        x, xp.asarray(np.array([0.5, 0.25], np.float32)), xp.asarray(np.array([4, 0], np.uint8)), "uint8", 0
    )
    assert y.numpy().tolist() == [[-2.0, -1.0, -0.5], [0.25, 1.25, 63.75]]
    xp.sum(y * 3).backward()
    assert x.grad.numpy().tolist() == [[0.0, 3.0, 3.0], [3.0, 3.0, 0.0]]

    gradient = dnnc.jit(dnnc.grad(lambda v: xp.sum(F.fake_quantize(v, xp.asarray(np.float32(0.5))))))(xp.asarray(a))
    assert gradient.numpy().tolist() == [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]


def test_wrong_arguments() -> None:
    x, s = xp.asarray(np.ones((2, 3), np.float32)), xp.asarray(np.ones(3, np.float32))
    with pytest.raises(InputError, match=r"scale must have shape \(2,\), got \(3,\)"):
        F.fake_quantize(x, s, axis=0)
    with pytest.raises(InputError, match=r"scale must have shape \(\)"):
        F.fake_quantize(x, s)
    with pytest.raises(InputError, match="zero_point must have the scale's shape"):
        F.fake_quantize(x, s, xp.asarray(np.int8(0)), axis=1)
    with pytest.raises(InputError, match="dtype='int4'"):
        F.fake_quantize(x, s, dtype="int4")
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    with pytest.raises(InputError, match="no layer fits 'conv'; layers are 0"):
        nn.quantize_aware(net, keep="conv")
    with pytest.raises(InputError, match="no convolution and no linear layer that is float"):
        nn.quantize_aware(nn.quantize_aware(net))
    twice = nn.ModuleList([nn.Linear(3, 3)])
    twice.add_module("again", twice[0])  # one layer in two places
    assert nn.quantize_aware(twice).again is twice[0] and isinstance(twice[0], nn.QuantAware)
    with pytest.raises(InputError, match="expected a Conv1d"):
        nn.QuantAware(nn.ReLU())


def test_a_module_trains_and_is_exported_in_integers(tmp_path: Path) -> None:
    dnnc.random.seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3)
    )
    weight = net[0].weight
    nn.quantize_aware(net, keep="5")
    assert isinstance(net[0], nn.QuantAware) and net[0].layer.weight is weight and isinstance(net[5], nn.Linear)
    x = RNG.standard_normal((32, 2, 4, 4)).astype(np.float32)
    target = (x.sum((1, 2, 3)) > 0).astype(np.int64)
    step = dnnc.train_step(lambda m, a, t: F.cross_entropy(m(a), t), optim.Adam(lr=0.02), net)
    losses = [float(step(x, target)) for _ in range(40)]
    assert losses[-1] < 0.3 * losses[0]
    net.eval().to("cpu")
    range_ = net[0].activation
    assert float(range_.low) == pytest.approx(x.min(), rel=1e-5) and int(range_.num_batches_tracked) == 40
    assert float(range_.scale) == pytest.approx((x.max() - x.min()) / 255, rel=1e-5)

    path = tmp_path / "q.onnx"
    model = dnnc.to_onnx(net, path, inputs=[dnnc.Spec(("N", 2, 4, 4))], opset=21)
    counts = Counter(n.op_type for n in model.graph.node)
    assert counts["QuantizeLinear"] == 2 and counts["DequantizeLinear"] == 4
    kinds = {t.name: t.data_type for t in model.graph.initializer}
    assert (
        kinds["0.layer.weight_q"] == kinds["3.layer.weight_q"] == onnx.TensorProto.INT8
        and "0.layer.weight" not in kinds
    )
    f = dnnc.compile(path)
    (want,) = ReferenceEvaluator(onnx.load(path)).run(None, {model.graph.input[0].name: x})
    assert (np.abs(f(x) - want) <= np.ptp(want) / 255).all()
    assert np.abs(f(x) - net(xp.asarray(x)).numpy()).max() <= 3 * np.ptp(want) / 255
