"""What executables of all kinds share: how they look in a shell, and that they pickle and copy through the bytes that `save` writes."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from dnnc.ir.errors import InputError
from dnnc.report.layout import cut

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping
    from typing import BinaryIO

    from dnnc.ir.graph import Graph
    from dnnc.options import CompileOptions
    from dnnc.profile import Profile
    from dnnc.report import Report
    from dnnc.signature import TensorSpec


WIDTH = 160  # characters of a repr


class CompiledModel:
    """A base of executables that `save` to a file and have `options`, `inputs` and `outputs`."""

    if TYPE_CHECKING:

        @property
        def options(self) -> CompileOptions: ...

        @property
        def inputs(self) -> tuple[TensorSpec, ...]: ...

        @property
        def outputs(self) -> tuple[TensorSpec, ...]: ...

        @property
        def parameters(self) -> tuple[TensorSpec, ...]: ...

        @property
        def graph(self) -> Graph: ...

        @property
        def report(self) -> Report: ...

        def __call__(self, *args: Any, **named: Any) -> Any: ...

        def run(self, inputs: Any, outputs: Any = None) -> Any: ...

        def bind(self, inputs: Any, outputs: Any) -> Callable[[], None]: ...

        def refit(self, changed: Mapping[str, Any] | None = None) -> None: ...

        def source(self, stage: str, kernel: str | None = None) -> str: ...

        def profile(self, *args: Any, repeats: int | None = None, **named: Any) -> Profile: ...

        def save(self, path: str | os.PathLike[str] | BinaryIO, small: bool = False) -> None: ...

    def __repr__(self) -> str:
        """One line: `<Executable for llvm: image float32[N, 1, 8, 8] -> logits float32[N, 10]>`."""
        took, gave = (", ".join(map(_shown, specs)) for specs in (self.inputs, self.outputs))
        return f"<{type(self).__name__} for {self.options.target}: {cut(f'{took} -> {gave}', WIDTH - 40)}>"

    def __reduce__(self) -> Any:
        if getattr(self, "parameters", ()):
            raise InputError(
                "an executable with parameters cannot be pickled or copied, for they belong to their owner: f.save(path) writes it with their "
                "values as constants, and dnnc.load(path) reads that"
            )
        file = io.BytesIO()
        self.save(file)
        return _restored, (file.getvalue(), self.options.cache)


def _shown(s: TensorSpec) -> str:
    return f"{s.name} {s.dtype}[{', '.join(map(str, s.shape))}]"


def _restored(data: bytes, cache: Any) -> Any:
    from dnnc.loading import load

    return load(io.BytesIO(data), cache=cache)
