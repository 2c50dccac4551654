"""Machine code of a CPU program in this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.backends.llvm.compile import Loaded, load_objects
from dnnc.backends.llvm.entry import ENTRY

FORMAT = "1"  # of kernels and their calling convention; part of every cache key and of saved models


@dataclass(frozen=True)
class Code:
    """What runs a program."""

    entry: int  # address of `i64 entry(frame, buffers, dims or table, tid, nthreads)`
    kernels: Mapping[str, Loaded]  # the owner of each kernel's code by symbol
    owner: Loaded  # of the entry function
    # calls for the table runner; None if the entry function calls the kernels itself
    table: np.ndarray[Any, np.dtype[np.int64]] | None = None

    def address(self, symbol: str) -> int:
        """Address of a kernel."""
        return self.kernels[symbol].address(symbol)


def load_code(code: Mapping[str, bytes]) -> Code:
    """Link the objects of a program that has an entry function. Raises what the linker says."""
    loaded = load_objects(list(code.values()))
    return Code(loaded.address(ENTRY), dict.fromkeys(loaded.names, loaded), loaded)
