"""dnnc: a deep-neural-network compiler. `dnnc.compile(model)` is the one entry point.

The public names are resolved on first use (PEP 562), so that `import dnnc` costs a few milliseconds and loads neither NumPy nor onnx
nor llvmlite.
"""

from importlib import import_module
from typing import Any

_WHERE = {
    "dnnc.driver": ("compile", "Executable", "TensorSpec"),
    "dnnc.options": ("CompileOptions",),
    "dnnc.frontends.onnx": ("from_onnx",),
    "dnnc.ir.target": ("Target",),
    "dnnc.ir.errors": (
        "DnncError", "ModelError", "UnsupportedError", "ShapeError", "InputError", "TargetError", "ArtifactError", "TuneError",
        "AccuracyError", "ParseError", "VerifyError", "ScheduleError", "InternalError",
    ),
}  # fmt: skip
_NAMES = {name: module for module, names in _WHERE.items() for name in names}

__all__ = sorted([*_NAMES, "__version__", "ir"])


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        value = getattr(import_module(_NAMES[name]), name)
    elif name == "ir":
        value = import_module("dnnc.ir")
    elif name == "__version__":
        value = import_module("importlib.metadata").version("dnnc")
    else:
        raise AttributeError(f"dnnc has no attribute {name!r}; its public names are {', '.join(__all__)}")
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return __all__
