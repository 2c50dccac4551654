"""Options of `dnnc.prune` and their checks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from dnnc.ir import checks
from dnnc.ir.errors import InputError, a_type
from dnnc.quantization.options import number, one_of

METHODS = ("magnitude", "random", "2:4", "block", "structured")
SCOPES = ("layer", "global", "lamp")
SPARSITY, HALF = 0.9, 0.5  # by default; of structured


@dataclass(frozen=True)
class PruneOptions:
    """How to prune a model; see `dnnc.prune`."""

    sparsity: float | Mapping[str, float] | None = None
    method: str = "magnitude"
    scope: str = "layer"
    block: tuple[int, int] = (8, 8)
    multiple: int = 8
    candidates: int = 0
    bits: int | None = None
    seed: int = 0
    keep: tuple[str, ...] = ()
    samples: int | None = None
    random: bool = False
    metric: Callable[[Callable[..., Any]], float] | None = None
    layer_errors: bool = False
    measure: bool = True
    compile: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        one_of("method", self.method, METHODS)
        one_of("scope", self.scope, SCOPES)
        self._check_sparsity()
        object.__setattr__(self, "block", _block(self.block))
        object.__setattr__(self, "multiple", checks.integer(self.multiple, "multiple", 1))
        object.__setattr__(self, "candidates", checks.integer(self.candidates, "candidates", 0))
        object.__setattr__(self, "seed", checks.integer(self.seed, "seed", 0))
        if self.bits is not None:
            object.__setattr__(self, "bits", checks.integer(self.bits, "bits", 1))
            if self.bits > 8:
                raise InputError(f"bits={self.bits}: expected 1 to 8, for 2 to 256 different weights in a layer")
        if self.samples is not None:
            object.__setattr__(self, "samples", checks.integer(self.samples, "samples", 1))
        object.__setattr__(self, "keep", checks.names(self.keep, "keep"))
        checks.optional_function(self.metric, "metric")
        for name in ("random", "layer_errors", "measure"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name}={getattr(self, name)!r}: expected True or False")
        if self.candidates and self.method != "structured":
            raise InputError('candidates are random choices of channels: method="structured"')
        if self.scope == "lamp" and self.method not in ("magnitude", "block"):
            raise InputError('scope="lamp" compares magnitudes: method "magnitude" or "block"')
        if self.method == "2:4" and self.scope != "layer":
            raise InputError('method="2:4" drops two weights of four in each layer; it has no scope')

    def _check_sparsity(self) -> None:
        given = self.sparsity
        if given is None:
            return
        if self.method == "2:4":
            raise InputError('sparsity: method="2:4" drops exactly half of the weights; leave sparsity out')
        if isinstance(given, Mapping):
            if self.scope != "layer":
                raise InputError(
                    'sparsity by layers goes with scope="layer"; the other scopes choose it for each layer'
                )
            for pattern, share in given.items():
                if not isinstance(pattern, str):
                    raise InputError(f"sparsity: {pattern!r} is {a_type(pattern)}; expected the name of a layer")
                _share(f"sparsity of {pattern!r}", share)
            object.__setattr__(self, "sparsity", dict(given))
        else:
            _share("sparsity", given)

    @property
    def default(self) -> float:
        """The sparsity of layers without one of their own."""
        if self.method == "2:4" or (self.sparsity is None and self.method == "structured"):
            return HALF
        return self.sparsity if isinstance(self.sparsity, (int, float)) else SPARSITY

    def share(self, layer: str) -> float | None:
        """The share of a layer's weights that goes; None where `sparsity` names layers, and not this one."""
        if not isinstance(self.sparsity, Mapping):
            return self.default
        return next((s for p, s in self.sparsity.items() if fnmatchcase(layer, p)), None)

    def keeps(self, name: str) -> str | None:
        """The pattern of `keep` that a layer's name fits."""
        return next((p for p in self.keep if fnmatchcase(name, p)), None)


def _share(what: str, value: Any) -> None:
    number(what, value, 0.0, 1.0)
    if value >= 1:
        raise InputError(f"{what}={value!r}: nothing would be left; expected a share below 1, such as 0.9")


def _block(value: Any) -> tuple[int, int]:
    """(output channels, input channels) of a block."""
    if isinstance(value, str):
        found = re.fullmatch(r"(\d+)x(\d+)", value)
        value = (int(found[1]), int(found[2])) if found else value
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise InputError(f'block={value!r}: expected output and input channels of a block, as (8, 8) or "8x8"')
    return checks.integer(value[0], "block", 1), checks.integer(value[1], "block", 1)
