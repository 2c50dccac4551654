"""Modules as graphs: the forward pass in inference mode, with weights as constants that have their paths as names."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from dnnc.frontends.trace import Spec, trace
from dnnc.frontends.trace.tracer import spec_of
from dnnc.gradients.models import as_constant
from dnnc.ir.errors import InputError
from dnnc.ir.graph import Graph, Value
from dnnc.nn.calls import functional_call
from dnnc.nn.module import Module
from dnnc.nn.onnx_module import OnnxModule
from dnnc.nn.parameter import snapshot

Names = tuple[Sequence[str], Sequence[str]]  # of inputs and outputs


def module_graph(module: Module, inputs: Any) -> tuple[Graph, Names, dict[Value, str]]:
    """The graph of a module, what users call its inputs and outputs, and the names of its weights.

    InputError: no `inputs`, which only a module that `dnnc.nn.from_onnx` gave can do without.
    """
    if isinstance(module, OnnxModule):
        names = module.input_names
        given = inputs.items() if isinstance(inputs, Mapping) else zip(names, inputs or ())
        graph, weights = module.as_graph({n: spec_of(s).shape for n, s in given})
        return graph, (names, module.output_names), weights
    if inputs is None:
        raise InputError("to_onnx of a module needs inputs=[...], a dnnc.Spec(shape, dtype) for each array")
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    specs = [Spec(a.shape, a.dtype) for a in state.values()]

    def forward(state_: list[Any], *args: Any, **named: Any) -> Any:
        return functional_call(module, dict(zip(state, state_)), *args, **named)

    with _inference(module):
        by_name = isinstance(inputs, Mapping)
        graph = trace(forward, specs, **inputs) if by_name else trace(forward, specs, *inputs)
    weights = dict(zip(graph.inputs[: len(state)], state))
    rest = graph.inputs[len(state) :]
    if not by_name and len(rest) == len(inputs):
        for v, name in zip(rest, _arguments(module)):
            graph.rename(v, name)
    for v, name in weights.items():
        graph.inputs.remove(v)
        graph.constants[v] = as_constant(snapshot(state[name]).numpy())
    return graph, ([v.name for v in graph.inputs], [v.name for v in graph.outputs]), weights


def _arguments(module: Module) -> list[str]:
    """The names of what `forward` takes by position."""
    parameters = inspect.signature(module.forward).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


@contextmanager
def _inference(module: Module) -> Iterator[None]:
    """Within it, the module is in inference mode."""
    before = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, mode in before:
            m.training = mode
