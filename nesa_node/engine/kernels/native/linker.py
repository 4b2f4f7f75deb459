"""Machine code with its constants behind it, from an object file in ELF."""

from __future__ import annotations

import struct
from dataclasses import dataclass

ALIGNMENT = 64
_TYPE_RELA = 4
_RELATIVE_32_BITS = {2, 4}
"""R_X86_64_PC32 and R_X86_64_PLT32: distances from the place that refers."""


@dataclass(frozen=True)
class _Section:
    name: bytes
    kind: int
    data: bytes
    applies_to: int
    """For relocations the section that they change."""


def link(file: bytes) -> bytes:
    """Return the code of an object file, followed by the constants that it refers to.

    It runs at any address that is a multiple of `ALIGNMENT`. Raises `ValueError` for code that
    refers to anything else, or in ways that no x86-64 code does.
    """
    sections = _read_sections(file)
    names = [section.name for section in sections]
    text = names.index(b".text")
    code, starts = bytearray(sections[text].data), {text: 0}
    relocations = [each for each in sections if each.kind == _TYPE_RELA]
    for relocation in (each for each in relocations if each.applies_to == text):
        symbols = sections[names.index(b".symtab")].data
        for place, info, addend in struct.iter_unpack("<QQq", relocation.data):
            _, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", symbols, (info >> 32) * 24)
            if not 0 < section < len(sections):
                raise ValueError("it refers to what is outside its file")
            if info & 0xFFFFFFFF not in _RELATIVE_32_BITS:
                raise ValueError(f"relocation {info & 0xFFFFFFFF}")
            if section not in starts:
                code += bytes(-len(code) % ALIGNMENT)
                starts[section] = len(code)
                code += sections[section].data
            struct.pack_into("<i", code, place, starts[section] + value + addend - place)
    if any(each.applies_to in starts for each in relocations if each.applies_to != text):
        raise ValueError("its constants refer to places")
    return bytes(code)


def _read_sections(file: bytes) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", file, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", file, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", file, table + size * at) for at in range(count)]
    names_start = headers[names_at][4]
    return [
        _Section(
            name=file[names_start + header[0] :].split(b"\0", 1)[0],
            kind=header[1],
            data=file[header[4] : header[4] + header[5]],
            applies_to=header[7],
        )
        for header in headers
    ]
