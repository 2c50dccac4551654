"""Public functions given arguments of wrong types and values: every failure is a DnncError, never what Python raises
inside of dnnc.
"""

from __future__ import annotations

import io
import traceback
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dnnc
import dnnc.array as xp
from dnnc.ir.graph.text import parse

X = np.zeros(3, np.float32)
GRAPH = parse("def g(x: f32[3]):\n    return exp(x)\n")
SPECS = [dnnc.Spec((3,))] * 2
PYTHON = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RuntimeError, StopIteration)


class Odd:
    """A class of the user."""


def odd() -> list[Any]:
    plain = [
        None,
        True,
        0,
        -1,
        1.5,
        float("nan"),
        1j,
        10**30,
        "",
        "x",
        "no/such",
        b"",
        b"x",
        [],
        [1],
        [[1], [2, 3]],
        ["a"],
        (),
        (3,),
        (-1,),
    ]
    objects = [
        {},
        {"a": 1},
        {1: 2},
        set(),
        object(),
        Odd(),
        Odd,
        len,
        Path("x"),
        io.BytesIO(b""),
        Exception("x"),
        range(3),
        slice(None),
        ...,
    ]
    arrays = [
        np.zeros(3),
        np.zeros((2, 3), np.float32),
        np.array(["a"]),
        np.array([None]),
        np.float32(1),
        np.int64(3),
        np.dtype("f4"),
    ]
    return [*plain, *objects, *arrays, dnnc.Spec((3,)), lambda x: x, xp.asarray([1.0, 2.0])]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DNNC_CACHE_DIR", str(tmp_path / "cache"))


def inside(e: BaseException) -> bool:
    """Was it raised in dnnc, or by what dnnc called for itself? What a user's function raises is the user's."""
    frames = traceback.extract_tb(e.__traceback__)
    user = max(k for k, f in enumerate(frames) if f.filename == __file__)
    return user < len(frames) - 1


def attempt(call: Callable[[Any], Any], v: Any) -> str:
    """What is wrong with how a call with this argument fails, or nothing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call(v)
    except dnnc.InternalError as e:
        return f"{v!r}: internal: {e}"
    except dnnc.DnncError as e:
        return "" if len(str(e)) > 10 else f"{v!r}: says {str(e)!r}"
    except BufferError:  # as the array API standard says of from_dlpack
        return ""
    except PYTHON as e:
        return f"{v!r}: {type(e).__name__}: {e}" if inside(e) and not own_signature(e) else ""
    return ""


def own_signature(e: BaseException) -> bool:
    """Python's own words on a call with too many arguments, or with another keyword."""
    return isinstance(e, TypeError) and any(
        w in str(e) for w in ("unexpected keyword", "missing a required argument", "too many positional")
    )


def add(a: Any, b: Any) -> Any:
    return a + b


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "compile": lambda f, v: dnnc.compile(v),
    "compile, inputs": lambda f, v: dnnc.compile(v, inputs=SPECS),
    "compile(fn), inputs": lambda f, v: dnnc.compile(add, inputs=v),
    "compile(fn), input": lambda f, v: dnnc.compile(add, inputs=[v, v]),
    "compile(fn), parameters": lambda f, v: dnnc.compile(add, inputs=SPECS, parameters=v),
    "compile(graph), parameters": lambda f, v: dnnc.compile(GRAPH, parameters=v),
    "compile(graph), progress": lambda f, v: dnnc.compile(GRAPH, v),
    **{
        f"compile, {o}": lambda f, v, o=o: dnnc.compile(GRAPH, **{o: v})
        for o in (
            "target",
            "precision",
            "numerics",
            "dims",
            "outputs",
            "donate",
            "opt_level",
            "verify",
            "cache",
            "threads",
            "nonsense",
        )
    },
    "options, tune": lambda f, v: dnnc.CompileOptions(tune=v),
    "jit": lambda f, v: dnnc.jit(v)(X),
    "jit(fn)": lambda f, v: dnnc.jit(lambda x: xp.exp(x))(v),
    **{
        f"jit, {o}": lambda f, v, o=o: dnnc.jit(add, **{o: v})(X, X)
        for o in ("static", "dynamic", "donate", "parameters", "programs", "target")
    },
    "jit, dynamic axes": lambda f, v: dnnc.jit(add, dynamic={"a": v})(X, X),
    "trace": lambda f, v: dnnc.trace(v, dnnc.Spec((3,))),
    "trace(fn)": lambda f, v: dnnc.trace(lambda x: xp.exp(x), v),
    "trace(fn) of fewer": lambda f, v: dnnc.trace(add, v),
    "trace, result": lambda f, v: dnnc.trace(lambda x: v, dnnc.Spec((3,))),
    "vmap": lambda f, v: dnnc.vmap(v)(np.zeros((2, 3), np.float32)),
    "vmap, axes": lambda f, v: dnnc.vmap(lambda x: x, v)(np.zeros((2, 3), np.float32)),
    "Spec": lambda f, v: dnnc.Spec(v),
    "Spec, dtype": lambda f, v: dnnc.Spec((3,), v),
    "call": lambda f, v: f(v),
    "call by name": lambda f, v: f(x=v),
    "call by dict": lambda f, v: f({"x": v}),
    "run": lambda f, v: f.run(v),
    "run list": lambda f, v: f.run([v]),
    "run, outputs": lambda f, v: f.run([X], v),
    "run, output": lambda f, v: f.run([X], [v]),
    "save": lambda f, v: f.save(v),
    "load": lambda f, v: dnnc.load(v),
    **{f"load, {o}": lambda f, v, o=o: dnnc.load("m.dnnc", **{o: v}) for o in ("code", "threads", "cache")},
    "to_onnx": lambda f, v: dnnc.to_onnx(v),
    "to_onnx, path": lambda f, v: dnnc.to_onnx(GRAPH, v),
    "to_onnx, opset": lambda f, v: dnnc.to_onnx(GRAPH, None, v),
    "from_onnx": lambda f, v: dnnc.from_onnx(v),
    "cond": lambda f, v: dnnc.cond(v, lambda x: x, lambda x: x, 1.0),
    "cond, branches": lambda f, v: dnnc.cond(True, v, v, 1.0) if v is not len else None,
    "scan": lambda f, v: dnnc.scan(v, xp.zeros(3), xp.zeros((2, 3))),
    "scan, state": lambda f, v: dnnc.scan(lambda c, x: (c, x), v, v),
    "while_loop": lambda f, v: dnnc.while_loop(v, v, v) if not callable(v) else None,
}
NATIVE: dict[str, Callable[[Any, Any], Any]] = {  # what the interpreter does not have
    "bind": lambda f, v: f.bind(v, [np.zeros_like(X)]),
    "bind, outputs": lambda f, v: f.bind([X], v),
    "bind both": lambda f, v: f.bind([v], [v]),
    "profile": lambda f, v: f.profile(v),
    "profile, repeats": lambda f, v: f.profile(X, repeats=v) if not (isinstance(v, int) and v > 1e20) else None,
    "source": lambda f, v: f.source(v),
    "source, kernel": lambda f, v: f.source("asm", v),
    "refit": lambda f, v: f.refit(v),
    "prepare": lambda f, v: f.prepare(v),
    "prepare shape": lambda f, v: f.prepare([v]),
}
TUNE = ("budget", "log", "callbacks", "trials", "only", "runner", "devices", "space", "cost_model", "stopped")
REFUSED = (
    True,
    0,
    1j,
    "",
    b"x",
    [[1], [2, 3]],
    {1: 2},
    object(),
    Odd,
    np.array(["a"]),
    ...,
)  # nothing of these is a value of any


@pytest.mark.slow
@pytest.mark.parametrize("target", ["llvm", "reference"])
@pytest.mark.parametrize("name", [*CALLS, *NATIVE])
def test_every_argument(name: str, target: str) -> None:
    if target == "reference" and (name in NATIVE or not name.startswith(("call", "run", "save"))):
        return
    f = dnnc.compile(GRAPH, target=target)
    f.save("m.dnnc")
    call = {**CALLS, **NATIVE}[name]
    assert not [w for v in odd() if (w := attempt(lambda x: call(f, x), v))]


@pytest.mark.slow
@pytest.mark.parametrize("name", TUNE)
def test_arguments_of_tune(name: str) -> None:
    for v in REFUSED:
        usual: dict[str, Any] = {"budget": 0.1, "trials": 1}
        accepted = {"only": ("",), "log": ("",), "runner": (), "space": (Odd,), "stopped": (Odd,)}.get(name, ())
        if any(v is a or (isinstance(v, str) and v in accepted) for a in accepted):
            continue
        with pytest.raises(dnnc.DnncError, match=r".{10}"):
            dnnc.tune(GRAPH, **{**usual, name: v})


FUNCTIONS = sorted(n for n in xp.__all__ if isinstance(getattr(xp, n), types.FunctionType) and n != "evaluate")


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_arrays(name: str) -> None:
    fn = getattr(xp, name)
    wrong = []
    for v in odd():
        for args in ((v,), (v, v), (xp.asarray([1.0, 2.0]), v), (v, 2.0), (v, v, v)):
            wrong.append(attempt(lambda a: fn(*a), args) if not (isinstance(v, int) and abs(v) > 1e20) else "")
    assert not [w for w in wrong if w and "positional argument" not in w]


def test_what_was_reported_first() -> None:
    with pytest.raises(dnnc.InputError, match=r"<lambda>\(a, b\) cannot take 1 argument:"):
        dnnc.compile(lambda a, b: a + b, inputs=[dnnc.Spec((3,))])
    with pytest.raises(dnnc.InputError, match="nested sequences must have equal lengths"):
        xp.asarray([[1], [2, 3]])
    for target in ("llvm", "reference"):
        f = dnnc.compile(GRAPH, target=target)
        np.testing.assert_array_equal(f.run(X), f(X))
        out = np.zeros_like(X)
        f.run(X, out)
        np.testing.assert_array_equal(out, f(X))
        g = dnnc.compile(add, inputs=SPECS, target=target)
        with pytest.raises(
            dnnc.InputError, match="expected a list of arrays in the order of a, b, or a dict by name, got a"
        ):
            g.run(X)
    with pytest.raises(TypeError, match="unexpected keyword"):
        xp.sum(xp.asarray([1.0]), axes=1)
    with pytest.raises(dnnc.InputError, match=r"sum cannot take \(a str\)"):
        xp.sum("x")
