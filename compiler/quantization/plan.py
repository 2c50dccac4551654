"""What is quantized how: a scheme for each layer, grids of activations, rounded weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dnnc.ir.errors import count
from dnnc.quantization.calibration import Observed
from dnnc.quantization.layers import LEAST_WEIGHT, Layer
from dnnc.quantization.onnx_graph import Model
from dnnc.quantization.options import WEIGHT_ONLY, QuantizeOptions
from dnnc.quantization.placement import Placement, placed
from dnnc.quantization.ranges import Grid, Histogram, chosen_range, grid
from dnnc.quantization.rounding import Rounded, corrected_bias, float8, gptq, nearest, scales_of

Array = np.ndarray[Any, Any]
JOINED = 0.5  # a part of a concatenation has the scale of the whole where its range is at least this share of it


@dataclass(frozen=True)
class Weight:
    """Rounded weights of a layer, and its bias; None: the bias stays as it is."""

    rounded: Rounded
    bias: Array | None


@dataclass
class Plan:
    """Grids and weights, made when they are asked for.

    Attributes:
        model: the float model.
        options: of the quantization.
        observed: what calibration has noted.
    """

    model: Model
    options: QuantizeOptions
    observed: Observed
    _weights: dict[tuple[str, str, float], Weight] = field(default_factory=dict)

    def placement(self, schemes: Mapping[str, str], layers: Iterable[Layer]) -> Placement:
        """Of the layers that have activations in 8 bits."""
        some = [x for x in layers if schemes.get(x.node) in ("int8", "fp8")]
        return placed(self.model, some, self.options.form == "operators")

    def grids(self, placement: Placement, scheme: str) -> dict[str, Grid]:
        """A grid for each quantized value; those that share one have it of all their ranges together."""
        kind = "fp8" if scheme == "fp8" else self.options.activations
        root = {v: v for v in placement.readers}

        def find(v: str) -> str:
            while root[v] != v:
                v = root[v]
            return v

        for v, s in placement.same.items():
            root[find(v)] = find(s)
        groups: dict[str, Histogram] = {}
        for v in placement.readers:
            h = self.observed.histograms[v]
            groups[find(v)] = groups[find(v)].joined(h) if find(v) in groups else h
        ranges = {r: self._range(h, kind) for r, h in groups.items()}
        for v, parts in placement.joined.items():
            low, high = ranges[find(v)]
            for p in parts:
                if p in root and self._fills(ranges[find(p)], (low, high)):
                    ranges[find(p)] = low, high
        return {v: grid(*ranges[find(v)], kind) for v in placement.readers}

    def _range(self, h: Histogram, kind: str) -> tuple[float, float]:
        if kind == "fp8":
            return chosen_range(h, "minmax", self.options.percentile)
        return chosen_range(h, self.options.method, self.options.percentile, kind == "int8")

    @staticmethod
    def _fills(part: tuple[float, float], whole: tuple[float, float]) -> bool:
        span = whole[1] - whole[0]
        inside = whole[0] <= part[0] and part[1] <= whole[1]
        return inside and part[1] - part[0] >= JOINED * span

    def weight(self, layer: Layer, scheme: str, x: Grid | None) -> Weight:
        """The weights of a layer in a scheme. `x`: the grid of its activation, where it has one."""
        key = layer.node, scheme, 0.0 if x is None else float(x.scale)
        if key not in self._weights:
            self._weights[key] = self._rounded(layer, scheme, x)
        return self._weights[key]

    def _rounded(self, layer: Layer, scheme: str, x: Grid | None) -> Weight:
        m, o = self.model, self.options
        w = layer.matrix(m.constants[layer.weight])
        bias = m.constants[layer.bias].reshape(-1) if layer.bias else None
        bits, block = o.bits(scheme), o.block_of(scheme)
        if scheme == "fp8":
            rounded = float8(w)
        else:
            inner = bias if scheme == "int8" and not layer.adder else None
            scales = scales_of(w, bits, block, inner, 1.0 if x is None else float(x.scale))
            products = self.observed.products.get(layer.node)
            rounded = nearest(w, scales, bits, block) if products is None else gptq(w, scales, bits, block, products)
        means = self.observed.means.get(layer.x) if o.bias_correction and layer.bias else None
        if means is None:
            return Weight(rounded, None)
        return Weight(rounded, corrected_bias(bias, w, rounded.values, means, layer.group))


def unusable(layers: Sequence[Layer], observed: Observed) -> dict[str, str]:
    """Layers whose activation cannot be quantized, with the reason."""
    out = {}
    for layer in layers:
        h = observed.histograms.get(layer.x)
        if h is not None and h.bad:
            out[layer.node] = (
                f"{count(h.bad, 'value')} of {layer.x} {'was' if h.bad == 1 else 'were'} NaN or infinite in calibration"
            )
        elif h is not None and not h.count:
            out[layer.node] = f"{layer.x} was empty in calibration"
        elif h is not None and h.low == h.high == 0:
            out[layer.node] = f"{layer.x} was 0 in all of the calibration, which tells no scale"
        elif h is not None and max(-h.low, h.high) < LEAST_WEIGHT:
            out[layer.node] = f"{layer.x} was at most {max(-h.low, h.high):.3g} in calibration, too small for a scale"
        elif h is not None and max(-h.low, h.high) > 1e30:
            out[layer.node] = f"{layer.x} reached {max(-h.low, h.high):.3g} in calibration"
    return out


def is_weight_only(scheme: str | None) -> bool:
    """Does a scheme leave the activations as they are?"""
    return scheme in WEIGHT_ONLY
