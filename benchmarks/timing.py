"""Figures over models, and what else the machine did meanwhile. `dnnc.tools.timing` times."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


def geometric_mean(numbers: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(numbers))))


# --- neighbours -------------------------------------------------------------------------------------------------------


@dataclass
class Neighbours:
    """How much CPU other processes used: `cores()` since the object was made. None where the system does not tell."""

    start: float = 0.0
    own: float = 0.0
    busy: float | None = None

    def __post_init__(self) -> None:
        self.start, self.own, self.busy = time.perf_counter(), _own_seconds(), _busy_seconds()

    def cores(self) -> float | None:
        busy = _busy_seconds()
        if busy is None or self.busy is None:
            return None
        others = (busy - self.busy) - (_own_seconds() - self.own)
        return max(others / (time.perf_counter() - self.start), 0.0)


def _own_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _busy_seconds() -> float | None:
    """CPU seconds that all processes have used on all CPUs since the system started."""
    try:
        user, nice, system, _, _, irq, soft, steal = map(
            int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        )
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
