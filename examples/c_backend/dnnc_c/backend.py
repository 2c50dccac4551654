"""The target `c`: kernels as C99, one thread, compiled with the system's C compiler. Options: `c -cc=clang`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from dnnc.backends.base import Backend
from dnnc.backends.runtime.host_runner import Function
from dnnc.ir.errors import TargetError
from dnnc.ir.loops.stmt import Kernel
from dnnc.ir.target import Target, TargetFacts
from dnnc_c import compile as compile_
from dnnc_c import emit
from dnnc_c.compile import compile_many, identity, load
from dnnc_c.emit import MATH, emit_kernel


@cache
def printer_version() -> str:
    """A hash of what turns a kernel's text into code, so that a change of it never meets code of before."""
    return hashlib.sha256(b"".join(Path(str(m.__file__)).read_bytes() for m in (emit, compile_))).hexdigest()


class CBackend(Backend):
    """See Backend."""

    name = "c"
    stages = ("graph", "operator", "c")
    comments = {"c": "//"}

    def __init__(self, target: Target, threads: int | None = None) -> None:
        wrong = [name for name, _ in target.options if name != "cc"]
        if wrong:
            raise TargetError(f"target={str(target)!r}: there is no option -{wrong[0]}; there is -cc=COMPILER")
        self.target = self.cc = target.option("cc", "cc")

    @property
    def code_version(self) -> str:
        return f"{identity(self.cc)} {printer_version()}"

    def facts(self, numerics: str) -> TargetFacts:
        return TargetFacts(lanes=1, native_intrinsics=MATH)

    def emit(self, kernel: Kernel, symbol: str) -> str:
        return emit_kernel(kernel, symbol)

    def compile(
        self, texts: Mapping[str, str], failed: dict[str, Exception], tell: Callable[[int, int], None] | None
    ) -> Mapping[str, bytes]:
        return compile_many(self.cc, texts, failed, tell)

    def functions(self, code: Mapping[str, bytes]) -> Mapping[str, Function]:
        return load(code)

    @classmethod
    def availability(cls) -> dict[str, Any]:
        return {**super().availability(), "compiler": identity("cc")}
