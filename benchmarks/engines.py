"""dnnc and its peers behind one interface: a model and inputs in, a function without arguments out.

All run in float32 with the same number of threads, on the same arrays, and each by the call that its documentation gives for repeated use.
What an engine costs its user (copies, checks of arguments, fresh results) is part of its time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

Array = np.ndarray[Any, Any]


@dataclass
class Engine:
    """`call()` runs the model once, `outputs(result)` gives its arrays in the model's order. `facts` are for the table and the JSON."""

    name: str
    call: Callable[[], Any]
    outputs: Callable[[Any], list[Array]]
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """What every engine is given. `cache`: an empty folder for compiled kernels."""

    name: str
    model: ModelProto
    inputs: Mapping[str, Array]
    threads: int
    cache: Path


def several(result: Any) -> list[Array]:
    return [np.asarray(a) for a in result] if isinstance(result, (tuple, list)) else [np.asarray(result)]


# --- dnnc ---------------------------------------------------------------------------------------------------------------------


def dnnc_engine(task: Task) -> Engine:
    """Compiled twice: from an empty cache, as a first user meets it, and from the full one. A model with symbolic sizes compiles in its first call."""
    cold, f, arrays = _compile(task)
    facts = {"compile_s": cold, "kernels": len(f.report.programs[-1].kernels), "compiled": f.report.programs[-1].compiled}
    del f  # one set of weights at a time
    warm, f, arrays = _compile(task)
    program = f.report.programs[-1]
    facts |= {"cached_s": warm, "from_cache": program.from_cache, "calls": program.calls, "fallbacks": f.report.fallbacks}
    facts |= {"arena": program.memory.arena, "arena_bound": program.memory.lower_bound, "constants": program.memory.constants}
    facts["executable"] = f
    return Engine("dnnc", lambda: f(*arrays), several, facts)


def _compile(task: Task) -> tuple[float, Any, list[Array]]:
    """(seconds until the first result, the executable, its inputs in order)."""
    import dnnc

    start = time.perf_counter()
    f = dnnc.compile(task.model, cache=task.cache, threads=task.threads)
    arrays = [task.inputs[i.name] for i in f.inputs]
    f(*arrays)
    return time.perf_counter() - start, f, arrays


def exact(engine: Engine, inputs: Mapping[str, Array]) -> list[Array]:
    """The outputs in float64, by the interpreter of the imported graph."""
    from dnnc.ir.interp import run

    f = engine.facts["executable"]
    graph = f.programs[-1].graph if hasattr(f, "programs") else f.graph
    return run(graph, [inputs[i.name] for i in f.inputs], "float64")


# --- peers --------------------------------------------------------------------------------------------------------------------


def onnxruntime_engine(task: Task) -> Engine:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = task.threads, 1
    options.log_severity_level = 4
    start = time.perf_counter()
    session = ort.InferenceSession(task.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = dict(task.inputs)
    return Engine("onnxruntime", lambda: session.run(None, feeds), several, _load_time(start))


def openvino_engine(task: Task) -> Engine:
    import openvino as ov

    start = time.perf_counter()
    core = ov.Core()
    model = core.read_model(task.model.SerializeToString())
    if any(i.partial_shape.is_dynamic for i in model.inputs):
        model.reshape({name: list(a.shape) for name, a in task.inputs.items()})
    # without the hint it may compute in bfloat16
    config = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": task.threads, "PERFORMANCE_HINT": "LATENCY"}
    compiled = core.compile_model(model, "CPU", config)
    request, feeds = compiled.create_infer_request(), dict(task.inputs)

    def call() -> Any:
        return request.infer(feeds, share_inputs=True, share_outputs=True)

    return Engine("openvino", call, lambda result: [np.array(result[o]) for o in compiled.outputs], _load_time(start))


def torch_engine(task: Task) -> Engine:
    """torch.compile of the architecture that the model was exported from: its weights are others, so only its time can be compared."""
    import torch
    from zoo.build import module

    logging.disable(logging.WARNING)
    torch.set_num_threads(task.threads)
    torch.set_grad_enabled(False)
    net, names = module(task.name)
    given = [torch.from_numpy(np.array(task.inputs[n])) for n in names]
    start = time.perf_counter()
    compiled = torch.compile(net)
    compiled(*given)
    return Engine("torch", lambda: compiled(*given), several, _load_time(start) | {"own_weights": True})


def _load_time(start: float) -> dict[str, Any]:
    return {"load_s": time.perf_counter() - start}


PEERS: dict[str, Callable[[Task], Engine]] = {
    "onnxruntime": onnxruntime_engine,
    "openvino": openvino_engine,
    "torch": torch_engine,
}
