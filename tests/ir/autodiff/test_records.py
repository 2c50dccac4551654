"""The derivative of every op record against numbers, on each of its samples with floats: directional differences in
float64, the dot-product test, second derivatives, and compiled gradients. A record without a derivative says so.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest

from dnnc.ir.errors import DnncError, GradientError
from dnnc.ir.op import OpDef, Sample, Trait
from dnnc.ir.ops import OPS
from support.gradients import check_compiled, check_sample, differentiable, gradient, graph_of, raised


def label(case: Any) -> str:
    if isinstance(case, OpDef):
        return case.name
    return (
        f"{'-'.join(map(str, case.inputs))}-{'-'.join(f'{k}={v}' for k, v in case.attrs)}".replace(" ", "")
        if isinstance(case, Sample)
        else ""
    )


def rng_of(op: OpDef, s: Sample) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(f"{op.name} {label(s)}".encode()))


def takes(op: OpDef, s: Sample) -> bool:
    """Has the op a float operand and a float result?"""
    try:
        return differentiable(graph_of(op, s))
    except DnncError:
        return False  # the op is for other dtypes


FLOATS = [(op, s) for op in OPS.values() for s in op.samples if takes(op, s)]
STOPS = {"stop_gradient"}  # whose cotangents are none by definition
# a sample of a dtype in which alone an op exists has no raised form
RAISED = [(op, s) for op, s in FLOATS if op.name not in STOPS and takes(op, raised(s))]


def without(op: OpDef, s: Sample) -> bool:
    """Has the op no derivative? Its error names it, and it reads the stored form of numbers, or runs on the host."""
    try:
        gradient(graph_of(op, s))
    except GradientError as e:
        assert op.name in str(e)
        assert Trait.BITS in op.traits or op.host is not None or Trait.HOST in op.traits, str(e)
        return True
    return False


def test_every_float_record_has_a_raised_sample() -> None:
    raised_ops = {op.name for op, _ in RAISED} | STOPS
    assert {op.name for op, s in FLOATS if op.name not in raised_ops and not without(op, s)} == set()


def test_what_stops_gradients_has_none() -> None:
    assert all(not gradient(graph_of(op, s)).of for op, s in FLOATS if op.name in STOPS)


@pytest.mark.family("samples")
@pytest.mark.parametrize("op,s", RAISED, ids=label)
def test_pullback(op: OpDef, s: Sample) -> None:
    if not without(op, raised(s)):
        check_sample(op, s, rng_of(op, s))


# the second derivative of a maximum over the samples of bins is minutes of work for the interpreter
TWICE = [(op, s) for op, s in RAISED if op.name != "roi_align_max"]


@pytest.mark.family("samples")
@pytest.mark.parametrize("op,s", TWICE, ids=label)
def test_second_derivative(op: OpDef, s: Sample) -> None:
    if not without(op, raised(s)):
        check_sample(op, s, rng_of(op, s), order=2)


# layouts are made by passes; a compiled graph takes and gives row-major arrays
COMPILED = [(op, s) for op, s in RAISED if Trait.RELAYOUT not in op.traits]


@pytest.mark.family("samples")
@pytest.mark.parametrize("op,s", COMPILED, ids=label)
def test_compiled(op: OpDef, s: Sample) -> None:
    if not without(op, s):
        check_compiled(op, s, rng_of(op, s))


@pytest.mark.gpu
@pytest.mark.parametrize("op,s", COMPILED, ids=label)
def test_compiled_for_a_device(op: OpDef, s: Sample) -> None:
    if not without(op, s):
        check_compiled(op, s, rng_of(op, s), "cuda")
