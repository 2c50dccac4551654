"""`functional_call`: a module as a pure function of its parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from threading import RLock
from typing import Any, Literal, overload

from dnnc import random
from dnnc.array.core import Array
from dnnc.ir.errors import InputError, a_type
from dnnc.nn.functional.norms import fresh_statistics
from dnnc.nn.module import Forward, Module, Result, taken


@overload
def functional_call(
    module: Forward[Result],
    params_and_buffers: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *args: Any,
    rngs: Any = None,
    return_buffers: Literal[False] = False,
    **kwargs: Any,
) -> Result: ...
@overload
def functional_call(
    module: Forward[Result],
    params_and_buffers: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *args: Any,
    rngs: Any = None,
    return_buffers: Literal[True],
    **kwargs: Any,
) -> tuple[Result, dict[str, Array]]: ...
def functional_call(
    module: Any,
    params_and_buffers: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *args: Any,
    rngs: Any = None,
    return_buffers: bool = False,
    **kwargs: Any,
) -> Any:
    """Call a module with other parameters and buffers. The module itself stays as it is, its buffers included.

    Concurrent calls are serialized.

    Args:
        params_and_buffers: arrays by the paths of `named_parameters` and `named_buffers`, or several such dicts.
            Missing names stand for the module's own arrays. A parameter that modules share needs one of its names.
        *args, **kwargs: what `forward` takes.
        rngs: a key of `dnnc.random`; draws of the call (dropout) take keys folded from it.
        return_buffers: give `(result, buffers)`, with the buffers as the call has left them, by their paths.

    Raises:
        InputError: a name is not the module's, two names of a shared parameter are given, or a shape differs.
    """
    if not isinstance(module, Module):
        raise InputError(f"functional_call: expected a Module, got {a_type(module)}")
    given: dict[str, Any] = {}
    for part in [params_and_buffers] if isinstance(params_and_buffers, Mapping) else params_and_buffers:
        given.update(part)
    with _ALONE, ExitStack() as around:
        if rngs is not None:
            around.enter_context(random.stream(rngs))
        around.enter_context(fresh_statistics())
        buffers = around.enter_context(_replaced(module, given))
        made = module(*args, **kwargs)
        return (made, {n: table[name] for n, (table, name) in buffers.items()}) if return_buffers else made


_ALONE = RLock()  # a module holds the arrays of one call at a time
Place = tuple[dict[str, Any], str]  # a module's table, and a name in it


@contextmanager
def _replaced(module: Module, given: Mapping[str, Any]) -> Iterator[dict[str, Place]]:
    """Within it, the module holds the given arrays, and handles of its own for all buffers; gives their places."""
    places: dict[str, Place] = {}
    buffers: dict[str, Place] = {}
    for path, m in module.named_modules(remove_duplicate=False):
        for table in (m._parameters, m._buffers):
            for name, x in table.items():
                if x is not None:
                    places[f"{path}.{name}" if path else name] = table, name
                    if table is m._buffers:
                        buffers[f"{path}.{name}" if path else name] = table, name
    unknown = [n for n in given if n not in places]
    if unknown:
        raise InputError(
            f"functional_call: {type(module).__name__} has no {', '.join(unknown[:5])}; its names are "
            f"{', '.join([*places][:20])}{' ...' if len(places) > 20 else ''}"
        )
    new = _by_array(places, given)
    before = [(table, name, table[name]) for table, name in places.values()]
    handles: dict[int, Any] = {}
    try:
        for path, (table, name) in places.items():
            x = table[name]
            value: Any = new.get(id(x), x)
            if path in buffers:
                value = handles.setdefault(id(x), Array(value._parts, value.dtype))
            handles.setdefault(id(value), value)
            table[name] = value
        yield buffers
    finally:
        for table, name, x in before:
            table[name] = x


def _by_array(places: Mapping[str, Place], given: Mapping[str, Any]) -> dict[int, Array]:
    """The new array of each old one. InputError where shapes differ, or one gets two."""
    new: dict[int, Array] = {}
    names: dict[int, str] = {}
    for path, value in given.items():
        table, name = places[path]
        old = table[name]
        a = value if isinstance(value, Array) else taken(value, f"functional_call: {path}")
        if len(a.shape) != len(old.shape) or any(m != n for m, n in zip(a.shape, old.shape)):
            raise InputError(f"functional_call: {path} has shape {a.shape}, expected {old.shape}")
        if id(old) in new and new[id(old)] is not a:
            raise InputError(f"functional_call: {names[id(old)]} and {path} are one array, and two are given")
        new[id(old)], names[id(old)] = a, path
    return new
