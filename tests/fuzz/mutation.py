"""Inputs made of valid ones: bytes changed, pieces doubled, tokens of the format put in between."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence

MAX_INPUT_BYTES = 16 * 1024

_NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)

MSGPACK: tuple[bytes, ...] = (
    b"\xc0", b"\xc2", b"\x80", b"\x81", b"\x90", b"\x91", b"\x93", b"\xa0", b"\xc4\x00",
    b"\xc7\x01\x50\xc0", b"\xc9\xff\xff\xff\xff\x40", b"\xc9\x00\x00\x00\x01\x40\x91",
    b"\xd4\x50\xc0", b"\xd8\x40" + bytes(16), b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff",
    b"\xdd\x00\x01\x00\x00", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff",
    b"\xca\x7f\x80\x00\x00", b"\xca\x7f\xc0\x00\x00", b"\xcb\x7f\xf0" + bytes(6),
    b"\xcb\x7f\xf8" + bytes(6), b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7),
    b"\xa3\xff\xfe\xfd", b"\xa3\xed\xa0\x80", b"\x91" * 200, b"\x81\xa0" * 100,
)  # fmt: skip
PROTOBUF: tuple[bytes, ...] = (
    b"\x0a\x00", b"\x12\x00", b"\x12\x00" * 100, b"\x22\x00", b"\x2a\x00", b"\x3a\x02\x0a\x00",
    b"\x12\x14" + bytes(20), b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x0b", b"\x0c",
    b"\x12\xff\xff\xff\xff\x0f", b"\x1a\x80\x80\x80\x80\x00", b"\x29" + b"\xff" * 8,
)  # fmt: skip
JSON: tuple[bytes, ...] = (
    b"{", b"}", b"[", b"]", b",", b":", b'"', b"null", b"true", b"-0", b"1e999", b"-1", b"0.1",
    b"1" * 400, b'"\\ud800"', b'"\\u0000"', b"\xff", b"\xed\xa0\x80", b"NaN", b"Infinity",
    b"[" * 300, b'{"a":' * 150, b'""', b"[]", b"{}", b"9223372036854775808", b'"name"',
    b"[0]", b'{"":{}}',
)  # fmt: skip


def mutated(
    rng: random.Random, seeds: Sequence[bytes], tokens: Sequence[bytes], edits: int = 4
) -> bytes:
    """One of `seeds` after up to `edits` changes; sometimes as it is."""
    data = bytearray(seeds[int(rng.random() * len(seeds))])
    for _ in range(int(rng.random() * (edits + 1))):
        _CHANGES[int(rng.random() * len(_CHANGES))](rng, data, seeds, tokens)
    del data[MAX_INPUT_BYTES:]
    return bytes(data)


_Change = Callable[[random.Random, bytearray, Sequence[bytes], Sequence[bytes]], None]


def _place(rng: random.Random, data: bytearray) -> int:
    return int(rng.random() * (len(data) + 1))


def _flip(rng: random.Random, data: bytearray, *_: object) -> None:
    if data:
        data[int(rng.random() * len(data))] ^= 1 << int(rng.random() * 8)


def _set(rng: random.Random, data: bytearray, *_: object) -> None:
    if data:
        data[int(rng.random() * len(data))] = int(rng.random() * 256)


def _number(rng: random.Random, data: bytearray, *_: object) -> None:
    size = (1, 2, 4, 8)[int(rng.random() * 4)]
    number = _NUMBERS[int(rng.random() * len(_NUMBERS))] & ((1 << 8 * size) - 1)
    at = _place(rng, data)
    data[at : at + size] = number.to_bytes(size, "big" if rng.random() < 0.5 else "little")


def _remove(rng: random.Random, data: bytearray, *_: object) -> None:
    at = _place(rng, data)
    del data[at : at + 1 + int(rng.random() ** 3 * 64)]


def _truncate(rng: random.Random, data: bytearray, *_: object) -> None:
    del data[_place(rng, data) :]


def _repeat(rng: random.Random, data: bytearray, *_: object) -> None:
    at = _place(rng, data)
    piece = data[at : at + 1 + int(rng.random() ** 2 * 64)]
    data[at:at] = piece * (1 + int(rng.random() ** 4 * 200))


def _token(
    rng: random.Random, data: bytearray, _: Sequence[bytes], tokens: Sequence[bytes]
) -> None:
    token = tokens[int(rng.random() * len(tokens))]
    at = _place(rng, data)
    data[at : at + (len(token) if rng.random() < 0.5 else 0)] = token


def _splice(
    rng: random.Random, data: bytearray, seeds: Sequence[bytes], _: Sequence[bytes]
) -> None:
    other = seeds[int(rng.random() * len(seeds))]
    start = int(rng.random() * (len(other) + 1))
    at = _place(rng, data)
    data[at : at + int(rng.random() * 32)] = other[start : start + int(rng.random() * 256)]


def _wrap(rng: random.Random, data: bytearray, *_: object) -> None:
    """As the one item of an array within an extension, some times over."""
    for _level in range(1 + int(rng.random() ** 3 * 60)):
        code = (0x40, 0x50)[int(rng.random() * 2)]
        data[:0] = b"\xc9" + struct.pack(">Ib", len(data) + 1, code) + b"\x91"


_CHANGES: tuple[_Change, ...] = (
    _flip, _set, _set, _number, _remove, _truncate, _repeat, _token, _token, _splice, _wrap,
)  # fmt: skip
