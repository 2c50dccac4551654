"""Caffe's nets as modules, against PyTorch: layers, both forms, definitions, sharing, damage."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as T

import dnnc
import dnnc.array as xp
import dnnc.nn.functional as F
from dnnc import nn, optim
from dnnc.nn.caffe_proto import NET

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return (0.4 * RNG.standard_normal(shape)).astype(np.float32)


def fill(message: Any, fields: dict[str, Any]) -> None:
    message.SetInParent()
    for name, value in fields.items():
        if isinstance(value, dict):
            fill(getattr(message, name), value)
        elif isinstance(value, list):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)


def add(net: Any, name: str, kind: Any, bottoms: str, tops: str, *blobs: np.ndarray, **params: Any) -> Any:
    """Add a layer, in the form of V1 where its kind is a number."""
    layer = (net.layers if isinstance(kind, int) else net.layer).add(name=name, type=kind)
    layer.bottom.extend(bottoms.split())
    layer.top.extend(tops.split())
    for a in blobs:
        b = layer.blobs.add()
        b.data.extend(a.ravel().tolist())
        if isinstance(kind, int):
            b.num, b.channels, b.height, b.width = (1,) * (4 - a.ndim) + a.shape
        else:
            b.shape.dim.extend(a.shape)
    for field, values in params.items():
        fill(getattr(layer, field), values)
    return layer


def read(net: Any, tmp_path: Path, prototxt: str | None = None) -> Any:
    (tmp_path / "net.caffemodel").write_bytes(net.SerializeToString())
    if prototxt is None:
        return nn.from_caffe(tmp_path / "net.caffemodel")
    (tmp_path / "deploy.prototxt").write_text(prototxt)
    return nn.from_caffe(tmp_path / "net.caffemodel", tmp_path / "deploy.prototxt")


def near(got: Any, want: Any, atol: float = 1e-5) -> None:
    assert got.shape == tuple(want.shape)
    np.testing.assert_allclose(got.numpy(), want.detach().numpy(), 1e-4, atol)


X = normal(2, 4, 9, 11)
W, B, D, M, V = normal(6, 2, 3, 2), normal(6), normal(4, 3, 3, 3), normal(4), np.abs(normal(4)) + 0.2
x = torch.tensor(X)
w, b, d, m, v = map(torch.tensor, (W, B, D, M, V))

# A layer with its blobs and parameters, and what PyTorch makes of x.
CASES: dict[str, tuple[str, tuple[np.ndarray, ...], dict[str, Any], Any]] = {
    "convolution": (
        "Convolution", (W, B),
        {"convolution_param": {"num_output": 6, "kernel_h": 3, "kernel_w": 2, "stride": [2, 1], "pad_h": 1,
                               "group": 2}},
        lambda: T.conv2d(x, w, b, (2, 1), (1, 0), 1, 2),
    ),
    "dilated": (
        "Convolution", (W,),
        {"convolution_param": {"num_output": 6, "kernel_size": [3, 2], "dilation": [2], "group": 2,
                               "bias_term": False}},
        lambda: T.conv2d(x, w, None, 1, 0, 2, 2),
    ),
    "deconvolution": (
        "Deconvolution", (D,),
        {"convolution_param": {"num_output": 3, "kernel_size": [3], "stride": [2], "pad": [1], "bias_term": False}},
        lambda: T.conv_transpose2d(x, d, None, 2, 1),
    ),
    "max, rounded up": (
        "Pooling", (), {"pooling_param": {"kernel_size": [3], "stride": [2]}},
        lambda: T.max_pool2d(x, 3, 2, ceil_mode=True),
    ),
    "mean with padding": (
        "Pooling", (), {"pooling_param": {"pool": 1, "kernel_size": [3], "stride": [2], "pad": [1]}},
        lambda: T.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    ),
    "global": (
        "Pooling", (), {"pooling_param": {"pool": 1, "global_pooling": True}}, lambda: x.mean((2, 3), keepdim=True),
    ),
    "lrn": (
        "LRN", (), {"lrn_param": {"local_size": 3, "alpha": 0.5, "beta": 0.6, "k": 2.0}},
        lambda: T.local_response_norm(x, 3, 0.5, 0.6, 2.0),
    ),
    "lrn within": (
        "LRN", (), {"lrn_param": {"local_size": 3, "alpha": 0.5, "norm_region": 1}},
        lambda: x * (1 + 0.5 * T.avg_pool2d(x * x, 3, 1, 1)) ** -0.75,
    ),
    "batch norm": (
        "BatchNorm", (M * 3, V * 3, np.array([3], np.float32)), {"batch_norm_param": {"use_global_stats": True}},
        lambda: T.batch_norm(x, m, v),
    ),
    "scale": (
        "Scale", (M, V), {"scale_param": {"bias_term": True}}, lambda: x * m[:, None, None] + v[:, None, None],
    ),
    "bias": ("Bias", (M,), {}, lambda: x + m[:, None, None]),
    "inner product": (
        "InnerProduct", (W.reshape(4, -1)[:, :11], M), {"inner_product_param": {"num_output": 4, "axis": 3}},
        lambda: T.linear(x, w.reshape(4, -1)[:, :11], m),
    ),
    "turned": (
        "InnerProduct", (normal(99 * 4, 2),),
        {"inner_product_param": {"num_output": 2, "transpose": True, "bias_term": False}}, None,
    ),
    "prelu": ("PReLU", (V,), {}, lambda: T.prelu(x, v)),
    "leaky": ("ReLU", (), {"relu_param": {"negative_slope": 0.1}}, lambda: T.leaky_relu(x, 0.1)),
    "elu": ("ELU", (), {"elu_param": {"alpha": 0.5}}, lambda: T.elu(x, 0.5)),
    "power": ("Power", (), {"power_param": {"power": 2, "scale": 3, "shift": 1}}, lambda: (1 + 3 * x) ** 2),
    "exp": ("Exp", (), {"exp_param": {"base": 2, "scale": 0.5}}, lambda: 2 ** (0.5 * x)),
    "log": ("Log", (), {"log_param": {"base": 10, "shift": 9}}, lambda: torch.log10(x + 9)),
    "mvn": (
        "MVN", (), {},
        lambda: (x - x.mean((2, 3), True)) / (x.var((2, 3), unbiased=False, keepdim=True).sqrt() + 1e-9),
    ),
    "softmax": ("Softmax", (), {}, lambda: x.softmax(1)),
    "flatten": ("Flatten", (), {"flatten_param": {"axis": 2}}, lambda: x.flatten(2)),
    "reshape": ("Reshape", (), {"reshape_param": {"shape": {"dim": [0, -1, 3]}}}, lambda: x.reshape(2, -1, 3)),
    "reshape of a part": (
        "Reshape", (), {"reshape_param": {"shape": {"dim": [2, -1]}, "axis": 1, "num_axes": 1}},
        lambda: x.reshape(2, 2, 2, 9, 11),
    ),
    "permute": ("Permute", (), {"permute_param": {"order": [0, 2, 3, 1]}}, lambda: x.permute(0, 2, 3, 1)),
    "bnll": ("BNLL", (), {}, lambda: T.softplus(x)),
    "abs": ("AbsVal", (), {}, lambda: x.abs()),
}  # fmt: skip


@pytest.mark.family("samples")
@pytest.mark.parametrize("name", CASES)
def test_a_layer(name: str, tmp_path: Path) -> None:
    kind, blobs, params, want = CASES[name]
    net = NET(input=["data"])
    add(net, "it", kind, "data", "y", *blobs, **params)
    module = read(net, tmp_path).eval()
    near(module(X), x.flatten(1) @ torch.tensor(blobs[0]) if want is None else want())


def branches(net: Any) -> None:
    """Slices, a product of maxima, a sum with factors, a concatenation and a crop."""
    add(net, "cut", "Slice", "data", "a b c", slice_param={"slice_point": [1, 2]})
    add(net, "max", "Eltwise", "a b", "d", eltwise_param={"operation": 2})
    add(net, "sum", "Eltwise", "a d", "e", eltwise_param={"operation": 1, "coeff": [2.0, -1.0]})
    add(net, "product", "Eltwise", "e b", "f", eltwise_param={"operation": 0})
    add(net, "pool", "Pooling", "c", "p", pooling_param={"kernel_size": [2], "stride": [2]})
    add(net, "crop", "Crop", "f p", "g", crop_param={"offset": [1, 2]})
    add(net, "all", "Concat", "g g", "h")
    add(net, "scaled", "Scale", "h s", "y")


def test_blobs(tmp_path: Path) -> None:
    net = NET(input=["data", "s"])
    branches(net)
    module = read(net, tmp_path)
    s = normal(2)
    one, two, rest = x[:, :1], x[:, 1:2], x[:, 2:]
    f = (2 * one - torch.maximum(one, two)) * two
    g = f[:, :, 1 : 1 + 5, 2 : 2 + 6]
    want = torch.cat([g, g], 1) * torch.tensor(s)[:, None, None]
    assert T.max_pool2d(rest, 2, 2, ceil_mode=True).shape[2:] == (5, 6)
    near(module(X, s), want)
    near(module(s=s, data=X), want)


def trained() -> tuple[Any, dict[str, np.ndarray]]:
    """A training net: data, a shared layer, dropout and a loss, in the form of V1."""
    a = {"w": normal(4, 4), "b": np.abs(normal(4)) + 0.5, "u": normal(3, 4)}
    net = NET(name="t")
    types = {n: v.number for n, v in NET.DESCRIPTOR.fields_by_name["layers"].message_type.enum_types_by_name[
        "Of_type"].values_by_name.items()}  # fmt: skip
    add(net, "data", types["DATA"], "", "data label")
    for name in ("fc/1", "fc/2"):
        bottom, top = ("data", "h") if name == "fc/1" else ("h", "h2")
        made = add(
            net, name, types["INNER_PRODUCT"], bottom, top, a["w"], a["b"], inner_product_param={"num_output": 4}
        )
        made.param.extend(["shared_w", "shared_b"])
        add(net, f"relu{name}", types["RELU"], top, top)
    add(net, "drop", types["DROPOUT"], "h2", "h2", dropout_param={"dropout_ratio": 0.5})
    add(net, "out", types["INNER_PRODUCT"], "h2", "scores", a["u"],
        inner_product_param={"num_output": 3, "bias_term": False})  # fmt: skip
    add(net, "loss", types["SOFTMAX_LOSS"], "scores label", "loss")
    return net, a


def scores(a: dict[str, np.ndarray], data: np.ndarray) -> Any:
    w, b, u = (torch.tensor(a[n]) for n in "wbu")
    h = torch.relu(torch.tensor(data) @ w.T + b)
    return torch.relu(h @ w.T + b) @ u.T


@pytest.mark.slow
def test_a_training_net_trains_and_is_written_as_onnx(tmp_path: Path) -> None:
    net, a = trained()
    module = read(net, tmp_path)
    data = normal(16, 4)
    labels = (data[:, 0] > 0).astype(np.int64)
    assert (module.input_names, module.output_names) == (("data",), ("scores",))
    assert [n for n, _ in module.named_parameters()] == ["fc_1.weight", "fc_1.bias", "out.weight"]
    near(module.eval()(data), scores(a, data))
    module.train()
    step = dnnc.train_step(lambda net, x, y: F.cross_entropy(net(x), y), optim.Adam(lr=0.05), module)
    losses = [float(step(data, labels)) for _ in range(60)]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    assert module.fc_1.weight is module.fc_2.weight
    again = nn.from_onnx(dnnc.to_onnx(module, inputs=[dnnc.Spec(("n", 4))])).eval()
    np.testing.assert_allclose(again(data).numpy(), module.eval()(data).numpy(), 1e-4, 1e-5)
    assert (copy.deepcopy(module)(data).numpy() == module(data).numpy()).all()


def test_a_definition_with_weights_by_name(tmp_path: Path) -> None:
    net, a = trained()
    text = """
    name: "deploy"  # a comment
    layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 4 } } }
    layer { name: "out" type: "InnerProduct" bottom: "data" top: "y"
            inner_product_param { num_output: 3 bias_term: false weight_filler { type: "xavier" } } }
    layer { name: "only" type: "Dropout" bottom: "y" top: "z" include { phase: TRAIN } }
    layer { name: "p" type: "Softmax" bottom: "y" top: "prob" unheard_of_param { x: 1 } }
    """
    module = read(net, tmp_path, text)
    data = normal(2, 4)
    near(module(data), (torch.tensor(data) @ torch.tensor(a["u"]).T).softmax(1))
    with pytest.raises(dnnc.ModelError, match=r"layer 'fc9' .*give the .caffemodel"):
        read(net, tmp_path, text.replace('"out"', '"fc9"'))
    with pytest.raises(dnnc.ModelError, match="is no definition of a net: 1:"):
        read(net, tmp_path, "layer {{")


def test_statistics_are_updated_in_training(tmp_path: Path) -> None:
    net = NET(input=["data"])
    add(net, "bn", "BatchNorm", "data", "data", M, V, np.ones(1, np.float32),
        batch_norm_param={"moving_average_fraction": 0.75})  # fmt: skip
    module = read(net, tmp_path)
    mean, var = m.clone(), v.clone()
    near(module(X), T.batch_norm(x, mean, var, training=True, momentum=0.25))
    np.testing.assert_allclose(module.bn.running_var.numpy(), var.numpy(), 1e-5)
    near(module.eval()(xp.asarray(X)), T.batch_norm(x, mean, var))


def test_errors(tmp_path: Path) -> None:
    path = tmp_path / "bad.caffemodel"
    for data, message in ((b"", "holds no layers"), (b"\xff\xff text", "is not a .caffemodel, or is damaged")):
        path.write_bytes(data)
        with pytest.raises(dnnc.ModelError, match=message):
            nn.from_caffe(path)
    with pytest.raises(dnnc.InputError, match="path=None"):
        nn.from_caffe(None)  # type: ignore[arg-type]
    with pytest.raises(dnnc.ModelError, match="No such file"):
        nn.from_caffe(tmp_path / "missing")
    cases: list[tuple[Any, str]] = [
        (("it", "ROIPooling", "data", "y"), "'it' is of type ROIPooling, which dnnc does not read; it reads AbsVal"),
        (("it", "ReLU", "other", "y"), "reads 'other', which nothing before it makes"),
        (("it", "Accuracy", "data", "y"), "the net gives nothing"),
        (("it", "Convolution", "data", "y", W), r"layer 'it' \(Convolution\): Conv2d: .* 5 groups"),
    ]
    for args, message in cases:
        net = NET(input=["data"])
        layer = add(net, *args)
        if layer.type == "Convolution":
            fill(layer.convolution_param, {"num_output": 6, "kernel_h": 3, "kernel_w": 2, "group": 5})
        with pytest.raises(dnnc.DnncError, match=message):
            read(net, tmp_path)
    net = NET(input=["data"])
    add(net, "it", "InnerProduct", "data", "y", normal(3, 4), normal(2), inner_product_param={"num_output": 3})
    with pytest.raises(dnnc.ModelError, match=r"layer 'it': its blob 1 has shape \(2,\), expected \(3,\)"):
        read(net, tmp_path)
    net.layer[0].blobs[0].shape.dim[0] = 7
    with pytest.raises(dnnc.ModelError, match="has 12 values; the file is damaged"):
        read(net, tmp_path)
    old = NET()
    old.layers.add().layer.name = "conv"
    with pytest.raises(dnnc.UnsupportedError, match="layers from before V1"):
        read(old, tmp_path)
