"""CUDA targets of a test mean the interpreted device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import pytest

from dnnc.backends.cuda.build import Compiler
from dnnc.backends.cuda.interpreted import InterpretedBackend, InterpretedDevice
from dnnc.backends.registry import BACKENDS
from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.compile_graph import compile_for
from dnnc.executable import Executable
from dnnc.ir.graph import Graph
from dnnc.ir.target import parse_target
from dnnc.options import CompileOptions
from dnnc.passes.schedule.problem import Template


class PlantedBackend(InterpretedBackend):
    """An interpreted backend with templates and a compiler of a test."""

    def __init__(
        self,
        *args: Any,
        templates: Sequence[Template] = (),
        only: Sequence[Template] | None = None,
        compiler: Compiler | None = None,
        **kwargs: Any,
    ) -> None:
        """`templates` come before the usual ones; `only` takes their place."""
        super().__init__(*args, **kwargs)
        self._planted, self._only, self._compiler = templates, only, compiler

    def templates(self, numerics: str, rounded: bool = False) -> Sequence[Template]:
        return [*self._planted, *(super().templates(numerics, rounded) if self._only is None else self._only)]

    @cached_property
    def compiler(self) -> Compiler:
        return self._compiler or InterpretedBackend.compiler.func(self)


def interpreted(device: InterpretedDevice | None = None, arch: str = "sm_90a", **parts: Any) -> PlantedBackend:
    """A backend whose device is an interpreter; see PlantedBackend."""
    return PlantedBackend(parse_target(f"cuda-interpreted -arch={arch}"), device=device, **parts)


def install(monkeypatch: pytest.MonkeyPatch, device: InterpretedDevice | None = None, **parts: Any) -> None:
    """For this test CUDA targets mean the interpreter, on this device or each on one of its own."""
    monkeypatch.setitem(BACKENDS, "cuda", partial(PlantedBackend, device=device, **parts))


def compile_interpreted(
    graph: Graph,
    names: tuple[Sequence[str], Sequence[str]],
    options: CompileOptions | None = None,
    device: InterpretedDevice | None = None,
) -> Executable:
    """Compile a graph for an interpreted device, without a cache."""
    return compile_for(graph, names, options or CompileOptions(target="cuda"), interpreted(device), KernelCache(None))
