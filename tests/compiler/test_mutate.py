"""Spoiled models: some in every test run, and the tools that make them, judge them and make failures small."""

from __future__ import annotations

import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import onnx
import pytest

from dnnc.ir.errors import InternalError
from support import judge as judge_
from support.judge import judge
from support.mutants import BYTES, MODELS, PROTO, SEALED, Edit, Mutant, bases, messages, model, mutant, spoiled
from support.mutate import Child, Job, campaign, kind_of, shrink, summary


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutants")


@pytest.fixture(scope="module")
def data(folder: Path) -> dict[str, bytes]:
    return bases(folder)


@pytest.mark.slow
@pytest.mark.parametrize("count", [30, pytest.param(300, marks=pytest.mark.slow)])
def test_mutants_are_refused_or_right(count: int) -> None:
    tally = campaign(count, seed=5)
    assert not tally.kinds, "\n".join(tally.failures)
    assert sum(tally.phases.values()) == count + len(MODELS) + 2
    assert min(tally.phases[k] for k in ("refused", "compiled")) > count // 10  # of both kinds there are many


# --- mutants ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_mutants_are_the_same_for_the_same_seed_and_differ_otherwise(data: dict[str, bytes]) -> None:
    names = list(data)
    made = [mutant(3, k, names) for k in range(300)]
    assert made == [mutant(3, k, names) for k in range(300)] and made != [mutant(4, k, names) for k in range(300)]
    assert {e.kind for m in made for e in m.edits} == {*BYTES, *PROTO, *SEALED}
    assert {m.base for m in made} == set(names)
    results = [spoiled(data[m.base], m.edits) for m in made]
    assert results == [spoiled(data[m.base], m.edits) for m in made]
    assert sum(r != data[m.base] for m, r in zip(made, results)) > 270  # an edit may find nothing to do


@pytest.mark.parametrize("kind", PROTO)
def test_edits_of_structure_give_protobufs(kind: str, data: dict[str, bytes]) -> None:
    changed = 0
    for name in MODELS:
        for seed in range(6):
            m = onnx.load_model_from_string(spoiled(data[name], [Edit(kind, seed)]))
            changed += m != model(name)
    assert changed > (3 if kind == "recursion" else 30)


@pytest.mark.slow
def test_every_field_of_a_model_can_be_changed() -> None:
    """Edits of fields reach each message type that the bases have."""
    before = {type(x).__name__ for name in MODELS for x in messages(model(name))}
    assert {"GraphProto", "NodeProto", "TensorProto", "FunctionProto", "AttributeProto", "OperatorSetIdProto"} <= before
    touched: set[str] = set()
    rng = random.Random(0)
    for _ in range(400):
        name = rng.choice(list(MODELS))
        base, m = model(name), model(name)
        with suppress(ValueError, TypeError):  # what the field cannot hold
            PROTO["field"](m, rng)
        touched |= {type(a).__name__ for a, b in zip(messages(base), messages(m)) if a != b}
    assert before - touched <= {"Optional"}


def test_saved_models_keep_right_checksums(data: dict[str, bytes], tmp_path: Path) -> None:
    from dnnc.artifact.format import open_artifact

    for kind in SEALED:
        for seed in range(8):
            made = spoiled(data["open.dnnc"], [Edit(kind, seed)])
            (tmp_path / "m.dnnc").write_bytes(made)
            assert made != data["open.dnnc"]
            open_artifact(tmp_path / "m.dnnc")  # nothing is damaged, as far as the file's own checks tell


# --- judging ----------------------------------------------------------------------------------------------------------


def test_what_is_wrong_is_told(folder: Path, data: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "m.onnx"
    path.write_bytes(data["mlp"])
    cache = folder / "kernels"
    phases: list[str] = []
    assert judge(path, cache, 1, False, phases.append) is None and phases == ["compiled"]
    path.write_bytes(data["mlp"][:50])
    assert judge(path, cache, 1, False, phases.append) is None and phases[1:] == ["refused"]

    def raising(error: Exception) -> Any:
        def load(*_: Any) -> Any:
            raise error

        return load

    for error, told in (
        (InternalError("x"), "InternalError: x"),
        (ZeroDivisionError("y"), "escaped ZeroDivisionError: y at test_mutate.py:"),
    ):
        monkeypatch.setattr(judge_, "load", raising(error))
        assert str(judge(path, cache, 1, False)).startswith(told)
    monkeypatch.undo()
    path.write_bytes(data["mlp"])
    right = judge_.load(path, cache, 1, False)

    class Off:
        graph, deferred, options = right.graph, False, right.options

        def __call__(self, *arrays: Any) -> Any:
            y, k = right(*arrays)
            return y + 1, k

    monkeypatch.setattr(judge_, "load", lambda *_: Off())
    assert str(judge(path, cache, 1, False)).startswith("wrong result: output y, element")


@pytest.mark.slow
def test_crashes_and_hangs_cost_one_child(folder: Path, data: dict[str, bytes]) -> None:
    path = folder / "m.onnx"
    path.write_bytes(data["mlp"])
    child = Child(str(folder / "kernels"), 300.0, 6 << 30)
    job = Job(str(path), 1, False)
    assert child.judge(job) == ("compiled", None)
    child.process.kill()
    _, error = child.judge(job)
    assert error is not None and error.startswith("crash: the process ended with status -9")
    assert child.judge(job) == ("compiled", None)  # another child has taken its place
    child.seconds = 0.001
    assert str(child.judge(job)[1]).startswith("hang: it takes longer")
    child.stop()


def test_shrinking_keeps_what_fails(data: dict[str, bytes]) -> None:
    def fails(m: Mutant, candidate: bytes) -> str | None:
        try:
            nodes = onnx.load_model_from_string(candidate).graph.node
        except Exception:
            return None
        return "bad: Sigmoid" if any(n.op_type == "Sigmoid" for n in nodes) else None

    m = Mutant("mlp", (Edit("dims", 1), Edit("dims", 2)))
    small, made, error = shrink(m, data["mlp"], "bad: Sigmoid", fails)
    assert error == "bad: Sigmoid" and small.edits == ()
    graph = onnx.load_model_from_string(made).graph
    assert [n.op_type for n in graph.node] == ["Sigmoid"] and not graph.initializer


def test_failures_of_one_cause_are_of_one_kind() -> None:
    assert (
        kind_of("escaped ValueError: 3 at a.py:7")
        == kind_of("escaped ValueError: 4 at a.py:7")
        != kind_of("escaped ValueError: 4 at a.py:8")
    )
    assert kind_of("wrong result: output y, element (1, 2) is 3") == kind_of(
        "wrong result: output y, element (0, 2) is 5"
    )


@pytest.mark.slow
def test_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "support.mutate", "--seed", "1", "--only", "3", "--jobs", "1"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("1 mutants: ")
    assert "0 failed" in summary(campaign(1, 1, only=3))
