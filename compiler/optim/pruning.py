"""Pruning while training: masks in the state of an optimizer, which updates keep, and schedules that tighten them.

A mask is one more array of a parameter's state, so it is saved, resumed and donated with the rest:

    g = where(mask, g, 0);   p, s = update(p, g, s);   p = where(mask, p, 0)

Every so many updates a schedule reads the parameters and writes smaller masks. It compiles nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from dnnc.array.core import Array
from dnnc.array.creation import asarray, ones_like
from dnnc.ir import checks
from dnnc.ir.errors import InputError
from dnnc.optim.clusters import CLUSTERS
from dnnc.optim.optimizer import CODES, MASK, Optimizer
from dnnc.pruning import masks
from dnnc.pruning.options import PruneOptions

Weights = np.ndarray[Any, Any]


class Pruning(ABC):
    """Base of what prunes the parameters of an optimizer. Make it before the first step, and before `train_step`.

    Parameters with two axes and more have masks; those whose names fit a pattern of `keep` lose nothing.
    """

    def __init__(self, optimizer: Optimizer, keep: str | Sequence[str] = ()) -> None:
        if not isinstance(optimizer, Optimizer):
            raise InputError(f"{type(self).__name__}: expected an optimizer of dnnc.optim, got {optimizer!r}")
        if optimizer.pruning is not None or optimizer.begun:
            what = "has made steps" if optimizer.pruning is None else "is pruned already"
            raise InputError(f"{type(self).__name__}: the optimizer {what}; make a new one, then this, then train")
        self.keep = checks.names(keep, "keep")
        optimizer.pruning = self

    @abstractmethod
    def first(self, p: Array) -> dict[str, Array]:
        """Return arrays for the initial state of a parameter: its mask, bool of its shape."""

    @abstractmethod
    def after(self, update: int, read: Callable[[], Mapping[str, Any]], write: Callable[[Any], None]) -> None:
        """The changes behind an update.

        Args:
            update: its number, from 1.
            read: gives the parameters with masks by name.
            write: takes (mask, parameter) by name.
        """

    def keeps(self, name: str) -> bool:
        return any(fnmatchcase(name, p) for p in self.keep)


class KeepZeros(Pruning):
    """Weights that are zero stay zero: for training a pruned model on.

    Args:
        optimizer: whose parameters are trained.
        shared: weights of a parameter that are equal stay equal: each is moved by the sum of the gradients of all, so
            that the values of a codebook (`dnnc.prune(..., bits=5)`) are trained. Parameters with more than 256
            different values are trained as others.
    """

    def __init__(self, optimizer: Optimizer, shared: bool = False) -> None:
        if not isinstance(shared, bool):
            raise InputError(f"KeepZeros: shared={shared!r}, expected True or False")
        super().__init__(optimizer)
        self.shared = shared

    def first(self, p: Array) -> dict[str, Array]:
        mask = {MASK: p != 0}
        if not self.shared:
            return mask
        values, codes = np.unique(p.numpy(), return_inverse=True)
        if values.size > CLUSTERS:
            return mask
        return {**mask, CODES: asarray(codes.reshape(p.shape).astype(np.uint8), device=p.device)}

    def after(self, update: int, read: Callable[[], Mapping[str, Any]], write: Callable[[Any], None]) -> None:
        """Nothing: the masks stay."""


class GradualPruning(Pruning):
    """Prune while training: the sparsity rises along a cubic curve, fast at first, and the weights that stay adapt.

        s(t) = final + (initial - final) (1 - (t - begin) / (end - begin))^3

    Args:
        optimizer: whose parameters are pruned.
        sparsity: the share of the weights that goes in the end.
        begin, end: updates between which it rises. Train on behind `end`, with these weights.
        every: updates from one mask to the next; None: 20 masks in all.
        initial: the share that goes at `begin`.
        method: "magnitude", "2:4" or "block", as of `dnnc.prune`; "2:4" begins at `end`.
        scope: "layer", "global" or "lamp", as of `dnnc.prune`.
        block: of the method "block".
        keep: patterns of names of parameters that lose nothing.

    Attributes:
        sparsity: the share that is gone now.

    Source: Zhu and Gupta, To Prune or Not to Prune, 2017.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        sparsity: float = 0.9,
        *,
        end: int,
        begin: int = 0,
        every: int | None = None,
        initial: float = 0.0,
        method: str = "magnitude",
        scope: str = "layer",
        block: tuple[int, int] | str = (8, 8),
        keep: str | Sequence[str] = (),
    ) -> None:
        shares = {} if method == "2:4" else {"sparsity": sparsity}
        self._options = PruneOptions(method=method, scope=scope, block=block, **shares)  # type: ignore[arg-type]
        PruneOptions(initial)
        if method not in ("magnitude", "2:4", "block"):
            raise InputError(f'GradualPruning: method={method!r}, expected "magnitude", "2:4" or "block"')
        self.final, self.initial = self._options.default, float(initial)
        if isinstance(sparsity, Mapping) or self.initial > self.final:
            raise InputError(f"GradualPruning: sparsity={sparsity!r}, expected a share of at least initial={initial}")
        self.begin = checks.integer(begin, "begin", 0)
        self.end = checks.integer(end, "end", self.begin + 1)
        step = max((self.end - self.begin) // 20, 1) if every is None else every
        self.every = checks.integer(step, "every", 1)
        self.sparsity = 0.0
        super().__init__(optimizer, keep)

    def at(self, update: int) -> float:
        """The share that is gone behind an update."""
        if update < self.begin:
            return 0.0
        left = 1 - min((update - self.begin) / (self.end - self.begin), 1.0)
        if self._options.method == "2:4":
            return 0.0 if left else self.final
        return self.final + (self.initial - self.final) * left**3

    def first(self, p: Array) -> dict[str, Array]:
        return {MASK: ones_like(p, dtype="bool")}

    def after(self, update: int, read: Callable[[], Mapping[str, Any]], write: Callable[[Any], None]) -> None:
        self.sparsity = self.at(update)
        due = self.begin <= update <= self.end and ((update - self.begin) % self.every == 0 or update == self.end)
        if not due or not self.sparsity:
            return
        arrays = {n: a for n, a in read().items() if not self.keeps(n)}
        unfit = [p for p in self.keep if not any(fnmatchcase(n, p) for n in read())]
        if unfit:
            raise InputError(f"GradualPruning: keep: no parameter with two axes fits {unfit[0]!r}")
        wide = {n: np.moveaxis(a, 1, -1).reshape(a.shape[0], -1, a.shape[1]) for n, a in arrays.items()}
        kept = masks.chosen(wide, self._options, dict.fromkeys(wide, self.sparsity), self.sparsity)
        new = {}
        for n, a in arrays.items():
            mask = np.moveaxis(kept[n].reshape(a.shape[0], *a.shape[2:], a.shape[1]), -1, 1)
            new[n] = np.ascontiguousarray(mask), np.where(mask, a, np.zeros((), a.dtype))
        write(new)
