"""What a device loads of a program: its kernels, and its constants with what kernels read of parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.backends.runtime.device import PARAMETER_ALIGN, Device, DeviceArray, Weights
from dnnc.backends.runtime.frames import ALIGN as CACHE_LINE
from dnnc.backends.runtime.program import Control, Loop, Program

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Reference:
    """Bytes of the constants, from `start` to `end`, that lie in an array of somebody else on the device."""

    start: int
    end: int
    array: DeviceArray


@dataclass(frozen=True)
class Constants:
    """A block of constants, and which parts of it lie elsewhere, in order."""

    block: Array
    references: tuple[Reference, ...]

    @property
    def own(self) -> Array:
        """The bytes that lie in no other array."""
        if not self.references:
            return self.block
        ends = [*(r.start for r in self.references), self.block.nbytes]
        return np.concatenate([self.block[a:b] for a, b in zip([0, *(r.end for r in self.references)], ends)])


def bind_parameters(program: Program, weights: Weights, fetch: Callable[[DeviceArray], Array]) -> None:
    """Put what kernels read of parameters behind the constants, in a new block that the program loads from now on.

    What lies on the device, as the parameter itself or packed there, stays where it is.

    Args:
        program: its constants have room for this at their end.
        weights: the contents of parameters.
        fetch: brings an array to the host.
    """
    prologue, arrays = program.prologue, weights.arrays
    assert prologue is not None
    there: dict[int, DeviceArray] = prologue.as_they_lie(
        {n: a for n, a in arrays.items() if not isinstance(a, np.ndarray) and a.address % PARAMETER_ALIGN == 0}
    )
    kernels = prologue.kernels
    if kernels is not None:
        if kernels.text not in weights.packed:
            weights.packed[kernels.text] = kernels.pack([arrays[n] for n in kernels.inputs])
        there.update(zip(kernels.numbers, weights.packed[kernels.text]))
    read = prologue.reads(there)
    host = {n: a if isinstance(a, np.ndarray) else fetch(a) if n in read else None for n, a in arrays.items()}
    packed = prologue.by_numpy(host)
    sizes = [-(-int(str(t.nbytes)) // CACHE_LINE) * CACHE_LINE for t in prologue.types]
    at, references = program.constants.nbytes - sum(sizes), []
    block = np.empty_like(program.constants)  # what lies elsewhere is never touched
    block[:at] = program.constants[:at]
    for k, n in enumerate(sizes):
        if k in there:
            references.append(Reference(at, at + n, there[k]))
        else:
            block[at : at + packed[k].nbytes] = packed[k].reshape(-1).view(np.uint8)
            block[at + packed[k].nbytes : at + n] = 0
        at += n
    program.constants = block
    program.loaded = Constants(block, tuple(references))


def load_kernel(program: Program, symbol: str, device: Device) -> Any:
    """One kernel of a program, loaded on a device."""
    overlaps = any(k.symbol == symbol and "pdl_wait(" in k.text for k in program.kernels)
    return device.load(program.code[symbol], symbol, program.launches[symbol], program.params[symbol], overlaps)


def check_loaded(program: Program, symbol: str, device: Device, function: Any) -> None:
    """Check a kernel that no device has checked. AccuracyError: it is wrong."""
    program.checks[symbol](device, function, program.launches[symbol])
    del program.checks[symbol]


def stepwise(program: Program) -> list[str]:
    """Loops and branches whose course only data tells: the host reads their conditions, nothing records them."""
    names = {k.symbol: f"{k.name}{k.where}" for k in program.kernels if k.control}
    return [names[s] for s, c in program.controls.items() if not _known(c)]


def _known(c: Control) -> bool:
    """True if the number of iterations is known before a run: a constant trip count stands in `length` already."""
    return isinstance(c, Loop) and c.condition is None and c.trips is None and c.length is not None
