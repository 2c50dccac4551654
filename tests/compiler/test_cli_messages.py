"""What commands say of saved models, wrong options, numbers that are none, and a cache that keeps nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from command_line import dnnc, dnnc_json
from onnx import TensorProto, helper

from dnnc.backends.cuda import backend as cuda_backend
from dnnc.backends.cuda import target as cuda_target
from dnnc.backends.registry import open_backend
from dnnc.ir.errors import InputError, TargetError
from dnnc.options import PRECISION_ALIASES, CompileOptions

ROOT = Path(__file__).resolve().parents[2]
MODEL = str(ROOT / "examples" / "digits.onnx")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def said(*words: str, code: int = 0) -> str:
    return " ".join(dnnc(*words, code=code).replace("│", " ").split())


# --- saved models -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_saved_model_is_loaded_and_not_compiled() -> None:
    dnnc("compile", MODEL, "--dims", "N=2", "-o", "m.dnnc")
    run, report = said("run", "m.dnnc"), said("compile", "m.dnnc")
    assert "loaded in" in run and "loaded in" in report and "kernels, loaded" in report
    for text in (run, report):
        assert "compiled in" not in text and " 0 us" not in text and "from the cache" not in text


@pytest.mark.slow
@pytest.mark.parametrize("line", ["opt m.dnnc", "export m.dnnc -o e.onnx", "tune m.dnnc --budget 1s"])
def test_commands_that_need_the_source_say_so(line: str) -> None:
    dnnc("compile", MODEL, "--dims", "N=2", "-o", "m.dnnc")
    assert "InputError: m.dnnc is compiled already; give the model that it was compiled from" in said(
        *line.split(), code=1
    )


@pytest.mark.slow
def test_passes_are_one_line_or_a_table() -> None:
    compiled = "compile", MODEL, "--dims", "N=2", "--cache", "off"
    short, long = dnnc(*compiled), dnnc(*compiled, "--passes")
    assert re.search(r"^passes: \d+ in [^,]+, 9 -> 12 nodes; changed by decompose, layout, dce-again$", short, re.M)
    assert "unchanged" not in short and long.count("unchanged") > 10


# --- options ----------------------------------------------------------------------------------------------------------


def test_version_and_completion() -> None:
    assert dnnc("--version").strip() == f"dnnc {version('dnnc')}"
    assert "--install-completion" in dnnc("--help")


@pytest.mark.slow
def test_other_names_of_precisions() -> None:
    for name, precision in PRECISION_ALIASES.items():
        assert CompileOptions(precision=name).precision == precision
        assert dnnc_json("run", MODEL, "--dims", "N=1", "--precision", name, "--target", "reference")["outputs"]


MISTAKES = [
    ("run {m} --precision fp17", "'fp17': expected model, float32, tf32, float16 or bfloat16; did you mean fp16?"),
    ("run {m} --threads 0", "'0': expected an integer of at least 1"),
    ("run {m} --threads two", "'two': expected an integer of at least 1"),
    ("run {m} --seed x", "'x': expected an integer of at least 0"),
    ("run {m} -O 7", "'7': expected 0, 1, 2 or 3"),
    ("run {m} --numerics quick", "'quick': expected strict, standard or fast"),
    ("bench {m} --duration -1", "'-1': expected a number of at least 0"),
]


@pytest.mark.parametrize("line, message", MISTAKES, ids=[m[0] for m in MISTAKES])
def test_values_of_options(line: str, message: str) -> None:
    text = said(*line.format(m=MODEL).split(), code=2)
    assert message in text and "Value error" not in text and "Input should" not in text


@pytest.mark.slow
def test_level_2_is_the_usual_one() -> None:
    assert CompileOptions(opt_level=2) == CompileOptions()
    assert dnnc_json("run", MODEL, "--dims", "N=1", "-O", "2")["outputs"]


@pytest.mark.slow
def test_passes_of_opt() -> None:
    assert [p["name"] for p in dnnc_json("opt", MODEL, "-p", "all")["passes"]] == [
        p["name"] for p in dnnc_json("opt", MODEL)["passes"]
    ]
    unknown = said("opt", MODEL, "-p", "nope", code=1)
    assert "there is no pass 'nope'. There are: forget-structures, quantized" in unknown
    misspelt = said("opt", MODEL, "-p", "cs", code=1)
    assert "there is no pass 'cs'; did you mean cse? There are: forget-structures" in misspelt


def test_tune_names_its_own_option() -> None:
    assert "--dims N=1" in said("tune", MODEL, "--budget", "1s", code=1)


# --- numbers that are none --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_nan_and_inf_are_counted() -> None:
    Path("g.py").write_text("def g(x: f32[6]):\n    y = neg(x)\n    return y\n")
    np.save("x.npy", np.array([1, np.nan, np.nan, np.inf, -np.inf, 2], np.float32))
    text = said("run", "g.py", "-i", "x.npy")
    assert "not finite" in text and "2 NaN, 2 inf" in text
    (out,) = dnnc_json("run", "g.py", "-i", "x.npy")["outputs"]
    assert (out["nan"], out["not_finite"]) == (2, 4)
    assert "not finite" not in said("run", "g.py", "-i", "zeros")


# --- the cache --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_told(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "file").write_text("")
    assert "compiled kernels are not kept: cannot" in said("compile", MODEL, "--dims", "N=1", "--cache", "file/x")
    assert "not kept" not in said("compile", MODEL, "--dims", "N=1", "--cache", "off")
    info = dnnc_json("cache", "info", "--cache", "file/x")
    assert not info["usable"] and "cannot" in info["reason"]
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "cannot be written" in said("cache", "info", "--cache", str(here / "closed"))
    monkeypatch.undo()
    assert dnnc_json("cache", "info", "--cache", str(here / "new" / "folder"))["usable"]


# --- devices ----------------------------------------------------------------------------------------------------------


def test_no_driver_is_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_target, "ask_device", lambda number=0: None)
    monkeypatch.setattr(cuda_target, "devices", lambda: (0, "there is no NVIDIA driver (libcuda.so.1)"))
    with pytest.raises(TargetError, match=r"no NVIDIA driver \(libcuda.so.1\)") as e:
        cuda_target.parse_target("cuda")
    assert "cudaError" not in str(e.value)


def test_a_program_for_a_device_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cuda_target, cuda_backend):
        monkeypatch.setattr(module, "ask_device", lambda number=0: None)
    monkeypatch.setattr(cuda_target, "devices", lambda: (0, "there is no NVIDIA driver (libcuda.so.1)"))
    with pytest.raises(TargetError, match=r"for sm_90a and cannot run here: there is no NVIDIA driver.*f\.save") as e:
        open_backend("cuda -arch=sm_90a").device()
    assert "-arch=" not in str(e.value)


# --- plurals ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_open_sizes_are_named_before_weights_are_read(here: Path) -> None:
    """A gigabyte of weights, none of which come into memory."""
    n, layers = 4096, 16
    with (here / "w.bin").open("wb") as f:
        f.truncate(4 * n * n * layers)
    weights = [TensorProto(name=f"w{k}", data_type=1, dims=[n, n], data_location=1) for k in range(layers)]
    for k, w in enumerate(weights):
        for key, text in (("location", "w.bin"), ("offset", 4 * n * n * k), ("length", 4 * n * n)):
            w.external_data.add(key=key, value=str(text))
    x, y = (helper.make_tensor_value_info(v, TensorProto.FLOAT, ["past", n]) for v in ("x0", f"x{layers}"))
    nodes = [helper.make_node("MatMul", [f"x{k}", f"w{k}"], [f"x{k + 1}"]) for k in range(layers)]
    model = helper.make_model(helper.make_graph(nodes, "large", [x], [y], weights))
    (here / "large.onnx").write_bytes(model.SerializeToString())
    before = resident()
    assert "the size of past is open" in said("run", "large.onnx", code=1)
    assert resident() - before < n * n * layers


def resident() -> int:
    """Bytes of this process in memory."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


@pytest.mark.slow
def test_counts_agree_with_their_nouns() -> None:
    from dnnc import compile

    f = compile(MODEL, target="reference")
    with pytest.raises(InputError, match=r"^the model has 1 input \(image\), got 2 arrays$"):
        f(np.zeros(1), np.zeros(1))
    text = said("run", MODEL, "--dims", "N=1") + said("compile", MODEL, "--dims", "N=1")
    assert not re.search(r"\b1 (outputs|inputs|kernels|calls|nodes|threads)\b", text)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["-m dnnc ops", f"{ROOT / 'benchmarks/zoo'} list"])
def test_a_reader_that_leaves_early_is_no_error(command: str) -> None:
    line = f"set -o pipefail; {sys.executable} {command} | head -1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)
    assert not done.stderr and len(done.stdout.splitlines()) == 1
