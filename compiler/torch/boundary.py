"""What a forward program saves for its backward program: chosen by torch's partitioner, laid out as kernels compute it.

Nobody but the two programs reads these tensors. So a tensor that the forward computes in blocks of channels is saved in
blocks, and the backward reads it so: it is neither unpacked nor packed again, nor put in the order of torch's strides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from dnnc.donation import packed, unpacked
from dnnc.frontends.torch.tensors import Array, array_of, tensor_of
from dnnc.ir.types import TensorType

# ATen's operators whose operands are memory, whatever makes them.
CONTRACTIONS = ("convolution", "convolution_backward", "mm", "addmm", "bmm", "baddbmm")


class Boundary:
    """Between the forward and the backward program of one graph.

    Attributes:
        saved: names of the tensors that the forward saves, as fx nodes of both graphs.
        open: may saved tensors lie in other ways than rows? Then the forward graph is one program.
        types: of the saved tensors that lie in memory as the forward program computes them. Known when it is compiled.
    """

    def __init__(self) -> None:
        self.saved: frozenset[str] = frozenset()
        self.open = False
        self.types: Mapping[str, TensorType] = {}

    def partition(self, joint: fx.GraphModule, inputs: Any, **more: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Cut a joint graph as torch does, but keep what both halves would compute to memory."""
        _keep_operands(joint, more["num_fwd_outputs"])
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **more)
        (outputs,) = next(n for n in forward.graph.nodes if n.op == "output").args
        results = {n for n in outputs[: more["num_fwd_outputs"]] if isinstance(n, fx.Node)}
        read = {n.name for n in backward.graph.nodes if n.op == "placeholder"}
        saved = [n for n in outputs[more["num_fwd_outputs"] :] if isinstance(n, fx.Node) and n not in results]
        self.saved = frozenset(n.name for n in saved if n.name in read and isinstance(n.meta.get("val"), torch.Tensor))
        return forward, backward

    def rows(self, name: str, t: torch.Tensor) -> torch.Tensor:
        """A saved tensor in rows."""
        have = self.types.get(name)
        if have is None or t.dim() == have.rank:
            return t
        return tensor_of(unpacked(array_of(t), have))

    def all_rows(self, places: Sequence[fx.Node], args: Sequence[Any]) -> list[Any]:
        """Arguments of a graph with saved tensors in rows."""
        return [self.rows(n.name, x) for n, x in zip(places, args)] if self.types else list(args)

    def array(self, name: str, t: torch.Tensor, want: TensorType) -> Array:
        """A saved tensor as an array that lies as a program reads it: it does, but where a program was replaced."""
        have = self.types[name]
        if have.encoding == want.encoding and (have.row_major or t.dim() != have.rank):
            return array_of(t)
        return packed(array_of(self.rows(name, t)), want)


def _keep_operands(joint: fx.GraphModule, results: int) -> None:
    """Operands of contractions in both halves are kept: each half would write them to memory, to read them there."""
    (outputs,) = next(n for n in joint.graph.nodes if n.op == "output").args
    forward = _ancestors(outputs[:results])
    read: dict[bool, set[fx.Node]] = {True: set(), False: set()}
    for node in joint.graph.nodes:
        if _name(node) in CONTRACTIONS:
            read[node in forward] |= {_base(x) for x in node.all_input_nodes}
    for node in read[True] & read[False] & forward:
        if node.op == "call_function" and "recompute" not in node.meta:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _name(node: fx.Node) -> str:
    """The name of an ATen operator; empty for other nodes."""
    target: Any = node.target
    return target._schema.name.removeprefix("aten::") if isinstance(target, torch._ops.OpOverload) else ""


def _base(node: fx.Node) -> fx.Node:
    """The tensor that a node is a view of, or the node itself."""
    while isinstance(node.target, torch._ops.OpOverload) and node.target.is_view and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _ancestors(of: Any) -> set[fx.Node]:
    found: set[fx.Node] = set()
    todo = [n for n in of if isinstance(n, fx.Node)]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found
