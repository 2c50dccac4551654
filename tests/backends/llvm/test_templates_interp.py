"""Scheduled kernels mean what their graphs mean: the operator-IR interpreter, races and bounds included, against the
float64 reference.
"""

from __future__ import annotations

import pytest
from kernels import graphs, interpret, program, symbolic


@pytest.mark.family("samples")
@pytest.mark.parametrize("name", graphs())
def test_fixed_sizes(name: str) -> None:
    p = program(graphs()[name])
    for step in p.steps:
        assert step.refusal is None
        interpret(p.graph, step)


@pytest.mark.family("kernels")
@pytest.mark.parametrize("name", symbolic())
def test_symbolic_sizes(name: str) -> None:
    p = program(symbolic()[name])
    for n in (1, 7, 16, 33):
        for step in p.steps:
            interpret(p.graph, step, n)
