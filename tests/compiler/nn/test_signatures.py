"""Names and order of arguments are PyTorch's, but for what the documentation lists."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dnnc import nn, optim

LEGACY = ("size_average", "reduce", "_stacklevel")  # of PyTorch's functions: deprecated, or private
DEPARTURES = ("EmbeddingBag",)  # max_norm and scale_grad_by_freq are missing
PAIRS = {
    "nn": (nn, torch.nn),
    "functional": (nn.functional, torch.nn.functional),
    "init": (nn.init, torch.nn.init),
    "utils": (nn.utils, torch.nn.utils),
    "optim": (optim, torch.optim),
    "lr_scheduler": (optim.lr_scheduler, torch.optim.lr_scheduler),
}


def positional(f: Callable[..., Any]) -> list[str] | None:
    """The names of the arguments that may be given without names; None of a function that does not tell."""
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except ValueError:
        return None
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY and p.kind is not p.VAR_KEYWORD]


def shared(ours: Any, theirs: Any) -> Iterator[tuple[str, Any, Any]]:
    for name in sorted(set(dir(ours)) & set(dir(theirs))):
        a, b = getattr(ours, name), getattr(theirs, name)
        if not name.startswith("_") and callable(a) and callable(b) and a.__module__.startswith("dnnc"):
            yield name, a, b


@pytest.mark.parametrize("where", PAIRS)
def test_arguments_have_pytorchs_order(where: str) -> None:
    compared = 0
    for name, a, b in shared(*PAIRS[where]):
        ours, theirs = positional(a), positional(b)
        if ours is None or theirs is None or name in DEPARTURES:
            continue
        wanted = [n for n in theirs if n not in LEGACY]
        known = [n for n in ours if n in wanted]
        # no name of PyTorch's is left out ahead of one that may be given by its place; what we add comes behind
        assert known == ours[: len(known)] == wanted[: len(known)], f"{where}.{name}: {ours}, PyTorch's {theirs}"
        compared += 1
    assert compared >= {"nn": 100, "functional": 50, "init": 12, "utils": 5, "optim": 8, "lr_scheduler": 13}[where]
