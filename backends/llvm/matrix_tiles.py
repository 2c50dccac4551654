"""Tiles of `dnnc.ir.loops.tiles` as registers of AMX: one instruction for each statement.

A function says what its registers hold before it uses them, and leaves them empty. Linux must have allowed the process
to use them (`amx.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dnnc.backends.llvm.amx import FEATURES
from dnnc.ir.dtype import bf16, i8
from dnnc.ir.errors import InternalError
from dnnc.ir.expr import Expr, Ref, value
from dnnc.ir.loops import tiles
from dnnc.ir.loops.stmt import Buffer, Eval

if TYPE_CHECKING:
    from dnnc.backends.llvm.emit import FuncEmitter

CONFIG = 64  # bytes of what a function says of its registers
COLUMNS, ROWS = 16, 48  # where it has bytes of a row, 16 bits each, and rows, 8 bits each


def available(features: frozenset[str] | None) -> bool:
    """Have all x86 CPUs of these features such registers? None: nothing is known."""
    return features is not None and features >= FEATURES


def reserve(em: FuncEmitter, buf: Buffer) -> None:
    """The next registers for a buffer of tiles."""
    em.tiles[buf] = sum(value(b.shape[0]) or 0 for b in em.tiles)


def emit(em: FuncEmitter, s: Eval) -> None:
    first, second = s.args[0], s.args[1] if len(s.args) > 1 else None
    if s.name == "tile_zero":
        _call(em, "tilezero", ("i8", _number(em, first)))
    elif s.name == "tile_load":
        assert isinstance(second, Ref)
        _call(em, "tileloadd64", ("i8", _number(em, first)), *_rows(em, second, s.args[2]))
    elif s.name == "tile_store":
        assert isinstance(first, Ref) and second is not None
        _call(em, "tilestored64", ("i8", _number(em, second)), *_rows(em, first, s.args[2]))
    else:
        assert isinstance(second, Ref)
        name = "tdpbf16ps" if second.buf.dtype is bf16 else "tdpbssd" if second.buf.dtype is i8 else "tdpbusd"
        _call(em, name, *(("i8", _number(em, a)) for a in s.args))


def configure(em: FuncEmitter) -> None:
    """Say ahead of all else how many rows the registers have, and how long they are; free them in the end."""
    config = bytearray(CONFIG)
    config[0] = 1  # the palette
    for buf, first in em.tiles.items():
        rows, row = tiles.sizes(buf)
        for k in range(first, first + (value(buf.shape[0]) or 0)):
            config[COLUMNS + 2 * k] = row * buf.dtype.bytes
            config[ROWS + k] = rows
    name = f"@tiles.{em.names[em.func.name]}"
    content = ", ".join(f"i8 {x}" for x in config)
    em.decls |= {
        f"{name} = private unnamed_addr constant [{CONFIG} x i8] [{content}], align 64",
        "declare void @llvm.x86.ldtilecfg(ptr)",
        "declare void @llvm.x86.tilerelease()",
    }
    em.allocas.append(f"  call void @llvm.x86.ldtilecfg(ptr {name})")
    em.frees.append("  call void @llvm.x86.tilerelease()")


def _number(em: FuncEmitter, tile: Expr) -> str:
    assert isinstance(tile, Ref)
    k = value(em.without_unrolled(tile.idx[0]))
    if k is None:
        raise InternalError(f"which of {tile.buf.name} is meant must be known: {tile!r}")
    return str(em.tiles[tile.buf] + int(k))


def _rows(em: FuncEmitter, x: Ref, step: Expr) -> tuple[tuple[str, str], tuple[str, str]]:
    """Address of the first row, and bytes from one to the next."""
    apart = em.expr(em.without_unrolled(step * x.buf.full_strides()[-2] * x.buf.dtype.bytes))
    return ("ptr", em.address(x.buf, x.idx)), ("i64", apart)


def _call(em: FuncEmitter, name: str, *args: tuple[str, str]) -> None:
    em.decls.add(f"declare void @llvm.x86.{name}({', '.join(t for t, _ in args)})")
    em.line(f"call void @llvm.x86.{name}({', '.join(f'{t} {v}' for t, v in args)})")
