"""CUDA C++ to cubins on a machine without a GPU."""

from __future__ import annotations

import struct
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from dnnc.backends.cuda import nvrtc
from dnnc.backends.cuda.nvrtc import compile_cuda, compile_many, nvrtc_version
from dnnc.ir.errors import InternalError, TargetError

COPY = 'extern "C" __global__ void k(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }\n'
LOCAL = """\
extern "C" __global__ void k(const int* x, float* y) {
  float rows[64];
  for (int i = 0; i < 64; ++i) rows[i] = x[i];
  for (int i = 0; i < 64; ++i) y[i] = rows[x[i]];
}
"""


def test_a_cubin_and_what_it_needs() -> None:
    c = compile_cuda(COPY, "sm_80")
    assert c.cubin[:4] == b"\x7fELF" and 0 < c.registers <= 32
    assert (c.spills, c.local_bytes, c.shared_bytes) == (0, 0, 0)


def test_a_cubin_is_a_whole_file() -> None:
    """Tables of headers lie inside of it: tools that read cubins refuse others."""
    cubin = compile_cuda(COPY, "sm_90a").cubin
    programs, sections = struct.unpack_from("<QQ", cubin, 32)
    program_bytes, program_count, section_bytes, section_count = struct.unpack_from("<HHHH", cubin, 54)
    assert max(programs + program_bytes * program_count, sections + section_bytes * section_count) <= len(cubin)


@pytest.mark.slow
def test_local_and_shared_memory_are_seen() -> None:
    assert compile_cuda(LOCAL, "sm_90a").local_bytes == 256
    shared = (
        'extern "C" __global__ void k(int* y) '
        "{ __shared__ int s[100]; s[threadIdx.x] = y[0]; __syncthreads(); y[0] = s[y[1]]; }"
    )
    assert compile_cuda(shared, "sm_90a").shared_bytes == 400


@pytest.mark.slow
def test_spills_are_seen() -> None:
    sums = "\n".join(f"  float a{i} = x[{i}];" for i in range(200)) + "\n  __syncthreads();\n"
    sums += "\n".join(f"  y[{i}] = a{i} * a{(7 * i + 3) % 200};" for i in range(200))
    text = f'extern "C" __global__ void __launch_bounds__(1024) k(const float* x, volatile float* y) {{\n{sums}\n}}\n'
    assert compile_cuda(text, "sm_80").spills > 0


def test_the_same_text_gives_the_same_bytes() -> None:
    assert compile_cuda(COPY, "sm_90a").cubin == compile_cuda(COPY, "sm_90a").cubin
    assert compile_cuda(COPY, "sm_90a").cubin != compile_cuda(COPY, "sm_80").cubin


def test_its_identity_is_the_wheels_or_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = nvrtc.nvrtc_identity()
    assert here.startswith(nvrtc_version())
    wheels = {"cupy-cuda12x": "13.6.0", "nvidia-cuda-nvrtc": "13.9.1", "nvidia-cuda-nvrtc-cu12": "12.8.93"}

    def version(name: str) -> str:
        if name not in wheels:
            raise PackageNotFoundError(name)
        return wheels[name]

    monkeypatch.setattr(nvrtc, "version", version)
    asked = nvrtc.nvrtc_identity.__wrapped__
    assert asked() == "12.8.93"  # of the CUDA that CuPy is for
    del wheels["nvidia-cuda-nvrtc-cu12"]
    assert asked() == nvrtc_version()


def test_an_error_shows_the_lines_that_it_names() -> None:
    with pytest.raises(InternalError) as e:
        compile_cuda("// a line\n" * 20 + COPY.replace("y[threadIdx.x] =", "z ="), "sm_80")
    assert (
        'identifier "z" is undefined' in str(e.value)
        and "  21 | extern" in str(e.value)
        and "   5 | // a line" not in str(e.value)
    )


def test_an_unknown_architecture_is_the_targets_fault() -> None:
    with pytest.raises(TargetError, match="does not compile for sm_42; install a newer one"):
        compile_cuda(COPY, "sm_42")


def test_many_in_threads_keep_their_order() -> None:
    texts = {f"n{i}": (COPY.replace("void k", f"void k{i}"), "sm_80") for i in range(4)}
    told: list[str] = []
    made = compile_many(texts, 2, told.append)
    assert list(made) == list(texts) and sorted(told) == sorted(texts)
    assert b"k3" in made["n3"].cubin and b"k3" not in made["n2"].cubin


def test_one_failure_of_many_is_raised() -> None:
    with pytest.raises(InternalError, match="does not compile"):
        compile_many({"good": (COPY, "sm_80"), "bad": ("?", "sm_80")}, 2)


def test_version() -> None:
    assert int(nvrtc_version().split(".")[0]) >= 12


def test_a_missing_nvrtc_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc.library.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", None)
    with pytest.raises(TargetError, match=r"pip install -e '\.\[cuda13\]'"):
        compile_cuda(COPY, "sm_80")
    monkeypatch.undo()
    nvrtc.library.cache_clear()
    assert compile_cuda(COPY, "sm_80").registers
