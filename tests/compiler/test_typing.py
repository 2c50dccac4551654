"""What a type checker says of a user's file: options and results have types, mistakes are found."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dnnc.options import CompileOptions, Options

ROOT = Path(__file__).resolve().parents[2]
USER = """
import numpy as np
import dnnc
import dnnc.array as xp

f = dnnc.compile("m.onnx", dims={"N": 8}, precision="fp16", threads=1)
reveal_type(f.report)
f.run([np.zeros(3)])
f.save("m.dnnc", small=True)
g = dnnc.load("m.dnnc")
reveal_type(g.inputs)

@dnnc.jit
def one(x):
    return x

@dnnc.jit(static="n", threads=1)
def two(x, n):
    return x

reveal_type(one)
reveal_type(two)

@dnnc.jit(threads=1)
def three(w: xp.Array, x: xp.Array) -> xp.Array:
    return (w * x + 1).max()

class Model:
    @dnnc.jit
    def call(self, x: xp.Array) -> tuple[xp.Array, xp.Array]:
        return x, -x

def loss(w: xp.Array, x: xp.Array) -> xp.Array:
    return (w @ x).sum()

a = xp.asarray([1.0])
reveal_type(three(a, np.zeros(3)))
reveal_type(Model().call(a))
reveal_type(1 + a)
reveal_type(a.max(axis=0))
reveal_type(dnnc.grad(loss)(a, a))
reveal_type(dnnc.value_and_grad(loss))
reveal_type(dnnc.grad("m.onnx", wrt=True, cotangent="sum"))
reveal_type(dnnc.tune("m.onnx", budget=3.0, threads=1).compile(threads=1))
dnnc.tune("m.onnx", bogus=1)  # error
dnnc.grad("m.onnx", wrt=True, cotangen="sum")  # error
three(a, a).bogus  # error
dnnc.compile("m.onnx", bogus=1)  # error
dnnc.compile("m.onnx", threads="two")  # error
dnnc.jit(one, optlevel=3)  # error
f.sav("m.dnnc")  # error
"""


def test_the_typed_options_are_those_of_the_class() -> None:
    assert Options.__optional_keys__ == {f.name for f in dataclasses.fields(CompileOptions)}


@pytest.mark.slow
def test_a_file_of_a_user(tmp_path: Path) -> None:
    tree = tmp_path / "tree" / "dnnc"
    tree.mkdir(parents=True)
    for p in (ROOT / "compiler").iterdir():
        (tree / p.name).symlink_to(p)
    for layer in ("ir", "passes", "backends", "autotune"):
        (tree / layer).symlink_to(ROOT / layer)
    (tmp_path / "user.py").write_text(USER)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--follow-imports=silent",
        "--ignore-missing-imports",
        "--cache-dir",
        str(tmp_path / "cache"),
        "user.py",
    ]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=tmp_path, env={**env, "MYPYPATH": str(tree.parent)}, capture_output=True, text=True, timeout=300
    )
    lines = done.stdout.splitlines()
    wrong = sorted({int(x.split(":")[1]) for x in lines if ": error:" in x})
    assert wrong == [k for k, line in enumerate(USER.splitlines(), 1) if line.endswith("# error")], (
        done.stdout + done.stderr
    )
    revealed = [x.split('"')[1] for x in lines if "Revealed type" in x]
    array = "dnnc.array.core.Array"
    kinds = (
        "report.Report", "tuple[dnnc.signature.TensorSpec", "Jitted[", "Jitted[",
        array, f"tuple[{array}, {array}]", array,
        array, array, f"tuple[{array}, {array}]", "graph.core.Graph", "executable.Executable",
    )  # fmt: skip
    for text, kind in zip(revealed, kinds, strict=True):
        assert kind in text, revealed
