"""What a module holds: names, state dicts, modes, dtypes, hooks; and modules as pure functions."""

from __future__ import annotations

import copy
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import dnnc
import dnnc.array as xp
import dnnc.nn.functional as F
from dnnc import nn
from dnnc.ir.errors import InputError

rng = np.random.default_rng(7)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight  # shared
        self.scale = nn.Parameter(np.ones(4, np.float32))
        self.register_buffer("offset", np.zeros(4, np.float32), persistent=False)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        h = F.relu(self.norm(self.first(x)))
        return self.second(self.drop(h)) * self.scale + self.offset


NAMES = ["scale", "first.weight", "first.bias", "norm.weight", "norm.bias", "second.bias"]


def batch(n: int = 6) -> Any:
    return xp.asarray(rng.standard_normal((n, 4)).astype(np.float32))


def same(a: Any, b: Any) -> bool:
    return bool(np.array_equal(np.asarray(a), np.asarray(b)))


@pytest.mark.slow
def test_names() -> None:
    net = Net()
    assert [n for n, _ in net.named_parameters()] == NAMES  # a shared parameter comes once
    assert len(list(net.parameters())) == 6 and all(p.requires_grad for p in net.parameters())
    assert [n for n, _ in net.named_parameters(remove_duplicate=False)] == [*NAMES[:5], "second.weight", "second.bias"]
    assert [n for n, _ in net.named_modules()] == ["", "first", "norm", "second", "drop"]
    assert [n for n, _ in net.named_children()] == ["first", "norm", "second", "drop"]
    buffers = ["offset", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert [n for n, _ in net.named_buffers()] == buffers
    assert set(net.state_dict()) == {*NAMES, "second.weight", *buffers[1:]}  # not the transient one
    assert net.get_parameter("first.weight") is net.first.weight and net.get_submodule("norm") is net.norm
    assert "second" in dir(net) and net.get_buffer("norm.running_var").shape == (4,)
    with pytest.raises(AttributeError, match="no module 'third'"):
        net.get_submodule("third")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = net.nothing
    del net.scale
    net.first.bias = None
    assert [n for n, _ in net.named_parameters()][:2] == ["first.weight", "norm.weight"]
    assert repr(net.second) == "Linear(in_features=4, out_features=4, bias=True)"
    assert "  (norm): BatchNorm1d(4, eps=1e-05" in repr(net)


@pytest.mark.slow
def test_modes() -> None:
    net = Net()
    assert net.training and not net.eval().drop.training and net.train().norm.training
    x = batch()
    net.eval()
    assert same(net(x), net(x))
    net.requires_grad_(False)
    assert not any(p.requires_grad for p in net.parameters())
    counted: list[str] = []
    net.apply(lambda m: counted.append(type(m).__name__))
    assert counted == ["Linear", "BatchNorm1d", "Linear", "Dropout", "Net"]
    seen: list[Any] = []
    hook = net.register_forward_hook(lambda m, args, y: seen.append(y.shape))
    first = net.register_forward_pre_hook(lambda m, args: (args[0][:2, :],))
    assert net(x).shape == (2, 4) and seen == [(2, 4)]
    hook.remove()
    first.remove()
    assert net(x).shape == (6, 4) and seen == [(2, 4)]


def test_state_dicts() -> None:
    net, other = Net().eval(), Net().eval()
    x, state = batch(), net.state_dict()
    assert other.load_state_dict(state) == ([], [])
    assert same(net(x), other(x)) and other.second.weight is other.first.weight
    net.first.bias += 1.0
    assert not same(state["first.bias"], net.first.bias)  # a snapshot
    assert net.first.bias.requires_grad and other.first.bias.requires_grad
    tensors = {n: torch.tensor(np.asarray(a)) for n, a in state.items()}
    other.load_state_dict(tensors)
    tensors["scale"] += 7  # nothing is shared with the tensor
    assert same(other.scale, state["scale"])
    broken = {n: a for n, a in state.items() if n != "norm.bias"} | {
        "more": np.ones(2),
        "first.weight": np.ones((4, 5)),
    }
    with pytest.raises(InputError, match=r"first.weight has shape \(4, 5\), expected \(4, 4\); norm.bias is missing;"):
        other.load_state_dict(broken)
    assert same(other.first.weight, state["first.weight"])  # all or nothing
    broken.pop("first.weight")
    with pytest.raises(InputError, match=r"begin with 'module\.': take {n\[7:\]: a for"):
        other.load_state_dict({f"module.{n}": a for n, a in state.items()})
    found = other.load_state_dict(broken, strict=False)
    assert found.missing_keys == ["first.weight", "norm.bias"] and found.unexpected_keys == ["more"]


@pytest.mark.slow
def test_copies_and_types() -> None:
    net = Net().eval()
    x = batch()
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert same(net(x), other(x)) and other.second.weight is other.first.weight
        assert isinstance(other.scale, nn.Parameter) and other.scale.requires_grad
        other.scale *= 2.0
        assert not same(net.scale, other.scale)
    net.double()
    assert {p.dtype for p in net.parameters()} == {xp.float64} and net.norm.num_batches_tracked.dtype == xp.int64
    assert net(x.astype("float64")).dtype == xp.float64 and net.first.weight.requires_grad
    with pytest.raises(InputError, match="linear: expected arrays of one dtype, got input float32, weight float64"):
        net(x)
    net.half()
    assert net(x.astype("float16")).dtype == xp.float16
    for made in (net.bfloat16(), nn.LSTM(4, 4, dtype=xp.bfloat16), nn.GRU(4, 4).to(xp.bfloat16)):
        assert {p.dtype for p in made.parameters()} == {xp.bfloat16}
    y = F.softmax(Net().eval().bfloat16()(x.astype("bfloat16")), 1)
    assert y.dtype == xp.bfloat16
    labels = np.zeros(len(y), np.int64)
    loss, wide = F.cross_entropy(y, labels), F.cross_entropy(y.astype("float32"), labels)
    assert loss.dtype == xp.bfloat16 and abs(float(loss) - float(wide)) < 0.02
    assert F.gumbel_softmax(y).dtype == xp.bfloat16 and Net().bfloat16().float().scale.dtype == xp.float32
    with pytest.raises(InputError, match="expected a float dtype, got int64"):
        net.to("int64")


@pytest.mark.slow
def test_steps_line_by_line() -> None:
    dnnc.random.seed(1)
    net = Net()
    losses = []
    points = np.random.default_rng(0).standard_normal((32, 4)).astype(np.float32)
    x, t = xp.asarray(points), xp.asarray(points.argmax(1))
    for _ in range(30):
        net.zero_grad()
        loss = F.cross_entropy(net(x), t)
        loss.backward()
        for p in net.parameters():
            p -= 0.5 * p.grad
        losses.append(float(loss))
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    assert int(net.norm.num_batches_tracked) == 30 and not net.norm.running_mean._parts[0].tracked


def test_wrong_parts() -> None:
    class Early(nn.Module):
        def __init__(self) -> None:
            self.part = nn.Identity()

    with pytest.raises(InputError, match=r"call super\(\).__init__\(\) before"):
        Early()
    net = Net()
    with pytest.raises(InputError, match=r"Net.first is a Module: expected one or None, got an int"):
        net.first = 3
    with pytest.raises(InputError, match=r"Net\.scale is a Parameter: expected one or None, got an Array"):
        net.scale = batch()
    with pytest.raises(InputError, match="Net has an attribute 'forward' already"):
        net.register_buffer("forward", None)
    with pytest.raises(InputError, match=r"'a\.b' is no name"):
        net.add_module("a.b", nn.Identity())
    with pytest.raises(InputError, match="has no method forward"):
        nn.Module()()
    with pytest.raises(InputError, match="missing a required argument: 'kernel_size'"):
        nn.MaxPool2d()
    with pytest.raises(InputError, match="5 and 4 channels do not divide into 2 groups"):
        nn.Conv2d(5, 4, 3, groups=2)


# --- as functions -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_functional_call() -> None:
    net = Net()
    x, key = batch(), dnnc.random.key(5)
    before = net.state_dict()
    params = {n: p * 2 for n, p in net.named_parameters()}
    a, buffers = nn.functional_call(net, params, x, rngs=key, return_buffers=True)
    b = nn.functional_call(net, (params, dict(net.named_buffers())), x, rngs=key)
    assert same(a, b) and not same(a, nn.functional_call(net, params, x, rngs=dnnc.random.key(6)))
    assert all(same(before[n], v) for n, v in net.state_dict().items())  # the module stays as it is
    assert int(buffers["norm.num_batches_tracked"]) == 1 and not same(buffers["norm.running_mean"], np.zeros(4))
    other = Net()
    other.load_state_dict({**before, **params, "second.weight": params["first.weight"]})
    assert same(nn.functional_call(other, {}, x, rngs=key), a)
    with pytest.raises(InputError, match=r"Net has no first\.wait"):
        nn.functional_call(net, {"first.wait": x}, x)
    with pytest.raises(InputError, match=r"first.bias has shape \(5,\), expected \(4,\)"):
        nn.functional_call(net, {"first.bias": np.ones(5, np.float32)}, x)
    with pytest.raises(InputError, match=r"first.weight and second.weight are one array"):
        nn.functional_call(net, {"first.weight": batch(4), "second.weight": batch(4)}, x, rngs=key)


@pytest.mark.slow
def test_a_traced_step_is_the_eager_one() -> None:
    net = Net()
    x, t, key = batch(), xp.asarray(rng.integers(0, 4, 6)), dnnc.random.key(2)
    params, buffers = dict(net.named_parameters()), dict(net.named_buffers())

    def loss(params: Any, buffers: Any, x: Any, t: Any, key: Any) -> Any:
        y, new = nn.functional_call(net, (params, buffers), x, rngs=key, return_buffers=True)
        return F.cross_entropy(y, t), new

    step = dnnc.jit(dnnc.value_and_grad(loss, has_aux=True))
    (value, new), gradients = step(params, buffers, x, t, key)
    eager, again = loss(params, buffers, x, t, key)
    eager.backward()
    np.testing.assert_allclose(float(value), float(eager), 1e-5)
    for name, p in params.items():
        np.testing.assert_allclose(np.asarray(gradients[name]), np.asarray(p.grad), 1e-3, 1e-5)
    for name, b in again.items():
        np.testing.assert_allclose(np.asarray(new[name]), np.asarray(b), 1e-5)
    assert same(copy.deepcopy(net).norm.running_mean, net.norm.running_mean)  # nothing of the trace is left in it


@pytest.mark.slow
def test_traces_without_state() -> None:
    net, x = Net(), batch()
    with pytest.raises(
        InputError, match=r"test_state.py:\d+: a buffer, such as a running statistic, would take a value"
    ):
        dnnc.jit(lambda x: net(x))(x)
    net.norm.eval()
    with pytest.raises(InputError, match=r"dropout: a draw in a traced function needs a key"):
        dnnc.jit(lambda x: net(x))(x)
    net.eval()
    np.testing.assert_allclose(np.asarray(dnnc.jit(lambda x: net(x))(x)), np.asarray(net(x)), 1e-5, 1e-6)


def test_containers() -> None:
    a, b, c = nn.Identity(), nn.ReLU(), nn.Tanh()
    row = nn.Sequential(a, b)
    row.append(c)
    assert len(row) == 3 and row[-1] is c and list(row[1:]) == [b, c] and [*row] == [a, b, c]
    del row[0]
    row.insert(0, a)
    assert [n for n, _ in row.named_children()] == ["0", "1", "2"] and row[0] is a
    named = nn.Sequential({"in": a, "out": b})
    assert [n for n, _ in named.named_children()] == ["in", "out"]
    listed, held = nn.ModuleList([a, b]), nn.ModuleDict({"a": a})
    listed += [c]
    held["b"] = b
    assert len(listed) == 3 and held["b"] is b and "a" in held and list(held) == ["a", "b"]
    own = nn.ParameterDict({"w": np.ones(2)})
    assert [n for n, _ in own.named_parameters()] == ["w"]
    assert len(list(nn.ParameterList([np.ones(2), np.ones(3)]).parameters())) == 2


@pytest.mark.slow
def test_first_values() -> None:
    dnnc.random.seed(3)
    w = nn.Parameter(np.zeros((64, 32), np.float32))
    bounds = {"kaiming_uniform_": (6 / 32) ** 0.5, "xavier_uniform_": (6 / 96) ** 0.5}
    for name, bound in bounds.items():
        got = np.asarray(getattr(nn.init, name)(w))
        assert 0.95 * bound < np.abs(got).max() <= bound and w.requires_grad
    np.testing.assert_allclose(np.std(np.asarray(nn.init.kaiming_normal_(w, nonlinearity="relu"))), 0.25, 0.1)
    q = np.asarray(nn.init.orthogonal_(w, 2.0))
    np.testing.assert_allclose(q.T @ q, 4 * np.eye(32), atol=1e-4)
    t = np.asarray(nn.init.trunc_normal_(w, 1.0, 2.0, 0.0, 1.5))
    assert t.min() >= 0 and t.max() <= 1.5 and 0.7 < t.mean() < 0.85
    assert np.all((np.asarray(nn.init.sparse_(w, 0.25)) == 0).sum(0) == 16)
    assert same(nn.init.eye_(w), np.eye(64, 32)) and same(nn.init.ones_(w), np.ones((64, 32)))
    filters = nn.init.dirac_(nn.Parameter(np.ones((4, 2, 3), np.float32)), 2)
    assert same(filters, torch.nn.init.dirac_(torch.empty(4, 2, 3), 2).numpy())
    with pytest.raises(InputError, match="'swash'"):
        nn.init.calculate_gain("swash")


@pytest.mark.slow
def test_layers_begin_as_in_torch() -> None:
    dnnc.random.seed(1)
    torch.manual_seed(1)
    for make in (
        lambda m: m.Linear(200, 100),
        lambda m: m.Conv2d(32, 64, 3, groups=2),
        lambda m: m.ConvTranspose2d(32, 64, 3),
        lambda m: m.Embedding(100, 50, padding_idx=3),
        lambda m: m.LSTM(40, 60),
        lambda m: m.MultiheadAttention(64, 4, kdim=32),
        lambda m: m.MultiheadAttention(64, 4),
        lambda m: m.BatchNorm2d(64),
        lambda m: m.TransformerEncoderLayer(64, 4, 100),
    ):
        theirs = make(torch.nn).state_dict()
        for name, a in make(nn).state_dict().items():
            x, y = np.asarray(a).astype(float), theirs[name].double().numpy()
            np.testing.assert_allclose(x.mean(), y.mean(), atol=0.4 * y.std() + 1e-9)
            np.testing.assert_allclose(x.std(), y.std(), 0.3)
            np.testing.assert_allclose(np.abs(x).max(), np.abs(y).max(), 0.3)


@pytest.mark.slow
def test_vectors_and_norms_of_parameters() -> None:
    ours = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False))
    theirs = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2, bias=False))
    ours.load_state_dict(theirs.bfloat16().state_dict())
    x = rng.standard_normal((4, 3)).astype(np.float32)
    ours(xp.asarray(x)).sum().backward()
    theirs.float()(torch.tensor(x)).sum().backward()
    utils = torch.nn.utils
    vector = nn.utils.parameters_to_vector(ours.parameters())
    assert same(vector, utils.parameters_to_vector(theirs.parameters()).detach().numpy())
    norms = [m.get_total_norm([p.grad for p in n.parameters()]) for m, n in ((nn.utils, ours), (utils, theirs))]
    assert float(norms[0]) == pytest.approx(float(norms[1]), rel=1e-6)
    for m, n, norm in ((nn.utils, ours, norms[0]), (utils, theirs, norms[1])):
        m.clip_grads_with_norm_(n.parameters(), 0.5, norm)
    for p, t in zip(ours.parameters(), theirs.parameters()):
        np.testing.assert_allclose(np.asarray(p.grad), t.grad.numpy(), 1e-5)
    nn.utils.vector_to_parameters(vector * 2, ours.parameters())
    assert same(nn.utils.parameters_to_vector(ours.parameters()), vector * 2) and ours[0].weight.requires_grad
    with pytest.raises(InputError, match=r"vec has shape \(11,\), expected \(12,\)"):
        nn.utils.vector_to_parameters(vector[1:], ours.parameters())


def test_functional_calls_of_threads() -> None:
    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(np.zeros(3))

        def forward(self, x: Any) -> Any:
            before = self.w
            time.sleep(1e-3)
            assert self.w is before
            return x + self.w

    net = Slow()
    values = [np.full(3, float(k)) for k in range(8)]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda v: nn.functional_call(net, {"w": v}, xp.asarray(v)).tolist(), values))
    assert made == [[2.0 * k] * 3 for k in range(8)] and net.w.tolist() == [0.0] * 3


def test_arrays_of_other_libraries_are_copied() -> None:
    t = torch.ones(3)
    copied, shared = xp.asarray(t), xp.asarray(t.numpy(), copy=False)
    t[0] = 5.0
    assert copied.tolist() == [1.0, 1.0, 1.0] and shared.tolist() == [5.0, 1.0, 1.0]
