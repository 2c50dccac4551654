"""Blocks of results come back when their last view is gone, and not before."""

import gc
import pickle
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest

from dnnc.backends.runtime.results import LEAST, Results

SIDE = LEAST // 2048  # rows of 1,024 floats: two blocks of the least size


def address(a: np.ndarray) -> int:
    return int(a.ctypes.data)


def test_a_block_is_used_again() -> None:
    r = Results()
    a = r.empty((SIDE, 1024), np.float32)
    assert a.shape == (SIDE, 1024) and a.dtype == np.float32 and a.flags.c_contiguous and a.flags.writeable
    where = address(a)
    assert where % 64 == 0
    del a
    assert r.waiting >= LEAST
    b = r.empty((SIDE * 1024 - 7,), np.float32)
    assert address(b) == where and r.waiting == 0


def test_a_view_keeps_its_block() -> None:
    r = Results()
    a = r.empty((SIDE, 1024), np.float32)
    a[:] = 3
    for view in (a[5], a.T, a.reshape(-1)[10:], a.view(np.int32), memoryview(a), np.asarray(a[::2])):
        del a
        b = r.empty((SIDE, 1024), np.float32)
        b[:] = 7
        again = np.asarray(view).view(np.float32)
        assert r.waiting == 0 and (again == 3).all()
        a = np.full((SIDE, 1024), 3, np.float32)  # those after it are of an array of its own
        del b, again
        r = Results()
        a = r.empty((SIDE, 1024), np.float32)
        a[:] = 3


def test_small_results_are_ordinary_arrays() -> None:
    a = Results().empty((3, 0, 5), np.float64)
    assert a.shape == (3, 0, 5) and a.base is None


def test_blocks_that_are_too_large_or_too_small_wait() -> None:
    r = Results()
    del_me = r.empty((4 * LEAST,), np.uint8)
    del del_me
    waiting = r.waiting
    a = r.empty((LEAST,), np.uint8)
    b = r.empty((5 * LEAST,), np.uint8)
    assert r.waiting == waiting
    del a, b


def test_no_more_wait_than_may() -> None:
    r = Results(kept=3 * LEAST)
    several = [r.empty((LEAST,), np.uint8) for _ in range(8)]
    several.clear()
    gc.collect()
    assert 0 < r.waiting <= 3 * LEAST


def test_release_gives_waiting_memory_back() -> None:
    r = Results()
    used = r.empty((LEAST,), np.uint8)
    used[:] = 5
    r.empty((LEAST,), np.uint8)
    r.frames.append("an arena")
    assert r.waiting > 0
    r.release()
    assert r.waiting == 0 and not r.frames and (used == 5).all()


def test_all_results_of_one_call_may_wait() -> None:
    r = Results(kept=3 * LEAST)
    new = r.maker(5 * LEAST)
    for _ in range(2):
        several = [new.empty((LEAST,), np.uint8) for _ in range(8)]
        several.clear()
        assert r.waiting == 5 * LEAST
    del new
    r.empty((LEAST,), np.uint8)
    assert r.waiting == 3 * LEAST


def test_pickling_copies() -> None:
    r = Results()
    a = r.empty((LEAST // 8,), np.float64)
    a[:] = np.arange(len(a))
    copy = pickle.loads(pickle.dumps(a))
    del a
    r.empty((LEAST // 8,), np.float64)[:] = 0
    assert (copy == np.arange(len(copy))).all()


def test_threads_never_share_a_block() -> None:
    r, wrong = Results(), []

    def work(k: int) -> None:
        for _ in range(50):
            a = r.empty((LEAST,), np.uint8)
            a[::4096] = k
            b = a[4096:]
            del a
            if not (b[::4096] == k).all():
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_types_that_numpy_does_not_have() -> None:
    r = Results()
    a = r.empty((LEAST, 3), ml_dtypes.bfloat16)
    a[:] = 1.5
    assert a.dtype == ml_dtypes.bfloat16 and (a.astype(np.float32) == 1.5).all() and (a[5:7].T.copy() == 1.5).all()
    del a
    assert r.waiting >= 6 * LEAST


@pytest.mark.slow
def test_results_that_outlive_everything_end_quietly() -> None:
    code = (
        "import sys, threading, numpy as np\nfrom dnnc.backends.runtime.results import LEAST, results\n"
        "a = results().empty((LEAST,), np.uint8)\nsys.modules['kept'] = a[5:]\nb = [results().empty((LEAST,), "
        "np.float32)]\nb.append(b)\n"
        "threading.stack = a.reshape(-1, 2)\nprint(len(a))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{LEAST}\n", "")
