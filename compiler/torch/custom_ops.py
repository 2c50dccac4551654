"""dnnc's operators within torch, for calls that torch would decompose before a backend sees them."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

MODES = (
    "nearest",
    "nearest-exact",
    "linear",
    "bilinear",
    "bicubic",
    "trilinear",
)  # which torch may take apart into gathers


@torch.library.custom_op("dnnc::interpolate", mutates_args=())
def interpolate(
    x: torch.Tensor, size: list[int] | None, scale_factors: list[float] | None, mode: str, align_corners: bool | None
) -> torch.Tensor:
    """F.interpolate with one size or one factor for each axis."""
    return F.interpolate(x, size, scale_factors, mode, align_corners).contiguous()


@interpolate.register_fake
def _(
    x: torch.Tensor, size: list[int] | None, scale_factors: list[float] | None, mode: str, align_corners: bool | None
) -> torch.Tensor:
    return F.interpolate(x, size, scale_factors, mode, align_corners).contiguous()


def keep_whole(module: fx.GraphModule) -> None:
    """Put calls of F.interpolate in a graph that torch.compile has captured into one operator each."""
    found = [n for n in module.graph.nodes if n.op == "call_function" and n.target is F.interpolate]
    for node in found:
        _replace(node)
    if found:
        module.recompile()


def _replace(node: fx.Node) -> None:
    names = ("input", "size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias")
    given: dict[str, Any] = {**dict(zip(names, node.args)), **node.kwargs}
    mode, rank = given.get("mode", "nearest"), len(node.meta["example_value"].shape) - 2
    if mode not in MODES or given.get("antialias") or given.get("recompute_scale_factor"):
        return
    size, factor = (_listed(node, given.get(n), rank) for n in ("size", "scale_factor"))
    node.target = torch.ops.dnnc.interpolate.default
    node.args = (
        given["input"],
        size,
        None if factor is None else [float(f) for f in factor],
        mode,
        given.get("align_corners"),
    )
    node.kwargs = {}


def _listed(user: fx.Node, v: Any, rank: int) -> Any:
    """One element for each axis: of a list, of a torch.Size that the graph computes, or one number for all."""
    if v is None or isinstance(v, (tuple, list)):
        return None if v is None else list(v)
    sizes = v.meta["example_value"] if isinstance(v, fx.Node) else None
    if not isinstance(sizes, (tuple, list)):
        return [v] * rank
    made = []
    for k, n in enumerate(sizes):
        with user.graph.inserting_before(user):
            made.append(user.graph.call_function(operator.getitem, (v, k)))
        made[-1].meta["example_value"] = n
    return made
