"""dnnc's operators within torch: calls that torch would decompose before a backend sees them, and gradients."""

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


@torch.library.custom_op("dnnc::interpolate_backward", mutates_args=())
def interpolate_backward(
    grad: torch.Tensor,
    input_size: list[int],
    size: list[int] | None,
    scale_factors: list[float] | None,
    mode: str,
    align_corners: bool | None,
) -> torch.Tensor:
    rank = len(input_size) - 2
    kind = f"_upsample_{mode.replace('-', '_')}" if mode == "nearest-exact" else f"upsample_{mode}"
    op = getattr(torch.ops.aten, f"{kind}{rank}d_backward")
    corners = () if mode.startswith("nearest") else (bool(align_corners),)
    made: torch.Tensor = op(grad, grad.shape[2:], input_size, *corners, *(scale_factors or ()))
    return made.contiguous()


@interpolate_backward.register_fake
def _(
    grad: torch.Tensor,
    input_size: list[int],
    size: list[int] | None,
    scale_factors: list[float] | None,
    mode: str,
    align_corners: bool | None,
) -> torch.Tensor:
    return grad.new_empty(input_size)


def _note(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.input_size, ctx.more = inputs[0].shape, inputs[1:]


def _interpolate_vjp(ctx: Any, grad: torch.Tensor) -> Any:
    return torch.ops.dnnc.interpolate_backward(grad, ctx.input_size, *ctx.more), None, None, None, None


interpolate.register_autograd(_interpolate_vjp, setup_context=_note)


# --- gradients that need less than ATen's operators save --------------------------------------------------------------


@torch.library.custom_op("dnnc::attention_backward", mutates_args=())
def attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cotangents of F.scaled_dot_product_attention's operands; scores are computed again."""
    groups = query.shape[-3] // key.shape[-3] if query.dim() > 3 else 1
    k, v = (x.repeat_interleave(groups, -3) if groups > 1 else x for x in (key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ k.mT * factor
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    if attn_mask is not None:
        boolean = attn_mask.dtype is torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if boolean else scores + attn_mask
    weights = scores.softmax(-1).nan_to_num(0.0)  # rows without any key are 0
    slope = weights * (grad_out @ v.mT - (grad_out * out).sum(-1, keepdim=True)) * factor
    of_k, of_v = slope.mT @ query, weights.mT @ grad_out
    if groups > 1:
        of_k, of_v = (x.unflatten(-3, (-1, groups)).sum(-3) for x in (of_k, of_v))  # type: ignore[no-untyped-call]
    return (slope @ k).contiguous(), of_k.contiguous(), of_v.contiguous()


@attention_backward.register_fake
def _(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


@torch.library.custom_op("dnnc::max_pool_backward", mutates_args=())
def max_pool_backward(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
) -> torch.Tensor:
    """The cotangent of a max pooling's operand, with 2 or 3 axes in its windows; maxima are found again."""
    name, window = f"max_pool{len(kernel_size)}d_with_indices", (kernel_size, stride, padding, dilation, ceil_mode)
    _, at = getattr(torch.ops.aten, name)(x, *window)
    made: torch.Tensor = getattr(torch.ops.aten, f"{name}_backward")(grad_output, x, *window, at)
    return made.contiguous()


@max_pool_backward.register_fake
def _(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
) -> torch.Tensor:
    return x.new_empty(x.shape)


def replaced() -> dict[Any, Any]:
    """ATen's backward operators that become ours: neither the log-sum-exp of rows nor indices of maxima are saved."""
    aten, ours = torch.ops.aten, torch.ops.dnnc

    def attention(op: Any, count: int) -> Any:
        names = [a.name for a in op._schema.arguments]

        def convert(*args: Any, **more: Any) -> Any:
            a = {**dict(zip(names, args)), **more}
            mask = a.get("attn_mask" if "attn_mask" in names else "attn_bias")
            if a["dropout_p"] or (a.get("grad_input_mask") or (False,) * 4)[3]:
                return NotImplemented
            given = (a[names[0]], a["query"], a["key"], a["value"], a["out"])
            made = ours.attention_backward(*given, mask, a.get("is_causal", False), a.get("scale"))
            return (*made, *(None for _ in range(count - 3)))

        return convert

    def max_pool(rank: int) -> Any:
        def convert(grad, x, kernel_size, stride, padding, dilation, ceil_mode, indices):  # type: ignore[no-untyped-def]
            sides = [list(v) * rank if len(v) == 1 else list(v) for v in (kernel_size, stride, padding, dilation)]
            return ours.max_pool_backward(grad, x, *sides, ceil_mode)

        return convert

    kinds = {"flash_attention_for_cpu": 3, "flash_attention": 3, "efficient_attention": 4, "cudnn_attention": 3}
    fused = {getattr(aten, f"_scaled_dot_product_{k}_backward").default: n for k, n in kinds.items()}
    return {
        **{op: attention(op, n) for op, n in fused.items()},
        aten.max_pool2d_with_indices_backward.default: max_pool(2),
        aten.max_pool3d_with_indices_backward.default: max_pool(3),
    }


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
