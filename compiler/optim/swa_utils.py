"""`dnnc.optim.swa_utils`: averages of a model over the steps of its training, under PyTorch's names.

    ema = AveragedModel(model, avg_fn=get_ema_avg_fn(0.999))
    for x, y in batches:
        step(x, y)                      # of dnnc.train_step, or backward and optimizer.step()
        ema.update_parameters(model)

Sources: Polyak and Juditsky, 1992; Izmailov et al., "Averaging weights leads to wider optima", 2018.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from dnnc.array.core import Array
from dnnc.array.creation import ones_like, zeros_like
from dnnc.array.lazy import materialise, no_grad
from dnnc.array.promotion import kind_of
from dnnc.ir.errors import InputError, a_type
from dnnc.nn.layers.norm import BatchNorm1d, BatchNorm2d, BatchNorm3d
from dnnc.nn.module import Module
from dnnc.nn.parameter import overwrite, snapshot

AverageFn = Callable[[Array, Array, Array], Array]


def get_swa_avg_fn() -> AverageFn:
    """The mean of all models."""
    return lambda average, current, n: average + (current - average) / (n + 1).astype(average.dtype)


def get_ema_avg_fn(decay: float = 0.999) -> AverageFn:
    """decay average + (1 - decay) current. InputError: the decay is not between 0 and 1."""
    if not 0 <= decay <= 1:
        raise InputError(f"get_ema_avg_fn: decay={decay!r}, expected a number from 0 to 1")
    return lambda average, current, n: average * decay + current * (1 - decay)


class AveragedModel(Module):
    """A copy of a model, whose parameters are averages of the model's.

    Args:
        model: that is trained.
        avg_fn: `(average, current, number of models in the average) -> average`; default: the mean.
        use_buffers: are float buffers, such as running statistics, averaged too? Else the copy has those of the model
            that came last.

    Attributes:
        module: the copy.
        n_averaged: how many models are in the average.
    """

    n_averaged: Array

    def __init__(self, model: Module, avg_fn: AverageFn | None = None, use_buffers: bool = False) -> None:
        super().__init__()
        if not isinstance(model, Module):
            raise InputError(f"AveragedModel: expected a Module, got {a_type(model)}")
        self.module = copy.deepcopy(model)
        self.register_buffer("n_averaged", np.zeros((), np.int64))
        self.avg_fn, self.use_buffers = avg_fn if avg_fn is not None else get_swa_avg_fn(), use_buffers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def update_parameters(self, model: Module) -> None:
        """Take one more state of the model into the averages; all of them are one program.

        Raises:
            InputError: the model has other parameters than the one that was copied.
        """
        own, theirs = (dict(m.named_parameters()) | dict(m.named_buffers()) for m in (self.module, model))
        shapes = [{n: a.shape for n, a in held.items()} for held in (own, theirs)]
        if shapes[0] != shapes[1]:
            other = sorted(n for n in {*own, *theirs} if shapes[0].get(n) != shapes[1].get(n))
            raise InputError(f"update_parameters: the model is not the one that was copied: {', '.join(other[:5])}")
        averaged = {n for n, _ in self.module.named_parameters()}
        if self.use_buffers:
            averaged |= {n for n, a in self.module.named_buffers() if kind_of(a.dtype) == "f"}
        first = int(self.n_averaged) == 0
        with no_grad():
            new = {
                n: snapshot(theirs[n]) if first or n not in averaged else self._average(a, theirs[n])
                for n, a in own.items()
            }
            count = self.n_averaged + 1
        materialise([p for a in (*new.values(), count) for p in a._parts])
        for n, a in own.items():
            overwrite(a, new[n])
        overwrite(self.n_averaged, count)

    def _average(self, average: Array, current: Array) -> Array:
        return self.avg_fn(snapshot(average), snapshot(current), self.n_averaged).astype(average.dtype)


def update_bn(loader: Iterable[Any], model: Module) -> None:
    """Compute the running statistics of batch norms anew, as plain means over the batches of a loader.

    Args:
        loader: batches, or tuples of which the first element is one.
        model: changed in place.
    """
    kinds = BatchNorm1d, BatchNorm2d, BatchNorm3d
    norms = [m for m in model.modules() if isinstance(m, kinds) and m.running_mean is not None]
    if not norms:
        return
    modes = [(m, m.training) for m in model.modules()]
    momenta = [m.momentum for m in norms]
    model.train()
    for m in norms:
        overwrite(m.running_mean, zeros_like(m.running_mean))
        overwrite(m.running_var, ones_like(m.running_var))
        overwrite(m.num_batches_tracked, zeros_like(m.num_batches_tracked))
        m.momentum = None  # the mean of all batches
    try:
        with no_grad():
            for batch in loader:
                model(batch[0] if isinstance(batch, (tuple, list)) else batch)
                materialise([p for m in norms for a in m.buffers() for p in a._parts])
    finally:
        for m, momentum in zip(norms, momenta):
            m.momentum = momentum
        for module, training in modes:
            module.training = training
