"""Operands of a measured kernel as in a model's call: fresh activations, cold weights.

In: a workload. Out: for each parameter of its kernel what becomes of it between calls, and its bytes. Floats are drawn
from [-1, 1): zeros would let a GPU run faster than it does on numbers. Indices lie within their axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from dnnc.backends.check import calmed, draw, index_limits
from dnnc.backends.runtime.link import pack
from dnnc.ir.dtype import DType
from dnnc.ir.graph import Graph, Value
from dnnc.ir.loops.stmt import Kernel
from dnnc.passes.planning.fuse import Group
from dnnc.passes.planning.program import Scheduled, Step
from dnnc.passes.schedule.problem import Choice, Problem
from dnnc.passes.schedule.step import NAIVE

Array = np.ndarray[Any, Any]
WARM, COLD, OUTPUT = "warm", "cold", "output"
HELD = 3  # workloads whose operands the process of a device keeps in memory
PERIOD = 65521  # random numbers until they repeat, a prime so that no stride meets a period


class Workload(Protocol):
    """A kernel to be measured: its graph, its group, and its problem."""

    @property
    def rebuilt(self) -> tuple[Graph, Group, Problem]: ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Operand:
    """A kernel's parameter. `role`: WARM ones stay in place, COLD ones move at each call, an OUTPUT is written."""

    value: Value
    role: str
    dtype: DType
    nbytes: int


@dataclass(frozen=True)
class Operands:
    """Those of one task, in the order of the kernel's parameters."""

    task: Workload

    @cached_property
    def each(self) -> tuple[Operand, ...]:
        group, problem = self.task.rebuilt[1:]
        given = zip(problem.lowered.params, problem.kernel.entry.buffers)
        return tuple(
            Operand(v, _role(v, v in group.outputs, b.name in problem.constants), v.type.dtype, _nbytes(v))
            for v, b in given
        )

    @property
    def cold_bytes(self) -> int:
        """Of all operands of one call that are to be cold."""
        return sum(o.nbytes for o in self.each if o.role == COLD)

    def warm(self, seed: int = 0) -> dict[Value, Array]:
        """The bytes of the operands that stay, drawn anew."""
        graph = self.task.rebuilt[0]
        rng, step = np.random.default_rng(seed), self.step()
        inputs = {
            o.value: draw(rng, graph, o.value, {}, index_limits(step, o.value, {})) for o in self.each if o.role == WARM
        }
        return {v: pack(a, v.type).reshape(-1).view(np.uint8) for v, a in calmed(step, inputs).items()}

    def step(self, kernel: Kernel | None = None, choice: Choice | None = None) -> Step:
        """The call of a kernel of this task, as the gate takes it; of the naive one by default."""
        _, group, problem = self.task.rebuilt
        own = kernel or problem.kernel
        low = problem.lowered
        made = Scheduled.of(own, choice or NAIVE)
        return Step(group, problem.kernel, made, lambda: own, low.params, low.outputs, low.dims, problem.flops)


def _role(v: Value, written: bool, constant: bool) -> str:
    if written:
        return OUTPUT
    if not v.type.encoding.any_bytes:
        return WARM
    return COLD if constant and (v.type.dtype.is_float or v.type.dtype.bits <= 8) and v.type.dtype.kind != "b" else WARM


def _nbytes(v: Value) -> int:
    return int(str(v.type.nbytes))


def noise(dtype: DType, nbytes: int, seed: int = 0) -> Array:
    """Random elements of a type as so many bytes."""
    rng, n = np.random.default_rng(seed), -(-nbytes // dtype.bytes)
    some = (
        rng.random(min(n, PERIOD), dtype=np.float32) * 2 - 1
        if dtype.is_float
        else rng.integers(0, 2 ** min(dtype.bits - 1, 7), min(n, PERIOD))
    )
    return np.resize(some.astype(dtype.numpy).view(np.uint8), nbytes)


class Noise:
    """Random bytes by type, each made once, as long as the longest asked for."""

    def __init__(self, most: int = 2) -> None:
        self.most = most
        self._known: dict[DType, Array] = {}

    def of(self, dtype: DType, nbytes: int) -> Array:
        found = self._known.pop(dtype, None)
        if found is None or found.nbytes < nbytes:
            found = noise(dtype, nbytes)
        while len(self._known) >= self.most:
            self._known.pop(next(iter(self._known)))
        self._known[dtype] = found
        return found


@dataclass(frozen=True)
class Rotation:
    """Places of a call's cold operands: in a pool for each type, call k's in place k modulo `sets`."""

    sets: int  # places of each stretch
    strides: Mapping[int, int]  # bytes from a place to the next, by the operand's number
    starts: Mapping[int, int]  # byte of its pool at which an operand's stretch begins, by its number
    pools: Mapping[DType, int]  # bytes of each pool

    @staticmethod
    def over(operands: Operands, cold_bytes: int, most: int, align: int) -> Rotation:
        """As many places as let `cold_bytes` pass before one is met again, `most` at most."""
        total = operands.cold_bytes
        sets = max(1, min(most, -(-cold_bytes // total))) if total else 1
        cold = {k: o for k, o in enumerate(operands.each) if o.role == COLD and o.nbytes}
        strides = {k: -(-o.nbytes // align) * align for k, o in cold.items()}
        pools: dict[DType, int] = {}
        starts: dict[int, int] = {}
        for k, o in cold.items():
            starts[k] = pools.get(o.dtype, 0)
            pools[o.dtype] = starts[k] + sets * strides[k]
        return Rotation(sets, strides, starts, pools)

    def offset(self, k: int, call: int) -> int:
        """The byte of its pool at which operand k of a call begins."""
        return self.starts[k] + call % self.sets * self.strides[k]
