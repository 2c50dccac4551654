"""Runs the float model on the samples, with intermediate values as outputs, and notes what quantization needs of them.

Histograms, peaks and means of channels and the matrices of GPTQ are sums over the samples: memory holds the values of
one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from dnnc.driver import compile
from dnnc.ir.errors import DnncError
from dnnc.quantization.data import Feed, Samples
from dnnc.quantization.layers import Layer
from dnnc.quantization.onnx_graph import Model, attribute
from dnnc.quantization.ranges import Histogram

Array = np.ndarray[Any, Any]
Tell = Callable[[str, int, int], None]
SHAPES = 3  # different shapes of samples from which on one program serves all sizes between
COLUMNS = 2048  # of a call that enter the matrix of GPTQ: positions of images beyond are left out evenly


@dataclass(frozen=True)
class Wanted:
    """What to note: histograms of values; peaks and means of channels and matrices of what layers read."""

    histograms: tuple[str, ...] = ()
    peaks: tuple[Layer, ...] = ()
    means: tuple[Layer, ...] = ()
    products: tuple[Layer, ...] = ()
    bins: bool = True

    @property
    def values(self) -> list[str]:
        layers = (*self.peaks, *self.means, *self.products)
        return list(dict.fromkeys((*self.histograms, *(x.x for x in layers))))


@dataclass
class Observed:
    """What was noted.

    Attributes:
        histograms: by value.
        peaks, means: of each channel, by the name of the value that a layer reads.
        products: sums of x x^T, f32[K, K], by layer.
    """

    histograms: dict[str, Histogram] = field(default_factory=dict)
    peaks: dict[str, Array] = field(default_factory=dict)
    means: dict[str, Array] = field(default_factory=dict)
    products: dict[str, Array] = field(default_factory=dict)


class Running:
    """A model compiled for the samples: feeds in, values by name out. `refit` replaces the weights in `parameters`.

    A model that is read anew for the inputs of each call has no parameters: there the weights are inputs.
    """

    def __init__(
        self, proto: onnx.ModelProto, samples: Samples, options: Mapping[str, Any], outputs: Sequence[str] = (),
        parameters: Sequence[str] = (), extra: Mapping[str, Array] | None = None, tell: Tell | None = None,
    ) -> None:  # fmt: skip
        given = {v.name for v in proto.graph.input}
        final = {v.name for v in proto.graph.output}
        self.passed = [n for n in outputs if n in given]
        added = tuple(n for n in dict.fromkeys(outputs) if n not in given and n not in final)
        self.extra = dict(extra or {})
        settings = {**options, "dims": sizes(samples, options.get("dims", {}))}
        if parameters:
            settings["parameters"] = list(parameters)
        self.final = [v.name for v in proto.graph.output]
        if added:  # a copy, which the executable may read again for other shapes
            copy = onnx.ModelProto()
            copy.CopyFrom(proto)
            # outputs of the file, since the graph has no name of its own for what a node without effect returns
            copy.graph.output.extend(onnx.ValueInfoProto(name=n) for n in added)
            proto = copy
        try:
            self.executable = compile(proto, tell, **settings)
            self._has_parameters = bool(parameters)
        except DnncError:
            if not parameters:
                raise
            self._has_parameters = False
            proto, weights = _with_inputs(proto, parameters)
            self.extra.update(weights)
            del settings["parameters"]
            self.executable = compile(proto, tell, **settings)

    def refit(self, arrays: Mapping[str, Array]) -> None:
        """Replace weights."""
        if self._has_parameters:
            self.executable.refit(arrays)
        else:
            self.extra.update(arrays)

    def __call__(self, feed: Feed) -> dict[str, Array]:
        results = self.executable({**feed, **self.extra})
        names = [s.name for s in self.executable.outputs]
        out = dict(zip(names, results if isinstance(results, tuple) else (results,)))
        return {**out, **{n: feed[n] for n in self.passed}}

    def outputs(self, feed: Feed) -> list[Array]:
        """The model's own outputs that are arrays of numbers."""
        found = self(feed)
        return [found[n] for n in self.final if isinstance(found[n], np.ndarray) and found[n].dtype.kind in "fiub"]


def _with_inputs(proto: onnx.ModelProto, names: Sequence[str]) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """A model with some of its constants as inputs, and their arrays."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    found = {t.name: t for t in copy.graph.initializer if t.name in names}
    others = [t for t in copy.graph.initializer if t.name not in found]
    given = [v for v in copy.graph.input if v.name not in found]
    given += [onnx.helper.make_tensor_value_info(n, t.data_type, t.dims) for n, t in found.items()]
    weights = {n: onnx.numpy_helper.to_array(t) for n, t in found.items()}
    for field_, kept in ((copy.graph.initializer, others), (copy.graph.input, given)):
        kept = [type(x).FromString(x.SerializeToString()) for x in kept]
        del field_[:]
        field_.extend(kept)
    return copy, weights


def sizes(samples: Samples, dims: Mapping[str, Any]) -> dict[str, Any]:
    """The option `dims` for these samples: bounds, where there are many shapes."""
    shapes = samples.shapes
    if len(shapes) <= SHAPES:
        return dict(dims)
    found: dict[str, list[int]] = {}
    for i in samples.inputs:
        for s in shapes:
            for d, n in zip(i.shape, s[i.name]):
                if isinstance(d, str) and d:
                    found.setdefault(d, []).append(n)
    bounds = {d: (min(n), max(n)) if min(n) != max(n) else n[0] for d, n in found.items()}
    return {**bounds, **dims}


def observe(m: Model, samples: Samples, wanted: Wanted, options: Mapping[str, Any], tell: Tell) -> Observed:
    """Run the model over all samples. `tell` hears of each sample."""
    out = Observed({n: Histogram() for n in wanted.histograms})
    if not wanted.values:
        return out
    run = Running(m.proto, samples, options, wanted.values, tell=tell)
    nodes = {n.name: n for n in m.graph.node}
    counts: dict[str, int] = {}
    total = len(samples)
    for k, feed in enumerate(samples):
        tell("calibrate", k, total)
        values = run(feed)
        for name in wanted.histograms:
            out.histograms[name].add(values[name], wanted.bins)
        for name, layer in {x.x: x for x in wanted.peaks}.items():
            peak = np.abs(_by_channel(values[name], layer)).max(1)
            out.peaks[name] = np.maximum(out.peaks[name], peak) if name in out.peaks else peak
        for name, layer in {x.x: x for x in wanted.means}.items():
            rows = _by_channel(values[name], layer)
            out.means[name] = out.means.get(name, 0.0) + rows.sum(1, dtype=np.float64)
            counts[name] = counts.get(name, 0) + rows.shape[1]
        for layer in wanted.products:
            x = columns(values[layer.x], layer, nodes[layer.node], m.constants[layer.weight].shape)
            out.products[layer.node] = out.products.get(layer.node, 0.0) + x @ x.T
    tell("calibrate", total, total)
    out.means = {n: a / max(counts[n], 1) for n, a in out.means.items()}
    return out


def _by_channel(a: Array, layer: Layer) -> Array:
    """[channels, the rest]."""
    rows = np.moveaxis(a, 1 if layer.kind == "Conv" else -1, 0)
    return rows.reshape(rows.shape[0], -1)


def columns(a: Array, layer: Layer, n: onnx.NodeProto, shape: tuple[int, ...]) -> Array:
    """What the weights of a layer are multiplied by: f32[K, positions]."""
    if layer.kind != "Conv":
        return _thinned(_by_channel(a, layer))
    rank = len(shape) - 2
    pads = list(attribute(n, "pads", [0] * (2 * rank)))
    strides, steps = attribute(n, "strides", [1] * rank), attribute(n, "dilations", [1] * rank)
    if attribute(n, "auto_pad", b"NOTSET") in (b"SAME_UPPER", b"SAME_LOWER"):
        for k in range(rank):
            size, kernel = a.shape[2 + k], (shape[2 + k] - 1) * steps[k] + 1
            total = max((-(-size // strides[k]) - 1) * strides[k] + kernel - size, 0)
            pads[k], pads[rank + k] = total // 2, total - total // 2
    a = np.pad(a, [(0, 0), (0, 0), *((pads[k], pads[rank + k]) for k in range(rank))])
    extents = tuple((shape[2 + k] - 1) * steps[k] + 1 for k in range(rank))
    windows = np.lib.stride_tricks.sliding_window_view(a, extents, tuple(range(2, 2 + rank)))
    places = tuple(slice(None, None, s) for s in strides)
    taps = tuple(slice(None, None, s) for s in steps)
    windows = windows[(slice(None), slice(None), *places, *taps)]  # [N, C, places, taps]
    count = int(np.prod(windows.shape[2 : 2 + rank]))
    flat = np.moveaxis(windows, (1, *range(2 + rank, 2 + 2 * rank)), range(rank + 1))  # [C, taps, N, places]
    if windows.shape[0] * count > COLUMNS and rank:
        step = -(-windows.shape[0] * count // COLUMNS)
        flat = flat[..., ::step]  # along the last axis of an image: neighbours are alike
    return np.ascontiguousarray(flat.reshape(int(np.prod(shape[1:])), -1))


def _thinned(x: Array) -> Array:
    step = -(-x.shape[1] // COLUMNS)
    return np.ascontiguousarray(x[:, ::step])
