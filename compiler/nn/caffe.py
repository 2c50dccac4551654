"""Caffe's nets as modules: `from_caffe`.

A layer becomes a module of `dnnc.nn` by the function of its type; the net calls them in order, on blobs by name.
Caffe's rules hold: pools round sizes up, and padding counts in means.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_format
from google.protobuf.message import DecodeError

from dnnc import random
from dnnc.ir import checks
from dnnc.ir.errors import InputError, ModelError, UnsupportedError, count
from dnnc.nn.caffe_layers import LAYERS, Blobs, Layer, Tied
from dnnc.nn.caffe_proto import NET
from dnnc.nn.module import Module, free_name
from dnnc.nn.onnx_module import given_array
from dnnc.nn.parameter import Parameter

V1 = {
    "ABSVAL": "AbsVal", "BNLL": "BNLL", "CONCAT": "Concat", "CONVOLUTION": "Convolution",
    "DECONVOLUTION": "Deconvolution", "DROPOUT": "Dropout", "ELTWISE": "Eltwise", "EXP": "Exp", "FLATTEN": "Flatten",
    "INNER_PRODUCT": "InnerProduct", "LRN": "LRN", "MVN": "MVN", "POOLING": "Pooling", "POWER": "Power",
    "RELU": "ReLU", "SIGMOID": "Sigmoid", "SILENCE": "Silence", "SLICE": "Slice", "SOFTMAX": "Softmax",
    "SPLIT": "Split", "TANH": "TanH", "DATA": "Data", "DUMMY_DATA": "DummyData", "HDF5_DATA": "HDF5Data",
    "IMAGE_DATA": "ImageData", "MEMORY_DATA": "MemoryData", "WINDOW_DATA": "WindowData", "ACCURACY": "Accuracy",
    "SOFTMAX_LOSS": "SoftmaxWithLoss", "EUCLIDEAN_LOSS": "EuclideanLoss", "HINGE_LOSS": "HingeLoss",
    "INFOGAIN_LOSS": "InfogainLoss", "MULTINOMIAL_LOGISTIC_LOSS": "MultinomialLogisticLoss",
    "SIGMOID_CROSS_ENTROPY_LOSS": "SigmoidCrossEntropyLoss", "CONTRASTIVE_LOSS": "ContrastiveLoss",
    "HDF5_OUTPUT": "HDF5Output",
}  # fmt: skip
DATA = frozenset("Input Data DummyData HDF5Data ImageData MemoryData WindowData AnnotatedData".split())
DROPPED = frozenset("Accuracy HDF5Output Silence".split())  # and losses


def from_caffe(path: str | os.PathLike[str], prototxt: str | os.PathLike[str] | None = None) -> CaffeNet:
    """A Caffe net as a module that trains.

    Args:
        path: a `.caffemodel`, with current or V1 layers.
        prototxt: the net's definition, such as a deploy file; by default that in the model. Weights go by names of
            layers.

    Returns:
        A module that takes the net's inputs in order or by name: float32 arrays [N, C, H, W]. It gives the blobs that
        no layer reads, several as a dict. Losses, accuracies and what only they read are left out, so that a training
        net gives its scores. Layers are modules under their names.

    Raises:
        InputError: a path is none.
        ModelError: a file is missing or damaged, or its layers do not fit together.
        UnsupportedError: a type of layer that is not read, or layers from before V1.
    """
    path = checks.path(path, "path")
    prototxt = None if prototxt is None else checks.path(prototxt, "prototxt")
    trained = _binary(Path(path))
    if prototxt is None:
        return CaffeNet(_layers(trained, str(path), False), _inputs(trained))
    net = NET()
    try:
        text_format.Parse(_content(Path(prototxt)).decode("utf-8", "replace"), net, allow_unknown_field=True)
    except text_format.ParseError as e:
        raise ModelError(f"{prototxt} is no definition of a net: {e}") from e
    weights = {layer.name: layer for layer in _layers(trained, str(path), False)}
    layers = _layers(net, str(prototxt), True)
    for layer in layers:
        if layer.name in weights:
            layer.blobs = weights[layer.name].blobs
    return CaffeNet(layers, _inputs(net))


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise ModelError(f"{path} cannot be read: {e.strerror or e}") from e


def _binary(path: Path) -> Any:
    data, net = _content(path), NET()
    try:
        net.ParseFromString(data)
    except (DecodeError, RuntimeError) as e:
        raise ModelError(f"{path} is not a .caffemodel, or is damaged ({count(len(data), 'byte')}): {e}") from e
    if not net.layer and not net.layers:
        raise ModelError(f"{path} holds no layers; expected a .caffemodel")
    return net


def _layers(net: Any, what: str, by_phase: bool) -> list[Layer]:
    """The layers in one form. `by_phase`: without those of training alone."""
    made = []
    if any(layer.HasField("layer") for layer in net.layers):
        raise UnsupportedError(f"{what} has layers from before V1; convert it with Caffe's upgrade_net_proto_binary")
    for layer in (*net.layer, *net.layers):
        if by_phase and not _tests(layer):
            continue
        if isinstance(layer.type, str):
            kind, shared = layer.type, [p.name for p in layer.param]
        else:
            word = layer.DESCRIPTOR.fields_by_name["type"].enum_type.values_by_number[layer.type].name
            kind, shared = V1.get(word, word), list(layer.param)
        made.append(
            Layer(
                layer.name, kind, tuple(layer.bottom), tuple(layer.top), layer, [_blob(b) for b in layer.blobs], shared
            )
        )
    return made


def _tests(layer: Any) -> bool:
    """Is the layer part of the net in inference?"""
    test = 1
    if layer.include:
        return any(not r.HasField("phase") or r.phase == test for r in layer.include)
    return not any(r.HasField("phase") and r.phase == test for r in layer.exclude)


def _blob(b: Any) -> np.ndarray[Any, Any]:
    a = np.array(b.double_data, np.float64) if b.double_data else np.array(b.data, np.float32)
    shape = tuple(b.shape.dim) if b.HasField("shape") else (b.num, b.channels, b.height, b.width)
    if int(np.prod(shape, dtype=np.int64)) != a.size:
        raise ModelError(f"a blob of shape {shape} has {a.size} values; the file is damaged")
    return a.reshape(shape)


def _inputs(net: Any) -> list[str]:
    return list(net.input)


class CaffeNet(Module):
    """What `from_caffe` gives.

    Attributes:
        input_names, output_names: of blobs.
    """

    def __init__(self, layers: Sequence[Layer], inputs: Sequence[str]) -> None:
        super().__init__()
        kept = [
            layer
            for layer in layers
            if layer.kind not in DATA and layer.kind not in DROPPED and not layer.kind.endswith("Loss")
        ]
        given = [*inputs, *(t for layer in layers if layer.kind in DATA for t in layer.tops)]
        read = {b for layer in kept for b in layer.bottoms}
        self.input_names = tuple(dict.fromkeys(n for n in given if n in read))
        self._calls: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = []
        tied: Tied = {}
        there, free = set(self.input_names), dict.fromkeys(self.input_names)
        state = random.get_state()
        for layer in kept:
            missing = [b for b in layer.bottoms if b not in there]
            if missing:
                raise ModelError(f"layer {layer.name!r} reads {missing[0]!r}, which nothing before it makes")
            name = self._module_name(layer.name)
            self.add_module(name, _module(layer, tied))
            self._calls.append((name, layer.bottoms, layer.tops))
            for b in layer.bottoms:
                free.pop(b, None)
            free.update(dict.fromkeys(layer.tops))
            there.update(layer.tops)
        random.set_state(state)  # first values are not used
        self.output_names = tuple(free)
        if not self.output_names:
            raise ModelError("the net gives nothing: it has no layers but data, losses and accuracies")

    def _module_name(self, name: str) -> str:
        stem = free_name(self, re.sub(r"\W+", "_", name) or "layer")
        made, k = stem, 1
        while made in self._modules:
            k += 1
            made = f"{stem}_{k}"
        return made

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        names = self.input_names
        bad = [n for n in kwargs if n not in names or n in names[: len(args)]]
        if bad or len(args) + len(kwargs) != len(names):
            got = f"{len(args)} by position" + (f", {', '.join(kwargs)} by name" if kwargs else "")
            raise InputError(f"the net takes {', '.join(names) or 'no inputs'}; got {got}")
        blobs: Blobs = {n: given_array(n, x) for n, x in {**dict(zip(names, args)), **kwargs}.items()}
        for name, bottoms, tops in self._calls:
            made = self._modules[name](*(blobs[b] for b in bottoms))  # type: ignore[misc]
            blobs.update(zip(tops, made if isinstance(made, (list, tuple)) else [made] * len(tops)))
        results = {n: blobs[n] for n in self.output_names}
        return next(iter(results.values())) if len(results) == 1 else results


def _module(layer: Layer, tied: Tied) -> Module:
    """The module of a layer, with its weights. Errors name the layer."""
    make = LAYERS.get(layer.kind)
    if make is None:
        raise UnsupportedError(f"layer {layer.name!r} is of type {layer.kind}, which dnnc does not read; it reads "
                               f"{', '.join(LAYERS)}")  # fmt: skip
    try:
        made = make(layer)
    except InputError as e:  # of the module
        raise layer.wrong(str(e)) from e
    weights = made.blob_names() if hasattr(made, "blob_names") else [n for n, _ in made.named_parameters()]
    if len(layer.blobs) < len(weights):
        raise ModelError(
            f"layer {layer.name!r} ({layer.kind}) has {count(len(layer.blobs), 'blob')}, expected "
            f"{len(weights)}; give the "
            ".caffemodel that the definition belongs to"
        )
    for k, (name, blob) in enumerate(zip(weights, layer.blobs)):
        shared = layer.shared[k] if k < len(layer.shared) else ""
        own = made.get_parameter(name)
        if blob.size != own.size:
            raise ModelError(f"layer {layer.name!r}: its blob {k} has shape {blob.shape}, expected {own.shape}")
        p = Parameter(blob.reshape(own.shape))
        if shared:
            p = tied.setdefault(shared, p)
        setattr(made, name, p)
    return made
