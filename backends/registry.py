"""Finds backends by a target's first word: dnnc's, and packages' by entry points of group "dnnc.backends"."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Union

from dnnc.ir.errors import TargetError
from dnnc.ir.target import Target, parse_target

GROUP = "dnnc.backends"
# Classes by "module:name", so that nothing is imported for a target that is not used.
BACKENDS: dict[str, Union[str, Any]] = {
    "llvm": "dnnc.backends.llvm.backend:LlvmBackend",
    "cuda": "dnnc.backends.cuda.backend:CudaBackend",
    "cuda-interpreted": "dnnc.backends.cuda.interpreted:InterpretedBackend",
    "reference": "dnnc.backends.reference.backend:ReferenceBackend",
}


@cache
def _registered() -> dict[str, str]:
    """Entry points of installed packages; reading them takes milliseconds."""
    return {e.name: e.value for e in entry_points(group=GROUP)}


def names() -> list[str]:
    """Names of all backends."""
    return list(dict.fromkeys([*BACKENDS, *_registered()]))


def _factory(name: str) -> Any:
    """What makes a backend: its class, or a function that a test has put in its place."""
    found = BACKENDS.get(name) or _registered().get(name)
    if found is None:
        raise TargetError(
            f"target={name!r}: there is no such backend; expected {', '.join(names())} first. `dnnc targets` says what "
            "this machine has"
        )
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        try:
            return getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as e:
            raise TargetError(f"target={name!r}: its backend {found} cannot be loaded: {e}") from e
    return found


def backend_class(name: str) -> Any:
    """The class of a backend. TargetError lists what there is."""
    factory = _factory(name)
    return getattr(factory, "func", factory)


def availability(name: str) -> dict[str, Any]:
    """Whether this machine can use a backend, and why not; see `Backend.availability`."""
    try:
        found: dict[str, Any] = backend_class(name).availability()
    except TargetError as e:
        return {"name": name, "available": False, "reason": str(e)}
    return found


def check_target(target: str | Target) -> Target:
    """The target, parsed. TargetError: there is no such backend, or it has no devices with numbers."""
    parsed = parse_target(target)
    if parsed.device and not backend_class(parsed.kind).numbered:
        raise TargetError(f"target={str(target)!r}: {parsed.kind} has no device numbers; one is written cuda:1")
    backend_class(parsed.kind)
    return parsed


def open_backend(target: str | Target, threads: int | None = None) -> Any:
    """The backend of a target such as "llvm -mcpu=znver4" or "cuda:1". TargetError says what is wrong with it."""
    parsed = check_target(target)
    return _factory(parsed.kind)(parsed, threads)
