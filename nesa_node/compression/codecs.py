"""Registry of codecs, and the parser of codec texts.

    none | bfloat16 | float16 | lossless
    blockwise8[:block[:apart]] | int8[:block[:apart]] | int4[:block[:share]]

A name may be followed by `@` and the version of its format. The default is version 1 on the wire
(`parse_codec`), and this node's version in user input (`expand_codec`).

The quality of a session decides in which codecs its hidden states may be sent. It is a floor: a
sender may use a codec of higher quality, never of lower. With "exact" nothing is compressed. Codecs
are texts as in `TensorMeta.codec`, with all their parameters.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from nesa_node.compression.codec import Codec, RawCodec
from nesa_node.compression.float_codecs import Cast, Lossless
from nesa_node.compression.integer_codecs import Blockwise8, Int4, Int8
from nesa_node.core.errors import ConfigError, ProtocolError, is_installed

UNCOMPRESSED = "none"
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


EXACT = "exact"
"""The default quality: the tokens are the same as without compression."""

_CODECS_ADDED: Mapping[str, tuple[str, ...]] = {
    EXACT: ("none", "lossless"),
    "high": ("bfloat16", "int8@2:16:8", "blockwise8@2:64:8"),
    "balanced": ("int4@2:32:48",),
}
"""Codecs that each floor allows in addition to those of higher floors."""

FLOORS = tuple(_CODECS_ADDED)
_NEVER_CHOSEN = ("blockwise8@2:64:8",)
"""Codecs that are accepted but never chosen: bitsandbytes takes memory and seconds to load, and
`blockwise8` has a larger error."""


def check_quality(quality: str) -> str:
    """The quality, with all parameters if it is a codec. Raises `ConfigError` if unknown."""
    if quality in FLOORS:
        return quality
    try:
        return expand_codec(quality)
    except ProtocolError:
        raise ConfigError(
            f"unknown quality {quality!r}: give {', '.join(FLOORS)}, or a codec "
            f"({', '.join(FAMILIES)}, with parameters as in int8:16:8)"
        ) from None


@functools.lru_cache(maxsize=_MAX_CACHED_CODECS)
def allows_codec(quality: str, codec: str) -> bool:
    """Whether hidden states of a session with this quality may be sent in `codec`.

    Raises `ProtocolError` for an unknown codec.
    """
    return parse_codec(codec).text in allowed_codecs(quality)


def allowed_codecs(quality: str) -> tuple[str, ...]:
    """All codecs, with parameters, in which hidden states may be sent."""
    return _codecs_above(quality) if quality in FLOORS else (*_CODECS_ADDED[EXACT], quality)


def candidate_codecs(quality: str, decodes: Collection[str]) -> tuple[str, ...]:
    """The codecs that a sender may choose from, the plainest first.

    `decodes`: names that the receiver decodes, as from `codec_names`. If the quality is a codec,
    only that one is a candidate. Falls back to "none", which every peer decodes.
    """
    if quality == EXACT:
        return ("none",)
    if quality in FLOORS:
        named = [codec for codec in _codecs_above(quality) if codec not in _NEVER_CHOSEN]
    else:
        named = [quality]
    known = {"none", *decodes}
    return tuple(codec for codec in named if codec_name(codec) in known and _can_encode(codec)) or (
        "none",
    )


def gradient_codec(quality: str, decodes: Collection[str]) -> str:
    """In which codec gradients of parameters are sent: the session's quality, if that is a codec.

    Floors leave them uncompressed. `decodes` is as for `candidate_codecs`.
    """
    return UNCOMPRESSED if quality in FLOORS else candidate_codecs(quality, decodes)[0]


def _can_encode(codec: str) -> bool:
    """Whether this process can encode `codec`: `blockwise8` needs bitsandbytes."""
    return not codec.startswith("blockwise8") or is_installed("bitsandbytes")


def codec_names() -> tuple[str, ...]:
    """Names of the codecs that this process decodes, without "none", with format versions."""
    names = (codec_name(expand_codec(name)) for name in FAMILIES)
    return tuple(name for name in names if name != "none")


@functools.lru_cache(maxsize=_MAX_CACHED_CODECS)
def codec_name(codec: str) -> str:
    """A codec's name without parameters, with its version if that is not 1."""
    return codec.partition(":")[0]


def _codecs_above(floor: str) -> tuple[str, ...]:
    floors = FLOORS[: FLOORS.index(floor) + 1]
    return tuple(codec for floor in floors for codec in _CODECS_ADDED[floor])
