"""Kernels that differ in the pattern of sparse weights alone: one is scheduled, the others follow."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.backends.llvm.facts import facts
from dnnc.backends.llvm.features import parse_target
from dnnc.backends.llvm.templates import templates
from dnnc.ir.graph import Graph
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.text import show_kernel
from dnnc.passes.base import PassContext
from dnnc.passes.pipelines import compile_program
from dnnc.passes.planning import program
from dnnc.passes.planning.kin import Kin


def layers(rng: np.random.Generator) -> Graph:
    arrays = {
        f"w{k}": (rng.permuted(np.arange(48 * 48) < 300 + k) * rng.standard_normal(48 * 48)).astype(np.float32)
        for k in range(4)
    }
    declared = ", ".join(f"{name}: f32[48, 48, 1, 1]" for name in arrays)
    value = "x"
    for name in arrays:
        value = f"relu(conv({value}, {name}))"
    text = f"def g(x: f32[1, 48, 12, 12], *, {declared}):\n    y = {value}\n    return y"
    return parse(text, {name: a.reshape(48, 48, 1, 1) for name, a in arrays.items()})


def test_kin_is_what_it_would_be_if_scheduled_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    g, target = layers(np.random.default_rng(0)), parse_target("llvm -mcpu=skylake-avx512", 2)
    tried, schedules = [], program.try_schedules
    monkeypatch.setattr(program, "try_schedules", lambda p, *more: tried.append(p) or schedules(p, *more))

    def kernels() -> list[tuple[str, str]]:
        tried.clear()
        made = compile_program(g.copy(), PassContext(facts(target, "standard")), templates(target))
        return [(s.text, s.naive) for s in made.kernels if "sparse_rows" in s.text and show_kernel(s.kernel) == s.text]

    shared, count = kernels(), len(tried)
    monkeypatch.setattr(Kin, "of", lambda *args: None)
    assert kernels() == shared and len({text for text, _ in shared}) == 4
    assert len(tried) > count
