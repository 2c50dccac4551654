"""Objects are linked wherever memory is free, also where the only free places are gigabytes apart."""

from __future__ import annotations

import subprocess
import sys

import pytest

# One large reserved area, single free pages at its upper end, and nothing else free above its lower end: a small
# section of an object finds place in one of the pages, a larger one only 5 GB below.
CROWDED = """
import ctypes
import numpy as np
import dnnc
from dnnc.ir.graph.text import parse

PAGE, AREA, NO_ACCESS, PRIVATE_ANONYMOUS_NORESERVE = 4096, 5 << 30, 0, 0x4022
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def reserve(nbytes):
    return libc.mmap(None, nbytes, NO_ACCESS, PRIVATE_ANONYMOUS_NORESERVE, -1, 0)


small = dnnc.compile(parse("def g(x: f32[8]):\\n    return exp(x)"))
small(np.ones(8, np.float32))
area = reserve(AREA)
while reserve(PAGE) > area:
    pass
for k in range(400):
    libc.munmap(area + AREA - 2 * PAGE * (k + 1), PAGE)
text = "def g(x: f32[100, 40], *, w: f32[40, 64]):\\n    y = tanh(matmul(x, w))\\n    return softmax(y)"
f = dnnc.compile(parse(text, {"w": np.ones((40, 64), np.float32)}))
print(f(np.ones((100, 40), np.float32)).sum())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="addresses are chosen by Linux")
def test_sections_of_an_object_lie_together() -> None:
    done = subprocess.run([sys.executable, "-c", CROWDED], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) == pytest.approx(100, abs=1e-3)
