"""The CPU that code is made for, as data: LLVM's name and feature flags, vector width, registers, caches, threads.

In: a target text such as `llvm -mcpu=skylake-avx512 -threads=2`. Out: a CpuTarget, which schedules and the emitter
read. Only names of the table below and the host's own are accepted: LLVM ends the process on an unknown name.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from dnnc.backends.llvm.amx import FEATURES, request_tiles
from dnnc.backends.llvm.compile import binding
from dnnc.backends.runtime.frames import cpu_count
from dnnc.ir.errors import TargetError
from dnnc.ir.target import CoreRates

_V2 = ("cx16", "popcnt", "sahf", "sse3", "sse4.1", "sse4.2", "ssse3")
_V3 = (*_V2, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave")
_V4 = (*_V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")
_VNNI = (*_V4, "avx512vnni")
_ICE = (*_VNNI, "avx512bitalg", "avx512ifma", "avx512vbmi", "avx512vbmi2", "avx512vpopcntdq")
_SPR = (*sorted(FEATURES), *_ICE, "avx512bf16", "avx512fp16", "avxvnni")
# What may be used on each CPU: of all that it has, the part that generated code can profit from.
X86_CPUS: dict[str, tuple[str, ...]] = {
    "x86-64": (), "x86-64-v2": _V2, "x86-64-v3": _V3, "x86-64-v4": _V4,
    "nehalem": _V2, "westmere": _V2, "sandybridge": (*_V2, "avx"), "ivybridge": (*_V2, "avx", "f16c"),
    "haswell": _V3, "broadwell": _V3, "skylake": _V3, "znver1": (*_V3, "sse4a"), "znver2": (*_V3, "sse4a"),
    "znver3": (*_V3, "sse4a"),
    "alderlake": (*_V3, "avxvnni"), "raptorlake": (*_V3, "avxvnni"), "meteorlake": (*_V3, "avxvnni"),
    "sierraforest": (*_V3, "avxvnni"),
    "skylake-avx512": _V4, "cascadelake": _VNNI, "cooperlake": (*_VNNI, "avx512bf16"),
    "icelake-client": _ICE, "icelake-server": _ICE, "rocketlake": _ICE, "tigerlake": _ICE,
    "znver4": (*_ICE, "avx512bf16", "sse4a"),
    "znver5": (*_ICE, "avx512bf16", "avxvnni", "sse4a"),
    "sapphirerapids": _SPR, "emeraldrapids": _SPR, "graniterapids": _SPR,
}  # fmt: skip
# KiB of a core's first-level data cache and second-level cache; of an efficient core where a CPU has two kinds.
_CACHES: dict[tuple[int, int], str] = {
    (32, 256): "nehalem westmere sandybridge ivybridge haswell broadwell skylake",
    (32, 512): "znver1 znver2 znver3",
    (32, 1024): "skylake-avx512 cascadelake cooperlake znver4 sierraforest",
    (32, 2048): "alderlake raptorlake meteorlake",
    (48, 512): "icelake-client rocketlake",
    (48, 1024): "znver5",
    (48, 1280): "icelake-server tigerlake",
    (48, 2048): "sapphirerapids emeraldrapids graniterapids",
}


class Datapath(NamedTuple):
    """What a core does in a cycle: bits of multiply-adds, loads and stores, bytes of its L2 cache and of memory, bits
    of sums of two bfloat16 products; a multiply-add's latency in cycles.

    Sources: the vendors' optimization guides and uops.info. L2 and memory are sustained rates, so below the widths of
        the buses. CPUs without FMA
    do a multiplication and an addition side by side. A CPU that splits 512-bit vectors in two has 512 bits of
    multiply-adds.
    """

    fma: int
    loads: int
    stores: int
    latency: int
    l2: int
    memory: int
    pairs: int = 0


_DATAPATHS = (
    (Datapath(fma=128, loads=128, stores=128, latency=8, l2=16, memory=3), "x86-64 x86-64-v2 nehalem westmere"),
    (Datapath(fma=256, loads=256, stores=128, latency=8, l2=24, memory=4), "sandybridge ivybridge"),
    (Datapath(fma=256, loads=256, stores=128, latency=5, l2=24, memory=5), "znver1"),
    (Datapath(fma=512, loads=512, stores=256, latency=5, l2=24, memory=5), "znver2 haswell broadwell"),
    (
        Datapath(fma=512, loads=512, stores=256, latency=4, l2=28, memory=6),
        "znver3 skylake x86-64-v3 alderlake raptorlake meteorlake",
    ),
    (Datapath(fma=512, loads=512, stores=256, latency=4, l2=28, memory=6, pairs=512), "znver4"),
    (Datapath(fma=256, loads=256, stores=256, latency=4, l2=24, memory=4), "sierraforest"),
    (Datapath(fma=512, loads=1024, stores=512, latency=4, l2=42, memory=6), "icelake-client rocketlake tigerlake"),
    (
        Datapath(fma=1024, loads=1024, stores=512, latency=4, l2=42, memory=4),
        "skylake-avx512 cascadelake icelake-server x86-64-v4",
    ),
    (
        Datapath(fma=1024, loads=1024, stores=512, latency=4, l2=42, memory=4, pairs=256),
        "cooperlake sapphirerapids emeraldrapids graniterapids",
    ),
    (Datapath(fma=1024, loads=1024, stores=512, latency=4, l2=57, memory=6, pairs=1024), "znver5"),
)
# A CPU that the table lacks is like the first of these whose features it has: hypervisors rename CPUs.
_MAKES = (
    ({"avx512fp16"}, "sapphirerapids"), ({"avx512bf16", "avxvnni", "sse4a"}, "znver5"),
    ({"avx512bf16", "sse4a"}, "znver4"), ({"avx512f"}, "x86-64-v4"),
    ({"avx2", "fma", "sse4a"}, "znver2"), ({"avx2", "fma"}, "x86-64-v3"), ({"avx"}, "sandybridge"),
    (set[str](), "x86-64"),
)  # fmt: skip
# Feature -> beginnings of the names of those that need it.
_BUILT_ON = {
    "avx": ("avx", "fma", "f16c"),
    "avx2": ("avx512", "avxvnni"),
    "avx512f": ("avx512",),
    "amx-tile": ("amx-",),
}
# Where the system does not tell: less than any CPU of the last ten years has, so that tiles fit.
L1_FALLBACK, L2_FALLBACK = 32 << 10, 256 << 10
_CPU_FOLDER = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class CpuTarget:
    """A CPU to generate code for."""

    cpu: str  # LLVM's name
    features: str  # `+avx2,-avx512f`, as LLVM takes them
    vector_bits: int  # width of the vectors to use
    registers: int  # vector registers of that width
    threads: int  # threads of a call
    # bytes of a core's first-level data cache: of the named CPU, or of this machine if that is its own or none
    l1: int
    l2: int  # bytes of its second-level cache

    def __repr__(self) -> str:
        return (
            f"CpuTarget(cpu={self.cpu!r}, features={len(self.feature_set)}, vector_bits={self.vector_bits}, "
            f"threads={self.threads})"
        )

    @property
    def lanes(self) -> int:
        """float32 values in a vector."""
        return self.vector_bits // 32

    @property
    def rates(self) -> CoreRates:
        """What a core does in a cycle."""
        return core_rates(self.cpu, self.features, self.vector_bits)

    @property
    def feature_set(self) -> frozenset[str]:
        """The names of the features that are on."""
        return enabled(self.features)

    @property
    def foreign(self) -> tuple[str, ...]:
        """Features that this machine lacks: code for the target compiles here but may not run."""
        return tuple(sorted(self.feature_set - enabled(host_cpu()[1])))


def parse_target(text: str, threads: int | None = None) -> CpuTarget:
    """The CPU that a target text asks for.

    Args:
        text: `llvm`, then any of `-mcpu=NAME` (default: this machine's CPU), `-mattr=+a,-b`, `-threads=N`.
        threads: what holds where the text has no -threads; default: the CPUs on which the process may run, which is
            also the limit.

    TargetError: another kind of target, an unknown option, CPU or feature flag, or a thread count below 1.
    """
    kind, *words = text.split() or [""]
    if kind != "llvm":
        raise TargetError(f"target {text!r}: expected 'llvm' first")
    options = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in ("-mcpu", "-mattr", "-threads") or not value:
            raise TargetError(
                f"target {text!r}: {word!r} is none of -mcpu=NAME, -mattr=+FEATURE,-FEATURE and -threads=N"
            )
        options[name] = value
    cpu, features = _named_cpu(options.get("-mcpu", "native"))
    features = ",".join(filter(None, (features, _checked_flags(options.get("-mattr", "")))))
    wide = vector_bits(features)
    l1, l2 = _caches_of(cpu)
    count = _thread_count(options.get("-threads", threads))
    return CpuTarget(cpu, features, wide, 32 if wide == 512 or _is_arm() else 16, count, l1, l2)


@cache  # 0.2 ms a time, and every compilation asks
def host_cpu() -> tuple[str, str]:
    """This machine's CPU: LLVM's name for it, and all its feature flags that the process may use."""
    llvm = binding()
    flags = llvm.get_host_cpu_features().flatten()
    if "+amx-tile" in flags and not request_tiles():
        flags = ",".join(f"-{f[1:]}" if f.startswith("+amx-") else f for f in flags.split(","))
    return llvm.get_host_cpu_name(), flags


def enabled(features: str) -> frozenset[str]:
    """Return the features after all flags: later flags win, and removing one removes its dependents."""
    state = {flag[1:]: flag[0] == "+" for flag in features.split(",") if flag}
    gone = tuple(p for base, on_top in _BUILT_ON.items() if not state.get(base, True) for p in on_top)
    return frozenset(name for name, on in state.items() if on and not name.startswith(gone))


def vector_bits(features: str) -> int:
    """The vector width to use: 512 with AVX-512 F, BW, VL and DQ, 256 with AVX2 and FMA, else 128."""
    on = enabled(features)
    if on >= {"avx512f", "avx512bw", "avx512vl", "avx512dq"}:
        return 512
    return 256 if on >= {"avx2", "fma"} else 128


@cache
def core_rates(cpu: str, features: str, bits: int) -> CoreRates:
    """Rates of a core for vectors of `bits`. Features contradict names: AVX512-FP16 is no Rocket Lake."""
    on, names = enabled(features), " ".join(names for _, names in _DATAPATHS).split()
    told = cpu in names and ("avx512fp16" in on) <= ("avx512fp16" in X86_CPUS[cpu])
    wanted = cpu if told else next(name for needed, name in _MAKES if needed <= on)
    path = next(path for path, cpus in _DATAPATHS if wanted in cpus.split())
    return CoreRates(
        min(path.fma / bits, 2),
        min(path.loads / bits, 2),
        min(path.stores / bits, 1),
        min(path.pairs / bits, 2) if "avx512bf16" in on and bits == 512 else 0.0,
        1.0 if bits == 512 and on >= FEATURES else 0.0,
        path.latency,
        path.l2,
        path.memory,
    )


def cache_sizes(folder: Path = _CPU_FOLDER) -> tuple[int, int]:
    """Return the first CPU's (L1 data, L2) in bytes; fallbacks where the system does not tell."""
    sizes = _caches(folder)
    return sizes.get("1") or L1_FALLBACK, sizes.get("2") or L2_FALLBACK


def _caches_of(cpu: str) -> tuple[int, int]:
    """(L1 data, L2) of a CPU, bytes."""
    known = next((sizes for sizes, names in _CACHES.items() if cpu in names.split()), None)
    return cache_sizes() if known is None or cpu == host_cpu()[0] else (known[0] << 10, known[1] << 10)


def last_level_cache(folder: Path = _CPU_FOLDER) -> int:
    """Return the bytes of the first CPU's last-level cache, or of its L2 where the system does not tell."""
    return max(_caches(folder).values(), default=L2_FALLBACK)


def _caches(folder: Path) -> dict[str, int]:
    """Bytes of the data caches by level."""
    cpu = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    sizes: dict[str, int] = {}
    for index in sorted((folder / f"cpu{cpu}" / "cache").glob("index*")):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
            if kind != "Instruction":
                sizes[level] = int(size[:-1]) << {"K": 10, "M": 20}[size[-1]]
        except (OSError, ValueError, KeyError, IndexError):
            continue
    return sizes


def _is_arm() -> bool:
    return platform.machine().lower() in ("aarch64", "arm64")


def _named_cpu(name: str) -> tuple[str, str]:
    host, flags = host_cpu()
    if name in ("native", host):
        return host, flags
    if name == "generic" and _is_arm():
        return name, "+neon"
    known = {} if _is_arm() else X86_CPUS
    name = "x86-64" if name == "generic" and not _is_arm() else name
    if name not in known:
        raise TargetError(f"-mcpu={name}: unknown CPU; there are native ({host}), generic, {', '.join(known)}")
    return name, ",".join(f"+{f}" for f in known[name])


def _checked_flags(flags: str) -> str:
    if not flags:
        return flags
    known = {f for names in X86_CPUS.values() for f in names} | set(binding().get_host_cpu_features())
    for flag in flags.split(","):
        if flag[:1] not in ("+", "-") or flag[1:] not in known:
            raise TargetError(f"-mattr: {flag!r} is not + or - and one of {', '.join(sorted(known))}")
    return flags


def _thread_count(asked: str | int | None) -> int:
    if asked is None:
        return cpu_count()
    if not str(asked).isdigit() or int(asked) < 1:
        raise TargetError(f"-threads={asked}: expected an integer of at least 1")
    return min(int(asked), cpu_count())


def canonical_text(t: CpuTarget) -> str:
    """The target as text, the same for equal CPUs: `llvm -mcpu=znver5 -threads=2`."""
    return " ".join(["llvm", f"-mcpu={t.cpu}", *_unusual(t), f"-threads={t.threads}"])


@cache
def _unusual(t: CpuTarget) -> tuple[str, ...]:
    """Return `-mattr=` with features that count and differ from the CPU name's defaults; empty if none."""
    usual = frozenset(X86_CPUS.get(t.cpu, ()))
    counted = frozenset(f for names in X86_CPUS.values() for f in names)
    on = t.feature_set & counted

    def gives(flags: Sequence[str]) -> bool:
        return enabled(",".join([*(f"+{f}" for f in sorted(usual)), *flags])) & counted == on

    flags = sorted(
        [*(f"+{f}" for f in on - usual), *(f"-{f}" for f in usual - on)],
        key=lambda f: (f[0], re.sub(r"\d+", "", f[1:]), f),
    )
    for f in sorted(flags, key=lambda f: (-len(f), f)):  # one that follows from another need not be said
        rest = [x for x in flags if x != f]
        if gives(rest):
            flags = rest
    return (f"-mattr={','.join(flags)}",) if flags else ()
