"""Messages of streams on which nodes multiply encrypted vectors (`docs/protocol.md`)."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from nesa_node.core.errors import ProtocolError
from nesa_node.swarm.protocol.messages import BlockRange, Message

PRIVATE_PROTOCOL = "/nesa/private/1"
"""Streams of private sessions, one for each node of a session."""
SEED_BYTES = 32
MAX_ROTATIONS = 256
"""Keys of one stream."""
MAX_VECTORS = 256
"""Ciphertexts of one request: of all tokens' chunks."""
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
    scheme: Literal["ckks"]
    seed: Seed
    """Of the keys' uniform halves."""


class PrivateOpened(Message, frozen=True, kw_only=True, tag="private_opened"):
    """Node to client: send the keys of these rotations; products of these blocks are computed."""

    blocks: BlockRange
    rotations: Annotated[tuple[Steps, ...], Meta(max_length=MAX_ROTATIONS)]


class RotationKey(Message, frozen=True, kw_only=True, tag="rotation_key"):
    """Client to node: the other half of one rotation's key, as payload."""

    steps: Steps
    nbytes: PayloadBytes


class EncryptedInput(Message, frozen=True, kw_only=True, tag="encrypted_input"):
    """Client to node: multiply these vectors with the weights of linear layer `path`.

    Layers that get the same input are named by the first of them. The payload has the first
    polynomial of each vector's chunks, of one token after another.
    """

    request: RequestNumber
    path: Annotated[str, Meta(max_length=512)]
    seeds: Annotated[tuple[Seed, ...], Meta(min_length=1, max_length=MAX_VECTORS)]
    nbytes: PayloadBytes


class EncryptedOutput(Message, frozen=True, kw_only=True, tag="encrypted_output"):
    """Node to client: one token's product, both polynomials of each block."""

    request: RequestNumber
    token: Annotated[int, Meta(ge=0, lt=MAX_VECTORS)]
    scale: Annotated[float, Meta(ge=1, le=2.0**120)]
    """What a slot of 1 is in the coefficients."""
    nbytes: PayloadBytes


PrivateMessage = RotationKey | EncryptedInput | EncryptedOutput
"""Those with a payload."""


def private_payload_bytes(message: PrivateMessage, *, max_bytes: int) -> int:
    """Bytes behind `message`. Raises `ProtocolError("bad_tensor")` for more than `max_bytes`."""
    if message.nbytes > max_bytes:
        raise ProtocolError("bad_tensor", f"{message.nbytes} bytes; at most {max_bytes} are taken")
    return message.nbytes
