"""`dnnc.nn.utils.parametrize`: weights that are computed of other parameters, under PyTorch's names.

`layer.weight` becomes `parametrization(original)`, computed anew in each forward, with gradients to the original. The
names in state dicts are PyTorch's: `parametrizations.weight.original`, or `original0` and so on of several.
"""

from __future__ import annotations

from typing import Any, TypeVar

from dnnc.array.core import Array
from dnnc.ir.errors import InputError, a_type
from dnnc.nn.functional.operands import array
from dnnc.nn.module import PARAMETRIZATIONS, Module, Parametrized
from dnnc.nn.parameter import Parameter, overwrite

M = TypeVar("M", bound=Module)


class ParametrizationList(Module):
    """The functions that compute a weight, one after the other, and the parameters that the first of them takes."""

    def __init__(self, original: Array, first: Module) -> None:
        """InputError: `first` does not compute an array of the original's shape and dtype."""
        super().__init__()
        inverse = getattr(first, "right_inverse", None)
        values = inverse(original) if inverse is not None else original
        self._several = isinstance(values, tuple)
        names = [f"original{k}" for k in range(len(values))] if self._several else ["original"]
        for name, value in zip(names, values if self._several else (values,)):
            if value is original:
                held = original
            elif isinstance(original, Parameter):
                held = Parameter(array("right_inverse", name, value).numpy(), original.requires_grad)
            else:
                held = array("right_inverse", name, value)
            table = self.register_parameter if isinstance(held, Parameter) else self.register_buffer
            table(name, held)
        self._names = names
        self.add_module("0", first)

    def forward(self) -> Array:
        value = self._modules["0"](*(getattr(self, n) for n in self._names))  # type: ignore[misc]
        for name, m in self._modules.items():
            if name != "0":
                value = m(value)  # type: ignore[misc]
        return value  # type: ignore[no-any-return]

    def append(self, parametrization: Module) -> None:
        self.add_module(str(len(self._modules)), parametrization)

    def assign(self, value: Any) -> None:
        """Let the weight be `value`. InputError: a parametrization has no `right_inverse`."""
        for m in reversed(list(self._modules.values())):
            inverse = getattr(m, "right_inverse", None)
            if inverse is None:
                raise InputError(
                    f"{type(m).__name__} has no right_inverse, so its result cannot be assigned; write one, or assign "
                    "to the original"
                )
            value = inverse(value)
        for name, new in zip(self._names, value if self._several else (value,)):
            old: Array = getattr(self, name)
            new = array("right_inverse", name, new)
            if new.shape != old.shape:
                raise InputError(f"right_inverse: {name} has shape {new.shape}, expected {old.shape}")
            overwrite(old, new.astype(old.dtype))


def register_parametrization(module: M, tensor_name: str, parametrization: Module, *, unsafe: bool = False) -> M:
    """Let a parameter or buffer of a module be computed by `parametrization`, in place.

    Args:
        module: that has it.
        tensor_name: of the parameter or buffer, such as "weight".
        parametrization: its `forward` takes the original, and gives what the module sees. With a method
            `right_inverse` of the present value the original is its result, or several are, if that is a tuple. A
            second parametrization of one name takes the result of the first.
        unsafe: may the result have another shape or dtype?

    Raises:
        InputError: there is no such parameter, or the result has another shape or dtype; nothing is changed then.
    """
    if not isinstance(parametrization, Module):
        raise InputError(f"register_parametrization: expected a Module, got {a_type(parametrization)}")
    known = is_parametrized(module, tensor_name)
    table = next((t for t in (module._parameters, module._buffers) if t.get(tensor_name) is not None), None)
    if not known and table is None:
        names = ", ".join([*module._parameters, *module._buffers]) or "none"
        raise InputError(
            f"register_parametrization: {type(module).__name__} has no {tensor_name!r}; its parameters and buffers: "
            f"{names}"
        )
    before = getattr(module, tensor_name)
    parametrization.train(module.training)
    made = ParametrizationList(before, parametrization) if not known else None
    after = made() if made is not None else parametrization(before)
    if not isinstance(after, Array) or (not unsafe and (after.shape, after.dtype) != (before.shape, before.dtype)):
        got = f"{after.dtype} of shape {after.shape}" if isinstance(after, Array) else a_type(after)
        raise InputError(
            f"register_parametrization: {type(parametrization).__name__} makes {got} of {tensor_name}, which is "
            f"{before.dtype} of shape {before.shape}; pass unsafe=True if that is meant"
        )
    if made is None:
        _lists(module)[tensor_name].append(parametrization)
        return module
    module._forget(tensor_name)
    if PARAMETRIZATIONS not in module._modules:
        module.add_module(PARAMETRIZATIONS, Parametrized())
    module._modules[PARAMETRIZATIONS].add_module(tensor_name, made)  # type: ignore[union-attr]
    return module


def computed(module: Module, tensor_name: str) -> Any:
    """The ParametrizationList that computes a weight; None where it is none."""
    return _lists(module).get(tensor_name)


def computed_names(module: Module) -> list[str]:
    """The weights of a module that are computed."""
    return list(_lists(module))


def is_parametrized(module: Module, tensor_name: str | None = None) -> bool:
    """Is a parameter or buffer of the module computed? `tensor_name` None: is one of them?"""
    lists = _lists(module)
    return bool(lists) if tensor_name is None else tensor_name in lists


def remove_parametrizations(module: M, tensor_name: str, leave_parametrized: bool = True) -> M:
    """Make a computed weight a parameter again, in place.

    Args:
        leave_parametrized: keep its present value, else the original, of which there must be one.

    Raises:
        InputError: it is not computed, or there are several originals to leave.
    """
    lists = _lists(module)
    if tensor_name not in lists:
        raise InputError(f"remove_parametrizations: {tensor_name!r} of {type(module).__name__} has no parametrization")
    held: Any = lists[tensor_name]
    originals = [getattr(held, n) for n in held._names]
    if not leave_parametrized and len(originals) > 1:
        raise InputError(f"remove_parametrizations: {tensor_name} has more than one original: leave its value")
    first = originals[0]
    if leave_parametrized:
        value = held()
        if len(originals) > 1:
            first = Parameter(value.numpy(), first.requires_grad) if isinstance(first, Parameter) else value
        else:
            overwrite(first, value)
    holder = module._modules[PARAMETRIZATIONS]
    assert holder is not None
    del holder._modules[tensor_name]
    if not holder._modules:
        del module._modules[PARAMETRIZATIONS]
    add = module.register_parameter if isinstance(first, Parameter) else module.register_buffer
    add(tensor_name, first)
    return module


def _lists(module: Module) -> dict[str, Any]:
    holder = module._modules.get(PARAMETRIZATIONS)
    return {} if holder is None else holder._modules
