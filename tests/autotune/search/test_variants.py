"""Fusion as part of the search: parts are measured, what is faster is compiled and replayed, and a decision that does
not apply is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.autotune.log.edit import Keep, prune
from dnnc.autotune.log.file import Log, read
from dnnc.autotune.log.record import Fusion
from dnnc.autotune.search.fusion_variants import BEHIND
from dnnc.autotune.search.task import Task, extract
from dnnc.autotune.search.trial import Request
from dnnc.autotune.search.variants import Variation, as_choice, name_of, read_decision, variations
from dnnc.ir.graph import Graph
from dnnc.ir.graph.text import parse
from dnnc.options import CompileOptions
from dnnc.passes.planning.fusion_variants import Variant
from dnnc.passes.planning.program import ScheduledGraph
from dnnc.passes.schedule.problem import Choice
from dnnc.tune_option import plain_winners, setting_of
from dnnc.tune_session import Tuned, program_of, tune
from support.landscape import FakeRunner

OPTIONS: dict[str, Any] = {"threads": 1, "cache": False}
# 7 x 7 pixels: on every CPU the direct algorithm comes first, and Winograd's is a variation.
TEXT = """\
def net(x: f32[1, 32, 7, 7], *, w: f32[32, 32, 3, 3], v: f32[32, 10]):
    h = relu(conv(x, w, strides=(1, 1), pads=(1, 1, 1, 1), dilations=(1, 1), group=1))
    y = reduce_mean(h, axes=(2, 3), keepdims=False)
    return sigmoid(matmul(y, v))
"""
X = np.random.default_rng(1).standard_normal((1, 32, 7, 7), np.float32)


def graph() -> Graph:
    rng = np.random.default_rng(0)
    return parse(
        TEXT,
        {"w": rng.standard_normal((32, 32, 3, 3), np.float32) / 17, "v": rng.standard_normal((32, 10), np.float32) / 6},
    )


def program(**options: Any) -> ScheduledGraph:
    return program_of(graph(), CompileOptions(**{**OPTIONS, **options}))


def ways(p: ScheduledGraph | None = None) -> dict[str, Variation]:
    """All variations of the model, by what they are called."""
    p, setting = p or program(), setting_of(CompileOptions(**OPTIONS))
    return {f"{v.task.name}: {v}": v for v in variations([p], setting, [t.key for t, _ in extract(p, setting)])}


def tiles() -> list[int]:
    """m of each F(m x m, 3 x 3) that is a variation of the convolution; this core's rates decide."""
    return [v.variant.tile for name, v in ways().items() if name.startswith("conv_relu: winograd") and v.variant.tile]


def planted(**seconds: float) -> Callable[[Request], float]:
    """Seconds by the names of tasks, a bit more where the schedule has a long name; Winograd's algorithm is `tile`."""

    def of(r: Request) -> float:
        name = "tile" if r.task.name == "conv_relu" and "winograd" in r.task.graph else r.task.name
        return 1e-6 * seconds.get(name, 1) * (1 + len(str(r.choice)) / 1000)

    return of


def tuned(seconds: Callable[[Request], float], **more: Any) -> Tuned:
    return tune(graph(), **{"budget": 600, "runner": FakeRunner(seconds, noise=0.001), "trials": 60, **OPTIONS, **more})


def names(f: Any) -> list[str]:
    return [s.kernel.name for s in f.programs[0].scheduled.kernels]


def notes(f: Any) -> list[str]:
    return [n for p in f.report.programs[0].passes for n in p.notes if n.startswith("fusion")]


def decision(v: Variation, **changes: Any) -> Fusion:
    return dataclasses.replace(
        Fusion(v.task.key, tuple(t.key for t in v.parts), v.variant.cuts, v.variant.tile, True), **changes
    )


def winners(*decisions: Fusion) -> dict[str, Choice]:
    return {name_of(f.task): as_choice(f) for f in decisions}


# --- variations -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_parts_are_tasks_of_the_program_that_has_them() -> None:
    found = ways()
    assert {"conv_relu: conv | relu", "matmul_sigmoid: matmul | sigmoid"} <= set(found) and tiles()
    for v in found.values():
        assert all(t.rebuilt[2].kernel.name == t.name for t in v.parts)  # which also compares the key
        f = dnnc.compile(graph(), **OPTIONS, tune=winners(decision(v)))
        keys = {t.key for t, _ in extract(f.programs[0].scheduled, setting_of(CompileOptions(**OPTIONS)))}
        assert {t.key for t in v.parts} <= keys and v.task.key not in keys
        assert np.allclose(f(X), dnnc.compile(graph(), **OPTIONS)(X), atol=1e-5)


def test_only_the_tasks_that_are_asked_for() -> None:
    p = program()
    setting = setting_of(CompileOptions(**OPTIONS))
    key = next(t.key for t, _ in extract(p, setting) if t.name == "matmul_sigmoid")
    assert {v.task.name for v in variations([p], setting, [key])} == {"matmul_sigmoid"} and variations(
        [p], setting, []
    ) == []


@pytest.mark.slow
def test_planning_for_variations_leaves_the_program_as_it_is() -> None:
    p = program()
    before = (p.graph.text(), list(p.graph.constants), p.region.fusion)
    ways(p)
    assert (p.graph.text(), list(p.graph.constants), p.region.fusion) == before


# --- searching --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tuned, Path]:
    """A search in which a convolution and its epilogue are faster as two kernels, and its log."""
    path = tmp_path_factory.mktemp("apart") / "l.jsonl"
    return tuned(planted(conv_relu=30, tile=40, conv=15, relu=5), log=path), path


@pytest.mark.slow
def test_what_is_faster_apart_is_compiled_apart(apart: tuple[Tuned, Path], tmp_path: Path) -> None:
    made, path = apart
    (won,) = (f for f in made.result.fusions if f.taken)
    assert (
        (won.task.name, won.name) == ("conv_relu", "conv | relu")
        and won.apart < 0.75 * won.together
        and won.verdict == "measured in turns"
    )
    assert made.speedup > 1.3
    plain, f = dnnc.compile(graph(), **OPTIONS), made.compile()
    assert "conv_relu" in names(plain) and {"conv", "relu"} <= set(names(f)) and "conv_relu" not in names(f)
    assert np.allclose(f(X), plain(X), atol=1e-5) and notes(f) == ["fusion of conv_relu: conv | relu"]
    again = [dnnc.compile(graph(), **OPTIONS, tune=path) for _ in range(2)]
    assert [g.programs[0].code == f.programs[0].code for g in again] == [True, True]
    assert all(np.array_equal(g(X), f(X)) for g in again)
    log = read(path)
    (logged,) = (x for x in log.fused().values() if x.taken)
    assert logged.task == won.task.key and logged.seconds == won.apart and logged.baseline == won.together
    assert (
        set(logged.parts) <= set(log.decided())
        and prune(path, Keep(), tmp_path / "few.jsonl").winners() == log.winners()
    )


@pytest.mark.slow
def test_what_is_slower_apart_stays_together_and_costs_few_trials() -> None:
    made = tuned(planted(conv_relu=30, tile=60, conv=40, relu=5, matmul_sigmoid=0.1))
    assert made.result.fusions and not any(f.taken for f in made.result.fusions)
    assert names(made.compile()) == names(dnnc.compile(graph(), **OPTIONS))
    conv = next(o for o in made.result.parts if o.task.name == "conv")
    assert len(conv.points) == 1 and conv.reason == BEHIND
    assert sum(len(o.points) for o in made.result.parts) <= 0.3 * made.result.trials


@pytest.mark.slow
def test_another_algorithm_wins() -> None:
    made = tuned(planted(conv_relu=30, tile=20, conv=40))
    (won,) = (f for f in made.result.fusions if f.taken)
    f = made.compile()
    assert won.name in [f"winograd{t}" for t in tiles()] and notes(f) == [f"fusion of conv_relu: {won.name}"]
    assert names(f) == names(dnnc.compile(graph(), **OPTIONS))
    (step,) = (s for s in f.programs[0].scheduled.kernels if s.kernel.name == "conv_relu")
    assert step.choice.template == "winograd"
    assert np.allclose(f(X), dnnc.compile(graph(), **OPTIONS)(X), atol=1e-4)


@pytest.mark.slow
def test_a_tie_changes_nothing() -> None:
    made = tuned(planted(conv_relu=30, tile=29.9, conv=28.8, relu=1))
    near = [f for f in made.result.fusions if f.task.name == "conv_relu"]
    assert near and not any(f.taken for f in near)


@pytest.mark.slow
def test_groups_without_a_share_are_left_alone() -> None:
    made = tuned(planted(conv_relu=300, tile=300, conv=300))
    assert made.result.fusions and {f.task.name for f in made.result.fusions} == {"conv_relu"}
    assert all(f.task.name != "matmul_sigmoid" for f in made.result.fusions)


@pytest.mark.slow
def test_parts_that_fail_are_never_taken() -> None:
    seconds = planted(conv_relu=30, tile=40, conv=1, relu=1, matmul_sigmoid=0.1)
    runner = FakeRunner(seconds, 0.001, lambda r: "wrong" if r.task.name == "relu" else "ok")
    made = tuned(planted(), runner=runner)
    assert not any(f.taken for f in made.result.fusions) and "conv_relu" in names(made.compile())


@pytest.mark.slow
def test_a_later_search_may_decide_otherwise(apart: tuple[Tuned, Path], tmp_path: Path) -> None:
    (tmp_path / "l.jsonl").write_bytes(apart[1].read_bytes())
    tuned(planted(conv_relu=10, tile=40, conv=15, relu=5), log=tmp_path / "l.jsonl")
    log = read(tmp_path / "l.jsonl")
    key = next(t.key for t in log.tasks.values() if t.name == "conv_relu" and len(log.fusions.get(t.key, ())) == 2)
    assert [f.taken for f in log.fusions[key]] == [True, False] and name_of(key) not in log.winners()


# --- replaying --------------------------------------------------------------------------------------------------------


def wrong(change: Callable[[Variation], Fusion]) -> list[str]:
    """What a compilation says of a changed decision, after it was found to compile as without it."""
    v = ways()["conv_relu: conv | relu"]
    f, plain = dnnc.compile(graph(), **OPTIONS, tune=winners(change(v))), dnnc.compile(graph(), **OPTIONS)
    assert f.programs[0].code == plain.programs[0].code
    return notes(f)


@pytest.mark.slow
@pytest.mark.family("cases")
@pytest.mark.parametrize(
    "change, why",
    [
        (
            lambda v: decision(v, parts=("0" * 64, "1" * 64)),
            "it would be cut into other kernels than those that were measured",
        ),
        (lambda v: decision(v, cuts=(7,)), "this group is not made in that way any more"),
        (
            lambda v: decision(v, cuts=(), tile=tiles()[0]),
            "the algorithm is another kernel than the one that was measured",
        ),
        (lambda v: decision(v, cuts=(), tile=8), "this group is not made in that way any more"),
    ],
)
def test_a_decision_that_does_not_apply_any_more_is_left_out_with_a_note(
    change: Callable[[Variation], Fusion], why: str
) -> None:
    assert wrong(change) == [f"fusion of conv_relu: the log's decision is left out: {why}"]


@pytest.mark.slow
def test_an_unknown_kind_of_decision_is_left_out_with_a_note() -> None:
    v = ways()["conv_relu: conv | relu"]
    f = dnnc.compile(graph(), **OPTIONS, tune={name_of(v.task.key): Choice("fused", (("halves", 2), ("parts", "k")))})
    assert notes(f) == ["fusion of conv_relu: the log's decision is left out: fused(halves=2, parts=k) is unknown"]


@pytest.mark.slow
def test_two_decisions_of_which_one_applies() -> None:
    found = ways()
    good, bad = found["matmul_sigmoid: matmul | sigmoid"], found["conv_relu: conv | relu"]
    f = dnnc.compile(graph(), **OPTIONS, tune=winners(decision(good), decision(bad, parts=("x",))))
    assert {"matmul", "sigmoid", "conv_relu"} <= set(names(f)) and len(notes(f)) == 2


@pytest.mark.slow
def test_decisions_on_other_models_say_nothing() -> None:
    other = decision(ways()["conv_relu: conv | relu"], task="f" * 64)
    assert notes(dnnc.compile(graph(), **OPTIONS, tune=winners(other))) == []


@pytest.mark.slow
def test_decisions_go_where_winners_go(tmp_path: Path) -> None:
    v = ways()["conv_relu: conv | relu"]
    given = winners(decision(v))
    assert plain_winners(given) == {
        name_of(v.task.key): ["fused", {"cuts": "0", "parts": " ".join(t.key for t in v.parts)}]
    }
    text = "def f(x: f32[N, 64], w: f32[64, 32]):\n    return sigmoid(matmul(x, w))"
    options = CompileOptions(**OPTIONS, dims={"N": 8})
    (task,) = (
        t
        for t, _ in extract(program_of(parse(text.replace("N", "8")), options), setting_of(options))
        if t.name == "matmul_sigmoid"
    )
    p = program_of(parse(text.replace("N", "8")), options)
    (cut,) = variations([p], setting_of(options), [task.key])
    f = dnnc.compile(parse("N: dim[1, 64]\n" + text), **OPTIONS, tune=winners(decision(cut)))
    f.save(tmp_path / "f.dnnc")
    loaded = dnnc.load(tmp_path / "f.dnnc")
    x, w = np.ones((8, 64), np.float32), np.full((64, 32), 0.01, np.float32)
    assert np.allclose(loaded(x, w), f(x, w)) and {"matmul", "sigmoid"} <= {
        k.name for k in loaded.report.programs[-1].kernels
    }


def test_choices_are_decisions_and_back() -> None:
    for f in (
        Fusion("k", ("a", "b"), (0, 3), None, True),
        Fusion("k", ("a",), (), 4, True),
        Fusion("k", ("a",), (), 0, True),
    ):
        assert read_decision(as_choice(f)) == (Variant(f.cuts, f.tile), f.parts)
    for knobs in ((), (("cuts", "x"), ("parts", "a")), (("tile", "4"), ("parts", "a")), (("cuts", "0"),)):
        assert read_decision(Choice("fused", knobs)) is None
    assert read_decision(Choice("map", (("parts", "a"),))) is None


def test_of_several_decisions_the_latest_holds() -> None:
    log = Log()
    for at, taken in ((2.0, True), (3.0, False), (1.0, True)):
        log.append(Fusion("k", ("a", "b"), (0,), None, taken, at=at))
    assert log.fused()["k"].at == 3.0 and log.winners() == {}
    log.append(Fusion("k", ("a", "b"), (0,), None, True, at=3.0))
    assert list(log.winners()) == [name_of("k")]


def test_strict_numerics_leave_groups_alone() -> None:
    setting = setting_of(CompileOptions(**OPTIONS, numerics="strict"))
    p = program(numerics="strict")
    assert variations([p], setting, [t.key for t, _ in extract(p, setting)]) == []


@pytest.mark.slow
def test_without_a_log_nothing_is_revised(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Task] = []
    monkeypatch.setattr("dnnc.autotune.search.variants.task_of", lambda *a: asked.append(a[0]))
    dnnc.compile(graph(), **OPTIONS)
    assert asked == []
