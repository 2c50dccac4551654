"""`immediate_rows` as PTX: one multiply-add with an immediate operand for each stored element, in a straight line.

    switch (group) {
    case 0: asm("ld.global.b32 x3, [p0+12288];"              once for each column that the group uses
                "fma.rn.f32 %7, x3, 0f3F9E0652, %7;"         for each stored element (7, 3)
                .. : "=f"(sums[0]), "=f"(sums[1]), .. : "l"(x)); break;
    }

Of a window there are as many addresses as it has places; outside of the image they are others, and a mask makes x 0.
Compilers of C++ take a millisecond for each such statement; of an `asm` they see the operands alone, and the assembler
takes a tenth of that. The sums are its results, so what follows is C++ as in all other kernels. Columns are loaded
CHUNK ahead of their use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dnnc.ir.loops.stmt import ImmediateRows
from dnnc.ir.types import Array

CHUNK = 16  # columns


def lines(
    s: ImmediateRows, sums: Sequence[str], taps: Sequence[tuple[str, str | None]], group: str, step: int
) -> Iterator[str]:
    """C++ of a statement.

    Args:
        s: it.
        sums: the registers that it writes, one for each row of a group.
        taps: addresses of the columns of a window, and their conditions, if any.
        group: the number of the group.
        step: bytes from a channel of x to the next one.
    """
    results = ", ".join(f'"=f"({name})' for name in sums)
    operands = ", ".join(f'"l"({x})' for x, _ in taps)
    masks = [inside for _, inside in taps if inside is not None]
    operands += "".join(f', "r"({inside} ? ~0 : 0)' for inside in masks)
    yield f"switch ({group}) {{"
    for number in range(s.groups):
        printed = _Group(s, number, step).lines()
        body = "".join(f"{line}\\n" for line in printed)
        yield f'case {number}: asm volatile("{body}" : {results} : {operands} : "memory"); break;'
    yield "}"


class _Group:
    """PTX of the products of a group: operands are its sums, then the addresses, and masks of the taps of a window."""

    def __init__(self, s: ImmediateRows, number: int, step: int) -> None:
        self.columns, self.rows, values = s.members(number)
        self.words = np.ascontiguousarray(values, np.float32).view(np.uint32)
        self.count, self.taps, self.step = s.rows, len(s.taps), step
        self.masked = any(inside is not None for _, inside in s.taps)

    def lines(self) -> Iterator[str]:
        yield f"{{ .reg .u64 p<{self.taps}>;"
        for t in range(self.taps):
            yield f"cvta.to.global.u64 p{t}, %{self.count + t};"
        for r in range(self.count):
            yield f"mov.f32 %{r}, 0f00000000;"
        used = np.unique(self.columns)
        if len(used):
            yield f".reg .b32 x<{int(used[-1]) + 1}>;"
            chunks = np.split(used, range(CHUNK, len(used), CHUNK))
            parts = np.split(np.arange(len(self.columns)), np.searchsorted(self.columns, [c[0] for c in chunks[1:]]))
            yield from self.loads(chunks[0])
            for ahead, part in zip([*chunks[1:], used[:0]], parts):
                yield from self.loads(ahead)
                for k, r, word in zip(*(a[part].tolist() for a in (self.columns, self.rows, self.words))):
                    yield f"fma.rn.f32 %{r}, x{k}, 0f{word:08X}, %{r};"
        yield "}"

    def loads(self, columns: Array) -> Iterator[str]:
        for k in columns.tolist():
            channel, tap = divmod(k, self.taps)
            yield f"ld.global.b32 x{k}, [p{tap}+{channel * self.step}];"
            if self.masked:
                yield f"and.b32 x{k}, x{k}, %{self.count + self.taps + tap};"
