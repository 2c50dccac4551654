"""Errors of a model with other weights, without a compilation for each: weights are parameters of one program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dnnc.quantization.calibration import Running, Tell
from dnnc.quantization.data import Feed, Samples
from dnnc.quantization.measure import Difference
from dnnc.quantization.onnx_graph import Model

Array = np.ndarray[Any, Any]


class Trial:
    """Tries weights.

    Args:
        m: the model.
        weights: names of the constants that may change.
        samples, feeds: of the model; the feeds that errors are measured with.
    """

    def __init__(
        self, m: Model, weights: Sequence[str], samples: Samples, feeds: Sequence[Feed], options: Mapping[str, Any],
        tell: Tell,
    ) -> None:  # fmt: skip
        self.original = {n: m.constants[n] for n in weights}
        self.feeds = feeds
        self._changed: set[str] = set()
        self.run = Running(m.proto, samples, {**options, "verify": False}, parameters=sorted(weights), tell=tell)
        self.want = [self.run.outputs(f) for f in feeds]

    def take(self, arrays: Mapping[str, Array]) -> None:
        """Use these weights, and the model's own for all others."""
        back = {n: self.original[n] for n in self._changed if n not in arrays}
        self.run.executable.refit({**back, **{n: np.ascontiguousarray(a) for n, a in arrays.items()}})
        self._changed = set(arrays)

    def difference(self, arrays: Mapping[str, Array]) -> Difference:
        """Of the outputs with these weights from the model's own."""
        self.take(arrays)
        out = Difference()
        for feed, want in zip(self.feeds, self.want):
            out.add(self.run.outputs(feed), want)
        return out

    def using(self, arrays: Mapping[str, Array]) -> Callable[..., Any]:
        """The model with these weights, to be called until the next ones come."""
        self.take(arrays)
        return self.run.executable
