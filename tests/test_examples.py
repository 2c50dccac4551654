"""The examples: each runs at a small size with a right result; the digits model and its script."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from dnnc.array import devices, lazy
from dnnc.array.lazy import PROGRAMS_MADE
from dnnc.backends.cuda.interpreted import InterpretedDevice
from support.devices import install

pytestmark = pytest.mark.family("cases")

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

# Arguments, and what the output says when the result is right.
ARRAY_EXAMPLES = {
    "batch_norm": (
        ["--size=8"],
        r"^variance: 1 kernel,(.*\n){2}  as NumPy in float64.*\nbatch_norm: 1 kernel,(.*\n){2}  as NumPy in float64",
    ),
    "kmeans": (
        ["--size=400"],
        r"centers and distances are NumPy's, of all points and of half of them; traces of `step`: 1$",
    ),
    "mandelbrot": (
        ["--size=30", "--steps=20"],
        r"^ *@{8,}[^ ]*\n(.*\n)+(9\d\.\d|100\.0)% of the points as NumPy has them",
    ),
    "nbody": (
        ["--size=16", "--steps=40"],
        r"at most\nmomentum \d\.\de-1\d; positions, velocities and energy are NumPy's",
    ),
    "vit": (["--size=16", "--steps=1"], r"nothing was compiled\nwith other weights: classes .*, as in NumPy"),
}


FALLS = r"loss \d+\.\d+ -> \d+\.\d+"


@pytest.fixture(autouse=True)
def beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """An example may import the one beside it, as a script does."""
    monkeypatch.syspath_prepend(EXAMPLES)


def samples(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    with np.load(folder / "digits_samples.npz", allow_pickle=False) as z:
        return z["images"], z["labels"]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_model_in_the_tree_reads_its_samples() -> None:
    assert (EXAMPLES / "digits.onnx").stat().st_size < 1 << 20
    model = onnx.load(EXAMPLES / "digits.onnx")
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "N"
    images, labels = samples(EXAMPLES)
    (logits,) = ReferenceEvaluator(model).run(None, {"image": images})
    assert set(labels) == set(range(10)) and (logits.argmax(1) == labels).mean() >= 0.9


@pytest.mark.slow
def test_training_reaches_its_accuracy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    t = script("train_digits")
    monkeypatch.setattr(t, "HERE", tmp_path)
    t.main([])
    found = re.search(r"test accuracy ([\d.]+)%", capsys.readouterr().out)
    assert found is not None and float(found[1]) >= 97
    images, labels = samples(tmp_path)
    (logits,) = ReferenceEvaluator(onnx.load(tmp_path / "digits.onnx")).run(None, {"image": images})
    assert (logits.argmax(1) == labels).mean() >= 0.9


# --- examples of array programs ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_gradients_are_closed_forms(capsys: pytest.CaptureFixture[str]) -> None:
    script("gradients").main(["--size=32"])
    exact = r"(.*: (\d\.\de-1\d|0\.0e\+00)\n)"
    scan = r".*1000 steps: 0\.0\d+ of the memory, \d\.\de-1\d\n"
    solver = r"(.* method \d\.\de-0[56]\n){2}"
    assert re.fullmatch(f"{exact}{{6}}{scan}{solver}{exact}", capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARRAY_EXAMPLES)
def test_array_programs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    given, found = ARRAY_EXAMPLES[name]
    script(name).main(given)
    out = capsys.readouterr().out
    assert re.search(found, out, re.MULTILINE), out


@pytest.mark.slow
def test_quantization(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "digits.int8.onnx"
    script("quantize").main(["--steps=150", "--aware-steps=60", f"--output={path}"])
    out = capsys.readouterr().out
    whole, after, _, four, _, aware, same = (float(x) for x in re.findall(r"([\d.]+)%", out))
    assert whole > 88 and abs(after - whole) < 1 and abs(four - whole) < 4 and aware > whole - 1 and same > 90, out
    images, labels = samples(EXAMPLES)
    model = onnx.load(path)
    (logits,) = ReferenceEvaluator(model).run(None, {model.graph.input[0].name: images})
    assert (logits.argmax(1) == labels).mean() >= 0.9


@pytest.mark.slow
def test_pruning(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "digits.pruned.onnx"
    script("prune").main(["--steps=300", f"--output={path}"])
    out = capsys.readouterr().out
    dense, gradual, gone, fewer, after = (float(x) for x in re.findall(r"([\d.]+)%", out))
    assert dense > 95 and gradual > dense - 2 and round(gone, 1) == 90 and fewer > 60 and after > dense - 2, out
    weights = [numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer if len(t.dims) > 1]
    assert sum((w == 0).sum() for w in weights) / sum(w.size for w in weights) == pytest.approx(0.9, abs=1e-3)


@pytest.mark.slow
def test_deep_compression(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lenet.dnnc"
    script("deep_compression").main(["--steps=150", "--sparsity=0.95", f"--output={path}"])
    out = capsys.readouterr().out
    dense, pruned, _, _, shared, loaded = (float(x) for x in re.findall(r"([\d.]+)%", out))
    assert dense > 95 and pruned > dense - 3 and shared > dense - 3 and loaded == shared, out
    assert path.stat().st_size * 20 < 4 * 431080, out


@pytest.mark.slow
def test_fine_tuning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "holes.onnx"
    script("fine_tune").main(["--size=800", "--epochs=4", f"--output={path}", f"--log={tmp_path / 'run.jsonl'}"])
    out = capsys.readouterr().out
    before, head, whole, written = (float(x) for x in re.findall(r": ([\d.]+)%", out))
    assert before < 60 < 85 < head and whole > 90 and written == whole, out
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 2 * 2 * (400 // 32)
    images, labels = samples(EXAMPLES)
    (logits,) = ReferenceEvaluator(onnx.load(path)).run(None, {"input": images})
    assert (logits.argmax(1) == script("fine_tune").HOLES[labels]).mean() >= 0.9


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """`cuda:0` is the interpreter of device programs."""

    def clear() -> None:
        devices.place.cache_clear()
        lazy.compiler.cache_clear()
        PROGRAMS_MADE.made.clear()

    monkeypatch.setenv("DNNC_CACHE_DIR", str(tmp_path))
    install(monkeypatch, InterpretedDevice())
    clear()
    yield
    clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=(pytest.mark.slow, pytest.mark.thorough)) if n == "vit" else n for n in ARRAY_EXAMPLES],
)
def test_array_programs_on_a_device(name: str, interpreted: None, capsys: pytest.CaptureFixture[str]) -> None:
    given, found = ARRAY_EXAMPLES[name]
    script(name).main([*given, "--device=cuda:0"])
    out = capsys.readouterr().out
    assert re.search(found, out, re.MULTILINE), out


# --- examples that train ----------------------------------------------------------------------------------------------

# Arguments, and what the output says.
TRAINING = {
    "alexnet": (["--steps=3", "--width=0.1"], r"loss 2\.\d+ -> 2\.\d+, accuracy \d+%"),
    "char_rnn": (["--steps=60", "--width=32"], FALLS),
    "dcgan": (["--steps=6", "--width=4"], r"pixels 0\.[1-6]"),
    "dqn": (["--steps=100"], r"reached in \d+% of 100"),
    "gpt": (["--steps=30", "--width=32", "--blocks=1", "--letters=5"], FALLS),
    "mlp": (["--steps=200"], r"half: 9\d\.\d\d%"),
    "neural_style": (["--steps=15", "--size=48"], FALLS),
    "seq2seq": (["--steps=25", "--width=8"], FALLS),
    "stochastic_depth": (["--steps=20", "--blocks=4"], FALLS),
    "vae": (["--steps=200"], r"bound: 2[0-7]\.\d\d"),
    "word2vec": (["--steps=300"], FALLS),
}
# Sizes for the interpreter of device programs: constants of the example, and arguments. AlexNet and GPT take minutes.
ON_DEVICE = {
    "char_rnn": ({"ROWS": 2}, ["--steps=2", "--width=4", "--length=2"]),
    "dcgan": ({}, ["--steps=1", "--width=2", "--batch=2"]),
    "dqn": ({"BATCH": 2}, ["--steps=1"]),
    "mlp": ({"BATCH": 2}, ["--steps=1"]),
    "neural_style": ({}, ["--steps=2", "--size=16"]),
    "seq2seq": ({}, ["--steps=1", "--width=2", "--batch=1"]),
    "stochastic_depth": ({}, ["--steps=1", "--blocks=1", "--batch=1"]),
    "vae": ({"BATCH": 2}, ["--steps=1"]),
    "word2vec": ({"BATCH": 4, "WORDS": 60}, ["--steps=1"]),
}
LONG = {"char_rnn", "neural_style", "seq2seq", "word2vec"}


def numbers(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"\d+\.\d+|\d+(?=%)", text)]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINING)
def test_training(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given, found = TRAINING[name]
    monkeypatch.chdir(tmp_path)
    script(name).main(given)
    out = capsys.readouterr().out
    assert re.search(found, out), out
    if found is FALLS:
        first, last = numbers(re.search(FALLS, out)[0])  # type: ignore[index]
        assert last < 0.95 * first, out


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.thorough) if n in LONG else n for n in ON_DEVICE])
def test_training_on_a_device(
    name: str,
    interpreted: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The same seed, and so the same losses."""
    constants, given = ON_DEVICE[name]
    monkeypatch.chdir(tmp_path)
    made = []
    for target in ("llvm", "cuda"):
        example = script(name)
        for constant, value in constants.items():
            monkeypatch.setattr(example, constant, value)
        example.main([*given, f"--target={target}"])
        made.append(numbers(capsys.readouterr().out))
    assert made[0] and made[1] == pytest.approx(made[0], rel=2e-3, abs=2e-3)


@pytest.mark.parametrize("name", sorted(p.stem for p in EXAMPLES.glob("*.py")))
def test_an_example_names_the_package_that_it_lacks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the optional packages, an example can be imported or ends with the command that installs them."""
    for module in ("scikit", "train_digits"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    for package in ("torch", "sklearn", "sklearn.datasets", "PIL", "scipy", "onnxruntime", "safetensors", "h5py"):
        monkeypatch.setitem(sys.modules, package, None)
    try:
        script(name)
    except SystemExit as e:
        assert re.fullmatch(r"this example .*: pip install .*", str(e)), e


if importlib.util.find_spec("torch"):

    @pytest.mark.slow
    def test_torch_model(capsys: pytest.CaptureFixture[str]) -> None:
        script("torch_model").main(["--size=8", "--steps=1"])
        out = capsys.readouterr().out
        assert len(re.findall("as eager PyTorch, to", out)) == 6 and "one program for all batch sizes" in out, out


# Examples of stored weights: arguments, and what the output says when the result is right.
STORED = {
    "storage_formats": (["--size=64"], r"^ternary: .* right\nlogarithmic: .* right\nrooted: .* right$"),
    "binary_digits": (
        ["--steps=60", "--nets", "bnn", "lut"],
        r"^bnn: accuracy 9.* give the same\nlut: accuracy [4-9]\d",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STORED)
def test_stored_weights(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    given, found = STORED[name]
    script(name).main(given)
    assert re.search(found, capsys.readouterr().out)
