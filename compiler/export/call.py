"""What the function of an op is given: the node's operands by ONNX name, its types and attributes, and the writer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Union

from dnnc.export.writer import Writer
from dnnc.ir.dtype import DType
from dnnc.ir.graph import Node
from dnnc.ir.types import TensorType


@dataclass(frozen=True)
class Call:
    """`inputs`: names of the operands, None for absent ones."""

    node: Node
    inputs: Sequence[str | None]
    w: Writer

    @property
    def attrs(self) -> dict[str, Any]:
        return self.node.attrs

    @property
    def out(self) -> TensorType:
        return self.node.outputs[0].type

    def x(self, k: int = 0) -> str:
        """The name of an operand that is there."""
        name = self.inputs[k]
        assert name is not None
        return name

    def maybe(self, k: int) -> str | None:
        return self.inputs[k] if k < len(self.inputs) else None

    def type(self, k: int = 0) -> TensorType:
        v = self.node.inputs[k]
        assert v is not None
        return v.type

    @property
    def dtype(self) -> DType:
        """Of the first operand."""
        return self.type().dtype

    def array(self, k: int) -> Any:
        """The contents of an operand that is a constant; None of one that is not."""
        v, g = self.node.inputs[k], self.node.graph
        return None if v is None or g is None else g.constants.get(v)


Made = Union[str, Sequence[str]]
Convert = Callable[[Call], Made]
