"""ONNX models as modules: names, gradients and training against PyTorch, modes, cuts, errors, and export."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import dnnc
import dnnc.array as xp
import dnnc.nn.functional as F
from dnnc import nn, optim

RNG = np.random.default_rng(0)


def model(
    nodes: list[Any],
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    weights: dict[str, np.ndarray],
    opset: int = 17,
    ints: tuple[str, ...] = (),
) -> onnx.ModelProto:
    def info(name: str, shape: Any) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.INT64 if name in ints else TensorProto.FLOAT, shape)

    graph = helper.make_graph(
        nodes,
        "g",
        [info(n, s) for n, s in inputs.items()],
        [info(n, s) for n, s in outputs.items()],
        [numpy_helper.from_array(a, n) for n, a in weights.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(made)
    return made


def normal(*shape: int) -> np.ndarray:
    return (0.4 * RNG.standard_normal(shape)).astype(np.float32)


node = helper.make_node


def network(opset: int = 17, ratio: float = 0.0) -> tuple[onnx.ModelProto, torch.nn.Module]:
    """Convolution, batch normalization, dropout, linear layer; and the same in PyTorch, with the same names."""
    theirs = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3, padding=1), torch.nn.BatchNorm2d(4, momentum=0.2), torch.nn.ReLU(),
        torch.nn.Dropout(ratio), torch.nn.Flatten(), torch.nn.Linear(4 * 5 * 5, 3),
    )  # fmt: skip
    with torch.no_grad():
        for k, v in theirs.state_dict().items():
            if v.is_floating_point():
                v.copy_(torch.tensor(normal(*v.shape) + (1.5 if k == "1.running_var" else 0)))
    weights = {k: v.numpy().copy() for k, v in theirs.state_dict().items() if v.is_floating_point()}
    attrs = {"ratio": ratio} if opset < 12 else {}
    if opset >= 12:
        weights["ratio"] = np.array(ratio, np.float32)
    nodes = [
        node("Conv", ["x", "0.weight", "0.bias"], ["c"], "conv", pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["c", *(f"1.{n}" for n in ("weight", "bias", "running_mean", "running_var"))],
             ["b"], "bn", momentum=0.8),
        node("Relu", ["b"], ["r"]),
        node("Dropout", ["r"] if opset < 12 else ["r", "ratio"], ["d"], "drop", **attrs),
        node("Flatten", ["d"], ["f"]),
        node("Gemm", ["f", "5.weight", "5.bias"], ["y"], "fc", transB=1),
    ]  # fmt: skip
    return model(nodes, {"x": ["N", 2, 5, 5]}, {"y": ["N", 3]}, weights, opset), theirs


@pytest.mark.slow
def test_names_are_those_of_the_weights() -> None:
    net = nn.from_onnx(network()[0])
    assert [n for n, _ in net.named_parameters()] == [f"{k}.{n}" for k in (0, 1, 5) for n in ("weight", "bias")]
    assert [n for n, _ in net.named_buffers()] == ["1.running_mean", "1.running_var"]
    odd = {"a/w:0": normal(2, 3), "a.w_0": normal(3, 3), "forward": normal(3, 3), "a": normal(3, 3), "é": normal(3, 3)}
    nodes = [node("MatMul", ["x", "a/w:0"], ["h0"])]
    nodes += [node("MatMul", [f"h{k}", n], [f"h{k + 1}"]) for k, n in enumerate([*odd][1:])]
    net = nn.from_onnx(model(nodes, {"x": [1, 2]}, {"h4": [1, 3]}, odd, 13))
    assert net.weight_names == {"a.w_0": "a/w:0", "a.w_0_2": "a.w_0", "forward_": "forward", "a_2": "a", "é": "é"}
    assert {n: p.shape for n, p in net.named_parameters()} == {p: odd[n].shape for p, n in net.weight_names.items()}
    want = np.ones((1, 2), np.float32)
    x = want
    for a in odd.values():
        want = want @ a
    assert np.allclose(net(x).numpy(), want, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("style", ["backward", "train_step"])
def test_training_is_pytorchs(style: str) -> None:
    proto, theirs = network()
    net = nn.from_onnx(proto)
    xs, ys = normal(4, 6, 2, 5, 5), RNG.integers(0, 3, (4, 6))
    opt = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    ours: Any = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if style == "train_step":
        step = dnnc.train_step(lambda m, x, y: F.cross_entropy(m(x), y), optim.SGD(lr=0.1, momentum=0.9), net)
    for x, y in zip(xs, ys):
        opt.zero_grad()
        want = torch.nn.functional.cross_entropy(theirs(torch.tensor(x)), torch.tensor(y))
        want.backward()
        opt.step()
        if style == "train_step":
            loss = step(x, y)
        else:
            ours.zero_grad()
            loss = F.cross_entropy(net(xp.asarray(x)), xp.asarray(y))
            loss.backward()
            ours.step()
        assert abs(float(loss) - want.item()) < 1e-5
    for name, a in {**dict(net.named_parameters()), **dict(net.named_buffers())}.items():
        assert np.allclose(a.numpy(), theirs.state_dict()[name].numpy(), atol=2e-5), name
    x = normal(3, 2, 5, 5)
    assert np.allclose(net.eval()(x).numpy(), theirs.eval()(torch.tensor(x)).detach().numpy(), atol=1e-4)
    written = dnnc.to_onnx(net, opset=20)
    assert {t.name for t in written.graph.initializer} >= set(theirs.state_dict()) - {"1.num_batches_tracked"}
    (got,) = onnxruntime.InferenceSession(written.SerializeToString()).run(["y"], {"x": x})
    assert np.allclose(got, net(x).numpy(), atol=1e-4)
    again = nn.from_onnx(written)
    assert again.load_state_dict(net.state_dict(), strict=False).missing_keys == []


@pytest.mark.slow
def test_statistics_of_a_part_in_inference_mode() -> None:
    proto, theirs = network()
    net = nn.from_onnx(proto)
    before = net.state_dict()
    net.get_submodule("1").eval()
    x = normal(3, 2, 5, 5)
    assert np.allclose(net(x).numpy(), theirs.eval()(torch.tensor(x)).detach().numpy(), atol=1e-5)
    assert (net.get_buffer("1.running_mean") == before["1.running_mean"]).all()
    net.train()
    params, buffers = dict(net.named_parameters()), dict(net.named_buffers())
    _, new = nn.functional_call(net, (params, buffers), x, return_buffers=True)
    theirs.train()(torch.tensor(x))
    assert np.allclose(new["1.running_var"].numpy(), theirs[1].running_var.numpy(), atol=1e-5)
    assert (net.get_buffer("1.running_mean") == before["1.running_mean"]).all()
    with pytest.raises(dnnc.InputError, match="functional_call"):
        dnnc.trace(lambda x: net(x), dnnc.Spec(x.shape))


@pytest.mark.parametrize("opset", [7, 17])
def test_dropout(opset: int) -> None:
    nodes = [node("Dropout", ["x"] if opset < 12 else ["x", "r"], ["y"], **({"ratio": 0.25} if opset < 12 else {}))]
    weights = {} if opset < 12 else {"r": np.array(0.25, np.float32)}
    net = nn.from_onnx(model(nodes, {"x": ["N"]}, {"y": ["N"]}, weights, opset))
    x = np.ones(4000, np.float32)
    dnnc.random.seed(1)
    a, b = net(x).numpy(), net(x).numpy()
    assert set(np.unique(a)) == {0, np.float32(1 / 0.75)} and abs((a == 0).mean() - 0.25) < 0.04 and (a != b).any()
    dnnc.random.seed(1)
    assert (net(x).numpy() == a).all()
    key = dnnc.random.key(3)
    made = [nn.functional_call(net, {}, x, rngs=key).numpy() for _ in range(2)]
    assert (made[0] == made[1]).all() and (made[0] != a).any()
    assert (net.eval()(x).numpy() == 1).all()


@pytest.mark.slow
def test_recurrence() -> None:
    theirs = torch.nn.LSTM(3, 4)
    s = {k: v.detach().numpy() for k, v in theirs.state_dict().items()}
    order = np.r_[0:4, 12:16, 4:8, 8:12]  # PyTorch's gates i f g o, ONNX's i o f c
    order = np.r_[order[:8], order[8:]]
    gates = [s[n][order][None] for n in ("weight_ih_l0", "weight_hh_l0")]
    bias = np.concatenate([s["bias_ih_l0"][order], s["bias_hh_l0"][order]])[None]
    nodes = [node("LSTM", ["x", "w", "r", "b"], ["y"], hidden_size=4)]
    net = nn.from_onnx(model(nodes, {"x": ["T", "N", 3]}, {"y": ["T", 1, "N", 4]}, dict(zip("wrb", [*gates, bias]))))
    x = normal(5, 2, 3)
    want, _ = theirs(torch.tensor(x))
    (want**2).sum().backward()
    y = net(x)
    (y**2).sum().backward()
    assert np.allclose(y.numpy()[:, 0], want.detach().numpy(), atol=1e-5)
    assert np.allclose(net.w.grad.numpy()[0], theirs.weight_ih_l0.grad.numpy()[order], atol=1e-5)
    assert np.allclose(net.b.grad.numpy()[0, :16], theirs.bias_ih_l0.grad.numpy()[order], atol=1e-5)


def test_weights_that_are_no_parameters() -> None:
    nodes = [
        node("Resize", ["x", "", "scales"], ["r"], mode="nearest"),
        node("Mul", ["r", "w"], ["m"]),
        node("Add", ["m", "one"], ["a"]),
        node("Greater", ["a", "limit"], ["g"]),
        node("Cast", ["g"], ["c"], to=TensorProto.FLOAT),
        node("Mul", ["a", "c"], ["y"]),
    ]
    weights = {
        "scales": np.array([1, 1, 2], np.float32), "w": normal(8), "limit": normal(8), "one": np.ones((), np.float32),
    }  # fmt: skip
    proto = model(nodes, {"x": [1, 1, 4]}, {"y": [1, 1, 8]}, weights)
    net = nn.from_onnx(proto)
    assert [n for n, _ in net.named_parameters()] == ["w"] and set(net.not_trainable) == {"scales", "limit"}
    assert "greater" in net.not_trainable["limit"] and "contents" in net.not_trainable["scales"]
    assert [n for n, _ in nn.from_onnx(proto, trainable="[wo]*").named_parameters()] == ["w", "one"]
    with pytest.raises(dnnc.GradientError, match=r"limit: greater at .* has no derivative"):
        nn.from_onnx(proto, trainable=["w", "limit"])
    with pytest.raises(dnnc.InputError, match="no parameter fits 'v'; there are scales, w"):
        nn.from_onnx(proto, trainable="v")


def test_frozen_by_names() -> None:
    net = nn.from_onnx(network()[0])
    net.requires_grad_(False).requires_grad_(True, names=["5.*", "*.bias"])
    assert [n for n, p in net.named_parameters() if p.requires_grad] == ["0.bias", "1.bias", "5.weight", "5.bias"]
    with pytest.raises(dnnc.InputError, match=r"requires_grad_: no parameter fits 'fc\*'; there are 0.weight"):
        net.requires_grad_(False, names="fc*")


@pytest.mark.slow
def test_cut_and_export_with_another_layer() -> None:
    proto, _ = network()
    net = nn.Sequential(nn.from_onnx(proto, outputs="f"), nn.Linear(100, 7)).eval()
    assert [n for n, _ in net.named_parameters()][-2:] == ["1.weight", "1.bias"]
    written = dnnc.to_onnx(net, inputs=[dnnc.Spec(("batch", 2, 5, 5))], opset=20)
    assert written.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    x = normal(4, 2, 5, 5)
    (got,) = onnxruntime.InferenceSession(written.SerializeToString()).run(None, {written.graph.input[0].name: x})
    assert np.allclose(got, net(x).numpy(), atol=1e-5)
    both = nn.from_onnx(proto, outputs=["r", "y"]).eval()(x)
    assert [a.shape for a in both] == [(4, 4, 5, 5), (4, 3)]
    with pytest.raises(dnnc.InputError, match="no node of the model makes 'conv'"):
        nn.from_onnx(proto, outputs="conv")
    fixed = dnnc.to_onnx(nn.from_onnx(proto), inputs=[dnnc.Spec((3, 2, 5, 5))])
    assert [d.dim_value for d in fixed.graph.input[0].type.tensor_type.shape.dim] == [3, 2, 5, 5]


def test_equal_weights_stay_apart_in_export() -> None:
    nodes = [node("Add", ["x", "a"], ["h"]), node("Mul", ["h", "b"], ["y"])]
    net = nn.from_onnx(
        model(nodes, {"x": [2]}, {"y": [2]}, {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)})
    )
    again = nn.from_onnx(dnnc.to_onnx(net))
    assert [n for n, _ in again.named_parameters()] == ["a", "b"]


def test_shapes_by_contents() -> None:
    nodes = [node("Reshape", ["x", "shape"], ["r"]), node("Mul", ["r", "w"], ["y"])]
    proto = model(nodes, {"x": ["N"], "shape": [2]}, {"y": ["A", 3]}, {"w": normal(3)}, ints=("shape",))
    net = nn.from_onnx(proto)
    x = normal(6)
    y = net(x, shape=np.array([2, 3]))
    y.sum().backward()
    assert y.shape == (2, 3) and np.allclose(net.w.grad.numpy(), x.reshape(2, 3).sum(0), atol=1e-6)
    assert net(x, np.array([-1, 3])).shape == (2, 3)
    with pytest.raises(dnnc.UnsupportedError, match="depend on the contents of shape, which a trace does not know"):
        dnnc.jit(lambda x, s: net(x, s))(xp.asarray(x), xp.asarray([2, 3]))


def test_a_quantized_model_runs_and_has_no_gradient() -> None:
    nodes = [node("QuantizeLinear", ["x", "s", "z"], ["q"]), node("DequantizeLinear", ["q", "s", "z"], ["y"])]
    weights = {"s": np.array(0.1, np.float32), "z": np.array(3, np.uint8)}
    net = nn.from_onnx(model(nodes, {"x": [4]}, {"y": [4]}, weights))
    x = xp.asarray(np.array([0.11, 0.19, -0.2, 1], np.float32))
    assert np.allclose(net(x).numpy(), [0.1, 0.2, -0.2, 1], atol=1e-6) and list(net.parameters()) == []
    with pytest.raises(dnnc.GradientError):
        dnnc.grad(lambda x: net(x).sum())(x)


def test_constants_of_the_graph_are_weights() -> None:
    w = numpy_helper.from_array(normal(2, 3), "value")
    nodes = [node("Constant", [], ["w"], value=w), node("MatMul", ["x", "w"], ["y"])]
    net = nn.from_onnx(model(nodes, {"x": [1, 2]}, {"y": [1, 3]}, {}))
    assert [(n, p.shape) for n, p in net.named_parameters()] == [("w", (2, 3))]


@pytest.mark.slow
def test_copies() -> None:
    net = nn.from_onnx(network()[0]).eval()
    x = normal(2, 2, 5, 5)
    want = net(x).numpy()
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert (other(x).numpy() == want).all()
        with_zeros = {n: np.zeros(p.shape, np.float32) for n, p in other.named_parameters()}
        other.load_state_dict(with_zeros, strict=False)
        assert (other(x).numpy() == 0).all() and (net(x).numpy() == want).all()


def test_sizes_that_only_the_data_tells() -> None:
    proto = model([node("NonZero", ["x"], ["y"])], {"x": [4]}, {"y": [1, "k"]}, {}, ints=("y",))
    with pytest.raises(dnnc.UnsupportedError, match=r"nonzero at .*whose size only the data tells"):
        nn.from_onnx(proto)(np.zeros(4, np.float32))


def test_errors() -> None:
    net = nn.from_onnx(network()[0])
    x = normal(2, 2, 5, 5)
    for args, message in (
        ((), "the model takes x; got 0 by position"),
        ((x, x), "got 2 by position"),
        ((x.astype(np.float64),), "input x: expected f32, got float64"),
        ((x[0],), r"input x: expected 4 axes, got shape \(2, 5, 5\)"),
        (([1, 2],), "input x: expected an array, got a list"),
    ):
        with pytest.raises(dnnc.InputError, match=message):
            net(*args)
    with pytest.raises(dnnc.InputError, match=r"0\.weight is float64: expected float32"):
        copy.deepcopy(net).double()(x)
    with pytest.raises(dnnc.ModelError, match="there is no file"):
        nn.from_onnx("missing.onnx")
    with pytest.raises(dnnc.InputError, match="to_onnx of a module needs inputs"):
        dnnc.to_onnx(nn.Linear(2, 3))
