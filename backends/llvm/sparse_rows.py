"""`sparse_rows` as machine code: one multiply-add for each stored element, its vector of x in a register.

    vmovups   x[k], zmm_x                                  once for each column that the group uses
    vfmadd231ps d(values){1to16}, zmm_x, zmm_r             for each stored element (r, k) of the group

LLVM takes seconds for a function of so many instructions, moves loads and spills sums; so this is bytes, written into
the module's assembly, a microsecond an element. Displacements stay one byte: pointers step. Code runs once where a
strip has one vector, and CPUs fetch few lines of code ahead; so a group can prefetch the next one's code and values.
x86-64 with AVX-512, System V calls.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from dnnc.ir.sparse import Pattern

Array = Any
VECTOR = 64  # bytes
REGISTERS = 32
MOST_ROWS = 30  # sums; two registers are left for x
STEP = 256  # values, or vectors of x, that displacements of one byte reach
LINE = 64  # bytes of a cache line
QUADS = 256  # words of a line


def available(features: frozenset[str]) -> bool:
    """Does the code run on a CPU with these features, called as this system calls?"""
    return "avx512f" in features and sys.platform != "win32"


def assembly(symbol: str, pattern: Pattern, group: int) -> str:
    """Assembly of `void symbol(float* y, const float* x, const float* values, int64 group, int64 ahead)`.

    Args:
        symbol: its name.
        pattern: of the whole matrix.
        group: rows of a group.
    """
    code, ahead, table, groups = bytearray(), 0, [], pattern.by_groups(group)
    begin = 8 * (len(groups) + 2)
    for stored in groups:
        table += [begin + len(code), 4 * ahead]
        code += _group(stored)
        ahead += int(stored.sum())
    table += [begin + len(code), 4 * ahead] * 2  # the last group prefetches nothing
    lines = [
        ".text", ".p2align 6", f".hidden {symbol}", f".globl {symbol}", f"{symbol}:",
        f"leaq {symbol}.table(%rip), %rax", "leaq (%rax,%rcx,8), %rcx", "testq %r8, %r8", "je 5f",
        *_prefetch(0, "%rax"), *_prefetch(4, "%rdx"),
        "5:", "movslq 4(%rcx), %r8", "movslq (%rcx), %rcx", f"leaq {STEP * 2}(%rdx,%r8), %rdx",
        f"addq ${VECTOR * STEP // 2}, %rsi", "addq %rax, %rcx", "jmpq *%rcx", ".p2align 4", f"{symbol}.table:",
    ]  # fmt: skip
    data = np.array(table, "<i4").tobytes() + bytes(code)
    words = np.frombuffer(data + b"\x90" * (-len(data) % 8), "<u8").tolist()
    lines += [".quad " + ",".join(map(hex, words[i : i + QUADS])) for i in range(0, len(words), QUADS)]
    return "\n".join(f'module asm "{line}"' for line in lines)


def _prefetch(column: int, base: str) -> list[str]:
    """Prefetch what a column of the table says of the next group into the L2 cache: from its begin to the one after."""
    label = 1 if column == 0 else 3
    return [
        f"movslq {8 + column}(%rcx), %r9", f"movslq {16 + column}(%rcx), %r10",
        f"addq {base}, %r9", f"addq {base}, %r10",
        f"{label}:", "cmpq %r10, %r9", f"jae {label + 1}f", "prefetcht1 (%r9)", f"addq ${LINE}, %r9", f"jmp {label}b",
        f"{label + 1}:",
    ]  # fmt: skip


def _group(stored: Array) -> bytes:
    """Code of one group: sums are 0, products, stores, return. `stored`: bool[columns, rows]."""
    rows = np.arange(stored.shape[1])
    stores = bytes(_moves(rows, rows, 0x11, 7).tobytes())
    return _clear(rows) + _products(stored) + stores + b"\xc5\xf8\x77\xc3"  # vzeroupper, ret


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


def _moves(r: Array, vectors: Array, opcode: int, base: int) -> Array:
    """vmovups between zmm_r and vectors(base): opcode 0x10 loads, 0x11 stores; base 6 is rsi, 7 is rdi."""
    out = np.empty((len(r), 7), np.uint8)
    out[:, 0] = 0x62
    out[:, 1] = 0x61 | _bit(r, 3) << 7 | _bit(r, 4) << 4
    out[:, 2:5] = 0x7C, 0x48, opcode
    out[:, 5] = 0x40 | base | (r & 7) << 3
    out[:, 6] = vectors & 255  # counted in vectors
    return out


def _products(stored: Array) -> bytes:
    """vmovups k(%rsi), zmm_x; vfmadd231ps d(%rdx){1to16}, zmm_x, zmm_r; addq $1024, %rdx; addq $16384, %rsi"""
    k, r = np.nonzero(stored)
    if not len(k):
        return b""
    spare = REGISTERS - stored.shape[1]
    first, j = np.r_[True, k[1:] != k[:-1]], np.arange(len(k))
    x = stored.shape[1] + (np.cumsum(first) - 1) % spare
    step = (j > 0) & (j % STEP == 0)
    pages = np.diff(k // STEP, prepend=0)  # by which the pointer to x steps
    turn = pages > 0
    end = np.cumsum(7 + 7 * first + 7 * step + 7 * turn)
    out, at = np.zeros(end[-1], np.uint8), end - 7
    fma = np.empty((len(k), 7), np.uint8)
    fma[:, 0] = 0x62
    fma[:, 1] = 0x62 | _bit(r, 3) << 7 | _bit(r, 4) << 4
    fma[:, 2] = 0x05 | (~x & 15) << 3
    fma[:, 3] = 0x50 | _bit(x, 4) << 3
    fma[:, 4] = 0xB8
    fma[:, 5] = 0x42 | (r & 7) << 3
    fma[:, 6] = (j % STEP - STEP // 2) & 255
    places = np.arange(7)
    out[at[:, None] + places] = fma
    out[(at[first] - 7)[:, None] + places] = _moves(x[first], k[first] % STEP - STEP // 2, 0x10, 6)
    out[(at[turn] - 14)[:, None] + places] = _steps(6, pages[turn] * STEP * VECTOR)
    out[(at - 7 * (1 + first + turn))[step][:, None] + places] = _steps(2, np.full(step.sum(), 4 * STEP))
    return bytes(out.tobytes())


def _steps(register: int, sizes: Array) -> Array:
    """addq $size, register: 2 is rdx, 6 is rsi"""
    out = np.empty((len(sizes), 7), np.uint8)
    out[:, :3] = 0x48, 0x81, 0xC0 | register
    out[:, 3:] = sizes.astype("<i4").view(np.uint8).reshape(-1, 4)
    return out
