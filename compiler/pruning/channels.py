"""Which channels of which tensors go together: what must be removed from the rest of a graph with a channel.

Each output channel of a layer is an atom. Values carry the atoms of one of their axes; residuals, gates and grouped
convolutions join atoms, concatenations and flattenings line them up, and what is not understood holds them. In the end
an atom stands for positions along axes of weights, biases and scales: removing these removes the channel exactly.

    conv1.w[atoms, :] -> relu -> conv2.w[:, atoms]          removable
    conv1.w[atoms, :] -> softmax over channels              held
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from dnnc.quantization.onnx_graph import Model, attribute

Array = np.ndarray[Any, Any]
UNARY = frozenset(
    "Relu LeakyRelu Sigmoid Tanh Clip HardSwish HardSigmoid Elu Selu Celu Gelu Erf Sqrt Exp Log Neg Abs Identity Cast "
    "Softplus Softsign Dropout Mish Reciprocal Sign Floor Ceil Round Sin Cos ThresholdedRelu Swish".split()
)
BINARY = frozenset("Add Sub Mul Div Pow Min Max Sum Mean PRelu".split())
POOLS = frozenset("MaxPool AveragePool GlobalAveragePool GlobalMaxPool LpPool GlobalLpPool".split())
REDUCTIONS = frozenset("ReduceMean ReduceSum ReduceMax ReduceMin ReduceL2 ReduceL1 ReduceProd".split())


@dataclass(frozen=True)
class Lay:
    """The channels of a value: an axis from the right (negative), and an atom for each position along it."""

    axis: int
    atoms: Array


@dataclass(frozen=True)
class Place:
    """An axis of a constant. `role`: "out" of a layer's weights, "in" of a layer's weights, or "side"."""

    tensor: str
    axis: int
    role: str


class Channels:
    """The channels of a model.

    Attributes:
        places: the atoms along axes of constants, as roots.
        depthwise: names of convolutions in as many groups as channels, whose `group` follows what stays.
        flattened: Reshape nodes that do what Flatten does, with their numbers of features.
    """

    def __init__(self, m: Model) -> None:
        self.model = m
        self._parents: list[int] = []
        self._held: dict[int, str] = {}  # atoms that stay, and what needs them
        self._lays: dict[str, Lay] = {}
        self._places: dict[Place, Array] = {}
        self._read: dict[str, int] = {}  # how often a constant's channels were entered
        self.depthwise: list[str] = []
        self.flattened: list[str] = []
        for n in m.graph.node:
            self._node(n)
        outputs = {v.name for v in m.graph.output}
        for name in m.pinned:
            self._hold(f"the output {name}" if name in outputs else f"a loop or branch that reads {name}", name)
        for t, count in _constant_uses(m).items():
            found = [p for p in self._places if p.tensor == t]
            if found and count != self._read.get(t, 0):
                for p in found:
                    self._hold_atoms(f"another reader of {t}", self._places[p])
        roots = np.array([self._root(k) for k in range(len(self._parents))], np.int64)
        self.places = {p: roots[a] for p, a in self._places.items()}
        self._held = {int(roots[k]): why for k, why in reversed(self._held.items())}

    def removable(self) -> set[int]:
        """Roots that stand along the outputs of a layer and that nothing holds."""
        out = [a for p, a in self.places.items() if p.role == "out"]
        return {int(r) for a in out for r in np.unique(a)} - self._held.keys()

    def holder(self, weight: str) -> str:
        """What needs output channels of a layer; empty where nothing does."""
        atoms = [a for p, a in self.places.items() if p.tensor == weight and p.role == "out"]
        return next((self._held[int(r)] for a in atoms for r in a if int(r) in self._held), "")

    # --- atoms --------------------------------------------------------------------------------------------------------

    def _fresh(self, count: int) -> Array:
        first = len(self._parents)
        self._parents.extend(range(first, first + count))
        return np.arange(first, first + count)

    def _root(self, k: int) -> int:
        while self._parents[k] != k:
            self._parents[k] = self._parents[self._parents[k]]
            k = self._parents[k]
        return k

    def _join(self, a: Array, b: Array) -> None:
        for x, y in zip(a.tolist(), b.tolist()):
            x, y = self._root(x), self._root(y)
            if x != y:
                self._parents[max(x, y)] = min(x, y)

    def _hold_atoms(self, why: str, atoms: Array) -> None:
        for k in atoms.tolist():
            self._held.setdefault(k, why)

    def _hold(self, why: str, *values: str) -> None:
        for v in values:
            if v in self._lays:
                self._hold_atoms(why, self._lays[v].atoms)

    def _put(self, tensor: str, axis: int, atoms: Array, role: str) -> None:
        """Atoms along an axis of a constant."""
        p = Place(tensor, axis, role)
        same = next((q for q in self._places if q.tensor == tensor and q.axis == axis), None)
        if same is None:
            self._places[p] = atoms
        else:
            self._join(self._places[same], atoms)

    def _counted(self, tensor: str) -> None:
        self._read[tensor] = self._read.get(tensor, 0) + 1

    # --- nodes --------------------------------------------------------------------------------------------------------

    def _node(self, n: onnx.NodeProto) -> None:
        rule: Callable[[onnx.NodeProto], Lay | None] | None = None
        if n.domain in ("", "ai.onnx"):
            rule = RULES.get(n.op_type, Channels._unary if n.op_type in UNARY else None)  # type: ignore[assignment]
            rule = rule or next((r for ops, r in FAMILIES if n.op_type in ops), None)
        lay = rule(self, n) if rule is not None else None  # type: ignore[call-arg, arg-type]
        if lay is None:
            self._hold(_named(n), *n.input)
            return
        self._lays[n.output[0]] = lay

    def _rank(self, v: str) -> int | None:
        return self.model.rank(v)

    def _axis(self, lay: Lay | None, v: str) -> int | None:
        """The axis from the left."""
        rank = self._rank(v)
        return None if lay is None or rank is None else rank + lay.axis

    def _lay(self, v: str, axis: int) -> Lay | None:
        """The channels of a value, where they lie along an axis from the left."""
        lay = self._lays.get(v)
        return lay if self._axis(lay, v) == axis else None

    def _unary(self, n: onnx.NodeProto) -> Lay | None:
        return self._lays.get(n.input[0])

    def _pool(self, n: onnx.NodeProto) -> Lay | None:
        return self._lay(n.input[0], 1) if len([o for o in n.output if o]) == 1 else None

    def _conv(self, n: onnx.NodeProto) -> Lay | None:
        weight = n.input[1]
        if weight not in self.model.constants:
            return None
        w, group = self.model.constants[weight], int(attribute(n, "group", 1))
        x = self._lay(n.input[0], 1)
        if x is None:
            self._hold(_named(n), n.input[0])
        rank = w.ndim
        if group == 1:
            out = self._fresh(w.shape[0])
            if x is not None:
                self._put(weight, 1, x.atoms, "in")
        elif w.shape[1] == 1 and x is not None and x.atoms.size == group:
            out = np.repeat(x.atoms, w.shape[0] // group)
            self.depthwise.append(n.name)
        else:  # the same channels of each group
            out = np.tile(self._fresh(w.shape[0] // group), group)
            if x is not None:
                parts = x.atoms.reshape(group, -1)
                for part in parts[1:]:
                    self._join(parts[0], part)
                self._put(weight, 1, parts[0], "in")
            if x is None and w.shape[1] == 1:
                self._hold_atoms(_named(n), out)
        self._put(weight, 0, out, "out")
        self._counted(weight)
        if len(n.input) > 2 and n.input[2] and not self._bias(n.input[2], 0, out):
            self._hold_atoms(_named(n), out)
        return Lay(1 - rank, out)

    def _bias(self, name: str, axis: int, atoms: Array) -> bool:
        """Does a constant have these channels along an axis, or one number for all?"""
        if name not in self.model.constants:
            return False
        c = self.model.constants[name]
        if c.size == 1 and (c.ndim == 0 or atoms.size != 1):
            return True
        if c.shape[axis] != atoms.size:
            return False
        self._put(name, axis % c.ndim, atoms, "side")
        self._counted(name)
        return True

    def _gemm(self, n: onnx.NodeProto) -> Lay | None:
        if n.input[1] not in self.model.constants or attribute(n, "transA", 0):
            return None
        lay = self._product(n, int(attribute(n, "transB", 0)))
        c = n.input[2] if len(n.input) > 2 else ""
        if lay is not None and c and not self._bias(c, -1, lay.atoms):
            self._hold(_named(n), c)
            self._hold_atoms(_named(n), lay.atoms)
        return lay

    def _matmul(self, n: onnx.NodeProto) -> Lay | None:
        w = self.model.constants.get(n.input[1])
        return self._product(n, 0) if w is not None and w.ndim == 2 else None

    def _product(self, n: onnx.NodeProto, transposed: int) -> Lay | None:
        weight, x = n.input[1], self._lays.get(n.input[0])
        w = self.model.constants[weight]
        if x is not None and x.axis != -1:
            self._hold(_named(n), n.input[0])
        elif x is not None:
            self._put(weight, transposed, x.atoms, "in")
        out = self._fresh(w.shape[1 - transposed])
        self._put(weight, 1 - transposed, out, "out")
        self._counted(weight)
        return Lay(-1, out)

    def _binary(self, n: onnx.NodeProto) -> Lay | None:
        """Broadcast operands: channels at one place from the right are the same channels."""
        lays = [(v, self._lays[v]) for v in n.input if v in self._lays]
        if not lays:
            return None
        first = lays[0][1]
        if any(x.axis != first.axis or x.atoms.size != first.atoms.size for _, x in lays):
            return None
        for v in n.input:
            if v in self._lays:
                continue
            if v in self.model.constants:
                c = self.model.constants[v]
                if c.ndim < -first.axis or c.shape[first.axis] == 1:
                    continue
                if not self._bias(v, first.axis, first.atoms):
                    return None
            elif self._extent(v, first.axis) != 1:
                return None
        for _, x in lays[1:]:
            self._join(first.atoms, x.atoms)
        return first

    def _extent(self, v: str, axis: int) -> int | None:
        """Of a value without channels, along an axis from the right; 1 where it has none."""
        found = self.model.types.get(v)
        if found is None:
            return None
        return 1 if len(found[1]) < -axis else found[1][axis]

    def _batch_norm(self, n: onnx.NodeProto) -> Lay | None:
        lay = self._lay(n.input[0], 1)
        if lay is None or any(n.output[1:]) or not all(self._bias(v, 0, lay.atoms) for v in n.input[1:] if v):
            return None
        return lay

    def _concat(self, n: onnx.NodeProto) -> Lay | None:
        found = [self._lays.get(v) for v in n.input]
        lays = [x for x in found if x is not None]
        rank = self._rank(n.input[0])
        if not lays or rank is None or any(x.axis != lays[0].axis for x in lays):
            return None
        axis = int(attribute(n, "axis", 0))
        if (axis if axis < 0 else axis - rank) != lays[0].axis:
            if len(lays) < len(found):
                return None
            for other in lays[1:]:
                self._join(lays[0].atoms, other.atoms)
            return lays[0]
        parts = []
        for v, x in zip(n.input, found):
            if x is None:
                size = self._extent(v, lays[0].axis) if v not in self.model.constants else None
                if not size:
                    return None
                x = Lay(lays[0].axis, self._fresh(size))
                self._hold_atoms(_named(n), x.atoms)
            parts.append(x.atoms)
        return Lay(lays[0].axis, np.concatenate(parts))

    def _flatten(self, n: onnx.NodeProto) -> Lay | None:
        return self._features(n) if attribute(n, "axis", 1) == 1 else None

    def _reshape(self, n: onnx.NodeProto) -> Lay | None:
        """[N, C, ...] -> [N, C ...], which Flatten does for any number of channels."""
        shape = self.model.constants.get(n.input[1])
        out, x = self.model.types.get(n.output[0]), self._lay(n.input[0], 1)
        if shape is None or shape.size != 2 or x is None or attribute(n, "allowzero", 0):
            return None
        lay = self._features(n)
        features = shape.reshape(-1)[1] if shape.reshape(-1)[1] > 0 else None if out is None else out[1][1]
        if lay is None or features != lay.atoms.size:
            return None
        self.flattened.append(n.name)
        return lay

    def _features(self, n: onnx.NodeProto) -> Lay | None:
        x, found = self._lay(n.input[0], 1), self.model.types.get(n.input[0])
        sizes = [d for d in found[1][2:] if d is not None] if found is not None else []
        if x is None or found is None or len(sizes) < len(found[1]) - 2:
            return None
        return Lay(-1, np.repeat(x.atoms, math.prod(sizes)))

    def _axes(self, n: onnx.NodeProto) -> list[int] | None:
        """Axes of a reduction or of Squeeze, from the left; None where they are not constant."""
        given = attribute(n, "axes", None)
        if given is None and len(n.input) > 1 and n.input[1]:
            found = self.model.constants.get(n.input[1])
            given = None if found is None else found.reshape(-1).tolist()
        rank = self._rank(n.input[0])
        return None if given is None or rank is None else [int(a) % rank for a in given]

    def _reduce(self, n: onnx.NodeProto) -> Lay | None:
        keeps = n.op_type in REDUCTIONS and attribute(n, "keepdims", 1)
        x, axes = self._lays.get(n.input[0]), self._axes(n)
        at = self._axis(x, n.input[0])
        if x is None or axes is None or at is None or at in axes:
            return None
        return x if keeps else Lay(x.axis + sum(a > at for a in axes), x.atoms)

    def _transpose(self, n: onnx.NodeProto) -> Lay | None:
        x, rank = self._lays.get(n.input[0]), self._rank(n.input[0])
        if x is None or rank is None:
            return None
        perm = list(attribute(n, "perm", list(range(rank))[::-1]))
        return Lay(perm.index(rank + x.axis) - rank, x.atoms)

    def _resize(self, n: onnx.NodeProto) -> Lay | None:
        x = self._lay(n.input[0], 1)
        name = n.input[2] if n.op_type == "Resize" and len(n.input) > 2 else n.input[1] if len(n.input) > 1 else ""
        scales = self.model.constants.get(name)
        sized = n.op_type == "Resize" and len(n.input) > 3 and n.input[3]
        return x if scales is not None and scales.size > 1 and scales[1] == 1 and not sized else None

    def _pad(self, n: onnx.NodeProto) -> Lay | None:
        x = self._lays.get(n.input[0])
        at, pads = self._axis(x, n.input[0]), self.model.constants.get(n.input[1] if len(n.input) > 1 else "")
        if at is None or pads is None or (len(n.input) > 3 and n.input[3]):
            return None
        return x if not pads[at] and not pads[at + pads.size // 2] else None


RULES = {
    "Conv": Channels._conv, "Gemm": Channels._gemm, "MatMul": Channels._matmul, "Concat": Channels._concat,
    "BatchNormalization": Channels._batch_norm, "InstanceNormalization": Channels._batch_norm,
    "Flatten": Channels._flatten, "Reshape": Channels._reshape, "Squeeze": Channels._reduce,
    "Transpose": Channels._transpose, "Resize": Channels._resize, "Upsample": Channels._resize, "Pad": Channels._pad,
}  # fmt: skip
FAMILIES: Sequence[tuple[frozenset[str], Any]] = (
    (BINARY, Channels._binary), (POOLS, Channels._pool), (REDUCTIONS, Channels._reduce),
)  # fmt: skip


def _named(n: onnx.NodeProto) -> str:
    return f"{n.name or n.output[0]} ({n.op_type})"


def _constant_uses(m: Model) -> dict[str, int]:
    """How often nodes read each constant."""
    out: dict[str, int] = {}
    for n in m.graph.node:
        for i in n.input:
            if i in m.constants:
                out[i] = out.get(i, 0) + 1
    return out
