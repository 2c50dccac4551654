"""`dnnc.train_step`: the whole iteration as one program."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from one_device import one_device

import dnnc
import dnnc.array as xp
from dnnc import nn, optim
from dnnc.nn import functional as F

RNG = np.random.default_rng(0)
WEIGHTS = {"w": RNG.standard_normal((5, 6)), "b": np.zeros(6), "v": RNG.standard_normal((6, 2))}
BATCHES = [(RNG.standard_normal((8, 5)), RNG.standard_normal((8, 2))) for _ in range(12)]


def loss_fn(p: Any, x: Any, y: Any) -> Any:
    return xp.mean((xp.tanh(x @ p["w"] + p["b"]) @ p["v"] - y) ** 2)


def arrays(step: Any) -> dict[str, np.ndarray]:
    return {n: np.array(a.numpy()) for n, a in step.state_dict().items()}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    yield from one_device(monkeypatch, tmp_path)


@pytest.mark.slow
def test_the_state_lives_on_the_device(device: Any) -> None:
    step = dnnc.train_step(loss_fn, optim.Adam(lr=0.1), WEIGHTS, target="cuda", clip_norm=0.5)
    host = dnnc.train_step(loss_fn, optim.Adam(lr=0.1), WEIGHTS, threads=1, clip_norm=0.5)
    for k, (x, y) in enumerate(BATCHES[:4]):
        batch = (x, y) if k % 2 else (xp.asarray(x, device="cuda:0"), y)
        assert abs(float(step(*batch)) - float(host(x, y))) < 1e-12
    assert step.params["w"].device == "cuda:0"
    shown = step.params["w"]
    before = shown.numpy().copy()
    step(*BATCHES[4])
    assert np.array_equal(shown.numpy(), before)
    assert not np.array_equal(step.params["w"].numpy(), before)


@pytest.mark.slow
def test_nothing_is_traced_again() -> None:
    opt = optim.SGD(lr=0.1, momentum=0.9)
    step = dnnc.train_step(loss_fn, opt, WEIGHTS, threads=1)
    scheduler = optim.lr_scheduler.ExponentialLR(opt, 0.9)
    for x, y in BATCHES:
        step(x, y)
        scheduler.step()
        opt.param_groups[0]["momentum"] *= 0.99
    assert step.traces == 1 and step.step_count == len(BATCHES)
    opt.param_groups[0]["weight_decay"] = 0.1  # another program
    step(*BATCHES[0])
    step(BATCHES[0][0][:3], BATCHES[0][1][:3])
    assert step.traces == 3


@pytest.mark.slow
def test_what_was_shown_stays() -> None:
    given = {n: a.copy() for n, a in WEIGHTS.items()}
    step = dnnc.train_step(loss_fn, optim.SGD(lr=0.1), given, threads=1)
    first = step.params
    lazy = first["w"] * 2
    step(*BATCHES[0])
    step(*BATCHES[1])
    assert all(np.array_equal(np.asarray(first[n]), a) and np.array_equal(given[n], a) for n, a in WEIGHTS.items())
    assert np.array_equal(np.asarray(lazy), 2 * WEIGHTS["w"])


@pytest.mark.slow
def test_a_profile_leaves_the_state() -> None:
    step = dnnc.train_step(loss_fn, optim.SGD(lr=0.1, momentum=0.9), WEIGHTS, threads=1)
    step(*BATCHES[0])
    before = arrays(step)
    profile = step.profile(*BATCHES[1], repeats=2)
    assert step.traces == 1 and profile.repeats == 2 and sum(k.seconds for k in profile.kernels) > 0
    after = arrays(step)
    assert all(np.array_equal(a, after[n]) for n, a in before.items())


@pytest.mark.slow
def test_trees_and_further_results() -> None:
    def loss(params: Any, batch: Any, *, key: Any) -> Any:
        w, (b,) = params
        h = batch["x"] @ w + b
        noise = xp.astype(key, xp.float64)
        return xp.mean(h * h), {"h": h, "noise": noise}

    step = dnnc.train_step(loss, optim.SGD(lr=0.1), [WEIGHTS["w"], (WEIGHTS["b"],)], threads=1, seed=3)
    value, aux = step({"x": BATCHES[0][0]})
    other = step({"x": BATCHES[0][0]})[1]["noise"]
    assert np.allclose(np.asarray(aux["h"]), BATCHES[0][0] @ WEIGHTS["w"])
    assert np.isclose(float(value), np.mean(np.asarray(aux["h"]) ** 2))
    assert not np.array_equal(np.asarray(aux["noise"]), np.asarray(other))
    again = dnnc.train_step(loss, optim.SGD(lr=0.1), [WEIGHTS["w"], (WEIGHTS["b"],)], threads=1, seed=3)
    assert np.array_equal(np.asarray(again({"x": BATCHES[0][0]})[1]["noise"]), np.asarray(aux["noise"]))
    assert isinstance(step.params, list) and isinstance(step.params[1], tuple)


@pytest.mark.slow
def test_accumulation_is_the_step_of_the_whole_batch() -> None:
    parts = dnnc.train_step(loss_fn, optim.Adam(lr=0.1), WEIGHTS, threads=1, accumulate=4, clip_norm=0.3)
    whole = dnnc.train_step(loss_fn, optim.Adam(lr=0.1), WEIGHTS, threads=1, clip_norm=0.3)
    for k in range(0, len(BATCHES), 4):
        xs, ys = zip(*BATCHES[k : k + 4])
        for x, y in zip(xs, ys):
            parts(x, y)
        whole(np.concatenate(xs), np.concatenate(ys))
    for n in WEIGHTS:
        assert np.allclose(np.asarray(parts.params[n]), np.asarray(whole.params[n]), rtol=1e-12, atol=1e-14)
    assert parts.step_count == 3 and parts.traces == 3  # a program for the first, the middle and the last call


@pytest.mark.slow
def test_clipping_is_that_of_define_by_run() -> None:
    params = {n: xp.asarray(a) for n, a in WEIGHTS.items()}
    for p in params.values():
        p.requires_grad = True
    opt = optim.SGD(params.values(), lr=0.5)
    step = dnnc.train_step(loss_fn, optim.SGD(lr=0.5), WEIGHTS, threads=1, clip_value=0.2, clip_norm=0.1)
    for x, y in BATCHES[:3]:
        opt.zero_grad()
        loss_fn(params, xp.asarray(x), xp.asarray(y)).backward()
        optim.clip_grad_value_(params.values(), 0.2)
        norm = optim.clip_grad_norm_(params.values(), 0.1)
        opt.step()
        step(x, y)
        assert float(norm) > 0.1
    for n in WEIGHTS:
        assert np.allclose(np.asarray(params[n]), np.asarray(step.params[n]), rtol=1e-12, atol=1e-14)


def scaled_loss(p: Any, x: Any, factor: Any) -> Any:
    return xp.mean((x @ p["w"]) ** 2) * factor


@pytest.mark.slow
def test_dynamic_loss_scale_skips_overflows() -> None:
    w = RNG.standard_normal((5, 6)).astype(np.float16)
    step = dnnc.train_step(scaled_loss, optim.Adam(lr=0.01), {"w": w}, threads=1, loss_scale="dynamic")
    x, one = BATCHES[0][0].astype(np.float16), np.float16(1)
    for _ in range(4):
        step(x, one)  # the first scale, 2**16, is no float16: the first step is skipped
    calm = arrays(step)
    assert calm["step"] == 3 and calm["good"] == 3
    scale = float(calm["scale"])
    step(x, np.float16(60000))
    after = arrays(step)
    assert float(after["scale"]) == scale / 2 and after["good"] == 0
    assert all(np.array_equal(after[n], calm[n]) for n in calm if n.startswith(("params", "optimizer", "step")))
    step(x, one)
    assert step.step_count == 4 and not np.array_equal(arrays(step)["params.w"], calm["params.w"])


@pytest.mark.slow
def test_masters_keep_small_updates() -> None:
    def loss(p: Any, x: Any) -> Any:
        return xp.sum(p["w"] * x)

    ones = np.ones(2048, np.float16)
    moved = {}
    for half in ("master", "nearest", "stochastic"):
        step = dnnc.train_step(loss, optim.SGD(lr=1e-4, half=half), {"w": ones}, threads=1)
        for _ in range(40):
            step(ones)
        moved[half] = 1 - np.asarray(step.params["w"]).astype(np.float64)
    assert np.array_equal(moved["nearest"], np.zeros(2048))  # 1e-4 is less than half of the spacing below 1
    assert np.allclose(moved["master"], 40e-4, atol=2.5e-4)
    spread = 2**-11 * np.sqrt(40 * 0.2 * 0.8 / 2048)
    assert abs(moved["stochastic"].mean() - 40e-4) < 4 * spread


@pytest.mark.slow
def test_statistics_name_the_first_overflow() -> None:
    def loss(p: Any, x: Any) -> Any:
        return xp.mean(xp.exp(x @ p["a"]) @ p["b"])

    params = {"a": np.full((3, 4), 0.5, np.float32), "b": np.ones((4, 2), np.float32)}
    step = dnnc.train_step(loss, optim.SGD(lr=0.0), params, threads=1, statistics="cheap")
    x = np.ones((2, 3), np.float32)
    step(x)
    s = step.statistics
    assert [n[:12] for n in s.names[:2]] == ["matmul of a ", "matmul of b "]  # and nothing of the mean
    assert s.names[2:] == ("loss", "gradient of a", "gradient of b")
    assert s[s.names[0]] == {"absmax": 1.5, "mean": 1.5, "saturation": 0.0}
    assert np.isclose(s["gradient of b"]["absmax"], np.exp(1.5) / 2)
    s.check(1)
    checked = dnnc.train_step(loss, optim.SGD(lr=0.0), params, threads=1, statistics="check")
    checked(x)
    with pytest.raises(dnnc.NonFiniteError, match=r"step 2: matmul of b at .*test_step.py"):
        checked(x * 100)
    step(x * 100)
    assert step.statistics.first_overflow() == s.names[1]
    params = {n: p.astype(np.float64) for n, p in params.items()}
    wide = dnnc.train_step(loss, optim.SGD(lr=0.0), params, threads=1, statistics="check")
    wide(x * 100.0)  # exp(150) is beyond float32
    assert wide.statistics["gradient of b"]["absmax"] > 1e60
    with pytest.raises(dnnc.NonFiniteError, match=r"step 2: matmul of b at .*test_step.py"):
        step.statistics.check(2)


@pytest.mark.slow
def test_the_watchdog_names_the_first_layer_of_a_module_that_overflows() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 2))
    net[3].weight[...] = xp.full((8, 16), 1e38, dtype=np.float32)
    net[0].bias[...] = xp.full((4,), 9.0, dtype=np.float32)
    step = dnnc.train_step(lambda m, x: xp.mean(m(x)), optim.SGD(lr=0.0), net, threads=1, statistics="check")
    with pytest.raises(dnnc.NonFiniteError, match=r"step 1: matmul of 3\.weight at "):
        step(np.ones((2, 1, 4, 4), np.float32))


@pytest.mark.slow
def test_a_module_sees_its_parameters() -> None:
    model = Small()
    opt = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = dnnc.train_step(lambda m, x: xp.mean(m(x) ** 2), opt, model, threads=1)
    w, x = WEIGHTS["w"].copy(), BATCHES[0][0]
    count, v = 0, np.zeros_like(w)
    for _ in range(3):
        step(x)
        g = 2 * x.T @ (x @ w) / (x.shape[0] * w.shape[1])
        v = 0.9 * v + g
        w, count = w - 0.1 * v, count + 1
        if count == 2:
            assert np.allclose(np.asarray(model.w), w)
            assert model.w.requires_grad and model.calls.shape == ()
    assert np.allclose(np.asarray(model.w), w) and float(model.calls) == 3
    assert np.allclose(np.asarray(model(xp.asarray(x))), x @ w)
    assert step.params is model
    model.w[...] = 0  # what is written into a parameter counts
    assert float(step(x)) == 0.0


class Small:
    """What `train_step` asks of a module."""

    def __init__(self) -> None:
        self.w = xp.asarray(WEIGHTS["w"])
        self.w.requires_grad = True
        self.calls = xp.asarray(0.0)

    def named_parameters(self) -> Any:
        return iter([("w", self.w)])

    def named_buffers(self) -> Any:
        return iter([("calls", self.calls)])

    def parameters(self) -> Any:
        return iter([self.w])

    def __call__(self, x: Any) -> Any:
        self.calls[...] = self.calls + 1
        return x @ self.w


@pytest.mark.slow
def test_grad_scaler_is_torchs() -> None:
    w = xp.asarray(np.ones(3, np.float16))
    w.requires_grad = True
    opt, scaler = optim.SGD([w], lr=0.5), optim.GradScaler(1024.0, growth_interval=2)
    for factor in (1.0, 1.0, 200.0):
        opt.zero_grad()
        scaler.scale(xp.sum(w * np.float16(0.01)) * factor).backward()
        scaler.step(opt)
        scaler.update()
    assert np.allclose(np.asarray(w), 1 - 2 * 0.005, atol=1e-3)  # the third step overflows at a scale of 2048 * 200
    assert scaler.get_scale() == 1024.0


def test_bad_arguments() -> None:
    sgd = optim.SGD(lr=0.1)
    for message, error, call in (
        ("expected an optimizer", dnnc.InputError, lambda: dnnc.train_step(loss_fn, "sgd", WEIGHTS)),
        ("no parameters", dnnc.InputError, lambda: dnnc.train_step(loss_fn, sgd, {})),
        ("expected real floats", dnnc.InputError, lambda: dnnc.train_step(loss_fn, sgd, {"n": np.arange(3)})),
        ("accumulate=0", dnnc.InputError, lambda: dnnc.train_step(loss_fn, sgd, WEIGHTS, accumulate=0)),
        ("clip_norm=-1", dnnc.InputError, lambda: dnnc.train_step(loss_fn, sgd, WEIGHTS, clip_norm=-1)),
        ("loss_scale='big'", dnnc.InputError, lambda: dnnc.train_step(loss_fn, sgd, WEIGHTS, loss_scale="big")),
        (
            r"loss_fn\(p.*, x.*, y.*\).* cannot take 2 arguments: missing a required argument: 'y'",
            dnnc.InputError,
            lambda: dnnc.train_step(loss_fn, sgd, WEIGHTS)(BATCHES[0][0]),
        ),
        ("statistics", dnnc.InputError, lambda: dnnc.train_step(loss_fn, sgd, WEIGHTS, statistics="all")),
        ("unknown option", dnnc.InputError, lambda: dnnc.train_step(loss_fn, sgd, WEIGHTS, thread=1)),
        (
            "one real float number",
            dnnc.GradientError,
            lambda: dnnc.train_step(lambda p, x: p["w"] * x, sgd, {"w": np.ones(2)})(np.ones(2)),
        ),
    ):
        with pytest.raises(error, match=message):
            call()


@pytest.mark.slow
def test_batches_are_trees() -> None:
    """A dict of arrays, a list in it, arrays that are converted first: one program for each structure."""

    def loss(p: Any, batch: Any) -> Any:
        return loss_fn(p, batch["x"], batch["rest"][0])

    step = dnnc.train_step(loss, optim.SGD(lr=0.1), WEIGHTS, threads=1)
    plain = dnnc.train_step(loss_fn, optim.SGD(lr=0.1), WEIGHTS, threads=1)
    for k, (x, y) in enumerate(BATCHES[:6]):
        given = (x, np.asfortranarray(x), xp.asarray(x) + 0.0)[k % 3]
        assert float(step({"x": given, "rest": [y]})) == float(plain(x, y))
    assert step.traces == 1
    step({"rest": [BATCHES[0][1]], "x": BATCHES[0][0]})
    assert step.traces == 2


@pytest.mark.slow
def test_a_state_in_blocks_is_shown_saved_and_loaded_in_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    weights = {
        "w": 0.1 * rng.standard_normal((20, 3, 3, 3), np.float32),
        "v": 0.1 * rng.standard_normal((24, 20, 1, 1), np.float32),
    }
    batches = [rng.standard_normal((n, 3, 6, 6), np.float32) for n in (2, 4, 2, 2)]

    def loss(p: Any, x: Any) -> Any:
        return xp.mean(F.conv2d(F.relu(F.conv2d(x, p["w"])), p["v"]) ** 2)

    def made(**options: Any) -> Any:
        return dnnc.train_step(loss, optim.SGD(lr=0.1, momentum=0.9), weights, accumulate=2, threads=1, **options)

    step, rows = made(), made(opt_level=1)
    for x in batches:
        assert abs(float(step(x)) - float(rows(x))) < 1e-5
    inputs = step.programs[-1].programs[-1].inputs
    assert sum(not t.row_major for t in inputs) >= 4
    assert all(t.row_major for t in rows.programs[-1].programs[-1].inputs)
    for name, a in arrays(rows).items():
        assert np.allclose(arrays(step)[name], a, atol=1e-5), name
    step.save(tmp_path / "state.npz")
    again = made()
    again(batches[0])
    again.load(tmp_path / "state.npz")
    before = arrays(step)
    assert step.profile(batches[0], repeats=2).total > 0
    assert all(np.array_equal(a, b) for a, b in zip(arrays(step).values(), before.values()))
    assert float(again(batches[0])) == float(step(batches[0]))
    f = step.programs[-1]  # called as any other executable
    given = [np.zeros(s.shape, s.dtype) for s in f.inputs]
    given[next(k for k, t in enumerate(inputs) if not t.row_major)][...] = 1
    results = [np.asarray(r) for r in f(*given)]
    assert [r.shape for r in results] == [s.shape for s in f.outputs]


@pytest.mark.slow
def test_statistics_of_images() -> None:
    """Of values that lie in blocks: a convolution of 20 channels, its filters' gradient, and a vector's."""
    rng = np.random.default_rng(2)
    params = {"w": rng.standard_normal((20, 3, 3, 3), np.float32), "b": rng.standard_normal(20).astype(np.float32)}
    x = rng.standard_normal((2, 3, 6, 6), np.float32)

    def loss(p: Any, x: Any) -> Any:
        return xp.mean(F.conv2d(x, p["w"], p["b"]) ** 2)

    step = dnnc.train_step(loss, optim.SGD(lr=0.0), params, threads=1, statistics="cheap")
    step(x)
    s = step.statistics
    gradient = dnnc.grad(loss)(params, x)
    y = F.conv2d(x, params["w"], params["b"])
    for name, a in (("gradient of w", gradient["w"]), ("gradient of b", gradient["b"]), (s.names[0], y)):
        assert np.allclose([s[name]["absmax"], s[name]["mean"]], [np.abs(a.numpy()).max(), a.numpy().mean()], atol=1e-5)
