"""Registry of codecs, and the parser of codec texts.

    none | bfloat16 | float16 | lossless
    blockwise8[:block[:apart]] | int8[:block[:apart]] | int4[:block[:share]]

A name may be followed by `@` and the version of its format. The default is version 1 on the wire
(`parse_codec`), and this node's version in user input (`expand_codec`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from nesa_node.compression.blockwise8 import Blockwise8
from nesa_node.compression.codec import Codec
from nesa_node.compression.dtype_codecs import Cast, RawCodec
from nesa_node.compression.int4 import Int4
from nesa_node.compression.int8 import Int8
from nesa_node.compression.lossless import Lossless
from nesa_node.core.errors import ProtocolError

MAX_CODEC_CHARS = 32
_CODEC_PATTERN = re.compile(
    r"([a-z][a-z0-9]*)(?:@([1-9][0-9]{0,3}))?((?::(?:0|[1-9][0-9]{0,4})){0,4})"
)
_MAX_CACHED_CODECS = 256


@dataclass(frozen=True, slots=True)
class CodecFamily:
    """Codecs of one name: constructor, allowed values per parameter, format version."""

    make: Callable[..., Codec]
    parameters: tuple[frozenset[int], ...] = ()
    version: int = 1


def _powers_of_two(first: int, last: int) -> frozenset[int]:
    return frozenset(1 << bits for bits in range(first.bit_length() - 1, last.bit_length()))


def _cast_family(name: Literal["bfloat16", "float16"]) -> CodecFamily:
    return CodecFamily(functools.partial(Cast, name))


RAW = RawCodec()
FAMILIES: Mapping[str, CodecFamily] = {
    "none": CodecFamily(lambda: RAW),
    "bfloat16": _cast_family("bfloat16"),
    "float16": _cast_family("float16"),
    # Block sizes supported by bitsandbytes' CUDA kernels.
    "blockwise8": CodecFamily(
        Blockwise8, (_powers_of_two(64, 4096), frozenset(range(257))), version=2
    ),
    "int8": CodecFamily(Int8, (_powers_of_two(8, 4096), frozenset(range(257))), version=2),
    "int4": CodecFamily(Int4, (_powers_of_two(4, 256), frozenset({0, *range(2, 4097)})), version=2),
    "lossless": CodecFamily(Lossless),
}


def expand_codec(text: str) -> str:
    """The text with all parameters, and a version other than 1. Raises as `parse_codec`."""
    name, colon, parameters = text.partition(":")
    family = FAMILIES.get(name)
    if family is not None and family.version > 1:
        name = f"{name}@{family.version}"
    return parse_codec(name + colon + parameters).text


# Peers choose the texts, so that the cache must be bounded.
@functools.lru_cache(maxsize=_MAX_CACHED_CODECS)
def parse_codec(text: str) -> Codec:
    """The codec of a text; omitted parameters have their defaults.

    Raises `ProtocolError("bad_tensor")` for unknown codecs and versions, and for parameters out of
    bounds.
    """
    matched = _CODEC_PATTERN.fullmatch(text) if len(text) <= MAX_CODEC_CHARS else None
    family = FAMILIES.get(matched[1]) if matched else None
    if matched is None or family is None:
        raise ProtocolError("bad_tensor", f"unknown codec {text[:MAX_CODEC_CHARS]!r}")
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
