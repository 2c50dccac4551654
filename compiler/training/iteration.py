"""One iteration as a function of arrays: loss, gradients, clipping, update. `dnnc.training.step` compiles it.

In go the arrays of the state by name, the hyperparameters as one float64 vector, and a batch; out come the arrays that
the state holds next, and what the user sees. What a call does beside the loss depends on its place among the calls that
share an update (`accumulate`):

    first    gradient = g                       alone    update by g
    middle   gradient = gradient + g
    last     update by (gradient + g) / k
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

import numpy as np

from dnnc.array.bits import bitwise_xor
from dnnc.array.core import Array, array_of
from dnnc.array.creation import asarray, zeros
from dnnc.array.elementwise import clip, isfinite, minimum, where
from dnnc.array.lazy import apply
from dnnc.array.statistical import all as every
from dnnc.frontends.trace.gradients import value_and_grad
from dnnc.ir import checks
from dnnc.ir.errors import GradientError, a_type
from dnnc.optim.clipping import clipped_by_norm, norm_of
from dnnc.optim.hyper import STRIDE, Hyper, flat_numbers
from dnnc.optim.optimizer import Optimizer
from dnnc.optim.rounding import NARROW, WIDE
from dnnc.pytree import Tree, unflatten
from dnnc.random import stream
from dnnc.training.bound_module import BoundModule
from dnnc.training.statistics import Watch

Arrays = dict[str, Array]
FIRST_SCALE, GROWTH, BACKOFF = 2.0**16, 2.0, 0.5  # of a dynamic loss scale, as in PyTorch
GROWTH_INTERVAL = 2000  # updates without an overflow after which the scale grows
LARGEST_SCALE = 2.0**24  # a loss without half precision would let it grow for ever
PARAMS, BUFFERS, OPTIMIZER, GRADIENT = "params.", "buffers.", "optimizer.", "gradient."
STEP, KEY, SCALE, GOOD = "step", "key", "scale", "good"  # updates so far, of random numbers, of dynamic loss scaling


@dataclass(frozen=True)
class Parameter:
    """A parameter: its name, the number of its group, and its number in all."""

    name: str
    group: int
    number: int


@dataclass(frozen=True)
class Iteration:
    """What an iteration computes; see `dnnc.train_step` for the options."""

    loss_fn: Callable[..., Any]
    optimizer: Optimizer
    parameters: tuple[Parameter, ...]
    tree: Tree | None  # of the parameters; None where they are a module's
    module: BoundModule | None
    clip_norm: float | None
    clip_value: float | None
    accumulate: int
    loss_scale: float | str | None
    statistics: str | None

    @property
    def dynamic(self) -> bool:
        return self.loss_scale == "dynamic"

    @property
    def takes_key(self) -> bool:
        """Does the loss function have an argument `key`?"""
        try:
            return "key" in inspect.signature(self.loss_fn).parameters
        except (TypeError, ValueError):
            return False

    def first(self, params: Sequence[Array], buffers: Mapping[str, Array], seed: int) -> Arrays:
        """The first state, computed by `dnnc.array`."""
        words = np.array([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], np.uint32)
        state: Arrays = {STEP: asarray(np.int64(0)), KEY: asarray(words)}
        if self.dynamic:
            state |= {SCALE: asarray(np.float32(FIRST_SCALE)), GOOD: asarray(np.int32(0))}
        for p, a in zip(self.parameters, params):
            state[PARAMS + p.name] = a
        for name, a in buffers.items():
            state[BUFFERS + name] = a
        for p, a in zip(self.parameters, params):
            for name, s in self.optimizer.begin(a, self.optimizer.param_groups[p.group]).items():
                state[f"{OPTIMIZER}{p.name}.{name}"] = s
            if self.accumulate > 1:
                wide = WIDE if a.dtype.name in NARROW else a.dtype
                state[GRADIENT + p.name] = zeros(a.shape, dtype=wide)
        return state

    # --- the trace ----------------------------------------------------------------------------------------------------

    def run(self, place: str, state: Arrays, hyper: Array, batch: Sequence[Any]) -> tuple[Arrays, Any]:
        """The next state, and what the caller sees: (loss, or loss and further results; statistics)."""
        after = dict(state)
        after[KEY], key = _keys(state[KEY])
        names = [p.name for p in self.parameters]
        params = [state[PARAMS + n] for n in names]
        scale: Any = state[SCALE] if self.dynamic else self.loss_scale
        watch = Watch(self.statistics is not None)

        def scaled(leaves: list[Array]) -> Any:
            loss, seen, buffers = self._loss(leaves, state, batch, key)
            wide = loss if scale is None else loss.astype(np.promote_types(loss.dtype, WIDE)) * scale
            return wide, (seen, buffers, watch.activations(loss, dict(zip(names, leaves))))

        (_, (seen, buffers, activations)), gradients = value_and_grad(scaled, has_aux=True)(params)
        after.update({BUFFERS + n: a.astype(state[BUFFERS + n].dtype, copy=False) for n, a in buffers.items()})
        gradients = [g.astype(WIDE) if g.dtype.name in NARROW else g for g in gradients]
        if scale is not None:
            inverse = 1.0 / scale
            gradients = [g * (inverse.astype(g.dtype) if isinstance(inverse, Array) else inverse) for g in gradients]
        statistics = watch.all(activations, names, gradients)
        if place in ("middle", "last"):
            gradients = [state[GRADIENT + p.name] + g for p, g in zip(self.parameters, gradients)]
        if place in ("first", "middle"):
            after.update({GRADIENT + p.name: g for p, g in zip(self.parameters, gradients)})
            return after, (seen, statistics)
        if place == "last":
            gradients = [g * (1.0 / self.accumulate) for g in gradients]
        self._update(state, after, gradients, hyper)
        return after, (seen, statistics)

    def _loss(
        self, leaves: Sequence[Array], state: Arrays, batch: Sequence[Any], key: Array
    ) -> tuple[Array, Any, Arrays]:
        """The loss, what the loss function gives, and new buffers of a module."""
        named = {"key": key} if self.takes_key else {}
        buffers: Arrays = {}
        checks.function(self.loss_fn, "train_step", [self.module or "params", *batch], named)
        with stream(key):
            if self.module is None:
                assert self.tree is not None
                made = self.loss_fn(unflatten(self.tree, leaves), *batch, **named)
            else:
                values = {p.name: a for p, a in zip(self.parameters, leaves)}
                known = {n.removeprefix(BUFFERS): a for n, a in state.items() if n.startswith(BUFFERS)}
                made, buffers = self.module.call(self.loss_fn, values, known, batch, named)
        loss = made[0] if isinstance(made, tuple) and len(made) == 2 else made
        if not isinstance(loss, Array) or loss.shape != () or loss.dtype.kind not in "fV":
            got = f"{loss.dtype} of shape {loss.shape}" if isinstance(loss, Array) else a_type(loss)
            raise GradientError(
                f"train_step: the loss function must give one real float number, or a pair of it and further results; "
                f"got {got}; reduce it with mean or sum"
            )
        return loss, made, buffers

    def _update(self, state: Arrays, after: Arrays, gradients: Sequence[Array], hyper: Array) -> None:
        finite = reduce(and_, [every(isfinite(g)) for g in gradients]) if self.dynamic else None
        if self.clip_value is not None:
            gradients = [clip(g, -self.clip_value, self.clip_value) for g in gradients]
        if self.clip_norm is not None:
            gradients = clipped_by_norm(gradients, self.clip_norm, norm_of(gradients))
        count = state[STEP] + 1
        after[STEP] = count
        hypers = self._hypers(hyper, count.astype(np.float64))
        for p, g in zip(self.parameters, gradients):
            group = self.optimizer.param_groups[p.group]
            prefix = f"{OPTIMIZER}{p.name}."
            old = {n.removeprefix(prefix): a for n, a in state.items() if n.startswith(prefix)}
            param = state[PARAMS + p.name]
            new, states = self.optimizer.apply(param, g, old, hypers[p.group].at, group, _rounding_key(p, count))
            after[PARAMS + p.name] = new
            after.update({prefix + n: a.astype(old[n].dtype, copy=False) for n, a in states.items()})
        if finite is not None:
            for name, a in after.items():
                if name != KEY and not name.startswith(BUFFERS) and a is not state[name]:
                    after[name] = where(finite, a, state[name])
            good = where(finite, state[GOOD] + 1, 0)
            grown = minimum(state[SCALE] * GROWTH, LARGEST_SCALE)
            after[SCALE] = where(finite, where(good == GROWTH_INTERVAL, grown, state[SCALE]), state[SCALE] * BACKOFF)
            after[GOOD] = where(good == GROWTH_INTERVAL, 0, good).astype(np.int32)

    def _hypers(self, vector: Array, step: Array) -> list[Hyper]:
        """The hyperparameters of each group, as scalars of the program."""
        made, k = [], 0
        for group in self.optimizer.param_groups:
            names = list(flat_numbers(group, self.optimizer.defaults))
            made.append(self.optimizer.hyper(group, {n: vector[STRIDE * (k + j)] for j, n in enumerate(names)}, step))
            k += len(names)
        return made


def _keys(key: Array) -> tuple[Array, Array]:
    """The key of the next call, and one for this call."""
    words = array_of(apply("random_bits", key._parts[0], shape=(4,)))
    return words[:2], words[2:]


def _rounding_key(p: Parameter, count: Array) -> Array:
    """Of stochastic rounding: one for each parameter and step."""
    words = asarray(np.array([p.number, 0], np.uint32))
    return bitwise_xor(words, asarray(np.array([0, 1], np.uint32)) * count.astype(np.uint32))
