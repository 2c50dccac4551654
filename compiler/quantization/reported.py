"""What results of tools that make another model of a model share: files, the compiled model, the report."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx

from dnnc.driver import compile
from dnnc.executable import Executable
from dnnc.export.files import with_sparse_weights, write
from dnnc.ir import checks
from dnnc.ir.errors import InputError
from dnnc.report.layout import Table
from dnnc.report.tables import plain_text


class Reported(ABC):
    """A model and its report. Dataclasses that derive from it have `model`, and `_options` of `dnnc.compile`."""

    model: onnx.ModelProto
    _options: dict[str, Any]

    @abstractmethod
    def tables(self) -> Sequence[Table]:
        """The report as tables."""

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """The report as dicts, lists, strings and numbers."""

    @abstractmethod
    def html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as a page."""

    def save(self, path: str | os.PathLike[str], compress: bool = False) -> None:
        """Write the model: as ONNX where the name ends in .onnx, compiled where it ends in .dnnc.

        Args:
            compress: of a .dnnc file, as of `Executable.save`. An .onnx file then has weights of many zeros as sparse
                initializers.
        """
        path = checks.path(path, "path")
        suffix = Path(path).suffix.lower()
        if suffix == ".onnx":
            write(with_sparse_weights(self.model) if compress else self.model, path)
        elif suffix == ".dnnc":
            self.compile().save(path, compress=compress)
        else:
            raise InputError(f"{path}: the model is written as .onnx, or compiled as .dnnc")

    def compile(self, **options: Any) -> Executable:
        """Compile the model; `options` as of `dnnc.compile`, by default those that it was made with."""
        compiled: Executable = compile(self.model, **{**self._options, **options})
        return compiled

    def to_json(self) -> str:
        """The report as a JSON object."""
        return json.dumps(self.as_dict(), indent=2)

    def text(self) -> str:
        """The report as text."""
        return plain_text(self.tables())

    def __str__(self) -> str:
        return self.text()


def constant_bytes(models: Sequence[onnx.ModelProto]) -> tuple[int, ...]:
    """Bytes of the constants of models."""
    return tuple(sum(t.ByteSize() for t in m.graph.initializer) for m in models)
