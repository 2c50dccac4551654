"""Executables of every kind as pickles, as copies, and in the processes of a pool."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from one_device import one_device
from onnx import TensorProto, helper

import dnnc
import dnnc.array as xp
from dnnc.executable import Executable
from dnnc.ir.graph.text import parse

X = np.arange(12, dtype=np.float32).reshape(3, 4) - 5
W = np.linspace(-1, 1, 20, dtype=np.float32).reshape(4, 5)
STEPS = (
    "n: dim[0, 3]\ndef g(x: f32[3, 4], k: i64):\n    t: f32[n, 4] = truncate(relu(x), k, size=n)\n"
    "    return exp(t), neg(x)\n"
)


@dnnc.jit
def doubled(x: Any) -> Any:
    return xp.exp(x) * 2


def plain(x: Any) -> Any:
    return xp.exp(x) * 3


tripled = dnnc.jit(plain, static=())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DNNC_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    yield from one_device(monkeypatch, tmp_path)


def net(target: str = "llvm", **options: Any) -> Any:
    return dnnc.compile(
        parse("def g(x: f32[N, 4], *, w: f32[4, 5]):\n    return relu(matmul(x, w)), exp(x)\n", {"w": W}),
        target=target,
        **options,
    )


def late() -> Any:
    nodes = [helper.make_node("SequenceAt", ["xs", "k"], ["y"])]
    xs = helper.make_tensor_sequence_value_info("xs", TensorProto.FLOAT, None)
    k, y = (
        helper.make_tensor_value_info("k", TensorProto.INT64, ()),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, None),
    )
    return dnnc.compile(
        helper.make_model(
            helper.make_graph(nodes, "g", [xs, k], [y]), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
        )
    )


KINDS: dict[str, tuple[type, Callable[[], Any], tuple[Any, ...]]] = {
    "programs": (Executable, net, (X,)),
    "one program for all sizes": (Executable, lambda: net(dims={"N": (1, 64)}), (X,)),
    "fixed sizes": (Executable, lambda: net(dims={"N": 3}, threads=1, cache=False), (X,)),
    "staged": (Executable, lambda: dnnc.compile(parse(STEPS)), (X, np.array(2))),
    "reference": (Executable, lambda: net("reference"), (X,)),
    "late": (Executable, late, ([X, X + 1], np.array(1))),
}


def same(a: Any, b: Any) -> None:
    many = [x if isinstance(x, (tuple, list)) else (x,) for x in (a, b)]
    assert len(many[0]) == len(many[1])
    for x, y in zip(*many):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.slow
@pytest.mark.family("cases")
@pytest.mark.parametrize("called", [False, True], ids=["before a call", "after a call"])
@pytest.mark.parametrize("kind", KINDS)
def test_pickles_and_copies(kind: str, called: bool) -> None:
    expected, make, args = KINDS[kind]
    f = make()
    assert type(f) is expected
    if called:
        f(*args)
    data = pickle.dumps(f)
    for g in (pickle.loads(data), copy.deepcopy(f), copy.copy(f)):
        assert type(g) is expected and g is not f and [s.name for s in g.inputs] == [s.name for s in f.inputs]
        same(g(*args), f(*args))
    assert pickle.loads(pickle.dumps(pickle.loads(data)))(*args) is not None


def test_a_copy_compiles_nothing_and_keeps_the_options() -> None:
    f = net(dims={"N": 3}, threads=1, cache=False, numerics="strict")
    g = pickle.loads(pickle.dumps(f))
    assert g.programs[0].compiled == 0 and g.options == f.options


def test_on_a_device(device: Any) -> None:
    f = net("cuda", dims={"N": 3})
    assert type(f) is Executable
    g = pickle.loads(pickle.dumps(f))
    assert type(g) is Executable
    same(g(X), f(X))


def test_save_to_and_load_from_an_open_file() -> None:
    f, file = net(dims={"N": 3}), io.BytesIO()
    f.save(file)
    file.seek(0)
    same(dnnc.load(file)(X), f(X))
    with pytest.raises(dnnc.ArtifactError, match="gives text"):
        dnnc.load(io.StringIO("x"))  # type: ignore[arg-type]
    with pytest.raises(dnnc.ArtifactError, match="expected a path"):
        f.save(7)
    with pytest.raises(dnnc.ArtifactError, match="got an int"):
        dnnc.load(7)  # type: ignore[arg-type]
    for cut in (0, 5, 5000):
        with pytest.raises(dnnc.ArtifactError, match="the given bytes"):
            dnnc.load(io.BytesIO(file.getvalue()[:cut]))


def test_parameters_belong_to_their_owner() -> None:
    f = dnnc.compile(lambda x, w: x @ w, inputs=[dnnc.Spec((3, 4))], parameters={"w": W})
    for attempt in (pickle.dumps, copy.deepcopy):
        with pytest.raises(dnnc.InputError, match=r"f\.save\(path\)"):
            attempt(f)


def test_jitted_functions_go_by_name() -> None:
    for f in (doubled, tripled):
        g = pickle.loads(pickle.dumps(f))
        same(g(X), f(X))
    assert (
        pickle.loads(pickle.dumps(doubled)) is doubled
        and copy.deepcopy(doubled) is doubled
        and copy.copy(tripled) is tripled
    )

    @dnnc.jit
    def inner(x: Any) -> Any:
        return x

    assert copy.deepcopy(inner) is inner
    with pytest.raises(dnnc.InputError, match=r"inner cannot be pickled.*f\.save"):
        pickle.dumps(inner)


if find_spec("torch"):

    @pytest.mark.slow
    def test_a_compiled_module_names_save() -> None:
        import torch

        f = dnnc.compile(torch.nn.Linear(4, 2), inputs=(torch.zeros(3, 4),))
        for attempt in (pickle.dumps, copy.deepcopy):
            with pytest.raises(dnnc.InputError, match=r"f\.save\(path\)"):
                attempt(f)


@pytest.mark.slow
def test_in_a_pool_of_spawned_processes() -> None:
    f = net(dims={"N": (1, 64)})
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        same(pool.submit(f, X).result(timeout=120), f(X))
