"""How far a result may be from float64: the one place that states the constants.

rounding contract: |error| <= C * eps * sqrt(K) * scale, scale = max |reference|, K the length of the reduction

C = 32: a random walk of K roundings stays within 4 * sqrt(K) * eps for 10^6 elements (Higham, "Accuracy and Stability
of Numerical Algorithms", 2002, section 2.8: the constant is modest and depends on the wanted probability); the rest is
for chains of up to 24 element-wise ops of <= 4 ulp each, and for arguments of exp, whose absolute error becomes a
relative one. Integers and bools are exact. eps is that of the type in which registers compute. A kernel whose result is
stored in a smaller type rounds it once, by at most eps / 2 of that type; STORED = 4 of its eps are allowed, for casts
inside of the kernel, and where an operand of rounded size meets another.

reduced contract, values stored in f16 or bf16: |error| <= REDUCED * eps * sqrt(D) * scale, eps of that type

D is the number of nodes on the longest path. A stored number is off by at most u = eps / 2 of itself, with an rms of u
/ sqrt(3). What a node makes carries the errors of its operand, its weights and its own result: independent ones
(Higham, section 2.8), so 3 D of them add up to an rms of u * sqrt(D) of the scale, if each stage hands on relative
errors as they are (sums of many products do: of K independent errors in K terms, the sum has one of the same size
relative to a sum of random signs). The largest of 10^6 outputs is within 5 rms: 2.5 * eps * sqrt(D), hence REDUCED = 3.
Accumulators are float32, so that K does not occur. A model that amplifies errors is judged by what rounding alone does
to it (accuracy.py). The same holds where products round their operands to TF32: K independent errors of relative size u
* sqrt(2) in K terms leave one of that size in their sum, within REDUCED * eps of the scale.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dnnc.ir.dtype import DType

C = 32.0
STORED = 4.0
REDUCED = 3.0
EPS = {
    "f64": 2.0**-52,
    "f32": 2.0**-23,
    "tf32": 2.0**-10,
    "f16": 2.0**-10,
    "bf16": 2.0**-7,
    "f8e4m3fn": 2.0**-3,
    "f8e4m3fnuz": 2.0**-3,
    "f8e5m2": 2.0**-2,
    "f8e5m2fnuz": 2.0**-2,
}

# smallest normal number, unless far below all that is computed: under it the error is a multiple of eps * TINY
TINY = {"f16": 2.0**-14, "f8e4m3fn": 2.0**-6, "f8e4m3fnuz": 2.0**-7, "f8e5m2": 2.0**-14, "f8e5m2fnuz": 2.0**-15}


def bound(dtype: DType, k: int, reference: Any, operands: str = "") -> float:
    """Error bound of a `dtype` result after reductions over k terms. `operands`: "tf32" if products round theirs."""
    if not (dtype.is_float or dtype.kind == "c"):
        return 0.0
    scale = max(_scale(reference), TINY.get(dtype.name, 1e-30))
    if dtype.kind == "c":
        eps = EPS["f32"] if dtype.bits == 64 else EPS["f64"]
    else:
        eps = EPS[dtype.computed.name]
    stored = STORED * EPS.get(dtype.name, 1.0) if dtype.computed is not dtype else 0.0
    rounded = REDUCED * EPS[operands] if operands else 0.0
    return float((C * eps * np.sqrt(max(k, 1)) + stored + rounded) * scale)


def reduced(form: str, depth: int, reference: Any) -> float:
    """Error bound of a model whose values are rounded to `form` (a key of EPS) along up to `depth` nodes."""
    return float(REDUCED * EPS[form] * np.sqrt(max(depth, 1)) * max(_scale(reference), TINY.get(form, 1e-30)))


def _scale(reference: Any) -> float:
    """The largest finite magnitude."""
    finite = np.abs(reference[np.isfinite(reference)])
    return float(finite.max()) if finite.size else 0.0
