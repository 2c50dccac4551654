"""Every public function on an array that requires a gradient: its result stays tracked, or `backward` says why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dnnc.array as xp
from dnnc.ir.errors import GradientError

A = np.array([[0.3, 0.9, 0.5], [0.8, 0.2, 0.6], [0.4, 0.7, 0.1]])
V = np.array([0.2, 0.5, 0.7])
# Results that do not depend on the contents, or are integers and truth values for any: nothing to track.
CONSTANT = {
    "empty_like", "ones_like", "zeros_like", "result_type", "can_cast", "isdtype", "broadcast_shapes", "finfo", "iinfo",
    "arange", "empty", "eye", "full", "linspace", "ones", "zeros", "fft.fftfreq", "fft.rfftfreq", "evaluate",
    "from_dlpack", "Array", "nearest",
    "all", "any", "allclose", "array_equal", "argmax", "argmin", "argsort", "count_nonzero", "isclose", "isfinite",
    "isin", "isinf", "isnan", "nonzero", "searchsorted", "signbit", "linalg.matrix_rank", "equal", "not_equal", "less",
    "less_equal", "greater", "greater_equal", "logical_and", "logical_not", "logical_or", "logical_xor", "bitwise_and",
    "bitwise_invert", "bitwise_left_shift", "bitwise_or", "bitwise_right_shift", "bitwise_xor", "argpartition",
    "nanargmax", "nanargmin",
}  # fmt: skip
HOST = {
    "unique", "unique_all", "unique_counts", "unique_inverse", "unique_values", "linalg.cholesky", "linalg.eig",
    "linalg.eigh", "linalg.eigvals", "linalg.eigvalsh", "linalg.pinv", "linalg.qr", "linalg.slogdet", "linalg.svd",
    "linalg.svdvals",
}  # fmt: skip
BINARY = (
    "add atan2 copysign divide dot floor_divide hypot inner logaddexp matmul maximum minimum multiply nextafter outer "
    "pow remainder subtract cross divmod kron tensordot vdot vecdot linalg.matmul linalg.tensordot linalg.vecdot "
    "linalg.solve"
).split()
SEQUENCES = "concat concatenate stack vstack hstack dstack column_stack".split()
CALLS: dict[str, Callable[[Any], Any]] = {
    **{n: lambda f, x: f(x, A) for n in BINARY},
    **{n: lambda f, x: f([x, A]) for n in SEQUENCES},
    "acosh": lambda f, x: f(x + 2), "atanh": lambda f, x: f(x / 2), "array_split": lambda f, x: f(x, 2),
    "asarray": lambda f, x: f([x, x]), "array": lambda f, x: f([[x[0, 0], 1.0], [2.0, x[1, 0]]]),
    "astype": lambda f, x: f(x, xp.float32), "bincount": lambda f, x: f(xp.asarray([0, 2, 0]), x[0]),
    "broadcast_arrays": lambda f, x: f(x, x[:1]), "broadcast_to": lambda f, x: f(x, (2, 3, 3)),
    "clip": lambda f, x: f(x, 0.2, 0.6), "dsplit": lambda f, x: f(xp.stack([x, x], axis=2), 2),
    "einsum": lambda f, x: f("ij,kj->ik", x, A), "full_like": lambda f, x: f(x, x[0, 0]),
    "histogram": lambda f, x: f(xp.asarray(A), 3, weights=x), "hsplit": lambda f, x: f(x, 3),
    "vsplit": lambda f, x: f(x, 3),
    "imag": lambda f, x: f(x * 1j), "interp": lambda f, x: f(x, V, V * V), "meshgrid": lambda f, x: f(x[0], x[1]),
    "moveaxis": lambda f, x: f(x, 0, 1), "pad": lambda f, x: f(x, 1), "percentile": lambda f, x: f(x, [20, 40]),
    "permute_dims": lambda f, x: f(x, (1, 0)), "quantile": lambda f, x: f(x, 0.3), "repeat": lambda f, x: f(x, 2),
    "reshape": lambda f, x: f(x, (9,)), "roll": lambda f, x: f(x, 1), "split": lambda f, x: f(x, 3),
    "squeeze": lambda f, x: f(x[:1]), "swapaxes": lambda f, x: f(x, 0, 1), "take": lambda f, x: f(x, [0, 2], axis=1),
    "take_along_axis": lambda f, x: f(x, xp.asarray([[0], [1], [2]])), "tile": lambda f, x: f(x, (2, 1)),
    "top_k": lambda f, x: f(x, 2), "where": lambda f, x: f(A > 0.5, x, 0.0), "expand_dims": lambda f, x: f(x, 0),
    "cumulative_sum": lambda f, x: f(x, axis=0), "cumulative_prod": lambda f, x: f(x, axis=0),
    "linalg.cross": lambda f, x: f(x, A), "linalg.outer": lambda f, x: f(x[0], V),
    "linalg.matrix_power": lambda f, x: f(x, 2), "fft.hfft": lambda f, x: f(x), "fft.irfft": lambda f, x: f(x),
    "linalg.cholesky": lambda f, x: f(x @ x.T + xp.eye(3)), "acos": lambda f, x: f(x),
    "choose": lambda f, x: f(xp.asarray([0, 2, 1]), x), "compress": lambda f, x: f([True, False, True], x, axis=0),
    "extract": lambda f, x: f(A > 0.4, x), "partition": lambda f, x: f(x, 1), "put": lambda f, x: written(f, x),
}  # fmt: skip


def written(put: Any, x: Any) -> Any:
    y = x * 1.0
    put(y, [0, 4], x[:2, 1])
    return y


def functions() -> dict[str, Any]:
    found = {n: getattr(xp, n) for n in xp.__all__ if callable(getattr(xp, n)) and not n.startswith("__")}
    for module in ("linalg", "fft"):
        space = getattr(xp, module)
        found |= {f"{module}.{n}": getattr(space, n) for n in space.__all__}
    return {n: f for n, f in found.items() if n not in CONSTANT}


def arrays(made: Any) -> list[Any]:
    if isinstance(made, (list, tuple)):
        return [a for m in made for a in arrays(m)]
    return [made] if isinstance(made, xp.Array) and made.dtype.kind in "fc" else []


@pytest.mark.parametrize("name", functions())
def test_history(name: str) -> None:
    f = functions()[name]
    x = xp.asarray(A)
    x.requires_grad = True
    results = arrays(CALLS.get(name, lambda f, x: f(x))(f, x))
    if name == "histogram":
        results = results[:1]  # the edges are constant
    assert results
    for y in results:
        assert all(p.tracked for p in y._parts), f"{name} loses the history"
        total = xp.sum(xp.real(y)) + xp.sum(xp.imag(y)) if y.dtype.kind == "c" else xp.sum(y)
        if name in HOST:
            with pytest.raises(GradientError, match=rf"dnnc\.array\.{name} runs on the host"):
                total.backward()
        else:
            total.backward()
