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

from dnnc.pruning.channels import Channels
from dnnc.pruning.lays import Edit, Left, Place
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
    for k, atoms in enumerate(c.spans):
        for r in np.unique(atoms):
            where.setdefault(int(r), set()).add(Place(f"part {k}", 0, "side"))
    for r in sorted(c.removable()):
        groups.setdefault(frozenset(where[r]), []).append(r)
    out = []
    for places, roots in groups.items():
        own = sorted({p.tensor for p in places if p.made})
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
    """Weights that read none of the channels that go: the smaller model's outputs in the shapes of the whole one.

    Channels of queries and keys, which no weights read, are 0 where they are made.
    """
    out: dict[str, Array] = {}
    roots = np.array(sorted(gone))
    summed = np.intersect1d(roots, c.roots[np.concatenate([*c.summed, np.zeros(0, np.int64)]).astype(np.int64)])
    for p, atoms in c.places.items():
        left = ~np.isin(atoms, roots if p.read else summed)
        if left.all():
            continue
        w = out.get(p.tensor, m.constants[p.tensor])
        out[p.tensor] = w * left.reshape([-1 if k == p.axis else 1 for k in range(w.ndim)]).astype(w.dtype)
    return out


def without(m: Model, c: Channels, gone: set[int]) -> onnx.ModelProto:
    """The model without these channels."""
    proto = onnx.ModelProto()
    proto.CopyFrom(m.proto)
    stays = c.left(gone)
    arrays: dict[str, Array] = {}
    for p, atoms in c.places.items():
        left = np.flatnonzero(stays(atoms))
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
    _edit(m, proto.graph, c.edits, stays)
    del proto.graph.value_info[:]
    return proto


def _edit(m: Model, g: onnx.GraphProto, edits: Sequence[Edit], stays: Left) -> None:
    """Numbers of channels in operands, where they change; a constant of its own for each reader."""
    nodes = {n.name: n for n in g.node}
    for e in edits:
        n, new = nodes[e.node], e.made(stays)
        old = m.constants.get(n.input[e.operand]) if len(n.input) > e.operand else None
        if old is not None and np.array_equal(old, new):
            continue
        while len(n.input) <= e.operand:
            n.input.append("")
        n.input[e.operand] = m.fresh(f"{e.node}_channels")
        g.initializer.append(numpy_helper.from_array(np.ascontiguousarray(new), n.input[e.operand]))
        for a in [a for a in n.attribute if a.name == "num_outputs"]:
            n.attribute.remove(a)
