"""dnnc as an ONNX backend: `onnx.backend.base.Backend`, the interface that ONNX's own tests and its scoreboard call.

`onnx.backend.test.BackendTest(dnnc.onnx_backend)` takes this module; its functions are those of `DnncBackend`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx.backend.base import Backend, BackendRep

from dnnc.backends.registry import backend_class
from dnnc.driver import compile as compile_model
from dnnc.frontends.onnx import NeedsValues, read_model
from dnnc.frontends.onnx.reader import LATEST
from dnnc.ir.errors import DnncError, InputError, TargetError, count

TARGETS = {"CPU": "llvm", "CUDA": "cuda"}  # ONNX's name of a device kind -> target
TEST_OPTIONS = ("rtol", "atol")  # what the test runner hands through to `prepare`


class DnncRep(BackendRep):
    """A compiled model. `names` are those of the graph's inputs, `initial` those among them that have initializers."""

    def __init__(self, executable: Any, names: Sequence[str], initial: frozenset[str]) -> None:
        self.executable, self._names, self._initial = executable, list(names), initial

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The outputs, in order.

        Args:
            inputs: arrays in the order of the graph's inputs (those with an initializer may be left out), a mapping by
                name, or one array.
            **kwargs: none are known.

        Raises:
            InputError: the arrays do not fit.
        """
        if kwargs:
            raise InputError(f"run takes no options, got {', '.join(kwargs)}")
        made = self.executable(self._named(inputs))
        return made if isinstance(made, tuple) else (made,)

    def _named(self, inputs: Any) -> dict[str, Any]:
        if isinstance(inputs, Mapping):
            return {n: x for n, x in inputs.items() if n not in self._initial}
        given = [inputs] if isinstance(inputs, np.ndarray) else list(inputs)
        names = self._names if len(given) == len(self._names) else [n for n in self._names if n not in self._initial]
        if len(given) != len(names):
            raise InputError(f"the model has the inputs {', '.join(names) or 'none'}; {len(given)} are given")
        return {n: x for n, x in zip(names, given) if n not in self._initial}


class DnncBackend(Backend):
    """Compiles ONNX models for this machine."""

    @classmethod
    def is_compatible(cls, model: Any, device: str = "CPU", **kwargs: Any) -> bool:
        """Can the model be read, and compiled for the device?"""
        try:
            read_model(model)
        except NeedsValues:  # it is compiled when the inputs are there
            return cls.supports_device(device)
        except DnncError:
            return False
        return cls.supports_device(device)

    @classmethod
    def prepare(cls, model: Any, device: str = "CPU", **kwargs: Any) -> DnncRep:
        """Compile a model.

        Args:
            model: what `dnnc.compile` takes for an ONNX model.
            device: "CPU", or "CPU:0".
            **kwargs: options of `dnnc.compile`.

        Raises:
            TargetError: another device.
            DnncError: as `dnnc.compile`.
        """
        options = {k: v for k, v in kwargs.items() if k not in TEST_OPTIONS}
        f = compile_model(model, **{"target": target_of(device), **options})
        if not isinstance(model, onnx.ModelProto):
            return DnncRep(f, [s.name for s in f.inputs], frozenset())
        initial = {t.name for t in model.graph.initializer} | {t.values.name for t in model.graph.sparse_initializer}
        return DnncRep(f, [i.name for i in model.graph.input], frozenset(initial))

    @classmethod
    def run_model(cls, model: Any, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
        """Compile and run once."""
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls, node: Any, inputs: Any, device: str = "CPU", outputs_info: Any = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Run one operator.

        Args:
            node: a NodeProto.
            inputs: an array for each input that the node names, in order.
            device: as for `prepare`.
            outputs_info: not needed: types and shapes of the outputs follow.
            **kwargs: `opset_version`, default the newest; options of `dnnc.compile`.
        """
        opset = kwargs.pop("opset_version", None)
        return cls.run_model(model_of(node, [np.asarray(x) for x in inputs], opset), inputs, device, **kwargs)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Is there a target for a device such as "CPU" or "CUDA:1"?"""
        return not _problem(device)


def target_of(device: str) -> str:
    """The target of a device. TargetError where there is none."""
    problem = _problem(device)
    if problem:
        raise TargetError(f"device {device!r}: {problem}")
    kind, _, number = device.partition(":")
    return f"cuda:{number}" if kind == "CUDA" and number else TARGETS[kind]


def _problem(device: str) -> str:
    """Why a device cannot be had; empty where it can."""
    kind, _, number = device.partition(":")
    if kind not in TARGETS or not (number or "0").isdigit():
        return f"dnnc compiles for {', '.join(TARGETS)}"
    return str(backend_class(TARGETS[kind]).device_problem(int(number or 0)))


def model_of(node: Any, arrays: Sequence[np.ndarray[Any, Any]], opset: int | None) -> Any:
    """A model of one node. InputError where the arrays are not one for each input."""
    names = [n for n in node.input if n]
    if len(names) != len(arrays):
        raise InputError(
            f"node {node.name or node.op_type} has the inputs {', '.join(names) or 'none'}; "
            f"{count(len(arrays), 'array')} are "
            "given"
        )
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in zip(names, arrays)
    ]
    outputs = [onnx.ValueInfoProto(name=n) for n in node.output if n]
    domain = "" if node.domain == "ai.onnx" else node.domain
    version = opset or newest(domain)
    return helper.make_model(
        helper.make_graph([node], "node", inputs, outputs), opset_imports=[helper.make_opsetid(domain, version)]
    )


def newest(domain: str) -> int:
    """The newest opset of a domain that dnnc knows."""

    return LATEST.get(domain, 1)


is_compatible = DnncBackend.is_compatible
prepare = DnncBackend.prepare
run = DnncBackend.run_model
run_model = DnncBackend.run_model
run_node = DnncBackend.run_node
supports_device = DnncBackend.supports_device
