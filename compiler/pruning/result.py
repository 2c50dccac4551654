"""What `dnnc.prune` and `dnnc.explore_pruning` give."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any

import onnx

from dnnc.ir.errors import count
from dnnc.quantization.reported import Reported
from dnnc.report import pruned as report
from dnnc.report.layout import Table
from dnnc.report.notebook import html_of
from dnnc.report.tables import plain_text


@dataclass(frozen=True)
class PrunedLayer:
    """A layer of the model.

    Attributes:
        name, kind: of its node.
        shape: of its weights, before; () where they are not constant.
        weights, left: how many weights there were, and how many are there now and not zero.
        before, after: seconds of its kernels; None: not measured.
        error: of the model's outputs where this layer alone is pruned; None: not measured.
        reason: why it stays as it was; "" where it does not.
    """

    name: str
    kind: str
    shape: tuple[int, ...] = ()
    weights: int = 0
    left: int = 0
    before: float | None = None
    after: float | None = None
    error: float | None = None
    reason: str = ""

    @property
    def density(self) -> float:
        """The share of the weights that is left."""
        return self.left / self.weights if self.weights else 1.0


@dataclass(frozen=True, repr=False)
class Pruned(Reported):
    """A pruned model and its report; print it.

    Attributes:
        model: the ONNX model.
        method, scope: that were asked for.
        layers: in the order of the nodes.
        samples: rows of the data.
        error: relative error of the outputs against those of before, on samples; None: not measured.
        agreement: share of rows of the outputs whose arg-max is that of before; None: not measured, or no rows.
        score: what `metric` gave before and after; None without one.
        before, after: seconds of all kernels of a call; None: not measured.
        sizes: bytes of the constants, before and after.
        operations: multiplications by weights that are not zero in a sample, before and after; None: the sizes are
            open.
        notes: what else was done or left.
        random: were errors measured on random numbers?
    """

    model: onnx.ModelProto
    method: str
    scope: str
    layers: tuple[PrunedLayer, ...]
    samples: int = 0
    error: float | None = None
    agreement: float | None = None
    score: tuple[float, float] | None = None
    before: float | None = None
    after: float | None = None
    sizes: tuple[int, int] = (0, 0)
    operations: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()
    random: bool = False
    name: str = "model"
    _options: dict[str, Any] = field(default_factory=dict)

    @property
    def weights(self) -> tuple[int, int]:
        """The weights of all layers with constant weights, and those that are left."""
        return sum(x.weights for x in self.layers), sum(x.left for x in self.layers)

    @property
    def sparsity(self) -> float:
        """The share of the weights of these layers that is zero or removed."""
        all_of_them, left = self.weights
        return 1 - left / all_of_them if all_of_them else 0.0

    def tables(self) -> list[Table]:
        """The report as tables."""
        return report.tables(self)

    def as_dict(self) -> dict[str, Any]:
        """The report as dicts, lists, strings and numbers."""
        names = (
            "method", "scope", "samples", "sparsity", "error", "agreement", "score", "before", "after", "sizes",
            "operations", "notes", "random",
        )  # fmt: skip
        layers = [{**asdict(x), "density": x.density} for x in self.layers]
        return {**{n: getattr(self, n) for n in names}, "layers": layers}

    def html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as a page."""
        report.write_html(self, path)

    def _repr_html_(self) -> str:
        return html_of(self.tables())

    def __repr__(self) -> str:
        return f"<Pruned {self.name[:60]}: {self.method}, {self.sparsity:.1%} of the weights gone; print it>"


@dataclass(frozen=True)
class Point:
    """A method at a sparsity.

    Attributes:
        method, sparsity: that were asked for; "none" is the model as it was.
        density: share of the weights that is left.
        seconds: of the kernels of a call.
        error, agreement, score: as of `Pruned`.
    """

    method: str
    sparsity: float
    density: float
    seconds: float | None = None
    error: float | None = None
    agreement: float | None = None
    score: float | None = None


@dataclass(frozen=True)
class Sensitivity:
    """A layer and what pruning it by magnitude costs and gains.

    Attributes:
        name, kind: of its node.
        weights: how many there are.
        errors: of the model's outputs where this layer alone is pruned, one for each sparsity.
        before: seconds of its kernels in the model as it was; None: not measured.
        seconds: the same where all layers are pruned, one for each sparsity; () where magnitude was not tried.
    """

    name: str
    kind: str
    weights: int
    errors: tuple[float, ...]
    before: float | None = None
    seconds: tuple[float | None, ...] = ()


@dataclass(frozen=True, repr=False)
class Exploration:
    """What pruning a model by several methods would cost and gain; print it.

    Attributes:
        points: methods and sparsities; the first is the model as it was.
        sparsities: of `layers`.
        layers: how much the outputs change where one layer alone is pruned.
        samples: rows of the data.
        notes: what else there is to say.
        random: were errors measured on random numbers?
    """

    points: tuple[Point, ...]
    sparsities: tuple[float, ...]
    layers: tuple[Sensitivity, ...]
    samples: int
    notes: tuple[str, ...] = ()
    random: bool = False
    name: str = "model"

    def tables(self) -> list[Table]:
        """The report as tables."""
        return report.exploration_tables(self)

    def as_dict(self) -> dict[str, Any]:
        """The report as dicts, lists, strings and numbers."""
        return {n: v for n, v in asdict(self).items() if n != "name"}

    def to_json(self) -> str:
        """The report as a JSON object."""
        return json.dumps(self.as_dict(), indent=2)

    def html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as a page with a plot."""
        report.write_exploration(self, path)

    def __str__(self) -> str:
        return plain_text(self.tables())

    def _repr_html_(self) -> str:
        return html_of(self.tables())

    def __repr__(self) -> str:
        return (
            f"<Exploration {self.name[:60]}: {count(len(self.points), 'point')}, "
            f"{count(len(self.layers), 'layer')}; print it>"
        )
