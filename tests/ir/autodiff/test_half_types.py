"""Compiled gradients of half types: sums over long rows within the bounds of the dtype, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dnnc.ir.op import Sample
from dnnc.ir.ops import OPS
from dnnc.ir.ops.common import sample
from support.gradients import check_compiled

# (op, types with T for the half type, attributes, domain)
CASES: list[tuple[str, tuple[str, ...], dict[str, Any], tuple[float, float]]] = [
    ("softmax", ("T[4, 3000]",), {"axis": 1}, (-9.0, 9.0)),
    ("log_softmax", ("T[4, 3000]",), {"axis": 1}, (-9.0, 9.0)),
    ("layer_norm", ("T[300, 700]", "T[700]", "T[700]"), {"axis": 1}, (-3.0, 3.0)),
    ("rms_norm", ("T[300, 700]", "T[700]"), {"axis": 1}, (-3.0, 3.0)),
    ("mean_variance_norm", ("T[2, 3, 40, 50]",), {"axes": (0, 2, 3)}, (5.0, 9.0)),
    ("batch_norm", ("T[4, 3, 20, 30]", *("f32[3]",) * 4), {}, (0.5, 3.0)),
    ("group_norm", ("T[2, 6, 20, 20]", "T[6]", "T[6]"), {"groups": 3}, (-2.0, 2.0)),
    ("reduce_mean", ("T[3, 90000]",), {"axes": (1,)}, (-2.0, 2.0)),
    ("reduce_max", ("T[3, 5000]",), {"axes": (1,)}, (-2.0, 2.0)),
    ("reduce_l2", ("T[3, 5000]",), {"axes": (1,)}, (-2.0, 2.0)),
    ("reduce_log_sum_exp", ("T[3, 5000]",), {"axes": (1,)}, (-9.0, 9.0)),
    ("reduce_prod", ("T[3, 30]",), {"axes": (1,)}, (0.7, 1.4)),
    ("add", ("T[5000, 7]", "T[7]"), {}, (-2.0, 2.0)),  # a bias: sums of 5,000 elements
    ("matmul", ("T[600, 30]", "T[30, 20]"), {}, (-2.0, 2.0)),
    ("attention", ("T[2, 60, 16]",) * 3, {"scale": 0.25}, (-2.0, 2.0)),
    ("gelu", ("T[900]",), {"approximate": "tanh"}, (-6.0, 6.0)),
]


@pytest.mark.family("samples")
@pytest.mark.parametrize("half", ["f16", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c[0])
def test_sums_of_half_types(case: Any, half: str) -> None:
    name, types, attrs, domain = case
    s: Sample = sample(*(t.replace("T", half) for t in types), domain=domain, **attrs)
    check_compiled(OPS[name], s, np.random.default_rng(0))
