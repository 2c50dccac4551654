"""Modules that hold modules: in a row, in a list, in a dict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar, overload

from dnnc.array.core import Array
from dnnc.ir.errors import InputError, a_type
from dnnc.nn.module import Module
from dnnc.nn.parameter import Parameter

M = TypeVar("M", bound=Module)
L = TypeVar("L", bound="_Listed[Any]")


class _Listed(Module, Generic[M]):
    """Modules by their numbers."""

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[M]:
        return iter(list(self._modules.values()))  # type: ignore[arg-type]

    @overload
    def __getitem__(self, index: int) -> M: ...

    @overload
    def __getitem__(self: L, index: slice) -> L: ...

    def __getitem__(self, index: int | slice) -> Any:
        held = list(self._modules.values())
        return self._of(held[index]) if isinstance(index, slice) else held[index]

    _of: Callable[[list[Any]], Any]  # a container of the same kind

    def __setitem__(self, index: int, module: M) -> None:
        if not isinstance(module, Module):
            raise InputError(f"{type(self).__name__}[{index}]: expected a Module, got {a_type(module)}")
        self._modules[list(self._modules)[index]] = module

    def __delitem__(self, index: int | slice) -> None:
        held = list(self._modules.values())
        del held[index]
        self._modules.clear()
        self._modules.update({str(k): m for k, m in enumerate(held)})

    def append(self: L, module: Module) -> L:
        self.add_module(str(len(self)), module)
        return self

    def extend(self: L, modules: Iterable[Module]) -> L:
        for m in modules:
            self.append(m)
        return self

    def insert(self, index: int, module: Module) -> None:
        held = list(self._modules.values())
        held.insert(index, module)
        self._modules.clear()
        self.extend(m for m in held if m is not None)


class Sequential(_Listed[Any]):
    """Modules one after the other, by position, or by the names of a dict."""

    def __init__(self, *args: Any) -> None:
        super().__init__()
        named = len(args) == 1 and isinstance(args[0], Mapping)
        for name, m in args[0].items() if named else ((str(k), m) for k, m in enumerate(args)):
            self.add_module(name, m)

    @staticmethod
    def _of(modules: list[Any]) -> Any:
        return Sequential(*modules)

    def forward(self, input: Any) -> Array:
        for m in self:
            input = m(input)
        return input  # type: ignore[no-any-return]


class ModuleList(_Listed[M]):
    """A list of modules."""

    def __init__(self, modules: Iterable[M] = ()) -> None:
        super().__init__()
        self.extend(modules)

    @staticmethod
    def _of(modules: list[Any]) -> Any:
        return ModuleList(modules)

    def __iadd__(self: L, modules: Iterable[Module]) -> L:
        return self.extend(modules)


class ModuleDict(Module, Generic[M]):
    """A dict of modules."""

    def __init__(self, modules: Mapping[str, M] | None = None) -> None:
        super().__init__()
        self.update(modules or {})

    def update(self, modules: Mapping[str, M]) -> None:
        for name, m in modules.items():
            self[name] = m

    def __getitem__(self, name: str) -> M:
        return self._modules[name]  # type: ignore[return-value]

    def __setitem__(self, name: str, module: M) -> None:
        self._modules.pop(name, None)
        self.add_module(name, module)

    def __delitem__(self, name: str) -> None:
        del self._modules[name]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._modules))

    def __contains__(self, name: str) -> bool:
        return name in self._modules

    def keys(self) -> Iterable[str]:
        return self._modules.keys()

    def values(self) -> Iterable[M]:
        return self._modules.values()  # type: ignore[return-value]

    def items(self) -> Iterable[tuple[str, M]]:
        return self._modules.items()  # type: ignore[return-value]


class ParameterList(Module):
    """A list of parameters."""

    def __init__(self, values: Iterable[Any] = ()) -> None:
        super().__init__()
        for v in values:
            self.append(v)

    def append(self, value: Any) -> ParameterList:
        own = value if isinstance(value, Parameter) else Parameter(value)
        self.register_parameter(str(len(self)), own)
        return self

    def __len__(self) -> int:
        return len(self._parameters)

    def __iter__(self) -> Iterator[Parameter]:
        return iter(list(self._parameters.values()))  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Parameter:
        return list(self._parameters.values())[index]  # type: ignore[return-value]


class ParameterDict(Module):
    """A dict of parameters."""

    def __init__(self, parameters: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        for name, v in (parameters or {}).items():
            self[name] = v

    def __getitem__(self, name: str) -> Parameter:
        return self._parameters[name]  # type: ignore[return-value]

    def __setitem__(self, name: str, value: Any) -> None:
        self._parameters.pop(name, None)
        self.register_parameter(name, value if isinstance(value, Parameter) else Parameter(value))

    def __len__(self) -> int:
        return len(self._parameters)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._parameters))

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def keys(self) -> Iterable[str]:
        return self._parameters.keys()

    def values(self) -> Iterable[Parameter]:
        return self._parameters.values()  # type: ignore[return-value]

    def items(self) -> Iterable[tuple[str, Parameter]]:
        return self._parameters.items()  # type: ignore[return-value]
