"""`dnnc.prune` and `dnnc.explore_pruning`: from a model and a share to a smaller model and its report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx

from dnnc.ir.errors import DnncError
from dnnc.pruning.explore import METHODS_TRIED, SPARSITIES, explored
from dnnc.pruning.options import PruneOptions
from dnnc.pruning.result import Exploration, Pruned, PrunedLayer
from dnnc.pruning.trial import Trial
from dnnc.pruning.work import Work
from dnnc.quantization.calibration import Running, Tell
from dnnc.quantization.layers import KINDS
from dnnc.quantization.measure import Difference, Times, scored, timed
from dnnc.quantization.onnx_graph import Model
from dnnc.quantization.reported import constant_bytes


def prune(
    model: Any,
    data: Any = None,
    *,
    inputs: Any = None,
    sparsity: float | Mapping[str, float] | None = None,
    method: str = "magnitude",
    scope: str = "layer",
    block: tuple[int, int] | str = (8, 8),
    multiple: int = 8,
    candidates: int = 0,
    bits: int | None = None,
    seed: int = 0,
    keep: Sequence[str] | str = (),
    samples: int | None = None,
    random: bool = False,
    metric: Callable[[Callable[..., Any]], float] | None = None,
    layer_errors: bool = False,
    measure: bool = True,
    progress: Tell | None = None,
    **options: Any,
) -> Pruned:
    """Prune a model: set weights of convolutions and products to zero, or remove channels.

    Args:
        model: a model of `dnnc.compile`, in float32: an .onnx file, its bytes, a ModelProto, a graph, a function, a
            module.
        data: typical inputs, for errors: an array, a dict of arrays by input name, or a list of either; or the path of
            a .npy or .npz file, or of a folder. Nothing else needs it.
        inputs: of a function or module, as of `dnnc.compile`.
        sparsity: the share of the weights that goes, by default 0.9; of "structured" the share of the output channels,
            by default 0.5. A dict gives it by patterns of layers' names, of which the first that fits holds.
        method: "magnitude": the smallest weights. "random": any. "2:4": the two smallest of each four input channels.
            "block": blocks of channels with the smallest mean square. "structured": whole output channels, with all
            that computes or reads them, so that the graph shrinks.
        scope: "layer": the same share of each layer. "global": the smallest of all layers. "lamp": the same by scores
            that can be compared between layers.
        block: output and input channels of a block, as (8, 8) or "8x8".
        multiple: of "structured": output channels that stay are rounded to this.
        candidates: of "structured": random choices of channels that are tried beside that by importance; the one with
            the fewest other arg-maxima, or the best metric, is taken.
        bits: let the weights of a layer that stay share 2^bits values, zero among them, which a k-means finds. Saving
            with `compress=True` then stores a codebook and codes of few bits.
        seed: of random choices.
        keep: patterns of names of layers that stay as they are.
        samples: how many samples to take at most.
        random: measure errors on random numbers where there is no data.
        metric: called with a function that takes a model's inputs and gives its outputs; returns a number that is
            better when it is larger, such as an accuracy.
        layer_errors: measure the error of each layer alone, too; not of "structured".
        measure: compile and compare the models of before and after: error, agreement, time of each layer.
        progress: called with (stage, done, of).
        **options: of `dnnc.compile`: target, threads, dims, cache ...

    Returns:
        The pruned model and its report; see Pruned.

    Raises:
        InputError: an option, or data that the model does not take, that is empty, or that is NaN or infinite; or a
            model that is quantized.
        DnncError: as of `dnnc.compile`.
    """
    asked = PruneOptions(
        sparsity, method, scope, block, multiple, candidates, bits, seed, keep, samples, random, metric,  # type: ignore[arg-type]
        layer_errors, measure, options,
    )  # fmt: skip
    return _result(Work(model, data, inputs, asked, progress or _silent))


def explore_pruning(
    model: Any,
    data: Any = None,
    *,
    inputs: Any = None,
    sparsities: Sequence[float] = SPARSITIES,
    methods: Sequence[str] = METHODS_TRIED,
    block: tuple[int, int] | str = (8, 8),
    keep: Sequence[str] | str = (),
    samples: int | None = None,
    random: bool = False,
    metric: Callable[[Callable[..., Any]], float] | None = None,
    progress: Tell | None = None,
    **options: Any,
) -> Exploration:
    """Prune a model by several methods to several sparsities; measure density, time and error of each.

    Args:
        model, data, inputs, block, keep, samples, random, metric, progress, **options: as of `prune`.
        sparsities: shares of the weights (or channels) that go.
        methods: that are tried; "2:4" has one sparsity.

    Returns:
        A point for each method and sparsity, and how sensitive the outputs are to each layer; see Exploration.

    Raises:
        InputError: no data and not `random`; otherwise as `prune`.
    """
    asked = PruneOptions(
        None, "magnitude", block=block, keep=keep, samples=samples, random=random, metric=metric, compile=options,  # type: ignore[arg-type]
    )  # fmt: skip
    return explored(Work(model, data, inputs, asked, progress or _silent), sparsities, methods)


def _silent(stage: str, done: int, of: int) -> None:
    """No progress."""


def _result(work: Work) -> Pruned:
    """The pruned model of some work, measured."""
    o = work.options
    work.tell("prune", 0, 1)
    arrays = {} if o.method == "structured" else work.masked(o)
    proto = work.without_channels(o) if o.method == "structured" else work.with_weights(arrays)
    if o.bits is not None:
        work.tell("share weights", 0, 1)
        arrays = work.shared(proto)
        proto = work.with_weights(arrays, proto)
    if not work.layers:
        work.notes.append("no layer can be pruned: the model is as it was")
    layers, operations = counted(work, proto)
    out = Pruned(
        proto, o.method, o.scope, layers, work.samples.rows if work.judged else 0,
        sizes=constant_bytes((work.model.proto, proto)),  # type: ignore[arg-type]
        operations=operations, notes=tuple(work.notes), random=o.random, name=work.name, _options=dict(o.compile),
    )  # fmt: skip
    if not o.measure:
        return out
    plain = Running(work.model.proto, work.samples, o.compile, tell=work.tell)
    pruned = Running(proto, work.samples, o.compile, tell=work.tell)
    difference = compared(work, plain, pruned)
    score = None if o.metric is None else (scored(o.metric, plain.executable), scored(o.metric, pruned.executable))
    errors = _layer_errors(work, arrays) if o.layer_errors and work.judged and arrays else {}
    before, after = (_times(work, r) for r in (plain, pruned))
    measured = tuple(
        replace(x, error=errors.get(x.name), before=before.layers.get(x.name), after=after.layers.get(x.name))
        for x in out.layers
    )
    return replace(
        out, layers=measured, score=score, before=before.total or None, after=after.total or None,
        error=None if difference is None else difference.error,
        agreement=None if difference is None else difference.agreement, notes=tuple(work.notes),
    )  # fmt: skip


def compared(work: Work, plain: Running, pruned: Running) -> Difference | None:
    """Of the outputs of two models; None without data."""
    if not work.judged:
        return None
    out = Difference()
    for k, feed in enumerate(work.feeds):
        work.tell("compare outputs", k, len(work.feeds))
        out.add(pruned.outputs(feed), plain.outputs(feed))
    return out


def _layer_errors(work: Work, arrays: Mapping[str, Any]) -> dict[str, float]:
    trial = Trial(work.model, list(arrays), work.samples, work.feeds, work.options.compile, work.tell)
    out = {}
    for k, layer in enumerate(work.layers):
        work.tell("errors of layers", k, len(work.layers))
        out[layer.node] = trial.difference({layer.weight: arrays[layer.weight]}).error
    return out


def _times(work: Work, run: Running) -> Times:
    """Of a model; empty where the target cannot be profiled."""
    work.tell("time kernels", 0, 1)
    try:
        return timed(run.executable, work.feeds[0], work.layers)
    except DnncError as e:
        note = f"times were not measured: {e}"
        work.notes += [note] if note not in work.notes else []
        return Times(0.0, {})


def counted(work: Work, proto: onnx.ModelProto) -> tuple[tuple[PrunedLayer, ...], tuple[int, int] | None]:
    """The layers with their weights, and the multiplications of a sample before and after."""
    after = Model(proto)
    every = {n.name: n for n in work.model.graph.node}
    reasons = {n: k.reason for n, k in work.kept.items()}
    rows, operations = [], [0, 0]
    known = True
    for name in [n for n in every if n in reasons or any(x.node == n for x in work.layers)]:
        n = every[name]
        weight = n.input[1] if len(n.input) > 1 else ""
        if weight not in work.model.constants:
            rows.append(PrunedLayer(name, n.op_type, reason=reasons.get(name, "")))
            continue
        old, new = work.model.constants[weight], after.constants[weight]
        left = int(np.count_nonzero(new))
        rows.append(PrunedLayer(name, n.op_type, old.shape, old.size, left, reason=reasons.get(name, "")))
        places = positions(work.model, n)
        known &= places is not None
        operations[0] += int(np.count_nonzero(old)) * (places or 0)
        operations[1] += left * (places or 0)
    return tuple(rows), (operations[0], operations[1]) if known and operations[0] else None


def positions(m: Model, n: onnx.NodeProto) -> int | None:
    """How often each weight of a layer is multiplied in a sample; None where sizes are open."""
    found = m.types.get(n.output[0] if n.op_type in KINDS else n.input[0])
    if found is None:
        return None
    kind = n.op_type
    sizes = found[1][2:] if kind in ("Conv", "ConvTranspose") else found[1][1:-1] if kind in KINDS else found[1][:1]
    return None if any(d is None for d in sizes) else int(np.prod([d or 1 for d in sizes], dtype=np.int64))
