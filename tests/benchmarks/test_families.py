"""The corpus of architecture families: its index, its hash split, and the race over two tiny models. Neither torch nor
timm is needed.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NAMES = [f"model_{k}" for k in range(600)]
HELD_OF_THE_FIRST = ["model_0", "model_2", "model_8", "model_12", "model_16", "model_17", "model_19"]


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def module(name: str) -> Any:
    return importlib.import_module(f"families.{name}")


# --- the index --------------------------------------------------------------------------------------------------------


def test_a_third_is_held_back_and_the_halves_are_a_partition() -> None:
    index = module("index")
    rows = [{"name": n, "family": "even" if k % 2 else "odd"} for k, n in enumerate(NAMES)]
    visible, held, everything = (index.select(rows, half) for half in ("visible", "held", "all"))
    assert (
        everything == rows
        and [r for r in rows if r in visible or r in held] == rows
        and not [r for r in held if r in visible]
    )
    assert 0.28 < len(held) / len(rows) < 0.39
    assert [r["name"] for r in held if r["name"] in NAMES[:20]] == [n for n in NAMES[:20] if index.is_held(n)]
    assert {r["family"] for r in index.select(rows, "all", "even")} == {"even"} and len(
        index.select(rows, "all", "^model_7$")
    ) == 1


def test_the_split_stays_as_it_is() -> None:
    """Another hash would show models that were held back."""
    index = module("index")
    assert [n for n in NAMES[:20] if index.is_held(n)] == HELD_OF_THE_FIRST


def test_exports_vary_by_name_alone() -> None:
    index = module("index")
    found = [index.variation(n) for n in NAMES]
    assert found == [index.variation(n) for n in NAMES]
    assert (
        {v.exporter for v in found} == {"dynamo", "torchscript"}
        and {v.batch for v in found} == {1, 8}
        and {v.symbolic for v in found} == {True, False}
    )
    assert {v.opset for v in found if v.exporter == "torchscript"} == set(range(11, 21)) and max(
        v.opset for v in found
    ) == 23
    for v in found[:50]:
        tries = index.alternatives(v)
        assert (
            tries[0] == v and len(set(tries)) == len(tries) and {t.exporter for t in tries} == {"dynamo", "torchscript"}
        )


def test_the_last_row_of_a_name_holds_and_half_a_line_is_ignored(tmp_path: Path) -> None:
    index = module("index")
    for row in ({"name": "b", "x": 1}, {"name": "a", "x": 2}, {"name": "b", "x": 3}):
        index.append(tmp_path / index.INDEX, row)
    with (tmp_path / index.INDEX).open("a") as f:
        f.write('{"name": "c", "x"')
    assert index.read_index(tmp_path) == [{"name": "a", "x": 2}, {"name": "b", "x": 3}]
    with pytest.raises(FileNotFoundError, match="families build"):
        index.read_index(tmp_path / "none")


def test_inputs_by_prefix_and_in_order() -> None:
    zoo = importlib.import_module("zoo")
    rows = [
        {"name": "mask", "dtype": "int64", "shape": [50, 9], "prefix": True},
        {"name": "k", "dtype": "int64", "shape": [99], "hi": 20, "sorted": True},
    ]
    made = zoo.make_inputs({"inputs": rows})
    lengths = made["mask"].sum(1)
    assert (
        np.array_equal(made["mask"], np.arange(9) < lengths[:, None]) and lengths.min() >= 1 and len(set(lengths)) > 3
    )
    assert np.array_equal(made["k"], np.sort(made["k"])) and made["k"].max() < 20


# --- verdicts ---------------------------------------------------------------------------------------------------------


def decided(ours: float, others: dict[str, float], exact: float = 1.0, lost: float = 0.0, moved: float = 0.0) -> Any:
    """A verdict on one number each; float32 and moved inputs are off by `lost` and `moved`."""
    asked = []

    def interpret(precision: str, off: bool) -> list[Any]:
        asked.append((precision, off))
        return [np.float64(exact + (moved if off else lost if precision == "as-is" else 0.0))]

    verdict = module("verdict").decide([np.float64(ours)], {n: [np.float64(v)] for n, v in others.items()}, interpret)
    return verdict, asked


def test_one_engine_that_agrees_decides() -> None:
    verdict, asked = decided(1.0, {"onnxruntime": 2.0, "torch": 1.00001})
    assert verdict.word == "right" and verdict.reference == "torch" and not asked


def test_beyond_the_bound_is_wrong_unless_the_model_amplifies_rounding() -> None:
    assert decided(1.01, {"onnxruntime": 1.0})[0].word == "wrong"
    assert decided(1.01, {"onnxruntime": 1.0}, lost=0.002)[0].word == "right"
    assert decided(1.01, {"onnxruntime": 1.0}, moved=0.002)[0].word == "right"


def test_what_only_the_interpreter_says_is_not_confirmed() -> None:
    """Both share the importer."""
    verdict, _ = decided(1.0, {"onnxruntime": 2.0, "torch": 2.0})
    assert verdict.word == "unconfirmed" and verdict.others == {"onnxruntime": 1.0, "torch": 1.0}


# --- work apart -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_work_apart_tells_its_value_its_error_its_death_and_its_time() -> None:
    run = module("apart").run_apart
    assert run(lambda tell: {"x": 1}, 30, 8).value == {"x": 1}
    raised = run(lambda tell: [tell("dividing"), 1 // 0], 30, 8)
    assert raised.error == "raised" and raised.stage == "dividing" and raised.text.startswith("ZeroDivisionError")
    died = run(lambda tell: os.kill(os.getpid(), signal.SIGKILL), 30, 8)
    assert died.error == "died" and "SIGKILL" in died.text
    late = run(lambda tell: [tell("sleeping"), time.sleep(60)], 0.5, 8)
    assert late.error == "time" and late.stage == "sleeping" and late.seconds < 20
    big = run(lambda tell: len(bytearray(2**31)), 30, 1)
    assert big.error == "raised" and "MemoryError" in big.text


# --- the race ---------------------------------------------------------------------------------------------------------


def tiny(folder: Path, name: str, op: str, **attributes: Any) -> None:
    """A model of two nodes, its row, and outputs that another engine is said to have given."""
    index = module("index")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])
    nodes = [helper.make_node("Add", ["x", "w"], ["h"]), helper.make_node(op, ["h"], ["y"], **attributes)]
    weights = [numpy_helper.from_array(np.float32([1, 2, 3]), "w")]
    graph = helper.make_graph(
        nodes, name, [x], [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])], weights
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / f"{name}.onnx"
    )
    inputs = [{"name": "x", "dtype": "float32", "shape": [2, 3]}]
    row = {"name": name, "family": "tiny", "inputs": inputs, "seed": 1, "exporter": "graph", "symbolic": ["batch"]}
    index.append(folder / index.INDEX, row)


@pytest.mark.slow
def test_race_keeps_books_of_a_right_model_and_of_one_that_does_not_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny(tmp_path, "right", "Tanh")
    tiny(tmp_path, "broken", "NoSuchOperator")
    race, out = module("race"), tmp_path / "out.jsonl"
    words = [
        "race",
        "--models",
        str(tmp_path),
        "--half",
        "all",
        "--threads",
        "1",
        "--out",
        str(out),
        "--markdown",
        str(tmp_path / "out.md"),
    ]
    monkeypatch.setattr(sys, "argv", words)
    assert race.main() == 1
    rows = {r["name"]: r for r in map(json.loads, out.read_text().splitlines())}
    assert (
        rows["right"]["failure"] is None
        and rows["right"]["verdict"]["reference"] == "onnxruntime"
        and rows["right"]["kernels"] >= 1
    )
    assert rows["right"]["resized"]["word"] == "right"
    assert (
        rows["broken"]["failure"]["class"] == "does not compile"
        and "NoSuchOperator" in rows["broken"]["failure"]["text"]
    )
    text = (tmp_path / "out.md").read_text()
    assert "| right | 1 | 50.0% |" in text and "1: broken" in text and "| tiny | 2 | 1 |" in text
    capsys.readouterr()
    assert race.main() == 1  # what is known is not run again
    assert len(out.read_text().splitlines()) == 2 and "compiled in" not in capsys.readouterr().out


def test_classes_of_failures() -> None:
    summary, apart = module("summary"), module("apart")

    def classed(error: str, text: str, stage: str, found: Any = None) -> str:
        failure = summary.failure_class(apart.Outcome(found, error, text, stage, 1.0), found or {})
        return failure["class"] if failure else "none"

    assert classed("time", "", "compiling") == "time-out" and classed("time", "", "judging") == "not judged"
    assert classed("died", "SIGSEGV", "compiling") == "crash"
    assert classed("raised", "AccuracyError: kernel k", "compiling") == "refused by the kernel check"
    assert classed("raised", "VerifyError: too long", "compiling") == "does not compile"
    verdict = {"word": "wrong", "error": 1.0, "reference": "float64", "bound": 1e-4}
    assert classed("", "", "judging", {"verdict": verdict}) == "wrong"
    assert classed("", "", "judging", {"verdict": {**verdict, "word": "right"}}) == "none"
    two = {"verdict": {**verdict, "word": "right"}, "resized": verdict}
    assert (
        classed("", "", "judging", two) == "wrong at other sizes"
        and classed("raised", "E", summary.RESIZING) == "fails at other sizes"
    )
    assert summary.kind_of("kernel 'a_1' has 327 statements, more than 300") == summary.kind_of(
        "kernel 'b' has 400 statements, more than 300"
    )


def test_speeds_are_told_by_family_and_the_worst_first() -> None:
    summary = module("summary")
    base = {"failure": None, "compile_s": 1.0, "fastest_peer": "openvino"}
    rows = [
        {**base, "name": n, "family": f, "ratios": [r], "engines": {"dnnc": {"p50": 1.0}, "openvino": {"p50": r}}}
        for n, f, r in (("a", "f", 2.0), ("b", "f", 0.5), ("c", "g", 0.8))
    ]
    text = summary.markdown(rows, {})
    assert "geometric mean 0.93 over 3 models, below 0.9: 67%, below 0.7: 33%" in text
    assert "| f | 2 | 2 | 0 | 1.0 | 1.00 | 0.50 |" in text and text.index("| b | f | 0.50") < text.index(
        "| c | g | 0.80"
    ) < text.index("| a | f | 2.00")
