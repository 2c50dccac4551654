"""Operator-IR text that is printed, read back and interpreted; the errors that the interpreter must find."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dnnc.ir.errors import VerifyError
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.text import parse_kernel, show_kernel

rng = np.random.default_rng(0)


def f32(*shape: int) -> Any:
    return rng.standard_normal(shape).astype(np.float32)


def run(text: str, **args: Any) -> None:
    kernel = parse_kernel(text)
    printed = show_kernel(kernel)
    assert show_kernel(parse_kernel(printed)) == printed
    run_kernel(kernel, args)


def fails(text: str, *words: str, **args: Any) -> None:
    with pytest.raises(VerifyError) as e:
        run(text, **args)
    for word in words:
        assert word in str(e.value), str(e.value)
