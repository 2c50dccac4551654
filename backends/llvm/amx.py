"""Intel's AMX: the features that code for matrix tiles needs, and the system's leave to use the registers."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

FEATURES = frozenset(("amx-tile", "amx-int8", "amx-bf16"))  # CPUs that have one of them have all
# arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) by its numbers
ARCH_PRCTL, REQUEST, TILE_DATA = 158, 0x1023, 18


@cache
def request_tiles() -> bool:
    """Ask Linux for the registers, for all threads of the process: without its leave their first use ends it."""
    try:
        return sys.platform == "linux" and not ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST, TILE_DATA)
    except (OSError, AttributeError):
        return False
