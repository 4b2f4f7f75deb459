"""Registry of codecs, and the parser of codec texts.

    none | bfloat16 | float16 | lossless
    blockwise8[:block[:apart]] | int8[:block[:apart]] | int4[:block[:share]]

A name may be followed by `@` and the version of its format. The default is version 1 on the wire
(`parse`), and this node's version in user input (`expand`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from nesa_node.compression.blockwise8 import Blockwise8
from nesa_node.compression.casts import Cast
from nesa_node.compression.codec import Codec
from nesa_node.compression.int4 import Int4
from nesa_node.compression.int8 import Int8
from nesa_node.compression.lossless import Lossless
from nesa_node.compression.raw import RawCodec
from nesa_node.core.errors import ProtocolError

MAX_TEXT = 32
_TEXT = re.compile(r"([a-z][a-z0-9]*)(?:@([1-9][0-9]{0,3}))?((?::(?:0|[1-9][0-9]{0,4})){0,4})")
_KEPT = 256


@dataclass(frozen=True, slots=True)
class Family:
    """Codecs of one name: constructor, allowed values per parameter, format version."""

    make: Callable[..., Codec]
    parameters: tuple[frozenset[int], ...] = ()
    version: int = 1


def _powers(first: int, last: int) -> frozenset[int]:
    return frozenset(1 << bits for bits in range(first.bit_length() - 1, last.bit_length()))


def _cast(name: Literal["bfloat16", "float16"]) -> Family:
    return Family(functools.partial(Cast, name))


RAW = RawCodec()
FAMILIES: Mapping[str, Family] = {
    "none": Family(lambda: RAW),
    "bfloat16": _cast("bfloat16"),
    "float16": _cast("float16"),
    # Block sizes supported by bitsandbytes' CUDA kernels.
    "blockwise8": Family(Blockwise8, (_powers(64, 4096), frozenset(range(257))), version=2),
    "int8": Family(Int8, (_powers(8, 4096), frozenset(range(257))), version=2),
    "int4": Family(Int4, (_powers(4, 256), frozenset({0, *range(2, 4097)})), version=2),
    "lossless": Family(Lossless),
}


def expand(text: str) -> str:
    """The text with all parameters, and with the version if it is not 1. Raises as `parse`."""
    name, colon, parameters = text.partition(":")
    family = FAMILIES.get(name)
    if family is not None and family.version > 1:
        name = f"{name}@{family.version}"
    return parse(name + colon + parameters).text


# Peers choose the texts, so that the cache must be bounded.
@functools.lru_cache(maxsize=_KEPT)
def parse(text: str) -> Codec:
    """The codec of a text; omitted parameters have their defaults.

    Raises `ProtocolError("bad_tensor")` for unknown codecs and versions, and for parameters out of
    bounds.
    """
    matched = _TEXT.fullmatch(text) if len(text) <= MAX_TEXT else None
    family = FAMILIES.get(matched[1]) if matched else None
    if matched is None or family is None:
        raise ProtocolError("bad_tensor", f"unknown codec {text[:MAX_TEXT]!r}")
    if (version := int(matched[2] or 1)) != family.version:
        raise ProtocolError(
            "bad_tensor", f"codec {matched[1]}: format {version}, this node has {family.version}"
        )
    values = [int(value) for value in matched[3].split(":")[1:]]
    if len(values) > len(family.parameters) or not all(
        value in allowed for value, allowed in zip(values, family.parameters, strict=False)
    ):
        raise ProtocolError("bad_tensor", f"codec {text!r}: parameters out of bounds")
    return family.make(*values)
