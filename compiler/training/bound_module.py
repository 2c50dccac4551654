"""A module whose parameters and buffers live in a training state: what its arrays are, and calls with others in place.

A module is anything with `named_parameters()` and `named_buffers()`. Its arrays are handles: while a loss function is
traced they stand for the program's values, and between steps for what the state holds then, fetched when somebody
looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dnnc.array.core import Array, gradients
from dnnc.array.lazy import Lazy
from dnnc.ir.errors import InputError, a_type

Arrays = dict[str, Array]


def is_module(x: Any) -> bool:
    return hasattr(x, "named_parameters") and hasattr(x, "named_buffers")


class BoundModule:
    """A module and its arrays, by name; parameters that do not require a gradient count as buffers."""

    def __init__(self, module: Any) -> None:
        self.module = module
        named = dict(module.named_parameters())
        for name, a in named.items():
            if not isinstance(a, Array):
                raise InputError(f"train_step: parameter {name} of the module is {a_type(a)}, expected an array")
        self.parameters: Arrays = {n: a for n, a in named.items() if a.requires_grad}
        self.buffers: Arrays = {n: a for n, a in named.items() if not a.requires_grad}
        self.buffers.update((n, a) for n, a in module.named_buffers() if isinstance(a, Array))
        if not self.parameters:
            raise InputError("train_step: no parameter of the module requires a gradient")

    def call(
        self,
        loss_fn: Callable[..., Any],
        values: Mapping[str, Array],
        buffers: Mapping[str, Array],
        batch: Sequence[Any],
        named: Mapping[str, Any],
    ) -> tuple[Any, Arrays]:
        """`loss_fn(module, *batch)` with these values in the place of the module's; the result, and new buffers."""
        handles = {**self.parameters, **self.buffers}
        inside = {**values, **buffers}
        before = {n: (a._parts, a._pairs) for n, a in handles.items()}
        try:
            for n, a in handles.items():
                a._parts, a._pairs = inside[n]._parts, None
            made = loss_fn(self.module, *batch, **named)
            return made, {n: Array(a._parts, a.dtype) for n, a in self.buffers.items()}
        finally:
            for n, a in handles.items():
                a._parts, a._pairs = before[n]
            self._check()

    def _check(self) -> None:
        now = dict(self.module.named_buffers())
        for name, a in self.buffers.items():
            if now.get(name, a) is not a:
                raise InputError(
                    f"train_step: the loss function replaced the buffer {name}; let the module write into it, "
                    f"such as self.{name.split('.')[-1]}[...] = value"
                )


class Held:
    """Stands for the value of an array that a training state holds: who looks gets it, and the state takes a copy.

    Attributes:
        parts: what the array was given when somebody looked; it has others once somebody wrote into it.
    """

    def __init__(self, owner: Array, fetch: Callable[[], Lazy], requires_grad: bool) -> None:
        self.owner, self._fetch, self._requires_grad = owner, fetch, requires_grad
        self.parts: tuple[Lazy, ...] | None = None

    @property
    def written(self) -> bool:
        """Did somebody write into the array since it was given its value?"""
        return self.parts is not None and self.owner._parts is not self.parts

    def _value(self) -> tuple[Lazy, ...]:
        owner = self.owner
        owner._set((self._fetch(),))
        if self._requires_grad:
            gradients().begin(owner)
        self.parts = owner._parts
        return self.parts

    def __len__(self) -> int:
        return 1

    def __getitem__(self, k: Any) -> Any:
        return self._value()[k]

    def __iter__(self) -> Iterator[Lazy]:
        return iter(self._value())
