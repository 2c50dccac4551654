"""`torch.compile(model, backend="dnnc")`: numbers, sizes, graph breaks, weights and views as torch has them, gradients,
and what a call costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_modules import same
from torch import Tensor, nn
from torch_modules import MODULES, made

from dnnc.ir.errors import DnncWarning
from support.times import in_a_quiet_round, quiet

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that torch hands over during a test."""
    from dnnc.torch import fallback

    found: list[Any] = []

    class Watched(fallback.Piece):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            found.append(self)

    monkeypatch.setattr(fallback, "Piece", Watched)
    return found


def compiled(module: Any, **more: Any) -> Callable[..., Any]:
    return torch.compile(module, backend="dnnc", options={"threads": 1, **more.pop("options", {})}, **more)


def test_the_backend_is_registered() -> None:
    assert "dnnc" in torch.compiler.list_backends()


@pytest.mark.family("cases")
@pytest.mark.parametrize("name", MODULES)
def test_module(name: str) -> None:
    module, args = made(name)
    same(compiled(module)(*args), module(*args))


def test_one_program_for_all_sizes(pieces: list[Any]) -> None:
    module, _ = made("causal")
    f = compiled(module, dynamic=True)
    for n, m in ((3, 5), (2, 5), (7, 4), (4, 9)):
        x = torch.randn(n, m, 16)
        same(f(x), module(x))
    assert len(pieces) == 1 and len(pieces[0].programs) == 1


def test_sizes_become_dynamic_by_themselves() -> None:
    module, _ = made("mlp")
    f = compiled(module)
    for n in (3, 5, 1, 8):
        x = torch.randn(n, 6)
        same(f(x), module(x))


def test_a_marked_size(pieces: list[Any]) -> None:
    module, _ = made("mlp")
    f = compiled(module)
    for n in (3, 5, 8):
        x = torch.randn(n, 6)
        torch._dynamo.mark_dynamic(x, 0)
        same(f(x), module(x))
    assert len(pieces) == 1


def test_a_number_that_changes(pieces: list[Any]) -> None:
    def f(x: Tensor, k: int) -> Tensor:
        return torch.arange(k) + x * k

    g = compiled(f, dynamic=True)
    for k in (3, 4, 6, 4):
        same(g(torch.tensor(2), k), f(torch.tensor(2), k))
    assert max(len(p.programs) for p in pieces) == 3  # no shape tells the number: a program for each


def test_graph_breaks(pieces: list[Any]) -> None:
    def f(x: Tensor) -> Tensor:
        y = torch.tanh(x) + 1
        if y.sum() > 0:
            y = y * 2
        rows = y[y[:, 0] > 0.5]
        return torch.exp(rows).sum(0)

    x = torch.randn(6, 3)
    same(compiled(f)(x), f(x))
    assert len(pieces) >= 2


class Counted(nn.Module):
    """Writes to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 3))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.cache[self.place] = x
        self.place += 1
        return self.cache.sum(0)


def test_buffers_are_written_back() -> None:
    a, b = Counted(), Counted()
    f = compiled(a)
    for _ in range(4):
        x = torch.randn(3)
        same(f(x), b(x))
    same(a.cache, b.cache)
    assert a.place == 4


def test_batch_norm_in_training() -> None:
    module, (x,) = made("residual")
    other, _ = made("residual")
    module.train(), other.train()
    f = compiled(module)
    for _ in range(2):
        same(f(x), other(x))
    same(dict(module.named_buffers()), dict(other.named_buffers()))


def test_weights_that_change(pieces: list[Any]) -> None:
    module, (x,) = made("cnn")
    f = compiled(module)
    f(x)
    for change in (lambda p: p.mul_(1.3), lambda p: setattr(p, "data", p.data * 0.7)):
        for p in module.parameters():
            change(p)
        same(f(x), module(x))
    (piece,) = pieces
    assert piece.last.shares


def test_two_modules_of_one_class() -> None:
    first, (x,) = made("mlp")
    torch.manual_seed(8)
    second = MODULES["mlp"]()[0]
    f, g = compiled(first), compiled(second)
    for _ in range(2):
        same(f(x), first(x))
        same(g(x), second(x))


def test_views_and_strides_are_torchs() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return x.t(), (x + 1).t(), x[1:], torch.sigmoid(x).permute(1, 0)

    x = torch.randn(3, 4)
    found, wanted = compiled(f)(x), f(x)
    same(found, wanted)
    assert [t.stride() for t in found] == [t.stride() for t in wanted]
    assert found[0].data_ptr() == x.data_ptr() and found[2].data_ptr() == x[1:].data_ptr()


@pytest.mark.parametrize("dynamic", [False, True])
def test_results_share_memory_as_torchs_do(dynamic: bool) -> None:
    """torch makes views again by strides and offset: of an argument, of a result, beside what is written."""

    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(x).t()
        return *x.chunk(2, 1), x[1:, ::2], y, y[:, 1:], y[2]

    def g(x: Tensor) -> tuple[Tensor, ...]:
        x.mul_(2)
        return x[:, 1:], x.sum()

    for h in (f, g):
        fast = compiled(h, dynamic=dynamic)
        for shape in ((3, 6), (4, 9)):
            x = torch.randn(shape)
            z = x.clone()
            found, wanted = fast(x), h(z)
            same(found, wanted)
            same(x, z)
            assert [t.stride() for t in found] == [t.stride() for t in wanted]
            for a, b, c, d in zip(found, found[1:], wanted, wanted[1:]):
                assert (a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()) == (
                    c.untyped_storage().data_ptr() == d.untyped_storage().data_ptr()
                )


def test_numbers_and_constants_from_sizes() -> None:
    def f(x: Tensor) -> Tensor:
        return x[torch.tensor([0, 2])] * x.shape[0] ** 0.5 + x.shape[1] / 3

    fast = compiled(f, dynamic=True)
    for shape in ((3, 4), (5, 7)):
        x = torch.randn(shape)
        same(fast(x), f(x))


def test_channels_last() -> None:
    module, (x,) = made("residual")
    module, x = module.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    y = compiled(module)(x)
    same(y, module(x))
    assert y.is_contiguous(memory_format=torch.channels_last)
    module.a.weight.mul_(2)
    same(compiled(module)(x), module(x))
    same(compiled(module)(x[:, :, ::2]), module(x[:, :, ::2]))  # neither order


def test_interpolation_stays_one_operator(pieces: list[Any]) -> None:
    x = torch.randn(1, 2, 5, 6)
    for more in ({"scale_factor": 2.0}, {"size": (9, 7)}, {"size": (9, 7), "align_corners": True}):
        f = lambda t, more=more: F.interpolate(t, mode="bilinear", **more)  # noqa: E731
        same(compiled(f)(x), f(x))
    h = lambda t, u: F.interpolate(t, size=u.shape[2:])  # noqa: E731
    for n in (7, 9):
        same(compiled(h, dynamic=True)(x, torch.ones(1, 1, n, n + 1)), h(x, torch.ones(1, 1, n, n + 1)))
    assert all("resize" in str(p.read({}).graph) for p in pieces if p.open)


def test_nothing_but_weights_and_constants() -> None:
    module = nn.Embedding(4, 3)
    f = compiled(lambda: (module.weight * 2, torch.arange(3), 5))
    same(f(), (module.weight * 2, torch.arange(3), 5))


def test_inference_mode() -> None:
    module, (x,) = made("cnn")
    with torch.inference_mode():
        same(compiled(module)(x), module(x))


def test_options_and_mistakes() -> None:
    module, (x,) = made("mlp")
    y = torch.compile(module, backend="dnnc", options={"precision": "bfloat16", "threads": 1})(x)
    assert y.dtype is torch.float32 and 0 < (y - module(x)).abs().max() < 5e-2
    torch._dynamo.reset()
    with pytest.raises(Exception, match="unknown option 'thread': did you mean threads"):
        torch.compile(module, backend="dnnc", options={"thread": 1})(x)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="mode='fast': the backend has options"):
        torch.compile(module, backend="dnnc", mode="fast")(x)
    torch._dynamo.reset()
    with pytest.warns(DnncWarning, match="mode='max-autotune' changes nothing"):
        same(torch.compile(module, backend="dnnc", mode="max-autotune")(x), module(x))


@in_a_quiet_round
def test_a_call_costs_little(pieces: list[Any]) -> None:
    """Over the program itself: what is between torch's guards and native code, with forty weights."""
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20))).eval()
    x = torch.randn(2, 4)
    pieces.clear()
    f = compiled(module)
    same(f(x), module(x))
    (piece,) = pieces
    executable, array = piece.last.executable, x.numpy()
    given = [dict(zip(piece.static, piece.last.weights.tensors)).get(k, x) for k in range(len(piece.places))]
    alone, whole = (min(_seconds(g) for _ in range(30)) for g in (lambda: executable(array), lambda: piece(given)))
    least = min(
        _seconds(lambda: [(t.data_ptr(), t.dtype, tuple(t.shape)) for t in given]) for _ in range(30)
    )  # what torch takes to tell of them
    quiet(whole - alone < 2 * least, f"{(whole - alone) * 1e6:.0f} us, {least * 1e6:.0f} us to look at each tensor")


def _seconds(f: Callable[[], Any], times: int = 20) -> float:
    start = time.perf_counter()
    for _ in range(times):
        f()
    return (time.perf_counter() - start) / times


# --- on a device ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cnn", "causal", "padded encoder", "lstm"])
def test_on_a_device(name: str) -> None:
    module, args = made(name)
    module, args = module.cuda(), tuple(a.cuda() for a in args)
    y = torch.compile(module, backend="dnnc")(*args)
    same(y, module(*args), 2e-3)
    assert all(t.is_cuda for t in (y if isinstance(y, tuple) else (y,)) if isinstance(t, Tensor))


@pytest.mark.gpu
def test_on_the_current_stream_in_half() -> None:
    module, (x,) = made("cnn")
    module, stream = module.cuda().half(), torch.cuda.Stream()
    f = torch.compile(module, backend="dnnc")
    f(x.cuda().half())
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        given = torch.zeros(2, 3, 16, 16, device="cuda", dtype=torch.float16)
        for _ in range(50):
            given = given + x.cuda().half() / 50
        y = f(given)
    stream.synchronize()
    assert (y.float() - module(given).float()).abs().max() < 2e-2


@pytest.mark.gpu
def test_weights_that_change_on_a_device() -> None:
    module, (x,) = made("cnn")
    module, x = module.cuda(), x.cuda()
    f = torch.compile(module, backend="dnnc")
    f(x)
    for p in module.parameters():
        p.mul_(1.3)
    same(f(x), module(x), 2e-3)
