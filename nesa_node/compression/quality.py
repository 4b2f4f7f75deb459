"""What a session lets compression do to its hidden states.

A quality is a floor: whoever sends may choose what is better, never what is worse. With "exact"
nothing is compressed. Codecs are texts as in `TensorMeta.codec`, with all their parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from nesa_node.compression.codecs import FAMILIES, expand, parse
from nesa_node.core.errors import ConfigError, ProtocolError
from nesa_node.core.extras import is_installed

EXACT = "exact"
"""The tokens are those of no compression at all. What a session has that says nothing else."""

_ALSO: Mapping[str, tuple[str, ...]] = {
    EXACT: ("none", "lossless"),
    "high": ("bfloat16", "int8@2:16:8", "blockwise8@2:64:8"),
    "balanced": ("int4@2:32:48",),
}
"""What each floor allows that a higher one does not."""

FLOORS = tuple(_ALSO)
_HEAVY = ("blockwise8@2:64:8",)
"""Allowed, but never chosen: bitsandbytes takes memory and time to load, and it loses more."""


def check_quality(quality: str) -> str:
    """Return it, a codec with all its parameters. Raises `ConfigError` for anything else."""
    if quality in FLOORS:
        return quality
    try:
        return expand(quality)
    except ProtocolError:
        raise ConfigError(
            f"unknown quality {quality!r}: give {', '.join(FLOORS)}, or a codec "
            f"({', '.join(FAMILIES)}, with parameters as in int8:16:8)"
        ) from None


def allows(quality: str, codec: str) -> bool:
    """Whether hidden states of a session may travel so.

    Raises `ProtocolError` for a codec that is unknown here.
    """
    return parse(codec).text in allowed(quality)


def allowed(quality: str) -> tuple[str, ...]:
    """All codecs, with their parameters, in which hidden states of a session may travel."""
    return _upto(quality) if quality in FLOORS else (*_ALSO[EXACT], quality)


def candidates(quality: str, decodes: Collection[str]) -> tuple[str, ...]:
    """What a sender may choose from for a receiver that decodes these, the plainest first.

    `decodes`: names without parameters, as of `codec_names`. A codec by name is used wherever it
    can be; "none" always can.
    """
    if quality == EXACT:
        return ("none",)
    if quality in FLOORS:
        named = [codec for codec in _upto(quality) if codec not in _HEAVY]
    else:
        named = [quality]
    known = {"none", *decodes}
    return tuple(codec for codec in named if name_of(codec) in known and _encodes(codec)) or (
        "none",
    )


def _encodes(codec: str) -> bool:
    """All codecs are decoded everywhere; to encode one takes a package that may be missing."""
    return not codec.startswith("blockwise8") or is_installed("bitsandbytes")


def codec_names() -> tuple[str, ...]:
    """All that this process decodes beside "none", with the versions of their formats."""
    names = (name_of(expand(name)) for name in FAMILIES)
    return tuple(name for name in names if name != "none")


def name_of(codec: str) -> str:
    """A codec's name without its parameters, with its version if that is not the first."""
    return codec.partition(":")[0]


def _upto(floor: str) -> tuple[str, ...]:
    floors = FLOORS[: FLOORS.index(floor) + 1]
    return tuple(codec for floor in floors for codec in _ALSO[floor])
