"""Products and convolutions in matrix tiles: interpreted, and compiled, by instructions where the CPU has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernels import interpret
from native_check import one_node

from dnnc.backends.llvm.amx import FEATURES
from dnnc.backends.llvm.ceilings import bind
from dnnc.backends.llvm.compile import compile_text
from dnnc.backends.llvm.emit import emit_kernel
from dnnc.backends.llvm.facts import facts
from dnnc.backends.llvm.features import X86_CPUS, enabled, parse_target
from dnnc.backends.llvm.templates import templates
from dnnc.backends.runtime.frames import aligned_empty
from dnnc.ir.dtype import BY_NAME, bf16, f32, i32
from dnnc.ir.expr import dim
from dnnc.ir.graph import Graph
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.stmt import Kernel
from dnnc.ir.loops.text import parse_kernel
from dnnc.ir.types import TensorType
from dnnc.passes.base import PassContext
from dnnc.passes.pipelines import compile_program
from dnnc.passes.planning.program import ScheduledGraph

Array = np.ndarray[Any, Any]
TILES = parse_target("llvm -mcpu=sapphirerapids -threads=2")
HERE = parse_target("llvm -threads=1")


def program(g: Graph, numerics: str = "default") -> ScheduledGraph:
    context = PassContext(facts(TILES, numerics), numerics)
    return compile_program(g, context, templates(TILES, numerics == "strict"))


def by_tiles(p: ScheduledGraph) -> list[Kernel]:
    return [s.kernel for s in p.steps if s.choice.template == "matrix_tiles"]


def product(kind: str, rows: int, terms: int, columns: int, batch: tuple[int, ...] = ()) -> Graph:
    left, right = kind.split()
    types = [f"{left} {' '.join(map(str, (*batch, rows, terms)))}", f"{right} {terms} {columns}"]
    return one_node("matmul", types, **({} if left == "bf16" else {"out_dtype": i32}))


def conv(image: tuple[int, ...], filters: tuple[int, ...], kind: str = "bf16 bf16", **attrs: Any) -> Graph:
    """A convolution with constant filters."""
    shapes, (x, w) = [", ".join(map(str, shape)) for shape in (image, filters)], kind.split()
    said = "".join(f", {k}={v!r}" for k, v in attrs.items()) + ("" if x == "bf16" else ", out_dtype=i32")
    text = f"def g(x: {x}[{shapes[0]}], *, w: {w}[{shapes[1]}]):\n    y = conv(x, w{said})\n    return y"
    return parse(text, {"w": np.random.default_rng(0).integers(-100, 100, filters).astype(BY_NAME[w].numpy)})


def random_case(seed: int) -> Graph:
    rng = np.random.default_rng(seed)
    kind = str(rng.choice(["u8 i8", "i8 i8", "bf16 bf16"]))
    if rng.random() < 0.5:
        channels = (16, 32, 48) if kind == "bf16 bf16" else (64, 128)
        c, o, k, stride = (int(rng.choice(s)) for s in (channels, (16, 24, 40), (1, 3, 5), (1, 2)))
        image = (int(rng.integers(1, 3)), c, int(rng.integers(5, 9)), int(rng.integers(16, 40)))
        pads = tuple(int(p) for p in rng.integers(0, 1 + k // 2, 4))
        return conv(image, (o, c, k, k), kind, pads=pads, strides=(stride, stride))
    terms = int(rng.choice([64, 96, 128, 160, 320]))
    return product(kind, int(rng.integers(8, 80)), terms, int(rng.integers(17, 90)))


@pytest.mark.family("cases")
@pytest.mark.parametrize("seed", range(60))
def test_random_kernels_mean_what_their_graphs_mean(seed: int) -> None:
    g = random_case(seed)
    p = program(g.copy())
    for step in p.steps:
        assert step.refusal is None
        interpret(p.graph, step)


@pytest.mark.parametrize("kind", ["u8 i8", "i8 i8", "bf16 bf16"])
def test_the_machine_computes_what_the_interpreter_does(kind: str) -> None:
    (k,) = by_tiles(program(product(kind, 32, 512, 32)))
    rng = np.random.default_rng(1)
    arrays: dict[str, Array] = {}
    for b in k.entry.buffers:
        shape = tuple(int(d.value) for d in b.shape)  # type: ignore[attr-defined]
        if b.dtype.is_float:
            arrays[b.name] = rng.integers(-8, 9, shape).astype(b.dtype.numpy)  # sums are exact in any order
        else:
            low, high = b.dtype.range
            arrays[b.name] = rng.integers(low, high + 1, shape).astype(b.dtype.numpy)
    memory = []
    for a in arrays.values():
        memory.append(aligned_empty(a.nbytes))
        memory[-1][:] = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
    bind(k, HERE, memory)()
    run_kernel(k, arrays)
    for bytes_, a in zip(memory, arrays.values()):
        np.testing.assert_array_equal(bytes_, np.ascontiguousarray(a).reshape(-1).view(np.uint8))


def test_instructions() -> None:
    k = parse_kernel("""\
def k(x: u8[3, 8], w: i8[2, 64], y: i32[3, 16]):
    t: i32[1, 3, 16] @ tile
    a: u8[1, 3, 8] @ tile
    b: i8[1, 2, 64] @ tile
    tile_zero(addr(t[0, 0, 0]))
    tile_load(addr(a[0, 0, 0]), addr(x[0, 0]), 1)
    tile_load(addr(b[0, 0, 0]), addr(w[0, 0]), 1)
    tile_dot(addr(t[0, 0, 0]), addr(a[0, 0, 0]), addr(b[0, 0, 0]))
    tile_store(addr(y[0, 0]), addr(t[0, 0, 0]), 1)
""")
    text = emit_kernel(k, "k", TILES.feature_set)
    config = next(line for line in text.splitlines() if line.startswith("@tiles.k"))
    bytes_ = [int(x.split()[1]) for x in config[config.index("[i8") + 1 : config.rindex("]")].split(", ")]
    assert bytes_[0] == 1 and bytes_[16:22:2] == [64, 8, 64] and bytes_[48:51] == [3, 3, 2]
    body = [line.strip().removeprefix("call void @llvm.x86.") for line in text.splitlines() if "call void" in line]
    assert [line.split("(")[0] for line in body] == [
        *("ldtilecfg", "tilezero", "tileloadd64", "tileloadd64", "tdpbusd", "tilestored64", "tilerelease")
    ]
    assert body[4] == "tdpbusd(i8 0, i8 1, i8 2)"
    assert compile_text(text, TILES.cpu, TILES.features)
    assert "llvm.x86.t" not in emit_kernel(k, "k", parse_target("llvm -mcpu=cascadelake").feature_set)


def test_which_cpus_have_tiles() -> None:
    have = {c for c in X86_CPUS if parse_target(f"llvm -mcpu={c}").rates.tile_rows}
    assert have == {"sapphirerapids", "emeraldrapids", "graniterapids"}
    without = parse_target("llvm -mcpu=sapphirerapids -mattr=-amx-tile")
    assert not without.rates.tile_rows and not FEATURES & enabled(without.features)


@pytest.mark.parametrize(
    "g,numerics,taken",
    [
        (product("u8 i8", 128, 768, 768), "default", True),
        (product("u8 i8", 128, 768, 768), "strict", True),  # sums of integers are exact
        (product("bf16 bf16", 128, 768, 768), "default", True),
        (product("bf16 bf16", 128, 768, 768), "strict", False),
        (product("u8 i8", 4, 768, 768), "default", False),  # few rows wait for the panels
        (product("u8 i8", 2, 4, 768, (64,)), "default", False),  # a product of 4 bytes fills no row of a tile
        (conv((1, 64, 56, 56), (64, 64, 3, 3), pads=(1, 1, 1, 1)), "default", True),
        (conv((1, 64, 56, 56), (64, 64, 3, 3), pads=(1, 1, 1, 1)), "strict", False),
        (conv((1, 32, 28, 28), (32, 1, 3, 3), group=32), "default", False),
        (conv((1, 64, 56, 56), (64, 64, 3, 3), "i8 i8", pads=(1, 1, 1, 1)), "strict", True),
        (conv((1, 24, 56, 56), (64, 24, 3, 3), "u8 i8", pads=(1, 1, 1, 1)), "default", False),  # a row has 64 channels
    ],
)  # fmt: skip
def test_what_tiles_compute(g: Graph, numerics: str, taken: bool) -> None:
    assert bool(by_tiles(program(g.copy(), numerics))) == taken


def test_rows_of_any_number_are_tiles_and_what_is_left() -> None:
    n = dim("N", 1, 64)
    g = one_node("matmul", [TensorType(bf16, (n, 64)), TensorType(bf16, (64, 48))])
    assert g.outputs[0].type.dtype in (bf16, f32)
    p = program(g)
    assert by_tiles(p)
    for size in (1, 7, 16, 33):
        for step in p.steps:
            interpret(p.graph, step, size)
