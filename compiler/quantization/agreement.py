"""Layers that 8 bits would cost too many decisions get 16 bits or stay float, until the model decides as in float.

    half of the samples give ranges, the others errors: what is measured holds for samples that were not seen
    errors    of all layers in 8 bits together, then of each alone; their squares add up
    order     layers by squared error over the time that a better scheme costs
    check     the smallest number of layers whose sum is small enough is tried, more while the measured sum is not

Without a bound from the user, a model whose decisions are far from the bound stays as it is, with a note: there all
layers lose a little, and 8 bits are a choice of speed. So does one of many layers that
would lose much of a large gain.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from dnnc.ir.errors import DnncError, count
from dnnc.quantization.calibration import Running, Tell, Wanted, observe
from dnnc.quantization.data import Feed, Input, Samples
from dnnc.quantization.decisions import Decisions
from dnnc.quantization.layers import Layer
from dnnc.quantization.measure import Times
from dnnc.quantization.options import WEIGHT_ONLY
from dnnc.quantization.plan import Plan
from dnnc.quantization.result import FLOAT
from dnnc.quantization.simulation import Simulation
from dnnc.quantization.sixteen import PRODUCTS

AGREEMENT = 0.99  # of arg-max with the float model
DOUBT = 25.0  # an estimate from n rows may be too small by 1 + DOUBT / sqrt(n): from 24 rows, by 4 at times
SURE = 0.5  # of that share: where samples that gave the ranges expect no more, others are not asked
REACH = 0.03  # expected changes up to which layers are made better without being asked
SAMPLES = 64  # at most, for decisions; half of them give ranges
SECONDS = 40.0  # for the errors of layers; the number of samples follows
LEAST_SAMPLES = 4
ROUNDS = 8
KEPT = 7 / 8  # of the time that 8 bits save has to stay, without a bound from the user,
FAST = 1.5  # where they are that many times as fast as float
ALONE = 0.5  # share of float's time from which on a layer is most of the model: no mixture of layers is to be had there
WORTH = 0.9  # 16 bits are taken where their time is below this share of float's
LEAST_TIME = 1e-9


@dataclass(frozen=True)
class Improved:
    """Schemes of all layers, why some are no int8, and a note of what was found; `dear`: where it is not taken."""

    schemes: dict[str, str]
    reasons: dict[str, str]
    note: str
    dear: str


def allowed(bound: float | None, rows: int) -> float:
    """The share of decisions that so many rows may expect to change, for the bound to hold for other samples."""
    return (1 - (AGREEMENT if bound is None else bound)) / (1 + DOUBT / math.sqrt(max(rows, 1)))


def _apart(inputs: Sequence[Input], feeds: list[Feed]) -> tuple[list[Feed], list[Feed]]:
    """Every second sample, and the others: feeds, or the rows of few feeds. All twice where they cannot be parted."""
    if len(feeds) >= 2 * LEAST_SAMPLES:
        return feeds[::2], feeds[1::2]
    first = inputs[0]
    size = first.shape[0] if first.shape else 1
    if not isinstance(size, str) or any(f[first.name].shape[0] < 2 for f in feeds):
        return feeds, feeds
    batched = {i.name for i in inputs if i.shape and i.shape[0] == size}
    fit, others = ([{n: a[k::2] if n in batched else a for n, a in f.items()} for f in feeds] for k in (0, 1))
    return fit, others


def too_dear(plain: Times, in_bytes: Times, improved: Times) -> bool:
    """Does an improvement that nobody asked for cost much of a large gain, in a model of many layers?"""
    if plain.total <= FAST * in_bytes.total or max(plain.layers.values(), default=0.0) > ALONE * plain.total:
        return False
    return plain.total - improved.total < KEPT * (plain.total - in_bytes.total)


class Improving:
    """The search for the layers.

    Args:
        plan, layers, schemes: of the model with all layers in 8 bits.
        plain: the float model.
        before, after: times of the layers in float and in 8 bits; None where they cannot be measured.
    """

    def __init__(
        self, plan: Plan, layers: Sequence[Layer], schemes: Mapping[str, str], samples: Samples, plain: Running,
        times: tuple[Times, Times] | None, tell: Tell,
    ) -> None:  # fmt: skip
        self.plan, self.schemes, self.tell, self.times = plan, dict(schemes), tell, times
        self.layers = [x for x in layers if schemes.get(x.node, FLOAT) not in (FLOAT, *WEIGHT_ONLY)]
        feeds = list(islice(samples, SAMPLES))
        self.fit, self.feeds = _apart(samples.inputs, feeds)
        try:
            for f in self.fit:
                plain.outputs(f)
            self.want = [plain.outputs(f) for f in self.feeds]
        except DnncError:  # a size that is symbolic at the input and a number behind it
            self.fit = self.feeds = feeds
            self.want = [plain.outputs(f) for f in feeds]
        self.simulation = self._simulation(samples)
        self.aim = 0.0

    def _simulation(self, samples: Samples) -> Simulation:
        """With ranges of the one half, for the other."""
        o = self.plan.observed
        half = Samples(samples.inputs, self.fit)
        values = tuple(n for n in o.histograms)
        bins = self.plan.options.method != "minmax" and self.plan.options.scheme != "fp8"
        wanted = Wanted(values, bins=bins)
        seen = observe(self.plan.model, half, wanted, self.plan.options.compile, self.tell)
        seen.means, seen.products = o.means, o.products
        plan = Plan(self.plan.model, self.plan.options, seen)
        scheme = "fp8" if "fp8" in self.schemes.values() else "int8"
        return Simulation(plan, self.layers, scheme, samples, self.feeds, self.want, self.tell)

    def run(self) -> Improved | None:
        """The improved schemes; None where nothing has to change."""
        begin = time.perf_counter()
        whole = self._measured([])
        seconds = (time.perf_counter() - begin) / len(self.feeds)
        changed = whole.changed
        self.aim = allowed(self.plan.options.agreement, whole.rows)
        if changed is None or changed <= self.aim:
            return None
        noise = self._noise(whole, seconds)
        better = self._better(noise, changed)
        return self._improved(better, changed)

    # --- errors -------------------------------------------------------------------------------------------------------

    def _measured(self, better: Sequence[str]) -> Decisions:
        """With all layers but `better` in 8 bits."""
        return self._of({x.node: self.schemes[x.node] for x in self.layers if x.node not in better}, self.feeds)

    def _of(self, schemes: Mapping[str, str], feeds: Sequence[Feed]) -> Decisions:
        self.simulation.choose(schemes)
        out = Decisions()
        for feed, want in zip(feeds, self.want):
            out.add(self.simulation.outputs(feed), want)
        return out

    def _noise(self, whole: Decisions, seconds: float) -> dict[str, float]:
        """The mean square that each layer adds, where all together add 1."""
        feeds_in_time = int(SECONDS / max(seconds * len(self.layers), 1e-9))
        feeds = self.feeds[: max(LEAST_SAMPLES, feeds_in_time)]
        out = {}
        for k, layer in enumerate(self.layers):
            self.tell("errors of layers", k, len(self.layers))
            out[layer.node] = self._of({layer.node: self.schemes[layer.node]}, feeds).noise
        total = max(sum(out.values()), 1e-30)
        return {n: x / total for n, x in out.items()}

    # --- choice -------------------------------------------------------------------------------------------------------

    def _better(self, noise: Mapping[str, float], changed: float) -> list[str]:
        """The layers that get more bits."""
        order = sorted(noise, key=lambda n: -noise[n] / self._cost(n))
        left = 1 - np.cumsum([noise[n] for n in order])
        factor = 1.0  # by which the sum of squares is below what is measured
        taken = 0
        for k in range(ROUNDS):
            self.tell("choose layers", k, ROUNDS)
            wanted = (self.aim / (changed * factor)) ** 2
            taken = max(taken + 1, int(np.searchsorted(-left, -wanted)) + 1)
            if taken >= len(order):
                break
            found = self._measured(order[:taken]).changed or 0.0
            if found <= self.aim:
                return order[:taken]
            factor = max(factor, found / (changed * float(np.sqrt(max(left[taken - 1], 1e-12)))))
        return order

    def _cost(self, node: str) -> float:
        """Seconds that a better scheme takes more than 8 bits."""
        if self.times is None:
            return 1.0
        before, after = (t.layers.get(node, 0.0) for t in self.times)
        return max(min(before - after, (PRODUCTS - 1) * after), LEAST_TIME)

    def _improved(self, better: Sequence[str], changed: float) -> Improved:
        reasons = {}
        schemes = dict(self.schemes)
        for node in better:
            schemes[node] = "int16" if self._worth(node) else FLOAT
            reasons[node] = f"8 bits here and elsewhere change about {changed:.1%} of the arg-maxes"
        found = f"8 bits everywhere would change about {changed:.1%} of the arg-maxes"
        some = f"{len(better)} of {count(len(self.layers), 'layer')}"
        note = f"{found}: {some} have more"
        dear = f"{found}; more for {some} would cost much of the time that they save; agreement={AGREEMENT:g} does that"
        return Improved({n: s for n, s in schemes.items() if s != FLOAT}, reasons, note, dear)

    def _worth(self, node: str) -> bool:
        """Are 16 bits faster than float?"""
        if self.schemes[node] != "int8" or self.plan.observed.histograms[self._layer(node).x].bad:
            return False
        if self.times is None:
            return True
        before, after = (t.layers.get(node, 0.0) for t in self.times)
        return PRODUCTS * after < WORTH * before

    def _layer(self, node: str) -> Layer:
        return next(x for x in self.layers if x.node == node)
