"""The verifier of the operator IR, where a statement is never reached."""

from __future__ import annotations

import pytest

from dnnc.ir.errors import VerifyError
from dnnc.ir.loops.text import parse_kernel
from dnnc.ir.loops.verify import verify_kernel

KERNEL = """\
def k(N: dim[1, None], x: f32[8], y: f32[8]):
    for i in range(8):
        if {}:
            y[i] = {}
        else:
            y[i] = 0.0
"""
VALUES = ("x[i + 40]", "x[0 - N]", "x[i // (N - 9)]")
NEVER = ("8 < i", "i < 0", "(N < i) & (i < N)", "(N + 4 < i) & (i < 6)", "N < i // 9", "(4 < N) & (N < 3)")
MAY_BE = ("6 < i", "i < 1", "(N < i) & (i < N + 2)", "(N + 4 < i) & (i < 7)", "(2 < N) & (N < 4)")


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(
    "never", ["8 < i", "i < 0", "(N < i) & (i < N)", "(N + 4 < i) & (i < 6)", "N < i // 9", "(4 < N) & (N < 3)"]
)
def test_a_branch_that_is_never_taken_needs_no_proof(never: str, value: str) -> None:
    verify_kernel(parse_kernel(KERNEL.format(never, value)))


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(
    "may_be", ["6 < i", "i < 1", "(N < i) & (i < N + 2)", "(N + 4 < i) & (i < 7)", "(2 < N) & (N < 4)"]
)
def test_a_branch_that_may_be_taken_needs_one(may_be: str, value: str) -> None:
    with pytest.raises(VerifyError, match="cannot show"):
        verify_kernel(parse_kernel(KERNEL.format(may_be, value)))
