"""One kernel of the operator IR as a function of host arrays, run by the threads of the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dnnc.backends.llvm.build import symbol_of
from dnnc.backends.llvm.expression import CpuExpressions
from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.kernel_code import kernel_code
from dnnc.backends.runtime.expression import block_of
from dnnc.backends.runtime.program import Call, CompiledKernel, MemoryRef, Program
from dnnc.ir.arena import Arena
from dnnc.ir.dtype import u8
from dnnc.ir.loops.stmt import For, Kernel, stored
from dnnc.ir.loops.text import show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.ir.types import TensorType

Array = np.ndarray[Any, Any]


def function_of(
    kernel: Kernel, target: CpuTarget, loader: CpuExpressions
) -> Callable[[Sequence[Array], Sequence[int]], None] | None:
    """A function of a kernel's arrays, which it reads and writes, and of its sizes; None where it cannot run so.

    VerifyError: the kernel is wrong. InputError, in a call: an index that is guarded is outside of its axis.
    """
    text = show_kernel(verify_kernel(kernel))
    symbol, entry = symbol_of(text, target), kernel.entry
    code = loader.cache.get(symbol[2:])
    if code is None:
        code = kernel_code(kernel, symbol, target)
        loader.cache.put(symbol[2:], code)
    refs = tuple(MemoryRef("buffer", k) for k in range(len(entry.buffers)))
    writes = tuple(r for r, b in zip(refs, entry.buffers) if b in stored(entry.body))
    parallel = any(isinstance(s, For) and s.kind == "parallel" for s in entry.body)
    call = Call(symbol, refs, writes, tuple(range(len(entry.scalars))), parallel)
    made = CompiledKernel(entry.name, symbol, text, "", parallel, "", ("",), ())
    program = Program(
        (made,), {symbol: code}, (call,), {}, tuple(entry.scalars), (TensorType(u8, ()),) * len(refs), (),
        Arena((), (), ()), 1, lambda: block_of(b""), lambda locs: "",
    )  # fmt: skip
    found = loader.load(program)
    return None if found is None else found.on
