"""Compiling from a log takes its schedules, twice alike; what does not apply is left out with a note."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.autotune.log.file import Log, read
from dnnc.autotune.log.record import Winner, plain_choice
from dnnc.autotune.log.replay import Winners, chooser
from dnnc.autotune.search.task import extract
from dnnc.autotune.search.trial import Trial
from dnnc.backends.llvm.features import parse_target
from dnnc.backends.llvm.templates import templates
from dnnc.backends.registry import open_backend
from dnnc.compile_program import schedule
from dnnc.ir.errors import TuneError
from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.target import TargetFacts
from dnnc.options import CompileOptions
from dnnc.passes.base import PassContext, PassManager
from dnnc.passes.pipelines import compile_program
from dnnc.passes.planning.program import ScheduledGraph
from dnnc.passes.schedule.problem import Choice
from dnnc.tune_option import resolved, setting_of
from support.tuning_logs import OPTIONS, choices, graph, other, program, setting, tasks

HERE: dict[str, Any] = {"target": "llvm -threads=2", "cache": False}  # this machine, which can run what is compiled
INPUTS = [np.random.default_rng(k).standard_normal(s, np.float32) for k, s in enumerate(((64, 96), (96, 128)))]


def scheduled(winners: Any, text: str = "") -> tuple[ScheduledGraph, tuple[str, ...]]:
    """The program of the graph, or of a text, with what the replay says of it."""
    choose = chooser(winners, setting())
    cpu = parse_target(setting().target)
    made = compile_program(
        parse(text) if text else graph(), PassContext(TargetFacts(lanes=cpu.lanes)), templates(cpu), choose
    )
    return made, choose.report(made)


def unscheduled() -> ScheduledGraph:
    """The program of the graph by the templates' own choices."""
    cpu = parse_target(setting().target)
    return compile_program(graph(), PassContext(TargetFacts(lanes=cpu.lanes)), templates(cpu))


def chosen(p: ScheduledGraph) -> dict[str, Choice]:
    return {s.kernel.name: s.choice for s in p.kernels}


def log_for(path: Path, opts: CompileOptions, change: Any = other) -> Path:
    """A log with a winner for every task of the graph under some options."""
    with Log.open(path) as log:
        for t, _ in extract(program(opts), setting_of(opts)):
            log.append(t)
            log.append(Winner(t.key, change(t), 1e-5))
    return path


# --- choosing ---------------------------------------------------------------------------------------------------------


def test_every_task_gets_its_winner() -> None:
    winners = {t.key: other(t) for t, _ in tasks()}
    made, report = scheduled(Winners(winners, "m.tune.jsonl"))
    assert chosen(made) == {t.name: other(t) for t, _ in tasks()} and len(winners) == 4
    assert all(other(t) != choices(t)[0] for t, _ in tasks())
    assert report == ("tuned: 4 of 4 kernels from m.tune.jsonl",)


def test_what_a_log_lacks_is_scheduled_as_without_one() -> None:
    (first, _), *_ = tasks()
    made, report = scheduled({first.key: other(first)})
    assert chosen(made) == {**chosen(unscheduled()), first.name: other(first)}
    assert report == (
        "tuned: 1 of 4 kernels, 3 untuned",
        f"untuned: {', '.join(n for n in chosen(made) if n != first.name)}",
    )
    made, report = scheduled({})
    assert chosen(made) == chosen(unscheduled()) and report[0] == "tuned: 0 of 4 kernels, 4 untuned"


def test_a_default_chooses_the_rest() -> None:
    def last(problem: Any, offered: Any) -> Choice:
        return offered[-1]  # type: ignore[no-any-return]

    choose = chooser({}, setting(), last)
    cpu = parse_target(setting().target)
    made = compile_program(graph(), PassContext(TargetFacts(lanes=cpu.lanes)), templates(cpu), choose)
    assert chosen(made) == {t.name: choices(t)[-1] for t, _ in tasks()}


@pytest.mark.slow
def test_winners_of_other_settings_are_not_taken() -> None:
    for change in ({"numerics": "strict"}, {"target": "llvm -mcpu=x86-64-v3 -threads=1"}, {"rounded": True}):
        elsewhere = dataclasses.replace(setting(), **change)
        winners = {t.key: other(t) for t, _ in extract(program(), elsewhere)}
        assert scheduled(winners)[1][0] == "tuned: 0 of 4 kernels, 4 untuned"


def test_kernels_of_open_sizes_are_counted_apart() -> None:
    made, report = scheduled({}, "def g(x: f32[N, 40], y: f32[8, 40]):\n    return relu(x), relu(y)")
    assert len(list(made.kernels)) == 2
    assert report == ("tuned: 0 of 2 kernels, 1 untuned, 1 of sizes known at run time only", "untuned: relu")


def test_equal_kernels_count_once() -> None:
    made, report = scheduled({}, "def g(x: f32[8, 40], y: f32[8, 40]):\n    return relu(x), relu(y)")
    assert len(list(made.kernels)) == 2 and report[0] == "tuned: 0 of 1 kernels, 1 untuned"


REFUSED = [
    (Choice("wgmma", (("bm", 64),)), "there is no template 'wgmma'"),
    (Choice("contraction", (("mr", 4),)), "KeyError"),
    (Choice("contraction", (("mr", "six"), ("nv", 2), ("ku", 4), ("order", "rows"), ("pf", 1))), "Error"),
    (Choice("contraction", (("mr", 0), ("nv", 0), ("ku", 0), ("order", "rows"), ("pf", 1))), ""),
    (Choice("map", ()), ""),
]


@pytest.mark.parametrize(("bad", "why"), REFUSED, ids=lambda v: str(v)[:24])
@pytest.mark.parametrize("fallback", [False, True])
def test_winners_that_do_not_apply_are_left_out_with_a_note(bad: Choice, why: str, fallback: bool) -> None:
    product = next(t for t, _ in tasks() if t.kind == "contraction")
    winners = {t.key: bad if t is product else other(t) for t, _ in tasks()}
    choose, cpu = chooser(winners, setting()), parse_target(setting().target)
    made = compile_program(
        graph(), PassContext(TargetFacts(lanes=cpu.lanes), fallback=fallback), templates(cpu), choose
    )
    assert chosen(made) == {t.name: choices(t)[0] if t is product else other(t) for t, _ in tasks()}
    first, note = choose.report(made)
    assert first == "tuned: 3 of 4 kernels, 1 refused"
    assert note.startswith(f"{product.name}: the log's schedule {bad} does not apply: ") and why in note


def test_the_naive_nest_may_win() -> None:
    naive = Choice("naive", ())
    made, report = scheduled({t.key: naive for t, _ in tasks()})
    assert set(chosen(made).values()) == {naive} and report == ("tuned: 4 of 4 kernels",)


# --- the option -------------------------------------------------------------------------------------------------------


def compiled(**more: Any) -> Any:
    return dnnc.compile(graph(), **{**HERE, **more})


def digest(f: Any) -> str:
    h = hashlib.sha256()
    for name, obj in sorted(f.programs[0].code.items()):
        h.update(name.encode() + obj)
    return h.hexdigest()


def notes(f: Any) -> list[str]:
    return [n for p in f.report.programs[-1].passes if p.name == "tuning log" for n in p.notes]


@pytest.mark.slow
def test_two_compilations_from_one_log_are_equal_byte_by_byte(tmp_path: Path) -> None:
    path = log_for(tmp_path / "m.jsonl", CompileOptions(target=HERE["target"]))
    one, two, plain = compiled(tune=path), compiled(tune=str(path)), compiled()
    assert digest(one) == digest(two) != digest(plain)
    assert notes(one) == [f"tuned: 4 of 4 kernels from {path}"] and notes(plain) == []
    want = run(graph(), INPUTS, "float64")
    for got, x in zip(one(*INPUTS), want):
        assert np.allclose(got, x, rtol=1e-4, atol=1e-4)
    with Log.open(path) as log:  # what a search adds meanwhile changes nothing until there is another winner
        log.append(Trial(next(iter(log.tasks)), Choice("map", ()), "ok", (1e-9,)))
    assert digest(compiled(tune=path)) == digest(compiled(tune=read(path).winners())) == digest(one)


@pytest.mark.slow
def test_numerics_and_threads_have_winners_of_their_own(tmp_path: Path) -> None:
    path = log_for(tmp_path / "m.jsonl", CompileOptions(target=HERE["target"]))
    assert notes(compiled(tune=path, numerics="strict"))[0].startswith("tuned: 0 of ")
    assert notes(compiled(tune=path, target="llvm -threads=1"))[0].startswith("tuned: 0 of ")
    assert notes(compiled(tune=path, target="llvm", threads=2))[0].startswith("tuned: 4 of 4")


@pytest.mark.slow
def test_each_size_of_a_symbolic_model_is_looked_up(tmp_path: Path) -> None:
    text = "def g(x: f32[N, 96], y: f32[96, 128]):\n    return matmul(x, y)"
    opts = CompileOptions(target=HERE["target"])
    fixed = dnnc.compile(parse(text), dims={"N": 64}, **HERE)
    path = tmp_path / "m.jsonl"
    with Log.open(path) as log:
        for t, _ in extract(fixed.programs[0].scheduled, setting_of(opts)):
            log.append(t)
            log.append(Winner(t.key, other(t), 1e-5))
    f = dnnc.compile(parse(text), tune=path, **HERE)
    path.unlink()  # it is read once
    f(*INPUTS)
    assert notes(f) == [f"tuned: 2 of 2 kernels from {path}"]
    f(INPUTS[0][:32], INPUTS[1])
    assert notes(f)[0] == f"tuned: 1 of 2 kernels from {path}, 1 untuned"  # the packing of y is the same kernel
    assert np.allclose(f(*INPUTS), INPUTS[0] @ INPUTS[1], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("small", [False, True])
def test_a_saved_model_keeps_the_winners(tmp_path: Path, small: bool) -> None:
    opts = CompileOptions(target=HERE["target"])
    f = compiled(tune=log_for(tmp_path / "m.jsonl", opts))
    f.save(tmp_path / "m.dnnc", small=small)
    f.save(tmp_path / "again.dnnc", small=small)
    assert (tmp_path / "m.dnnc").read_bytes() == (tmp_path / "again.dnnc").read_bytes()
    g = dnnc.load(tmp_path / "m.dnnc", cache=False)
    assert digest(g) == digest(f)
    if small:  # the passes ran again and found what the file has
        assert notes(g)[0].startswith("tuned: 4 of 4 kernels") and g.report.programs[0].compiled == 0
    h = dnnc.load(tmp_path / "m.dnnc", code=False, cache=False) if not small else g
    assert digest(h) == digest(f)
    assert "tune" not in _saved_options(tmp_path, compiled())


def _saved_options(folder: Path, f: Any) -> dict[str, Any]:
    from dnnc.artifact.format import open_artifact

    f.save(folder / "plain.dnnc")
    return dict(open_artifact(folder / "plain.dnnc").manifest["options"])


@pytest.mark.slow
def test_models_with_host_steps_are_tuned_in_their_segments(tmp_path: Path) -> None:
    text = (
        "def g(x: f32[64, 96], y: f32[96, 128], z: f32[64, 96]):\n    s = to_string(relu(matmul(x, y)))\n"
        "    return s, exp(z)"
    )
    f = dnnc.compile(parse(text), tune=log_for(tmp_path / "m.jsonl", CompileOptions(target=HERE["target"])), **HERE)
    f(*INPUTS, INPUTS[0])
    found = [n for p in f.report.programs for x in p.passes if x.name == "tuning log" for n in x.notes]
    assert any(n.startswith("tuned: ") and not n.startswith("tuned: 0 ") for n in found), found


def test_wrong_options_are_told(tmp_path: Path) -> None:
    with pytest.raises(TuneError, match=r"there is no tuning log nowhere\.jsonl"):
        compiled(tune="nowhere.jsonl")
    with pytest.raises(TuneError, match=r"winners: k: expected \[template, \{knob: value\}\], got 5"):
        compiled(tune={"k": 5})
    with pytest.raises(TuneError, match="by the key of their workload"):
        compiled(tune={5: Choice("map", ())})
    (tmp_path / "m.onnx").write_bytes(b"\x08\x07 no log")
    with pytest.raises(TuneError, match="line 1: it is no record of a tuning log"):
        compiled(tune=tmp_path / "m.onnx")


def test_winners_are_resolved_once_and_pickle_and_compare(tmp_path: Path) -> None:
    import pickle

    opts = dataclasses.replace(OPTIONS, tune=log_for(tmp_path / "m.jsonl", OPTIONS), dims={})
    done = resolved(opts)
    assert resolved(done) is done and isinstance(done.tune, Winners) and len(done.tune) == 4
    again = pickle.loads(pickle.dumps(done))
    assert again == done and again.tune.source == done.tune.source and hash(again) == hash(done)
    assert Winners({k: plain_choice(c) for k, c in done.tune.items()}) == done.tune


def test_compiling_while_a_search_writes(tmp_path: Path) -> None:
    path = log_for(tmp_path / "m.jsonl", CompileOptions(target=HERE["target"]))
    want, stop = read(path).winners(), threading.Event()

    def search() -> None:
        with Log.open(path) as log:
            while not stop.is_set():
                log.append(Trial("k", Choice("map", (("lanes", 4),)), "ok", (1.0,), "x" * 5000))

    t = threading.Thread(target=search)
    t.start()
    try:
        assert all(read(path, trials=False).winners() == want for _ in range(20))
    finally:
        stop.set()
        t.join()


# --- GPUs -------------------------------------------------------------------------------------------------------------


def scheduled_for(graph: Graph, opts: CompileOptions, manager: PassManager | None = None) -> ScheduledGraph:
    return schedule(graph, open_backend(opts.target), opts, manager)


@pytest.mark.slow
def test_a_device_replays_as_well(tmp_path: Path) -> None:
    opts = CompileOptions(target="cuda -arch=sm_90a")
    text = "def g(x: f16[512, 768], *, w: f16[768, 1024]):\n    return relu(matmul(x, w))"
    w = {"w": np.ones((768, 1024), np.float16)}
    plain = scheduled_for(parse(text, w), opts)
    (found,) = (t for t, _ in extract(plain, setting_of(opts)) if t.kind == "contraction")
    want = choices(found)[1]
    with Log.open(tmp_path / "m.jsonl") as log:
        log.append(found)
        log.append(Winner(found.key, want, 1e-5))
    tuned, manager = dataclasses.replace(opts, tune=tmp_path / "m.jsonl", dims={}), PassManager()
    made = scheduled_for(parse(text, w), tuned, manager)
    assert chosen(made)[found.name] == want != chosen(plain)[found.name]
    assert manager.records[-1].notes[0].startswith("tuned: 1 of ")


def test_rounded_products_are_a_setting_of_their_own() -> None:
    for precision, numerics, want in (
        (None, "standard", False),
        ("tf32", "standard", True),
        (None, "fast", True),
        ("float32", "fast", False),
    ):
        assert (
            setting_of(CompileOptions(target="cuda -arch=sm_90a", precision=precision, numerics=numerics)).rounded
            is want
        )
        assert setting_of(CompileOptions(target="llvm", precision=precision, numerics=numerics)).rounded is False


@pytest.mark.slow
def test_a_saved_device_model_keeps_the_winners(tmp_path: Path) -> None:
    target = "cuda -arch=sm_90a"
    text, w = (
        "def g(x: f16[64, 128], *, w: f16[128, 64]):\n    return relu(matmul(x, w))",
        {"w": np.ones((128, 64), np.float16)},
    )
    opts = CompileOptions(target=target)
    plain = scheduled_for(parse(text, w), opts)
    ((task, _),) = extract(plain, setting_of(opts))
    f = dnnc.compile(parse(text, w), target=target, cache=False, tune={task.key: choices(task)[1]})
    f.save(tmp_path / "g.dnnc")
    g = dnnc.load(tmp_path / "g.dnnc", cache=False)  # which runs the passes again
    assert g.report.programs[0].compiled == 0
    assert [k.choice for k in g.report.programs[0].kernels] == [str(choices(task)[1])] != [str(choices(task)[0])]
