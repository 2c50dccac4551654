"""Compiles C with the system's compiler into libraries, and loads them."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from dnnc.backends.runtime.host_runner import Function
from dnnc.ir.errors import InternalError, TargetError

OPTIONS = ("-std=c99", "-O2", "-shared", "-fPIC", "-fwrapv", "-ffp-contract=off", "-w")


@cache
def identity(cc: str) -> str:
    """Version of a compiler. TargetError: it is not installed."""
    path = shutil.which(cc)
    if path is None:
        raise TargetError(
            f"target c needs a C compiler, and {cc!r} is not in PATH; install gcc or clang (Debian: apt install gcc), "
            "or name another one: target='c -cc=clang'"
        )
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0]


def compile_text(cc: str, text: str) -> bytes:
    """A C module as a shared library. InternalError: the compiler refuses it."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "kernel.c"), Path(folder, "kernel.so")
        source.write_text(text)
        command = [cc, *OPTIONS, str(source), "-o", str(library), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise InternalError(f"{cc} refuses a kernel: {done.stderr[:2000]}")
        return library.read_bytes()


def compile_many(
    cc: str, texts: Mapping[str, str], failed: dict[str, Exception], tell: Callable[[int, int], None] | None
) -> dict[str, bytes]:
    """Modules by symbol as libraries. Notes in `failed` those that do not compile."""
    code: dict[str, bytes] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = {name: pool.submit(compile_text, cc, text) for name, text in texts.items()}
        for k, (name, job) in enumerate(jobs.items(), 1):
            try:
                code[name] = job.result()
            except InternalError as e:
                failed[name] = e
            if tell is not None:
                tell(k, len(jobs))
    return code


def load(code: Mapping[str, bytes]) -> dict[str, Function]:
    """Kernels by symbol, as functions of addresses."""
    with tempfile.TemporaryDirectory() as folder:
        functions = {}
        for symbol, library in code.items():
            path = Path(folder, f"{hashlib.sha256(library).hexdigest()}.so")
            path.write_bytes(library)
            functions[symbol] = _function(ctypes.CDLL(str(path)), symbol)  # it stays mapped without its file
        return functions


def _function(library: ctypes.CDLL, symbol: str) -> Function:
    f = library[symbol]
    f.restype = None

    def call(addresses: Sequence[int]) -> int:
        status = ctypes.c_int64(0)
        f(*map(ctypes.c_void_p, addresses), ctypes.byref(status))
        return status.value

    return call
