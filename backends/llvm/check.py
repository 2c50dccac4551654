"""The kernel check on the CPU: the function at an address, called in this process. See `dnnc.backends.check`."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

from dnnc.backends.check import check_run, run_bytes
from dnnc.backends.runtime.frames import Frame
from dnnc.ir.expr import Expr, Var
from dnnc.ir.graph import Graph, Value
from dnnc.passes.planning.program import Step

Array = np.ndarray[Any, Any]


def check_kernel(graph: Graph, step: Step, address: int, seed: int = 0, rows: bool = False) -> None:
    """Run the kernel at `address` on random inputs. AccuracyError names the worst element and the bound. `rows`: as of
    `check_run`.
    """
    check_run(graph, step, lambda inputs, dims, env: run_native(step, address, inputs, dims, env), seed, rows=rows)


def run_native(
    step: Step, address: int, inputs: Mapping[Value, Array], dims: Mapping[Var, int], env: Mapping[Expr, Expr]
) -> list[Array]:
    """The kernel's outputs in logical order, from two shares of its parallel loops, one after the other."""

    def execute(buffers: Mapping[Value, Array], zones: Mapping[Value, Array]) -> tuple[int, int, int]:
        frame = Frame(64)
        scalars = [ctypes.c_int64(n) for n in (*step.sizes, *(dims[d] for d in step.dims))]
        pointers = [ctypes.c_void_p(buffers[v].ctypes.data) for v in step.params]
        kinds = (
            *[ctypes.c_int64] * len(scalars),
            *[ctypes.c_void_p] * (len(pointers) + 1),
            ctypes.c_int64,
            ctypes.c_int64,
        )
        f = ctypes.CFUNCTYPE(None, *kinds)(address)
        shares = 2 if step.parallel else 1
        for tid in range(shares):
            f(*scalars, *pointers, ctypes.c_void_p(frame.address), tid, shares)
        return frame.status

    return run_bytes(step, inputs, env, execute)
