"""What commands write: never what they read, only with a suffix of its kind, all of it or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import dnnc as command
from onnx import TensorProto, helper, numpy_helper

import dnnc
from dnnc.ir.errors import ArtifactError
from dnnc.ir.files import replacing


def weights(path: Path, external: str | None = None) -> None:
    """A model of one product; its weights in a file of this name beside it."""
    w = numpy_helper.from_array(np.arange(9, dtype=np.float32).reshape(3, 3), "w")
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, (2, 3)) for n in "xy")
    model = helper.make_model(
        helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [w]), ir_version=10
    )
    if external:
        onnx.save(model, path, save_as_external_data=True, location=external, size_threshold=0)
    else:
        onnx.save(model, path)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    yield tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# the command, what it writes to, and the source that has that suffix
WRITERS = [
    ("compile {0} -o {1}", ".dnnc"),
    ("run {0} -o {1}", ".npz"),
    ("export {0} -o {1}", ".onnx"),
    ("opt {0} -o {1}", ".py"),
    ("tune {0} --budget 1s --log {1}", ".jsonl"),
    ("tune {0} --budget 1s --report {1}", ".html"),
]


@pytest.mark.parametrize("name", ["plain", "a path with dots", "symbolic", "hard"])
@pytest.mark.parametrize("line, suffix", WRITERS, ids=lambda x: x.split()[0].strip("."))
def test_no_source_is_overwritten(line: str, suffix: str, name: str, here: Path) -> None:
    """Weights in a file with the suffix that the command writes: the check looks at files, not at suffixes."""
    weights(here / f"model{'2' if suffix == '.onnx' else ''}.onnx", f"weights{suffix}")
    model = "model2.onnx" if suffix == ".onnx" else "model.onnx"
    source = f"weights{suffix}"
    target = {
        "plain": source,
        "a path with dots": f"x/../{source}",
        "symbolic": f"soft{suffix}",
        "hard": f"hard{suffix}",
    }[name]
    if name == "symbolic":
        os.symlink(source, target)
    elif name == "hard":
        os.link(source, target)
    before = contents(here)
    said = command(*line.format(model, target).split(), code=2)
    assert "would be overwritten" in " ".join(said.replace("│", " ").split()), said
    assert contents(here) == before


@pytest.mark.parametrize("line", [w[0] for w in WRITERS], ids=lambda x: x.split()[0])
@pytest.mark.parametrize("target", ["model.onnx.txt", "y", "model.npy.bak", "out.data"])
def test_suffixes(line: str, target: str, here: Path) -> None:
    weights(here / "model.onnx")
    before = contents(here)
    assert ": expected a " in " ".join(
        command(*line.format("model.onnx", target).split(), code=2).replace("│", " ").split()
    )
    assert contents(here) == before


@pytest.mark.slow
def test_the_model_itself(here: Path) -> None:
    weights(here / "model.onnx")
    before = contents(here)
    for line in (
        "compile model.onnx -o model.onnx",
        "export model.onnx -o model.onnx",
        "export model.onnx -o MODEL.ONNX/../model.onnx",
    ):
        command(*line.split(), code=1 if "MODEL" in line else 2)
    assert contents(here) == before
    command("opt", "model.onnx", "-o", "g.py")
    first = contents(here)
    command("opt", "g.py", "-o", "g.py", code=2)
    assert contents(here) == first and before.items() <= first.items()
    command("compile", "model.onnx", "-o", "m.dnnc")
    before = contents(here)
    command("compile", "m.dnnc", "-o", "m.dnnc", code=2)
    assert contents(here) == before


def test_inputs_and_logs_are_sources(here: Path) -> None:
    weights(here / "model.onnx")
    np.savez("x.npz", x=np.zeros((2, 3), np.float32))
    np.save("x.npy", np.zeros((2, 3), np.float32))
    before = contents(here)
    for given, out in (("x.npz", "x.npz"), ("x=x.npy", "x.npy"), ("x.npy", "x.npy")):
        command("run", "model.onnx", "-i", given, "-o", out, code=2)
    assert contents(here) == before


def test_export_does_not_replace_weights_beside_its_target(here: Path) -> None:
    weights(here / "model.onnx", "other.onnx.data")
    before = contents(here)
    command("export", "model.onnx", "-o", "other.onnx", code=2)
    assert contents(here) == before


def test_save_in_python_replaces_no_other_file(here: Path) -> None:
    weights(here / "model.onnx")
    before = contents(here)
    f = dnnc.compile("model.onnx", target="reference")
    with pytest.raises(ArtifactError, match="not a saved model"):
        f.save("model.onnx")
    assert contents(here) == before
    f.save("m.bin")
    f.save("m.bin")  # a saved model under another name may be replaced


# --- all or nothing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "interrupted"]
)
def test_a_failure_leaves_the_old_file(error: BaseException, here: Path) -> None:
    (here / "f").write_text("old")
    with pytest.raises(type(error)), replacing("f") as file:
        file.write(b"new")
        raise error
    assert contents(here) == {"f": b"old"}


def test_links_and_modes_stay(here: Path) -> None:
    (here / "f").write_text("old")
    os.chmod("f", 0o640)
    os.symlink("f", "link")
    with replacing("link") as file:
        file.write(b"new")
    assert (
        os.path.islink("link") and (here / "f").read_bytes() == b"new" and (here / "f").stat().st_mode & 0o777 == 0o640
    )


@pytest.mark.slow
@pytest.mark.parametrize("line, names", [
    ("compile model.onnx -o o.dnnc", ["o.dnnc"]),
    ("run model.onnx -o o.npz", ["o.npz"]),
    ("export model.onnx -o o.onnx", ["o.onnx"]),
    ("opt model.onnx -o o.py", ["o.py", "o.npz"]),
], ids=lambda x: x.split()[0] if isinstance(x, str) else "")  # fmt: skip
def test_a_full_disk_leaves_old_outputs_and_names_the_file(
    line: str, names: list[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights(here / "model.onnx")
    command(*line.split())
    before = contents(here)
    assert set(names) <= set(before)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    said = command(*line.split(), code=1)
    assert names[0] in said and "Error: " in said and "No space left" in said
    assert contents(here) == before
