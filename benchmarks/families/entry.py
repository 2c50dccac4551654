"""What a builder of a model gives: a module with a description of its inputs, and short ways to write it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from onnx import ModelProto
from torch import Tensor, nn

Size = int | str  # a number, "batch", or "NAME:SIZE" for a size that may be symbolic
Row = dict[str, Any]


@dataclass(frozen=True)
class Made:
    """`inputs` are the manifest's rows, whose shapes hold `Size`s. `keywords`: the module takes them by name."""

    module: nn.Module
    inputs: list[Row]
    keywords: dict[str, Any] = field(default_factory=dict)
    by_name: bool = False
    settled: bool = True  # draw and scale its weights


@dataclass(frozen=True)
class Drawn:
    """A finished model, for what is written with onnx.helper; "batch" in its shapes is a symbolic size."""

    model: ModelProto
    inputs: list[Row]


@dataclass(frozen=True)
class Entry:
    """A model of the corpus. `make(batch)` builds it."""

    name: str
    family: str
    source: str
    make: Callable[[int], Made | Drawn]


class Flat(nn.Module):
    """A module with tensors as arguments and a tuple of the first `most` tensors of its result."""

    def __init__(self, made: Made, most: int = 4) -> None:
        super().__init__()
        self.inner, self.names, self.keywords, self.by_name = (
            made.module,
            [i["name"] for i in made.inputs],
            made.keywords,
            made.by_name,
        )
        self.most = most

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(self.names, given)) if self.by_name else {}
        result = self.inner(*(() if self.by_name else given), **named, **self.keywords)
        return tuple(_tensors(result)[: self.most])


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, dict):
        result = list(result.values())
    return [t for r in result for t in _tensors(r)] if isinstance(result, (tuple, list)) else []


# --- inputs -----------------------------------------------------------------------------------------------------------


def floats(name: str, *shape: Size, **fill: float) -> Row:
    return {"name": name, "dtype": "float32", "shape": list(shape), **fill}


def image(channels: int = 3, height: int = 64, width: int = 64, name: str = "x") -> Row:
    """Normalized images."""
    return floats(name, "batch", channels, height, width)


def integers(name: str, *shape: Size, hi: int, lo: int = 0, **fill: Any) -> Row:
    return {"name": name, "dtype": "int64", "shape": list(shape), "lo": lo, "hi": hi, **fill}


def tokens(length: int = 24, vocabulary: int = 500, name: str = "input_ids") -> Row:
    """Token ids; 0 to 3 are left to special tokens."""
    return integers(
        name, "batch", f"{name}_length:{length}" if name != "input_ids" else f"length:{length}", lo=4, hi=vocabulary
    )


def mask(length: int = 24, name: str = "attention_mask", size: str = "length") -> Row:
    """A mask of padded sequences: ones, then zeros."""
    return {"name": name, "dtype": "int64", "shape": ["batch", f"{size}:{length}"], "prefix": True}


def edges(nodes: int, count: int, name: str = "edge_index") -> Row:
    """Sources and targets of directed edges in no order."""
    return integers(name, 2, f"edges:{count}", hi=nodes)


def sizes_at(shape: list[Size], batch: int) -> list[int]:
    """A shape in numbers."""
    return [s if isinstance(s, int) else batch if s == "batch" else int(s.partition(":")[2]) for s in shape]


def symbols_of(shape: list[Size]) -> dict[int, str]:
    """The names of a shape's sizes that may be symbolic, by axis."""
    return {k: s.partition(":")[0] for k, s in enumerate(shape) if isinstance(s, str)}
