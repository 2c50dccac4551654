"""What `dnnc.quantize` is told, checked as it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from dnnc.ir import checks
from dnnc.ir.errors import InputError

SCHEMES = ("int8", "int16", "w8a16", "w4a16", "fp8", "auto")
METHODS = ("mse", "minmax", "percentile", "entropy")
FORMS = ("qdq", "operators", "nbits")
ACTIVATIONS = ("uint8", "int8")
WEIGHT_ONLY = {"w8a16": 8, "w4a16": 4}  # bits
BLOCK = {"w8a16": 0, "w4a16": 32}  # weights that share a scale; 0: a column
BUDGET = 0.05  # relative error of the outputs that `auto` may cost


@dataclass(frozen=True)
class QuantizeOptions:
    """How to quantize a model; see `dnnc.quantize`."""

    scheme: str = "int8"
    method: str = "mse"
    percentile: float = 99.99
    activations: str = "uint8"
    form: str = "qdq"
    block: int | None = None
    bias_correction: bool = False
    smooth: float | None = None
    gptq: bool = False
    keep: tuple[str, ...] = ()
    samples: int | None = None
    random: bool = False
    agreement: float | None = None
    max_error: float | None = None
    metric: Callable[[Callable[..., Any]], float] | None = None
    layer_errors: bool = False
    measure: bool = True
    compile: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        one_of("scheme", self.scheme, SCHEMES)
        one_of("method", self.method, METHODS)
        one_of("activations", self.activations, ACTIVATIONS)
        one_of("form", self.form, FORMS)
        number("percentile", self.percentile, 50.0, 100.0)
        if self.smooth is not None:
            number("smooth", self.smooth, 0.0, 1.0)
        if self.agreement is not None:
            number("agreement", self.agreement, 0.0, 1.0)
        if self.max_error is not None:
            number("max_error", self.max_error, 0.0, float("inf"))
        if self.block is not None:
            object.__setattr__(self, "block", checks.integer(self.block, "block", 0))
        if self.samples is not None:
            object.__setattr__(self, "samples", checks.integer(self.samples, "samples", 1))
        object.__setattr__(self, "keep", checks.names(self.keep, "keep"))
        checks.optional_function(self.metric, "metric")
        for name in ("bias_correction", "gptq", "random", "layer_errors", "measure"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name}={getattr(self, name)!r}: expected True or False")
        self._fit_together()

    def _fit_together(self) -> None:
        if self.form == "nbits" and self.scheme not in WEIGHT_ONLY:
            raise InputError('form="nbits" writes MatMulNBits, which has weights alone: scheme "w8a16" or "w4a16"')
        if self.form == "nbits" and self.block is not None and (self.block < 16 or self.block & (self.block - 1)):
            raise InputError(f"block={self.block}: MatMulNBits has blocks of 16, 32, 64 ... weights")
        if self.form == "operators" and self.scheme not in ("int8", "auto"):
            raise InputError('form="operators" is for 8-bit activations: scheme "int8" or "auto"')
        if self.scheme == "fp8" and self.gptq:
            raise InputError("gptq rounds weights to integers: it is for int8, w8a16, w4a16 and auto")
        if self.scheme != "auto" and (self.max_error is not None or self.metric is not None):
            what = "max_error" if self.max_error is not None else "metric"
            raise InputError(
                f'{what} says what scheme="auto" may cost; scheme={self.scheme!r} quantizes all that it can'
            )
        if self.agreement is not None and (self.scheme not in ("int8", "fp8") or not self.measure or self.random):
            raise InputError(
                "agreement is measured on samples of data, for scheme int8 or fp8; auto has max_error and metric"
            )
        if self.scheme == "auto" and not self.measure:
            raise InputError('scheme="auto" chooses by what it measures; measure=False is for the others')

    def bits(self, scheme: str) -> int:
        """Of a weight."""
        return WEIGHT_ONLY.get(scheme, 8)

    def block_of(self, scheme: str) -> int:
        """Weights along a sum that share a scale; 0: one scale for each output channel."""
        if scheme not in WEIGHT_ONLY:
            return 0
        if self.block is not None:
            return self.block
        return 32 if self.form == "nbits" else BLOCK[scheme]

    def keeps(self, name: str) -> str | None:
        """The pattern of `keep` that a layer's name fits."""
        return next((p for p in self.keep if fnmatchcase(name, p)), None)


def one_of(what: str, value: Any, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise InputError(f"{what}={value!r}: expected one of {', '.join(choices)}")


def number(what: str, value: Any, low: float, high: float) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high:
        raise InputError(f"{what}={value!r}: expected a number from {low:g} to {high:g}")
