"""Checkpoints: what comes back, from which files, and runs that go on to the bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

import dnnc
import dnnc.array as xp
from dnnc import optim
from dnnc.training import checkpoint

RNG = np.random.default_rng(0)
SUFFIXES = (".npz", ".safetensors")


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (np.ndarray, np.generic, xp.Array)):
        a = np.asarray(a)
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_trees_come_back(suffix: str, tmp_path: Path) -> None:
    tree = {
        "model": {"w": RNG.random((3, 4)), "b": xp.asarray(np.float32([np.nan, -0.0])), "empty": np.zeros((0, 2))},
        "half": [np.ones(3, np.float16), np.full((2, 2), 1.5, ml_dtypes.bfloat16)],
        "byte": np.array([1.5, -2], ml_dtypes.float8_e4m3fn),
        "optimizer": {"state": {0: {"step": 3, "m": np.int64(7)}}, "param_groups": [{"betas": (0.9, 0.99), "x": None}]},
        "epoch": 3, "name": "net", "rate": 0.1, "flag": True, "mask": np.array([True, False]),
    }  # fmt: skip
    path = tmp_path / f"a{suffix}"
    dnnc.save_arrays(path, tree)
    assert same(tree, dnnc.load_arrays(path))
    dnnc.save_arrays(path, tree["model"])
    assert list(dnnc.load_arrays(path)) == ["w", "b", "empty"]


@pytest.mark.slow
def test_files_of_other_libraries(tmp_path: Path) -> None:
    w = RNG.standard_normal((3, 2)).astype(np.float32)
    np.savez(tmp_path / "a.npz", w=w)
    torch.save({"net": {"w": torch.tensor(w), "h": torch.ones(2, dtype=torch.bfloat16)}, "epoch": 3}, tmp_path / "a.pt")
    assert np.array_equal(dnnc.load_arrays(tmp_path / "a.npz")["w"], w)
    found = dnnc.load_arrays(tmp_path / "a.pt")
    assert np.array_equal(found["net.w"], w) and found["net.h"].dtype == ml_dtypes.bfloat16 and len(found) == 2


def test_hdf5(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["layer/w"] = np.arange(6.0).reshape(2, 3)
        file["n"] = 3
    found = dnnc.load_arrays(tmp_path / "a.h5")
    assert found["layer.w"].shape == (2, 3) and int(found["n"]) == 3


def test_safetensors_of_others(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"w": np.arange(3, dtype=np.int32)}, tmp_path / "a.safetensors")
    assert dnnc.load_arrays(tmp_path / "a.safetensors")["w"].tolist() == [0, 1, 2]
    dnnc.save_arrays(tmp_path / "b.safetensors", {"a": {"w": np.float32([1, 2])}})
    assert safetensors.numpy.load_file(tmp_path / "b.safetensors")["a.w"].tolist() == [1, 2]


def test_bad_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.npz").write_bytes(b"no zip")
    twice = {"a.b": RNG.random(2), "a": {"b": RNG.random(2)}}

    def missing(name: str) -> Any:
        raise ImportError(name)

    for message, error, call in (
        ("ends in .npz or .safetensors", dnnc.InputError, lambda: dnnc.save_arrays(tmp_path / "a.txt", {})),
        ("expected a path that ends", dnnc.InputError, lambda: dnnc.load_arrays(tmp_path / "a.txt")),
        ("cannot be read", dnnc.ArtifactError, lambda: dnnc.load_arrays(tmp_path / "bad.npz")),
        ("cannot be read", dnnc.ArtifactError, lambda: dnnc.load_arrays(tmp_path / "none.npz")),
        ("f is a function", dnnc.InputError, lambda: dnnc.save_arrays(tmp_path / "a.npz", {"f": missing})),
        ("two arrays", dnnc.InputError, lambda: dnnc.save_arrays(tmp_path / "a.npz", twice)),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
    assert [p.name for p in tmp_path.iterdir()] == ["bad.npz"]
    monkeypatch.setattr(checkpoint, "import_module", missing)
    with pytest.raises(dnnc.UnsupportedError, match="pip install safetensors"):
        dnnc.save_arrays(tmp_path / "a.safetensors", {})


@pytest.mark.slow
def test_files_with_code_or_damage(tmp_path: Path) -> None:
    """No code of a file runs, no file gives other arrays than were written, and messages say what to do."""

    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    torch.save({"w": Evil()}, tmp_path / "a.pt")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    torch.save({"s": torch.eye(3).to_sparse()}, tmp_path / "sparse.pt")
    np.savez(tmp_path / "object.npz", w=np.array([Evil()], object))
    np.save(tmp_path / "one.npy", np.ones(3))
    (tmp_path / "one.npy").rename(tmp_path / "one.npz")
    for suffix in SUFFIXES:
        dnnc.save_arrays(tmp_path / f"whole{suffix}", {"w": RNG.random(500)})
        data = (tmp_path / f"whole{suffix}").read_bytes()
        (tmp_path / f"cut{suffix}").write_bytes(data[: RNG.integers(0, len(data))])
    torch.save({"w": torch.ones(500)}, tmp_path / "whole.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:900])
    (tmp_path / "empty.pt").write_bytes(b"")
    for name, message in (
        ("a.pt", r"code is not run.*state_dict\(\)"), ("module.pt", r"Linear.*code is not run"),
        ("sparse.pt", "has s, "),
        ("object.npz", "Object arrays"), ("one.npz", "is no .npz file"), ("cut.pt", "cannot be read"),
        ("empty.pt", "cannot be read: EOF"), *((f"cut{s}", "is no .npz file|cannot be read") for s in SUFFIXES),
    ):  # fmt: skip
        with pytest.raises(dnnc.ArtifactError, match=message) as e:
            dnnc.load_arrays(tmp_path / name)
        assert "weights_only" not in str(e.value) and "allow_pickle=`" not in str(e.value)
    assert not (tmp_path / "ran").exists()
    for path in (tmp_path / "no" / "a.npz", tmp_path / "folder.npz"):
        (tmp_path / "folder.npz").mkdir(exist_ok=True)
        with pytest.raises(dnnc.InputError, match="cannot be written"):
            dnnc.save_arrays(path, {})


@pytest.mark.slow
def test_a_state_of_another_step_changes_nothing(tmp_path: Path) -> None:
    w = {"w": np.ones((2, 2), np.float32)}

    def step(optimizer: Any) -> Any:
        return dnnc.train_step(lambda p, x: xp.mean((x @ p["w"]) ** 2), optimizer, w, threads=1)

    adam, sgd = step(optim.Adam(lr=0.5)), step(optim.SGD(lr=0.25))
    adam.save(tmp_path / "adam.npz")
    sgd.save(tmp_path / "sgd.npz")
    for message, one, name in (("no optimizer.w.exp_avg", adam, "sgd"), ("there is optimizer.w.exp_avg", sgd, "adam")):
        with pytest.raises(dnnc.InputError, match=message):
            one.load(tmp_path / f"{name}.npz")
    assert sgd.optimizer.param_groups[0]["lr"] == 0.25 and "betas" not in sgd.optimizer.param_groups[0]
    with pytest.raises(dnnc.InputError, match=r"got \['model'\]"):
        optim.SGD([xp.ones(2)], lr=0.1).load_state_dict({"model": 1})


@pytest.mark.slow
def test_dtypes_of_other_libraries(tmp_path: Path) -> None:
    tensors = {"byte": torch.ones(2).to(torch.float8_e4m3fn), "half": torch.ones(3, 2, dtype=torch.bfloat16).T}
    torch.save({**tensors, "turned": torch.arange(6.0).reshape(2, 3).T}, tmp_path / "a.pt")
    safetensors.torch.save_file({"byte": tensors["byte"]}, tmp_path / "a.safetensors")
    found = dnnc.load_arrays(tmp_path / "a.pt")
    assert found["byte"].dtype == ml_dtypes.float8_e4m3fn and found["half"].shape == (2, 3)
    assert found["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert dnnc.load_arrays(tmp_path / "a.safetensors")["byte"].tolist() == [1, 1]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["empty"], file["w"] = h5py.Empty("f4"), np.ones(2)
    assert list(dnnc.load_arrays(tmp_path / "a.h5")) == ["w"]
    dnnc.save_arrays(tmp_path / "b.safetensors", {"w": np.arange(3, dtype=">i4")})
    assert dnnc.load_arrays(tmp_path / "b.safetensors")["w"].tolist() == [0, 1, 2]


def noisy(p: Any, x: Any, *, key: Any) -> Any:
    noise = xp.astype(key, xp.float32) * np.float32(2**-32)
    return xp.mean((xp.tanh(x @ p["w"]) * noise[0] - noise[1]) ** 2)


def made(optimizer: Any) -> Any:
    w = np.linspace(-1, 1, 20, dtype=np.float32).reshape(4, 5)
    return dnnc.train_step(noisy, optimizer, {"w": w}, threads=1, accumulate=2, loss_scale="dynamic", seed=5)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    batches = [RNG.standard_normal((6, 4)).astype(np.float32) for _ in range(14)]

    def run(step: Any, scheduler: Any, first: int, last: int) -> None:
        for x in batches[first:last]:
            step(x)
            scheduler.step()

    whole = optim.Adam(lr=0.05)
    reference, scheduler = made(whole), optim.lr_scheduler.CosineAnnealingLR(whole, 14)
    run(reference, scheduler, 0, 14)
    want = reference.state_dict()
    path = tmp_path / "run.npz"
    for kill in RNG.choice(np.arange(1, 14), 4, replace=False):
        opt = optim.Adam(lr=0.05)
        step, scheduler = made(opt), optim.lr_scheduler.CosineAnnealingLR(opt, 14)
        run(step, scheduler, 0, int(kill))
        step.save(path)
        schedule = scheduler.state_dict()
        del step, opt
        opt = optim.Adam(lr=0.9)
        again = made(opt)
        scheduler = optim.lr_scheduler.CosineAnnealingLR(opt, 14)
        again.load(path)
        scheduler.load_state_dict(schedule)
        run(again, scheduler, int(kill), 14)
        assert same(want, {n: np.asarray(a) for n, a in again.state_dict().items()}), f"killed after {kill} calls"
    other = dnnc.train_step(lambda p, x: xp.mean(x @ p["v"]), optim.SGD(lr=0.1), {"v": np.ones(4)}, threads=1)
    with pytest.raises(dnnc.InputError, match=r"no params\.v"):
        other.load(path)
    dnnc.save_arrays(path, {"w": np.ones(3)})
    with pytest.raises(dnnc.ArtifactError, match="no training step"):
        other.load(path)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_run_that_is_killed_goes_on_to_the_same_bits() -> None:
    script = Path(__file__).resolve().parents[3] / "benchmarks" / "killed.py"
    subprocess.run([sys.executable, script, "--kills", "2", "--steps", "30"], check=True)
