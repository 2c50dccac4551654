"""Every operation on every type: interpreted, and on a device with the interpreter's results."""

from __future__ import annotations

import pytest
from operations import differences, each, indices, interpreted, on_device, operations

from dnnc.ir.dtype import BY_NAME
from dnnc.ir.loops.stmt import Kernel

KERNELS = each()


@pytest.mark.parametrize("t", ["f32", "i8", "u64", "f8e4m3fn"])
def test_differences_are_found(t: str) -> None:
    k = operations(BY_NAME[t], 4)
    want = interpreted(k)
    assert differences(k, want, want) == []
    for name in ("cast_i32_", "cast_f32_", "shfl_up_", "zip_low_"):
        got = {**want, name: want[name].copy()}
        got[name][3] = 77 if got[name][3] != 77 else 5
        assert len(differences(k, got, want)) == 1


def test_indices_outside_are_clamped() -> None:
    z = interpreted(indices())["z"]
    assert len(set(z.tolist())) > 20


@pytest.mark.gpu
@pytest.mark.parametrize("k", KERNELS, ids=[k.name for k in KERNELS])
def test_a_device_gives_what_the_interpreter_gives(k: Kernel) -> None:
    assert on_device(k) == []
