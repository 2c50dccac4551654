"""Kernel check on a device: random inputs against float64 NumPy, as `dnnc.backends.check` says."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dnnc.backends.check import RED_ZONE, check_run, run_bytes
from dnnc.backends.cuda.library import CallFunction, workspace_bytes
from dnnc.backends.runtime.device import ALIGN, DEFAULT_STREAM, STATUS_BYTES, Device
from dnnc.ir.expr import Expr, Var
from dnnc.ir.graph import Graph, Value
from dnnc.passes.planning.program import Step

if TYPE_CHECKING:
    from dnnc.backends.runtime.device import Launch

Array = np.ndarray[Any, Any]
MAX_STEPS = 1 << 44  # statements in a run of a kernel, some seconds of a GPU
LOOKED_AT = 1 << 20  # bytes of an input up to which it is read back to see whether the kernel wrote there


def check_kernel(graph: Graph, step: Step, device: Device, function: Any, launch: Launch, seed: int = 0) -> None:
    """Run a kernel on random inputs. AccuracyError names the kernel, its nodes, the worst element and the bound."""
    if 0 in launch.grid or 0 in launch.block:
        return

    def run(inputs: Mapping[Value, Array], dims: Mapping[Var, int], env: Mapping[Expr, Expr]) -> list[Array]:
        return run_kernel(step, device, function, launch, inputs, dims, env)

    check_run(graph, step, run, seed, MAX_STEPS)


def run_kernel(
    step: Step,
    device: Device,
    function: Any,
    launch: Launch,
    inputs: Mapping[Value, Array],
    dims: Mapping[Var, int],
    env: Mapping[Expr, Expr],
) -> list[Array]:
    """The kernel's outputs in logical order."""

    def execute(buffers: Mapping[Value, Array], zones: Mapping[Value, Array]) -> tuple[int, int, int]:
        return run_once(step, device, function, launch, {**buffers, **zones}, zones, dims)

    return run_bytes(step, inputs, env, execute)


def run_once(
    step: Step,
    device: Device,
    function: Any,
    launch: Launch,
    bytes_: Mapping[Value, Array],
    written: Collection[Value],
    dims: Mapping[Var, int],
) -> tuple[int, int, int]:
    """Launch on copies of these bytes; those of what is written, red zones included, and of small inputs are brought
    back. Gives the status.
    """
    stream = DEFAULT_STREAM
    starts: dict[Value, int] = {}
    total = ALIGN
    for v, a in bytes_.items():
        starts[v], total = total, total + -(-a.nbytes // ALIGN) * ALIGN
    memory = device.alloc(total + workspace_bytes(function))
    device.fill(memory.address, 0, STATUS_BYTES, stream)
    for v, a in bytes_.items():
        if a.nbytes:
            device.upload(memory.address + starts[v], a, stream)
    args = [dims[d] for d in step.dims]
    args += [memory.address + starts[v] + (RED_ZONE if v in written else 0) for v in step.params]
    last = memory.address + (total if isinstance(function, CallFunction) else 0)
    device.launch(function, launch, [*args, last], stream)
    status = np.zeros(4, np.int32)
    device.download(status.view(np.uint8), memory.address, stream)
    for v, a in bytes_.items():
        if a.nbytes and a.flags.writeable and (v in written or a.nbytes <= LOOKED_AT):
            device.download(a, memory.address + starts[v], stream)
    device.synchronize(stream)
    code, kernel, value, _ = status.tolist()
    return code, kernel, value
