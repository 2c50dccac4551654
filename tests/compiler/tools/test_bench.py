"""Benchmarks: engines in turns on equal arrays; `dnnc bench` and `dnnc profile` on the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from dnnc.driver import compile
from dnnc.ir.errors import InputError
from dnnc.tools import bench as bench_module
from dnnc.tools import peers as peers_module
from dnnc.tools.bench import Bench, Memory, bench, load
from dnnc.tools.peers import PEERS, Engine, check_installed, error
from dnnc.tools.timing import QUICK_CALLS, SLOW_CALLS, alternate, percentiles, ratios
from support.cli import invoke
from support.times import in_a_quiet_round, quiet

X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture(autouse=True, scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with two models, made the current one, and a cache of its own."""
    folder = tmp_path_factory.mktemp("bench")
    weights = [onnx.numpy_helper.from_array(np.ones((3, 4), np.float32), "w")]
    for name, n in (("open", "N"), ("fixed", 2)):
        x, y = (helper.make_tensor_value_info(v, TensorProto.FLOAT, [n, k]) for v, k in (("x", 3), ("y", 4)))
        graph = helper.make_graph(
            [helper.make_node("MatMul", ["x", "w"], ["y"], name="dense")], name, [x], [y], weights
        )
        onnx.save(
            helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / f"{name}.onnx"
        )
    (folder / "g.py").write_text("def g(x: f32[4]):\n    y = exp(x)\n    return y\n")
    (folder / "text.onnx").write_text("this is no model")
    np.save(folder / "x.npy", X)
    with pytest.MonkeyPatch.context() as m:
        m.chdir(folder)
        m.setenv("DNNC_CACHE_DIR", str(folder / "cache"))
        yield folder


def quickly(peers: list[str], model: str = "fixed.onnx") -> Bench:
    def own() -> tuple[Any, list[Any]]:
        return compile(model, threads=1), [X]

    return bench(model, own, 1, peers, duration=0.01, warmup=0)


def peer(result: np.ndarray[Any, Any]) -> Any:
    return lambda model, inputs, threads, precision: Engine("onnxruntime", lambda: result, lambda r: [r])


# --- timing -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@in_a_quiet_round
def test_quick_models_are_called_often_and_slow_ones_less() -> None:
    stages: list[str] = []
    times = alternate([lambda: None, lambda: sleep(2e-3)], 2, 0.01, stages.append)
    assert stages == ["timing 1 of 2", "timing 2 of 2"]
    quiet(all(len(quick) >= QUICK_CALLS > len(slow) >= SLOW_CALLS for quick, slow in times))
    assert percentiles(times, 1)["p50"] >= 2
    quiet(percentiles(times, 0)["p99"] < 2 and all(r > 10 for r in ratios(times, 0, 1)))


@pytest.mark.slow
def test_engines_take_turns() -> None:
    order: list[int] = []

    def engine(k: int) -> Any:
        return lambda: (order.append(k), sleep(5e-3))

    alternate([engine(0), engine(1)], 1, 0.2, lambda stage: None)
    turns = [k for k, before in zip(order[8:], [-1, *order[8:]]) if k != before]  # after four guesses each
    assert len(turns) >= 4 and abs(turns.count(0) - turns.count(1)) <= 1


@pytest.mark.family("cases")
@pytest.mark.parametrize(
    ("got", "want", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.2),
        ([0.0], [0.0], 0.0),
        ([0.5], [0.0], 0.5),
        ([np.nan, 1.0], [np.nan, 1.0], 0.0),
        ([np.inf, 1.0], [np.inf, 1.0], 0.0),
        ([np.nan, 1.0], [0.0, 1.0], np.inf),
        ([0.0, 1.0], [np.nan, 1.0], np.inf),
        ([1.0], [1.0, 1.0], np.inf),
    ],
)
def test_error_is_relative_to_the_largest_number(got: list[float], want: list[float], expected: float) -> None:
    assert error(np.array(got), np.array(want)) == expected


# --- engines ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_alone() -> None:
    b = quickly([])
    (own,) = b.engines
    assert own.name == "dnnc" and own.error is own.ratio is own.agrees is None
    assert 0 < own.least <= own.p50 <= own.p90 <= own.p99 and own.calls >= 5 * QUICK_CALLS
    assert own.throughput < 1 / own.least and own.load > own.p50
    assert (
        b.overhead is not None
        and 0 < b.overhead < 10 * own.p99
        and b.compiled is not None
        and b.inputs == (("x", "float32", (2, 3)),)
    )


@pytest.mark.slow
def test_a_peer_is_told_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    of_model = peer(X @ np.ones((3, 4), np.float32))
    monkeypatch.setitem(PEERS, "onnxruntime", lambda *given: told.append(given[-1]) or of_model(*given))
    bench("fixed.onnx", lambda: (compile("fixed.onnx", precision="bfloat16"), [X]), 1, ["onnxruntime"], 0.01, 0)
    assert told == ["bfloat16"]


@pytest.mark.slow
def test_same_results_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "onnxruntime", peer(X @ np.ones((3, 4), np.float32)))
    own, other = quickly(["onnxruntime"]).engines
    assert other.error is not None and other.error < 1e-6 and other.agrees
    assert (
        other.ratio is not None
        and other.ratio[1] <= other.ratio[0] <= other.ratio[2]
        and other.ratio[0] < 1 < own.p50 / other.p50
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong", [np.zeros((2, 4), np.float32), np.full((2, 4), np.nan, np.float32), np.zeros(1, np.float32)]
)
def test_other_results_are_told(monkeypatch: pytest.MonkeyPatch, wrong: np.ndarray[Any, Any]) -> None:
    monkeypatch.setitem(PEERS, "onnxruntime", peer(wrong))
    b = quickly(["onnxruntime"])
    assert b.engines[1].agrees is False and "outputs of onnxruntime and dnnc differ" in str(b)
    data = json.loads(b.to_json(), parse_constant=lambda c: pytest.fail(f"{c} is no JSON"))
    assert data["engines"][1]["agrees"] is False


@pytest.mark.slow
def test_a_peer_that_fails_is_a_line_of_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: Any, inputs: Mapping[str, Any], threads: int, precision: str | None) -> Engine:
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setitem(PEERS, "onnxruntime", fail)
    b = quickly(["onnxruntime"])
    assert [e.name for e in b.engines] == ["dnnc"] and b.failures == {"onnxruntime": "RuntimeError: no kernel for this"}
    assert "onnxruntime cannot run this model: RuntimeError: no kernel for this" in str(b)


def test_a_missing_peer_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"onnxruntime and openvino are not installed.*: pip install -e '\.\[bench\]'"):
        check_installed(["onnxruntime", "openvino"])
    with pytest.raises(InputError, match=r"^torch is not installed.*: pip install torch torchvision onnx2torch$"):
        check_installed(["torch"])
    text = dnnc("bench", "fixed.onnx", "--peers", "openvino", code=1)
    assert "pip install -e '.[bench]'" in text and "Traceback" not in text


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in ("onnxruntime", "openvino") if find_spec(n)])
def test_installed_peers_give_the_same_numbers(name: str) -> None:
    engine = PEERS[name]("open.onnx", {"x": X}, 1, None)
    (y,) = engine.outputs(engine.call())
    np.testing.assert_allclose(y, X @ np.ones((3, 4), np.float32))
    assert engine.facts["load_s"] > 0


@pytest.mark.slow
def test_growth_of_memory_is_noticed() -> None:
    memory = Memory()
    large = np.ones(8 << 20)
    now, most = memory.growth("VmRSS"), memory.growth("VmHWM")
    del large
    assert now is None or most is None or (now > 60 << 20 and most >= now > (memory.growth("VmRSS") or 0))


def test_loading_keeps_a_copy_of_the_first_result() -> None:
    buffer = np.zeros(3)

    def call() -> Any:
        buffer[:] += 1
        return buffer

    engine = load(lambda: Engine("e", call, lambda r: [r]))
    engine.call()
    assert engine.facts["result"][0].tolist() == [1, 1, 1]


def test_overhead_without_kernels_is_the_whole_call() -> None:
    f = compile("fixed.onnx", target="reference")
    assert bench_module.overhead(f, [X], 1.0) is None

    class Nothing:
        def profile(self, *arrays: Any, repeats: int) -> Any:
            raise InputError("nothing")

    assert bench_module.overhead(Nothing(), [X], 0.25) == 0.25


# --- command line -----------------------------------------------------------------------------------------------------


def dnnc(*args: str, code: int = 0) -> str:
    """What a command prints, both streams together. Fails on another exit code, with what was printed."""
    result = invoke(args)
    assert result.exit_code == code, result.output
    return result.output


SHORT = ("--duration", "0.01", "--warmup", "0")


@pytest.mark.slow
def test_bench_prints_one_row_per_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "onnxruntime", peer(X @ np.ones((3, 4), np.float32)))
    monkeypatch.setattr(peers_module, "find_spec", lambda name: name)
    text = dnnc("bench", "fixed.onnx", "--input", "x=x.npy", "--peers", "onnxruntime", *SHORT)
    assert "fixed.onnx" in text and "x float32[2, 3]" in text and "p99" in text and "above 1 if dnnc is faster" in text
    assert [line.split()[0] for line in text.splitlines()[2:4]] == ["dnnc", "onnxruntime"]


@pytest.mark.slow
def test_progress_says_how_long_all_engines_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "onnxruntime", peer(X @ np.ones((3, 4), np.float32)))
    monkeypatch.setattr(peers_module, "find_spec", lambda name: name)
    said: list[str] = []
    f = compile("fixed.onnx")
    bench("fixed.onnx", lambda: (f, [X]), 1, ["onnxruntime"], 0.5, 0, lambda stage, done, of: said.append(stage))
    assert said[-1] == "timing, 1 s or more"


@pytest.mark.slow
def test_bench_json() -> None:
    data = json.loads(dnnc("bench", "open.onnx", "--dims", "N=5", "--threads", "1", *SHORT, "--json"))
    assert data["inputs"] == [{"name": "x", "dtype": "float32", "shape": [5, 3]}] and data["threads"] == 1
    (own,) = data["engines"]
    assert own["p50"] > 0 and own["throughput"] > 0 and data["overhead"] > 0 and data["failures"] == {}


@pytest.mark.slow
def test_bench_of_the_reference_and_of_graph_text() -> None:
    data = json.loads(dnnc("bench", "g.py", "--target", "reference", *SHORT, "--json"))
    assert data["overhead"] is None and data["compiled"] is None and data["engines"][0]["p50"] > 0
    assert "dnnc" in dnnc("bench", "g.py", *SHORT)


@pytest.mark.slow
def test_profile_prints_kernels_and_with_detail_calls() -> None:
    text = dnnc("profile", "fixed.onnx", "--repeat", "3")
    assert (
        "matmul" in text
        and "dense (MatMul)" in text
        and "median of 3 calls" in text
        and "calls in program order" not in text
    )
    assert "calls in program order" in dnnc("profile", "fixed.onnx", "--repeat", "3", "--detail", "--threads", "1")


@pytest.mark.slow
def test_profile_json() -> None:
    data = json.loads(dnnc("profile", "open.onnx", "--dims", "N=5", "--repeat", "3", "--json"))
    assert data["dims"] == {} and data["repeats"] == 3 and data["kernels"][0]["flops"] == 2 * 5 * 3 * 4
    assert data["ceilings"]["flops"] > 1e9


FAILURES = [
    ("bench nowhere.onnx", 1, "there is no file nowhere.onnx"),
    ("bench text.onnx", 1, "looks like text"),
    ("bench open.onnx", 1, "--dims N=1"),
    ("bench fixed.onnx --input z=x.npy", 1, "no input 'z'; the model's inputs are x"),
    ("bench fixed.onnx --input x=nothing.npy", 1, "there is no file nothing.npy"),
    ("bench fixed.onnx --peers tensorrt", 2, "there is no peer tensorrt; there are onnxruntime, openvino, torch"),
    ("bench g.py --peers onnxruntime", 1, "can only run .onnx files"),
    ("bench fixed.onnx --duration -1", 2, "duration"),
    ("profile nowhere.onnx", 1, "there is no file nowhere.onnx"),
    ("profile open.onnx", 1, "--dims N=1"),
    ("profile fixed.onnx --repeat 0", 2, "repeat"),
    ("profile fixed.onnx --input z=x.npy", 1, "no input 'z'"),
    ("profile fixed.onnx --target reference", 1, "target reference has none"),
]


@pytest.mark.parametrize(("command", "code", "message"), FAILURES, ids=[c for c, _, _ in FAILURES])
def test_failures_are_short_and_have_their_exit_code(command: str, code: int, message: str) -> None:
    text = dnnc(*command.split(), code=code)
    assert message in " ".join(text.replace("│", " ").split()) and "Traceback" not in text
