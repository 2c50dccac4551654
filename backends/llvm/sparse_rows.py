"""`sparse_rows` as machine code: one multiply-add for each stored element, its vector of x in a register.

    vmovups   x[k], zmm_x                                  once for each column that the group uses
    vfmadd231ps d(values){1to16}, zmm_x, zmm_r             for each stored element (r, k) of the group

Groups of a run follow each other, without a call and its jumps: of few columns those take as long as the products.
LLVM takes seconds for a function of so many instructions, moves loads and spills sums; so this is bytes, a section of
the kernel's object. Displacements stay one byte: pointers step; those of windows are four
bytes, from any element on. CPUs fetch few lines of code ahead, which costs two thirds of the speed where code comes
from memory; so code prefetches what the run after it needs, code and values, each time a part of it. x86-64 with
AVX-512, System V calls.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from dnnc.backends.llvm.compile import compile_text
from dnnc.backends.llvm.elf import code_of
from dnnc.ir.expr import Ref, unwrap
from dnnc.ir.loops.stmt import SparseRows

Array = Any
VECTOR = 64  # bytes
REGISTERS = 32
STEP = 256  # values, or vectors of x, that displacements of one byte reach
LINE = 64  # bytes of a cache line
PREFETCHES = 4  # parts in which a run is prefetched
ENTRY = 16  # bytes of the table for a run: where its code and values begin, sizes of their parts


def available(features: frozenset[str]) -> bool:
    """Does the code run on a CPU with these features, called as this system calls?"""
    return "avx512f" in features and sys.platform != "win32"


def machine_code(s: SparseRows) -> bytes:
    """The code of `void f(float* y, const float* x, const float* values, int64 run, int64 next, int64 part)`, with
    `finish` of `void f(.., int64 count, const float* bias, const float* add)`, as far as there are such. It may lie at
    any multiple of 64.

    Parts 0, 1, .. of run `next` are prefetched between the products; part `PREFETCHES` stands for all that is up to
    the second run behind this one, ahead of them.
    """
    code, ahead, table, groups = bytearray(), 0, [], s.pattern.by_groups(s.group)
    span = s.span or groups.shape[1]
    begin = ENTRY * (s.runs + 2)
    left = s.pattern.blocks.shape[0]
    for number in range(s.runs):
        at, part = divmod(number, s.spans)
        columns = slice(part * span, (part + 1) * span)
        members = groups[at * s.run : (at + 1) * s.run, columns]
        made, count = _run(members, _Finish(s), left - at * s.group * s.run, _Columns(s, part)), int(members.sum())
        table += [begin + len(code), 4 * ahead, LINE * _part(len(made)), LINE * _part(4 * count)]
        code += made
        ahead += count
    table += [begin + len(code), 4 * ahead, 0, 0] * 2  # past the last run
    return _head(tuple(_count_mask(s)), tuple(_pointers(s)), s.window) + np.array(table, "<i4").tobytes() + bytes(code)


@cache
def _head(count_mask: tuple[str, ...], pointers: tuple[str, ...], window: bool) -> bytes:
    """The code that prefetches and jumps to a run; the table of runs follows it."""
    lines = [
        ".text", ".p2align 6",
        "leaq 9f(%rip), %r10", f"imulq ${ENTRY}, %r8, %r8", f"imulq ${ENTRY}, %rcx, %r11",
        *count_mask, "addq %r10, %r8", "addq %r10, %r11", f"cmpq ${PREFETCHES}, %r9", "jb 5f",
        *_burst(0, "%r10"), *_burst(4, "%rdx"), "xorl %r9d, %r9d", "movq %r11, %r8",
        "5:", "movslq 8(%r8), %rax", "imulq %r9, %rax", "movslq 12(%r8), %rcx", "imulq %r9, %rcx",
        "movslq (%r8), %r9", "addq %r9, %rax", "addq %r10, %rax",  # code of the next run
        "movslq 4(%r8), %r9", "addq %r9, %rcx", "addq %rdx, %rcx",  # its values
        "movslq 4(%r11), %r9", f"leaq {STEP * 2}(%rdx,%r9), %rdx",
        *([] if window else [f"addq ${VECTOR * STEP // 2}, %rsi"]),
        "movslq (%r11), %r11", "addq %r10, %r11", *pointers, "jmpq *%r11", ".p2align 4", "9:",
    ]  # fmt: skip
    return code_of(compile_text("\n".join(f'module asm "{line}"' for line in lines), "x86-64", ""))


def _burst(column: int, base: str) -> list[str]:
    """Prefetch what a column of the table says, from run `next` (r8) up to the second one behind this run (r11)."""
    label = 1 + column // 4
    return [
        f"movslq {column}(%r8), %rax", f"movslq {2 * ENTRY + column}(%r11), %rcx", f"addq {base}, %rax",
        f"addq {base}, %rcx", f"{label}:", "prefetcht1 (%rax)", f"addq ${LINE}, %rax",
        "cmpq %rcx, %rax", f"jb {label}b",
    ]  # fmt: skip


def _part(size: int) -> int:
    """Lines of one of the parts into which bytes are cut."""
    return -(-size // (LINE * PREFETCHES))


@dataclass(frozen=True)
class _Columns:
    """Where the columns of a run lie in x. `part`: which of the runs of a group."""

    s: SparseRows
    part: int

    def loads(self, x: Array, k: Array) -> Array:
        """Code that loads column k into zmm_x: vmovups d(%rsi), zmm_x; `d` is one byte, or four of a window."""
        k = k + self.part * self.s.span
        if not self.s.window:
            return _moves(x, k % STEP - STEP // 2, 0x10, 6)
        of_x = self.s.args[1]
        assert isinstance(of_x, Ref)
        row, taps = unwrap(of_x.buf.full_strides()[-2]), np.array(self.s.taps)
        out = np.empty((len(x), 10), np.uint8)
        out[:, :6] = _moves(x, np.zeros_like(x), 0x10, 6)[:, :6]
        out[:, 5] ^= 0xC0  # four bytes, not one
        places = 4 * (k // len(taps) * row + taps[k % len(taps)])
        out[:, 6:] = places.astype("<i4").view(np.uint8).reshape(-1, 4)
        return out

    def pages(self, k: Array) -> Array:
        """By how many steps the pointer to x goes on ahead of each of the columns k."""
        if self.s.window:
            return np.zeros_like(k)
        return np.diff((k + self.part * self.s.span) // STEP, prepend=0)


def _run(members: Array, finish: _Finish, left: int, columns: _Columns) -> bytes:
    """Code of a run: sums of each group are 0, products, stores; return. `members`: bool[groups, columns, rows];
    `left`: rows of the matrix from the run's first one on.
    """
    every, out, lines = members.shape[2], bytearray(), (0, 0)
    for g, stored in enumerate(members):
        count, rows = int(stored.sum()), np.arange(finish.rows(every, left - g * every))
        stores = finish.code(rows) + bytes(_moves(rows, rows, 0x11, 7).tobytes())
        begin = _moves(rows, rows, 0x10, 7).tobytes() if columns.part else _clear(rows)
        size = len(stores) + len(begin) + 7 * count + (10 if columns.s.window else 7) * int(stored.any(1).sum())
        own = _part(size), _part(4 * count)
        out += begin + _products(stored, columns, lines, own) + stores
        lines = lines[0] + own[0], lines[1] + own[1]
        if g + 1 < len(members):
            out += _behind(stored, count, columns) + finish.behind(every)
    return bytes(out) + b"\xc5\xf8\x77\xc3"  # vzeroupper, ret


def _count_mask(s: SparseRows) -> list[str]:
    """k1: the lanes that exist."""
    if s.finish is None:
        return []
    return ["movl 8(%rsp), %ecx", "movl $1, %eax", "shlq %cl, %rax", "decl %eax", ".byte 0xc5, 0xf8, 0x92, 0xc8"]


def _pointers(s: SparseRows) -> list[str]:
    """r8: the bias of the run's first row, r9: what is added to its vector."""
    found = [(name, register) for name, register in (("bias", "%r8"), ("add", "%r9")) if s.reference(name) is not None]
    order = [n for n, _ in s.finish or () if n in ("bias", "add")]
    return [f"movq {16 + 8 * order.index(name)}(%rsp), {register}" for name, register in found]


@dataclass(frozen=True)
class _Finish:
    """What is done to sums ahead of their stores, lanes that do not exist becoming 0."""

    s: SparseRows

    def rows(self, every: int, left: int) -> int:
        """Rows of a group that are stored."""
        return every if self.s.finish is None else min(every, left)

    def behind(self, every: int) -> bytes:
        """Pointers for the group behind one."""
        steps = [(8, 4 * every)] * (self.s.reference("bias") is not None)
        steps += [(9, VECTOR * every)] * (self.s.reference("add") is not None)
        return b"".join(bytes((0x49, 0x81, 0xC0 | r & 7)) + np.int32(n).tobytes() for r, n in steps)

    def code(self, r: Array) -> bytes:
        """The steps on zmm_r, one after the other, each for all of them."""
        if self.s.finish is None:
            return b""
        steps = [_step(name, number, r) for name, number in self.s.finish] or [_step("move", 0.0, r)]
        return b"".join(steps)


def _step(name: str, number: float, r: Array) -> bytes:
    """vaddps 4*r(%r8){1to16}, zmm_r, zmm_r {k1}{z}; vaddps 64*r(%r9), zmm_r, zmm_r {k1}{z};
    movl $C, %r10d; vpbroadcastd %r10d, zmm_31; vmaxps zmm_r, zmm_31, zmm_r {k1}{z}; vmovaps zmm_r, zmm_r {k1}{z}
    """
    in_memory = name in ("bias", "add")
    out = np.empty((len(r), 7 if in_memory else 6), np.uint8)
    out[:, 0] = 0x62
    out[:, 4] = {"bias": 0x58, "add": 0x58, "max": 0x5F, "min": 0x5D, "move": 0x28}[name]
    if in_memory:
        out[:, 1] = 0x41 | _bit(r, 3) << 7 | _bit(r, 4) << 4
        out[:, 2] = 0x04 | (~r & 15) << 3
        out[:, 3] = (0xD1 if name == "bias" else 0xC1) | _bit(r, 4) << 3
        out[:, 5] = 0x40 | (r & 7) << 3 | (0 if name == "bias" else 1)
        out[:, 6] = r
        return bytes(out.tobytes())
    constant = name != "move"
    out[:, 1] = 0x01 | _bit(r, 3) << 7 | _bit(r, 4) << 6 | _bit(r, 3) << 5 | _bit(r, 4) << 4
    out[:, 2] = 0x04 if constant else 0x7C  # the first operand is zmm_31, or there is none
    out[:, 3] = 0xC1 if constant else 0xC9
    out[:, 5] = 0xC0 | (r & 7) << 3 | (r & 7)
    load = b"\x41\xba" + np.float32(number).tobytes() + b"\x62\x42\x7d\x48\x7c\xfa" if constant else b""
    return load + bytes(out.tobytes())


def _behind(stored: Array, count: int, columns: _Columns) -> bytes:
    """Pointers for the group behind one: values and sums go on, vectors of x begin anew."""
    pages = int(columns.pages(np.nonzero(stored.any(1))[0]).sum())
    steps = (
        (2, 4 * (count - max(count - 1, 0) // STEP * STEP)),
        (6, -pages * STEP * VECTOR),
        (7, VECTOR * len(stored[0])),
    )
    return b"".join(_steps(register, np.array([size])).tobytes() for register, size in steps if size)


def _bit(number: Array, k: int) -> Array:
    """An inverted bit of a register's number."""
    return number >> k & 1 ^ 1


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


def _products(stored: Array, columns: _Columns, ahead: tuple[int, int], lines: tuple[int, int]) -> bytes:
    """`lines` of code and of values are prefetched, `ahead` of which the groups in front of this one did:

    vmovups k(%rsi), zmm_x; vfmadd231ps d(%rdx){1to16}, zmm_x, zmm_r; addq $1024, %rdx; addq $16384, %rsi;
    prefetcht1 i(%rax); prefetcht1 i(%rcx)
    """
    k, r = np.nonzero(stored)
    count = len(k)
    if not count:
        return b""
    first, j = np.r_[True, k[1:] != k[:-1]], np.arange(count)
    x = stored.shape[1] + (np.cumsum(first) - 1) % (REGISTERS - stored.shape[1])
    pages = columns.pages(k)
    words = SUMS[r] | FACTORS[x] | (j - STEP // 2).astype(np.uint8).astype(np.uint64) << np.uint64(48)
    fma = words.view(np.uint8).reshape(-1, 8)[:, :7]
    pieces = [  # of the code of each element, which of them have it, in order
        _prefetches(0, j, ahead[0], lines[0]),
        _prefetches(1, j, ahead[1], lines[1]),
        (_steps(2, np.full((count - 1) // STEP, 4 * STEP)), np.arange(STEP, count, STEP)),
        (_steps(6, pages[pages > 0] * STEP * VECTOR), np.nonzero(pages)[0]),
        (columns.loads(x[first], k[first]), np.nonzero(first)[0]),
        (fma, j),
    ]
    return _in_order(pieces, count)


def _fma_words() -> tuple[Array, Array]:
    """vfmadd231ps 0(%rdx){1to16}, zmm_x, zmm_r as words of 8 bytes: the part that zmm_r decides, with all that is the
    same for all of them, and that of zmm_x; the seventh byte counts values.
    """
    n = np.arange(REGISTERS)
    sums, factors = np.zeros((REGISTERS, 8), np.uint8), np.zeros((REGISTERS, 8), np.uint8)
    sums[:, 0], sums[:, 2:5] = 0x62, (0x05, 0x50, 0xB8)
    sums[:, 1] = 0x62 | _bit(n, 3) << 7 | _bit(n, 4) << 4
    sums[:, 5] = 0x42 | (n & 7) << 3
    factors[:, 2], factors[:, 3] = (~n & 15) << 3, _bit(n, 4) << 3
    return sums.view("<u8")[:, 0].copy(), factors.view("<u8")[:, 0].copy()


SUMS, FACTORS = _fma_words()


def _in_order(pieces: Sequence[tuple[Array, Array]], count: int) -> bytes:
    """The code of elements 0, 1, .., made of pieces, each for some of them: a row of 7 bytes or more for each."""
    sizes = np.zeros(count, np.int64)
    for made, of in pieces:
        sizes[of] += made.shape[1]
    at = np.cumsum(sizes) - sizes
    out = np.empty(int(sizes.sum()), np.uint8)
    sevens = as_strided(out, (max(len(out) - 6, 0), 7), (1, 1))
    for made, of in pieces:
        begin = at[of]
        sevens[begin] = made[:, :7]
        if made.shape[1] > 7:
            out[begin[:, None] + np.arange(7, made.shape[1])] = made[:, 7:]
        at[of] += made.shape[1]
    return out.tobytes()


def _prefetches(base: int, j: Array, ahead: int, lines: int) -> tuple[Array, Array]:
    """prefetcht1 i(base): base 0 is rax, 1 is rcx; and which of the elements `j` have one, as far apart as they can."""
    of = j[:: max(len(j) // lines, 1)][:lines] if lines else j[:0]
    out = np.empty((len(of), 7), np.uint8)
    out[:, :3] = 0x0F, 0x18, 0x90 | base
    out[:, 3:] = ((ahead + np.arange(len(of))) * LINE).astype("<i4").view(np.uint8).reshape(-1, 4)
    return out, of


def _steps(register: int, sizes: Array) -> Array:
    """addq $size, register: 2 is rdx, 6 is rsi, 7 is rdi"""
    out = np.empty((len(sizes), 7), np.uint8)
    out[:, :3] = 0x48, 0x81, 0xC0 | register
    out[:, 3:] = sizes.astype("<i4").view(np.uint8).reshape(-1, 4)
    return out
