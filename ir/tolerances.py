"""How far a result may be from float64: the one place that states the constants.

rounding contract:  |error| <= C * eps(dtype) * sqrt(K) * scale,  scale = max |reference| over the output, K the length of the reduction

C = 32: a random walk of K roundings stays within 4 * sqrt(K) * eps for 10^6 elements (Higham, "Accuracy and Stability of Numerical
Algorithms", 2002, section 2.8: the constant is modest and depends on the wanted probability); the rest is for chains of up to 24
element-wise ops of <= 4 ulp each, and for arguments of exp, whose absolute error becomes a relative one. Integers and bools are exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dnnc.ir.dtype import DType

C = 32.0
EPS = {
    "f64": 2.0**-52,
    "f32": 2.0**-23,
    "f16": 2.0**-10,
    "bf16": 2.0**-7,
    "f8e4m3fn": 2.0**-3,
    "f8e4m3fnuz": 2.0**-3,
    "f8e5m2": 2.0**-2,
    "f8e5m2fnuz": 2.0**-2,
}

# smallest normal number, where it is not far below anything that is computed: under it the error is a multiple of eps * TINY
TINY = {"f16": 2.0**-14, "f8e4m3fn": 2.0**-6, "f8e4m3fnuz": 2.0**-7, "f8e5m2": 2.0**-14, "f8e5m2fnuz": 2.0**-15}


def bound(dtype: DType, k: int, reference: Any) -> float:
    """The largest error that a result of `dtype` may have against `reference` after reductions over k terms."""
    if not (dtype.is_float or dtype.kind == "c"):
        return 0.0
    finite = np.abs(reference[np.isfinite(reference)])
    scale = float(finite.max()) if finite.size else 0.0
    if dtype.kind == "c":
        eps = 2.0**-23 if dtype.bits == 64 else 2.0**-52
    else:
        eps = EPS.get(dtype.name, 1.0)
    return float(C * eps * np.sqrt(max(k, 1)) * max(scale, TINY.get(dtype.name, 1e-30)))
