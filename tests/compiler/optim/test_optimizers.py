"""Every optimizer over 20 steps against torch.optim in float64; define-by-run and the compiled step agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dnnc
import dnnc.array as xp
from dnnc import optim
from dnnc.array.lazy import PROGRAMS_MADE, Call

RNG = np.random.default_rng(0)
WEIGHTS = {"w": RNG.standard_normal((5, 4)), "b": RNG.standard_normal(4), "v": RNG.standard_normal((4, 2))}
BATCHES = [(RNG.standard_normal((8, 5)), RNG.standard_normal((8, 2))) for _ in range(20)]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    ("Adam", {}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("Adam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("AdamW", {"lr": 0.01, "amsgrad": True}),
    ("NAdam", {"weight_decay": 0.1}),
    ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("RAdam", {"lr": 0.1, "weight_decay": 0.1}),
    ("RAdam", {"lr": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("Adamax", {"lr": 0.1, "weight_decay": 0.1}),
    ("ASGD", {"lr": 0.1, "lambd": 0.1, "t0": 10, "weight_decay": 0.01}),
    ("Rprop", {"etas": (0.4, 1.5), "step_sizes": (1e-3, 0.1)}),
    ("Adagrad", {"lr_decay": 0.1, "weight_decay": 0.01, "initial_accumulator_value": 0.2}),
    ("RMSprop", {}),
    ("RMSprop", {"centered": True, "momentum": 0.9, "weight_decay": 0.1}),
    ("Adadelta", {"weight_decay": 0.01}),
    ("Adafactor", {"lr": 0.4, "weight_decay": 0.01}),
    ("Adafactor", {"beta2_decay": -0.5, "eps": (0.3, 0.7), "d": 1.5}),
]


def loss_fn(p: Any, x: Any, y: Any) -> Any:
    return xp.mean((xp.tanh(x @ p["w"] + p["b"]) @ p["v"] - y) ** 2)


def leaves() -> dict[str, Any]:
    params = {n: xp.asarray(a) for n, a in WEIGHTS.items()}
    for p in params.values():
        p.requires_grad = True
    return params


def by_torch(make: Callable[[Any], Any], schedule: Callable[[Any], Any] | None = None) -> list[np.ndarray]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        w, b, v = params = [torch.tensor(a, requires_grad=True) for a in WEIGHTS.values()]
        opt = make(params)
        scheduler = schedule(opt) if schedule else None
        for x, y in BATCHES:
            opt.zero_grad()
            ((torch.tanh(torch.tensor(x) @ w + b) @ v - torch.tensor(y)) ** 2).mean().backward()
            opt.step()
            if scheduler:
                scheduler.step()
        return [p.detach().numpy() for p in params]
    finally:
        torch.set_default_dtype(before)


def by_run(make: Callable[[Any], Any], schedule: Callable[[Any], Any] | None = None) -> list[np.ndarray]:
    params = leaves()
    opt = make(list(params.values()))
    scheduler = schedule(opt) if schedule else None
    for x, y in BATCHES:
        opt.zero_grad()
        loss_fn(params, xp.asarray(x), xp.asarray(y)).backward()
        opt.step()
        if scheduler:
            scheduler.step()
    return [np.asarray(p) for p in params.values()]


def by_step(opt: Any, scheduler: Any = None, **options: Any) -> list[np.ndarray]:
    step = dnnc.train_step(loss_fn, opt, WEIGHTS, threads=1, **options)
    for x, y in BATCHES:
        step(x, y)
        if scheduler:
            scheduler.step()
    assert step.traces == 1
    return [np.asarray(p) for p in step.params.values()]


def same(got: list[np.ndarray], want: list[np.ndarray]) -> None:
    for a, b in zip(got, want):
        assert np.abs(a - b).max() <= 1e-12 * np.abs(b).max()


@pytest.mark.family("long")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda v: v if isinstance(v, str) else "-".join(v))
def test_against_torch(name: str, options: dict[str, Any]) -> None:
    want = by_torch(lambda p: getattr(torch.optim, name)(p, **options))
    assert max(np.abs(a - b).max() for a, b in zip(want, WEIGHTS.values())) > 1e-3
    same(by_run(lambda p: getattr(optim, name)(p, **options)), want)
    same(by_step(getattr(optim, name)(**options)), want)


def orthogonal(u: np.ndarray) -> np.ndarray:
    """Newton and Schulz's iteration of Jordan et al., 2024, in float64."""
    x = u / max(np.linalg.norm(u), 1e-7)
    for _ in range(5):
        s = x @ x.T
        x = 3.4445 * x + (-4.7750 * s + 2.0315 * s @ s) @ x
    return x


@pytest.mark.slow
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_against_its_source_and_torch(adjust: str) -> None:
    factor = {n: max(1, r / c) ** 0.5 if adjust == "original" else 0.2 * max(r, c) ** 0.5
              for n, (r, c) in (("w", (5, 4)), ("v", (4, 2)))}  # fmt: skip
    tensors = {n: torch.tensor(a, requires_grad=True) for n, a in WEIGHTS.items()}
    bias = torch.optim.AdamW([tensors["b"]], lr=0.01, betas=(0.9, 0.95), eps=1e-7, weight_decay=0.1)
    means = {n: np.zeros_like(WEIGHTS[n]) for n in factor}
    for x, y in BATCHES:
        bias.zero_grad()
        w, b, v = tensors.values()
        ((torch.tanh(torch.tensor(x) @ w + b) @ v - torch.tensor(y)) ** 2).mean().backward()
        bias.step()
        for n, f in factor.items():
            p, g = tensors[n], tensors[n].grad.numpy()
            means[n] += 0.05 * (g - means[n])
            u = 0.95 * means[n] + 0.05 * g
            with torch.no_grad():
                p.copy_(p * (1 - 0.02 * 0.1) - 0.02 * f * torch.tensor(orthogonal(u.T).T))
            p.grad = None
    want = [a.detach().numpy() for a in tensors.values()]

    def make(params: Any = None, **options: Any) -> Any:
        groups = [["w", "v"], ["b"]] if params is None else [[params[0], params[2]], [params[1]]]
        return optim.Muon(
            [{"params": groups[0]}, {"params": groups[1], "use_muon": False, "lr": 0.01}],
            0.02,
            adjust_lr_fn=adjust,
            **options,
        )

    same(by_run(lambda p: make(p, ns_dtype="float64")), want)
    same(by_step(make(ns_dtype="float64")), want)
    matrices = by_torch(lambda p: torch.optim.Muon([p[0], p[2]], lr=0.02, adjust_lr_fn=adjust))
    ours = by_step(
        optim.Muon([{"params": ["w", "v"]}, {"params": "b", "use_muon": False, "lr": 0.0}], 0.02, adjust_lr_fn=adjust)
    )
    rounded = (3.4445 + 4.7750 + 2.0315) * 2**-9  # of the terms of an iteration, whose elements are at most about 1
    for n, a, b in zip(WEIGHTS, ours, matrices):
        assert np.abs(a - b).max() <= 20 * 0.02 * factor.get(n, 0) * rounded


def test_muon_says_what_it_takes() -> None:
    with pytest.raises(
        dnnc.InputError, match=r"shape \(4,\), expected a matrix; put it into a group with use_muon=False"
    ):
        by_step(optim.Muon(lr=0.02))
    with pytest.raises(dnnc.InputError, match="ns_steps=0, expected an integer from 1 to 99"):
        optim.Muon(ns_steps=0)
    with pytest.raises(dnnc.InputError, match=r"beta2_decay=0\.8, expected no positive number"):
        optim.Adafactor(beta2_decay=0.8)


def test_asgd_averages_what_comes_after_t0() -> None:
    p = xp.asarray(np.array([1.0, -2.0]))
    p.requires_grad = True
    opt, seen = optim.ASGD([p], lr=0.1, t0=3), []
    for _ in range(8):
        opt.zero_grad()
        xp.sum(p * p).backward()
        opt.step()
        seen.append(p.numpy())
    np.testing.assert_allclose(opt.state_dict()["state"][0]["ax"].numpy(), np.mean(seen[4:], axis=0), rtol=1e-12)


def lamb(p: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, t: int) -> tuple[np.ndarray, ...]:
    """Algorithm 2 of You et al., 2020, with lr 0.01, weight decay 0.1."""
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    r = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6) + 0.1 * p
    norms = np.linalg.norm(p), np.linalg.norm(r)
    return p - 0.01 * (norms[0] / norms[1] if min(norms) > 0 else 1) * r, m, v


@pytest.mark.slow
def test_lamb_against_its_paper() -> None:
    params = [*WEIGHTS.values()]
    moments = [(np.zeros_like(p), np.zeros_like(p)) for p in params]
    for t, (x, y) in enumerate(BATCHES, 1):
        w, b, v = (torch.tensor(p, requires_grad=True) for p in params)
        ((torch.tanh(torch.tensor(x) @ w + b) @ v - torch.tensor(y)) ** 2).mean().backward()
        made = [lamb(p, q.grad.numpy(), *s, t) for p, q, s in zip(params, (w, b, v), moments)]
        params, moments = [p for p, _, _ in made], [(m, s) for _, m, s in made]
    same(by_run(lambda p: optim.LAMB(p, lr=0.01, weight_decay=0.1)), params)
    same(by_step(optim.LAMB(lr=0.01, weight_decay=0.1)), params)


@pytest.mark.slow
def test_groups_and_schedules_against_torch() -> None:
    def make(lib: Any) -> Callable[[Any], Any]:
        return lambda p: lib.AdamW(
            [{"params": p[:1], "lr": 0.05, "betas": (0.8, 0.9)}, {"params": p[1:], "weight_decay": 0}], lr=0.1
        )

    want = by_torch(make(torch.optim), lambda o: torch.optim.lr_scheduler.OneCycleLR(o, [0.1, 0.2], 25))
    same(by_run(make(optim), lambda o: optim.lr_scheduler.OneCycleLR(o, [0.1, 0.2], 25)), want)
    by_name = optim.AdamW(
        [{"params": "w", "lr": 0.05, "betas": (0.8, 0.9)}, {"params": ["b", "v*"], "weight_decay": 0}], lr=0.1
    )
    same(by_step(by_name, optim.lr_scheduler.OneCycleLR(by_name, [0.1, 0.2], 25)), want)


@pytest.mark.slow
def test_one_program_a_step_found_again() -> None:
    params = leaves()
    opt = optim.Adam(params.values(), lr=0.01)
    for k, (x, y) in enumerate(BATCHES[:4]):
        opt.zero_grad()
        before = PROGRAMS_MADE.compiled
        loss = loss_fn(params, xp.asarray(x), xp.asarray(y))
        loss.backward()
        opt.param_groups[0]["lr"] *= 0.9
        opt.step()
        assert PROGRAMS_MADE.compiled - before <= (2 if k == 0 else 0)  # the first state is a program of its own
        assert all(p.requires_grad for p in params.values())


@pytest.mark.slow
def test_the_updates_of_a_step_are_one_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where parameters were updated a different number of times, of which their numbers tell."""
    params = [xp.asarray(np.full(3, float(k))) for k in range(20)]
    for p in params:
        p.requires_grad = True
    opt, made, other = optim.Adam(params, lr=0.1), [], [np.full(3, float(k)) for k in range(20)]
    init = Call.__init__
    for k in range(4):
        opt.zero_grad()
        used = [n for n in range(20) if k != 1 or n % 2]
        sum((xp.sum(params[n]) for n in used), xp.asarray(0.0)).backward()
        monkeypatch.setattr(Call, "__init__", lambda *args: (made.append(k), init(*args))[1])
        opt.step()
        monkeypatch.setattr(Call, "__init__", init)
        for n in used:
            other[n] -= 0.1  # of a gradient that stays the same, each step of Adam is as long as its rate
    assert made[-3:] == [1, 2, 3]
    for p, want in zip(params, other):
        np.testing.assert_allclose(p.numpy(), want, atol=1e-6)


@pytest.mark.slow
def test_a_state_of_torch_goes_on_here() -> None:
    w, b, v = theirs = [torch.tensor(a, requires_grad=True) for a in WEIGHTS.values()]
    other, params = torch.optim.Adam(theirs, lr=0.01), leaves()
    opt = optim.Adam(params.values(), lr=0.5)
    for k, (x, y) in enumerate(BATCHES[:10]):
        other.zero_grad()
        ((torch.tanh(torch.tensor(x) @ w + b) @ v - torch.tensor(y)) ** 2).mean().backward()
        other.step()
        if k == 4:
            opt.load_state_dict(other.state_dict())
            for p, q in zip(params.values(), theirs):
                p[...] = q.detach().numpy()
        if k > 4:
            opt.zero_grad()
            loss_fn(params, xp.asarray(x), xp.asarray(y)).backward()
            opt.step()
    same([np.asarray(p) for p in params.values()], [q.detach().numpy() for q in theirs])
    again = optim.Adam(params.values())
    again.load_state_dict(opt.state_dict())
    assert again.param_groups[0]["lr"] == 0.01
    assert again.state_dict()["state"][1]["step"] == 10


@pytest.mark.slow
def test_a_parameter_without_a_gradient_stays() -> None:
    params = leaves()
    opt = optim.SGD(params.values(), lr=0.1, momentum=0.9)
    opt.step(lambda: xp.sum(params["w"] * params["w"]).backward())
    assert np.array_equal(np.asarray(params["b"]), WEIGHTS["b"])
    assert np.allclose(np.asarray(params["w"]), 0.8 * WEIGHTS["w"])
    opt.zero_grad()
    assert params["w"].grad is None


def test_a_step_without_a_gradient_is_told() -> None:
    """PyTorch is silent about a forgotten `backward`."""
    w = xp.asarray(np.ones(3))
    w.requires_grad = True
    optimizer = optim.SGD([w], lr=0.1)
    with pytest.warns(dnnc.DnncWarning, match=r"SGD.step changed nothing: .*call loss\.backward\(\) first"):
        optimizer.step()
    assert w.tolist() == [1, 1, 1]


def test_bad_options() -> None:
    w = xp.asarray(np.zeros(3))
    for message, call in (
        ("no negative number", lambda: optim.SGD([w], lr=-1)),
        ("nesterov needs a momentum", lambda: optim.SGD([w], nesterov=True)),
        ("betas", lambda: optim.Adam([w], betas=(0.9, 1.0))),
        ("is in two groups", lambda: optim.SGD([w, w])),
        ("expected arrays of dnnc.array", lambda: optim.SGD([np.zeros(3)])),
        ("expected real floats", lambda: optim.SGD([xp.asarray([1, 2])])),
        ("the list of parameters is empty", lambda: optim.SGD([])),
        ("no params", lambda: optim.SGD([{"lr": 0.1}])),
        ("options lr, momentum", lambda: optim.SGD([{"params": [w], "beta": 0.1}])),
        ("made without arrays", lambda: optim.SGD(lr=0.1).step()),
        ("no group of SGD takes", lambda: dnnc.train_step(loss_fn, optim.SGD([{"params": "w"}]), WEIGHTS)),
    ):
        with pytest.raises(dnnc.InputError, match=message):
            call()
