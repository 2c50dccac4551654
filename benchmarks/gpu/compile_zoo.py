"""The models of a zoo compiled for a GPU that need not be here: every kernel goes through NVRTC, none may spill
registers.

    python benchmarks/gpu/compile_zoo.py [--models zoo] [--set all|float|NAME,NAME] [--arch sm_90a]
        [--precision float32] [--cache DIR]

The folder is made by `python benchmarks/zoo build DIR --weights seeded`. A line for each model: kernels that were
compiled (each text once in a run), seconds, which templates. Exit code 1 when a model does not compile or a kernel
spills. `make cuda-zoo` runs it.
"""

from __future__ import annotations

import argparse
import collections
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # zoo

import zoo

import dnnc
from dnnc.backends.cuda.backend import CudaBackend
from dnnc.backends.cuda.build import NvrtcCompiler
from dnnc.backends.cuda.emit import emit_kernel
from dnnc.backends.cuda.nvrtc import compile_many
from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.registry import BACKENDS
from dnnc.ir.errors import DnncError
from dnnc.ir.loops.stmt import Kernel


class WatchfulCompiler(NvrtcCompiler):
    """Keeps count, and the names of kernels that spill."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self.compiled = 0
        self.spilling: list[str] = []

    def compile(
        self, kernels: Mapping[str, Kernel], target: GpuTarget, tell: Callable[[int, int], None] | None
    ) -> dict[str, bytes]:
        made = compile_many(
            {name: (emit_kernel(k, name, target), target.arch) for name, k in kernels.items()}, self.threads
        )
        self.compiled += len(made)
        self.spilling += [f"{kernels[name].name}: {c.spills} bytes" for name, c in made.items() if c.spills]
        return {name: c.cubin for name, c in made.items()}


def arguments() -> argparse.Namespace:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--models", type=Path, default=Path("zoo"), help="folder with models and their manifest.json")
    ap.add_argument("--set", default="all", help="all, float (no quantized models), or names separated by commas")
    ap.add_argument("--arch", default="sm_90a")
    ap.add_argument(
        "--precision", choices=["float32", "tf32", "float16", "bfloat16"], help="by default the model's own"
    )
    ap.add_argument("--cache", help="folder of compiled kernels to start from, and to leave; by default none")
    return ap.parse_args()


class WatchfulBackend(CudaBackend):
    """A GPU that is not here, whose compiler looks for spills."""

    watch: WatchfulCompiler

    def _device_here(self) -> None:
        return None

    @property
    def compiler(self) -> WatchfulCompiler:
        return self.watch


def compile_model(folder: Path, row: Mapping[str, Any], a: argparse.Namespace, cache: str) -> collections.Counter[str]:
    """Compile a model for the sizes that the manifest gives; the templates of its kernels."""
    f = dnnc.compile(zoo.load(folder, row), target=f"cuda -arch={a.arch}", precision=a.precision, cache=cache)
    if f.deferred:
        return collections.Counter({"(sizes depend on data: compiled when it is called)": 1})
    if not f.report.programs:
        inputs = zoo.make_inputs(row)
        f.prepare([inputs[i.name].shape for i in f.inputs])
    return collections.Counter(str(k.choice).split("(")[0] for p in f.report.programs for k in p.kernels)


def main() -> int:
    a = arguments()
    compiler = WatchfulCompiler(os.cpu_count() or 1)
    WatchfulBackend.watch = compiler
    BACKENDS["cuda"] = WatchfulBackend
    rows, failed = zoo.read_manifest(a.models), 0
    names = (
        a.set.split(",")
        if a.set not in ("all", "float")
        else [n for n, r in rows.items() if a.set == "all" or not zoo.is_quantized(r)]
    )
    with tempfile.TemporaryDirectory() as fresh:
        for name in names:
            start, before, spilled = time.perf_counter(), compiler.compiled, len(compiler.spilling)
            try:
                used = compile_model(a.models, rows[name], a, a.cache or fresh)
                bad = compiler.spilling[spilled:]
                found = ", ".join(f"{n} {t}" for t, n in used.most_common()) + "".join(f"\n    SPILLS {k}" for k in bad)
            except DnncError as e:
                bad, found = [name], f"FAILED {type(e).__name__}: {e}"
            failed += bool(bad)
            print(
                f"{name:22} {compiler.compiled - before:4} kernels {time.perf_counter() - start:6.1f} s  {found}",
                flush=True,
            )
    print(
        f"{len(names) - failed} of {len(names)} models compile for {a.arch} without spills; {compiler.compiled} kernels"
    )
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
