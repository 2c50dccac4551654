"""When arrays are computed, what becomes one program, what is kept; and the protocols of Python, NumPy and DLPack."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_samples import check, sample

import dnnc.array as xp
from dnnc.array import lazy
from dnnc.array.lazy import PROGRAMS_MADE, apply, leaf, placeholder
from dnnc.array.structure import graph_of
from dnnc.ir.dtype import f32
from dnnc.ir.errors import InputError, ShapeError
from dnnc.ir.types import TensorType


def compiled(run: Callable[[], Any]) -> int:
    """How many programs something makes."""
    before = PROGRAMS_MADE.compiled
    run()
    return PROGRAMS_MADE.compiled - before


def test_nothing_runs_before_somebody_looks() -> None:
    x = xp.asarray(sample("float32", (7, 3), seed=11))

    def build() -> None:
        y = xp.sum(xp.exp(x) * 3 + x, axis=0)
        assert y.shape == (3,) and y.dtype == xp.float32

    assert compiled(build) == 0


def test_numbers_are_no_part_of_a_program() -> None:
    x = xp.asarray(sample("float64", (5, 2), seed=12))
    np.asarray(xp.sin(x * 0.1) - 2.5)
    assert compiled(lambda: np.asarray(xp.sin(x * 0.2) - 3.5)) == 0
    check(xp.sin(x * 0.2) - 3.5, np.sin(np.asarray(x) * 0.2) - 3.5)


def test_elementwise_programs_serve_all_shapes() -> None:
    def run(*shape: int) -> None:
        a = sample("float32", shape, seed=13)
        check(xp.tanh(xp.asarray(a) * a) + 0.25, np.tanh(a * a) + np.float32(0.25))

    run(4, 5)
    for shape in ((3,), (1, 1), (2, 3, 4), (1000,), (129, 131)):
        assert compiled(lambda shape=shape: run(*shape)) == 0  # type: ignore[misc]


def test_places_of_loops_are_no_programs() -> None:
    x = xp.asarray(np.arange(40.0).reshape(20, 2)) * 2

    def loop() -> None:
        for k in range(20):
            assert x[k, 1].item() == 2 * (2 * k + 1)
            x[k, 0] = k
        assert [row[0].item() for row in x] == list(range(20))

    assert compiled(loop) <= 1  # the product


def test_operands_are_not_taken_for_results() -> None:
    x = leaf(sample("float32", (3,)))
    t = apply("neg", x)
    both, alone = apply("concat", x, t, axis=0), apply("concat", x, axis=0)
    keys = [lazy.Reached(roots).structure(roots) for roots in ([both], [t, alone])]
    assert keys[0] != keys[1]


def test_a_chain_is_one_kernel() -> None:
    x = xp.asarray(sample("float32", (300, 1000)))  # beyond the flat programs
    np.asarray(xp.tanh(2 * x + 1) * xp.exp(-x) + x)
    (kernel,) = PROGRAMS_MADE.last.notes
    assert set(kernel.calls[0].split(" + ")) >= {"tanh", "exp", "neg", "mul", "add"}


def test_what_is_looked_at_twice_is_kept() -> None:
    a = sample("float32", (6, 6))
    x = xp.asarray(a)
    y = xp.exp(x)
    first, second = y + 1, y * 3
    np.asarray(first)
    assert y._parts[0].data is None  # cheap: it may never be asked for again
    np.asarray(second)
    assert y._parts[0].data is not None
    total = xp.sum(x, axis=0)
    np.asarray(total / 2)
    assert total._parts[0].data is not None  # a reduction is not done twice
    gone = xp.sum(x, axis=1) * 2
    np.asarray(gone + 1)
    check(second, np.exp(a) * 3)


def test_evaluate_makes_one_program() -> None:
    x = xp.asarray(sample("float32", (8, 4), seed=14))
    y, z = xp.sum(x, axis=0), xp.asarray(sample("complex64", (8, 4))) * 2j
    assert compiled(lambda: xp.evaluate(y, z)) == 1
    assert compiled(lambda: (np.asarray(y), np.asarray(z))) == 0


@pytest.mark.slow
def test_long_chains_are_computed_in_pieces() -> None:
    x = xp.asarray(np.ones(3, np.float32))
    for _ in range(20 * lazy.DEEPEST):
        x = x * 0.5 + 0.5
    check(x, np.ones(3, np.float32))


def test_a_deep_chain_of_repeated_operands() -> None:
    a = sample("float32", (4, 4))
    x, expected = xp.asarray(a), a.astype(np.float64)
    for _ in range(12):
        x, expected = xp.tanh(x * x + x), np.tanh(expected * expected + expected)
    np.testing.assert_allclose(np.asarray(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_programs_and_kernels_are_found_by_another_process(tmp_path: Path) -> None:
    code = (
        "import numpy as np, dnnc.array as xp\n"
        "from dnnc.backends.llvm.backend import LlvmBackend\n"
        "made = []\n"
        "real = LlvmBackend.build\n"
        "LlvmBackend.build = lambda *a: made.append(1) or real(*a)\n"
        "x = xp.asarray(np.arange(12.0).reshape(3, 4))\n"
        "assert np.allclose(np.asarray(xp.sum(x * 2, axis=0)), (np.arange(12.0).reshape(3, 4) * 2).sum(0))\n"
        "print(len(made))"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"DNNC_CACHE_DIR": str(tmp_path), "PATH": "", "PYTHONPATH": os.environ["PYTHONPATH"]},
            capture_output=True,
            text=True,
            check=True,
        )
        for _ in range(2)
    ]
    assert int(runs[0].stdout) > 0 and int(runs[1].stdout) == 0


# --- traces -----------------------------------------------------------------------------------------------------------


def test_placeholders_make_graphs_and_have_no_contents() -> None:
    p = placeholder(TensorType(f32, (2, 3)))
    x = xp.Array((p,), np.dtype(np.float32))
    y = xp.sum(xp.exp(x) * xp.asarray(np.ones(3, np.float32)), axis=1)
    graph, inputs = graph_of([y._parts[0]], [p])
    assert (
        inputs[0] is p and len(graph.inputs) == 2 and [n.op.name for n in graph.nodes()] == ["exp", "mul", "reduce_sum"]
    )
    assert repr(y) == "<traced array of float32, shape (2,)>"
    with pytest.raises(InputError, match="while a function is traced"):
        bool(y[0] > 0)


def test_types_are_checked_at_once() -> None:
    with pytest.raises(ShapeError):
        apply("add", leaf(np.ones(3, np.float32)), leaf(np.ones(4, np.float32)))


# --- protocols --------------------------------------------------------------------------------------------------------


def test_python_protocols() -> None:
    x = xp.asarray([[1, 2, 3], [4, 5, 6]])
    assert len(x) == 2 and x.size == 6 and x.ndim == 2 and x.device == "cpu"
    assert [r.tolist() for r in x] == [[1, 2, 3], [4, 5, 6]]
    assert int(x[0, 1]) == 2 and float(x[1, 1]) == 5.0 and [10, 20, 30][x[0, 0]] == 20 and complex(x[0, 0]) == 1
    assert bool(xp.all(x > 0)) and f"{x[0, 0] / 4:.1f}" == "0.2"
    assert repr(xp.asarray([1.5])) == "Array([1.5])" and str(xp.asarray(2)) == "2"
    for wrong in (
        lambda: bool(x),
        lambda: int(x),
        lambda: float(xp.asarray(1j)),
        lambda: [1][xp.asarray(0.0)],
        lambda: hash(x),
    ):
        with pytest.raises(TypeError):
            wrong()


def test_pickles_keep_types() -> None:
    for dtype in ("bool", "float32", "complex128"):
        a = sample(dtype)
        check(pickle.loads(pickle.dumps(xp.asarray(a))), a)


def test_numpy_protocols() -> None:
    a = sample("float32")
    x = xp.asarray(a) + 1
    view = np.asarray(x)
    assert not view.flags.writeable  # the array may be an operand of others
    assert np.array(x, copy=True).flags.writeable and np.asarray(x, dtype=np.float64).dtype == np.float64
    assert x.__array_namespace__() is xp and x.__array_namespace__(api_version="2024.12") is xp
    with pytest.raises(InputError, match="api_version"):
        x.__array_namespace__(api_version="2019.12")


def test_inputs_are_copied_unless_told_otherwise() -> None:
    a = np.ones(3)
    x, shared = xp.asarray(a) + 1, xp.asarray(a, copy=False) + 1
    a[:] = 5
    check(x, np.full(3, 2.0))
    check(shared, np.full(3, 6.0))
    with pytest.raises(ValueError, match="without a copy"):
        xp.asarray([1.0], copy=False)


def test_dlpack_both_ways() -> None:
    a = sample("float32")
    x = xp.from_dlpack(a) * 2
    assert x.__dlpack_device__() == (1, 0)
    np.testing.assert_array_equal(np.from_dlpack(x), a * 2)


def test_names_of_the_namespace() -> None:
    info = xp.__array_namespace_info__()
    assert info.default_device() == "cpu" and info.devices() == ("cpu",)
    assert info.dtypes(kind="complex floating") == {"complex64": xp.complex64, "complex128": xp.complex128}
    assert xp.finfo(xp.float32).eps == float(np.finfo(np.float32).eps) and xp.iinfo(xp.int8).min == -128
    assert xp.isdtype(xp.uint8, "integral") and not xp.isdtype(xp.float32, ("integral", xp.float64))
    assert (
        xp.result_type(xp.int8, xp.uint8, 3) == xp.int16
        and xp.can_cast(xp.int8, xp.int16)
        and not xp.can_cast(xp.int16, xp.int8)
    )
    with pytest.raises(InputError, match="no dtype"):
        xp.zeros(3, dtype="float128")
