"""Kernels as objects: what LLVM makes of their text, with the code of sparse rows that it does not see.

Kernels that differ in patterns of sparse weights alone have one text, which is printed and compiled once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from dnnc.backends.llvm.compile import compile_text
from dnnc.backends.llvm.elf import attached, renamed
from dnnc.backends.llvm.emit import emit_kernel, rows_of
from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.sparse_rows import machine_code
from dnnc.ir.errors import DnncError, InternalError
from dnnc.ir.loops.stmt import Kernel, SparseRows

PATTERN = re.compile(r'( \d+x\d+ \d+x\d+) [A-Za-z0-9+/=]+"\)$', re.M)  # of `sparse_rows`, at the end of a line
Compile = Callable[[Mapping[str, str], dict[str, Exception]], dict[str, bytes]]  # texts, errors -> objects, by symbol


def kernel_code(kernel: Kernel, symbol: str, target: CpuTarget) -> bytes:
    """The object of one kernel."""
    obj = compile_text(emit_kernel(kernel, symbol, target.feature_set), target.cpu, target.features)
    rows = rows_of(kernel, symbol)
    return attached(obj, _codes(rows)) if rows else obj


def _codes(rows: Mapping[str, SparseRows]) -> dict[str, bytes]:
    return {name: machine_code(s) for name, s in rows.items()}


@dataclass
class SharedTexts:
    """Kernels of one build, of which some have a text in common.

    Args:
        target: the CPU.
        texts: of kernels in operator IR, by symbol.
        symbol_of: the symbol of such a text.
    """

    target: CpuTarget
    texts: Mapping[str, str]
    symbol_of: Callable[[str], str]
    common: dict[str, str] = field(default_factory=dict)  # symbols of kernels with rows -> that of their text
    printed: dict[str, str] = field(default_factory=dict)  # texts by the latter
    rows: dict[str, dict[str, SparseRows]] = field(default_factory=dict)

    def emit(self, kernel: Kernel, symbol: str) -> str:
        """LLVM text of a kernel."""
        rows = rows_of(kernel, symbol)
        if not rows:
            return emit_kernel(kernel, symbol, self.target.feature_set)
        shared = self.symbol_of(PATTERN.sub(r'\1")', self.texts[symbol]))
        if shared not in self.printed:
            self.printed[shared] = emit_kernel(kernel, shared, self.target.feature_set)
        self.common[symbol], self.rows[symbol] = shared, rows
        return self.printed[shared].replace(shared, symbol)

    def repeats(self, symbol: str) -> bool:
        """Is there another kernel with the same text, ahead of this one?"""
        shared = self.common.get(symbol)
        return shared is not None and next(s for s, c in self.common.items() if c == shared) != symbol

    def compile(self, texts: Mapping[str, str], failed: dict[str, Exception], compile: Compile) -> dict[str, bytes]:
        """Objects of kernels, by symbol.

        Args:
            texts: what `emit` made.
            failed: takes errors, by symbol.
            compile: compiles texts that have nothing in common.
        """
        needed = {self.common.get(name, name): text for name, text in texts.items()}
        errors: dict[str, Exception] = {}
        with ThreadPoolExecutor(1) as beside:  # LLVM lets other threads run
            codes = {name: beside.submit(_codes, self.rows[name]) for name in texts if name in self.common}
            made = compile({name: self.printed.get(name, text) for name, text in needed.items()}, errors)
        out: dict[str, bytes] = {}
        for name in texts:
            shared = self.common.get(name, name)
            if shared in errors:
                failed[name] = errors[shared]
            elif shared == name:
                out[name] = made[name]
            else:
                try:
                    out[name] = attached(renamed(made[shared], shared, name), codes.pop(name).result())
                except (DnncError, ValueError, MemoryError) as e:
                    failed[name] = InternalError(f"{name}: the code of sparse rows cannot be made: {e}")
        return out
