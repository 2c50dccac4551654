"""dnnc: a deep-neural-network compiler. `dnnc.compile(model)` is the one entry point.

The public names are resolved on first use (PEP 562), so that `import dnnc` costs a few milliseconds and loads neither
NumPy nor onnx nor llvmlite. Type checkers and editors read the imports below; a test holds the two lists together.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dnnc import array as array
    from dnnc import ir as ir
    from dnnc import nn as nn
    from dnnc import optim as optim
    from dnnc import random as random
    from dnnc.array.custom import custom_op as custom_op
    from dnnc.array.formats import storage_format as storage_format
    from dnnc.array.kernels import elementwise_kernel as elementwise_kernel
    from dnnc.array.kernels import reduction_kernel as reduction_kernel
    from dnnc.array.lazy import no_grad as no_grad
    from dnnc.artifact.load import load as load
    from dnnc.driver import Executable as Executable
    from dnnc.driver import TensorSpec as TensorSpec
    from dnnc.driver import compile as compile
    from dnnc.export import to_onnx as to_onnx
    from dnnc.frontends.onnx import from_onnx as from_onnx
    from dnnc.frontends.trace import Spec as Spec
    from dnnc.frontends.trace import cond as cond
    from dnnc.frontends.trace import scan as scan
    from dnnc.frontends.trace import trace as trace
    from dnnc.frontends.trace import while_loop as while_loop
    from dnnc.frontends.trace.custom_rules import checkpoint as checkpoint
    from dnnc.frontends.trace.custom_rules import custom_vjp as custom_vjp
    from dnnc.frontends.trace.custom_rules import stop_gradient as stop_gradient
    from dnnc.frontends.trace.gradients import jvp as jvp
    from dnnc.frontends.trace.gradients import linearize as linearize
    from dnnc.frontends.trace.gradients import vjp as vjp
    from dnnc.frontends.trace.jacobians import hessian as hessian
    from dnnc.frontends.trace.jacobians import jacfwd as jacfwd
    from dnnc.frontends.trace.jacobians import jacrev as jacrev
    from dnnc.frontends.trace.vmap import vmap as vmap
    from dnnc.gradients.entry import grad as grad
    from dnnc.gradients.entry import value_and_grad as value_and_grad
    from dnnc.ir.errors import AccuracyError as AccuracyError
    from dnnc.ir.errors import ArtifactError as ArtifactError
    from dnnc.ir.errors import ArtifactWarning as ArtifactWarning
    from dnnc.ir.errors import DnncError as DnncError
    from dnnc.ir.errors import DnncWarning as DnncWarning
    from dnnc.ir.errors import GradientError as GradientError
    from dnnc.ir.errors import InputError as InputError
    from dnnc.ir.errors import InternalError as InternalError
    from dnnc.ir.errors import ModelError as ModelError
    from dnnc.ir.errors import NonFiniteError as NonFiniteError
    from dnnc.ir.errors import ParseError as ParseError
    from dnnc.ir.errors import ScheduleError as ScheduleError
    from dnnc.ir.errors import ShapeError as ShapeError
    from dnnc.ir.errors import TargetError as TargetError
    from dnnc.ir.errors import TuneError as TuneError
    from dnnc.ir.errors import UnsupportedError as UnsupportedError
    from dnnc.ir.errors import VerifyError as VerifyError
    from dnnc.ir.target import Target as Target
    from dnnc.jitted import jit as jit
    from dnnc.options import CompileOptions as CompileOptions
    from dnnc.pruning.entry import explore_pruning as explore_pruning
    from dnnc.pruning.entry import prune as prune
    from dnnc.quantization.entry import quantize as quantize
    from dnnc.report.progress import progress as progress
    from dnnc.training.checkpoint import load_arrays as load_arrays
    from dnnc.training.checkpoint import save_arrays as save_arrays
    from dnnc.training.step import train_step as train_step
    from dnnc.tune_session import tune as tune

    __version__: str

_WHERE = {
    "dnnc.array.custom": ("custom_op",),
    "dnnc.array.formats": ("storage_format",),
    "dnnc.array.lazy": ("no_grad",),
    "dnnc.array.kernels": ("elementwise_kernel", "reduction_kernel"),
    "dnnc.driver": ("Executable", "TensorSpec", "compile"),
    "dnnc.export": ("to_onnx",),
    "dnnc.frontends.onnx": ("from_onnx",),
    "dnnc.frontends.trace": ("Spec", "cond", "scan", "trace", "while_loop"),
    "dnnc.frontends.trace.custom_rules": ("checkpoint", "custom_vjp", "stop_gradient"),
    "dnnc.frontends.trace.gradients": ("jvp", "linearize", "vjp"),
    "dnnc.frontends.trace.jacobians": ("hessian", "jacfwd", "jacrev"),
    "dnnc.frontends.trace.vmap": ("vmap",),
    "dnnc.gradients.entry": ("grad", "value_and_grad"),
    "dnnc.ir.errors": (
        "AccuracyError", "ArtifactError", "ArtifactWarning", "DnncError", "DnncWarning", "GradientError", "InputError",
        "InternalError", "ModelError", "NonFiniteError", "ParseError", "ScheduleError",
        "ShapeError", "TargetError", "TuneError", "UnsupportedError", "VerifyError",
    ),
    "dnnc.ir.target": ("Target",),
    "dnnc.jitted": ("jit",),
    "dnnc.artifact.load": ("load",),
    "dnnc.options": ("CompileOptions",),
    "dnnc.pruning.entry": ("explore_pruning", "prune"),
    "dnnc.quantization.entry": ("quantize",),
    "dnnc.report.progress": ("progress",),
    "dnnc.training.checkpoint": ("load_arrays", "save_arrays"),
    "dnnc.training.step": ("train_step",),
    "dnnc.tune_session": ("tune",),
}  # fmt: skip
_NAMES = {name: module for module, names in _WHERE.items() for name in names}

_MODULES = ("array", "ir", "nn", "optim", "random")

__all__ = sorted([*_NAMES, *_MODULES, "__version__"])


if not TYPE_CHECKING:  # so that type checkers report misspelt names

    def __getattr__(name: str) -> Any:
        if name in _NAMES:
            value = getattr(import_module(_NAMES[name]), name)
        elif name in _MODULES:
            value = import_module(f"dnnc.{name}")
        elif name == "__version__":
            value = import_module("importlib.metadata").version("dnnc")
        else:
            raise AttributeError(f"module 'dnnc' has no attribute {name!r}; its public names are {', '.join(__all__)}")
        globals()[name] = value  # the next access does not come here
        return value


def __dir__() -> list[str]:
    return __all__
