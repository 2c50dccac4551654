"""A model with host steps between segments on a device. Arrays on the device are taken and given as a DeviceExecutable does, but go over the host,
where some of the steps are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dnnc.backends.cuda.arrays import Kind, device_array, from_host, is_device_array, kind_of, to_host
from dnnc.backends.cuda.native import Device
from dnnc.staged import StagedExecutable

Array = np.ndarray[Any, Any]


class DeviceStaged(StagedExecutable):
    """See StagedExecutable. `device` opens the device of the segments."""

    def __init__(self, device: Callable[[], Device], *args: Any) -> None:
        self._device = device
        super().__init__(*args)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run the model. InputError names the input, or the host node and what it cannot work with."""
        return self.run(self._signature.in_order(args, named))

    def run(self, inputs: Any, outputs: Sequence[Any] | None = None, stream: Any = None) -> Any:
        """Run into given buffers of the first input's kind; without them as a call. `stream` has no meaning where the host takes part."""
        given = self._signature.in_order(self._signature.arguments(inputs), {})
        if not given or not is_device_array(given[0]):
            return super().run([to_host(v) if is_device_array(v) else v for v in given], outputs)
        device = self._device()
        kind = kind_of(given[0], device)
        device.synchronize(kind.stream)
        results = super().run([to_host(v) if is_device_array(v) else v for v in given])
        many = results if isinstance(results, tuple) else (results,)
        if outputs is None:
            made: list[Any] = [kind.finish(from_host(r, kind, device)) for r in many]
        else:
            made = list(outputs)
            self._fill(many, made, kind, device)
        return made[0] if len(made) == 1 else tuple(made)

    def _fill(self, results: Sequence[Array], given: Sequence[Any], kind: Kind, device: Device) -> None:
        host = [np.empty(tuple(g.shape), r.dtype) for g, r in zip(given, results)]
        self._into(results, host)
        for r, g, name in zip(host, given, self._signature.output_names):
            device.upload(device_array(g, name, r.dtype, r.ndim, device).address, r, kind.stream)
        device.synchronize(kind.stream)
