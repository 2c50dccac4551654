"""Modules: parameters, buffers and modules by the names of the attributes that hold them, as in PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from dnnc.array.core import Array, moved
from dnnc.array.creation import asarray
from dnnc.array.devices import device_name
from dnnc.array.lazy import materialise
from dnnc.array.promotion import dtype_of, kind_of
from dnnc.frontends.trace.tracer import tracing
from dnnc.ir.errors import DnncError, InputError, a_type
from dnnc.nn.parameter import Parameter, overwrite, snapshot

M = TypeVar("M", bound="Module")
Result = TypeVar("Result", covariant=True)


class Forward(Protocol[Result]):
    """A module, for type checkers: a call gives what `forward` gives."""

    @property
    def forward(self) -> Callable[..., Result]: ...


class IncompatibleKeys(NamedTuple):
    """Names that a state dict lacks, and those that it has beyond the module's."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Handle:
    """What takes a hook away again."""

    counted = itertools.count()

    def __init__(self, hooks: dict[int, Any], hook: Callable[..., Any]) -> None:
        self._hooks, self._number = hooks, next(self.counted)
        hooks[self._number] = hook

    def remove(self) -> None:
        self._hooks.pop(self._number, None)


PARAMETRIZATIONS = "parametrizations"  # the module that has, by their names, what computes weights of another one


class Module:
    """Base of all layers and models: write `__init__`, which makes the parts, and `forward`."""

    training: bool
    stores_few = False  # may `nn.utils.to_sparse` let its weights be computed of few values?
    _parameters: dict[str, Array | None]
    _buffers: dict[str, Array | None]
    _modules: dict[str, Module | None]
    _transient: set[str]
    _hooks: dict[int, Callable[..., Any]]
    _pre_hooks: dict[int, Callable[..., Any]]

    def __init__(self) -> None:
        for name in ("_parameters", "_buffers", "_modules", "_hooks", "_pre_hooks"):
            object.__setattr__(self, name, {})
        object.__setattr__(self, "_transient", set())  # buffers that no state dict holds
        object.__setattr__(self, "training", True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise InputError(f"{type(self).__name__} has no method forward")

    def __call__(self: Forward[Result], *args: Any, **kwargs: Any) -> Result:
        module: Any = self
        if tracing():
            module._settle()
        hooks = module._tables("_pre_hooks")
        for hook in tuple(hooks.values()) if hooks else ():
            given = hook(module, args)
            if given is not None:
                args = given if isinstance(given, tuple) else (given,)
        made = self.forward(*args, **kwargs)
        for hook in tuple(module._hooks.values()) if module._hooks else ():
            other = hook(module, args, made)
            made = made if other is None else other
        return made

    def _settle(self) -> None:
        """Compute parameters and buffers that are not: a trace shall hold their contents, not the draw of each."""
        parts = {id(p): p for a in (*self.parameters(), *self.buffers()) for p in a._parts}
        materialise([p for p in parts.values() if p.data is None and not p.traced])

    # --- attributes ---------------------------------------------------------------------------------------------------

    def _tables(self, name: str) -> dict[Any, Any]:
        found = self.__dict__.get(name)
        if found is None:
            raise InputError(f"{type(self).__name__}: call super().__init__() before assigning parameters or modules")
        return found  # type: ignore[no-any-return]

    def __setattr__(self, name: str, value: Any) -> None:
        computed = self.__dict__.get("_modules", {}).get(PARAMETRIZATIONS)
        if computed is not None and name in computed._modules:
            computed._modules[name].assign(value)
            return
        kinds = {"_parameters": Parameter, "_modules": Module}
        for table, kind in kinds.items():
            if isinstance(value, kind):
                own = self._tables(table)
                self._forget(name, but=table)
                own[name] = value
                return
        held = {"_parameters": "a Parameter", "_modules": "a Module", "_buffers": "an array"}
        for table, what in held.items():
            own = self.__dict__.get(table, {})
            if name not in own:
                continue
            if value is not None and not (table == "_buffers" and isinstance(value, Array)):
                raise InputError(f"{type(self).__name__}.{name} is {what}: expected one or None, got {a_type(value)}")
            own[name] = value
            return
        object.__setattr__(self, name, value)

    def _forget(self, name: str, but: str = "") -> None:
        """Take a name out of all tables but one, where it keeps its place."""
        self.__dict__.pop(name, None)
        for table in ("_parameters", "_buffers", "_modules"):
            if table != but:
                self.__dict__[table].pop(name, None)
        self._transient.discard(name)

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        if "_parameters" in own:  # else __init__ has not run
            if name in (held := own["_parameters"]) or name in (held := own["_modules"]):
                return held[name]
            if name in (held := own["_buffers"]):
                return held[name]
            computed = own["_modules"].get(PARAMETRIZATIONS)
            if computed is not None and name in computed._modules:
                return computed._modules[name]()
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __delattr__(self, name: str) -> None:
        if any(name in self.__dict__[t] for t in ("_parameters", "_buffers", "_modules")):
            self._forget(name)
        else:
            object.__delattr__(self, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._parameters, *self._buffers, *self._modules})

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        """Add a parameter, or None for one that is left out."""
        self._named(name, param, Parameter)
        self._tables("_parameters")[name] = param

    def register_buffer(self, name: str, tensor: Any, persistent: bool = True) -> None:
        """Add an array that is part of the state but is not learnt; `persistent`: is it in state dicts?"""
        a = tensor if tensor is None or isinstance(tensor, Array) else asarray(tensor)
        self._named(name, a, Array)
        self._tables("_buffers")[name] = a
        if not persistent:
            self._transient.add(name)

    def add_module(self, name: str, module: Module | None) -> None:
        """Add a module under a name, which may be a number."""
        self._named(name, module, Module)
        self._tables("_modules")[name] = module

    register_module = add_module

    def _named(self, name: str, value: Any, kind: type) -> None:
        what = type(self).__name__
        if not isinstance(name, str) or not name or "." in name:
            raise InputError(f"{what}: {name!r} is no name: expected a text without dots")
        if value is not None and not isinstance(value, kind):
            raise InputError(f"{what}.{name}: expected {a_type(object.__new__(kind))} or None, got {a_type(value)}")
        self._tables("_parameters")
        if name in self.__dict__ or hasattr(type(self), name):
            raise InputError(f"{what} has an attribute {name!r} already")
        self._forget(name)

    # --- what it holds ------------------------------------------------------------------------------------------------

    def named_modules(self, prefix: str = "", remove_duplicate: bool = True) -> Iterator[tuple[str, Module]]:
        """This module and all below, each once, with the paths of their names (`encoder.layers.0`)."""
        yield from self._walk(prefix, set() if remove_duplicate else None)

    def _walk(self, prefix: str, seen: set[int] | None) -> Iterator[tuple[str, Module]]:
        if seen is not None:
            if id(self) in seen:
                return
            seen.add(id(self))
        yield prefix, self
        for name, m in self._modules.items():
            if m is not None:
                yield from m._walk(f"{prefix}.{name}" if prefix else name, seen)

    def _members(self, table: str, prefix: str, recurse: bool, once: bool) -> Iterator[tuple[str, Array]]:
        seen: set[int] = set()
        for path, m in self.named_modules(prefix, once) if recurse else [(prefix, self)]:
            for name, x in m.__dict__[table].items():
                if x is None or (once and id(x) in seen):
                    continue
                seen.add(id(x))
                yield (f"{path}.{name}" if path else name), x

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """The parameters with the paths of their names; one that several modules share comes once, at the first."""
        return self._members("_parameters", prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Array]]:
        """The buffers with the paths of their names."""
        return self._members("_buffers", prefix, recurse, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """The modules directly below, each once, with their names."""
        seen: set[int] = set()
        for name, m in self._modules.items():
            if m is not None and id(m) not in seen:
                seen.add(id(m))
                yield name, m

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        return (x for _, x in self.named_parameters(recurse=recurse))

    def buffers(self, recurse: bool = True) -> Iterator[Array]:
        return (x for _, x in self.named_buffers(recurse=recurse))

    def modules(self) -> Iterator[Module]:
        return (m for _, m in self.named_modules())

    def children(self) -> Iterator[Module]:
        return (m for _, m in self.named_children())

    def get_submodule(self, target: str) -> Module:
        """The module of a path (`encoder.layers.0`). AttributeError where there is none."""
        m: Module = self
        for name in target.split(".") if target else ():
            found = m._modules.get(name)
            if found is None:
                raise AttributeError(f"{type(m).__name__} has no module {name!r} (of the path {target!r})")
            m = found
        return m

    def get_parameter(self, target: str) -> Any:
        """The parameter of a path. AttributeError where there is none."""
        path, _, name = target.rpartition(".")
        found = self.get_submodule(path)._parameters.get(name)
        if found is None:
            raise AttributeError(f"{type(self).__name__} has no parameter {target!r}")
        return found

    def get_buffer(self, target: str) -> Array:
        """The buffer of a path. AttributeError where there is none."""
        path, _, name = target.rpartition(".")
        found = self.get_submodule(path)._buffers.get(name)
        if found is None:
            raise AttributeError(f"{type(self).__name__} has no buffer {target!r}")
        return found

    # --- state --------------------------------------------------------------------------------------------------------

    def _state(self) -> Iterator[tuple[str, Array]]:
        for path, m in self.named_modules(remove_duplicate=False):
            for table in ("_parameters", "_buffers"):
                for name, x in m.__dict__[table].items():
                    if x is not None and not (table == "_buffers" and name in m._transient):
                        yield (f"{path}.{name}" if path else name), x

    def state_dict(self, prefix: str = "") -> dict[str, Array]:
        """Parameters and persistent buffers by their paths, as arrays that later updates leave as they are."""
        return {prefix + name: snapshot(x) for name, x in self._state()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> IncompatibleKeys:
        """Take parameters and buffers from arrays, NumPy arrays or tensors, in the dtypes that the module has.

        Args:
            state_dict: arrays by their paths, of this module or of PyTorch's module of the same structure.
            strict: may no name be missing, and none be there beyond the module's?

        Raises:
            InputError: names or shapes differ; nothing is changed then.
        """
        if not isinstance(state_dict, Mapping):
            raise InputError(f"load_state_dict: expected a dict of arrays, got {a_type(state_dict)}")
        own = dict(self._state())
        missing = [n for n in own if n not in state_dict]
        unexpected = [n for n in state_dict if n not in own]
        wrong = []
        new = {}
        for name, x in own.items():
            if name not in state_dict:
                continue
            a = taken(state_dict[name], f"load_state_dict: {name}")
            if a.shape != x.shape:
                wrong.append(f"{name} has shape {a.shape}, expected {x.shape}")
            new[name] = a
        if strict:
            wrong += [f"{n} is missing" for n in missing] + [f"there is no {n}" for n in unexpected]
        if wrong:
            shown = "; ".join(wrong[:20]) + (f"; and {len(wrong) - 20} more" if len(wrong) > 20 else "")
            hint = _prefix_hint(missing, unexpected)
            raise InputError(f"load_state_dict of {type(self).__name__}: {hint}{shown}")
        for name, a in new.items():
            overwrite(own[name], moved(a, own[name].device).astype(own[name].dtype))
        return IncompatibleKeys(missing, unexpected)

    # --- modes, types, devices ----------------------------------------------------------------------------------------

    def train(self: M, mode: bool = True) -> M:
        """Set training mode here and in all modules below: batch statistics and dropout."""
        for m in self.modules():
            m.training = bool(mode)
        return self

    def eval(self: M) -> M:
        return self.train(False)

    def requires_grad_(self: M, requires_grad: bool = True, names: str | Sequence[str] | None = None) -> M:
        """Let parameters require a gradient, or not.

        Args:
            names: patterns (`layer1.*`, `*bias`) of the names of `named_parameters`; all by default.

        Raises:
            InputError: a pattern fits no parameter.
        """
        own = dict(self.named_parameters())
        patterns = [names] if isinstance(names, str) else names
        for n in own if patterns is None else chosen(own, patterns, "requires_grad_"):
            own[n].requires_grad = requires_grad
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters, or make them zeros."""
        for p in self.parameters():
            p.grad = None if set_to_none or p.grad is None else p.grad * 0

    def apply(self: M, fn: Callable[[Module], Any]) -> M:
        """Call `fn` for each module, those below first."""
        for child in self.children():
            child.apply(fn)
        fn(self)
        return self

    def to(self: M, *args: Any, dtype: Any = None, device: Any = None) -> M:
        """Convert float parameters and buffers to a dtype, and bring all to a device; in place.

        Args:
            *args: a dtype (`dnnc.array.float16`, "float16"), a device ("cuda:0"), or both.
        """
        for a in args:
            text = isinstance(a, str) and a.partition(":")[0] in ("cpu", "cuda")
            device, dtype = (a, dtype) if text else (device, a)
        wanted = None if dtype is None else dtype_of(dtype)
        if wanted is not None and kind_of(wanted) != "f":
            raise InputError(f"{type(self).__name__}.to: expected a float dtype, got {wanted}")
        place = None if device is None else device_name(device)
        for x in itertools.chain(self.parameters(), self.buffers()):
            new = snapshot(x)
            new = new if wanted is None or kind_of(x.dtype) != "f" else new.astype(wanted)
            overwrite(x, new if place is None else moved(new, place))
        return self

    def float(self: M) -> M:
        return self.to(np.float32)

    def double(self: M) -> M:
        return self.to(np.float64)

    def half(self: M) -> M:
        return self.to(np.float16)

    def bfloat16(self: M) -> M:
        return self.to("bfloat16")

    def cuda(self: M, device: int = 0) -> M:
        return self.to(device=f"cuda:{device}")

    def cpu(self: M) -> M:
        return self.to(device="cpu")

    # --- hooks --------------------------------------------------------------------------------------------------------

    def register_forward_hook(self, hook: Callable[..., Any]) -> Handle:
        """Call `hook(module, args, result)` after each forward; a result other than None replaces the output."""
        return Handle(self._hooks, hook)

    def register_forward_pre_hook(self, hook: Callable[..., Any]) -> Handle:
        """Call `hook(module, args)` before each forward; a result other than None replaces the arguments."""
        return Handle(self._pre_hooks, hook)

    # --- as text ------------------------------------------------------------------------------------------------------

    def extra_repr(self) -> str:
        """Text between the brackets of a layer's repr."""
        return ""

    def __repr__(self) -> str:
        extra = self.extra_repr()
        lines = extra.split("\n") if extra else []
        for name, m in self._modules.items():
            first, *rest = repr(m).split("\n")
            lines += [f"({name}): {first}", *rest]
        if not self._modules and len(lines) < 2:
            return f"{type(self).__name__}({extra})"
        return "\n".join([f"{type(self).__name__}(", *(f"  {line}" for line in lines), ")"])


class Parametrized(Module):
    """What computes weights of a module, by their names; see `dnnc.nn.utils.parametrize`."""


def chosen(names: Iterable[str], patterns: Sequence[str], what: str) -> list[str]:
    """The names that fit one of the patterns. InputError: a pattern fits none."""
    known = list(names)
    for p in patterns:
        if not any(fnmatchcase(n, p) for n in known):
            shown = ", ".join(known[:20]) + (" ..." if len(known) > 20 else "")
            raise InputError(f"{what}: no parameter fits {p!r}; there are {shown or 'none'}")
    return [n for n in known if any(fnmatchcase(n, p) for p in patterns)]


def replaced(module: M, new: Mapping[int, Module]) -> M:
    """A module with other ones for some, by identity: in every place where those stand, in their modes."""
    for m in list(module.modules()):
        for name, child in m._modules.items():
            if id(child) in new and child is not None:
                m._modules[name] = new[id(child)].train(child.training)
    return new.get(id(module), module)  # type: ignore[return-value]


def _prefix_hint(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """What to do about names that stand below another name, such as those of a wrapped module or a whole checkpoint."""
    behind = f".{missing[0]}" if missing else ""
    found = next((n for n in unexpected if behind and isinstance(n, str) and n.endswith(behind)), None)
    if found is not None:
        prefix = found.removesuffix(missing[0])
        cure = f"{{n[{len(prefix)}:]: a for n, a in d.items() if n.startswith({prefix!r})}}"
        return f"names begin with {prefix!r}: take {cure}; "
    return ""


def free_name(module: Module, name: str) -> str:
    """The name, or one beside an attribute that modules have."""
    return f"{name}_" if hasattr(type(module), name) or name in vars(module) else name


def taken(x: Any, what: str) -> Array:
    """An array of any library, PyTorch's parameters included, as one of ours. InputError where that cannot be."""
    if not isinstance(x, Array) and hasattr(x, "detach"):
        x = x.detach()
    if isinstance(x, Array):
        return snapshot(x)
    try:
        if str(getattr(x, "dtype", "")) == "torch.bfloat16":
            return asarray(x.float()).astype("bfloat16")
        return asarray(x)
    except (DnncError, BufferError, TypeError, ValueError, RuntimeError) as e:
        raise InputError(f"{what}: {a_type(x)} does not become an array: {e}; convert it to float32 first") from e
