"""Modules and optimizers: a call has the type of `forward`."""

import sys

if sys.version_info >= (3, 11):
    from typing import assert_type
else:
    from typing_extensions import assert_type

import dnnc
import dnnc.array as xp
from dnnc import nn, optim
from dnnc.array import Array
from dnnc.training.step import TrainStep

x = xp.ones((2, 4))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.activation = nn.ReLU()
        self.rnn = nn.LSTM(4, 4)

    def forward(self, x: Array, scale: float = 1.0) -> tuple[Array, Array]:
        for block in self.blocks:
            x = block(x)
        y, (h, _) = self.rnn(self.activation(x) * scale)
        assert_type(h, Array)
        return y, x


class Derived(nn.Conv2d):
    pass


net = Net()
assert_type(net(x), tuple[Array, Array])
assert_type(net.blocks[0], nn.Linear)
assert_type(net.blocks[1:], nn.ModuleList[nn.Linear])
assert_type(net.activation, nn.ReLU)
assert_type(nn.Linear(4, 4)(x), Array)
assert_type(Derived(1, 1, 3)(x), Array)
assert_type(nn.MaxPool2d(2)(x), Array)
assert_type(nn.CrossEntropyLoss()(x, x), Array)
assert_type(nn.Sequential(nn.Linear(4, 4), nn.Tanh())(x), Array)
assert_type(nn.LSTM(4, 4)(x), tuple[Array, tuple[Array, Array]])
assert_type(nn.GRU(4, 4)(x), tuple[Array, Array])
assert_type(nn.LSTMCell(4, 4)(x), tuple[Array, Array])
assert_type(nn.functional.relu(x), Array)
assert_type(nn.functional.max_pool2d(x, 2), Array)
assert_type(nn.functional.max_pool2d(x, 2, return_indices=True), tuple[Array, Array])
assert_type(nn.functional_call(net, net.state_dict(), x), tuple[Array, Array])
assert_type(net.train(), Net)
assert_type(net.training, bool)


def loss_of(params: dict[str, Array], x: Array) -> Array:
    return nn.functional_call(net, params, x)[0].sum()


step = dnnc.train_step(loss_of, optim.SGD(lr=0.1), dict(net.named_parameters()))
assert_type(step, TrainStep)
optimizer = optim.AdamW(net.parameters(), lr=1e-3)
assert_type(optimizer.step(lambda: x.sum()), Array)
optimizer.zero_grad()

print(net(x)[0].bogus)  # error
nn.Linear(4)  # error
nn.Linear(4, 4, bais=False)  # error
nn.Linnear(4, 4)  # error
optim.AdamW(net.parameters(), lrr=1e-3)  # error
optimizer.stpe()  # error
