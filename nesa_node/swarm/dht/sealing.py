"""Signed envelope of all statements on the DHT: node records and notices.

A sealed statement is a msgpack map: `record` (bytes of the body), `signature` (Ed25519 over the
kind's prefix and the body), `peer_id` (the signer), `tag` (32 bytes in a private swarm, else empty)
and `kind`. The kind determines the prefix and the purpose of the tag, so that a signature made for
one kind is invalid for any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from nesa_node.core.errors import RecordError
from nesa_node.core.ids import PeerId
from nesa_node.swarm.p2p.identity import Identity, verify_signature
from nesa_node.swarm.p2p.membership import TAG_BYTES, Membership

CLOCK_SKEW_S = 30.0
"""Accepted difference between the clocks of two nodes."""
RECORD_KIND = "record"
_MAJOR_VERSION = 1
_PUBLIC_NETWORK = Membership(None)

_StatementKindName = Annotated[str, msgspec.Meta(max_length=16)]

STRICT = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)
"""Config of the models of statements, which peers write."""


def _check_printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be printable")
    return text


def max_items(length: int) -> BeforeValidator:
    """Validator of a list or dict with at most `length` items; MessagePack's lists become tuples.

    pydantic's own `max_length` counts only after it has validated all items and kept their errors.
    """

    def check(value: object) -> object:
        if isinstance(value, list | tuple | dict) and len(value) > length:
            raise ValueError(f"must have at most {length} items")
        return tuple(value) if isinstance(value, list) else value

    return BeforeValidator(check)


Text = Annotated[str, AfterValidator(_check_printable)]
Time = Annotated[float, Field(gt=0, lt=1e11)]
Pair = Annotated[tuple[int, int], max_items(2)]


@dataclass(frozen=True, slots=True)
class StatementBounds:
    """Name and limits of one kind of statement.

    It has at most `max_bytes` when sealed and lives at most `max_ttl_s`, two of one signer are
    issued at least `min_interval_s` apart, and a DHT member keeps at most `max_per_key`.
    """

    name: str
    max_bytes: int
    max_ttl_s: float
    min_interval_s: float
    max_per_key: int

    @property
    def prefix(self) -> bytes:
        return f"nesa-node {self.name} 1\0".encode()


class Statement(BaseModel):
    """Base class of node records and of all kinds of notices; `peer_id` is the signer's."""

    bounds: ClassVar[StatementBounds]

    if TYPE_CHECKING:  # declared by the subclasses, in the order in which they are encoded
        model_id: str
        peer_id: str
        seq: int
        issued_at: float
        expires_at: float

    @property
    def signer(self) -> PeerId:
        return PeerId(self.peer_id)

    @property
    def order(self) -> tuple[int, int]:
        """Rises from each statement to the one that replaces it."""
        return 0, self.seq

    @property
    def slot(self) -> tuple[str, str]:
        """Statements of one kind and slot replace each other."""
        return self.model_id, self.peer_id


_Statement = TypeVar("_Statement", bound=Statement)


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


def seal_statement(
    statement: Statement, identity: Identity, membership: Membership = _PUBLIC_NETWORK
) -> bytes:
    """Sign `statement`. Raises `RecordError` if it is too large or names another signer."""
    kind = statement.bounds
    if statement.peer_id != identity.peer_id:
        raise RecordError("foreign", f"cannot sign a {kind.name} of {statement.peer_id}")
    body = msgspec.msgpack.encode({"version": _MAJOR_VERSION, **statement.model_dump()})
    signature = identity.sign(kind.prefix + body)
    tag = membership.tag(kind.name.encode(), body, signature)
    sealed = msgspec.msgpack.encode(
        Envelope(body, signature, identity.peer_id, tag, kind=kind.name)
    )
    if len(sealed) > kind.max_bytes:
        raise RecordError("oversized", f"a {kind.name} of {len(sealed)} bytes is too large")
    return sealed


def open_statement(
    model: type[_Statement], sealed: bytes, membership: Membership = _PUBLIC_NETWORK
) -> _Statement:
    """Verify and parse a statement regardless of its age, so that the result can be cached.

    Raises `RecordError` with one of the reasons oversized, malformed, foreign (not of this private
    swarm), signature and version.
    """
    kind = model.bounds
    peer_id, body = _open_envelope(kind, sealed, membership)
    statement = _parse_body(model, body)
    if statement.peer_id != peer_id:
        raise RecordError("signature", f"{peer_id} signed a {kind.name} of {statement.peer_id}")
    return statement


def check_age(statement: Statement, now: float) -> None:
    """Raise `RecordError`: expired, or future (issued more than `CLOCK_SKEW_S` from now)."""
    name = statement.bounds.name
    if statement.expires_at <= now:
        raise RecordError("expired", f"the {name} of {statement.peer_id} has expired")
    if statement.issued_at > now + CLOCK_SKEW_S:
        raise RecordError(
            "future",
            f"the {name} of {statement.peer_id} was made {statement.issued_at - now:.0f} s from "
            "now; one of the two clocks is wrong",
        )


def _open_envelope(
    kind: StatementBounds, sealed: bytes, membership: Membership
) -> tuple[PeerId, bytes]:
    """Verify an envelope; returns signer and body."""
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


def _parse_body(model: type[_Statement], body: bytes) -> _Statement:
    """Decode and validate the signed map. Raises `RecordError` (malformed or version)."""
    kind = model.bounds
    try:
        fields = msgspec.msgpack.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RecordError("malformed", f"a {kind.name}'s fields are not a msgpack map") from error
    if fields.get("version") != _MAJOR_VERSION:
        raise RecordError(
            "version", f"{kind.name}s of version {fields.get('version')!r:.20} are not read"
        )
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        # Without the input, which takes milliseconds to format.
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        words = f"a field is out of bounds: {field}: {first['msg']}"
        raise RecordError("malformed", words[:200]) from error
    except RecursionError as error:
        raise RecordError("malformed", "fields are nested too deeply") from error
