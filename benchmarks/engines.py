"""dnnc and its peers at one model of the zoo: arrays in, a function without arguments out. The peers that read .onnx
files are in `dnnc.tools.peers`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import ModelProto

from dnnc.tools.peers import Engine, onnxruntime_engine, openvino_engine, several

if TYPE_CHECKING:
    from dnnc.ir.graph.interp import Precision

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Task:
    """What every engine is given. `cache`: an empty folder for compiled kernels."""

    name: str
    model: ModelProto
    inputs: Mapping[str, Array]
    threads: int
    cache: Path
    bfloat16: bool = False


# --- dnnc -------------------------------------------------------------------------------------------------------------


def dnnc_engine(task: Task) -> Engine:
    """Compiled twice: from an empty cache, as a first user meets it, and from the full one. A model with symbolic sizes
    compiles in its first call.
    """
    cold, f, arrays = _compile(task)
    facts = {
        "compile_s": cold,
        "kernels": len(f.report.programs[-1].kernels),
        "compiled": f.report.programs[-1].compiled,
    }
    del f  # one set of weights at a time
    warm, f, arrays = _compile(task)
    program = f.report.programs[-1]
    facts |= {
        "cached_s": warm,
        "from_cache": program.from_cache,
        "calls": program.calls,
        "fallbacks": f.report.fallbacks,
    }
    facts |= {
        "arena": program.memory.arena,
        "arena_bound": program.memory.lower_bound,
        "constants": program.memory.constants,
    }
    facts["executable"] = f
    return Engine("dnnc", lambda: f(*arrays), several, facts)


def _compile(task: Task) -> tuple[float, Any, list[Array]]:
    """(seconds until the first result, the executable, its inputs in order)."""
    import dnnc

    start = time.perf_counter()
    precision = "bfloat16" if task.bfloat16 else None
    f = dnnc.compile(task.model, cache=task.cache, threads=task.threads, precision=precision)
    arrays = [task.inputs[i.name] for i in f.inputs]
    f(*arrays)
    return time.perf_counter() - start, f, arrays


def exact(engine: Engine, inputs: Mapping[str, Array], precision: Precision = "float64") -> list[Array]:
    """The outputs in float64, or in the model's types with "as-is", by the interpreter of the imported graph."""
    from dnnc.ir.graph.interp import run

    f = engine.facts["executable"]
    graph = f.programs[-1].graph if hasattr(f, "programs") else f.graph
    return run(graph, [inputs[i.name] for i in f.inputs], precision)


# --- peers ------------------------------------------------------------------------------------------------------------


def torch_engine(task: Task) -> Engine:
    """torch.compile of the architecture that the model was exported from: its weights are others, so only its time can
    be compared.
    """
    import torch
    from zoo.build import module

    logging.disable(logging.WARNING)
    torch.set_num_threads(task.threads)
    torch.set_grad_enabled(False)
    net, names = module(task.name)
    given = [torch.from_numpy(np.array(task.inputs[n])) for n in names]
    if task.bfloat16:
        net = net.to(torch.bfloat16)
        given = [x.to(torch.bfloat16) if x.is_floating_point() else x for x in given]
    start = time.perf_counter()
    compiled = torch.compile(net)
    compiled(*given)
    return Engine(
        "torch", lambda: compiled(*given), several, {"load_s": time.perf_counter() - start, "own_weights": True}
    )


PEERS: dict[str, Callable[[Task], Engine]] = {
    "onnxruntime": lambda task: onnxruntime_engine(task.model.SerializeToString(), task.inputs, task.threads),
    "openvino": lambda task: openvino_engine(
        task.model.SerializeToString(), task.inputs, task.threads, "bfloat16" if task.bfloat16 else None
    ),
    "torch": torch_engine,
}
