"""What layers, normalizations, and operators on elements do with channels.

A rule gives the channels of a node's result, or a list of them for its results (empty where it has none); None where it
does not understand the node, whose operands' channels then stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from dnnc.pruning.lays import Array, Lay
from dnnc.quantization.onnx_graph import attribute

if TYPE_CHECKING:
    from dnnc.pruning.channels import Channels

UNARY = frozenset(
    "Relu LeakyRelu Sigmoid Tanh Clip HardSwish HardSigmoid Elu Selu Celu Gelu Erf Sqrt Exp Log Neg Abs Identity Cast "
    "Softplus Softsign Dropout Mish Reciprocal Sign Floor Ceil Round Sin Cos ThresholdedRelu Swish Not IsNaN IsInf "
    "Shrink Tan Atan Asin Acos Sinh Cosh".split()
)
BINARY = frozenset(
    "Add Sub Mul Div Pow Min Max Sum Mean PRelu Where Greater Less GreaterOrEqual LessOrEqual Equal And Or Xor "
    "Mod".split()
)
POOLS = frozenset("MaxPool AveragePool GlobalAveragePool GlobalMaxPool LpPool GlobalLpPool".split())
REDUCTIONS = frozenset(
    "ReduceMean ReduceSum ReduceMax ReduceMin ReduceL2 ReduceL1 ReduceProd ReduceSumSquare ReduceLogSumExp".split()
)
ALONG = frozenset("Softmax LogSoftmax Hardmax LpNormalization".split())  # functions of a line along an axis
Rule = Callable[["Channels", onnx.NodeProto], "Lay | list[Lay | None] | None"]


def rule(n: onnx.NodeProto) -> Rule | None:
    """The rule of a node."""
    if n.domain not in ("", "ai.onnx"):
        return None
    found = RULES.get(n.op_type, unary if n.op_type in UNARY else None)
    return found or next((r for ops, r in FAMILIES if n.op_type in ops), None)


def unary(c: Channels, n: onnx.NodeProto) -> Lay | None:
    """A function of each element."""
    return None if any(n.output[1:]) or n.input[0] in c.entries else c.known(n.input[0])


def pool(c: Channels, n: onnx.NodeProto) -> Lay | None:
    """Windows over places."""
    return c.along(n.input[0], 1) if not any(n.output[1:]) else None


def conv(c: Channels, n: onnx.NodeProto) -> Lay | None:
    """Convolutions: of all channels, of each channel, and of groups, of which the same channels go."""
    weight = n.input[1]
    if weight not in c.model.constants:
        return None
    w, group = c.model.constants[weight], int(attribute(n, "group", 1))
    why = f"{n.name} ({n.op_type})"
    x = c.along(n.input[0], 1)
    if x is None:
        c.hold(why, n.input[0])
    read = c.kept(why, w.shape[1] * group) if x is None else x.atoms
    if group == 1:
        out = c.fresh(w.shape[0])
        c.put(weight, 1, read, "in")
    elif w.shape[1] == 1 and x is not None and x.atoms.size == group:
        out = np.repeat(x.atoms, w.shape[0] // group)
        c.depthwise.append(n.name)
        c.layers[weight] = n.name
    else:  # the same channels of each group
        out = np.tile(c.fresh(w.shape[0] // group), group)
        c.put(weight, 1, c.tied(read.reshape(group, -1), 1), "in")
        if w.shape[1] == 1:
            c.hold_atoms(why, out)
    c.put(weight, 0, out, "out")
    c.counted(weight)
    if len(n.input) > 2 and n.input[2] and not bias(c, n.input[2], 0, out):
        c.hold_atoms(why, out)
    return Lay(1 - w.ndim, out)


def transposed_conv(c: Channels, n: onnx.NodeProto) -> Lay | None:
    """ConvTranspose: weights are [inputs, outputs of a group, taps]."""
    weight, x = n.input[1], c.along(n.input[0], 1)
    if weight not in c.model.constants:
        return None
    w, group = c.model.constants[weight], int(attribute(n, "group", 1))
    why = f"{n.name} ({n.op_type})"
    if x is None:
        c.hold(why, n.input[0])
    if group == 1:
        out = c.fresh(w.shape[1])
        c.put(weight, 0, c.kept(why, w.shape[0]) if x is None else x.atoms, "in")
        c.put(weight, 1, out, "out")
    elif w.shape[1] == 1 and w.shape[0] == group and x is not None:
        out = x.atoms
        c.depthwise.append(n.name)
        c.put(weight, 0, out, "out")
    else:
        return None
    c.layers[weight] = n.name
    c.counted(weight)
    if len(n.input) > 2 and n.input[2] and not bias(c, n.input[2], 0, out):
        c.hold_atoms(why, out)
    return Lay(1 - w.ndim, out)


def bias(c: Channels, name: str, axis: int, atoms: Array) -> bool:
    """Does a constant have these channels along an axis, or one number for all?"""
    if name not in c.model.constants:
        return False
    a = c.model.constants[name]
    if a.size == 1 and (a.ndim == 0 or atoms.size != 1):
        return True
    if a.shape[axis] != atoms.size:
        return False
    c.put(name, axis % a.ndim, atoms, "side")
    c.counted(name)
    return True


def gemm(c: Channels, n: onnx.NodeProto) -> Lay | None:
    """Gemm by constant weights."""
    if n.input[1] not in c.model.constants or attribute(n, "transA", 0):
        return None
    lay = _product(c, n, int(attribute(n, "transB", 0)))
    name = n.input[2] if len(n.input) > 2 else ""
    if name and not bias(c, name, -1, lay.atoms):
        c.hold(f"{n.name} (Gemm)", name)
        c.hold_atoms(f"{n.name} (Gemm)", lay.atoms)
    return lay


def matmul(c: Channels, n: onnx.NodeProto) -> Lay | list[Lay | None] | None:
    """Products by constant weights, and of activations, such as queries by keys."""
    w = c.model.constants.get(n.input[1])
    if w is not None and w.ndim == 2 and n.input[0] not in c.model.constants:
        return _product(c, n, 0)
    ranks = [c.rank(v) for v in n.input]
    if any(r is None or r < 2 for r in ranks) or any(v in c.model.constants for v in n.input):
        return None
    a, b = (c.known(v) for v in n.input)
    inner = (a is not None and a.axis == -1, b is not None and b.axis == -2)
    if any(inner):  # the sum over channels that both have
        if not all(inner) or a is None or b is None or a.atoms.size != b.atoms.size:
            return None
        c.join(a.atoms, b.atoms)
        c.summed.append(a.atoms)
        return []
    if a is not None and b is not None:
        if a.axis != b.axis or a.axis > -3 or a.atoms.size != b.atoms.size:
            return None
        c.join(a.atoms, b.atoms)
        return a
    lay, other = (a, n.input[1]) if a is not None else (b, n.input[0])
    if lay is None or (lay.axis <= -3 and c.extent(other, lay.axis) != 1):
        return None
    return lay


def _product(c: Channels, n: onnx.NodeProto, transposed: int) -> Lay:
    weight, x = n.input[1], c.known(n.input[0])
    w, why = c.model.constants[weight], f"{n.name} ({n.op_type})"
    if x is not None and x.axis != -1:
        c.hold(why, n.input[0])
        x = None
    c.put(weight, transposed, c.kept(why, w.shape[transposed]) if x is None else x.atoms, "in")
    out = c.fresh(w.shape[1 - transposed])
    c.put(weight, 1 - transposed, out, "out")
    c.counted(weight)
    return Lay(-1, out)


def binary(c: Channels, n: onnx.NodeProto) -> Lay | None:
    """Broadcast operands: channels at one place from the right are the same channels."""
    lays = [(v, x) for v, x in ((v, c.known(v)) for v in n.input) if x is not None]
    if not lays or any(v in c.entries and v not in c.model.constants for v in n.input):
        return None
    first = lays[0][1]
    if any(x.axis != first.axis or x.atoms.size != first.atoms.size for _, x in lays):
        return None
    for v in n.input:
        if c.known(v) is not None:
            continue
        if v in c.model.constants:
            a = c.model.constants[v]
            if a.ndim < -first.axis or a.shape[first.axis] == 1:
                continue
            if not bias(c, v, first.axis, first.atoms):
                return None
        elif c.extent(v, first.axis) != 1:
            return None
    for _, x in lays[1:]:
        c.join(first.atoms, x.atoms)
    return first


def batch_norm(c: Channels, n: onnx.NodeProto) -> Lay | None:
    """A scale and more for each channel."""
    lay = c.along(n.input[0], 1)
    if lay is None or any(n.output[1:]) or not all(bias(c, v, 0, lay.atoms) for v in n.input[1:] if v):
        return None
    return lay


def along_axis(c: Channels, n: onnx.NodeProto) -> Lay | None:
    """A function of lines along another axis than that of the channels."""
    lay, rank = c.known(n.input[0]), c.rank(n.input[0])
    axis = int(attribute(n, "axis", -1))
    return None if lay is None or rank is None or axis % rank == rank + lay.axis else lay


def layer_norm(c: Channels, n: onnx.NodeProto) -> Lay | None:
    """Over the last axes, where channels lie along another one."""
    lay, rank = c.known(n.input[0]), c.rank(n.input[0])
    if lay is None or rank is None or any(n.output[1:]):
        return None
    return lay if rank + lay.axis < int(attribute(n, "axis", -1)) % rank else None


def sampled(c: Channels, n: onnx.NodeProto) -> Lay | None:
    """Places of the first operand that the others name."""
    return None if any(c.known(v) for v in n.input[1:]) else c.along(n.input[0], 1)


RULES: dict[str, Any] = {
    "Conv": conv, "ConvTranspose": transposed_conv, "Gemm": gemm, "MatMul": matmul,
    "BatchNormalization": batch_norm, "InstanceNormalization": batch_norm, "LayerNormalization": layer_norm,
    "RMSNormalization": layer_norm, "GridSample": sampled,
}  # fmt: skip
FAMILIES: tuple[tuple[frozenset[str], Any], ...] = ((BINARY, binary), (POOLS, pool), (ALONG, along_axis))
