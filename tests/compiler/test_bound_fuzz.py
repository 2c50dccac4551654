"""Random graphs with parameters and with outputs in the memory of inputs: the interpreter's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from donation_cases import donating, many

from dnnc.compile_graph import compile_graph
from dnnc.ir.errors import InputError, UnsupportedError
from dnnc.ir.graph import Graph
from dnnc.options import make_options
from dnnc.tools.accuracy import first_difference
from support.fuzz import input_dims
from support.random_graphs import random_graph

pytestmark = pytest.mark.family("random")

Array = np.ndarray[Any, Any]
WAYS: tuple[dict[str, Any], ...] = ({"opt_level": 0}, {"threads": 2}, {"numerics": "strict"}, {"precision": "bfloat16"})
JUMPS = frozenset(
    ("mod", "fmod", "floor", "ceil", "round", "trunc", "sign")
)  # a rounding before them may change everything


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def dims_of(g: Graph) -> dict[str, Any]:
    return {v.name: (v.lo, v.hi) for v in input_dims(g)}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(80))
def test_parameters(seed: int, kernels: Path) -> None:
    """All constant floats and half of the inputs, then with other signs, halves and zeros."""
    g, arrays = random_graph(seed, 12)
    rng = np.random.default_rng(seed)
    held: dict[str, Array] = {}
    for v in list(g.constants):
        if v.type.dtype.is_float and v.type.rank:
            p = g.add_input("p", v.type)
            held[p.name] = np.array(g.constants[v])
            g.replace_all_uses(v, p)
            g.erase_constant(v)
    given = dict(zip((v.name for v in g.inputs), arrays))
    held.update(
        (v.name, given[v.name])
        for v in g.inputs
        if v.name in given and v.type.static and v.type.dtype.is_float and rng.random() < 0.5
    )
    ways = WAYS[:-1] if any(n.op.name in JUMPS for n in g.nodes()) else WAYS
    options = {"cache": str(kernels), "dims": dims_of(g), **ways[seed % len(ways)]}
    try:
        f: Any = compile_graph(
            g,
            ([v.name for v in g.inputs], [f"o{k}" for k in range(len(g.outputs))]),
            make_options(options),
            parameters=held,
        )
    except UnsupportedError as e:
        assert "without steps on the host" in str(e)
        return
    for turn in range(2):
        if turn and held:
            held = {n: np.asarray(a * rng.choice([1.0, 0.5, -1.0, 0.0])).astype(a.dtype) for n, a in held.items()}
            f.refit(held)
        try:
            got = many(f(*(a for n, a in given.items() if n not in held)))
        except InputError:  # an index that other weights move out of its axis
            assert turn
            continue
        whole = [held[v.name] if v.name in held else given[v.name] for v in g.inputs]
        assert first_difference(g, whole, got, options.get("precision")) is None


@pytest.mark.parametrize("seed", range(80))
def test_donation(seed: int, kernels: Path) -> None:
    """Any value of the type of an input may be an output that takes its memory."""
    g, arrays = random_graph(seed, 12)
    donate = donating(g, seed)
    names = [v.name for v in g.inputs], [f"o{k}" for k in range(len(g.outputs))]
    options = {"cache": str(kernels), "dims": dims_of(g), "donate": donate, **WAYS[seed % (len(WAYS) - 1)]}
    try:
        f: Any = compile_graph(g, names, make_options(options))
    except UnsupportedError as e:
        assert "without steps on the host" in str(e)
        return
    for _ in range(2):
        given = [a.copy() for a in arrays]
        got = many(f(*given))
        assert first_difference(g, arrays, got) is None
        assert all(got[k] is given[names[0].index(n)] for k, n in enumerate(donate))
