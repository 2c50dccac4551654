"""`torch.compile(model, backend="dnnc")`: torch extracts graphs of ATen operators for `dnnc_backend`.

torch's own layer above (AOTAutograd) turns writing to tensors into results, which it writes back, and views of inputs
into views again. What comes here is a pure program, whose *static* inputs are the parameters and buffers of modules.
Where gradients are wanted it differentiates that program, and cuts the result into two: one for the call, which gives
what the other reads beside the results, and one for `backward`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext

from dnnc.frontends.torch.decompose import for_compile
from dnnc.ir.errors import DnncWarning, InputError
from dnnc.options import make_options, thread_count
from dnnc.torch.boundary import Boundary
from dnnc.torch.custom_ops import keep_whole, replaced
from dnnc.torch.fallback import callable_of
from dnnc.torch.piece import Piece

INDUCTOR_MODES = ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def dnnc_backend(module: fx.GraphModule, example_inputs: Sequence[Any], **settings: Any) -> Callable[..., Any]:
    """The torch.compile backend. `options={...}` of `torch.compile` are the options of `dnnc.compile`.

    Graphs of which gradients are wanted become two programs, forward and backward. Operators without a form in graphs
    run in eager PyTorch, with a warning that names them.
    """
    boundary = Boundary()
    options = make_options({"threads": min(thread_count(None), torch.get_num_threads()), **_named(settings)})

    def inference(graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        return boxed(callable_of(graph, options, static_inputs(len(examples))))

    def forward(graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        made = callable_of(graph, options, static_inputs(len(examples), frozen=True), boundary)
        boundary.open = isinstance(made, Piece) and not compiles_autograd()
        return boxed(made)

    def backward(graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        return boxed(callable_of(graph, options, (), boundary))

    keep_whole(module)
    compiler = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=boundary.partition,
        decompositions={**for_compile(), **replaced()},
    )
    with recurrent_steps(module, example_inputs):
        return compiler(module, example_inputs)


@contextmanager
def recurrent_steps(module: fx.GraphModule, examples: Sequence[Any]) -> Iterator[None]:
    """Make torch take LSTMs with gradients apart into steps, because its graphs cannot differentiate oneDNN's LSTM.

    torch puts oneDNN's operator into a graph where nobody wants the gradient of an LSTM's input, without the memory
    that the operator's own gradient reads.
    """
    trained = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in examples)
    lstm = any(getattr(n.target, "__name__", "") == "lstm" for n in module.graph.nodes)
    mkldnn: Any = torch.backends.mkldnn  # its properties are typed as their descriptors
    before = mkldnn.enabled
    mkldnn.enabled = before and not (trained and lstm)
    try:
        yield
    finally:
        mkldnn.enabled = before


def _named(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The options among what torch.compile hands on. Inductor's modes change nothing, which a warning says."""
    mode = settings.get("mode")
    if mode in INDUCTOR_MODES:
        tune = ', such as options={"tune": a tuning log}' if "autotune" in mode else ""
        warnings.warn(
            f"mode={mode!r} changes nothing: the backend has the options of dnnc.compile{tune}",
            DnncWarning,
            stacklevel=2,
        )
    elif mode not in (None, "default"):
        raise InputError(f"mode={mode!r}: the backend has options={{...}}, those of dnnc.compile, and no modes")
    return dict(settings.get("options") or {})


def compiles_autograd() -> bool:
    """Does torch put graphs of backward halves into others, which read what the forward saved?"""
    return bool(torch._dynamo.config.compiled_autograd or torch._dynamo.compiled_autograd.in_compiled_autograd_region)


def boxed(f: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    """torch then hands arguments over as one list, which the function may empty."""

    def call(args: list[Any]) -> Any:
        return f(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def static_inputs(count: int, frozen: bool = False) -> list[int]:
    """Inputs that are parameters and buffers, and stay from call to call.

    Args:
        count: of inputs.
        frozen: those alone of which no gradient is wanted. The others change from step to step.
    """
    context = TracingContext.try_get()
    told = None if context is None else context.fw_metadata
    if told is None:
        return []
    left = set(told.mutated_inp_runtime_indices)
    left |= {k for k, info in enumerate(told.input_info) if info.requires_grad} if frozen else set()
    return [k for k in told.static_input_indices if k < count and k not in left]
