"""The probes do the work that they say they do, and a kernel's data belongs to the nearest level that holds it."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.backends.llvm.ceilings import (
    FMA_STEPS,
    Ceilings,
    Level,
    ceilings,
    copy_probe,
    empty_probe,
    fma_probe,
    read_probe,
    shortest,
)
from dnnc.backends.llvm.features import parse_target
from dnnc.backends.runtime.frames import aligned_empty

TARGET = parse_target("llvm")


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_reading_adds_up_every_number_of_the_buffer(threads: int) -> None:
    step = 8 * TARGET.lanes * threads
    data = aligned_empty(4 * step * 5).view(np.float32)
    data[:] = np.arange(len(data)) % 97
    probe = read_probe(TARGET, data, threads, repeat=3)
    probe.call()
    sums = probe.call.keep[2][1].view(np.float32)  # type: ignore[attr-defined]
    assert sums.sum(dtype=np.float64) == 3 * data.sum(dtype=np.float64)
    assert probe.bytes == 3 * data.nbytes


@pytest.mark.parametrize("threads", [1, 2])
def test_copying_fills_the_second_half(threads: int) -> None:
    data = aligned_empty(4 * 4 * TARGET.lanes * threads * 2 * 7).view(np.float32)
    half = len(data) // 2
    data[:half], data[half:] = np.arange(half), -1
    probe = copy_probe(TARGET, data, threads)
    probe.call()
    assert np.array_equal(data[half:], np.arange(half)) and probe.bytes == data.nbytes


def test_multiply_adds_all_happen() -> None:
    probe = fma_probe(TARGET, 2)
    probe.call()
    (x,) = probe.call.keep[2]  # type: ignore[attr-defined]
    assert (x.view(np.float32) == 2).all()  # the fixed point of x * 0.5 + 1
    assert probe.flops == 2 * 2 * (TARGET.registers - 4) * TARGET.lanes * FMA_STEPS


def test_more_work_takes_longer() -> None:
    assert shortest(empty_probe(TARGET), 0.005) < shortest(fma_probe(TARGET), 0.005)


@pytest.mark.slow
def test_ceilings_are_measured_once_and_make_sense() -> None:
    found = ceilings(TARGET, 1)
    assert found is ceilings(TARGET, 1)
    assert found.threads == 1 and found.flops > 1e9
    assert [v.name for v in found.levels][::2] in (["L2", "memory"], ["L2"]) and found.levels[-1].name == "memory"
    near, far = found.levels[0], found.levels[-1]
    assert near.rate > far.rate > 1e8 and near.capacity == TARGET.l2 and far.capacity == 0


def test_data_belong_to_the_nearest_level_that_holds_them() -> None:
    c = Ceilings(2, 1e11, (Level("L2", 100, 5.0, 4.0), Level("L3", 1000, 3.0, 3.5), Level("memory", 0, 1.0, 1.0)))
    assert [c.level(n).name for n in (0, 100, 101, 1000, 1001, 10**12)] == ["L2", "L2", "L3", "L3", "memory", "memory"]
    assert [v.rate for v in c.levels] == [5.0, 3.5, 1.0]
