"""What has no form in graphs runs in eager PyTorch: a torch graph is cut there, and the parts between are programs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from dnnc.frontends.torch.dims import Dims
from dnnc.frontends.torch.importer import refused
from dnnc.ir.errors import DnncWarning
from dnnc.options import CompileOptions
from dnnc.torch.boundary import Boundary
from dnnc.torch.piece import Piece

SHOWN = 5  # reasons in a warning


def callable_of(
    module: fx.GraphModule, options: CompileOptions, static: Sequence[int] = (), boundary: Boundary | None = None
) -> Callable[[list[Any]], Any]:
    """A torch graph as a function of its list of arguments: one program, or several with eager operators between.

    Args:
        module: in ATen operators.
        options: those of compilation.
        static: numbers of the inputs that stay from call to call.
        boundary: to the other half of a graph with gradients, used where this one is one program.

    Warns:
        DnncWarning: names the operators that run in eager PyTorch, and where they stand in the user's code.
    """
    eager = _without_form(module)
    if not eager:
        return Piece(module, options, static, boundary)
    _tell(list(eager.values()))
    places = [n for n in module.graph.nodes if n.op == "placeholder"]
    weights = {places[k].name for k in static}
    outer = CapabilityBasedPartitioner(
        module, _HasForm(frozenset(eager)), allows_single_node_partition=True
    ).partition_and_fuse()
    for node in outer.graph.nodes:
        if node.op == "call_module":
            inner = outer.get_submodule(node.target)
            assert isinstance(inner, fx.GraphModule)
            own = [k for k, a in enumerate(node.args) if isinstance(a, fx.Node) and a.name in weights]
            setattr(outer, node.target, _Part(inner, options, own))
    if boundary is None:
        return lambda args: outer.forward(*args)
    return lambda args: outer.forward(*boundary.all_rows(places, args))


def _without_form(module: fx.GraphModule) -> dict[fx.Node, str]:
    """The nodes that must run in eager PyTorch, and why: of all sizes, or of the example's where these have fewer."""
    found = refused(module, Dims())
    sizes = [n.meta["val"].node for n in module.graph.nodes if isinstance(n.meta.get("val"), torch.SymInt)]
    if not found or not sizes:
        return found
    example = refused(module, Dims({str(s.expr): s.hint for s in sizes if s.expr.is_Symbol}))
    return example if len(example) < len(found) else found


def _tell(reasons: Sequence[str]) -> None:
    """One warning for a graph, with one reason for each operator."""
    told = list(dict.fromkeys(reasons))
    more = f" (and {len(told) - SHOWN} others)" if len(told) > SHOWN else ""
    warnings.warn(f"runs in eager PyTorch: {'; '.join(told[:SHOWN])}{more}", DnncWarning, stacklevel=3)


class _HasForm(OperatorSupportBase):
    def __init__(self, eager: frozenset[fx.Node]) -> None:
        self.eager = eager

    def is_node_supported(self, submodules: Any, node: fx.Node) -> bool:
        return node.op == "call_function" and node not in self.eager


class _Part(torch.nn.Module):
    """A part of a graph, called by its surroundings."""

    def __init__(self, module: fx.GraphModule, options: CompileOptions, static: Sequence[int]) -> None:
        super().__init__()
        (out,) = next(n for n in module.graph.nodes if n.op == "output").args
        self.one = isinstance(out, fx.Node)
        self.piece = Piece(module, options, static)

    def forward(self, *args: Any) -> Any:
        made = self.piece(list(args))
        return made[0] if self.one else made
