"""A model that is pruned: its layers, its samples, and models without some of its weights or channels."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from dnnc.ir.errors import InputError, count
from dnnc.pruning import masks
from dnnc.pruning.channels import Channels, analysed
from dnnc.pruning.codebook import shared
from dnnc.pruning.options import PruneOptions
from dnnc.pruning.structured import chosen, families, hidden, without
from dnnc.pruning.trial import Trial
from dnnc.quantization.calibration import Tell
from dnnc.quantization.data import Samples, first_feeds, model_inputs, samples
from dnnc.quantization.layers import OTHERS, Kept, Layer, check_patterns, found_layers
from dnnc.quantization.measure import scored
from dnnc.quantization.onnx_graph import LEAST, float32_only, opened, refuse_quantized

Array = np.ndarray[Any, Any]
NO_DATA = (
    "errors are measured on data, such as 100 inputs that the model will meet: --data FILE.npz (arrays by input name), "
    "a folder of .npy or .npz files, or arrays from Python; --random measures on random numbers"
)


class Work:
    """What all steps of pruning work on.

    Attributes:
        model: the ONNX model, opened.
        name: of its file or graph.
        layers, kept: layers that are pruned, and layers that stay as they are.
        samples: of `data`, or random numbers for times alone.
        judged: are there numbers that errors can be measured with?
        notes: what else was done or left.
    """

    def __init__(self, model: Any, data: Any, inputs: Any, options: PruneOptions, tell: Tell) -> None:
        self.options, self.tell = options, tell
        self.notes: list[str] = []
        self.model = opened(model, LEAST, inputs)
        refuse_quantized(self.model)
        float32_only(self.model)
        self.name = Path(model).name if isinstance(model, (str, os.PathLike)) else self.model.graph.name or "model"
        dims = options.compile.get("dims") or {}
        self.judged = data is not None or options.random
        self.samples: Samples = samples(data, model_inputs(self.model.inputs, dims), options.samples, data is None)
        self.feeds = first_feeds(self.samples)
        self.layers, self.kept = self._layers()

    def _layers(self) -> tuple[list[Layer], dict[str, Kept]]:
        found, others = found_layers(self.model)
        reasons = {k.node: "its weights are of a form that is not pruned" for k in others if k.kind in OTHERS}
        kept = {k.node: replace(k, reason=reasons.get(k.node, k.reason)) for k in others}
        names = [x.node for x in found]
        if self.options.method == "structured":
            names += [k.node for k in others if k.kind == "ConvTranspose"]
        check_patterns("keep", self.options.keep, names)
        if isinstance(self.options.sparsity, Mapping):
            check_patterns("sparsity", self.options.sparsity, names)
        out = []
        own = {x.node for x in found}
        for layer in found:
            reason = self._reason(layer, own)
            if reason:
                kept[layer.node] = Kept(layer.node, layer.kind, reason)
            else:
                out.append(layer)
        return out, kept

    def _reason(self, layer: Layer, own: set[str]) -> str:
        """Why a layer stays as it is; "" where it does not."""
        pattern = self.options.keeps(layer.node)
        if pattern:
            return f"kept by {pattern!r}"
        w = self.model.constants[layer.weight]
        if self.options.share(layer.node) is None:
            return "no pattern of the sparsities fits it"
        if layer.kind == "Conv" and w.shape[1] == 1 and layer.group > 1:
            return "depthwise: few weights, and nothing to gain"
        if any(n.name not in own for n in self.model.readers[layer.weight]):
            return "other operators read its weights"
        if self.options.method == "2:4" and masks.rows(w, layer).shape[2] < 4:
            return f"{masks.rows(w, layer).shape[2]} input channels: no four to choose from"
        return ""

    # --- single weights and blocks ------------------------------------------------------------------------------------

    def masked(self, o: PruneOptions, layers: Sequence[Layer] | None = None) -> dict[str, Array]:
        """Weights with zeros, by the names of the constants."""
        by_weight = {x.weight: x for x in (self.layers if layers is None else layers)}
        arrays = {n: self.model.constants[n] for n in by_weight}
        wide = {n: masks.rows(arrays[n], x) for n, x in by_weight.items()}
        shares = {n: o.share(x.node) or 0.0 for n, x in by_weight.items()}
        kept = masks.chosen(wide, o, shares, o.default)
        return {n: np.where(masks.unrows(kept[n], arrays[n], x), arrays[n], 0) for n, x in by_weight.items()}

    def shared(self, proto: onnx.ModelProto) -> dict[str, Array]:
        """The weights of a model made from this one, each rounded to a codebook of its own."""
        assert self.options.bits is not None
        names = {x.weight for x in self.layers}
        arrays = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer if t.name in names}
        self.notes.append(f"the weights of a layer share at most {1 << self.options.bits} values")
        return {n: shared(a, self.options.bits) for n, a in arrays.items()}

    def with_weights(self, arrays: Mapping[str, Array], like: onnx.ModelProto | None = None) -> onnx.ModelProto:
        """The model, or one made from it, with other weights."""
        proto = onnx.ModelProto()
        proto.CopyFrom(self.model.proto if like is None else like)
        for t in proto.graph.initializer:
            if t.name in arrays:
                t.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(arrays[t.name]), t.name))
        return proto

    # --- channels -----------------------------------------------------------------------------------------------------

    def without_channels(self, o: PruneOptions, note: bool = True) -> onnx.ModelProto:
        """The model without the channels that go: by importance, or the best of random candidates."""
        c = analysed(self.model)
        names = {x.weight: x.node for x in self.layers}
        others = {w: n for w, n in c.layers.items() if not self.options.keeps(n)}
        found = families(self.model, c, {**others, **names})
        gone = chosen(found, o)
        if o.candidates and found:
            gone = self._best(c, [gone, *self._drawn(found, o)], note)
        if note and not gone:
            self.notes.append("no channels could be removed: the model is as it was")
        proto = without(self.model, c, gone)
        if note:
            self._held_layers(c, found, others)
        return proto

    @staticmethod
    def _drawn(found: Sequence[Any], o: PruneOptions) -> list[set[int]]:
        rng = np.random.default_rng(o.seed)
        return [chosen(found, o, rng) for _ in range(o.candidates)]

    def _best(self, c: Channels, choices: Sequence[set[int]], note: bool) -> set[int]:
        """The choice with the best metric, or the least misclassification and then the least error."""
        if not self.judged:
            raise InputError(f"candidates are compared by their errors, and {NO_DATA}")
        weights = sorted({p.tensor for p in c.places if p.read})
        trial = Trial(self.model, weights, self.samples, self.feeds, self.options.compile, self.tell)
        keys = []
        for k, gone in enumerate(choices):
            self.tell("try candidates", k, len(choices))
            arrays = hidden(self.model, c, gone)
            if self.options.metric is not None:
                keys.append((-scored(self.options.metric, trial.using(arrays)), 0.0))
            else:
                d = trial.difference(arrays)
                keys.append((1 - (d.agreement if d.agreement is not None else 1.0), d.error))
        best = min(range(len(keys)), key=lambda k: keys[k])
        if note:
            what = "the choice by importance" if best == 0 else f"the random candidate {best}"
            self.notes.append(f"of {count(len(choices), 'candidate')} {what} was the best")
        return choices[best]

    def _held_layers(self, c: Channels, found: Sequence[Any], others: Mapping[str, str]) -> None:
        removable = {n for f in found for n in f.layers}
        kinds = {n.name: n.op_type for n in self.model.graph.node}
        for weight, node in {**others, **{x.weight: x.node for x in self.layers}}.items():
            self.kept.pop(node, None)
            if node not in removable:
                why = c.holder(weight) or "a layer that stays"
                self.kept[node] = Kept(node, kinds[node], f"{why} needs all of its output channels")
