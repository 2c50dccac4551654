"""What the runtime hands to the driver, with a driver that notes it: parameters in order, tensor maps innermost axis
first, launch attributes.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dnnc.backends.cuda import device as device_module
from dnnc.backends.cuda.device import CARVEOUT, LAUNCH_SERIALIZATION, CupyDevice, Function, device_problem, open_device
from dnnc.backends.cuda.interpreted import InterpretedDevice
from dnnc.backends.cuda.tensor_maps import encoded
from dnnc.backends.runtime import codec
from dnnc.backends.runtime.arrays import device_array, is_device_array, output_array
from dnnc.backends.runtime.device import Launch, TensorMap
from dnnc.ir.dtype import bf16, f16
from dnnc.ir.errors import InputError, InternalError, TargetError


class Driver:
    """Notes calls and answers with a status."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.calls: dict[str, tuple[Any, ...]] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            self.calls[name] = args
            return self.status

        return call


def plain(a: Any) -> Any:
    return list(a) if isinstance(a, ctypes.Array) else a.value if hasattr(a, "value") else a


TILED = TensorMap("x", f16, (512, 256), (512, 2), (64, 32), 128)
IM2COL = TensorMap("x", bf16, (8, 28, 14, 64), (50176, 1792, 128, 2), (128, 64), 128, (1, 2, 2, 1), ((-1, 1), (-2, 0)))


def test_a_tiled_map() -> None:
    driver = Driver()
    made = encoded(TILED, 0x7000, driver)
    assert made.address % 64 == 0
    (call,) = driver.calls.values()
    assert [plain(a) for a in call] == [made.address, 6, 2, 0x7000, [256, 512], [512], [32, 64], [1, 1], 0, 3, 3, 0]


def test_an_im2col_map() -> None:
    driver = Driver()
    made = encoded(IM2COL, 0x7000, driver)
    (call,) = driver.calls.values()
    sizes, strides = [64, 14, 28, 8], [128, 1792, 50176]
    assert [plain(a) for a in call] == [
        made.address,
        9,
        4,
        0x7000,
        sizes,
        strides,
        [-2, -1],
        [0, 1],
        64,
        128,
        [1, 2, 2, 1],
        0,
        3,
        3,
        0,
    ]


def test_a_map_that_the_driver_refuses() -> None:
    with pytest.raises(InternalError, match="the driver refuses a tensor map"):
        encoded(TILED, 0x7001, Driver(1))


def function(driver: Driver, params: list[str], attributes: dict[int, tuple[int, ...]]) -> Function:
    f = Function.__new__(Function)
    f.driver, f.params, f.attributes, f.pointer = driver, params, attributes, 77
    return f


def test_parameters_are_pointers_then_maps_then_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Library(Driver):
        def cuLaunchKernelEx(self, config: Any, function: Any, params: Any, extra: Any) -> int:
            c = config._obj
            values = [ctypes.c_uint64.from_address(p).value for p in params]
            seen.append((function.value, list(c.grid), list(c.block), c.shared_bytes, c.stream, c.count, values))
            return 0

    library = Library()
    monkeypatch.setattr(device_module, "driver_library", lambda: library)
    function(Driver(), ["y", "x"], {}).start(Launch((3, 2, 1), (128, 1, 1), 65536, 1, (TILED,)), [100, 200, 300], 5)
    ((*how, values),) = seen
    assert how == [77, [3, 2, 1], [128, 1, 1], 65536, 5, 0]
    assert values[:2] == [100, 200] and values[3] == 300
    assert library.calls["cuTensorMapEncodeTiled"][3].value == 200  # the map is of x
    again, plain = Launch((3, 1, 1), (64, 1, 1)), function(Driver(), ["y", "x"], {})
    for k in range(2):
        plain.start(again, [k, 200, 300], k)
        assert seen[-1] == (77, [3, 1, 1], [64, 1, 1], 0, k or None, 0, [k, 200, 300])


def test_kernels_that_overlap_are_launched_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Library:
        def cuLaunchKernelEx(self, config: Any, function: Any, params: Any, extra: Any) -> int:
            c = config._obj
            seen.append(
                (
                    list(c.grid),
                    list(c.block),
                    c.shared_bytes,
                    c.stream,
                    c.count,
                    c.attributes[0].id,
                    c.attributes[0].value[0],
                )
            )
            return 0

    monkeypatch.setattr(device_module, "driver_library", lambda: Library())
    function(Driver(), ["x"], {LAUNCH_SERIALIZATION: (1,)}).start(Launch((3, 1, 1), (64, 1, 1)), [100, 300], 9)
    assert seen == [([3, 1, 1], [64, 1, 1], 0, 9, 1, 6, 1)]
    monkeypatch.setattr(Library, "cuLaunchKernelEx", lambda *_: 1)
    with pytest.raises(InternalError, match="cuLaunchKernelEx failed with status 1"):
        function(Driver(), ["x"], {}).start(Launch((1, 1, 1), (1, 1, 1)), [100, 300], 0)


def test_kernels_of_one_name_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is only a name: what is shared is equal in its code and its launch."""

    class Loaded:
        def __init__(self, device: Any, cubin: bytes, symbol: str, launch: Launch, *rest: Any) -> None:
            self.made_of = cubin, symbol, launch

    monkeypatch.setattr(device_module, "Function", Loaded)
    device = CupyDevice.__new__(CupyDevice)
    device._functions, device._lock = weakref.WeakValueDictionary(), threading.Lock()
    monkeypatch.setattr(CupyDevice, "current", lambda _: nullcontext())
    one, two = Launch((3, 1, 1), (64, 1, 1)), Launch((4, 1, 1), (64, 1, 1), 0, 1, (TILED,))
    kept: list[Any] = [device.load(b"a" * 100, "kernel", one, ["x"])]
    assert device.load(b"a" * 100, "kernel", Launch((3, 1, 1), (64, 1, 1)), ["x"]) is kept[0]
    for cubin, launch in ((b"b" * 100, one), (b"a" * 100, two)):
        kept.append(device.load(cubin, "kernel", launch, ["x"]))
        assert kept[-1].made_of == (cubin, "kernel", launch)  # type: ignore[union-attr]
    kept.clear()
    assert not device._functions


@pytest.mark.parametrize(
    "most, static, dynamic, blocks, percent",
    [
        (16, 0, 0, 1000, 44),  # none: room for the next kernel's blocks
        (4, 0, 47 << 10, 1000, 85),  # of all four blocks that fit
        (4, 0, 47 << 10, 200, 44),  # there are two at most: 96 KB
        (4, 47 << 10, 0, 500, 85),
        (1, 0, 227 << 10, 132, 100),
    ],
)
def test_shared_memory_leaves_room_for_all_blocks(
    most: int, static: int, dynamic: int, blocks: int, percent: int
) -> None:
    """Of kernels that may begin early and do not live from the first-level cache."""
    found: list[Any] = []
    driver = SimpleNamespace(
        occupancyMaxActiveBlocksPerMultiprocessor=lambda f, threads, shared: most,
        funcGetAttribute=lambda name, f: static,
        funcSetAttribute=lambda f, name, value: found.append(value) if name == CARVEOUT else None,
    )
    module = SimpleNamespace(load=lambda cubin: None, get_function=lambda symbol: SimpleNamespace(ptr=1))
    device: Any = SimpleNamespace(driver=driver, new_module=lambda: module, sms=132, shared_per_sm=228 << 10)
    launch = Launch((blocks, 1, 1), (256, 1, 1), dynamic)
    for overlaps, cached in ((True, False), (True, True), (False, False)):
        Function(device, b"", "k", replace(launch, cached=cached), [], overlaps)
    assert found == [percent]


def test_launches_of_earlier_versions() -> None:
    """What these did not write has its default; all else must be there."""
    data = codec.encode(Launch((3, 1, 1), (64, 1, 1), 16))
    del data["cached"]
    assert codec.decode(Launch, data) == Launch((3, 1, 1), (64, 1, 1), 16)
    del data["grid"]
    with pytest.raises(ValueError, match="an object with block, cached, cluster, grid"):
        codec.decode(Launch, data)


def test_no_device_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "ask_device", lambda number: None)
    assert device_problem(1)
    with pytest.raises(
        TargetError,
        match=r"target cuda:1: .*Without a device models can be compiled, not run: target='cuda -arch=sm_90a'",
    ):
        open_device(1)


class Tensor:
    """Stands for a torch tensor, which has no `__cuda_array_interface__` for all of its dtypes."""

    __module__ = "torch"

    def __init__(self, dtype: str, index: int = 0, contiguous: bool = True, cuda: bool = True) -> None:
        self.dtype, self.is_cuda, self._contiguous, self.shape = f"torch.{dtype}", cuda, contiguous, (4, 2)
        self.device = type("D", (), {"index": index, "__str__": lambda _: f"cuda:{index}"})()

    def detach(self) -> Tensor:
        return self

    def contiguous(self) -> Tensor:
        return Tensor(self.dtype.removeprefix("torch."))

    def is_contiguous(self) -> bool:
        return self._contiguous

    def data_ptr(self) -> int:
        return 0x1000 if self._contiguous else 0x2000


def test_torch_tensors_are_asked_directly() -> None:
    device: Any = InterpretedDevice()
    dtype = bf16.numpy
    assert (
        is_device_array(Tensor("bfloat16"))
        and not is_device_array(Tensor("bfloat16", cuda=False))
        and not is_device_array(np.ones(3))
    )
    found = device_array(Tensor("bfloat16"), "x", dtype, 2, device)
    assert (found.address, found.shape, found.nbytes) == (0x1000, (4, 2), 16)
    assert device_array(Tensor("bfloat16", contiguous=False), "x", dtype, 2, device).address == 0x1000  # a copy
    with pytest.raises(InputError, match="a tensor on cuda:1 is given to a model on cuda:0"):
        device_array(Tensor("bfloat16", index=1), "x", dtype, 2, device)
    with pytest.raises(InputError, match="output y: expected a contiguous array"):
        output_array(Tensor("bfloat16", contiguous=False), "y", (4, 2), dtype, device)
    with pytest.raises(InputError, match="input x: expected bfloat16, got float16"):
        device_array(Tensor("float16"), "x", dtype, 2, device)


def test_an_interpreted_stream_ends_with_its_object() -> None:
    """As a real one does, whose driver does not survive that it is used afterwards."""
    device = InterpretedDevice()
    memory, queue = device.alloc(16), device.new_stream()
    device.fill(memory.address, 1, 16, queue.address)
    address = queue.address
    graph = device.capture(address, lambda: device.fill(memory.address, 2, 16, address))
    del queue
    for use in (
        lambda: device.fill(memory.address, 3, 16, address),
        lambda: device.capture(address, lambda: None),
        lambda: graph.launch(address),
        lambda: device.synchronize(address),
    ):
        with pytest.raises(InternalError, match="has ended"):
            use()
    graph.launch(device.current_stream())
    assert (device.bytes_at(memory.address, 16) == 2).all()
