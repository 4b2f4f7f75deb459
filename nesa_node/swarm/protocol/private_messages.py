"""Messages of streams whose nodes multiply vectors that they cannot read (`docs/protocol.md`)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from nesa_node.core.settings.choices import PrivateScheme
from nesa_node.swarm.protocol.messages import BlockRange, Message

PRIVATE_PROTOCOL = "/nesa/private/1"
"""Streams of private sessions, one for each node of a session."""
SEED_BYTES = 32
MAX_ROTATIONS = 256
"""Keys of one stream."""
MAX_VECTORS = 256
"""Ciphertexts of one request: of all tokens' chunks."""
MAX_MASKED_VECTORS = 32
"""Masked vectors of one request."""
MAX_PAYLOAD_BYTES = 64 << 20

Seed = Annotated[bytes, Meta(min_length=SEED_BYTES, max_length=SEED_BYTES)]
PayloadBytes = Annotated[int, Meta(ge=0, le=MAX_PAYLOAD_BYTES)]
Steps = Annotated[int, Meta(ge=1, le=1 << 16)]
RequestNumber = Annotated[int, Meta(ge=0, lt=1 << 53)]


class PrivateOpen(Message, frozen=True, kw_only=True, tag="private_open"):
    """Client to node: keys of rotations follow, then products of blocks that the node serves."""

    model: Annotated[str, Meta(max_length=256)]
    membership: Annotated[bytes, Meta(max_length=64)] = b""
    """In a private swarm the proof that the sender knows its key (`adapter_proof`)."""
    scheme: PrivateScheme
    seed: Seed | None = None
    """Of the keys' uniform halves; masks need no keys."""


class PrivateOpened(Message, frozen=True, kw_only=True, tag="private_opened"):
    """Node to client: send the keys of these rotations; products of these blocks are computed."""

    blocks: BlockRange
    rotations: Annotated[tuple[Steps, ...], Meta(max_length=MAX_ROTATIONS)]


class RotationKey(Message, frozen=True, kw_only=True, tag="rotation_key"):
    """Client to node: the other half of one rotation's key, as payload."""

    steps: Steps
    nbytes: PayloadBytes


class EncryptedInput(Message, frozen=True, kw_only=True, tag="encrypted_input"):
    """Client to node: multiply these vectors, or masks, with the weights of linear layer `path`.

    Layers that get the same input are named by the first of them. The payload has the first
    polynomial of each vector's chunks, of one token after another.
    """

    request: RequestNumber
    path: Annotated[str, Meta(max_length=512)]
    seeds: Annotated[tuple[Seed, ...], Meta(min_length=1, max_length=MAX_VECTORS)]
    nbytes: PayloadBytes


class EncryptedOutput(Message, frozen=True, kw_only=True, tag="encrypted_output"):
    """Node to client: one token's product, both polynomials of each block.

    Of a mask's product the second polynomials come first, and then those coefficients of the first
    ones that are outputs.
    """

    request: RequestNumber
    token: Annotated[int, Meta(ge=0, lt=MAX_VECTORS)]
    scale: Annotated[float, Meta(ge=1, le=2.0**120)] = 1.0
    """What a slot of 1 is in the coefficients; masks are integers."""
    nbytes: PayloadBytes


class MaskedInput(Message, frozen=True, kw_only=True, tag="masked_input"):
    """Client to node: multiply these masked vectors with the weights of linear layer `path`.

    The payload has five bytes of each number, of one token after another.
    """

    request: RequestNumber
    path: Annotated[str, Meta(max_length=512)]
    tokens: Annotated[int, Meta(ge=1, le=MAX_MASKED_VECTORS)]
    nbytes: PayloadBytes


class MaskedOutput(Message, frozen=True, kw_only=True, tag="masked_output"):
    """Node to client: all tokens' products, five bytes of each number."""

    request: RequestNumber
    nbytes: PayloadBytes


PrivateMessage = RotationKey | EncryptedInput | EncryptedOutput | MaskedInput | MaskedOutput
"""Those with a payload."""
