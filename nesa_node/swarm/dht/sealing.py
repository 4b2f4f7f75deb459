"""Signed envelope of all statements on the DHT: node records and notices.

A sealed statement is a msgpack map: `record` (bytes of the body), `signature` (Ed25519 over the
kind's prefix and the body), `peer_id` (the signer), `tag` (32 bytes in a private swarm, else empty)
and `kind`. The kind determines the prefix and the purpose of the tag, so that a signature made for
one kind is invalid for any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from nesa_node.core.errors import RecordError
from nesa_node.core.ids import PeerId
from nesa_node.swarm.p2p.identity import Identity, verify_signature
from nesa_node.swarm.p2p.membership import TAG_BYTES, Membership

CLOCK_SKEW_S = 30.0
"""Accepted difference between the clocks of two nodes."""
RECORD_KIND = "record"

_StatementKindName = Annotated[str, msgspec.Meta(max_length=16)]


@dataclass(frozen=True, slots=True)
class StatementKind:
    """A kind of statement; `max_bytes` bounds a whole sealed statement."""

    name: str
    max_bytes: int

    @property
    def prefix(self) -> bytes:
        return f"nesa-node {self.name} 1\0".encode()


class Envelope(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    record: bytes
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
    peer_id: Annotated[str, msgspec.Meta(max_length=128)]
    tag: Annotated[bytes, msgspec.Meta(max_length=TAG_BYTES)] = b""
    kind: _StatementKindName = RECORD_KIND


class _KindOnly(msgspec.Struct):
    kind: _StatementKindName = RECORD_KIND


def read_kind(sealed: bytes) -> str:
    """The kind that `sealed` claims to have; "record" if it has none that can be read."""
    try:
        return msgspec.msgpack.decode(sealed, type=_KindOnly).kind
    except (msgspec.DecodeError, ValueError, RecursionError):
        return RECORD_KIND


def seal_body(
    kind: StatementKind, body: bytes, identity: Identity, membership: Membership
) -> bytes:
    """Sign `body` and wrap it in an envelope. Raises `RecordError` (oversized)."""
    signature = identity.sign(kind.prefix + body)
    tag = membership.tag(kind.name.encode(), body, signature)
    sealed = msgspec.msgpack.encode(
        Envelope(body, signature, identity.peer_id, tag, kind=kind.name)
    )
    if len(sealed) > kind.max_bytes:
        raise RecordError("oversized", f"a {kind.name} of {len(sealed)} bytes is too large")
    return sealed


def open_envelope(
    kind: StatementKind, sealed: bytes, membership: Membership
) -> tuple[PeerId, bytes]:
    """Verify an envelope; returns signer and body.

    Raises `RecordError` with one of the reasons oversized, malformed, foreign and signature.
    """
    if len(sealed) > kind.max_bytes:
        raise RecordError("oversized", f"a {kind.name} of {len(sealed)} bytes is too large")
    try:
        envelope = msgspec.msgpack.decode(sealed, type=Envelope)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RecordError("malformed", f"not a sealed {kind.name}") from error
    if envelope.kind != kind.name:
        raise RecordError("malformed", f"a {envelope.kind}, not a {kind.name}")
    name, body, signature = kind.name.encode(), envelope.record, envelope.signature
    if not membership.check(envelope.tag, name, body, signature):
        raise RecordError("foreign", f"the {kind.name} is not of this private swarm")
    peer_id = PeerId(envelope.peer_id)
    if not verify_signature(peer_id, kind.prefix + body, signature):
        raise RecordError("signature", f"{peer_id} did not sign this {kind.name}")
    return peer_id, body


def read_fields(kind: StatementKind, body: bytes, version: int) -> dict[str, Any]:
    """Decode the signed map. Raises `RecordError` (malformed or version)."""
    try:
        fields = msgspec.msgpack.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RecordError("malformed", f"a {kind.name}'s fields are not a msgpack map") from error
    if fields.get("version") != version:
        raise RecordError(
            "version", f"{kind.name}s of version {fields.get('version')!r:.20} are not read"
        )
    return fields
