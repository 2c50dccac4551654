"""Every op record natively: each sample as a graph of one node, compiled, against the float64 reference."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
from native_check import check_graph, longest_reduction, one_node

from dnnc.ir.op import OpDef, Sample, Trait
from dnnc.ir.ops import FAMILIES, OPS
from dnnc.ir.ops.common import draw

pytestmark = pytest.mark.family("samples")

HOSTED = {
    name for name, op in OPS.items() if op.host is not None or Trait.HOST in op.traits
}  # tests/compiler/test_staged.py has them
CASES = [(op, s) for name, op in OPS.items() if name not in HOSTED for s in op.samples]
# one op of each way of making code, for the CPUs that lack instructions
OTHERS = (
    "exp",
    "tanh",
    "floor",
    "round",
    "mod",
    "cast",
    "shift_left",
    "conv",
    "matmul",
    "max_pool",
    "softmax",
    "reduce_mean",
    "argmax",
    "gather",
    "pad",
    "resize",
)


def label(case: Any) -> str:
    if isinstance(case, OpDef):
        return case.name
    return (
        f"{'-'.join(map(str, case.inputs))}-{'-'.join(f'{k}={v}' for k, v in case.attrs)}".replace(" ", "")
        if isinstance(case, Sample)
        else ""
    )


def check(op: OpDef, s: Sample, target: str, **options: Any) -> None:
    seed = zlib.crc32(f"{op.name} {label(s)}".encode())
    print(f"seed {seed}")
    attrs = dict(s.attrs)
    check_graph(
        one_node(op.name, s.inputs, **attrs),
        draw(s, seed),
        longest_reduction(op.name, s.inputs, **attrs),
        target,
        **options,
    )


def test_only_strings_files_and_sizes_need_the_host() -> None:
    families = {f for f, ops in FAMILIES.items() for op in ops if op.host is not None}
    assert families == {"strings", "image", "host"}


@pytest.mark.parametrize("op,s", CASES, ids=label)
def test_sample(op: OpDef, s: Sample) -> None:
    check(op, s, "llvm")


@pytest.mark.slow
@pytest.mark.parametrize("cpu", ["x86-64", "haswell"])  # SSE2 without FMA, half floats and rounding; AVX2
@pytest.mark.parametrize("name", OTHERS)
def test_other_cpus(name: str, cpu: str) -> None:
    for s in OPS[name].samples:
        check(OPS[name], s, f"llvm -mcpu={cpu}")


@pytest.mark.parametrize("family", [f for f, ops in FAMILIES.items() if any(op.samples for op in ops)])
def test_the_gate_passes_what_is_right(family: str) -> None:
    for op in (op for op in FAMILIES[family] if op.name not in HOSTED and op.samples):
        check(op, op.samples[0], "llvm", verify="kernels")
