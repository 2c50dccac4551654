"""What a compilation tells about itself: the report, its text and JSON, and the source of each stage."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.ir.errors import InputError
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.text import parse_kernel
from dnnc.report import KernelReport, Report
from dnnc.report.collect import Laps
from dnnc.report.layout import Table
from dnnc.report.tables import plain_text, program_tables, show_bytes, show_count, show_seconds

RNG = np.random.default_rng(0)
WEIGHTS = {"w": RNG.standard_normal((32, 32), np.float32), "u": RNG.standard_normal((32, 32), np.float32)}
TWO_LAYERS = """
def net(x: f32[4, 32], *, w: f32[32, 32], u: f32[32, 32]):
    h = relu(matmul(x, w))
    y = relu(matmul(h, u))
    return y
"""


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as m:
        path = tmp_path_factory.mktemp("cache")
        m.setenv("DNNC_CACHE_DIR", str(path))
        yield path


def compiled(text: str = TWO_LAYERS, **options: Any) -> Any:
    return dnnc.compile(parse(text, WEIGHTS), **options)


@pytest.fixture(scope="module")
def net(folder: Path) -> Any:
    return compiled(cache=False, threads=1)


def test_equal_layers_are_one_kernel_and_its_work_is_counted(net: Any) -> None:
    (p,) = net.report.programs
    (k,) = p.kernels
    assert (k.count, k.flops, p.calls, p.compiled, p.from_cache) == (2, 2 * 4 * 32 * 32 + 4 * 32, 2, 1, 0)
    assert k.bytes == 4 * (4 * 32 + 32 * 32 + 4 * 32)
    assert k.choice.startswith("contraction(") and len(k.nodes) == 2 and k.symbol.startswith("k_")


def test_memory_is_the_plan_of_the_program(net: Any) -> None:
    (p,) = net.report.programs
    assert p.memory.lower_bound == 4 * 4 * 32 == p.memory.arena  # h, f32[4, 32], is all that lives between two calls
    assert p.memory.constants == 2 * 4 * 32 * 32


def test_passes_and_stages_are_timed(net: Any) -> None:
    (p,) = net.report.programs
    assert [x.name for x in p.passes[:2]] == ["forget-structures", "quantized"]
    assert {x.nodes_before for x in p.passes[:1]} == {4}
    assert set(p.seconds) == {"passes", "compile", "check", "link"} and min(p.seconds.values()) > 0
    assert net.report.seconds == pytest.approx(sum(p.seconds.values()))
    assert sum(x.seconds for x in p.passes) < p.seconds["passes"]


def test_kernels_from_the_cache_are_told_apart() -> None:
    first, second = compiled(threads=1).report.programs[0], compiled(threads=1).report.programs[0]
    assert (first.compiled, first.from_cache) == (1, 0)
    assert (second.compiled, second.from_cache) == (0, 1)
    assert set(second.seconds) == {"load"} and second.kept and not first.kept


def test_every_stage_is_in_the_table() -> None:
    report = compiled(cache=False, threads=1, verify="model").report
    (p,) = report.programs
    assert set(p.seconds) == {"passes", "compile", "check", "link", "check model"}
    rows = str(report).rpartition("\ntime\n")[2].split("\n")[1:]
    assert [r.split("  ")[1] for r in rows] == [
        "import",
        "passes",
        "compile",
        "check",
        "link",
        "check model",
        "total",
    ]


def test_notes_of_passes_are_shown_and_many_are_cut(net: Any) -> None:
    assert "notes of passes" not in str(net.report)
    (p,) = net.report.programs
    quantized = next(x for x in p.passes if x.name == "quantized")
    noting = dataclasses.replace(quantized, notes=tuple(f"remark {k}" for k in range(12)))
    text = plain_text(program_tables(dataclasses.replace(p, passes=(noting,))))
    assert (
        "notes of passes\n  quantized  remark 0\n" in text
        and "remark 9\n             and 2 more\n" in text
        and "remark 10" not in text
    )


def test_nothing_runs_on_the_host(net: Any) -> None:
    assert net.report.fallbacks == []
    assert "on the host: nothing" in str(net.report)


def test_report_is_frozen_and_a_call_adds_nothing(net: Any) -> None:
    before = net.report
    net(np.ones((4, 32), np.float32))
    assert net.report == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.threads = 3


def test_json_holds_everything(net: Any) -> None:
    data = json.loads(net.report.to_json())
    assert data["inputs"] == [{"name": "x", "dtype": "float32", "shape": [4, 32]}]
    (p,) = data["programs"]
    assert (
        p["kernels"][0]["count"] == 2 and p["memory"]["constants"] == 8192 and p["calls"] == 2 and p["from_cache"] == 0
    )
    assert {"name", "seconds", "nodes_before", "nodes_after", "changed", "notes"} == set(p["passes"][0])
    assert data["fallbacks"] == [] and data["target"] == "llvm" and data["threads"] == 1


def test_text_shows_the_tables(net: Any) -> None:
    text = str(net.report)
    assert text.startswith("net: llvm, 1 thread\n")
    assert "input   x     float32[4, 32]" in text
    assert "kernels: 2 calls, 1 unique kernel, 1 compiled, 0 from the cache" in text
    assert "constants    8 KB" in text and "total" in text


def test_symbolic_model_has_a_program_per_size() -> None:
    f = compiled(TWO_LAYERS.replace("4, 32", "N, 32"), threads=1)
    assert f.report.programs == () and "the first call compiles" in str(f.report)
    with pytest.raises(InputError, match=r"give dims=.* for N"):
        f.source("llvm")
    for n in (2, 3, 2):
        f(np.ones((n, 32), np.float32))
    assert [p.dims for p in f.report.programs] == [{"N": 2}, {"N": 3}]
    assert [p.memory.arena for p in f.report.programs] == [256, 384]
    assert "N=2" in str(f.report) and "programs (details of the last one below)" in str(f.report)


@pytest.mark.slow
def test_program_for_all_sizes_tells_numbers_for_the_first() -> None:
    f = compiled(TWO_LAYERS.replace("4, 32", "N, 32"), threads=1, dims={"N": (1, 64)})
    f(np.ones((5, 32), np.float32))
    f(np.ones((6, 32), np.float32))
    (p,) = f.report.programs
    assert p.symbolic and p.dims == {"N": 5} and p.kernels[0].flops == 2 * 5 * 32 * 32 + 5 * 32
    assert "all sizes" in str(f.report)


def test_report_of_the_reference_target() -> None:
    r = compiled(target="reference").report
    assert r.programs == () and r.fallbacks == [] and str(r).startswith("net: reference")


# --- sources ----------------------------------------------------------------------------------------------------------


def test_graph_source_is_the_graph_after_the_passes(net: Any) -> None:
    text = net.source("graph")
    assert 'const("sha256:' in text and "relu(" in text
    assert ' @ "1/' in text and ' @ "1/' not in str(net.graph)  # weights in panels, which the layout pass makes


def test_operator_source_parses_and_names_its_nodes(net: Any) -> None:
    text = net.source("operator")
    assert text.startswith("# kernel 0: matmul_relu, 2 calls, schedule contraction(")
    assert parse_kernel(text).entry.name == "matmul_relu"


def test_llvm_source_of_cached_kernels_is_made_anew() -> None:
    compiled(threads=1)
    f = compiled(threads=1)
    assert f.report.programs[0].compiled == 0
    text = f.source("llvm")
    symbol = f.report.programs[0].kernels[0].symbol
    assert f"define void @{symbol}(" in text and "define i64 @entry(" in text
    assert text.count(f"call void @{symbol}(") == 2
    only = f.source("llvm", symbol[:12])
    assert f"define void @{symbol}(" in only and "@entry" not in only


def test_asm_source_holds_instructions(net: Any) -> None:
    text = net.source("asm", "0")
    assert "ret" in text and net.report.programs[0].kernels[0].symbol in text
    assert "entry:" in net.source("asm")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ptx",), "no stage 'ptx'.*graph, operator, llvm, asm"),
        (("llvm", "7"), "no kernel '7'; there are 0 matmul_relu"),
        (("asm", "conv"), "'conv'"),
    ],
)
def test_unknown_sources_are_refused(net: Any, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        net.source(*arguments)


# --- parts ------------------------------------------------------------------------------------------------------------


def test_units() -> None:
    assert [show_bytes(n) for n in (0, 1023, 1536, 7 << 20)] == ["0 B", "1023 B", "1.5 KB", "7 MB"]
    assert [show_count(n) for n in (12, 2_500_000, 8_180_000_000)] == ["12", "2.5 M", "8.18 G"]
    assert [show_seconds(s) for s in (3e-6, 0.0021, 1.5)] == ["3 us", "2.1 ms", "1.50 s"]
    assert show_bytes("4*N") == "4*N" and show_count("N*" * 20) == "symbolic"


def test_plain_tables_are_aligned() -> None:
    t = Table("title", ("a", "number"), (("x", "1"), ("longer", "22")), frozenset(("number",)))
    assert plain_text([t]) == "title\n  a       number\n  x            1\n  longer      22"
    assert (
        plain_text([Table("note", (), (("one",),)), Table("keys", ("", ""), (("a", "b"),))])
        == "note\n  one\n\nkeys\n  a  b"
    )


def test_many_kernels_are_shortened_in_text_but_not_in_json() -> None:
    from dnnc.report import MemoryReport, ProgramReport

    kernels = tuple(KernelReport(f"k{n}", f"k_{n}", 1, "map()", True, n, 0, (f"node{n}",)) for n in range(30))
    p = ProgramReport(
        {},
        False,
        (),
        kernels,
        MemoryReport(128, 64, 0),
        30,
        ("TopK at a", "TopK at a", "NonZero at b"),
        {"passes": 1.0},
    )
    r = Report("big", "llvm", 2, (), (), 0.5, (p,))
    text = str(r)
    assert "and 10 smaller" in text and "k29" in text and "k0 " not in text
    assert "128 B" in text and "64 B (the arena is 100.0% larger)" in text
    assert "on the host: 3 nodes\n  NonZero at b\n  TopK at a x2" in text
    assert r.fallbacks == ["TopK at a", "NonZero at b"] and r.seconds == 1.5
    assert len(json.loads(r.to_json())["programs"][0]["kernels"]) == 30


def test_laps_give_each_stage_its_time_and_pass_progress_on() -> None:
    laps, told = Laps(), []
    tell = laps.through(lambda *news: told.append(news))
    tell("compile", 1, 2)
    tell("compile", 2, 2)
    laps.lap("link")
    assert told == [("compile", 1, 2), ("compile", 2, 2)]
    assert list(laps.seconds) == ["compile", "link"] and min(laps.seconds.values()) >= 0
