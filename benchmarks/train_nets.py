"""Networks of `train_cpu.py`, each written once: `nn` and `F` are PyTorch's, those of `dnnc.nn`, or `train_jax`, with
the same names, arguments and weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Task:
    """A network with a loss, and how it is trained.

    Attributes:
        make: gives the module for `nn`, `F` and a function that wraps a block, whose activations may be computed again
            in the backward pass. The module takes the first array of the batch.
        batch: draws a batch: what the module takes, and labels.
        quick: the same for `--quick`.
        optimizer: "SGD" with momentum 0.9, or "Adam".
        rate: learning rate.
        blocks: is it a stack of blocks, so that `--checkpoint` means something?
    """

    make: Callable[[Any, Any, Callable[..., Any]], Any]
    batch: Callable[[np.random.Generator], tuple[Array, Array]]
    quick: Callable[[np.random.Generator], tuple[Array, Array]]
    optimizer: str = "SGD"
    rate: float = 0.01
    blocks: bool = False


def loss(F: Any, module: Any, x: Any, labels: Any) -> Any:
    """The cross entropy of logits [..., classes]."""
    y = module(x)
    return F.cross_entropy(y.reshape(-1, y.shape[-1]), labels.reshape(-1))


# --- images -----------------------------------------------------------------------------------------------------------


def mlp(nn: Any, F: Any, block: Any) -> Any:
    layers = [f for i, o in pairwise((784, 1000, 1000, 10)) for f in (nn.Linear(i, o), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def lenet(nn: Any, F: Any, block: Any) -> Any:
    """LeCun et al., 1998, with ReLU and maxima, for images of 8 x 8."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def resnet(counts: Sequence[int], bottleneck: bool) -> Callable[[Any, Any, Any], Any]:
    """He et al., 2015; the stride of a bottleneck is that of its 3 x 3 convolution, as in torchvision."""

    def make(nn: Any, F: Any, block: Any) -> Any:
        def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> list[Any]:
            return [nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)]

        class Block(nn.Module):  # type: ignore[misc]
            def __init__(self, inputs: int, width: int, stride: int) -> None:
                super().__init__()
                outputs = 4 * width if bottleneck else width
                if bottleneck:
                    layers = [
                        *conv(inputs, width, 1), nn.ReLU(), *conv(width, width, 3, stride), nn.ReLU(),
                        *conv(width, outputs, 1),
                    ]  # fmt: skip
                else:
                    layers = [*conv(inputs, width, 3, stride), nn.ReLU(), *conv(width, outputs, 3)]
                self.layers = nn.Sequential(*layers)
                change = stride != 1 or inputs != outputs
                self.shortcut = nn.Sequential(*conv(inputs, outputs, 1, stride)) if change else nn.Identity()

            def forward(self, x: Any) -> Any:
                return F.relu(self.layers(x) + self.shortcut(x))

        layers = [*conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        channels = 64
        for k, count in enumerate(counts):
            for j in range(count):
                layers.append(block(Block(channels, 64 << k, 2 if k and not j else 1)))
                channels = (4 if bottleneck else 1) * (64 << k)
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))

    return make


MOBILENET = (  # kernel, hidden channels, channels, squeeze and excitation, hard swish, stride
    (3, 16, 16, 0, 0, 1), (3, 64, 24, 0, 0, 2), (3, 72, 24, 0, 0, 1), (5, 72, 40, 1, 0, 2), (5, 120, 40, 1, 0, 1),
    (5, 120, 40, 1, 0, 1), (3, 240, 80, 0, 1, 2), (3, 200, 80, 0, 1, 1), (3, 184, 80, 0, 1, 1), (3, 184, 80, 0, 1, 1),
    (3, 480, 112, 1, 1, 1), (3, 672, 112, 1, 1, 1), (5, 672, 160, 1, 1, 2), (5, 960, 160, 1, 1, 1),
    (5, 960, 160, 1, 1, 1),
)  # fmt: skip


def mobilenet(nn: Any, F: Any, block: Any) -> Any:
    """MobileNetV3-large (Howard et al., 2019) without dropout."""

    def conv(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> list[Any]:
        norm = nn.BatchNorm2d(outputs, eps=0.001, momentum=0.01)
        return [nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False), norm]

    class Excitation(nn.Module):  # type: ignore[misc]
        def __init__(self, channels: int) -> None:
            super().__init__()
            inner = (channels // 4 + 4) // 8 * 8  # a multiple of 8
            self.layers = nn.Sequential(
                nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, inner, 1), nn.ReLU(), nn.Conv2d(inner, channels, 1),
                nn.Hardsigmoid(),
            )  # fmt: skip

        def forward(self, x: Any) -> Any:
            return x * self.layers(x)

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self, inputs: int, size: int, hidden: int, outputs: int, se: int, swish: int, stride: int) -> None:
            super().__init__()
            act = nn.Hardswish if swish else nn.ReLU
            layers = [*conv(inputs, hidden, 1), act()] if hidden != inputs else []
            layers += [*conv(hidden, hidden, size, stride, hidden), act()]
            layers += [Excitation(hidden)] if se else []
            self.layers = nn.Sequential(*layers, *conv(hidden, outputs, 1))
            self.adds = stride == 1 and inputs == outputs

        def forward(self, x: Any) -> Any:
            return x + self.layers(x) if self.adds else self.layers(x)

    layers, channels = [*conv(3, 16, 3, 2), nn.Hardswish()], 16
    for size, hidden, outputs, se, swish, stride in MOBILENET:
        layers.append(block(Block(channels, size, hidden, outputs, se, swish, stride)))
        channels = outputs
    return nn.Sequential(
        *layers, *conv(160, 960, 1), nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(960, 1280),
        nn.Hardswish(), nn.Linear(1280, 1000),
    )  # fmt: skip


# --- language ---------------------------------------------------------------------------------------------------------


def attention(nn: Any, F: Any, width: int, heads: int, causal: bool) -> Any:
    class Attention(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

        def forward(self, x: Any) -> Any:
            b, s, _ = x.shape
            q, k, v = (f(x).reshape(b, s, heads, width // heads).swapaxes(1, 2) for f in (self.q, self.k, self.v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            return self.out(y.swapaxes(1, 2).reshape(b, s, width))

    return Attention()


def bert(nn: Any, F: Any, block: Any, words: int = 30522, width: int = 512, depth: int = 4, places: int = 512) -> Any:
    """A classifier of sentences by BERT's encoder (Devlin et al., 2018), without dropout."""

    class Layer(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.norm1 = attention(nn, F, width, width // 64, False), nn.LayerNorm(width)
            self.hidden = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            self.norm2 = nn.LayerNorm(width)

        def forward(self, x: Any) -> Any:
            x = self.norm1(x + self.attention(x))
            return self.norm2(x + self.hidden(x))

    class Bert(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(words, width), nn.Embedding(places, width)
            self.norm = nn.LayerNorm(width)
            self.layers = nn.Sequential(*(block(Layer()) for _ in range(depth)))
            self.pool, self.last = nn.Linear(width, width), nn.Linear(width, 2)

        def forward(self, tokens: Any) -> Any:
            x = self.norm(self.words(tokens) + self.places.weight[: tokens.shape[1]])
            return self.last(F.tanh(self.pool(self.layers(x)[:, 0])))

    return Bert()


def gpt(nn: Any, F: Any, block: Any, words: int = 50257, width: int = 384, depth: int = 6, places: int = 1024) -> Any:
    """GPT-2 (Radford et al., 2019) without dropout; logits are products with the embeddings of words."""

    class Layer(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.attention = nn.LayerNorm(width), attention(nn, F, width, width // 64, True)
            self.norm2 = nn.LayerNorm(width)
            self.hidden = nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
            )

        def forward(self, x: Any) -> Any:
            x = x + self.attention(self.norm1(x))
            return x + self.hidden(self.norm2(x))

    class GPT(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(words, width), nn.Embedding(places, width)
            self.layers, self.norm = nn.Sequential(*(block(Layer()) for _ in range(depth))), nn.LayerNorm(width)

        def forward(self, tokens: Any) -> Any:
            x = self.layers(self.words(tokens) + self.places.weight[: tokens.shape[1]])
            return F.linear(self.norm(x), self.words.weight)

    return GPT()


def lstm(nn: Any, F: Any, block: Any, words: int = 10000, width: int = 650) -> Any:
    """Zaremba et al., 2014, the medium net, without dropout."""

    class Language(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.words, self.lstm = nn.Embedding(words, width), nn.LSTM(width, width, 2, batch_first=True)
            self.last = nn.Linear(width, words)

        def forward(self, tokens: Any) -> Any:
            return self.last(self.lstm(self.words(tokens))[0])

    return Language()


# --- batches ----------------------------------------------------------------------------------------------------------


def images(*shape: int, classes: int = 1000) -> Callable[[np.random.Generator], tuple[Array, Array]]:
    return lambda rng: (rng.standard_normal(shape, np.float32), rng.integers(0, classes, shape[0]))


def tokens(
    batch: int, steps: int, words: int, classes: int = 0
) -> Callable[[np.random.Generator], tuple[Array, Array]]:
    """Tokens with the label of each sentence, or without classes with the token that follows at each place."""

    def draw(rng: np.random.Generator) -> tuple[Array, Array]:
        x = rng.integers(0, words, (batch, steps + 1))
        return x[:, :-1].copy(), (rng.integers(0, classes, batch) if classes else x[:, 1:].copy())

    return draw


TASKS = {
    "mlp": Task(mlp, images(100, 784, classes=10), images(8, 784, classes=10)),
    "lenet": Task(lenet, images(64, 1, 8, 8, classes=10), images(8, 1, 8, 8, classes=10)),
    "resnet18": Task(resnet((2, 2, 2, 2), False), images(16, 3, 64, 64), images(2, 3, 64, 64), blocks=True),
    "resnet50": Task(resnet((3, 4, 6, 3), True), images(8, 3, 224, 224), images(2, 3, 64, 64), blocks=True),
    "mobilenet_v3": Task(mobilenet, images(16, 3, 64, 64), images(4, 3, 64, 64), blocks=True),
    "bert_small": Task(bert, tokens(8, 128, 30522, 2), tokens(2, 16, 30522, 2), "Adam", 1e-4, blocks=True),
    "lstm_lm": Task(lstm, tokens(20, 35, 10000), tokens(4, 5, 10000), rate=1.0),
    "gpt2_384": Task(gpt, tokens(4, 256, 50257), tokens(1, 16, 50257), "Adam", 1e-4, blocks=True),
}
