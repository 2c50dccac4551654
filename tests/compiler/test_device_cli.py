"""The command line for CUDA without a device, and a process that compiles without the CPU's compiler."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import dnnc
from dnnc.artifact.format import open_artifact, write_artifact
from dnnc.backends.cuda.target import FACTS
from dnnc.tools.sample_graphs import graph_of
from support.cli import invoke
from support.devices import install

TARGET = ("--target", "cuda -arch=sm_90a")


@pytest.fixture
def model(tmp_path: Path) -> str:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="dense"),
        helper.make_node("Relu", ["h"], ["y"], name="act"),
    ]
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", k]) for n, k in (("x", 3), ("y", 4))]
    g = helper.make_graph(
        nodes, "net", info[:1], info[1:], [onnx.numpy_helper.from_array(np.ones((3, 4), np.float32), "w")]
    )
    onnx.save(helper.make_model(g, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    return str(tmp_path / "m.onnx")


def cli(*args: str) -> Any:
    return invoke(args)


@pytest.mark.slow
def test_inspect(model: str) -> None:
    for stage, part in (("operator", "block.x"), ("cuda", "__global__ void"), ("ptx", ".visible .entry")):
        made = cli("inspect", model, *TARGET, "--dims", "N=2", "--stage", stage)
        assert made.exit_code == 0 and part in made.output and "dense (MatMul)" in made.output
    data = json.loads(cli("inspect", model, *TARGET, "--dims", "N=2", "--stage", "cuda", "--json").output)
    assert [k["name"] for k in data["kernels"]] == ["matmul_relu"] and data["kernels"][0]["symbol"] in data["kernels"][
        0
    ]["text"]
    assert "thread.x" not in cli("inspect", model, *TARGET, "--dims", "N=2", "--stage", "operator", "--naive").output
    assert "matmul(" in cli("inspect", model, *TARGET, "--stage", "graph", "--dims", "N=2").output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--stage", "cuda"), "the size of N is open"),
        (("--stage", "llvm", "--dims", "N=2"), "there are graph, operator, cuda, ptx"),
    ],
)
def test_inspect_refuses(args: tuple[str, ...], message: str, model: str) -> None:
    made = cli("inspect", model, *TARGET, *args)
    assert made.exit_code == 1 and message in " ".join(made.stderr.split())


@pytest.mark.slow
def test_compile_save_inspect_again(model: str, tmp_path: Path) -> None:
    file = str(tmp_path / "m.dnnc")
    made = cli("compile", model, *TARGET, "--dims", "N=2", "-o", file, "--cache", str(tmp_path / "cache"))
    assert made.exit_code == 0 and "1 kernels unverified" in made.output
    assert "__global__ void" in cli("inspect", file, "--stage", "cuda").output


@pytest.mark.slow
def test_targets_say_what_is_missing() -> None:
    found = {t["name"]: t for t in json.loads(cli("targets", "--json").output)}["cuda"]
    assert found["compiler"].startswith("NVRTC") and "sm_90a" in found["architectures"]
    assert found["available"] or "driver" in found["reason"]


def test_damaged_code_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    dnnc.compile(graph_of("def g(x: f32[5]):\n    return exp(x)"), target="cuda", cache=False).save(tmp_path / "m.dnnc")
    file = open_artifact(tmp_path / "m.dnnc")
    for wrong in (b"[[1]]", b'{"a": 1}', b'[["k", 0, 9999999, true]]', b'[["k", -4, 2, true]]', b"\xff"):
        sections = [(n, wrong if n == "code" else bytes(file.section(n))) for n in file.sections]
        write_artifact(tmp_path / "bad.dnnc", dict(file.manifest), sections)
        with pytest.raises(dnnc.ArtifactError, match="section 'code'"):
            dnnc.load(tmp_path / "bad.dnnc", cache=False)
        assert dnnc.load(tmp_path / "bad.dnnc", code=False, cache=False)(np.zeros(5, np.float32)).tolist() == [1] * 5


@pytest.mark.slow
def test_the_cpu_compiler_is_not_needed() -> None:
    code = """
import sys
sys.modules["llvmlite"] = None
import dnnc
from dnnc.tools.sample_graphs import graph_of
f = dnnc.compile(graph_of("def g(x: f32[4, 8]):\\n    return softmax(x)"), target="cuda -arch=sm_80", cache=False)
assert all(c[:4] == b"\\x7fELF" for c in f.programs[0].code.values())
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


@pytest.mark.slow
def test_code_for_several_architectures(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file; on a device of either architecture nothing is compiled, on a third everything is."""
    file = tmp_path / "m.dnnc"
    made = cli("compile", model, *TARGET, "--dims", "N=2", "--also", "sm_80, sm_90a", "-o", str(file))
    assert made.exit_code == 0, made.output
    symbols = [s for s, *_ in json.loads(bytes(open_artifact(file).section("code")))]
    assert len(symbols) == len(set(symbols)) == 2
    monkeypatch.setattr("dnnc.backends.cuda.backend.open_device", lambda number: None)
    # What would load the code on the device:
    monkeypatch.setattr("dnnc.backends.cuda.backend.check_program", lambda *_: None)
    monkeypatch.setattr("dnnc.backends.cuda.instance.CudaInstance.loaded", lambda self: None)
    for arch, compiled in (("sm_80", 0), ("sm_90a", 0), ("sm_86", 1)):
        for module in ("target", "backend"):
            monkeypatch.setattr(f"dnnc.backends.cuda.{module}.ask_device", lambda number=0, arch=arch: FACTS[arch])
        f = dnnc.load(file, cache=False)
        f.prepare([(2, 3)])
        assert f.target.arch == arch and f.programs[0].compiled == compiled, arch
        assert any("this device is" in note for note in f.report.notes) == (arch != "sm_90a")


@pytest.mark.slow
def test_what_also_needs(model: str, tmp_path: Path) -> None:
    assert "give a file" in cli("compile", model, *TARGET, "--also", "sm_80").stderr
    refused = cli("compile", model, "--dims", "N=2", "--also", "sm_80", "-o", str(tmp_path / "m.dnnc"))
    assert refused.exit_code == 1 and "CUDA device" in refused.stderr
    unknown = cli("compile", model, *TARGET, "--dims", "N=2", "--also", "sm_1", "-o", str(tmp_path / "m.dnnc"))
    assert unknown.exit_code == 1 and "unknown architecture sm_1" in " ".join(unknown.stderr.split())
