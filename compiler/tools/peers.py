"""Other engines behind one interface: a model and inputs in, a function without arguments out.

All run in float32 with the same number of threads, on the same arrays, and each by the call that its documentation
gives for repeated use. What an engine costs its user (copies, checks of arguments, fresh results) is part of its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import numpy as np

from dnnc.ir.errors import InputError, install

Array = np.ndarray[Any, Any]


@dataclass
class Engine:
    """`call()` runs the model once, `outputs(result)` orders its arrays. `facts` are for tables and JSON."""

    name: str
    call: Callable[[], Any]
    outputs: Callable[[Any], list[Array]]
    facts: dict[str, Any] = field(default_factory=dict)


def several(result: Any) -> list[Array]:
    """The outputs of a call as a list of arrays."""
    return [np.asarray(a) for a in result] if isinstance(result, (tuple, list)) else [np.asarray(result)]


def onnxruntime_engine(model: str | bytes, inputs: Mapping[str, Array], threads: int) -> Engine:
    """ONNX Runtime on the CPU with its default optimizations. `model`: a path or the bytes of an .onnx file."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4
    start = time.perf_counter()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    feeds = dict(inputs)
    return Engine("onnxruntime", lambda: session.run(None, feeds), several, {"load_s": time.perf_counter() - start})


HINTS = {"float16": "f16", "bfloat16": "bf16"}


def openvino_engine(
    model: str | bytes, inputs: Mapping[str, Array], threads: int, precision: str | None = None
) -> Engine:
    """OpenVINO on the CPU: latency hint, symbolic sizes fixed. `model`: path or .onnx bytes.

    `precision`: dnnc's option; floats are computed in float16 or bfloat16 where it says so, else in float32.
    """
    import openvino as ov

    start = time.perf_counter()
    core = ov.Core()
    network = core.read_model(model)
    if any(i.partial_shape.is_dynamic for i in network.inputs):
        network.reshape({name: list(a.shape) for name, a in inputs.items()})
    # without the hint it may compute in bfloat16
    config = {
        "INFERENCE_PRECISION_HINT": HINTS.get(precision or "", "f32"),
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
    }
    compiled = core.compile_model(network, "CPU", config)
    request, feeds = compiled.create_infer_request(), dict(inputs)

    def call() -> Any:
        return request.infer(feeds, share_inputs=True, share_outputs=True)

    return Engine(
        "openvino",
        call,
        lambda result: [np.array(result[o]) for o in compiled.outputs],
        {"load_s": time.perf_counter() - start},
    )


def torch_engine(model: str, inputs: Mapping[str, Array], threads: int) -> Engine:
    """torch.compile of a model read by onnx2torch; compiled by the first call. `model`: an .onnx path."""
    import onnx2torch
    import torch

    torch.set_num_threads(threads)
    start = time.perf_counter()
    compiled: Any = torch.compile(onnx2torch.convert(model).eval().requires_grad_(False))
    given = [torch.from_numpy(np.array(a)) for a in inputs.values()]
    return Engine("torch", lambda: compiled(*given), several, {"load_s": time.perf_counter() - start})


# (path, inputs, threads, dnnc's option precision): ONNX Runtime and torch compute in the model's types all the same
PEERS: Mapping[str, Callable[[str, Mapping[str, Array], int, str | None], Engine]] = {
    "onnxruntime": lambda model, inputs, threads, precision: onnxruntime_engine(model, inputs, threads),
    "openvino": openvino_engine,
    "torch": lambda model, inputs, threads, precision: torch_engine(model, inputs, threads),
}
TORCH = ("torch", "torchvision", "onnx2torch")  # what the torch peer imports


def check_installed(names: Sequence[str]) -> None:
    """InputError says how to install those that are missing."""
    missing = [n for n in names if not all(find_spec(m) for m in (TORCH if n == "torch" else (n,)))]
    if missing:
        how = [install("bench")] if set(missing) - {"torch"} else []
        how += [f"pip install {' '.join(TORCH)}"] if "torch" in missing else []
        verb = "is" if len(missing) == 1 else "are"
        raise InputError(
            f"{' and '.join(missing)} {verb} not installed, so there is nothing to compare with: {'; '.join(how)}"
        )


def version(name: str) -> str:
    """The version of an installed package; empty where it does not say."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def error(got: Array, want: Array) -> float:
    """Largest difference over the largest expected number; inf for another shape, NaN or infinity."""
    if got.shape != want.shape:
        return float("inf")
    x, y = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(y)
    if not np.array_equal(x[~finite], y[~finite], equal_nan=True):
        return float("inf")
    difference = np.abs(x[finite] - y[finite]).max(initial=0.0)
    scale = np.abs(y[finite]).max(initial=0.0)
    return float("inf") if np.isnan(difference) else float(difference / scale) if scale else float(difference)
