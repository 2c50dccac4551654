"""ELF objects as bytes: their symbols, code that is added to them, other names for what they define.

Objects are 64-bit little-endian ones, as LLVM writes them. A kernel's object may call code that LLVM has not seen:
`attached` adds that as a section and says where its symbols are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence

from dnnc.ir.errors import InternalError

_ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, info, alignment, entry size
_SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section, value, size
_SECTIONS, _COUNT = 6, 12  # fields of the header: where the table of sections begins, how many there are
_PROGRAM, _SYMTAB = 1, 2  # types of sections
_LOCAL, _GLOBAL = 0, 1
_FUNCTION, _HIDDEN = 2, 2
_RUNS = 6  # flags: loaded, and executed
_ALIGN = 64  # of added code


def undefined_symbols(obj: bytes) -> set[str]:
    """Return an ELF object's undefined symbols. InternalError unless whole 64-bit little-endian ELF."""
    return symbols_of(obj)[1]


def symbols_of(obj: bytes) -> tuple[set[str], set[str]]:
    """(global symbols defined, symbols undefined) of an ELF object."""
    defined: set[str] = set()
    undefined: set[str] = set()
    try:
        for _, name, (_, info, _, section, _, _) in _symbols(obj, _sections(obj)):
            if name and section == 0:
                undefined.add(name)
            elif name and info >> 4 != _LOCAL:
                defined.add(name)
    except (struct.error, IndexError, ValueError) as e:
        raise InternalError(f"damaged ELF object of {len(obj)} bytes: {e}") from e
    return defined, undefined


def code_of(obj: bytes) -> bytes:
    """The code of an object that has one section of it, without addresses that a linker would fill in."""
    (found,) = (s for s in _sections(obj) if s[1] == _PROGRAM and s[2] == _RUNS and s[5])
    return obj[found[4] : found[4] + found[5]]


def renamed(obj: bytes, old: str, new: str) -> bytes:
    """An object with another name, as long as the old one, wherever that is a part of a symbol."""
    assert len(old) == len(new)
    return obj.replace(old.encode(), new.encode())


def attached(obj: bytes, code: Mapping[str, bytes]) -> bytes:
    """An object with more code, which defines symbols that were undefined; others do not see them.

    Args:
        obj: the object.
        code: by symbol; it needs no relocation, and lies at a multiple of 64.
    """
    sections = _sections(obj)
    out = bytearray(obj)
    out += bytes(-len(out) % _ALIGN)
    begin, places = len(out), {}
    for name, piece in code.items():
        places[name] = len(out) - begin
        out += piece
        out += bytes(-len(out) % _ALIGN)
    text = next(s[0] for s in sections if s[1] == _PROGRAM and s[2] == _RUNS)  # the name of another section of code
    sections.append((text, _PROGRAM, _RUNS, 0, begin, len(out) - begin, 0, 0, _ALIGN, 0))
    for at, name, symbol in _symbols(obj, sections):
        if name in places:
            info = _GLOBAL << 4 | _FUNCTION
            number = len(sections) - 1
            _SYMBOL.pack_into(out, at, symbol[0], info, _HIDDEN, number, places[name], len(code[name]))
    header = list(_ELF_HEADER.unpack_from(obj))
    header[_SECTIONS], header[_COUNT] = len(out), len(sections)
    _ELF_HEADER.pack_into(out, 0, *header)
    return bytes(out) + b"".join(_SECTION.pack(*s) for s in sections)


def _sections(obj: bytes) -> list[tuple[int, ...]]:
    if obj[:6] != b"\x7fELF\x02\x01":  # class 64-bit, little endian
        raise InternalError(f"not a 64-bit little-endian ELF object: it begins with {obj[:6].hex(' ') or 'nothing'}")
    try:
        header = _ELF_HEADER.unpack_from(obj)
        return [_SECTION.unpack_from(obj, header[_SECTIONS] + k * header[11]) for k in range(header[_COUNT])]
    except struct.error as e:
        raise InternalError(f"damaged ELF object of {len(obj)} bytes: {e}") from e


def _symbols(obj: bytes, sections: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, str, tuple[int, ...]]]:
    """Where each symbol lies, its name, and its record."""
    for s in sections:
        if s[1] == _SYMTAB:
            names = sections[s[6]][4]
            for at in range(s[4], s[4] + s[5], _SYMBOL.size):
                symbol = _SYMBOL.unpack_from(obj, at)
                start = names + symbol[0]
                yield at, obj[start : obj.index(b"\0", start)].decode(), symbol
