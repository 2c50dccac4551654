"""What `dnnc.quantize` gives: the model, and what each of its layers won and cost."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any

import onnx

from dnnc.ir.errors import count
from dnnc.quantization.reported import Reported
from dnnc.report.layout import Table
from dnnc.report.notebook import html_of
from dnnc.report.quantized import tables, write_html

FLOAT = "float"


@dataclass(frozen=True)
class LayerResult:
    """A layer of the model.

    Attributes:
        name, kind: of its node.
        scheme: int8, w8a16, w4a16, fp8, or float.
        before, after: seconds of its kernels in float and in the scheme that was measured; None: not measured.
        error: of the model's outputs where this layer alone is quantized; None: not measured.
        reason: why it stays float; "" where it does not.
    """

    name: str
    kind: str
    scheme: str
    before: float | None = None
    after: float | None = None
    error: float | None = None
    reason: str = ""

    @property
    def won(self) -> float | None:
        """Seconds."""
        return None if self.before is None or self.after is None else self.before - self.after


@dataclass(frozen=True, repr=False)
class Quantized(Reported):
    """A quantized model and its report; print it.

    Attributes:
        model: the ONNX model.
        scheme: that was asked for.
        layers: in the order of the nodes.
        samples: rows of the calibration data.
        error: relative error of the outputs against float, on samples; None: not measured.
        agreement: share of rows of the outputs whose arg-max is that of float; None: not measured, or no rows.
        score: what `metric` gave for the float and the quantized model; None without one.
        before, after: seconds of all kernels of a call, float and quantized; None: not measured.
        sizes: bytes of the constants, float and quantized.
        notes: what else was done or left.
        random: was it calibrated on random numbers?
    """

    model: onnx.ModelProto
    scheme: str
    layers: tuple[LayerResult, ...]
    samples: int
    error: float | None = None
    agreement: float | None = None
    score: tuple[float, float] | None = None
    before: float | None = None
    after: float | None = None
    sizes: tuple[int, int] = (0, 0)
    notes: tuple[str, ...] = ()
    random: bool = False
    name: str = "model"
    _options: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The report as dicts, lists, strings and numbers."""
        names = ("scheme", "samples", "error", "agreement", "score", "before", "after", "sizes", "notes", "random")
        layers = [{**asdict(x), "won": x.won} for x in self.layers]
        return {**{n: getattr(self, n) for n in names}, "layers": layers}

    def html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as a page."""
        write_html(self, path)

    def tables(self) -> list[Table]:
        """The report as tables."""
        return tables(self)

    def _repr_html_(self) -> str:
        return html_of(self.tables())

    def __repr__(self) -> str:
        quantized = sum(x.scheme != FLOAT for x in self.layers)
        return (
            f"<Quantized {self.name[:60]}: {quantized} of {count(len(self.layers), 'layer')} as "
            f"{self.scheme}; print it>"
        )
