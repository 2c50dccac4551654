"""What all optimizers share: groups of parameters, state, and the two ways in which a rule is used.

An optimizer is one pure rule for a parameter:

    init(param, group) -> state                                a dict of arrays
    numbers(hyper) -> numbers                                  what is computed of hyperparameters alone, in float64
    update(param, grad, state, h, group) -> (param, state)     h: all numbers, in the dtype of the parameter

`step()` applies it to lazy arrays and their gradients, as one program with the backward pass that these still are.
`dnnc.train_step` traces it into the program of a whole iteration.
"""

from __future__ import annotations

import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from dnnc.array.core import Array, array_of, from_buffer, scalar
from dnnc.array.creation import asarray, zeros_like
from dnnc.array.elementwise import where
from dnnc.array.lazy import Lazy, buffer, compute_results, leaf, materialise
from dnnc.array.sizes import same_shape
from dnnc.frontends.trace.backward import take
from dnnc.frontends.trace.functions import number as call_number
from dnnc.frontends.trace.functions import record, stand_in
from dnnc.ir.errors import DnncWarning, InputError, a_type, count
from dnnc.ir.lru import LRU
from dnnc.optim.clusters import of_clusters
from dnnc.optim.hyper import Hyper, flat_numbers
from dnnc.optim.rounding import NARROW, WIDE, stochastically_rounded
from dnnc.optim.updates import Batch, Form, Plan, form_of

if TYPE_CHECKING:
    from dnnc.optim.pruning import Pruning

Loss = TypeVar("Loss")
State = dict[str, Array]
HALVES = ("master", "nearest", "stochastic")
MASTER = "master"  # the float32 copy of a half-precision parameter, in its state
MASK, CODES = "mask", "codes"  # of a pruned parameter, in its state: bool, and uint8 where weights share values
KNOWN = 512  # forms of updates that an optimizer keeps, and sets of parameters that were updated together


@dataclass
class Slot:
    """The state of one parameter in define-by-run: how often it was updated, and values by name.

    `form`: how it is updated, with the number of its group, as long as that has the options that `structure` tells.
    """

    step: int
    names: tuple[str, ...]
    values: list[Lazy]
    form: tuple[int, Form] | None = None
    structure: tuple[Any, ...] = ()

    @classmethod
    def of(cls, step: int, state: State) -> Slot:
        return cls(step, tuple(state), [a._parts[0] for a in state.values()])

    def named(self) -> Iterable[tuple[str, Lazy]]:
        return zip(self.names, self.values)

    @property
    def arrays(self) -> State:
        return {n: array_of(x) for n, x in self.named()}


class _Rule:
    """A group in one step: its number among the groups, what decides how it is computed, its numbers."""

    def __init__(
        self, index: int, group: Mapping[str, Any], structure: tuple[Any, ...], numbers: dict[str, float]
    ) -> None:
        self.index, self.group, self.structure, self.numbers = index, group, structure, numbers
        self.last: tuple[int, Form] | None = None  # of the parameter that was added last
        self._hypers: dict[int, Hyper] = {}

    def numbers_at(self, optimizer: Optimizer, step: int) -> Hyper:
        """All numbers for a parameter that was updated `step` times."""
        found = self._hypers.get(step)
        if found is None:
            found = self._hypers[step] = optimizer.hyper(self.group, self.numbers, float(step + 1))
        return found


class Optimizer(ABC):
    """Base of all optimizers.

    Args:
        params: the parameters: arrays, pairs `(name, array)`, a dict of arrays by name, or groups: dicts with `params`
            and options that differ from `defaults`. None for an optimizer of `dnnc.train_step`, where `params` of a
            group are patterns of names, such as "*.bias"; the first group that fits takes a parameter.
        defaults: options of all groups.

    Attributes:
        param_groups: a dict for each group, whose options may be changed between steps.

    Raises:
        InputError: an option is not one, a parameter is not a float array, or is in two groups.
    """

    signed: frozenset[str] = frozenset()  # options that may be negative

    def __init__(self, params: Any, defaults: Mapping[str, Any]) -> None:
        self.defaults = dict(defaults)
        self.param_groups: list[dict[str, Any]] = []
        self.schedules: list[weakref.ref[Any]] = []  # of the learning rate, whose factors multiply
        self.pruning: Pruning | None = None
        self.begun = False  # is there state already?
        self._updates = 0
        self._slots: dict[int, Slot] = {}
        self._structures: dict[int, tuple[Any, ...]] = {}  # of groups, in the last step
        self._forms: LRU[Any, Form] = LRU(KNOWN)
        self._plans: LRU[tuple[tuple[int, Form], ...], Plan] = LRU(KNOWN)
        for group in _groups(params):
            self.add_param_group(group)

    # --- the rule -----------------------------------------------------------------------------------------------------

    def init(self, param: Array, group: Mapping[str, Any]) -> State:
        """The first state of a parameter."""
        return {}

    def numbers(self, h: Hyper, group: Mapping[str, Any]) -> dict[str, Any]:
        """Further numbers for `update`, computed of those of a group and of `h.step`."""
        return {}

    @abstractmethod
    def update(self, p: Array, g: Array, s: State, h: SimpleNamespace, group: Mapping[str, Any]) -> tuple[Array, State]:
        """The next parameter and state. Whether an option is zero may be asked of `group`, its value is in `h`."""

    # --- how it is applied --------------------------------------------------------------------------------------------

    def begin(self, p: Array, group: Mapping[str, Any]) -> State:
        """The first state of a parameter; that of a half-precision one is float32, with a master by choice."""
        self.begun = True
        wide = p.astype(WIDE) if p.dtype.name in NARROW else p
        first = self.init(wide, group)
        if wide is not p and group["half"] == MASTER:
            first = {MASTER: wide, **first}
        if self.pruning is not None and p.ndim >= 2:
            first = {**first, **self.pruning.first(p)}
        return first

    def hyper(self, group: Mapping[str, Any], numbers: Mapping[str, Any], step: Any) -> Hyper:
        """All numbers of a group in step `step`, which counts from 1."""
        h = Hyper({**numbers, "step": step})
        h.numbers.update(self.numbers(h, group))
        return h

    def apply(
        self, p: Array, g: Array, s: State, at: Callable[[Any], SimpleNamespace], group: Mapping[str, Any], key: Any
    ) -> tuple[Array, State]:
        """`update` for a parameter of any precision. `key`: uint32[2] for stochastic rounding."""
        if MASK in s:
            mask, rest = s[MASK], {n: a for n, a in s.items() if n not in (MASK, CODES)}
            if CODES in s:
                g = of_clusters(g, s[CODES])
            new, states = self.apply(p, where(mask, g, zeros_like(g)), rest, at, group, key)
            return where(mask, new, zeros_like(new)), {**states, **{n: s[n] for n in (MASK, CODES) if n in s}}
        if group["maximize"]:
            g = -g
        if p.dtype.name not in NARROW:
            return self.update(p, g, s, at(p.dtype), group)
        inner = dict(s)
        wide, made = self.update(
            inner.pop(MASTER) if MASTER in s else p.astype(WIDE), g.astype(WIDE), inner, at(WIDE), group
        )
        rounded = stochastically_rounded(wide, p.dtype, key) if group["half"] == "stochastic" else wide.astype(p.dtype)
        return rounded, {MASTER: wide, **made} if MASTER in s else made

    def structure(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        """The options of a group that determine the ops of an update, not its numbers."""
        return tuple(
            (n, bool(v) if isinstance(v, (int, float)) else _form_of_option(v))
            for n, v in group.items()
            if n in self.defaults
        )

    def group_of(self, name: str) -> int:
        """The group that takes a parameter of `dnnc.train_step` by its name. InputError where none does."""
        for k, group in enumerate(self.param_groups):
            patterns = group["params"]
            if patterns and isinstance(patterns[0], str) and any(fnmatchcase(name, p) for p in patterns):
                return k
        raise InputError(
            f'no group of {type(self).__name__} takes the parameter {name}; add {{"params": "*"}} as the last one'
        )

    # --- groups -------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Take more parameters, with options of their own."""
        group = dict(param_group)
        unknown = sorted(set(group) - set(self.defaults) - {"params", "param_names", "initial_lr"})
        if unknown or "params" not in group:
            raise InputError(
                f"a group of {type(self).__name__} has params and the options {', '.join(self.defaults)}; got "
                f"{', '.join(unknown) or 'no params'}"
            )
        named = _named(group["params"])
        group["params"] = [a for _, a in named]
        if named and named[0][0] is not None:
            group["param_names"] = [n for n, _ in named]
        group = {**group, **{n: group.get(n, v) for n, v in self.defaults.items()}}
        self.check(group)
        known = {id(p) for g in self.param_groups for p in g["params"]}
        for p in group["params"]:
            if isinstance(p, Array) and id(p) in known:
                raise InputError(f"{type(self).__name__}: a parameter of shape {p.shape} is in two groups, or twice")
            known.add(id(p))
        self.param_groups.append(group)

    def check(self, group: Mapping[str, Any]) -> None:
        """InputError where an option of a group cannot be."""
        for name in self.defaults:
            value = group[name]
            numbers = value if isinstance(value, (tuple, list)) else (value,)
            if name not in self.signed and any(
                isinstance(v, (int, float)) and not isinstance(v, bool) and not v >= 0 for v in numbers
            ):
                raise InputError(f"{type(self).__name__}: {name}={value!r}, expected no negative number")
        for beta in group.get("betas", ()):
            if not 0 <= float(beta) < 1:
                raise InputError(f"{type(self).__name__}: betas={group['betas']!r}, expected numbers from 0 to below 1")
        if group["half"] not in HALVES:
            raise InputError(f"{type(self).__name__}: half={group['half']!r}, expected one of {', '.join(HALVES)}")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters, or make zeros of them."""
        for group in self.param_groups:
            for p in group["params"]:
                if isinstance(p, Array) and p.grad is not None:
                    p.grad = None if set_to_none else zeros_like(p.grad)

    # --- define-by-run ------------------------------------------------------------------------------------------------

    @overload
    def step(self) -> None: ...
    @overload
    def step(self, closure: Callable[[], Loss]) -> Loss: ...
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient, as one program with the pending computation of their gradients.

        Args:
            closure: computes the loss and the gradients anew; its result is given back.

        Raises:
            InputError: the optimizer has no arrays, or a gradient does not fit its parameter.
        """
        loss = closure() if closure is not None else None
        if not self.param_groups:
            raise InputError(f"{type(self).__name__}.step: the optimizer has no parameters")
        self._begin_all()
        batch, updated = Batch(), []
        number = 0
        for k, group in enumerate(self.param_groups):
            structure = self.structure(group)
            if structure == self._structures.get(k):
                structure = self._structures[k]  # the same object, so that each parameter is found known at once
            self._structures[k] = structure
            rule = _Rule(k, group, structure, flat_numbers(group, self.defaults))
            for p in group["params"]:
                number += 1
                if not isinstance(p, Array):
                    raise InputError(
                        f"{type(self).__name__}.step: the optimizer was made without arrays; give it some, or use "
                        "dnnc.train_step"
                    )
                if p._grad is not None:
                    updated.append((p, self._add(batch, p, rule, number)))
        if not updated:
            warnings.warn(
                f"{type(self).__name__}.step changed nothing: no parameter has a gradient; call loss.backward() first",
                DnncWarning,
                stacklevel=2,
            )
            return loss
        new = batch.values(self._plans)
        compute_results(new)
        at = 0
        for p, slot in updated:
            take(p, new[at])
            slot.step += 1
            slot.values = new[at + 1 : at + 1 + len(slot.values)]
            at += 1 + len(slot.values)
        self._updates += 1
        if self.pruning is not None:
            self.pruning.after(self._updates, self._masked, self._write_masks)
        return loss

    def _masked_slots(self) -> dict[str, tuple[Array, Slot]]:
        """Parameters with masks by name, or by the numbers of their group and place."""
        out = {}
        for k, group in enumerate(self.param_groups):
            names = group.get("param_names") or [f"{k}.{j}" for j in range(len(group["params"]))]
            for name, p in zip(names, group["params"]):
                slot = self._slots.get(id(p)) if isinstance(p, Array) else None
                if slot is not None and MASK in slot.names:
                    out[name] = p, slot
        return out

    def _masked(self) -> dict[str, Any]:
        return {n: p.numpy() for n, (p, _) in self._masked_slots().items()}

    def _write_masks(self, new: Mapping[str, tuple[Any, Any]]) -> None:
        slots = self._masked_slots()
        for name, (mask, weights) in new.items():
            p, slot = slots[name]
            at = slot.names.index(MASK)
            slot.values[at] = asarray(mask, device=p.device)._parts[0]
            take(p, asarray(weights, dtype=p.dtype, device=p.device)._parts[0])

    def _begin_all(self) -> None:
        """Compute the state of parameters that are met for the first time, so that all steps have one form."""
        new: list[Lazy] = []
        for group in self.param_groups:
            for p in group["params"]:
                if isinstance(p, Array) and p.grad is not None and id(p) not in self._slots:
                    slot = self._slots[id(p)] = Slot.of(0, self.begin(detached(p), group))
                    new += slot.values
        materialise(x for x in new if x.call is not None)

    def _add(self, batch: Batch, p: Array, rule: _Rule, number: int) -> Slot:
        """Add the update of a parameter, the `number`-th, to those of a step. InputError: its gradient does not fit."""
        assert p._grad is not None
        value, g, slot = p._parts[0], p._grad._parts[0], self._slots[id(p)]
        s, t = value.type, g.type
        if s.dtype is not t.dtype or s.shape != t.shape:
            raise InputError(
                f"{type(self).__name__}.step: a parameter is {p.dtype} of shape {p.shape}, its gradient "
                f"{p._grad.dtype} of {p._grad.shape}"
            )
        if value.call is not None:
            value = detached(p)._parts[0]
        at = slot.form
        if at is None or at[0] != rule.index or slot.structure is not rule.structure:
            at = slot.form = rule.index, self._form(p, slot, rule)
            slot.structure = rule.structure
        form = at[1]
        batch.operands += (value, g, *slot.values)
        if form.own or form.draws:
            compute = _compute_dtype(p)
            own = rule.numbers_at(self, slot.step).numbers if form.own else {}
            batch.operands += [_number(own[n], compute) for n in form.own]
            if form.draws:
                batch.operands.append(leaf(np.array([number, slot.step], np.uint32), None))
        batch.forms.append(at)
        if at is not rule.last and at not in batch.common:
            compute = _compute_dtype(p)
            batch.common[at] = [*(_number(rule.numbers[n], compute) for n in form.shared), *form.captured]
        rule.last = at
        return slot

    def _form(self, p: Array, slot: Slot, rule: _Rule) -> Form:
        """How a parameter is updated; the rule is recorded once for all of its kind."""
        key = p._parts[0].type, tuple((n, x.type) for n, x in slot.named()), rule.structure
        found = self._forms.find(key)
        if found is not None:
            return found
        before = call_number()
        h = rule.numbers_at(self, slot.step)
        numbers, own = h.numbers, {"step", *self.numbers(h, rule.group)}
        like = scalar(1.0, _compute_dtype(p))
        state = slot.arrays
        inner = [stand_in(a) for a in (p, p, *state.values(), *[like] * len(numbers), _KEY)]
        inner_state = dict(zip(state, inner[2:]))
        stand_ins = SimpleNamespace(**dict(zip(numbers, inner[2 + len(state) :])))

        def update() -> tuple[Array, ...]:
            new, states = self.apply(inner[0], inner[1], inner_state, lambda dtype: stand_ins, rule.group, inner[-1])
            return (new, *(states[n].astype(a.dtype, copy=False) for n, a in state.items()))

        recorded = record(update, (), {}, inner, before)
        made = self._forms[key] = form_of(recorded, len(state), tuple(numbers), own)
        return made

    # --- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state by numbers of parameters and the options of groups, in the form of PyTorch's."""
        order = [p for g in self.param_groups for p in g["params"]]
        state = {
            k: {"step": slot.step, **slot.arrays}
            for k, p in enumerate(order)
            if (slot := self._slots.get(id(p))) is not None
        }
        groups, first = [], 0
        for g in self.param_groups:
            last = first + len(g["params"])
            groups.append({**{n: v for n, v in g.items() if n != "params"}, "params": list(range(first, last))})
            first = last
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the state and the options of groups of a `state_dict`, of PyTorch's optimizer of this name too.

        Raises:
            InputError: groups or shapes differ, or it is no such dict; then everything is as it was.
        """
        if not isinstance(state_dict, Mapping) or not {"param_groups", "state"} <= state_dict.keys():
            names = list(state_dict)[:5] if isinstance(state_dict, Mapping) else a_type(state_dict)
            raise InputError(
                f"load_state_dict: expected the state_dict of an optimizer, with param_groups and state; got {names}"
            )
        groups, states = state_dict["param_groups"], state_dict["state"]
        sizes = [len(g["params"]) for g in groups], [len(g["params"]) for g in self.param_groups]
        if sizes[0] != sizes[1]:
            raise InputError(
                f"load_state_dict: groups of {sizes[0]} parameters, the optimizer has groups of {sizes[1]}"
            )
        numbers = [k for g in groups for k in g["params"]]
        order = [(p, g) for g in self.param_groups for p in g["params"]]
        slots = {
            id(p): self._loaded(k, p, states[k], group) for k, (p, group) in zip(numbers, order) if k in states
        }  # fmt: skip
        for own, g in zip(self.param_groups, groups):
            own.update({n: v for n, v in g.items() if n in self.defaults or n == "initial_lr"})
        self._slots = slots

    def _loaded(self, k: int, p: Array, state: Mapping[str, Any], group: Mapping[str, Any]) -> Slot:
        first = self.begin(detached(p), group)
        arrays = {}
        for name, a in first.items():
            if name not in state and name != MASTER:
                raise InputError(
                    f"load_state_dict: parameter {k} has no {name}; there {count(len(state), 'is', 'are')} "
                    f"{', '.join(map(str, state))}"
                )
            value = a if state.get(name) is None else asarray(_taken(state[name]), dtype=a.dtype, device=p.device)
            if not same_shape(value.shape, a.shape):
                raise InputError(
                    f"load_state_dict: {name} of parameter {k} has shape {value.shape}, expected {a.shape}"
                )
            arrays[name] = value
        return Slot.of(int(state["step"]) if "step" in state else 1, arrays)

    def __repr__(self) -> str:
        lines = [
            f"  group {k}: {count(len(g['params']), 'parameter')}, " + ", ".join(f"{n}={g[n]!r}" for n in self.defaults)
            for k, g in enumerate(self.param_groups)
        ]
        return "\n".join([f"{type(self).__name__}(", *lines, ")"])


_KEY = from_buffer(np.zeros(2, np.uint32), None)


def _form_of_option(value: Any) -> Any:
    """What decides the ops of an update about an option that is no number."""
    if isinstance(value, (tuple, list)):
        return tuple(v is None for v in value)
    return None if isinstance(value, Array) else value


def _number(value: float, dtype: Any) -> Lazy:
    return scalar(value, dtype)._parts[0]


def _compute_dtype(p: Array) -> Any:
    """The dtype in which a parameter is updated."""
    return WIDE if p.dtype.name in NARROW else p.dtype


def detached(x: Array) -> Array:
    """The array without its history."""
    value = x._parts[0]
    if not value.tracked:
        return x
    return Array((Lazy(value.type, data=buffer(value), device=value.device),), x.dtype)


def _groups(params: Any) -> list[dict[str, Any]]:
    """`params` of an optimizer as groups."""
    if params is None:
        return [{"params": ["*"]}]
    if isinstance(params, (Array, str)) or not isinstance(params, Iterable):
        raise InputError(
            f"params: expected arrays, pairs of a name and an array, or dicts with params, got {a_type(params)}"
        )
    given: Sequence[Any] = list(params.items()) if isinstance(params, Mapping) else list(params)
    if not given:
        raise InputError("params: the list of parameters is empty")
    return list(given) if isinstance(given[0], Mapping) else [{"params": given}]


def _named(params: Any) -> list[tuple[str | None, Any]]:
    """Parameters with their names, which all have or none has. InputError for what is no float array."""
    if isinstance(params, (Array, str)):
        params = [params]
    elif isinstance(params, Mapping):
        params = list(params.items())
    named = [p if isinstance(p, tuple) and len(p) == 2 and isinstance(p[0], str) else (None, p) for p in params]
    for _, p in named:
        if isinstance(p, str):
            continue
        if not isinstance(p, Array):
            raise InputError(f"params: expected arrays of dnnc.array, got {a_type(p)}; convert it with asarray")
        if p.dtype.kind != "f" and p.dtype.name not in NARROW:
            raise InputError(f"params: an array is {p.dtype}, expected real floats")
    if len({n is None for n, _ in named}) > 1:
        raise InputError("params: some parameters have names and others have none")
    return named


def _taken(x: Any) -> Any:
    """An array of a loaded state, of which its owner may write to the memory."""
    return x if isinstance(x, Array) else np.array(asarray(x).numpy())
