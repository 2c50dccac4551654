"""What a device loads of a program: its kernels, and its constants with what kernels read of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.backends.runtime.device import PARAMETER_ALIGN, Device, DeviceArray
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


def bind_parameters(
    program: Program, parameters: Mapping[str, Array | DeviceArray], fetch: Callable[[DeviceArray], Array]
) -> None:
    """Put what kernels read of parameters behind the constants, in a new block that the program loads from now on.

    Arrays on the device that kernels read as they lie stay there.

    Args:
        program: its constants have room for this at their end.
        parameters: the prologue's inputs by name.
        fetch: brings an array to the host.
    """
    prologue = program.prologue
    assert prologue is not None
    there = prologue.as_they_lie(
        {n: a for n, a in parameters.items() if not isinstance(a, np.ndarray) and a.address % PARAMETER_ALIGN == 0}
    )
    read = prologue.reads(there)
    host = {n: a if isinstance(a, np.ndarray) else fetch(a) if n in read else None for n, a in parameters.items()}
    arrays = [a.reshape(-1).view(np.uint8) for a in prologue.run(host)]
    sizes = [-(-a.nbytes // CACHE_LINE) * CACHE_LINE for a in arrays]
    block, at, references = program.constants.copy(), program.constants.nbytes - sum(sizes), []
    for k, (a, n) in enumerate(zip(arrays, sizes)):
        if k in there:
            references.append(Reference(at, at + n, there[k]))
        else:
            block[at : at + a.nbytes] = a
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
