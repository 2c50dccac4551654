"""Functions of array code as graphs: what the graph says, where its nodes come from, and what errors say."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import dnnc
import dnnc.array as xp
from dnnc.frontends.trace import Spec, trace
from dnnc.ir.errors import DnncError, InputError, ShapeError
from dnnc.ir.graph.interp import run

RNG = np.random.default_rng(31)


def line_in(fn: Any, text: str) -> str:
    """`file:line` of the line of a function that holds a text."""
    lines, first = inspect.getsourcelines(fn)
    (found,) = (k for k, s in enumerate(lines) if text in s)
    return f"{__file__}:{first + found}"


def norm(x: Any, params: dict[str, Any], twice: bool = False) -> Any:
    y = (x - xp.mean(x, axis=1, keepdims=True)) * params["scale"]
    if twice:
        y = y * 2
    return {"y": y, "size": x.shape[0]}


def test_graph_has_the_functions_names_and_lines() -> None:
    g = trace(norm, Spec((2, 3)), {"scale": Spec((3,))}, twice=True)
    assert (
        g.name == "norm"
        and [v.name for v in g.inputs] == ["x", "params_scale"]
        and [v.name for v in g.outputs] == ["result_y"]
    )
    assert [n.op.name for n in g.nodes()] == ["reduce_mean", "sub", "mul", "mul"]
    assert f"# {line_in(norm, 'y * 2')}" in g.text(locs=True)
    x, s = RNG.standard_normal((2, 3), np.float32), RNG.standard_normal(3, np.float32)
    np.testing.assert_allclose(run(g, [x, s])[0], (x - x.mean(1, keepdims=True)) * s * 2, rtol=1e-5)


def test_python_runs_once() -> None:
    seen = []

    def power(x: Any, n: int) -> Any:
        seen.append(n)
        for _ in range(n):
            x = x * x
        return x

    assert [n.op.name for n in trace(power, Spec((4,)), 3).nodes()] == ["mul"] * 3 and seen == [3]


def test_arrays_serve_as_specs_and_outer_arrays_are_constants() -> None:
    w = RNG.standard_normal((3, 3))
    g = trace(lambda x: x @ xp.asarray(w), np.zeros((2, 3)))
    assert [str(v.type) for v in g.inputs] == ["f64[2, 3]"]
    assert any(np.array_equal(c, w) for c in g.constants.values())


def test_a_complex_array_is_pairs() -> None:
    z = RNG.standard_normal((3, 2))
    g = trace(lambda z: z * (1 + 2j), Spec((3,), "complex128"))
    assert [str(v.type) for v in (*g.inputs, *g.outputs)] == ["f64[3, 2]"] * 2
    np.testing.assert_allclose(run(g, [z])[0].view(np.complex128)[:, 0], (z[:, 0] + 1j * z[:, 1]) * (1 + 2j))


def test_compile_a_function() -> None:
    f = dnnc.compile(norm, inputs={"x": Spec((2, 3)), "params": {"scale": Spec((3,))}}, threads=1)
    x, s = RNG.standard_normal((2, 3), np.float32), RNG.standard_normal(3, np.float32)
    np.testing.assert_allclose(f(x=x, params_scale=s), (x - x.mean(1, keepdims=True)) * s, rtol=1e-5, atol=1e-6)
    with pytest.raises(InputError, match=r"a function needs inputs=\["):
        dnnc.compile(norm)
    with pytest.raises(InputError, match="only a function takes them, not a str"):
        dnnc.compile("model.onnx", inputs=[Spec((1,))])


# --- errors -----------------------------------------------------------------------------------------------------------


def branches(x: Any) -> Any:
    return x if xp.sum(x) > 0 else -x


def counts(x: Any) -> Any:
    return xp.zeros(int(xp.sum(x)))


def converts(x: Any) -> Any:
    return float(xp.sum(x))


def copies(x: Any) -> Any:
    return np.asarray(x)


def numpys(x: Any) -> Any:
    return np.frexp(x)


def masks(x: Any) -> Any:
    return x[x > 0]


@pytest.mark.parametrize(
    ("fn", "mark", "advice"),
    [
        (branches, "if xp", "dnnc.cond"),
        (counts, "int(", ".shape"),
        (converts, "float(", "without axes"),
        (copies, "np.", "dnnc.array"),
        (numpys, "np.", "dnnc.array"),
        (masks, "x[x", "dnnc.array.where"),
    ],
)
def test_looking_at_a_traced_array(fn: Any, mark: str, advice: str) -> None:
    with pytest.raises(InputError) as e:
        trace(fn, Spec((3,)))
    assert (
        str(e.value).startswith(line_in(fn, mark) + ": ")
        and str(e.value).count(__file__) == 1
        and advice in str(e.value)
    )


def adds(x: Any) -> Any:
    return x + xp.zeros(7)


def test_errors_of_ops_name_the_line() -> None:
    with pytest.raises(ShapeError) as e:
        trace(adds, Spec((3,)))
    assert str(e.value).startswith(line_in(adds, "zeros") + ": add(")


def test_an_array_outlives_its_trace() -> None:
    kept: list[Any] = []
    trace(lambda x: kept.append(x + 1), Spec((3,)))
    with pytest.raises(InputError, match="whose trace has ended"):
        trace(lambda x: x * kept[0], Spec((3,)))
    with pytest.raises(DnncError, match="has none yet"):
        kept[0].numpy()


def test_spec_checks_itself() -> None:
    assert Spec((2,), float).dtype == np.float64 and Spec(4).shape == (4,)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="not negative"):
        Spec((-1,))
    with pytest.raises(InputError, match="no dtype"):
        Spec((1,), "float8")


@pytest.mark.parametrize("shape", [(3,), [2, 3], ("n", 4)])
def test_a_shape_is_no_array(shape: Any) -> None:
    with pytest.raises(InputError, match=r"holds no array; for an array of this shape give dnnc\.Spec"):
        dnnc.trace(lambda x: x, shape)
    dnnc.trace(lambda x, s: xp.reshape(x, s), dnnc.Spec((4,)), (2, 2))  # beside an array it is an argument
