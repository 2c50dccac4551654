"""`dnnc.quantize`: from a float model and samples to a quantized model and its report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from dnnc.ir.errors import DnncError
from dnnc.quantization.agreement import AGREEMENT, REACH, SAMPLES, SURE, Improved, Improving, allowed, too_dear
from dnnc.quantization.calibration import Observed, Running, Tell, Wanted, observe
from dnnc.quantization.choice import Candidate, chosen
from dnnc.quantization.data import CHECKED, Feed, Samples, first_feeds, model_inputs, samples
from dnnc.quantization.decisions import Decisions
from dnnc.quantization.layers import Kept, Layer, check_patterns, found_layers, refusal
from dnnc.quantization.measure import Difference, Times, timed
from dnnc.quantization.onnx_graph import BLOCKS, FLOAT8, LEAST, float32_only, opened, refuse_quantized
from dnnc.quantization.options import WEIGHT_ONLY, QuantizeOptions
from dnnc.quantization.plan import Plan, is_weight_only, unusable
from dnnc.quantization.reported import constant_bytes
from dnnc.quantization.result import FLOAT, LayerResult, Quantized
from dnnc.quantization.simulation import Simulation
from dnnc.quantization.smoothing import smooth, smoothable
from dnnc.quantization.write import written

Array = np.ndarray[Any, Any]
MATRICES = 512 << 20  # bytes of GPTQ's matrices at a time
MOSTLY = 0.5  # share of products in the weights from which on `auto` tries weights alone in few bits


def quantize(
    model: Any,
    data: Any = None,
    *,
    inputs: Any = None,
    scheme: str = "int8",
    method: str = "mse",
    percentile: float = 99.99,
    activations: str = "uint8",
    form: str = "qdq",
    block: int | None = None,
    bias_correction: bool = False,
    smooth: float | None = None,
    gptq: bool = False,
    keep: Sequence[str] | str = (),
    samples: int | None = None,
    random: bool = False,
    agreement: float | None = None,
    max_error: float | None = None,
    metric: Callable[[Callable[..., Any]], float] | None = None,
    layer_errors: bool = False,
    measure: bool = True,
    progress: Tell | None = None,
    **options: Any,
) -> Quantized:
    """Quantize a model.

    Args:
        model: a model of `dnnc.compile`, in float32: an .onnx file, its bytes, a ModelProto, a graph, a function, a
            module.
        data: typical inputs: an array, a dict of arrays by input name, or a list or iterator of either; or the path of
            a .npy or .npz file, or of a folder. Some 100 samples do.
        inputs: of a function or module, as of `dnnc.compile`.
        scheme: "int8": weights and activations of convolutions and products in 8 bits. "w8a16", "w4a16": weights of
            products alone, in 8 or 4 bits; activations stay float. "fp8": both in e4m3. "int16": both in 16 bits, as
            three products of bytes. "auto": for each layer the fastest scheme of small error, within `max_error`.
        method: how ranges of activations are found: "mse" (least square error), "minmax", "percentile", "entropy".
        percentile: with that method, the share of numbers that a range holds, in percent.
        activations: "uint8" with a zero point, or "int8" about 0.
        form: "qdq": QuantizeLinear only where a layer reads, so that bias, activation and residual stay exact.
            "operators": also behind each layer, as ONNX Runtime needs it for its integer kernels. "nbits": weights as
            com.microsoft's MatMulNBits.
        block: weights along a sum that share a scale, for w8a16 and w4a16; 0: one scale for each output channel. By
            default 32 in 4 bits and 0 in 8.
        bias_correction: shift biases by the mean that rounding of weights adds to each output channel.
        smooth: SmoothQuant's alpha from 0 to 1, usually 0.5: scale goes from the activations behind layer
            normalizations to the weights.
        gptq: round weights so that the errors of sums over the samples become small, in place of to the nearest.
        keep: patterns of names of layers that stay float.
        samples: how many samples to take at most.
        random: calibrate on random numbers where there is no data: right for speed, wrong for accuracy.
        agreement: for "int8" and "fp8": the share of rows of the outputs, from 0 to 1, whose arg-max shall be that of
            float. Layers get 16 bits or stay float until samples that gave no ranges say so. By default 0.99 where few
            arg-maxes differ; a model far from that keeps all layers in 8 bits, with a note. 0: no bound.
        max_error: bound for "auto": relative error of the outputs, by default 0.05; with `metric` the loss of that.
        metric: called with a function that takes a model's inputs and gives its outputs; returns a number that is
            better when it is larger, such as an accuracy. For "auto".
        layer_errors: measure the error of each layer alone, too. "auto" always does.
        measure: compile and compare the float and the quantized model: error, agreement, time of each layer.
        progress: called with (stage, done, of).
        **options: of `dnnc.compile`: target, threads, dims, cache ...

    Returns:
        The quantized model and its report; see Quantized.

    Raises:
        InputError: an option, or data that the model does not take, that is empty, or that is NaN or infinite; or a
            model that is quantized already.
        DnncError: as of `dnnc.compile`.
    """
    asked = QuantizeOptions(
        scheme, method, percentile, activations, form, block, bias_correction, smooth, gptq, keep, samples,  # type: ignore[arg-type]
        random, agreement, max_error, metric, layer_errors, measure, options,
    )  # fmt: skip
    return _Work(model, data, inputs, asked, progress or _silent).run()


def _silent(stage: str, done: int, of: int) -> None:
    """No progress."""


@dataclass(frozen=True)
class _Judged:
    """A quantized model, how far it is from the float model, and times of both; None: not measured."""

    proto: Any
    difference: Difference
    decisions: Decisions
    times: tuple[Times, Times] | None

    def too_dear(self, in_bytes: _Judged) -> bool:
        """Does this one cost too much of what the one in bytes gains?"""
        return self.times is not None and in_bytes.times is not None and too_dear(*in_bytes.times, self.times[1])

    def slower(self, nodes: Iterable[str]) -> set[str]:
        """Layers that take longer than in float."""
        if self.times is None:
            return set()
        before, after = (t.layers for t in self.times)
        return {n for n in nodes if after.get(n, 0.0) > before.get(n, 0.0)}


class _Work:
    """The steps of a quantization."""

    def __init__(self, model: Any, data: Any, inputs: Any, options: QuantizeOptions, tell: Tell) -> None:
        self.options, self.tell = options, tell
        self.notes: list[str] = []
        self._before: Times | None = None  # of the float model
        self.model = opened(model, _opset(options), inputs)
        refuse_quantized(self.model)
        float32_only(self.model)
        self.name = Path(model).name if isinstance(model, (str, os.PathLike)) else self.model.graph.name or "model"
        dims = options.compile.get("dims") or {}
        self.samples: Samples = samples(data, model_inputs(self.model.inputs, dims), options.samples, options.random)
        self.layers, self.kept = self._layers()
        if len(self._schemes) > 1 and self.model.opset < BLOCKS:
            self.model = opened(model, BLOCKS, inputs)
            self.layers, self.kept = self._layers()

    def run(self) -> Quantized:
        """All of it."""
        if self.options.smooth is not None:
            self._smooth()
        plan = Plan(self.model, self.options, self._observe())
        for node, reason in unusable(self.layers, plan.observed).items():
            if any(not is_weight_only(s) for s in self._schemes):
                self._keep(node, reason)
        if self.options.gptq:
            self._round_by_products(plan)
        if self.options.scheme == "auto":
            return self._auto(plan)
        (scheme,) = self._schemes
        return self._all(plan, dict.fromkeys((x.node for x in self.layers), scheme))

    # --- layers -------------------------------------------------------------------------------------------------------

    @property
    def _schemes(self) -> tuple[str, ...]:
        """That layers may take."""
        if self.options.scheme != "auto":
            return (self.options.scheme,)
        sizes = {x.node: self.model.constants[x.weight].size for x in self.layers}
        products = sum(sizes[x.node] for x in self.layers if x.kind != "Conv")
        return ("int8", *WEIGHT_ONLY) if products > MOSTLY * sum(sizes.values()) else ("int8",)

    def _layers(self) -> tuple[list[Layer], dict[str, Kept]]:
        """Layers that may be quantized, and those that stay float."""
        layers, others = found_layers(self.model)
        kept = {k.node: k for k in others}
        out = []
        for layer in layers:
            pattern = self.options.keeps(layer.node)
            reason = f"kept by {pattern!r}" if pattern else ""
            if not reason and self.options.scheme != "auto":
                reason = refusal(layer, self.options.scheme, self.options)
            if reason:
                kept[layer.node] = Kept(layer.node, layer.kind, reason)
            else:
                out.append(layer)
        check_patterns("keep", self.options.keep, [x.node for x in layers])
        return out, kept

    def _keep(self, node: str, reason: str) -> None:
        layer = next(x for x in self.layers if x.node == node)
        self.kept[node] = Kept(node, layer.kind, reason)
        self.layers = [x for x in self.layers if x.node != node]

    def _smooth(self) -> None:
        """SmoothQuant, and the layers of the changed model."""
        groups = smoothable(self.model, self.layers)
        if not groups:
            self.notes.append("SmoothQuant: no layer normalization is read by products alone, so nothing was moved")
            return
        layers = tuple(x for some in groups.values() for x in some)
        seen = observe(self.model, self.samples, Wanted(peaks=layers), self.options.compile, self.tell)
        assert self.options.smooth is not None
        changed = smooth(self.model, groups, seen.peaks, self.options.smooth)
        self.notes.append(f"SmoothQuant: scales moved behind {len(changed)} layer normalizations")
        self.layers, self.kept = self._layers()

    # --- calibration --------------------------------------------------------------------------------------------------

    def _observe(self) -> Observed:
        values: tuple[str, ...] = ()
        plan = Plan(self.model, self.options, Observed())
        if any(not is_weight_only(s) for s in self._schemes):
            values = tuple(plan.placement(dict.fromkeys((x.node for x in self.layers), "int8"), self.layers).readers)
        means = tuple(x for x in self.layers if x.bias) if self.options.bias_correction else ()
        bins = self.options.method != "minmax" and self.options.scheme != "fp8"
        wanted = Wanted(values, means=means, bins=bins)
        return observe(self.model, self.samples, wanted, self.options.compile, self.tell)

    def _round_by_products(self, plan: Plan) -> None:
        """GPTQ, for as many layers at a time as there is memory for."""
        grids = self._grids(plan)
        for some in self._portions():
            seen = observe(self.model, self.samples, Wanted(products=some), self.options.compile, self.tell)
            plan.observed.products = seen.products
            for k, layer in enumerate(some):
                self.tell("round weights", k, len(some))
                for scheme in self._schemes:
                    if not refusal(layer, scheme, self.options):
                        plan.weight(layer, scheme, grids.get(layer.x) if scheme == "int8" else None)
        plan.observed.products = {}

    def _portions(self) -> Iterator[tuple[Layer, ...]]:
        some: list[Layer] = []
        total = 0
        for layer in self.layers:
            if layer.group > 1:
                continue  # few weights a sum: there is nowhere to move an error to
            terms = layer.matrix(self.model.constants[layer.weight]).shape[1]
            if some and total + 4 * terms**2 > MATRICES:
                yield tuple(some)
                some, total = [], 0
            some, total = [*some, layer], total + 4 * terms**2
        if some:
            yield tuple(some)

    def _grids(self, plan: Plan) -> dict[str, Any]:
        scheme = next((s for s in self._schemes if not is_weight_only(s)), None)
        if scheme is None:
            return {}
        return plan.grids(plan.placement(dict.fromkeys((x.node for x in self.layers), scheme), self.layers), scheme)

    # --- results ------------------------------------------------------------------------------------------------------

    def _all(self, plan: Plan, schemes: Mapping[str, str]) -> Quantized:
        """Every layer in one scheme."""
        if not schemes:
            self.notes.append("no layer can be quantized: the model is as it was")
        if not self.options.measure:
            return self._result(written(plan, self.layers, schemes), schemes, {})
        feeds = list(islice(self.samples, SAMPLES))
        plain = Running(self.model.proto, self.samples, self.options.compile, tell=self.tell)
        want = [plain.outputs(f) for f in feeds]
        judged = self._judged(plan, schemes, plain, feeds, want)
        reasons: dict[str, str] = {}
        improved = self._improved(plan, schemes, plain, judged)
        if improved is not None:
            in_bytes = schemes, judged
            schemes, reasons = improved.schemes, dict(improved.reasons)
            judged = self._judged(plan, schemes, plain, feeds, want)
            slow = judged.slower(n for n, s in schemes.items() if s == "int16")
            if slow:
                schemes = {n: s for n, s in schemes.items() if n not in slow}
                judged = self._judged(plan, schemes, plain, feeds, want)
            if self.options.agreement is None and judged.too_dear(in_bytes[1]):
                (schemes, judged), reasons = in_bytes, {}
                self.notes[-1] = improved.dear
        errors: dict[str, float] = {}
        if self.options.layer_errors and schemes:
            scheme = self.options.scheme
            some = feeds[:CHECKED]
            simulation = Simulation(plan, self.layers, scheme, self.samples, some, want[:CHECKED], self.tell)
            for k, layer in enumerate(self.layers):
                self.tell("errors of layers", k, len(self.layers))
                errors[layer.node] = simulation.difference({layer.node: scheme}).error
        out, times = self._result(judged.proto, schemes, reasons), judged.times
        if times is not None:
            layers = tuple(
                replace(x, before=times[0].layers.get(x.name), after=times[1].layers.get(x.name))
                if x.scheme != FLOAT
                else replace(x, before=times[0].layers.get(x.name))
                for x in out.layers
            )
            out = replace(out, layers=layers, before=times[0].total, after=times[1].total)
        layers = tuple(replace(x, error=errors.get(x.name)) for x in out.layers)
        return replace(out, layers=layers, error=judged.difference.error, agreement=judged.difference.agreement)

    def _judged(
        self, plan: Plan, schemes: Mapping[str, str], plain: Running, feeds: Sequence[Feed], want: Sequence[Any]
    ) -> _Judged:
        """The model with these schemes, compiled and compared."""
        proto = written(plan, self.layers, schemes)
        quantized = Running(proto, self.samples, self.options.compile, tell=self.tell)
        difference, decisions = Difference(), Decisions()
        for k, (feed, w) in enumerate(zip(feeds, want)):
            self.tell("compare outputs", k, len(feeds))
            got = quantized.outputs(feed)
            difference.add(got, w)
            decisions.add(got, w)
        return _Judged(proto, difference, decisions, self._times(plain, quantized, feeds[0], plan, schemes))

    def _improved(self, plan: Plan, schemes: Mapping[str, str], plain: Running, judged: _Judged) -> Improved | None:
        """More bits for some layers, where 8 bits change decisions."""
        bound, changed = self.options.agreement, judged.decisions.changed
        if self.options.scheme not in ("int8", "fp8") or self.options.random or not schemes or changed is None:
            return None
        if bound is None and changed > REACH:
            self.notes.append(
                f"about {changed:.0%} of the arg-maxes would differ from float, to which all layers contribute; "
                f"agreement={AGREEMENT:g} gives layers more bits until they agree"
            )
            return None
        if changed <= SURE * allowed(bound, judged.decisions.rows):
            return None
        found = Improving(plan, self.layers, schemes, self.samples, plain, judged.times, self.tell).run()
        if found is not None:
            self.notes.append(found.note)
        return found

    def _times(
        self, plain: Running, quantized: Running, feed: Feed, plan: Plan, schemes: Mapping[str, str]
    ) -> tuple[Times, Times] | None:
        """Of both models; None where the target cannot be profiled."""
        self.tell("time kernels", 0, 2)
        try:
            if self._before is None:
                self._before = timed(plain.executable, feed, self.layers)
            self.tell("time kernels", 1, 2)
            return self._before, timed(quantized.executable, feed, self.layers, plan.placement(schemes, self.layers))
        except DnncError as e:
            self.notes.append(f"times were not measured: {e}")
            return None

    def _result(self, proto: Any, schemes: Mapping[str, str], reasons: Mapping[str, str]) -> Quantized:
        """A report without figures."""
        every = {
            x.node: LayerResult(x.node, x.kind, schemes.get(x.node, FLOAT), reason=reasons.get(x.node, ""))
            for x in self.layers
        }
        return self._report(proto, every)

    def _report(self, proto: Any, every: dict[str, LayerResult]) -> Quantized:
        every |= {k.node: LayerResult(k.node, k.kind, FLOAT, reason=k.reason) for k in self.kept.values()}
        order = {n.name: k for k, n in enumerate(self.model.graph.node)}
        layers = tuple(sorted(every.values(), key=lambda x: order.get(x.name, len(order))))
        before, after = constant_bytes((self.model.proto, proto))
        options = dict(self.options.compile)
        return Quantized(
            proto, self.options.scheme, layers, self.samples.rows, sizes=(before, after), notes=tuple(self.notes),
            random=self.options.random, name=self.name, _options=options,
        )  # fmt: skip

    def _auto(self, plan: Plan) -> Quantized:
        """For each layer what gains time at the least error."""
        feeds = first_feeds(self.samples)
        candidate = Candidate(
            self.model, plan, self.layers, self._schemes, self.samples, feeds, self.options, self.tell
        )
        made = chosen(candidate)
        self.notes += made.notes
        out = self._report(made.proto, dict(made.layers))
        layers = tuple(
            x if x.before is not None or x.name in made.layers else replace(x, before=made.before.layers.get(x.name))
            for x in out.layers
        )
        return replace(
            out, layers=layers, error=made.error, agreement=made.agreement, score=made.score, before=made.before.total,
            after=made.after.total,
        )  # fmt: skip


def _opset(o: QuantizeOptions) -> int:
    """The opset that a scheme needs."""
    if o.scheme == "fp8":
        return FLOAT8
    blocks = o.form != "nbits" and any(o.block_of(s) or o.bits(s) < 8 for s in WEIGHT_ONLY if o.scheme == s)
    return BLOCKS if blocks else LEAST
