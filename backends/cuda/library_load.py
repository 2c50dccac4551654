"""A library's call on the device that is current: its bytes -> a function that can be started."""

from __future__ import annotations

from typing import Any

from dnnc.backends.cuda import library
from dnnc.backends.cuda.library import CallFunction, parse_call
from dnnc.backends.cuda.library_cublaslt import Lt, LtFunction
from dnnc.backends.cuda.library_cudnn import Dnn, DnnFunction

Handles = dict[str, Any]  # of the libraries that a device has opened, by their names


def function_of(code: bytes, handles: Handles) -> CallFunction:
    """Return a call's function; adds to `handles`. TargetError: no library, or it cannot make this call here."""
    call = parse_call(code)
    name = call.library
    if name not in handles:
        found = library.opened(name)
        handles[name] = Lt(found) if name == "cublaslt" else Dnn(found)
    return LtFunction(handles[name], call) if name == "cublaslt" else DnnFunction(handles[name], call)
