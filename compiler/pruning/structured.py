"""Removes channels from a model: which ones, and the graph without them.

Channels that lie along the same tensors are a family, from which a share goes. What stays is rounded to a multiple,
since products compute whole vectors of channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from dnnc.pruning.channels import Channels, Place
from dnnc.pruning.options import PruneOptions
from dnnc.quantization.onnx_graph import Model, attribute

Array = np.ndarray[Any, Any]
LEAST = 1 / 16  # of a family's channels that a choice among all families leaves


@dataclass(frozen=True)
class Family:
    """Channels that can go by themselves and lie along the same tensors.

    Attributes:
        roots: i64[n].
        layers: weights whose outputs they are.
        importance: f64[n]: mean over these tensors of a channel's sum of squares, relative to the mean channel's.
    """

    roots: Array
    layers: tuple[str, ...]
    importance: Array


def families(m: Model, c: Channels, layers: Mapping[str, str]) -> list[Family]:
    """All families, in the order of the graph.

    Args:
        layers: names of the nodes of the weights whose outputs may be removed.
    """
    where: dict[int, set[Place]] = {}
    for p, atoms in c.places.items():
        for r in np.unique(atoms):
            where.setdefault(int(r), set()).add(p)
    groups: dict[frozenset[Place], list[int]] = {}
    for r in sorted(c.removable()):
        groups.setdefault(frozenset(where[r]), []).append(r)
    out = []
    for places, roots in groups.items():
        own = sorted({p.tensor for p in places if p.role == "out"})
        if any(t not in layers for t in own):
            continue
        parts = []
        for p in places:
            if p.role == "side":
                continue
            w = m.constants[p.tensor].astype(np.float64)
            squares = np.square(w).sum(tuple(k for k in range(w.ndim) if k != p.axis % w.ndim))
            order = {r: k for k, r in enumerate(roots)}
            mine = np.zeros(len(roots))
            for r, s in zip(c.places[p].tolist(), squares):
                if r in order:
                    mine[order[r]] += s
            parts.append(mine / (mine.mean() or 1.0))
        out.append(Family(np.array(roots), tuple(layers[t] for t in own), np.mean(parts, 0)))
    return out


def chosen(found: Sequence[Family], o: PruneOptions, rng: np.random.Generator | None = None) -> set[int]:
    """Roots that go, by importance or by chance."""
    scores = [f.importance if rng is None else rng.random(f.roots.size) for f in found]
    if o.scope == "global":
        return _together(found, scores, o)
    out: set[int] = set()
    for f, score in zip(found, scores):
        shares = [s for s in map(o.share, f.layers) if s is not None]
        count = f.roots.size - _rounded(f.roots.size * (1 - max(shares, default=0.0)), f.roots.size, o.multiple)
        out.update(f.roots[np.argsort(score, kind="stable")[:count]].tolist())
    return out


def _together(found: Sequence[Family], scores: Sequence[Array], o: PruneOptions) -> set[int]:
    every = np.sort(np.concatenate([*scores, np.zeros(0)]))
    if not every.size:
        return set()
    limit = every[min(int(o.default * every.size), every.size - 1)]
    out: set[int] = set()
    for f, score in zip(found, scores):
        left = max(float((score >= limit).sum()), LEAST * f.roots.size)
        count = f.roots.size - _rounded(left, f.roots.size, o.multiple)
        out.update(f.roots[np.argsort(score, kind="stable")[:count]].tolist())
    return out


def _rounded(left: float, size: int, multiple: int) -> int:
    """Channels that stay: at least one, in multiples where there are several of these."""
    if size < 2 * multiple:
        return min(size, max(1, round(left)))
    return min(size, max(multiple, int(left / multiple + 0.5) * multiple))


def hidden(m: Model, c: Channels, gone: set[int]) -> dict[str, Array]:
    """Weights that read none of the channels that go: the smaller model's outputs in the shapes of the whole one."""
    out: dict[str, Array] = {}
    roots = np.array(sorted(gone))
    for p, atoms in c.places.items():
        if p.role != "in":
            continue
        left = ~np.isin(atoms, roots)
        w = out.get(p.tensor, m.constants[p.tensor])
        out[p.tensor] = w * left.reshape([-1 if k == p.axis else 1 for k in range(w.ndim)]).astype(w.dtype)
    return out


def without(m: Model, c: Channels, gone: set[int]) -> onnx.ModelProto:
    """The model without these channels."""
    proto = onnx.ModelProto()
    proto.CopyFrom(m.proto)
    roots = np.array(sorted(gone), np.int64)
    arrays: dict[str, Array] = {}
    for p, atoms in c.places.items():
        left = np.flatnonzero(~np.isin(atoms, roots))
        if left.size < atoms.size:
            arrays[p.tensor] = np.take(arrays.get(p.tensor, m.constants[p.tensor]), left, p.axis)
    for t in proto.graph.initializer:
        if t.name in arrays:
            t.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(arrays[t.name]), t.name))
    for v in proto.graph.input:  # of old files, which list their weights
        if v.name in arrays:
            for d, size in zip(v.type.tensor_type.shape.dim, arrays[v.name].shape):
                d.dim_value = size
    for n in proto.graph.node:
        if n.name in c.depthwise and n.input[1] in arrays:
            old = m.constants[n.input[1]].shape[0] // int(attribute(n, "group", 1))
            next(a for a in n.attribute if a.name == "group").i = arrays[n.input[1]].shape[0] // old
        elif n.name in c.flattened:
            n.op_type = "Flatten"
            del n.input[1:], n.attribute[:]
    del proto.graph.value_info[:]
    return proto
