"""`scheme="auto"`: for each layer the scheme that gains time at the least error, under a budget for all of them.

times     of each layer's kernels, in float and in each scheme, as the compiled models run
errors    of the outputs with one layer quantized, by the simulation
choice    layers by time won over error: as many at a time as stay in the budget together
check     the model that results is compiled: its error has to hold, and a layer that gains nothing in it goes back
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from dnnc.quantization.calibration import Running, Tell
from dnnc.quantization.data import Feed, Samples
from dnnc.quantization.layers import Layer, refusal
from dnnc.quantization.measure import Difference, Times, scored, timed
from dnnc.quantization.onnx_graph import Model
from dnnc.quantization.options import BUDGET, QuantizeOptions
from dnnc.quantization.plan import Plan
from dnnc.quantization.result import FLOAT, LayerResult
from dnnc.quantization.simulation import Simulation
from dnnc.quantization.write import written
from dnnc.report.tables import show_seconds

Array = np.ndarray[Any, Any]
Schemes = dict[str, str]
GAIN = 0.97  # a scheme gains where its time is below this share of float's: what is nearer is noise
SECONDS = 30.0  # that all errors may take together; the number of feeds follows
LEAST_FEEDS = 2
TRIALS = 24  # of several layers together
CHECKS = 3  # times that the result is written again because a layer gains nothing in it


@dataclass(frozen=True)
class Candidate:
    """A model and what may become of it."""

    model: Model
    plan: Plan
    layers: Sequence[Layer]
    schemes: Sequence[str]
    samples: Samples
    feeds: Sequence[Feed]
    options: QuantizeOptions
    tell: Tell


@dataclass
class Choice:
    """What was chosen, with its figures."""

    proto: onnx.ModelProto
    layers: dict[str, LayerResult]
    error: float
    agreement: float | None
    score: tuple[float, float] | None
    before: Times
    after: Times
    notes: list[str] = field(default_factory=list)


def chosen(c: Candidate) -> Choice:
    """Choose, and check what was chosen."""
    return _Chooser(c).run()


class _Chooser:
    def __init__(self, c: Candidate) -> None:
        self.c = c
        self.plain = Running(c.model.proto, c.samples, c.options.compile, tell=c.tell)
        self.want = [self.plain.outputs(f) for f in c.feeds]
        c.tell("time kernels", 0, len(c.schemes) + 1)
        self.before = timed(self.plain.executable, c.feeds[0], c.layers)
        self.times: dict[str, Times] = {}
        self.errors: dict[tuple[str, str], float] = {}
        self.reasons: dict[str, str] = {}
        self.budget = BUDGET if c.options.max_error is None else c.options.max_error
        self.score = None if c.options.metric is None else self._metric(self.plain.executable)
        self.notes: list[str] = []

    def run(self) -> Choice:
        """The choice."""
        self._time_schemes()
        moves = self._moves()
        taken: Schemes = {}
        if moves:
            self.simulation = Simulation(
                self.c.plan, self.c.layers, "int8", self.c.samples, self.c.feeds, self.want, self.c.tell
            )
            self._fit_feeds(len(moves) + TRIALS)
            self._measure_errors(moves)
            power = 2 if self.score is None else 1  # squares of errors add up
            moves.sort(key=lambda move: -self._gain(*move) / max(self.errors[move], 1e-9) ** power)
            taken = self._within_budget(moves)
        return self._checked(taken)

    # --- times --------------------------------------------------------------------------------------------------------

    def _time_schemes(self) -> None:
        for k, scheme in enumerate(self.c.schemes):
            self.c.tell("time kernels", k + 1, len(self.c.schemes) + 1)
            some = {x.node: scheme for x in self.c.layers if not refusal(x, scheme, self.c.options)}
            if some:
                self.times[scheme] = self._timed(written(self.c.plan, self.c.layers, some), some)

    def _timed(self, proto: onnx.ModelProto, schemes: Schemes) -> Times:
        run = Running(proto, self.c.samples, self.c.options.compile, tell=self.c.tell)
        return timed(run.executable, self.c.feeds[0], self.c.layers, self.c.plan.placement(schemes, self.c.layers))

    def _gain(self, node: str, scheme: str) -> float:
        return self.before.layers[node] - self.times[scheme].layers[node]

    def _moves(self) -> list[tuple[str, str]]:
        """Layers and schemes that gain time, and why the others do not."""
        moves = []
        for layer in self.c.layers:
            fits = {s: t.layers[layer.node] for s, t in self.times.items() if not refusal(layer, s, self.c.options)}
            gains = [s for s, t in fits.items() if t < GAIN * self.before.layers[layer.node]]
            moves += [(layer.node, s) for s in gains]
            if not gains:
                self.reasons[layer.node] = self._no_gain(layer, fits)
        return moves

    def _no_gain(self, layer: Layer, fits: Mapping[str, float]) -> str:
        if not fits:
            return refusal(layer, self.c.schemes[0], self.c.options) or "no scheme fits"
        best = min(fits, key=lambda s: fits[s])
        before = self.before.layers[layer.node]
        return f"gains nothing: {best} {show_seconds(fits[best])}, float {show_seconds(before)}"

    # --- errors -------------------------------------------------------------------------------------------------------

    def _fit_feeds(self, trials: int) -> None:
        """Take as many feeds as the time for errors allows."""
        begin = time.perf_counter()
        self.simulation.difference({})
        seconds = (time.perf_counter() - begin) / len(self.c.feeds)
        count = max(LEAST_FEEDS, min(len(self.c.feeds), int(SECONDS / max(trials * seconds, 1e-9))))
        self.simulation.feeds, self.simulation.want = self.c.feeds[:count], self.want[:count]

    def _measure_errors(self, moves: Sequence[tuple[str, str]]) -> None:
        for k, (node, scheme) in enumerate(moves):
            self.c.tell("errors of layers", k, len(moves))
            self.errors[node, scheme] = max(self._cost({node: scheme}), 0.0)

    def _cost(self, schemes: Schemes) -> float:
        """Relative error of the outputs, or the loss of the metric."""
        if self.score is None:
            return self.simulation.difference(schemes).error
        self.simulation.choose(schemes)
        return self.score - self._metric(_Call(self.simulation.run))

    def _metric(self, call: Callable[..., Any]) -> float:
        assert self.c.options.metric is not None
        return scored(self.c.options.metric, call)

    def _within_budget(self, moves: Sequence[tuple[str, str]]) -> Schemes:
        """The best moves of layers, in their order, that fit together: all, or what fits of each half.

        Layers round independently, so squares of their errors add up. Where the sum says that a layer does not fit, it
        is not tried. After `TRIALS` trials the sum decides alone.
        """
        best = {node: scheme for node, scheme in reversed(moves)}
        order = [(node, best[node]) for node in dict.fromkeys(node for node, _ in moves)]
        taken: Schemes = {}
        cost, trials, waiting = 0.0, 0, [order]
        while waiting:
            some = [move for move in waiting.pop() if self._may_fit(move, cost)]
            if not some:
                continue
            self.c.tell("choose layers", min(trials, TRIALS - 1), TRIALS)
            trials += 1
            together = self._cost({**taken, **dict(some)}) if trials <= TRIALS else float("inf")
            if together <= self.budget:
                taken.update(some)
                cost = max(cost, together)
            elif len(some) == 1:
                self._leave(some[0], together, cost)
            else:
                middle = len(some) // 2
                waiting += [some[middle:], some[:middle]]
        return taken

    def _may_fit(self, move: tuple[str, str], cost: float) -> bool:
        """Would one more layer stay in the budget, by the sum of squares? Losses of a metric have no such sum."""
        if self.score is not None:
            return True
        expected = float(np.hypot(cost, self.errors[move]))
        if expected > self.budget:
            self._leave(move, expected, cost)
        return expected <= self.budget

    def _leave(self, move: tuple[str, str], together: float, cost: float) -> None:
        if together == float("inf"):
            together = float(np.hypot(cost, self.errors[move]))
            self.reasons[move[0]] = f"would bring the {self._what} to about {together:.3g}, after {TRIALS} trials"
        else:
            self.reasons[move[0]] = f"would bring the {self._what} to {together:.3g}, above {self.budget:g}"

    @property
    def _what(self) -> str:
        return "error" if self.score is None else "loss of the metric"

    # --- the result ---------------------------------------------------------------------------------------------------

    def _checked(self, taken: Schemes) -> Choice:
        """Write the model; what costs too much, or gains nothing in it, goes back to float."""
        for k in range(CHECKS + 1):
            proto = written(self.c.plan, self.c.layers, taken)
            after, cost, difference, score = self._measured(proto, taken)
            worst = [n for n in taken if after.layers[n] >= self.before.layers[n]] if k < CHECKS else []
            if cost > self.budget and taken:
                node = max(taken, key=lambda n: self.errors.get((n, taken[n]), 0.0))
                self.reasons[node] = f"the {self._what} of the whole was {cost:.3g}, above {self.budget:g}"
                worst = [node]
            if not worst:
                break
            for n in worst:
                here, before = show_seconds(after.layers[n]), show_seconds(self.before.layers[n])
                self.reasons.setdefault(n, f"gains nothing beside float layers: {taken[n]} {here}, float {before}")
            taken = {n: s for n, s in taken.items() if n not in worst}
        if cost > self.budget and taken:
            taken = {}
            self.notes.append(f"the {self._what} stayed above {self.budget:g}: all layers are float")
            proto = written(self.c.plan, self.c.layers, taken)
            after, cost, difference, score = self._measured(proto, taken)
        scores = None if self.score is None or score is None else (self.score, score)
        layers = {x.node: self._result(x, taken, after) for x in self.c.layers}
        return Choice(proto, layers, difference.error, difference.agreement, scores, self.before, after, self.notes)

    def _measured(self, proto: onnx.ModelProto, schemes: Schemes) -> tuple[Times, float, Difference, float | None]:
        """Times, cost, difference and metric of a written model."""
        run = Running(proto, self.c.samples, self.c.options.compile, tell=self.c.tell)
        after = timed(run.executable, self.c.feeds[0], self.c.layers, self.c.plan.placement(schemes, self.c.layers))
        difference = Difference()
        for feed, want in zip(self.c.feeds, self.want):
            difference.add(run.outputs(feed), want)
        if self.score is None:
            return after, difference.error, difference, None
        score = self._metric(run.executable)
        return after, self.score - score, difference, score

    def _result(self, x: Layer, taken: Mapping[str, str], after: Times) -> LayerResult:
        scheme = taken.get(x.node, FLOAT)
        before = self.before.layers[x.node]
        if scheme != FLOAT:
            return LayerResult(x.node, x.kind, scheme, before, after.layers[x.node], self.errors.get((x.node, scheme)))
        tried = [s for s in self.times if not refusal(x, s, self.c.options)]
        best = min(tried, key=lambda s: self.times[s].layers[x.node], default=None)
        other = None if best is None else self.times[best].layers[x.node]
        error = None if best is None else self.errors.get((x.node, best))
        return LayerResult(x.node, x.kind, FLOAT, before, other, error, self.reasons.get(x.node, ""))


class _Call:
    """The simulated model, called as the compiled one is."""

    def __init__(self, run: Running) -> None:
        self._names = [s.name for s in run.executable.inputs if s.name not in run.extra]
        self._run = run

    def __call__(self, *args: Any, **named: Any) -> Any:
        given = dict(args[0]) if len(args) == 1 and isinstance(args[0], Mapping) else dict(zip(self._names, args))
        found = self._run({**given, **named})
        results = tuple(found[n] for n in self._run.final)
        return results[0] if len(results) == 1 else results
