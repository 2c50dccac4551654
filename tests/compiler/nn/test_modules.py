"""Modules against PyTorch's with the same state dict: values, gradients of all parameters, updated buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import dnnc
import dnnc.array as xp
from dnnc import nn

rng = np.random.default_rng(5)


def f(*shape: int) -> Any:
    return rng.standard_normal(shape)


def near(got: Any, want: Any, tolerance: float = 1e-7) -> None:
    want = want.detach().numpy() if torch.is_tensor(want) else np.asarray(want)
    np.testing.assert_allclose(np.asarray(got), want, tolerance, tolerance / 100)


def compare(make: Any, *inputs: Any, train: bool = True, named: dict[str, Any] | None = None) -> None:
    """`make(namespace)` gives the module of `dnnc.nn` and of `torch.nn`."""
    theirs, ours = make(torch.nn).double().train(train), make(nn).double().train(train)
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    assert {n: p.shape for n, p in ours.state_dict().items()} == {
        n: tuple(p.shape) for n, p in theirs.state_dict().items()
    }
    with torch.no_grad():
        for p in theirs.parameters():
            p += 0.1 * torch.randn(p.shape, dtype=p.dtype)  # where a scale is 1 or a bias 0, a mistake would hide
    ours.load_state_dict(theirs.state_dict())
    leaves = [torch.tensor(x, requires_grad=x.dtype.kind == "f") for x in inputs]
    given = [xp.asarray(x) for x in inputs]
    for x, t in zip(given, leaves):
        x.requires_grad = t.requires_grad
    more = {k: torch.tensor(v) if isinstance(v, np.ndarray) else v for k, v in (named or {}).items()}
    want, got = theirs(*leaves, **more), ours(*given, **(named or {}))
    total, ours_total = 0.0, 0.0
    for w, g in zip(flat(want), flat(got), strict=True):
        near(g, w)
        seed = rng.standard_normal(tuple(w.shape))
        total, ours_total = total + (w * torch.tensor(seed)).sum(), ours_total + xp.sum(g * seed)
    total.backward()
    ours_total.backward()
    for p, q in zip(ours.parameters(), theirs.parameters()):
        if q.grad is not None:
            near(p.grad, q.grad, 1e-6)
    for x, t in zip(given, leaves):
        if t.requires_grad:
            near(x.grad, t.grad, 1e-6)
    for (_, b), (_, c) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        near(b, c)


def flat(made: Any) -> list[Any]:
    if made is None:
        return []
    return [x for part in made for x in flat(part)] if isinstance(made, tuple) else [made]


LAYERS = {
    "linear": (lambda m: m.Linear(5, 3), [f(2, 5)]),
    "bilinear": (lambda m: m.Bilinear(5, 4, 3), [f(2, 5), f(2, 4)]),
    "embedding": (lambda m: m.Embedding(7, 3, padding_idx=2), [rng.integers(0, 7, (2, 5))]),
    "conv1d": (lambda m: m.Conv1d(4, 6, 3, 2, 1, groups=2), [f(2, 4, 9)]),
    "conv2d": (lambda m: m.Conv2d(3, 4, (3, 2), padding="same", bias=False), [f(2, 3, 6, 5)]),
    "conv2d-reflect": (lambda m: m.Conv2d(3, 4, 3, padding=(2, 1), padding_mode="reflect"), [f(2, 3, 6, 5)]),
    "conv2d-circular": (lambda m: m.Conv2d(3, 4, 3, padding="same", padding_mode="circular"), [f(2, 3, 6, 5)]),
    "conv3d": (lambda m: m.Conv3d(2, 3, 2), [f(1, 2, 4, 3, 3)]),
    "conv_transpose1d": (lambda m: m.ConvTranspose1d(2, 3, 3, 2), [f(1, 2, 4)]),
    "conv_transpose2d": (lambda m: m.ConvTranspose2d(4, 6, 3, 2, 1, 1, 2), [f(2, 4, 4, 3)]),
    "conv_transpose3d": (lambda m: m.ConvTranspose3d(2, 2, 2, bias=False), [f(1, 2, 2, 3, 2)]),
    "batch_norm1d": (lambda m: m.BatchNorm1d(3), [f(6, 3)]),
    "batch_norm2d": (lambda m: m.BatchNorm2d(3, momentum=0.3), [f(2, 3, 4, 5)]),
    "batch_norm3d": (lambda m: m.BatchNorm3d(2, affine=False), [f(2, 2, 2, 3, 2)]),
    "batch_norm-cumulative": (lambda m: m.BatchNorm1d(3, momentum=None), [f(6, 3, 2)]),
    "batch_norm-untracked": (lambda m: m.BatchNorm1d(3, track_running_stats=False), [f(6, 3)]),
    "layer_norm": (lambda m: m.LayerNorm((3, 4)), [f(2, 3, 4)]),
    "group_norm": (lambda m: m.GroupNorm(2, 6), [f(2, 6, 3)]),
    "rms_norm": (lambda m: m.RMSNorm(4), [f(2, 3, 4)]),
    "instance_norm1d": (lambda m: m.InstanceNorm1d(3), [f(2, 3, 5)]),
    "instance_norm2d": (lambda m: m.InstanceNorm2d(3, affine=True, track_running_stats=True), [f(2, 3, 4, 5)]),
    "local_response_norm": (lambda m: m.LocalResponseNorm(3, 0.5), [f(2, 5, 3)]),
    "prelu": (lambda m: m.PReLU(3), [f(2, 3, 4)]),
    "max_pool2d": (lambda m: m.MaxPool2d(3, 2, 1), [f(2, 3, 6, 7)]),
    "activations": (
        lambda m: m.Sequential(m.ELU(0.5), m.Hardtanh(-1, 2), m.LeakyReLU(0.2), m.Softplus(2), m.Softmax(1)), [f(2, 5)],
    ),
    "cross_entropy": (lambda m: m.CrossEntropyLoss(label_smoothing=0.1), [f(4, 5), rng.integers(0, 5, 4)]),
    "pad": (lambda m: m.Sequential(m.ReflectionPad2d((1, 2, 0, 1)), m.ZeroPad2d(1), m.Upsample(scale_factor=2)),
            [f(1, 2, 4, 5)]),
    "resize": (lambda m: m.Sequential(m.ConstantPad2d((1, 0, 2, 1), 3.5), m.UpsamplingNearest2d(scale_factor=2),
               m.UpsamplingBilinear2d((7, 9))), [f(1, 2, 4, 5)]),
    "rnn": (lambda m: m.RNN(3, 4, nonlinearity="relu", bias=False), [f(5, 2, 3)]),
    "lstm": (lambda m: m.LSTM(3, 4, 2, bidirectional=True, batch_first=True), [f(2, 5, 3)]),
    "lstm-projected": (lambda m: m.LSTM(3, 4, 2, proj_size=2), [f(5, 2, 3)]),
    "gru": (lambda m: m.GRU(3, 4, 2, bidirectional=True), [f(5, 2, 3)]),
    "gru-single": (lambda m: m.GRU(3, 4), [f(5, 3)]),
    "gru-state": (lambda m: m.GRU(3, 10), [f(5, 2, 3), f(1, 2, 10)]),
    "rnn_cell": (lambda m: m.RNNCell(3, 4), [f(2, 3), f(2, 4)]),
    "lstm_cell": (lambda m: m.LSTMCell(3, 4), [f(2, 3)]),
    "gru_cell": (lambda m: m.GRUCell(3, 4), [f(2, 3), f(2, 4)]),
    "attention": (lambda m: m.MultiheadAttention(6, 2, batch_first=True), [f(2, 4, 6), f(2, 5, 6), f(2, 5, 6)]),
    "attention-kv": (
        lambda m: m.MultiheadAttention(6, 3, kdim=4, vdim=5, add_bias_kv=True, add_zero_attn=True),
        [f(4, 2, 6), f(5, 2, 4), f(5, 2, 5)],
    ),
    "encoder": (
        lambda m: m.TransformerEncoder(m.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), 2), [f(2, 4, 6)],
    ),
    "encoder-norm-first": (
        lambda m: m.TransformerEncoderLayer(6, 2, 8, 0.0, activation="gelu", norm_first=True), [f(4, 2, 6)],
    ),
    "decoder": (
        lambda m: m.TransformerDecoder(m.TransformerDecoderLayer(6, 2, 8, 0.0), 2, m.LayerNorm(6)),
        [f(4, 2, 6), f(5, 2, 6)],
    ),
}  # fmt: skip


@pytest.mark.family("samples")
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    make, inputs = LAYERS[name]
    compare(make, *inputs)


@pytest.mark.slow
def test_eval_and_masks() -> None:
    compare(lambda m: m.Sequential(m.Conv1d(2, 3, 2), m.BatchNorm1d(3), m.Dropout(0.5)), f(2, 2, 5), train=False)
    hidden = np.triu(np.ones((4, 4), bool), 1)
    padding = np.array([[False, False, False, True], [False, False, False, False]])
    compare(
        lambda m: m.MultiheadAttention(6, 2, batch_first=True), *(f(2, 4, 6) for _ in range(3)),
        named={"attn_mask": hidden, "key_padding_mask": padding, "average_attn_weights": False},
    )  # fmt: skip
    compare(
        lambda m: m.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), f(2, 4, 6),
        named={"src_mask": hidden, "src_key_padding_mask": padding},
    )  # fmt: skip


@pytest.mark.slow
def test_first_values_are_constants_of_a_trace() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval()
    g = dnnc.trace(lambda x: net(x), dnnc.Spec(("N", 4)))
    assert not any(n.op.name.startswith("random") for n in g.nodes())
    assert sum(c.size for c in g.constants.values()) >= 4 * 3 + 3


def test_a_module_within_a_module_is_indented_once() -> None:
    text = repr(nn.Sequential(nn.Sequential(nn.ReLU()), nn.ReLU()))
    assert text == "Sequential(\n  (0): Sequential(\n    (0): ReLU()\n  )\n  (1): ReLU()\n)"
