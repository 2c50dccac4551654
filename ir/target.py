"""Targets as data, so that passes can ask what a machine has without importing a backend."""

from __future__ import annotations

from dataclasses import dataclass

from dnnc.ir.errors import TargetError

KINDS = ("llvm", "cuda", "reference")


@dataclass(frozen=True)
class CoreRates:
    """What one CPU core sustains in a cycle at most; vectors are of the width that generated code uses.

    Attributes:
        fma: vectors of multiply-adds.
        loads: vectors loaded from the L1 cache.
        stores: vectors stored to it.
        latency: cycles until the result of a multiply-add can be used.
        l2: bytes read from the L2 cache.
        memory: bytes read from memory while the other cores of the chip read as well.
    """

    fma: float = 2.0
    loads: float = 2.0
    stores: float = 1.0
    latency: float = 4.0
    l2: float = 57.0
    memory: float = 6.0

    @property
    def chains(self) -> int:
        """Independent multiply-adds that hide their latency."""
        return round(self.fma * self.latency)


WIDE_CORE = CoreRates()  # two 512-bit multiply-adds a cycle


@dataclass(frozen=True)
class Target:
    """What to compile for: `llvm -mcpu=skylake-avx512 -threads=2`, `cuda:1 -arch=sm_90a`, `reference` (the graph interpreter)."""

    kind: str
    device: int = 0
    options: tuple[tuple[str, str], ...] = ()

    def option(self, name: str, default: str = "") -> str:
        return dict(self.options).get(name, default)

    def __str__(self) -> str:
        head = f"{self.kind}:{self.device}" if self.device else self.kind
        return " ".join([head, *(f"-{k}={v}" for k, v in self.options)])


def parse_target(text: str | Target) -> Target:
    """Read a target. TargetError says what is wrong with it."""
    if isinstance(text, Target):
        return text
    words = text.split()
    kind, _, device = words[0].partition(":") if words else ("", "", "")
    if kind not in KINDS:
        raise TargetError(f"target={text!r}: expected 'llvm', 'cuda' or 'reference' first; `dnnc targets` lists what this machine has")
    if device and not (kind == "cuda" and device.isdigit()):
        raise TargetError(f"target={text!r}: a device number is written cuda:1")
    options = []
    for w in words[1:]:
        name, _, v = w.partition("=")
        if not w.startswith("-") or "=" not in w:
            raise TargetError(f"target={text!r}: {w!r} is no option; they are written -name=value, such as -mcpu=skylake-avx512")
        options.append((name.lstrip("-"), v))
    return Target(kind, int(device or 0), tuple(options))
