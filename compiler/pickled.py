"""Executables as pickles: the bytes that `save` writes. `copy.deepcopy` and process pools take the same way."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from dnnc.ir.errors import InputError

if TYPE_CHECKING:
    from dnnc.options import CompileOptions


class Pickled:
    """A base of executables that `save` to a file and have `options`."""

    if TYPE_CHECKING:

        @property
        def options(self) -> CompileOptions: ...

        def save(self, path: Any) -> None: ...

    def __reduce__(self) -> Any:
        if getattr(self, "parameters", ()):
            raise InputError(
                "an executable with parameters cannot be pickled or copied, for they belong to their owner: f.save(path) writes it with their "
                "values as constants, and dnnc.load(path) reads that"
            )
        file = io.BytesIO()
        self.save(file)
        return _restored, (file.getvalue(), self.options.cache)


def _restored(data: bytes, cache: Any) -> Any:
    from dnnc.loading import load

    return load(io.BytesIO(data), cache=cache)
