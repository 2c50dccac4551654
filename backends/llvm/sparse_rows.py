"""`sparse_rows` as machine code: one multiply-add for each stored element, its vector of x in a register.

    vmovups   x[k], zmm_x                                  once for each column that the group uses
    vfmadd231ps d(values){1to16}, zmm_x, zmm_r             for each stored element (r, k) of the group

LLVM takes seconds for a function of so many instructions, moves loads and spills sums; so this is bytes, written into
the module's assembly, a microsecond an element. Displacements to values stay one byte: the pointer steps. x86-64 with
AVX-512, System V calls.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from dnnc.ir.sparse import Pattern

Array = Any
VECTOR = 64  # bytes
REGISTERS = 32
MOST_ROWS = 28  # sums; four registers are left for x
STEP = 256  # values that displacements of one byte reach
QUADS = 256  # words of a line


def available(features: frozenset[str]) -> bool:
    """Does the code run on a CPU with these features, called as this system calls?"""
    return "avx512f" in features and sys.platform != "win32"


def assembly(symbol: str, pattern: Pattern, group: int, strides: tuple[int, int]) -> str:
    """Assembly of `void symbol(float* y, const float* x, const float* values, int64 group)`.

    Args:
        symbol: its name.
        pattern: of the whole matrix.
        group: rows of a group.
        strides: bytes between rows of y, and between columns of x.
    """
    code, ahead, table, groups = bytearray(), 0, [], pattern.by_groups(group)
    begin = 8 * len(groups)
    for stored in groups:
        table += [begin + len(code), 4 * ahead + STEP * 2]
        code += _group(stored, *strides)
        ahead += int(stored.sum())
    lines = [
        ".text", ".p2align 6", f".hidden {symbol}", f".globl {symbol}", f"{symbol}:",
        f"leaq {symbol}.table(%rip), %rax", "movslq 4(%rax,%rcx,8), %r8", "movslq (%rax,%rcx,8), %rcx",
        "addq %r8, %rdx", "addq %rax, %rcx", "jmpq *%rcx", ".p2align 4", f"{symbol}.table:",
    ]  # fmt: skip
    data = np.array(table, "<i4").tobytes() + bytes(code)
    words = np.frombuffer(data + b"\x90" * (-len(data) % 8), "<u8").tolist()
    lines += [".quad " + ",".join(map(hex, words[i : i + QUADS])) for i in range(0, len(words), QUADS)]
    return "\n".join(f'module asm "{line}"' for line in lines)


def _group(stored: Array, y_stride: int, x_stride: int) -> bytes:
    """Code of one group: sums are 0, products, stores, return. `stored`: bool[columns, rows]."""
    rows = np.arange(stored.shape[1])
    return _clear(rows) + _products(stored, x_stride) + _store(rows, y_stride) + b"\xc5\xf8\x77\xc3"  # vzeroupper, ret


def _bit(number: Array, k: int) -> Array:
    """An inverted bit of a register's number."""
    return ~number >> k & 1


def _clear(r: Array) -> bytes:
    """vpxord zmm_r, zmm_r, zmm_r"""
    out = np.empty((len(r), 6), np.uint8)
    out[:, 0] = 0x62
    out[:, 1] = 0x01 | _bit(r, 3) << 7 | _bit(r, 4) << 6 | _bit(r, 3) << 5 | _bit(r, 4) << 4
    out[:, 2] = 0x05 | (~r & 15) << 3
    out[:, 3] = 0x40 | _bit(r, 4) << 3
    out[:, 4] = 0xEF
    out[:, 5] = 0xC0 | (r & 7) << 3 | (r & 7)
    return out.tobytes()


def _moves(r: Array, offsets: Array, opcode: int, base: int) -> Array:
    """vmovups between zmm_r and offset(base): opcode 0x10 loads, 0x11 stores; base 6 is rsi, 7 is rdi."""
    out = np.empty((len(r), 10), np.uint8)
    out[:, 0] = 0x62
    out[:, 1] = 0x61 | _bit(r, 3) << 7 | _bit(r, 4) << 4
    out[:, 2:5] = 0x7C, 0x48, opcode
    out[:, 5] = 0x80 | base | (r & 7) << 3
    out[:, 6:] = offsets.astype("<i4").view(np.uint8).reshape(-1, 4)
    return out


def _store(r: Array, stride: int) -> bytes:
    return bytes(_moves(r, r * stride, 0x11, 7).tobytes())


def _products(stored: Array, stride: int) -> bytes:
    """vmovups k * stride(%rsi), zmm_x; vfmadd231ps d(%rdx){1to16}, zmm_x, zmm_r; addq $1024, %rdx"""
    k, r = np.nonzero(stored)
    if not len(k):
        return b""
    spare = REGISTERS - stored.shape[1]
    first, j = np.r_[True, k[1:] != k[:-1]], np.arange(len(k))
    x = stored.shape[1] + (np.cumsum(first) - 1) % spare
    step = (j > 0) & (j % STEP == 0)
    end = np.cumsum(7 + 10 * first + 7 * step)
    out, at = np.zeros(end[-1], np.uint8), end - 7
    fma = np.empty((len(k), 7), np.uint8)
    fma[:, 0] = 0x62
    fma[:, 1] = 0x62 | _bit(r, 3) << 7 | _bit(r, 4) << 4
    fma[:, 2] = 0x05 | (~x & 15) << 3
    fma[:, 3] = 0x50 | _bit(x, 4) << 3
    fma[:, 4] = 0xB8
    fma[:, 5] = 0x42 | (r & 7) << 3
    fma[:, 6] = (j % STEP - STEP // 2) & 255
    out[at[:, None] + np.arange(7)] = fma
    ahead = at[step] - 7 - 10 * first[step]
    out[ahead[:, None] + np.arange(7)] = np.frombuffer(b"\x48\x81\xc2\x00\x04\x00\x00", np.uint8)
    ahead = at[first] - 10
    out[ahead[:, None] + np.arange(10)] = _moves(x[first], k[first] * stride, 0x10, 6)
    return bytes(out.tobytes())
