"""Store floats in another precision: float16 or bfloat16 in memory, float32 in registers; or all float32.

    y = softmax(matmul(x, w))    ->    h = matmul(cast(x, to=f16), w_f16); y = softmax(cast(h, to=f32))

In comes a graph of any mix of f32, f16 and bf16 (f64, integers and the rest stay as they are); out comes one whose
inputs and outputs have the same types, with casts at the border. What is stored where:

- contractions read and write the asked-for type; so do element-wise ops, data movement, pooling and decoded weights.
  Their kernels compute in float32, and a fused group rounds what it stores, nothing else;
- reductions, norms and softmax read and write float32, by casts that become part of their kernels. What a reduction
  makes stays float32 through the element-wise ops that follow, up to the next contraction or norm, and what only
  reductions read is float32 as well: squares and their sums leave the range of f16;
- float32 is also where a value is an integer in disguise (made from integers, or on its way to become an integer, a
  bool or an index), and around a constant that the type cannot hold: one that overflows, or a single number that
  underflows;
- a product of integers is scaled in float32, in the kernel that makes it; what is scaled is like any other product;
- casts that the model has stay, unless both sides get one type; ops with subgraphs, on the host, of random numbers or
  of bits keep the types that they have.

The type rules of the ops give the types of results. Values that leave the range of f16 while running become infinite.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dnnc.ir.dtype import DType, bf16, f16, f32
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.builder import Builder, infer
from dnnc.ir.op import Trait
from dnnc.ir.types import TensorType
from dnnc.passes.analysis.kinds import is_pointwise
from dnnc.passes.base import PassContext
from dnnc.passes.rewrite import producer

FAMILY = (f32, f16, bf16)
STORAGE: dict[str, DType] = {
    "float32": f32,
    "tf32": f32,
    "float16": f16,
    "bfloat16": bf16,
}  # a CPU has no tf32: it is float32 there
KEPT = frozenset((Trait.BITS, Trait.RANDOM))


def precision(graph: Graph, ctx: PassContext) -> bool:
    """Change the types of a graph's floats to `ctx.precision`, in place. Returns whether anything changed."""
    if ctx.precision is None:
        return False
    return _Storage(graph, STORAGE[ctx.precision], ctx).run()


class _Storage:
    """Walks the nodes in order and gives each the dtype that it reads and writes."""

    def __init__(self, graph: Graph, store: DType, ctx: PassContext) -> None:
        self.graph, self.store, self.ctx = graph, store, ctx
        self.changed = False
        self.declared = {v: v.type.dtype for n in graph.nodes() for v in (*n.inputs, *n.outputs) if v is not None}
        self.ends = [v.type.dtype for v in graph.outputs]
        self.exact = _feeds_integers(graph) | _feeds_sums(graph)
        self.wide: set[Value] = set()  # results whose element-wise readers compute in float32, too
        self.made: dict[tuple[Value, DType], Value] = {}

    def run(self) -> bool:
        for n in self.graph.nodes():
            if self.converts(n) and n.outputs[0].type.dtype in FAMILY:
                self.cast(n)
            elif Trait.STORED in n.op.traits:
                self.decode(n)
            elif _keeps_types(n):
                for k, v in enumerate(n.inputs):
                    if v is not None:
                        self.read(n, k, self.declared[v])
            else:
                self.retype(n, self.choice(n))
        for k, t in enumerate(self.ends):
            self.end(k, t)
        for (v, _), made in self.made.items():
            if v in self.graph.constants and not v.uses and not self.graph.is_output(v):
                self.graph.erase_constant(v)
                self.graph.rename(made, v.name)
        return self.changed

    @staticmethod
    def family(v: Value | None) -> bool:
        return v is not None and v.type.dtype in FAMILY

    def converts(self, n: Node) -> bool:
        """Is it a cast of floats of the family?"""
        return Trait.CONVERSION in n.op.traits and self.family(n.inputs[0])

    # --- which type ---------------------------------------------------------------------------------------------------

    def choice(self, n: Node) -> DType:
        """The type that a node's floats have."""
        if self.store is f32:
            return f32
        follows = bool(n.op.traits & {Trait.ELEMENTWISE, Trait.MOVEMENT})
        made_of_integers = Trait.CONVERSION in n.op.traits and not self.converts(n)
        if follows and _scales_product(n):
            return f32
        if self.escapes(n) or (
            follows and (made_of_integers or Trait.AMPLIFIES in n.op.traits or any(v in self.wide for v in n.inputs))
        ):
            self.wide.update(n.outputs if follows else ())
            return f32
        if n in self.exact:
            return f32
        if follows or n.op.traits & {Trait.CONTRACTION, Trait.SELECTS, Trait.STORED}:
            return self.store
        if Trait.ACCUMULATES in n.op.traits or not n.inputs:
            self.wide.update(n.outputs)
        return f32

    def escapes(self, n: Node) -> bool:
        """Does the node read a constant that the storage type cannot hold?"""
        for k, v in enumerate(n.inputs):
            a = self.graph.constants.get(v) if v is not None else None
            if v is None or a is None or not self.family(v) or k in n.op.wide_operands:
                continue
            why = unfit(a, self.store)
            if why:
                if self.ctx.note is not None:
                    self.ctx.note(f"{v.name} {why} {self.store}: {n.op.name} {n.outputs[0].name} stays float32")
                return True
        return False

    # --- changing nodes -----------------------------------------------------------------------------------------------

    def cast(self, n: Node) -> None:
        """A cast between floats stays, unless its result would have the type of its operand."""
        last = all(
            _keeps_types(u) for u, _ in n.output.uses
        )  # it makes an output of the graph, whose type is fixed, or an operand whose type is
        to = n.attrs["to"] if last or n.attrs["to"] in (f32, self.store) else self.store
        x = n.inputs[0]
        assert x is not None
        if x.type.dtype is to:
            self.graph.replace_all_uses(n.output, x)
            if not self.graph.is_output(n.output):
                self.graph.erase(n)
            self.changed = True
            return
        if to is not n.attrs["to"]:
            n.attrs["to"] = to
            self.set_type(n.output, to)
        self.made.setdefault((x, to), n.output)

    def decode(self, n: Node) -> None:
        """What is decoded has the type that products read, codes of a float type stay, and so do scales of 16 bits."""
        t = self.choice(n)
        scale = n.inputs[1] if len(n.inputs) > 1 else None
        if scale is not None and scale.type.dtype is f32:
            self.read(n, 1, t)
        if n.attrs["dtype"] is not t:
            n.attrs["dtype"] = t
            self.set_type(n.output, t)

    def retype(self, n: Node, t: DType) -> None:
        for k in range(len(n.inputs)):
            self.read(n, k, f32 if k in n.op.wide_operands else t)
        for name, a in n.attrs.items():
            if isinstance(a, DType) and a in FAMILY and a is not t:
                n.attrs[name] = t
                self.changed = True
        if any(v.type.dtype in FAMILY and v.type.dtype is not t for v in n.outputs):
            for v, made in zip(n.outputs, infer(n.op, n.inputs, n.attrs, n.locs)):
                self.set_type(v, made.dtype)

    def read(self, n: Node, k: int, t: DType) -> None:
        """Let a node read a float in another type."""
        v = n.inputs[k]
        if v is not None and t in FAMILY and self.family(v) and v.type.dtype is not t:
            n.set_input(k, self.as_type(v, t))
            self.changed = True

    def set_type(self, v: Value, t: DType) -> None:
        if v.type.dtype is not t:
            v.type = TensorType(t, v.type.shape, v.type.encoding)
            self.changed = True

    def as_type(self, v: Value, t: DType) -> Value:
        """Return a value in another float type: its cast's operand, a new constant, or one cast for all readers."""
        maker = producer(v, "cast")
        source = maker.inputs[0] if maker is not None else None
        if source is not None and source.type.dtype is t and t is self.store and v.type.dtype is f32:
            return source
        found = self.made.get((v, t))
        if found is None:
            if v in self.graph.constants:
                with np.errstate(all="ignore"):
                    a = self.graph.constants[v].astype(t.numpy)
                found = self.graph.constant(a, v.name, v.locs)
            else:
                after = self.graph.first_node() if v.node is None else v.node.next
                found = Builder(self.graph, after, v.locs).op("cast", v, to=t)
            self.made[v, t] = found
        return found

    def end(self, k: int, t: DType) -> None:
        """Give an output the type that it had."""
        v = self.graph.outputs[k]
        if v.type.dtype is t:
            return
        made = self.as_type(v, t)
        if not self.graph.is_output(made) and made.node is not None:
            v.name, made.name = made.name, v.name
        self.graph.outputs[k] = made
        self.changed = True


def _scales_product(n: Node) -> bool:
    """Does a node multiply the float of an integer that a contraction makes?"""
    for v in n.inputs if producer(n.outputs[0], "mul") is n else ():
        made = producer(v, "cast")
        while made is not None and made.inputs[0] is not None and not made.inputs[0].type.dtype.is_float:
            before = made.inputs[0].node
            if before is not None and Trait.CONTRACTION in before.op.traits:
                return True
            made = producer(made.inputs[0], "add", "sub", "cast")
    return False


def _keeps_types(n: Node) -> bool:
    return n.op.host is not None or bool(n.op.traits & KEPT) or any(True for _ in n.subgraphs())


def _feeds_integers(graph: Graph) -> set[Node]:
    """Element-wise and moving nodes of floats whose results end in integers or bools, or are rounded to a grid."""
    found: set[Node] = set()
    for n in graph.nodes(reverse=True):
        if not n.outputs[0].type.dtype.is_float or Trait.AMPLIFIES in n.op.traits:
            found.add(n)
        elif n.op.traits & {Trait.ELEMENTWISE, Trait.MOVEMENT} and any(
            u in found for v in n.outputs for u, _ in v.uses
        ):
            found.add(n)
    return found


def _feeds_sums(graph: Graph) -> set[Node]:
    """Element-wise nodes whose results only reductions read: the squares of a mean of squares."""
    found: set[Node] = set()
    for n in graph.nodes(reverse=True):
        users = [u for v in n.outputs for u, _ in v.uses]
        if users and is_pointwise(n) and all(u in found or Trait.ACCUMULATES in u.op.traits for u in users):
            found.add(n)
    return found


def unfit(a: np.ndarray[Any, Any], t: DType) -> str:
    """Why a constant cannot be stored in a type; empty if it can. A single number may not vanish, of many some may."""
    if not a.size:
        return ""
    with np.errstate(all="ignore"):
        ends = np.array([a.min(), a.max()], np.float64)
        if not np.isfinite(ends).all():  # infinities and NaN are what they are
            ends = a[np.isfinite(a)].astype(np.float64)
        kept = ends.astype(t.numpy).astype(np.float64)
    if np.isinf(kept).any():
        return "overflows"
    return "underflows" if a.size == 1 and (kept != ends).any() and not kept.any() else ""
