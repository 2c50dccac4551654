"""Saved models on the command line: `compile -o` writes them, the other commands take them in place of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import Result

import dnnc
import dnnc.artifact.load
from dnnc.ir.graph.text import parse
from support.cli import invoke

TEXT = (
    "def rows(x: f32[N, 4], *, w: f32[4, 2] = [[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 2.0]]):\n"
    "    y = relu(matmul(x, w))\n    return y\n"
)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DNNC_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "m.py").write_text(TEXT)
    return tmp_path / "m.py"


def dnnc_command(*words: str, code: int = 0) -> Result:
    result = invoke(words)
    assert result.exit_code == code, result.output
    return result


@pytest.mark.slow
def test_compile_then_run(model: Path) -> None:
    shown = dnnc_command("compile", "m.py", "--dims", "N=1..8", "-o", "m.dnnc").output
    assert f"saved to m.dnnc, {Path('m.dnnc').stat().st_size / 1024:.3g} KB" in shown
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.save("x.npy", x)
    dnnc_command("run", "m.dnnc", "--input", "x=x.npy", "--output", "y.npy")
    np.testing.assert_array_equal(np.load("y.npy"), dnnc.load("m.dnnc")(x))
    assert len(dnnc.load("m.dnnc").programs) == 1


def test_json_tells_of_the_file(model: Path) -> None:
    told = json.loads(dnnc_command("compile", "m.py", "--dims", "N=2", "-o", "m.dnnc", "--json").stdout)
    assert told["file"] == "m.dnnc" and told["file_bytes"] == Path("m.dnnc").stat().st_size and told["name"] == "rows"
    again = json.loads(dnnc_command("compile", "m.dnnc", "--json").stdout)
    assert again["notes"] == ["loaded from m.dnnc"] and "file" not in again


def test_small(model: Path) -> None:
    dnnc_command("compile", "m.py", "--dims", "N=2", "-o", "m.dnnc", "--small")
    assert dnnc.load("m.dnnc").programs[0].scheduled is not None
    assert "Invalid value for --small" in dnnc_command("compile", "m.py", "--dims", "N=2", "--small", code=2).output


@pytest.mark.slow
def test_inspect(model: Path) -> None:
    dnnc_command("compile", "m.py", "--dims", "N=2", "-o", "m.dnnc")
    for stage in ("graph", "operator", "llvm", "asm"):
        assert (
            dnnc_command("inspect", "m.dnnc", "-s", stage).output
            == dnnc_command("inspect", "m.py", "--dims", "N=2", "-s", stage).output
        )
    assert "f32[2, 4]" in dnnc_command("inspect", "m.dnnc", "--naive").output
    (kernel,) = json.loads(dnnc_command("inspect", "m.dnnc", "-s", "llvm", "--json").stdout)["kernels"]
    assert f"define void @{kernel['symbol']}(" in kernel["text"]
    assert (
        "holds scheduled kernels only" in dnnc_command("inspect", "m.dnnc", "-s", "operator", "--naive", code=1).output
    )


def test_inspect_chooses_sizes(model: Path) -> None:
    dnnc.compile(parse(TEXT)).save("m.dnnc")
    assert "f32[3, 2]" in dnnc_command("inspect", "m.dnnc", "--dims", "N=3").output
    assert "N" in dnnc_command("inspect", "m.dnnc", code=1).output


@pytest.mark.family("cases")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "m.dnnc", "-O", "0"), "m.dnnc is compiled already, so --opt-level cannot be chosen any more"),
        (
            ("run", "m.dnnc", "--target", "llvm -mcpu=haswell", "--numerics", "fast"),
            "so --target, --numerics cannot be chosen any more",
        ),
        (("inspect", "m.dnnc", "-O", "0"), "of the options only --dims, --stage and --kernel can be chosen"),
        (("compile", "m.py", "--dims", "N=2", "-o", "no/m.dnnc"), "cannot write no/m.dnnc: there is no folder no"),
        (("run", "damaged.dnnc"), "ArtifactError: damaged.dnnc: the first page is damaged"),
    ],
)
def test_refused(words: tuple[str, ...], message: str, model: Path) -> None:
    dnnc_command("compile", "m.py", "--dims", "N=2", "-o", "m.dnnc")
    data = bytearray(Path("m.dnnc").read_bytes())
    data[99] ^= 1
    Path("damaged.dnnc").write_bytes(data)
    assert message in dnnc_command(*words, code=1).output


def test_a_file_that_does_not_fit_is_told_in_one_line(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dnnc_command("compile", "m.py", "--dims", "N=2", "-o", "m.dnnc")
    monkeypatch.setattr("dnnc.backends.llvm.backend.FORMAT", "0")
    result: Any = dnnc_command("run", "m.dnnc")
    (line,) = result.stderr.splitlines()
    version = dnnc.backends.llvm.backend.llvm_version()
    assert line == (
        f"warning: m.dnnc: it was compiled for kernel format 1, LLVM {version}, this is kernel format 0, LLVM "
        f"{version}; compiling again from the graph in the file"
    )
    assert "float32[2, 2]" in result.stdout
