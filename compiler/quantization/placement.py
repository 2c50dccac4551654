"""Where values become bytes: which are quantized, which share a scale, and which nodes read them so.

A value is quantized where a quantized layer reads it, once for all its readers. From there on:

    layer(max_pool(x)), layer(transpose(x))   x is quantized with the same scale: bytes move as bytes
    layer(concat(x, y))                       x and y are quantized too
    layer(relu(add(x, y)))                    what another layer has stored of x and y is quantized: a residual is read
                                              as bytes. The operand that is computed last stays in registers
    layer(mul(x, gate(mean(x))))              x is quantized, for all its readers end in quantized values

Bias, activation, residual and rounding then happen in the kernel of the product. A reader whose result stays float
reads floats, such as the sum ahead of a layer normalization.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx

from dnnc.quantization.layers import Layer
from dnnc.quantization.onnx_graph import Model

MOVES = ("MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Identity", "DepthToSpace",
         "SpaceToDepth")  # fmt: skip
UNARY = ("Relu", "Clip", "HardSwish", "HardSigmoid", "Sigmoid", "Tanh", "LeakyRelu", "Elu", "Selu", "Gelu", "Erf",
         "Abs", "Neg", "Exp", "Sqrt", "Softplus", "Mish", "Swish", "PRelu", "Dropout")  # fmt: skip
BINARY = ("Add", "Sub", "Mul", "Div", "Min", "Max", "Pow")
REDUCES = ("AveragePool", "GlobalAveragePool", "GlobalMaxPool", "ReduceMean", "ReduceMax", "Resize", "Pad")
CLAMPS = ("Relu", "Clip")


@dataclass(frozen=True)
class Placement:
    """Values that are quantized.

    Attributes:
        readers: the nodes that read each as bytes.
        same: another value whose scale a value has to have.
        joined: the parts of concatenated values, which may have the scale of the whole.
    """

    readers: dict[str, frozenset[str]]
    same: dict[str, str]
    joined: dict[str, tuple[str, ...]]


def placed(m: Model, layers: Iterable[Layer], behind: bool = False) -> Placement:
    """Place quantization for these layers; `behind`: also behind each layer and its ReLU, as some engines need it."""
    return _Placing(m, list(layers), behind).result()


class _Placing:
    def __init__(self, m: Model, layers: list[Layer], behind: bool) -> None:
        self.m, self.layers = m, {x.node: x for x in layers}
        self.same: dict[str, str] = {}
        self.joined: dict[str, tuple[str, ...]] = {}
        self.order = {n.name: k for k, n in enumerate(m.graph.node)}
        self.values: dict[str, None] = {}
        for layer in layers:
            self._add(layer.x)
        if behind:
            for layer in layers:
                self._add(self._clamped(layer.adder_result(m)))
        while self._grow():
            pass

    def result(self) -> Placement:
        lands: dict[str, bool] = {}
        readers = {
            v: frozenset(n.name for n in self.m.readers.get(v, ()) if self._reads_bytes(n, lands)) for v in self.values
        }
        used = {v: r for v, r in readers.items() if r}
        same = {v: s for v, s in self.same.items() if v in used and s in used}
        return Placement(used, same, {v: p for v, p in self.joined.items() if v in used})

    # --- which values -------------------------------------------------------------------------------------------------

    def _add(self, v: str) -> bool:
        """Quantize a value, and what it is moved or joined from."""
        if v in self.values or v in self.m.constants or not v:
            return False
        self.values[v] = None
        maker = self.m.makers.get(v)
        if maker is not None and self._moves(maker):
            self.same[v] = maker.input[0]
            self._add(maker.input[0])
        elif maker is not None and maker.op_type == "Concat":
            self.joined[v] = tuple(maker.input)
            for part in maker.input:
                self._add(part)
        return True

    def _grow(self) -> bool:
        """Quantize what is stored, and read as bytes by all its readers."""
        lands: dict[str, bool] = {}
        changed = False
        for v in self._made():
            if v in self.values or v in self.m.pinned or not self._stored(v):
                continue
            if all(self._reads_bytes(n, lands) for n in self.m.readers.get(v, ())):
                changed = self._add(v) or changed
        return changed

    def _made(self) -> list[str]:
        """What layers and sums of two activations store: the values behind all that is fused into them."""
        found = [self._end(x.y) for x in self.layers.values()]
        for n in self.m.graph.node:
            if n.op_type in BINARY and not self._is_unary(n) and any(i in self.values for i in n.input):
                found.append(self._end(n.output[0]))
        return list(dict.fromkeys(found))

    def _stored(self, v: str) -> bool:
        """Is a value written to memory, where it could be computed in the kernel of its reader as well?"""
        readers = self.m.readers.get(v, [])
        if len(readers) != 1 or readers[0].op_type not in BINARY:
            return bool(readers)
        return any(self._made_at(i) > self._made_at(v) for i in readers[0].input if i != v)

    def _made_at(self, v: str) -> int:
        maker = self.m.makers.get(v)
        return -1 if maker is None else self.order[maker.name]

    # --- who reads bytes ----------------------------------------------------------------------------------------------

    def _reads_bytes(self, n: onnx.NodeProto, lands: dict[str, bool]) -> bool:
        return n.name in self.layers or self._lands(n, lands)

    def _lands(self, n: onnx.NodeProto, known: dict[str, bool]) -> bool:
        """Do all results of a node become quantized values, by way of element-wise nodes and reductions?"""
        stack = [n]
        while stack:
            top = stack[-1]
            if top.name in known:
                stack.pop()
                continue
            verdict = self._verdict(top, known)
            if isinstance(verdict, bool):
                known[top.name] = verdict
                stack.pop()
            else:
                stack.extend(verdict)
        return known[n.name]

    def _verdict(self, n: onnx.NodeProto, known: dict[str, bool]) -> bool | list[onnx.NodeProto]:
        """Whether a node lands, or the readers of which that must be known first."""
        if n.name in self.layers:
            return False  # its result is its own matter: it is asked for what it reads
        if n.op_type not in (*UNARY, *BINARY, *REDUCES, *MOVES, "Concat") or n.domain not in ("", "ai.onnx"):
            return False
        waits: list[onnx.NodeProto] = []
        for o in n.output:
            if o in self.values or not o:
                continue
            readers = self.m.readers.get(o, [])
            if o in self.m.pinned or not readers:
                return False
            waits += [r for r in readers if r.name not in known]
            if any(known.get(r.name) is False for r in readers):
                return False
        return waits or True

    # --- patterns -----------------------------------------------------------------------------------------------------

    def _moves(self, n: onnx.NodeProto) -> bool:
        others = [i for i in n.input[1:] if i]
        return (
            n.op_type in MOVES
            and len(n.output) == 1
            and n.input[0] not in self.m.constants
            and all(i in self.m.constants for i in others)
        )

    def _is_unary(self, n: onnx.NodeProto) -> bool:
        """Does a node compute each element from one of one activation?"""
        return n.op_type in UNARY or (n.op_type in BINARY and sum(i in self.m.constants for i in n.input) == 1)

    def _clamped(self, v: str) -> str:
        n = self.m.sole_reader(v)
        return n.output[0] if n is not None and n.op_type in CLAMPS else v

    def _end(self, v: str) -> str:
        """The last value of the element-wise nodes that begin at v and read nothing else: x * sigmoid(x), gelu(x)."""
        while v not in self.m.pinned:
            readers = self.m.readers.get(v, [])
            if len(readers) == 1 and self._is_unary(readers[0]):
                v = readers[0].output[0]
                continue
            joint = self._joint(v, readers) if len(readers) == 2 else None
            if joint is None:
                break
            v = joint
        return v

    def _joint(self, v: str, readers: list[onnx.NodeProto]) -> str | None:
        """f(v, g(v)) of two readers, one of which is the product or sum of both."""
        for first, last in (readers, readers[::-1]):
            w, n = v, first
            while self._is_unary(n):
                w = n.output[0]
                after = self.m.sole_reader(w)
                if after is None:
                    break
                if after.name == last.name and last.op_type in BINARY and set(last.input) == {v, w}:
                    return str(last.output[0])
                n = after
        return None
