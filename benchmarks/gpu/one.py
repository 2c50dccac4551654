"""One model on the GPU: compile, compare with ONNX Runtime on the CPU, time beside PyTorch. Called by `run.py` in a
process of its own.

In: a model of a zoo's folder and a precision. Out: one row as a dict. A process of its own because an error on a device
ends its context.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Row = dict[str, Any]
# largest error over the output's scale that a precision allows; deep networks on drawn weights multiply rounding errors
BOUNDS = {"float32": 1e-3, "tf32": 2e-2, "float16": 5e-2, "bfloat16": 2e-1}


def measure(folder: Path, row: Row, precision: str, a: argparse.Namespace) -> Row:
    """Check, then time. A model that is in halves itself stays as it is, whatever the precision."""
    import cupy
    import zoo
    from gpu_time import gpu_times, host_microseconds
    from judge import largest_error, share_within_a_step, steady

    import dnnc

    precision = "float16" if row.get("half") else precision
    asked = None if row.get("half") or precision == "float32" else precision
    model = zoo.load(folder, row)
    right = steady(model, lambda seed: zoo.make_inputs(row, seed), as_written) if zoo.is_quantized(row) else None
    inputs = right.inputs if right else zoo.make_inputs(row)
    want = right.outputs[0] if right else reference(model, inputs)
    start = time.perf_counter()
    f = dnnc.compile(model, target="cuda", precision=asked, cache=a.cache)
    arrays = [inputs[i.name] for i in f.inputs]
    got = f(*arrays)
    batch = row["inputs"][0]["shape"][:1] or [1]
    out: Row = {
        "name": row["name"],
        "precision": precision,
        "batch": batch[0],
        "compile_s": time.perf_counter() - start,
    }
    program = f.report.programs[-1]
    out |= {"calls": program.calls, "kernels": len(program.kernels), "fallbacks": len(f.report.fallbacks)}
    found = got if isinstance(got, tuple) else (got,)
    out |= {"error": largest_error(found, want), "within_a_step": share_within_a_step(found, want)}
    out["right"] = right.accept(found) if right else out["error"] <= BOUNDS[precision]
    if right:
        out["steady"] = right.share
    if a.check_only:
        return out
    device = [cupy.asarray(x) for x in arrays]
    results = f(*device)
    bound = f.bind(device, list(results) if isinstance(results, tuple) else [results])
    calls: dict[str, Callable[[], object]] = {"dnnc": bound}
    for peer in a.peers:
        try:
            calls[peer] = PEERS[peer](row["name"], inputs, precision)
        except KeyError:
            continue  # this model is no PyTorch module
        except Exception as e:
            out.setdefault("failures", {})[peer] = f"{type(e).__name__}: {str(e)[:200]}"
    out["ms"] = dict(zip(calls, gpu_times(list(calls.values()))))
    out["host_us"] = host_microseconds(bound)
    if a.profile:
        out["profile"] = str(f.profile(*arrays))
    return out


def reference(model: Any, inputs: Mapping[str, Array], optimized: bool = True) -> list[Array]:
    """The outputs by ONNX Runtime on the CPU."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(inputs)))


def as_written(model: Any, inputs: Mapping[str, Array]) -> list[Array]:
    """The outputs of each node for itself. What ONNX Runtime makes of quantized ones, sums of products of 8 bits,
    saturates at 16 bits on CPUs without instructions for them.
    """
    return reference(model, inputs, optimized=False)


# --- peers ------------------------------------------------------------------------------------------------------------


FASTER = {"bert_base": {"attention": "sdpa"}}  # the peer's own kernel, where the exported model spells it out


def module(name: str, inputs: dict[str, Array], precision: str) -> tuple[Any, list[Any]]:
    """The PyTorch module that a model was exported from, and its inputs, on the GPU. KeyError for other models."""
    import torch
    from zoo.build import module as make

    logging.disable(logging.WARNING)
    torch.set_grad_enabled(False)
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    kind = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(precision, torch.float32)
    net, names = make(name, **FASTER.get(name, {}))
    net = (
        net.cuda().to(kind).to(memory_format=torch.channels_last)
        if any(inputs[n].ndim == 4 for n in names)
        else net.cuda().to(kind)
    )
    given = []
    for n in names:
        t = torch.from_numpy(np.array(inputs[n])).cuda()
        given.append(t.to(kind) if t.is_floating_point() else t)
    return net, given


def eager(name: str, inputs: dict[str, Array], precision: str) -> Callable[[], object]:
    net, given = module(name, inputs, precision)
    return lambda: net(*given)


def graph(name: str, inputs: dict[str, Array], precision: str) -> Callable[[], object]:
    """Eager PyTorch in a captured CUDA graph: no Python between kernels."""
    import torch

    net, given = module(name, inputs, precision)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            net(*given)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        captured.result = net(*given)
    captured.reads = (
        net,
        given,
    )  # a graph keeps nothing alive; another peer's torch.compile returns free memory to the device
    return captured.replay


def compiled(mode: str) -> Callable[[str, dict[str, Array], str], Callable[[], object]]:
    def make(name: str, inputs: dict[str, Array], precision: str) -> Callable[[], object]:
        import torch

        net, given = module(name, inputs, precision)
        made = torch.compile(net, mode=mode)
        for _ in range(3):
            made(*given)
        return lambda: made(*given)

    return make


PEERS: dict[str, Callable[[str, dict[str, Array], str], Callable[[], object]]] = {
    "eager": eager,
    "graph": graph,
    "reduce-overhead": compiled("reduce-overhead"),
    "max-autotune": compiled("max-autotune"),
}
