"""Calls on CUDA arrays: CuPy, torch, `__cuda_array_interface__`, DLPack; no copy to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dnnc.backends.runtime.arrays import Defer, device_array, is_device_array, kind_of, output_array, stream_address
from dnnc.backends.runtime.device import PARAMETER_ALIGN, Device, DeviceArray
from dnnc.donation import Donation
from dnnc.ir.errors import InputError
from dnnc.parameters import Parameters
from dnnc.program_cache import ProgramCache
from dnnc.signature import Signature, converted


class DeviceCalls:
    """Calls whose first input lies on a device. `device` opens it. TargetError: it is not here."""

    def __init__(
        self, device: Callable[[], Device], signature: Signature, donation: Donation | None, cache: ProgramCache
    ) -> None:
        self._device, self._signature, self._cache = device, signature, cache
        self._donation = donation or Donation({}, signature.input_names)

    def run(
        self, values: Sequence[Any], outputs: Sequence[Any] | None, stream: Any, parameters: Parameters | None
    ) -> list[Any]:
        device = self._device()
        kind = kind_of(values[0], device)
        order = kind.stream if stream is None else stream_address(stream)
        weights = _on_device(parameters)
        views = self._views(values, device, weights)
        instance = self._instance(views)
        pairs = self._donation.pairs
        if outputs is None:
            results = [
                values[pairs[k]] if k in pairs else kind.empty(s, d) for k, (s, d) in enumerate(instance.outputs)
            ]
            named = enumerate(zip(self._signature.output_names, results, instance.outputs))
            made = [views[pairs[k]] if k in pairs else output_array(r, n, s, d, device) for k, (n, r, (s, d)) in named]
        else:
            results = list(outputs)
            made = self._output_views(instance, views, results, device, weights)
        if not instance.empty:
            self._start(instance, views, made, order, kind.defer)
        for ready in {views[j].ready for j in pairs.values()} - {None, order}:
            _follow(device, order, int(ready or 0))  # where its owner looks for it, or uses the memory again
        if outputs is not None:
            return results
        copied = {
            k for k, j in pairs.items() if views[j].copied
        }  # whose elements were not contiguous: the copy was donated
        return [
            kind.finish(made[k].keep if k in copied else r) if k in copied or k not in pairs else r
            for k, r in enumerate(results)
        ]

    def bind(self, values: Sequence[Any], outputs: Sequence[Any], parameters: Parameters | None) -> BoundCall:
        """See `Executable.bind`; the call has a frame of its own."""
        results, weights = self._signature.buffers(outputs), _on_device(parameters)
        device = self._device()
        views = self._views(values, device, weights, keep=True)
        instance = self._instance(views)
        made = self._output_views(instance, views, results, device, weights)
        frame = instance.own_frame()
        kind = kind_of(values[0], device)
        addresses = [v.address for v in views], [v.address for v in made]
        if any(a % PARAMETER_ALIGN for group in addresses for a in group):
            launch: Callable[[int], None] = lambda stream: frame.run_device(*addresses, stream)  # noqa: E731
        else:
            launch = frame.bind(*addresses)
        return BoundCall(
            launch, kind.stream, frame if instance.program.guarded else None, (views, made, frame), instance
        )

    def _start(
        self,
        instance: Any,
        views: Sequence[DeviceArray],
        made: Sequence[DeviceArray],
        stream: int,
        defer: Defer | None,
    ) -> None:
        with instance.frame() as frame:
            for other in {v.ready for v in views if v.ready not in (None, stream)}:
                _follow(frame.device, int(other or 0), stream)
            frame.run_device([v.address for v in views], [v.address for v in made], stream)
            if instance.program.guarded and defer is not None:
                defer(frame, lambda: _raise(instance, frame.status_of_before()), stream)
            elif instance.program.guarded:
                _raise(instance, frame.outcome(stream))

    def _instance(self, views: Sequence[DeviceArray]) -> Any:
        instance = self._cache.instance(tuple([v.shape for v in views]))
        return instance

    def _views(
        self, values: Sequence[Any], device: Device, weights: Sequence[DeviceArray], keep: bool = False
    ) -> list[DeviceArray]:
        """Bring inputs to the device. `keep`: memory of donated ones must be such that it can be kept."""
        out = self._brought(values, device)
        if not self._donation.pairs:
            return out
        self._donation.check_side(values, True)
        for j in self._donation.pairs.values():
            name, own = self._donation.names[j], getattr(values[j], "__dnnc_own__", None)
            if keep and own is not None:
                raise InputError(
                    f"input {name}: arrays of dnnc.array are values, and no memory that bind could keep; give a CuPy "
                    "or torch array"
                )
            if keep and out[j].copied:
                raise InputError(f"input {name}: bind needs a contiguous array that it can keep")
            if own is not None:
                del out[j]  # references are counted
                out.insert(j, own().__dnnc_array__(device.number))
        self._donation.check_views(out, weights)
        return out

    def _brought(self, values: Sequence[Any], device: Device) -> list[DeviceArray]:
        out = []
        for value, (name, dtype, rank) in zip(values, self._signature.expected):
            if not is_device_array(value):
                host = converted(value, name, dtype, rank)
                value = device.empty(host.shape, host.dtype)
                if host.nbytes:
                    device.upload(int(value.__cuda_array_interface__["data"][0]), host, 0)
                    device.synchronize(0)
            out.append(device_array(value, name, dtype, rank, device))
        return out

    def _output_views(
        self,
        instance: Any,
        inputs: Sequence[DeviceArray],
        results: Sequence[Any],
        device: Device,
        weights: Sequence[DeviceArray],
    ) -> list[DeviceArray]:
        self._signature.check_count(results)
        made: list[DeviceArray] = []
        for k, (name, r, (shape, dtype)) in enumerate(zip(self._signature.output_names, results, instance.outputs)):
            view = output_array(r, name, shape, dtype, device)
            own = self._donation.pairs.get(k)
            others = [v for j, v in enumerate(inputs) if j != own or v.address != view.address]
            if any(view.overlaps(v) for v in (*others, *made, *weights)):
                raise InputError(f"output {name} overlaps another buffer of the call")
            made.append(view)
        return made


class BoundCall:
    """`call()` runs a bound program and returns when it is queued, in the order of the stream on which it was bound (on
    NumPy arrays: when it is done). `call.check()` waits, and raises what a call would have raised of the data.
    """

    __slots__ = ("_instance", "_frame", "_keep", "_launch", "_stream")

    def __init__(self, launch: Callable[[int], None], stream: int, frame: Any, keep: Any, instance: Any) -> None:
        self._launch, self._stream, self._frame, self._keep, self._instance = launch, stream, frame, keep, instance

    def __call__(self) -> None:
        self._launch(self._stream)

    def check(self) -> None:
        """InputError: an index that was read at run time lay outside of its axis."""
        if self._frame is not None:
            _raise(self._instance, self._frame.outcome(self._stream))


def _follow(device: Device, first: int, then: int) -> None:
    """What comes on one stream from now on waits for what is on the other."""
    event = device.new_event()
    device.record(event, first)
    device.wait(event, then)


def _on_device(parameters: Parameters | None) -> Sequence[DeviceArray]:
    """Arrays on the device that are parameters, which kernels may read as they are."""
    return () if parameters is None else parameters.on_device


def _raise(instance: Any, status: tuple[int, int, int]) -> None:
    """InputError where a kernel has found an index outside of its axis."""
    if status[0]:
        instance.fail(status)
