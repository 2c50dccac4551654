"""cuBLASLt and cuDNN in NumPy, at the boundary of ctypes: they take the same arguments, keep what descriptors are told,
and compute what these say by the libraries' own rules (cuBLASLt counts by columns), on the memory of an interpreted
device.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import ml_dtypes
import numpy as np

from dnnc.backends.cuda.interpreted import InterpretedDevice

Array = np.ndarray[Any, Any]
BLAS_TYPES = {0: np.dtype(np.float32), 2: np.dtype(np.float16), 14: np.dtype(ml_dtypes.bfloat16)}
DNN_TYPES = {0: np.dtype(np.float32), 2: np.dtype(np.float16), 9: np.dtype(ml_dtypes.bfloat16)}


@dataclass
class Thing:
    """A descriptor: what it was made with, and its attributes by number."""

    made: tuple[Any, ...]
    attributes: dict[int, Any] = field(default_factory=dict)
    final: bool = False


class Fake:
    def __init__(self, device: InterpretedDevice) -> None:
        self.device = device
        self.things: dict[int, Thing] = {}
        self.calls: list[int] = []  # the suggestions that were computed
        self.suggestions = 3
        self._numbers = count(1)

    def new(self, at: Any, *made: Any) -> int:
        number = next(self._numbers)
        self.things[number] = Thing(made)
        at._obj.value = number
        return 0

    def of(self, pointer: Any) -> Thing:
        return self.things[int(getattr(pointer, "value", pointer))]

    def destroy(self, pointer: Any) -> int:
        del self.things[pointer.value]
        return 0


class FakeBlas(Fake):
    """cuBLASLt 13.1.0 with `suggestions` ways to compute anything; way k wants 1024 * k bytes of workspace."""

    def cublasLtGetVersion(self) -> int:
        return 130100

    def cublasLtGetStatusName(self, status: Any) -> bytes:
        return b"CUBLAS_STATUS_MADE_UP"

    def cublasLtCreate(self, at: Any) -> int:
        return self.new(at)

    def cublasLtMatmulDescCreate(self, at: Any, compute: Any, scale: Any) -> int:
        assert scale.value == 0
        return self.new(at, compute.value)

    def cublasLtMatrixLayoutCreate(self, at: Any, kind: Any, rows: Any, cols: Any, step: Any) -> int:
        assert step.value >= rows.value
        return self.new(at, BLAS_TYPES[kind.value], rows.value, cols.value, step.value)

    def cublasLtMatmulPreferenceCreate(self, at: Any) -> int:
        return self.new(at)

    cublasLtMatmulDescDestroy = cublasLtMatrixLayoutDestroy = cublasLtMatmulPreferenceDestroy = Fake.destroy

    def _set(self, of: Any, number: int, v: Any, size: Any) -> int:
        assert ctypes.sizeof(v._obj) == size.value
        self.of(of).attributes[number] = v._obj.value
        return 0

    cublasLtMatmulDescSetAttribute = cublasLtMatrixLayoutSetAttribute = cublasLtMatmulPreferenceSetAttribute = _set

    def cublasLtMatmulAlgoGetHeuristic(
        self,
        handle: Any,
        operation: Any,
        a: Any,
        b: Any,
        c: Any,
        d: Any,
        wishes: Any,
        asked: Any,
        found: Any,
        number: Any,
    ) -> int:
        limit = self.of(wishes).attributes[1]
        assert [self.of(wishes).attributes[k] for k in (3, 5, 6, 7, 8)] == [2, 16, 16, 16, 16]
        number._obj.value = min(asked.value, self.suggestions)
        for k in range(number._obj.value):
            found[k].algo[0], found[k].workspace, found[k].state = k, min(1024 * k, limit), 0
        return 0

    def _matrix(self, of: Any, address: Any, item: int) -> Array:
        kind, rows, cols, step = self.of(of).made
        offset = item * self.of(of).attributes.get(6, 0) * kind.itemsize
        nbytes = ((cols - 1) * step + rows) * kind.itemsize
        flat = self.device.bytes_at(address.value + offset, nbytes).view(kind)
        return np.lib.stride_tricks.as_strided(flat, (rows, cols), (kind.itemsize, step * kind.itemsize))

    def cublasLtMatmul(
        self, handle: Any, operation: Any, alpha: Any, a: Any, at_a: Any, b: Any, at_b: Any, beta: Any, c: Any,
        at_c: Any, d: Any, at_d: Any,
        algo: Any, workspace: Any, size: Any, stream: Any,
    ) -> int:  # fmt: skip
        told = self.of(operation).attributes
        if size.value:  # it must be memory, and nobody else's
            self.device.bytes_at(workspace.value, size.value)[:] = 0xAB
        for item in range(self.of(at_d).attributes.get(5, 1)):
            left, right = (self._matrix(at, x, item).astype(np.float32) for at, x in ((at_a, a), (at_b, b)))
            made = (left.T if told.get(3) else left) @ (right.T if told.get(4) else right)
            out = self._matrix(at_d, d, item)
            if told[7] & 4:
                bias = self.device.bytes_at(told[8], out.shape[0] * out.dtype.itemsize).view(out.dtype)
                made = made + bias.astype(np.float32)[:, None]
            if told[7] & 2:
                made = np.maximum(made, 0)
            if told[7] & 32:
                made = made * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (made + 0.044715 * made**3)))
            out[...] = made.astype(out.dtype)
        self.calls.append(int(algo._obj[0]))
        return 0


class FakeDnn(Fake):
    """cuDNN 9.28.0: the first way uses tensor cores, the second gives no plan, the last is the fallback."""

    def cudnnGetVersion(self) -> int:
        return 92800

    def cudnnGetErrorString(self, status: Any) -> bytes:
        return b"CUDNN_STATUS_MADE_UP"

    def cudnnGetLastErrorString(self, text: Any, size: Any) -> None:
        text.value = b"some words"

    def cudnnCreate(self, at: Any) -> int:
        return self.new(at)

    def cudnnSetStream(self, handle: Any, stream: Any) -> int:
        return 0

    def cudnnBackendCreateDescriptor(self, kind: Any, at: Any) -> int:
        return self.new(at, kind.value)

    cudnnBackendDestroyDescriptor = Fake.destroy

    def cudnnBackendSetAttribute(self, of: Any, number: Any, kind: Any, elements: Any, array: Any) -> int:
        assert len(array) == elements.value and not self.of(of).final
        self.of(of).attributes[number.value] = list(array)
        return 0

    def cudnnBackendFinalize(self, of: Any) -> int:
        thing = self.of(of)
        thing.final = True
        if thing.made == (5,) and self.way(thing.attributes[401][0]) == 1:
            return 3007
        return 0

    def way(self, config: int) -> int:
        """Which of the ways a configuration is."""
        return int(self.things[config].attributes[-1])

    def cudnnBackendGetAttribute(self, of: Any, number: Any, kind: Any, most: Any, got: Any, array: Any) -> int:
        asked, thing = number.value, self.of(of)
        if asked == 202:
            ways = {3: range(self.suggestions), 2: [self.suggestions]}[thing.attributes[200][0]]
            got._obj.value = len(ways)
            for k, way in enumerate(ways):
                self.things[array[k]].attributes |= {-1: way, -2: thing.attributes[201][0]}
        elif asked == 300:
            got._obj.value = 1
            self.things[array[0]].attributes[-1] = self.way(of.value)
        elif asked == 1303:
            notes = [0, 4] if thing.attributes[-1] == 0 else [9]
            array[: len(notes)], got._obj.value = notes, len(notes)
        else:
            assert asked == 402
            array[0], got._obj.value = 4096, 1
        return 0

    def cudnnBackendExecute(self, handle: Any, plan: Any, pack: Any) -> int:
        config = self.of(plan).attributes[401][0]
        told = self.of(pack).attributes
        addresses = dict(zip(told[1000], told[1001]))
        self.device.bytes_at(told[1003][0], 4096)[:] = 0xAB
        graph = self.things[self.things[config].attributes[-2]]
        virtual: dict[int, Array] = {}
        for node in graph.attributes[801]:
            self._node(self.things[node], addresses, virtual)
        self.calls.append(self.way(config))
        return 0

    def _view(self, tensor: int, addresses: dict[int, int]) -> Array:
        a = self.things[tensor].attributes
        kind, sizes, steps = DNN_TYPES[a[901][0]], a[902], a[903]
        nbytes = (sum((n - 1) * s for n, s in zip(sizes, steps)) + 1) * kind.itemsize
        flat = self.device.bytes_at(addresses[a[906][0]], nbytes).view(kind)
        return np.lib.stride_tricks.as_strided(flat, sizes, [s * kind.itemsize for s in steps])

    def _node(self, node: Thing, addresses: dict[int, int], virtual: dict[int, Array]) -> None:
        def read(tensor: int) -> Array:
            uid = self.things[tensor].attributes[906][0]
            return virtual[uid] if uid in virtual else self._view(tensor, addresses).astype(np.float32)

        a = node.attributes
        if node.made == (10,):
            assert (a[700], a[701]) == ([1.0], [0.0])
            made, target = self._conv(read(a[704][0]), read(a[703][0]), self.things[a[702][0]].attributes), a[705][0]
        else:
            mode = self.things[a[750][0]].attributes[0][0]
            made, target = read(a[751][0]), a[753][0]
            made = made + read(a[752][0]) if mode == 0 else np.maximum(made, 0)
        told = self.things[target].attributes
        if told[907][0]:
            virtual[told[906][0]] = made
        else:
            out = self._view(target, addresses)
            out[...] = made.astype(out.dtype)

    @staticmethod
    def _conv(x: Array, w: Array, told: dict[int, list[int]]) -> Array:
        before, after, strides, dilations = told[105], told[104], told[103], told[102]
        x = np.pad(x, [(0, 0), (0, 0), *zip(before, after)])
        reach = [(k - 1) * d + 1 for k, d in zip(w.shape[2:], dilations)]
        windows = np.lib.stride_tricks.sliding_window_view(x, reach, (2, 3))
        windows = windows[:, :, :: strides[0], :: strides[1], :: dilations[0], :: dilations[1]]
        made: Array = np.einsum("nchwrs,kcrs->nkhw", windows, w)
        return made
