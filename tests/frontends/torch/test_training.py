"""Training through `torch.compile(backend="dnnc")`: gradients, buffers, dropout, sizes, what runs in eager PyTorch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_modules import MODULES
from trained import assert_same, compiled, floats, gradients, train

from dnnc.ir.errors import DnncWarning
from dnnc.torch import fallback, piece
from dnnc.torch.custom_ops import replaced

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(3)
    yield


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that torch hands over during a test."""
    found: list[Any] = []

    class Watched(piece.Piece):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            found.append(self)

    monkeypatch.setattr(fallback, "Piece", Watched)
    return found


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(shape, dtype=dtype),)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)).double()


def cnn() -> nn.Module:
    parts = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    parts += [nn.Conv2d(8, 8, 3, 2, 1, groups=2), nn.GroupNorm(4, 8), nn.SiLU(), nn.AvgPool2d(2)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


class Language(nn.Module):
    """A decoder whose embedding is its head too."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.first = nn.Embedding(30, 16), True
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout, "gelu", batch_first=True, norm_first=k == 1)
            for k in range(2)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x, n = self.words(ids), ids.shape[1]
        mask = torch.full((n, n), -torch.inf, dtype=x.dtype).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return x @ self.words.weight.T


@pytest.mark.family("cases")
@pytest.mark.parametrize("name", MODULES)
def test_module(name: str) -> None:
    torch.manual_seed(7)
    module, args = MODULES[name]()
    for m in module.modules():
        if isinstance(m, (nn.Dropout, nn.MultiheadAttention)):
            m.p = m.dropout = 0.0
    module, given = module.double(), torch.utils._pytree.tree_map(twice_as_wide, args)
    train(module.train(), lambda: given, 1e-9)


def twice_as_wide(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_convolutions(dtype: torch.dtype) -> None:
    train(cnn().to(dtype), drawn(4, 3, 16, 16, dtype=dtype), 1e-4 if dtype is torch.float32 else 1e-11)


def test_strided_3d_convolution() -> None:
    """Its cotangent has tests of unroll variables in vectors."""
    train(nn.Conv3d(2, 3, 3, 2).double(), drawn(1, 2, 5, 5, 5), 1e-11)


def test_convolutions_in_channels_last() -> None:
    module = cnn().double().to(memory_format=torch.channels_last)
    draw = lambda: (torch.randn(4, 3, 16, 16).double().to(memory_format=torch.channels_last),)  # noqa: E731
    train(module, draw, 1e-11)


def test_a_language_model() -> None:
    train(Language().double(), lambda: (torch.randint(30, (3, 7)),), 1e-11)


@pytest.mark.family("long")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_over_data(kind: type[nn.RNNBase], dtype: torch.dtype) -> None:
    """Their input has no gradient, as that of a model's first layer: torch has an operator of its own for that."""
    module = kind(5, 6, 2, batch_first=True, bidirectional=True, dtype=dtype)
    x, found = torch.randn(3, 4, 5, dtype=dtype), []
    with warnings.catch_warnings(), torch._dynamo.config.patch(allow_rnn=True):
        warnings.simplefilter("error", DnncWarning)
        for f in (compiled(module), module):
            module.zero_grad()
            y = f(x)[0]
            y.pow(2).sum().backward()
            found.append(
                {"y": y.detach(), **{n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}}
            )
    assert found[0].keys() == found[1].keys() and len(found[0]) == 17
    assert_same(*found, 1e-5 if dtype is torch.float32 else 1e-11)


def test_part_of_a_model_in_eval_mode_and_frozen(pieces: list[Any]) -> None:
    module = cnn().double()
    for p in module[:5].parameters():
        p.requires_grad_(False)
    module[1].eval()
    train(module, drawn(4, 3, 16, 16), 1e-11)
    assert pieces[0].static, "frozen weights are weights"
    assert module[0].weight.grad is None


def test_results_used_twice_and_gradients_that_are_not_contiguous() -> None:
    module = mlp()
    module[1].eval()

    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = module(x)
        return y.t(), y * y, (y + x[:, :3]).detach(), x.t()[1:]

    x = torch.randn(5, 6, dtype=torch.float64)
    assert_same(gradients(compiled(f), (x,), module), gradients(f, (x,), module), 1e-11)

    def g(f: Any, x: Tensor) -> dict[str, Tensor]:
        x = x.clone().requires_grad_()
        y = f(x)
        y.backward(torch.arange(30.0).double().reshape(6, 5).t()[:, :3], retain_graph=True)
        y.backward(torch.ones(()).double().expand(5, 3))
        return {"x": x.grad}

    assert_same(g(compiled(module), x), g(module, x), 1e-11)


def test_buffers_are_updated_once() -> None:
    module = mlp()
    f = compiled(module)
    for k in range(3):
        f(torch.randn(5, 6, dtype=torch.float64)).sum().backward()
        assert module[1].num_batches_tracked == k + 1


def test_a_model_is_trained_and_then_evaluated() -> None:
    """Batch norm in both modes, and weights that an optimizer changes in between."""
    module = cnn()
    x, target = torch.randn(16, 3, 16, 16), torch.randint(5, (16,))
    f = compiled(module)
    optimizer = torch.optim.AdamW(module.parameters(), 3e-2)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = F.cross_entropy(f(x), target)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 2
    module.eval()
    with torch.no_grad():
        assert torch.allclose(f(x), module(x), atol=1e-4)


@pytest.mark.parametrize("marked", [True, False])
def test_batches_of_any_size(pieces: list[Any], marked: bool) -> None:
    module = cnn().double()
    other = cnn().double()
    other.load_state_dict(module.state_dict())
    f = compiled(module)
    for n in (3, 5, 2, 7):
        x = torch.randn(n, 3, 16, 16).double()
        made = gradients(lambda t: f(torch._dynamo.mark_dynamic(t, 0) or t) if marked else f(t), (x,), module)
        assert_same(made, gradients(other, (x,), other), 1e-11)
    assert len(pieces) == (2 if marked else 4) and all(len(p.programs) == 1 for p in pieces)


def test_autocast() -> None:
    module, x = cnn(), torch.randn(4, 3, 16, 16)

    def f(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return module(x)

    made, want = gradients(compiled(f), (x,), module), gradients(f, (x,), module)
    assert made["result 0"].dtype is torch.bfloat16
    for n, y in want.items():
        assert (made[n].float() - y.float()).norm() < 0.1 * y.float().norm() + 1e-2, n


def test_fused_attention_of_devices_has_one_gradient() -> None:
    """The backward operators that PyTorch has for devices, each with its own order of arguments."""
    aten, xs = torch.ops.aten, [torch.randn(2, 2, 5, 8, requires_grad=True) for _ in range(3)]
    y = F.scaled_dot_product_attention(*xs, is_causal=True, scale=0.3)
    g, none, other = torch.randn_like(y), torch.zeros(0), (0, 0)
    want = torch.autograd.grad(y, xs, g)
    given = (g, *(x.detach() for x in xs))
    results, more = (y.detach(), none), {"scale": 0.3}
    calls = {
        aten._scaled_dot_product_flash_attention_backward: (*given, *results, *other, 5, 5, 0.0, True, none, none),
        aten._scaled_dot_product_efficient_attention_backward: (
            *given, None, *results, none, none, 0.0, [True] * 3 + [False], True
        ),
        aten._scaled_dot_product_cudnn_attention_backward: (
            *given, *results, none, none, None, *other, 5, 5, 0.0, True
        ),
    }  # fmt: skip
    for op, args in calls.items():
        made = replaced()[op.default](*args, **more)
        assert len(made) == len(op.default._schema.returns)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(made, want))


def test_gradients_of_our_operators_in_eager_pytorch() -> None:
    """They run there where the graph around them does not compile."""
    ours, x = torch.ops.dnnc, torch.randn(2, 3, 6, 8, requires_grad=True)
    for mode in ("nearest", "nearest-exact", "bilinear", "bicubic"):
        for size, factors in (([9, 5], None), (None, [2.0, 1.5])):
            y = F.interpolate(x, size, factors, mode)
            (want,) = torch.autograd.grad(y, x, torch.ones_like(y))
            made = ours.interpolate_backward(torch.ones_like(y), x.shape, size, factors, mode, None)
            assert torch.allclose(made, want, atol=1e-5), mode
    y = F.max_pool2d(x, 3, 2, 1)
    (want,) = torch.autograd.grad(y, x, y)
    made = ours.max_pool_backward(y.detach(), x.detach(), [3, 3], [2, 2], [1, 1], [1, 1], False)
    assert torch.equal(made, want)
    q, k, v = (torch.randn(2, h, 5, 8, requires_grad=True) for h in (4, 2, 2))
    for mask in (torch.rand(5, 5) > 0.5, torch.randn(5, 5), None):
        y = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        made = ours.attention_backward(y.cos(), q, k, v, y, mask, False, None)
        for a, b in zip(made, torch.autograd.grad(y, (q, k, v), y.cos())):
            assert torch.allclose(a, b, atol=1e-5)


def blocked(pieces: list[Any]) -> list[str]:
    """The saved tensors that do not lie in rows."""
    return [n for n, t in pieces[0].boundary.types.items() if not t.row_major]


def test_saved_tensors_lie_as_they_are_computed(pieces: list[Any]) -> None:
    train(cnn(), drawn(4, 3, 16, 16, dtype=torch.float32), 1e-4)
    assert len(pieces) == 2 and len(blocked(pieces)) >= 2
    given = {t.name: t.want for t in pieces[1].last.taken if t.want is not None}
    assert all(given[n] == pieces[0].boundary.types[n] for n in blocked(pieces))


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_saved_tensors_where_one_half_runs_in_eager_pytorch(
    pieces: list[Any], half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rows both read and write them in any case."""
    module, bind = cnn(), piece.bind

    def failing(*args: Any, **more: Any) -> Any:
        if half == "backward" and len(pieces) > 1:
            raise RuntimeError("no kernel")
        return bind(*args, **more)

    monkeypatch.setattr(piece, "bind", failing)
    monkeypatch.setattr(piece, "steps_down", lambda options: True)
    f, other, x = compiled(module), copy.deepcopy(module), torch.randn(4, 3, 16, 16)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DnncWarning)
            assert_same(gradients(f, (x,), module), gradients(other, (x,), other), 1e-4)
        assert blocked(pieces)
        if half == "forward":
            pieces[0].last.executable = None


def test_a_backward_half_with_operators_without_a_form(pieces: list[Any]) -> None:
    class Inverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return torch.cummax(g * ctx.saved_tensors[0].cos(), 1)[0]

    module = nn.Sequential(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 16, 3))
    f = lambda x: Inverse.apply(module(x))  # noqa: E731
    x, other = torch.randn(2, 16, 9, 9), copy.deepcopy(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DnncWarning)
        made = gradients(compiled(f), (x,), module)
    want = gradients(lambda x: Inverse.apply(other(x)), (x,), other)
    assert_same(made, want, 1e-4)
    assert blocked(pieces)


# --- random numbers ---------------------------------------------------------------------------------------------------


def test_dropout() -> None:
    """A mask for each step, the same in forward and backward; torch's generator decides."""
    f = compiled(lambda x: F.dropout(x, 0.25))
    x = torch.ones(200, 300, requires_grad=True)
    torch.manual_seed(5)
    first = f(x)
    (slope,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(slope, first.detach())  # of ones
    assert set(first.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    kept = (first != 0).double()
    assert abs(kept.mean() - 0.75) < 0.01 and (kept.mean(0) - 0.75).abs().max() < 0.15
    assert abs(torch.corrcoef(torch.stack([kept[:, :-1].flatten(), kept[:, 1:].flatten()]))[0, 1]) < 0.02
    second = f(x)
    agree = ((first != 0) == (second != 0)).double().mean()
    assert abs(agree - (0.75**2 + 0.25**2)) < 0.01  # independent
    torch.manual_seed(5)
    assert torch.equal(f(x), first)


def test_dropout_within_a_model() -> None:
    """Gradients of a network with masks: a difference of the loss along a direction, with the seed set again."""
    module = Language(0.2).double()
    f, ids = compiled(module), torch.randint(30, (3, 7))

    def loss() -> Tensor:
        torch.manual_seed(9)
        return f(ids).sin().mean()

    loss().backward()
    direction = {n: torch.randn_like(p) for n, p in module.named_parameters()}
    slope = sum((p.grad * direction[n]).sum() for n, p in module.named_parameters())
    ends = []
    for step in (1e-5, -2e-5):
        with torch.no_grad():
            for n, p in module.named_parameters():
                p.add_(direction[n], alpha=step)
        ends.append(loss().detach())
    assert torch.isclose((ends[0] - ends[1]) / 2e-5, slope, rtol=1e-5)


def test_random_numbers() -> None:
    n = (200, 500)

    def f(x: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.rand(n),
            torch.rand_like(x),
            torch.randn(n),
            torch.randint(2, 7, n),
            torch.bernoulli(torch.full(n, 0.3)),
            torch.rand(n, dtype=torch.bfloat16),
        )

    u, v, z, i, b, h = (t.double() for t in compiled(f)(torch.ones(n)))
    for t in (u, v, h):
        assert 0 <= t.min() and t.max() < 1 and abs(t.mean() - 0.5) < 5e-3 and abs(t.var() - 1 / 12) < 2e-3
    assert abs(torch.corrcoef(torch.stack([u.flatten(), v.flatten()]))[0, 1]) < 0.02
    assert abs(z.mean()) < 0.02 and abs(z.std() - 1) < 0.02
    assert i.unique().tolist() == [2, 3, 4, 5, 6] and abs(i.mean() - 4) < 0.02
    assert b.unique().tolist() == [0, 1] and abs(b.mean() - 0.3) < 0.01


# --- what runs in eager PyTorch ---------------------------------------------------------------------------------------


def test_operators_without_a_form_run_in_eager_pytorch(pieces: list[Any]) -> None:
    module = nn.Linear(4, 4).double()

    def f(x: Tensor) -> Tensor:
        y = torch.linalg.inv(module(x) + 5 * torch.eye(4)) * 2
        return torch.tanh(torch.cummin(y, 0)[0]) @ module.weight

    x = torch.randn(4, 4, dtype=torch.float64)
    with pytest.warns(DnncWarning, match=r"eager PyTorch: .*test_training.py:\d+: aten.(linalg_inv_ex|cummin)"):
        made = gradients(compiled(f), (x,), module)
    assert_same(made, gradients(f, (x,), module), 1e-10)
    assert len(pieces) >= 4
    assert all("eager" not in type(p).__name__ for p in pieces)


def test_complex_numbers_run_in_eager_pytorch() -> None:
    f = lambda x: torch.fft.rfft(x * 2).abs().tanh()  # noqa: E731
    x = torch.randn(3, 8, dtype=torch.float64)
    with pytest.warns(DnncWarning, match="_fft_r2c"):
        assert_same(gradients(compiled(f), (x,)), gradients(f, (x,)), 1e-10)


def test_a_graph_that_does_not_compile_runs_in_eager_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **more: Any) -> Any:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(piece, "bind", broken)
    monkeypatch.setattr(piece, "steps_down", lambda options: True)
    module, x = mlp(), torch.randn(5, 6, dtype=torch.float64)
    with pytest.warns(DnncWarning, match="runs in eager PyTorch: RuntimeError.'no kernel'"):
        made = gradients(compiled(module), (x,), module)
    other = mlp()
    other.load_state_dict(module.state_dict())
    other[1].reset_running_stats()
    assert_same(made, gradients(other, (x,), other), 1e-11)


def test_sizes_that_depend_on_data() -> None:
    f = lambda x: (x * 2)[x > 0].sin().sum()  # noqa: E731
    x = torch.randn(5, 6, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DnncWarning)
        assert_same(gradients(compiled(f), (x,)), gradients(f, (x,)), 1e-11)
    assert floats(f(x))
