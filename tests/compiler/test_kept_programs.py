"""Programs out of the cache are those that a compilation gives, and whatever decides a program is in its key."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.array.custom import custom_op
from dnnc.autotune.log.replay import Winners
from dnnc.backends.registry import open_backend
from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.ir import te
from dnnc.ir.errors import Loc
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.text import parse
from dnnc.ir.target import TargetFacts
from dnnc.options import CompileOptions
from dnnc.program_key import APART, program_key
from dnnc.tools.sample_graphs import graph_of

Array = np.ndarray[Any, Any]
rng = np.random.default_rng(0)
# a weight as it is, one that is transposed, one that a batch norm scales; small ones
DATA = {
    "w": rng.standard_normal((96, 80), np.float32),
    "v": rng.standard_normal((64, 80), np.float32),
    "k": rng.standard_normal((32, 16, 3, 3), np.float32),
    "s": rng.uniform(0.5, 1, 32).astype(np.float32),
}
TEXTS = {
    "weights": """def net(x: f32[3, 96], *, w: f32[96, 80], v: f32[64, 80]):
    return gelu(matmul(matmul(x, w), transpose(v, perm=(1, 0)))), reduce_sum(x, axes=(1,))
""",
    "folded": """def net(x: f32[1, 16, 9, 9], *, k: f32[32, 16, 3, 3], s: f32[32]):
    return relu(batch_norm(conv(x, k, None, pads=(1, 1, 1, 1)), s, s, s, s))
""",
    "sizes": """N: dim[1, 64]
def net(x: f32[N, 96], *, w: f32[96, 80]):
    h: f32[N, 80] = tanh(matmul(x, w))
    return softmax(h), reduce_sum(h, axes=(1,))
""",
    "loop": """def net(h: f32[2, 8], xs: f32[5, 2, 8], *, n: i64 = 5):
    def body(i: i64, carried: f32[2, 8], x: f32[2, 8]):
        y: f32[2, 8] = tanh(add(carried, x))
        return y, y
    (last, all) = loop(n, None, h, xs, body=body, carried=1, scanned=1, length=5) @ (f32[2, 8], f32[5, 2, 8])
    return last, all
""",
    "donated": """def net(a: f32[5, 7], b: f32[5, 7]):
    return add(a, mul(b, b)), exp(b)
""",
}


def net(name: str) -> Graph:
    text = TEXTS[name]
    return parse(text, DATA)


def inputs(g: Graph) -> list[Array]:
    shapes = ([6 if not isinstance(d, int) else d for d in v.type.shape] for v in g.inputs)
    return [np.random.default_rng(k).standard_normal(s).astype(np.float32) for k, s in enumerate(shapes)]


def results(f: Any) -> list[Array]:
    out = f(*inputs(f.graph))
    return [np.array(a) for a in (out if isinstance(out, tuple) else (out,))]


def nothing_is_planned(m: pytest.MonkeyPatch) -> None:
    m.setattr("dnnc.compile_program.schedule_graph", lambda *_, **__: pytest.fail("passes run"))


def told(f: Any) -> Any:
    """The report without what differs from one compilation to the next."""
    (p,) = f.report.as_dict()["programs"]
    return {k: v for k, v in p.items() if k not in ("seconds", "compiled", "from_cache", "kept")}


# --- what comes out of the cache --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target"),
    [*((name, "llvm") for name in TEXTS), *((name, "cuda-interpreted") for name in ("sizes", "loop", "donated"))],
)
def test_a_program_is_as_it_was(name: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"target": target, "cache": tmp_path, "threads": 2}
    options |= {"sizes": {"dims": {"N": (1, 64)}}, "donated": {"donate": {"a": "add"}}}.get(name, {})
    g = net(name)
    if name == "donated":
        g.rename(g.outputs[0], "add")
    first = dnnc.compile(g, **options)
    want = results(first)
    with monkeypatch.context() as m:
        nothing_is_planned(m)
        again = dnnc.compile(g.copy(), **options)
        got = results(again)
        assert again.report.programs[0].kept and not first.report.programs[0].kept
        assert told(again) == told(first)
        for stage in ("graph", "operator", *(("llvm", "asm") if target == "llvm" else ())):
            assert again.source(stage) == first.source(stage)
        assert again.programs[0].graph_text(True) == first.programs[0].graph_text(True)
        assert np.array_equal(again.programs[0].constants, first.programs[0].constants)
        assert again.programs[0].donated == first.programs[0].donated
        if target == "llvm":
            again.profile(*inputs(again.graph), repeats=1)
        again.save(tmp_path / "again.dnnc")
    assert [a.tobytes() for a in got] == [a.tobytes() for a in want]
    assert [a.tobytes() for a in results(dnnc.load(tmp_path / "again.dnnc", cache=tmp_path))] == [
        a.tobytes() for a in want
    ]
    symbols = {again.programs[0].symbols[s.text] for s in again.programs[0].scheduled.kernels}
    assert symbols == {k.symbol for k in again.programs[0].kernels if not k.control}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["llvm", "cuda-interpreted"])
def test_parameters(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n = 256 if target == "llvm" else 32  # arrays of 256 KB are packed by kernels
    text = f"""def net(x: f32[3, 300], w: f32[{n}, 300], b: f32[{n}], *, v: f32[64, 80]):
    return add(matmul(x, transpose(w, perm=(1, 0))), b), reduce_sum(v, axes=(0,))
"""
    arrays = {"w": rng.standard_normal((n, 300), np.float32), "b": rng.standard_normal(n).astype(np.float32)}
    other = {n: a + 1 for n, a in arrays.items()}
    x = rng.standard_normal((3, 300), np.float32)

    def made() -> Any:
        return dnnc.compile(parse(text, DATA), parameters=arrays, target=target, cache=tmp_path, threads=2)

    first = made()
    with monkeypatch.context() as m:
        nothing_is_planned(m)
        again = made()
        assert again.report.programs[0].kept
        for values in (arrays, other):
            first.refit(values)
            again.refit(values)
            for a, b in zip(first(x), again(x), strict=True):
                assert a.tobytes() == b.tobytes()
    np.testing.assert_allclose(again(x)[0], x @ other["w"].T + other["b"], rtol=1e-4, atol=1e-3)


def entries(cache: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in cache.rglob("*") if p.is_file()}


@pytest.mark.slow
def test_weights_are_not_written(tmp_path: Path) -> None:
    """Neither those of the model, nor twice what passes made of them."""
    g = net("weights")
    dnnc.compile(g, cache=tmp_path)
    assert max(map(len, entries(tmp_path).values())) < DATA["v"].nbytes
    folded = net("folded")
    dnnc.compile(folded, cache=tmp_path)
    large = [p for p, data in entries(tmp_path).items() if len(data) > DATA["k"].nbytes]
    folded.name = "another"
    dnnc.compile(folded, cache=tmp_path)
    assert large == [p for p, data in entries(tmp_path).items() if len(data) > DATA["k"].nbytes]


@pytest.mark.slow
def test_too_much_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dnnc.kept_programs.MOST_SHARE", (2 << 30) // 1000)
    for name, kept in (("weights", True), ("folded", False)):
        found = [dnnc.compile(net(name), cache=tmp_path).report.programs[0].kept for _ in range(2)]
        assert found == [False, kept] and len(list(tmp_path.rglob("*.tmp"))) == 0


@pytest.mark.slow
def test_damage_compiles_again(tmp_path: Path) -> None:
    g = net("folded")
    first = dnnc.compile(g, cache=tmp_path)
    want = results(first)
    key = key_of(g)
    whole = KernelCache(tmp_path).get(key)
    assert whole is not None
    damaged = [b"", b"\0" * 24, whole[:-1], whole[:24] + bytes(len(whole) - 24), whole.replace(b"x", b"y")]
    for data in damaged:
        KernelCache(tmp_path).put(key, data)
        f = dnnc.compile(g, cache=tmp_path)
        assert not f.report.programs[0].kept and np.array_equal(results(f)[0], want[0])
        assert KernelCache(tmp_path).get(key) is not None and dnnc.compile(g, cache=tmp_path).report.programs[0].kept
    for path in (p for p, data in entries(tmp_path).items() if data != whole and key[2:] not in p):
        Path(path).unlink()  # code, constants
    f = dnnc.compile(g, cache=tmp_path)
    assert not f.report.programs[0].kept and np.array_equal(results(f)[0], want[0])


@pytest.mark.slow
def test_where_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    g, checked = net("weights"), []
    monkeypatch.setattr("dnnc.compile_program.check_model", lambda *_: checked.append(1))
    for _ in range(2):  # a model is checked whenever that is asked for
        kept = dnnc.compile(g, cache=tmp_path, verify="model").report.programs[0].kept
    assert kept and len(checked) == 2
    monkeypatch.setenv("DNNC_CHECK", "1")
    assert not dnnc.compile(g, cache=tmp_path).report.programs[0].kept
    monkeypatch.delenv("DNNC_CHECK")
    assert dnnc.compile(g, cache=tmp_path).report.programs[0].kept
    assert not dnnc.compile(g, cache=False).report.programs[0].kept


# --- the key ----------------------------------------------------------------------------------------------------------


def key_of(g: Graph, backend: Any = None, **options: Any) -> str:
    opts = CompileOptions(**options)
    names = [v.name for v in g.inputs], [v.name for v in g.outputs]
    found = program_key(g, (), None, names, opts, backend or open_backend(opts.target, opts.threads))
    assert found is not None
    return found.key


OTHERS: dict[str, Any] = {  # another value of each option
    "precision": "bfloat16", "numerics": "strict", "opt_level": 1, "memory": 1 << 20,
    "strict_compile": True, "threads": 1, "tune": Winners({"key": ["naive", {}]}), "verify": False,
    "target": "llvm -mcpu=x86-64-v3",
}  # fmt: skip
SAME = {
    "dims": {"N": 4},
    "outputs": ["h"],
    "donate": {"a": "b"},
    "cache": "elsewhere",
    "custom_ops": {"a::B": "def B(): ..."},
}  # the graph has them


def test_every_option_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new option is in the key by itself, or its author says why not."""
    monkeypatch.delenv("DNNC_STRICT", raising=False)
    g, fields = net("weights"), {f.name for f in dataclasses.fields(CompileOptions)}
    assert fields == {*OTHERS, *SAME} and set(APART) <= fields
    keys = [key_of(g), *(key_of(g, **{name: value}) for name, value in OTHERS.items())]
    assert len(set(keys)) == len(keys)
    assert {key_of(g, **{name: value}) for name, value in SAME.items()} == {keys[0]}


def changed(value: Any) -> Any:
    """Another value of the same kind."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{(f := dataclasses.fields(value)[0]).name: changed(getattr(value, f.name))})
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return value + "x" if isinstance(value, str) else {*value, "x"} if isinstance(value, frozenset) else lambda *_: True


def test_every_fact_of_the_machine_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    g, keys = net("weights"), []
    for field in dataclasses.fields(open_backend("llvm").target):
        backend = open_backend("llvm", 2)
        facts = backend.facts("standard")
        monkeypatch.setattr(type(backend), "facts", lambda *_, facts=facts: facts)
        backend.target = dataclasses.replace(
            backend.target, **{field.name: changed(getattr(backend.target, field.name))}
        )
        keys.append(key_of(g, backend))
    for field in dataclasses.fields(TargetFacts):
        other = dataclasses.replace(facts, **{field.name: changed(getattr(facts, field.name))})
        monkeypatch.setattr(type(backend), "facts", lambda *_, other=other: other)
        keys.append(key_of(g, open_backend("llvm", 2)))
    assert len(set(keys)) == len(keys)


def test_versions_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DNNC_STRICT", raising=False)
    g = net("weights")
    keys = [key_of(g)]
    monkeypatch.setattr("dnnc.program_key.sources_version", lambda: "another dnnc")
    keys.append(key_of(g))
    monkeypatch.setattr("dnnc.backends.llvm.backend.llvm_version", lambda: "another LLVM")
    keys.append(key_of(g))
    monkeypatch.setenv("DNNC_STRICT", "1")
    keys.append(key_of(g))
    assert len(set(keys)) == 4


def test_all_of_a_graph_is_in_the_key() -> None:
    def with_data(name: str, at: int) -> Graph:
        data = DATA[name].copy()
        data.reshape(-1)[at] = np.nextafter(data.reshape(-1)[at], 9)
        return parse(TEXTS["weights"], {**DATA, name: data})

    text = TEXTS["weights"]
    graphs = [net("weights"), *(with_data(n, at) for n in "wv" for at in (0, -1))]
    others = ("net", "other"), ("gelu", "tanh"), ("axes=(1,)", "axes=(0,)")
    graphs += [parse(text.replace(*pair), DATA) for pair in others]
    donated = net("weights")
    donated.donated = {1: 0}
    bound = net("weights")
    bound.bind_inputs({"x"})
    named = net("weights")
    named.inputs[0].locs = (Loc("conv1", "Conv", 13),)
    bounds = [parse(TEXTS["sizes"].replace("64", high), DATA) for high in ("64", "65")]
    inner = [parse(TEXTS["loop"].replace("tanh", op), DATA) for op in ("tanh", "exp")]
    keys = [key_of(g) for g in (*graphs, donated, bound, named, *bounds, *inner)]
    assert len(set(keys)) == len(keys)
    backend, g, names = open_backend("llvm"), net("sizes"), (["x"], ["y", "z"])
    sizes = [((), None), ((("N", 3),), None), ((("N", 4),), None), ((), {}), ((), {"N": 2})]
    found = [program_key(g, *at, names, CompileOptions(), backend) for at in sizes]
    found.append(program_key(g, (), None, (["x"], ["y", "other"]), CompileOptions(), backend))
    assert len({k.key for k in found if k is not None}) == len(found)


def test_a_function_that_moves_in_its_file_keeps_its_key() -> None:
    def at(file: str, *lines: int) -> Graph:
        g = net("weights")
        for n, line in zip(g.nodes(), lines):
            n.locs = (Loc("f", file=file, line=line),)
        return g

    backend = open_backend("llvm")
    keys = [
        program_key(at(*x), (), None, ((), ()), CompileOptions(), backend) for x in (("a.py", 3, 7), ("b.py", 30, 33))
    ]
    other = program_key(at("a.py", 3, 3), (), None, ((), ()), CompileOptions(), backend)
    assert keys[0] is not None and keys[1] is not None and other is not None
    assert keys[0].key == keys[1].key != other.key
    kept = keys[0].lines.taken_out('["at a.py:3, aa.py:3, a.py:37", "derivative of a.py:7"]')
    assert keys[0].lines.put_in(kept) == '["at a.py:3, aa.py:3, a.py:37", "derivative of a.py:7"]'
    assert keys[1].lines.put_in(kept).startswith('["at b.py:30, ab.py:30, a.py:37", "derivative of b.py:33"')


def test_code_of_a_user_is_not_kept() -> None:
    def double(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, x.dtype, lambda *at: x[at] * 2.0)

    types = [parse(TEXTS["donated"]).inputs[0].type]
    by_user: Any = lambda a: a * 2  # noqa: E731
    for reference, kept in ((None, True), (by_user, False)):
        op = custom_op("double", double, reference=reference)
        record = op.record(types, {}).op
        g = Graph("f")
        x = g.add_input("x", types[0])
        g.outputs = [Builder(g, ops={record.name: record}).op(record.name, x)]
        assert (program_key(g, (), None, ((), ()), CompileOptions(), open_backend("llvm")) is not None) == kept


def test_a_sample_is_kept_by_a_process_for_the_next(tmp_path: Path) -> None:
    g = graph_of("def f(x: f32[4]):\n    return exp(x)\n")
    kept = [dnnc.compile(g, cache=tmp_path, threads=1, verify=False).report.programs[0].kept for _ in range(2)]
    assert kept == [False, True]
