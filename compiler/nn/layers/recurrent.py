"""Recurrent layers: one product for the inputs of all steps, then a loop over the steps as one op of the program.

Weights have PyTorch's names and layout: `weight_ih_l0` [gates * hidden, input], `weight_hh_l0` [gates * hidden,
hidden], gates in the order input, forget, cell, output (LSTM) and reset, update, new (GRU).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from dnnc.array.core import Array
from dnnc.array.creation import asarray
from dnnc.array.elementwise import add, multiply, subtract, where
from dnnc.array.linalg import matmul
from dnnc.array.manipulation import concat, expand_dims, matrix_transpose, permute_dims, sliced, squeeze, stack
from dnnc.frontends.trace.control import looped, pack
from dnnc.ir.errors import InputError
from dnnc.nn import functional as F
from dnnc.nn import init
from dnnc.nn.functional.operands import array, choice, filled
from dnnc.nn.layers.linear import empty
from dnnc.nn.module import Module
from dnnc.nn.utils.rnn import PackedSequence, lengths_of, packed, pad_packed_sequence

States = list[Array]
State = TypeVar("State")  # an array, of an LSTM a pair (h, c)
Step = Callable[[States, Array, Any], States]  # states, product of inputs and their weights, that of the old state


def _gates(v: Array, of: int) -> list[Array]:
    n = v.shape[-1] // of
    return [sliced(v, v.ndim - 1, k * n, n) for k in range(of)]


def _lstm(old: States, row: Array, inner: Array) -> States:
    """c' = f * c + i * g, h' = o * tanh(c')"""
    i, f, g, o = _gates(add(row, inner), 4)
    cell = add(multiply(F.sigmoid(f), old[1]), multiply(F.sigmoid(i), F.tanh(g)))
    return [multiply(F.sigmoid(o), F.tanh(cell)), cell]


def _gru(old: States, row: Array, inner: Array) -> States:
    """n = tanh(x + r * (W h + b)), h' = (1 - z) * n + z * h"""
    (r, z, n), (s, w, m) = _gates(row, 3), _gates(inner, 3)
    reset, update = F.sigmoid(add(r, s)), F.sigmoid(add(z, w))
    new = F.tanh(add(n, multiply(reset, m)))
    return [add(multiply(subtract(1.0, update), new), multiply(update, old[0]))]


def _rnn(activation: Callable[[Array], Array]) -> Step:
    return lambda old, row, inner: [activation(add(row, inner))]


STEPS: dict[str, tuple[int, Step]] = {
    "LSTM": (4, _lstm),
    "GRU": (3, _gru),
    "tanh": (1, _rnn(F.tanh)),
    "relu": (1, _rnn(F.relu)),
}


# --- layers -----------------------------------------------------------------------------------------------------------


class _Recurrent(Module, Generic[State]):
    kind: str
    states: ClassVar[int] = 1

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if min(input_size, hidden_size, num_layers) < 1 or not 0 <= proj_size < hidden_size:
            raise InputError(
                f"{type(self).__name__}: expected positive sizes and proj_size below hidden_size, got {input_size}, "
                f"{hidden_size}, {num_layers} layers, proj_size={proj_size}"
            )
        self.input_size, self.hidden_size, self.num_layers, self.bias = input_size, hidden_size, num_layers, bias
        self.batch_first, self.dropout, self.bidirectional = batch_first, dropout, bidirectional
        self.proj_size = proj_size
        gates, _ = STEPS[self.kind]
        directions, out = 2 if bidirectional else 1, proj_size or hidden_size
        for k in range(num_layers):
            for d in range(directions):
                rows = gates * hidden_size
                shapes: dict[str, tuple[int, ...]] = {
                    "weight_ih": (rows, out * directions if k else input_size),
                    "weight_hh": (rows, out),
                }
                if bias:
                    shapes.update(bias_ih=(rows,), bias_hh=(rows,))
                if proj_size:
                    shapes["weight_hr"] = (proj_size, hidden_size)
                for name, shape in shapes.items():
                    setattr(self, f"{name}_l{k}{'_reverse' if d else ''}", empty(shape, dtype, device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Begin uniform within 1 / sqrt(hidden)."""
        bound = 1 / math.sqrt(self.hidden_size)
        for p in self.parameters():
            init.uniform_(p, -bound, bound)

    def forward(self, input: Any, hx: Any = None) -> tuple[Array, State]:
        """Run over all steps.

        Args:
            input: [steps, N, input], [N, steps, input] with `batch_first`, [steps, input], or packed sequences.
            hx: the first states [layers * directions, N, hidden], of an LSTM a pair (h, c); zeros by default.

        Returns:
            h of the last layer for each step, packed as the input is, and the last states of all layers.
        """
        what = type(self).__name__
        if isinstance(input, PackedSequence):
            lengths, order = lengths_of(input)
            x, _ = pad_packed_sequence(input)
            y, ends = self._layers(x, self._first(x, hx, False), lengths)
            steps: Any = packed(y, lengths, order, None if input.sorted_indices is None else order)
            return steps, _one_or_all(ends)
        x = array(what, "input", input)
        if x.ndim not in (2, 3) or x.shape[-1] != self.input_size:
            raise InputError(f"{what}: expected an input [..., {self.input_size}] of 2 or 3 axes, got shape {x.shape}")
        single = x.ndim == 2
        x = expand_dims(x, axis=1) if single else permute_dims(x, (1, 0, 2)) if self.batch_first else x
        x, ends = self._layers(x, self._first(x, hx, single))
        if single:
            x, ends = squeeze(x, 1), [squeeze(s, 1) for s in ends]
        elif self.batch_first:
            x = permute_dims(x, (1, 0, 2))
        return x, _one_or_all(ends)

    @property
    def _directions(self) -> int:
        return 2 if self.bidirectional else 1

    def _layers(self, x: Array, first: States, lengths: Any = None) -> tuple[Array, States]:
        """All layers over [steps, N, input]: h of the last one, and the last states. `lengths`: of the sequences."""
        directions = self._directions
        last: list[list[Array]] = [[] for _ in first]
        rows = None
        if lengths is not None:
            rows = asarray(np.arange(x.shape[0])[:, None, None] < lengths[None, :, None])
        for k in range(self.num_layers):
            if k:
                x = F.dropout(x, self.dropout, self.training)
            made = []
            for d in range(directions):
                start = [squeeze(sliced(s, 0, k * directions + d, 1), 0) for s in first]
                ends, y = self._run(x, start, f"_l{k}{'_reverse' if d else ''}", d == 1, rows)
                made.append(y)
                for kept, end in zip(last, ends):
                    kept.append(end)
            x = made[0] if directions == 1 else concat(made, axis=2)
        return x, [stack(kept) for kept in last]

    def _first(self, x: Array, hx: Any, single: bool) -> States:
        """The first states, checked."""
        count = self.num_layers * self._directions
        sizes = [self.proj_size or self.hidden_size, self.hidden_size][: self.states]
        if hx is None:
            return [filled((count, x.shape[1], n), 0, x.dtype) for n in sizes]
        given = list(hx) if isinstance(hx, (tuple, list)) else [hx]
        if len(given) != self.states:
            raise InputError(f"{type(self).__name__}: expected {self.states} first states, got {len(given)}")
        given = [array(type(self).__name__, "hx", s) for s in given]
        given = [expand_dims(s, axis=1) if single and s.ndim == 2 else s for s in given]
        for s, n in zip(given, sizes):
            if s.shape != (count, x.shape[1], n) or s.dtype != x.dtype:
                want = (count, x.shape[1], n)
                got = f"{s.dtype} of shape {s.shape}"
                raise InputError(f"{type(self).__name__}: a first state must be {x.dtype} of shape {want}, got {got}")
        return given

    def _run(self, x: Array, start: States, suffix: str, reverse: bool, alive: Array | None) -> tuple[States, Array]:
        """One direction of a layer: the last states, and h of each step.

        `alive`: bool[steps, N, 1]; where False, a sequence is over, and its state stays.
        """
        _, step = STEPS[self.kind]
        rows = F.linear(x, getattr(self, f"weight_ih{suffix}"), getattr(self, f"bias_ih{suffix}", None))
        names = ["weight_hh", *(["weight_hr"] if self.proj_size else [])]
        fixed = [matrix_transpose(getattr(self, n + suffix)) for n in names]
        if self.bias:
            fixed.append(getattr(self, f"bias_hh{suffix}"))

        def one(old: States, taken: list[Array], recurrent: Array, *rest: Array) -> tuple[States, Array]:
            row, *going = taken
            inner = matmul(old[0], recurrent)
            new = step(old, row, add(inner, rest[-1]) if self.bias else inner)
            new = [matmul(new[0], rest[0]), *new[1:]] if self.proj_size else new
            new = [where(going[0], a, b) for a, b in zip(new, old)] if going else new
            return new, new[0]

        given = pack([rows] if alive is None else [rows, alive], "rows")
        return looped(one, pack(start, "state"), given, x.shape[0], reverse, fixed=fixed)

    def extra_repr(self) -> str:
        text = f"{self.input_size}, {self.hidden_size}"
        usual = {"num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0, "bidirectional": False}
        for name, value in {**usual, "proj_size": 0}.items():
            text += "" if getattr(self, name) == value else f", {name}={getattr(self, name)}"
        return text


def _one_or_all(states: States) -> Any:
    return tuple(states) if len(states) > 1 else states[0]


class LSTM(_Recurrent[tuple[Array, Array]]):
    """Long short-term memory (Hochreiter and Schmidhuber, 1997); `proj_size` makes h smaller (Sak et al., 2014)."""

    kind = "LSTM"
    states = 2


class GRU(_Recurrent[Array]):
    """Gated recurrent units (Cho et al., 2014)."""

    kind = "GRU"


class RNN(_Recurrent[Array]):
    """h' = activation(W x + b + V h + c), with `nonlinearity` "tanh" or "relu"."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        self.__dict__["kind"] = choice("RNN", "nonlinearity", nonlinearity, "tanh", "relu")
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, 0, device, dtype
        )
        self.nonlinearity = nonlinearity


# --- single steps -----------------------------------------------------------------------------------------------------


class _Cell(Module, Generic[State]):
    kind: str
    states: ClassVar[int] = 1

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.bias = input_size, hidden_size, bias
        rows = STEPS[self.kind][0] * hidden_size
        self.weight_ih = empty((rows, input_size), dtype, device)
        self.weight_hh = empty((rows, hidden_size), dtype, device)
        self.register_parameter("bias_ih", empty((rows,), dtype, device) if bias else None)
        self.register_parameter("bias_hh", empty((rows,), dtype, device) if bias else None)
        bound = 1 / math.sqrt(hidden_size)
        for p in self.parameters():
            init.uniform_(p, -bound, bound)

    def forward(self, input: Any, hx: Any = None) -> State:
        """One step of [N, input] or [input]; `hx` is the state [N, hidden], of an LSTM a pair; zeros by default."""
        x = array(type(self).__name__, "input", input)
        if hx is None:
            hx = [filled((*x.shape[:-1], self.hidden_size), 0, x.dtype) for _ in range(self.states)]
        old = list(hx) if isinstance(hx, (tuple, list)) else [hx]
        if len(old) != self.states:
            raise InputError(f"{type(self).__name__}: expected {self.states} states, got {len(old)}")
        row = F.linear(x, self.weight_ih, self.bias_ih)
        new = STEPS[self.kind][1](old, row, F.linear(old[0], self.weight_hh, self.bias_hh))
        return _one_or_all(new)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}" + ("" if self.bias else ", bias=False")


class LSTMCell(_Cell[tuple[Array, Array]]):
    """One step of an LSTM: (h, c) of an input and (h, c)."""

    kind = "LSTM"
    states = 2


class GRUCell(_Cell[Array]):
    """One step of a GRU."""

    kind = "GRU"


class RNNCell(_Cell[Array]):
    """One step of an RNN, with `nonlinearity` "tanh" or "relu"."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        self.__dict__["kind"] = choice("RNNCell", "nonlinearity", nonlinearity, "tanh", "relu")
        super().__init__(input_size, hidden_size, bias, device, dtype)
        self.nonlinearity = nonlinearity
