"""The scan of `dnnc prune --explore`: methods and sparsities of the whole model, and the sensitivity of each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx

from dnnc.ir import checks
from dnnc.ir.errors import DnncError, InputError
from dnnc.pruning.options import HALF, PruneOptions
from dnnc.pruning.result import Exploration, Point, Sensitivity
from dnnc.pruning.trial import Trial
from dnnc.pruning.work import NO_DATA, Work
from dnnc.quantization.calibration import Running
from dnnc.quantization.measure import Difference, scored, timed
from dnnc.quantization.onnx_graph import Model

SPARSITIES = (0.5, 0.7, 0.8, 0.9, 0.95)
METHODS_TRIED = ("magnitude", "2:4", "block", "structured")


def explored(work: Work, sparsities: Sequence[float], methods: Sequence[str]) -> Exploration:
    """All points and the sensitivity of all layers. InputError: no data, no sparsity, or one that is none."""
    if not work.judged:
        raise InputError(NO_DATA)
    shares = sorted(set(checks.sequence(tuple(sparsities), "sparsities")))
    if not shares:
        raise InputError("sparsities: expected at least one share, such as 0.9")
    tried = [o for name in dict.fromkeys(methods) for o in _options(work.options, name, shares)]
    plain = Running(work.model.proto, work.samples, work.options.compile, tell=work.tell)
    want = [plain.outputs(f) for f in work.feeds]
    point, before = _point(work, "none", 0.0, work.model.proto, plain, None)
    points, times = [point], {}
    for k, o in enumerate(tried):
        work.tell("methods and sparsities", k, len(tried))
        proto = work.without_channels(o, False) if o.method == "structured" else work.with_weights(work.masked(o))
        point, times[o.method, o.default] = _point(
            work, o.method, o.default, proto, Running(proto, work.samples, o.compile), want
        )
        points.append(point)
    by_share = [times.get(("magnitude", s), {}) for s in shares]
    layers = [
        replace(x, before=before.get(x.name), seconds=tuple(t.get(x.name) for t in by_share) if any(by_share) else ())
        for x in _sensitivities(work, shares)
    ]
    return Exploration(
        tuple(points),
        tuple(shares),
        tuple(layers),
        work.samples.rows,
        tuple(work.notes),
        work.options.random,
        work.name,
    )


def _options(o: PruneOptions, method: str, shares: Sequence[float]) -> list[PruneOptions]:
    """Of one method at each sparsity."""
    return [replace(o, method=method, sparsity=s) for s in ((None,) if method == "2:4" else shares)]


def _point(
    work: Work, method: str, sparsity: float, proto: onnx.ModelProto, run: Running, want: Any
) -> tuple[Point, Mapping[str, float]]:
    """Measure a model, and its layers by name, in seconds.

    `want`: the outputs of the model as it was; None for that model itself.
    """
    seconds: float | None = None
    layers: Mapping[str, float] = {}
    difference = Difference()
    try:
        found = timed(run.executable, work.feeds[0], work.layers)
        seconds, layers = found.total, found.layers
    except DnncError as e:
        note = f"times were not measured: {e}"
        work.notes += [note] if note not in work.notes else []
    for feed, expected in zip(work.feeds, want or ()):
        difference.add(run.outputs(feed), expected)
    metric = work.options.metric
    whole = {x.weight: work.model.constants[x.weight].size for x in work.layers}
    now = Model(proto).constants
    density = sum(int(np.count_nonzero(now[n])) for n in whole) / max(sum(whole.values()), 1)
    judged = want is not None
    point = Point(
        method, HALF if method == "2:4" else sparsity, density, seconds,
        difference.error if judged else 0.0, difference.agreement if judged else None,
        None if metric is None else scored(metric, run.executable),
    )  # fmt: skip
    return point, layers


def _sensitivities(work: Work, shares: Sequence[float]) -> list[Sensitivity]:
    if not work.layers:
        return []
    weights = list({x.weight for x in work.layers})
    trial = Trial(work.model, weights, work.samples, work.feeds, work.options.compile, work.tell)
    options = _options(work.options, "magnitude", shares)
    out = []
    for k, layer in enumerate(work.layers):
        work.tell("sensitivity of layers", k, len(work.layers))
        errors = tuple(trial.difference(work.masked(o, [layer])).error for o in options)
        out.append(Sensitivity(layer.node, layer.kind, int(work.model.constants[layer.weight].size), errors))
    return out
