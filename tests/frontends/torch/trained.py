"""Forward and backward in eager PyTorch and through torch.compile, side by side."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dnnc.ir.errors import DnncWarning

Results = dict[str, Tensor]


def compiled(module: Any, **more: Any) -> Callable[..., Any]:
    return torch.compile(module, backend="dnnc", options={"threads": 1, **more.pop("options", {})}, **more)


def floats(made: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(made) if isinstance(t, Tensor) and t.is_floating_point()]


def gradients(f: Callable[..., Any], args: Sequence[Any], module: nn.Module | None = None) -> Results:
    """Results of a function, gradients of its float arguments and of a module's parameters, and the module's buffers.

    The cotangents are seeded random numbers. What has no gradient is not there.
    """
    given = [x.detach().clone().requires_grad_() if is_float(x) else x for x in args]
    for p in module.parameters() if module is not None else ():
        p.grad = None
    with torch.enable_grad():
        results = floats(f(*given))
        g = torch.Generator().manual_seed(11)
        smooth = [t for t in results if t.requires_grad]
        seeds = [torch.randn(t.shape, generator=g, dtype=torch.float64).to(t.dtype) for t in smooth]
        if smooth:
            torch.autograd.backward(smooth, seeds)
    found = {f"result {k}": t.detach() for k, t in enumerate(results)}
    found |= {f"argument {k}": x.grad for k, x in enumerate(given) if is_float(x) and x.grad is not None}
    if module is not None:
        found |= {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        found |= {n: b.clone() for n, b in module.named_buffers() if b.is_floating_point()}
    return found


def is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def assert_same(made: Results, want: Results, bound: float) -> None:
    """A gradient of zeros is as good as none."""
    for n in made.keys() | want.keys():
        x, y = made.get(n), want.get(n)
        if x is None or y is None:
            assert not (x if x is not None else y).any(), f"{n}: a gradient on one side"
            continue
        assert x.dtype is y.dtype and x.shape == y.shape, f"{n}: {x.dtype} {x.shape}, torch {y.dtype} {y.shape}"
        scale = max(1.0, float(y.abs().nan_to_num(posinf=0.0).max()) if y.numel() else 1.0)
        close = torch.allclose(x.double(), y.double(), rtol=0, atol=bound * scale, equal_nan=True)
        assert close, f"{n}: {(x - y).abs().max()} of {scale}"


def train(
    module: nn.Module,
    draw: Callable[[], Sequence[Any]],
    bound: float,
    steps: int = 2,
    whole: bool = True,
    **more: Any,
) -> None:
    """Some steps of SGD, compiled and in eager PyTorch, from the same state, with the same data.

    Args:
        module: trained; a copy is the other one.
        draw: the arguments of a step.
        bound: of differences, of each tensor's largest element.
        whole: must all of it be compiled?
        more: for torch.compile.
    """
    other = copy.deepcopy(module)
    f = compiled(module, **more)
    for _ in range(steps):
        args = draw()
        with warnings.catch_warnings():
            warnings.simplefilter("error" if whole else "ignore", DnncWarning)
            made = gradients(f, args, module)
        assert_same(made, gradients(other, args, other), bound)
        for m in (module, other):
            with torch.no_grad():
                for p in m.parameters():
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=0.01)
