"""Quality of a session: the codecs in which its hidden states may be sent.

A quality is a floor: a sender may use a codec of higher quality, never of lower. With "exact"
nothing is compressed. Codecs are texts as in `TensorMeta.codec`, with all their parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from nesa_node.compression.codecs import FAMILIES, expand_codec, parse_codec
from nesa_node.core.errors import ConfigError, ProtocolError
from nesa_node.core.extras import is_installed

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


def _can_encode(codec: str) -> bool:
    """Whether this process can encode `codec`: `blockwise8` needs bitsandbytes."""
    return not codec.startswith("blockwise8") or is_installed("bitsandbytes")


def codec_names() -> tuple[str, ...]:
    """Names of the codecs that this process decodes, without "none", with format versions."""
    names = (codec_name(expand_codec(name)) for name in FAMILIES)
    return tuple(name for name in names if name != "none")


def codec_name(codec: str) -> str:
    """A codec's name without parameters, with its version if that is not 1."""
    return codec.partition(":")[0]


def _codecs_above(floor: str) -> tuple[str, ...]:
    floors = FLOORS[: FLOORS.index(floor) + 1]
    return tuple(codec for floor in floors for codec in _CODECS_ADDED[floor])
