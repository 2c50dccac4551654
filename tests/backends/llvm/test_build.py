"""Linking: constants as their layouts order them, each stored once, and names that tell kernels apart."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dnnc
from dnnc.backends.llvm.build import symbol_of
from dnnc.backends.llvm.features import X86_CPUS, parse_target
from dnnc.backends.registry import open_backend
from dnnc.backends.runtime.frames import ALIGN
from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.backends.runtime.link import Linker, pack, place_constants
from dnnc.backends.runtime.program import MemoryRef
from dnnc.compile_program import schedule
from dnnc.ir.dtype import BY_NAME, from_numpy
from dnnc.ir.errors import TargetError
from dnnc.ir.expr import const, dim, value
from dnnc.ir.graph.text import parse
from dnnc.ir.shapes import concrete_shape
from dnnc.ir.types import Dense, Layout, Part, TensorType, parse_layout
from dnnc.options import CompileOptions
from dnnc.passes.planning.program import ScheduledGraph

# --- packing ----------------------------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout]:
    """A small shape, and an order of its axes, some of them in blocks of one or two levels."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    parts: list[Part] = []
    for axis in range(len(shape)):
        inner = draw(st.sampled_from([0, 0, 2, 3, 4]))
        outer = draw(st.sampled_from([0, 2])) if inner else 0
        if not inner:
            parts.append(Part(axis))
        elif not outer:
            parts += [Part(axis, inner), Part(axis, 1, inner)]
        else:
            parts += [Part(axis, inner * outer), Part(axis, inner, outer), Part(axis, 1, inner)]
    return shape, Layout(tuple(draw(st.permutations(parts))))


def oracle(a: Any, layout: Layout) -> Any:
    out = np.zeros([int(str(d)) for d in layout.shape(a.shape)], a.dtype)
    for at in itertools.product(*map(range, a.shape)):
        out[tuple(value(i) for i in layout.index(at))] = a[at]
    return out


@pytest.mark.slow
@given(layouts(), st.sampled_from(["f32", "f16", "i8", "bool"]))
@settings(max_examples=150, deadline=None)
def test_pack_places_each_element_where_the_layout_says(found: tuple[tuple[int, ...], Layout], name: str) -> None:
    shape, layout = found
    dtype = BY_NAME[name]
    a = (np.arange(1, 1 + np.prod(shape)) % 100).reshape(shape).astype(dtype.numpy)
    packed = pack(a, TensorType(dtype, shape, Dense(layout)))
    want = oracle(a, layout)
    assert packed.flags.c_contiguous and packed.shape == want.shape
    np.testing.assert_array_equal(packed, want)
    back, padding = layout.unpack(packed, shape)
    np.testing.assert_array_equal(back, a)
    assert not padding.any()


def test_pack_of_rows_is_the_array() -> None:
    a = np.arange(12.0).reshape(3, 4).T
    np.testing.assert_array_equal(pack(a, TensorType(BY_NAME["f64"], (4, 3))).reshape(-1), a.reshape(-1))


# --- constants --------------------------------------------------------------------------------------------------------


def program(text: str, constants: dict[str, Any] | None = None, level: int = 3) -> ScheduledGraph:
    opts = CompileOptions(opt_level=level)
    return schedule(parse(text, constants), open_backend("llvm -mcpu=x86-64-v4"), opts)


def laid_out(p: ScheduledGraph) -> tuple[Any, Any]:
    """The block of constants, and the byte at which each lies."""
    constants = place_constants(p)
    return constants.block(), constants.offsets


def stored(p: ScheduledGraph, name: str) -> Any:
    """The bytes of a constant as the program's block holds them, as its dtype."""
    block, offsets = laid_out(p)
    v = next(v for v in offsets if v.name == name)
    at = offsets[v]
    n = int(np.prod([int(str(d)) for d in v.type.physical])) * v.type.dtype.bytes
    return block[at : at + n].view(v.type.dtype.numpy)


def test_equal_constants_are_stored_once_and_aligned() -> None:
    w = np.arange(40, dtype=np.float32)
    p = program(
        "def g(x: f32[40], *, a: f32[40], b: f32[40], c: f32[40], unread: f32[40]):\n    return add(x, a), mul(x, b), "
        "sub(x, c)",
        {"a": w, "b": w.copy(), "c": w + 1, "unread": w + 2},
        level=0,
    )
    block, offsets = laid_out(p)
    by = {v.name: o for v, o in offsets.items()}
    assert by["a"] == by["b"] != by["c"] and "unread" not in by
    assert block.nbytes == 2 * 192 and block.ctypes.data % ALIGN == 0 and all(o % ALIGN == 0 for o in by.values())
    np.testing.assert_array_equal(stored(p, "c"), w + 1)


def test_one_array_in_two_layouts_is_stored_twice() -> None:
    w = np.arange(16 * 16, dtype=np.float32).reshape(16, 16) % 7
    p = program(
        "def g(x: f32[4, 16], y: f32[16, 16], *, w: f32[16, 16]):\n    return matmul(x, w), add(y, w)",
        {"w": w[:, ::-1].copy()},
    )
    assert len(set(laid_out(p)[1].values())) == 2


def test_a_view_of_a_constant_is_its_bytes() -> None:
    w = np.arange(12, dtype=np.float32)
    text = "def g(x: f32[3, 4], *, w: f32[12]):\n    return add(x, reshape(w, shape=(3, 4)))"
    np.testing.assert_array_equal(stored(program(text, {"w": w}, level=0), "v0"), w)
    for level in (0, 1, 3):
        got = dnnc.compile(parse(text, {"w": w}), cache=False, opt_level=level)(np.ones((3, 4), np.float32))
        np.testing.assert_array_equal(got, w.reshape(3, 4) + 1)


@pytest.mark.parametrize("dtype", ["bool", "bf16", "f8e4m3fn", "i4", "u64"])
def test_every_dtype_is_stored(dtype: str) -> None:
    t = BY_NAME[dtype]
    w = np.array([0, 1, 1, 0, 1], np.int64).astype(t.numpy)
    p = program(
        f"def g(x: {dtype}[5], *, w: {dtype}[5]):\n    return where(equal(cast(x, to=f32), 0.0), w, x)",
        {"w": w},
        level=0,
    )
    np.testing.assert_array_equal(stored(p, "w").astype(np.float32), w.astype(np.float32))


# --- names and places -------------------------------------------------------------------------------------------------


def test_a_symbol_tells_text_and_target() -> None:
    target = parse_target("llvm -mcpu=x86-64-v4", None)
    base = symbol_of("def k():\n    pass", target)
    assert base == symbol_of("def k():\n    pass", target) and base.startswith("k_") and len(base) == 66
    others = [
        symbol_of("def k():\n    pass\n", target),
        symbol_of("def k():\n    pass", replace(target, features=target.features + ",-fma")),
        symbol_of("def k():\n    pass", parse_target("llvm -mcpu=x86-64-v3", None)),
    ]
    assert len({base, *others}) == 4


def test_places_of_arguments() -> None:
    p = program(
        "def g(x: f32[4, 40], y: f32[4, 40], *, w: f32[40]):\n    a = softmax(add(x, w))\n    return y, softmax(mul(a, "
        "y))",
        {"w": np.ones(40, "f4")},
        0,
    )
    _, offsets = laid_out(p)
    made = Linker(p, {s.text: "k_" + s.kernel.name for s in p.steps}, offsets).entry()
    by = {c.symbol: c for c in made}
    assert by["k_add"].args[:2] == (MemoryRef("buffer", 0, nbytes=640), MemoryRef("constant", 0))
    assert {a.space for a in by["k_mul"].args} == {"arena", "buffer"}
    copy = by["k_pack"]
    assert (
        copy.args == (MemoryRef("buffer", 1, nbytes=640), MemoryRef("buffer", 2, nbytes=640))
        and copy.writes == copy.args[1:]
    )  # inputs first, then outputs
    assert all(p.offset % ALIGN == 0 and p.nbytes == 640 for c in made for p in c.args if p.space == "arena")


def test_dims_are_passed_by_position() -> None:
    p = program("B: dim[1, 8]\nA: dim[1, 8]\ndef g(x: f32[B, 4], y: f32[A, B]):\n    return relu(x), exp(y)", level=0)
    assert [v.name for v in p.dims] == ["A", "B"]
    by = {c.symbol: c for c in Linker(p, {s.text: "k_" + s.kernel.name for s in p.steps}, {}).entry()}
    assert by["k_relu"].dims == (1,) and by["k_exp"].dims == (0, 1)
    assert all(a.offset == -1 for c in by.values() for a in c.args if a.space == "arena")


def test_shape_of() -> None:
    n = dim("N")
    t = TensorType(from_numpy(np.dtype("f4")), (n * 2 + 1, 4), Dense(parse_layout("1 0")))
    assert concrete_shape(t, {n: const(3)}) == (7, 4)


def test_kernels_that_fail_their_check_do_not_enter_the_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    g = parse("def g(x: f32[5, 7]):\n    return exp(x)")

    def refuse(*args: Any, **options: Any) -> None:
        raise dnnc.AccuracyError("wrong")

    with monkeypatch.context() as m:
        m.setattr("dnnc.backends.llvm.build.check_kernel", refuse)
        with pytest.raises(dnnc.AccuracyError):
            dnnc.compile(g, cache=tmp_path)
    cache = KernelCache(tmp_path)
    native = dnnc.compile(g, cache=tmp_path).programs[0]
    assert native.compiled == 1
    assert all(cache.get(s.removeprefix("k_")) is not None for s in native.symbols.values())


def test_code_for_another_cpu_is_not_run() -> None:
    """An instruction that this machine lacks would end the process."""
    target = next(t for t in (f"llvm -mcpu={c}" for c in X86_CPUS) if parse_target(t).foreign)  # none has all
    f = dnnc.compile(parse("def g(x: f32[4]):\n    return neg(x)"), target=target, cache=False)
    with pytest.raises(TargetError, match=r"which lacks .*`save`"):
        f(np.zeros(4, np.float32))
