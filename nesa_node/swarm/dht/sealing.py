"""Statements on the DHT in their signed envelope, and notices: leases, placements, reports,
evidence.

A sealed statement is a msgpack map: `record` (bytes of the body), `signature` (Ed25519 over the
kind's prefix and the body), `peer_id` (the signer), `tag` (32 bytes in a private swarm, else empty)
and `kind`. The kind determines the prefix and the purpose of the tag, so that a signature made for
one kind is invalid for any other.

Each kind of notice has a DHT key per model, with one subkey per signer. A signer's later notice of
a kind replaces its earlier one: `(epoch, seq)` and the expiry both rise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from nesa_node.core.errors import RecordError
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.swarm.p2p.identity import TAG_BYTES, Identity, Membership, verify_signature
from nesa_node.swarm.protocol.seal_messages import MAX_STATEMENT_BYTES

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
Operator = Annotated[Text, Field(min_length=1, max_length=64)]
"""Name of the person or organisation that runs a machine, as declared: not checked."""
Time = Annotated[float, Field(gt=0, lt=1e11)]
Pair = Annotated[tuple[int, int], max_items(2)]
Count = Annotated[int, Field(ge=0, lt=2**50)]
Peer = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[1-9A-HJ-NP-Za-km-z]+$")]


MAX_ADDRESSES = 16
Addresses = Annotated[
    tuple[Annotated[str, Field(pattern=r"^/[!-~]{1,254}$")], ...], max_items(MAX_ADDRESSES)
]


def check_own_addresses(addresses: tuple[str, ...], peer_id: str) -> None:
    """Raise `ValueError` unless all of a statement's addresses are its signer's."""
    if not all(address.endswith(f"/p2p/{peer_id}") for address in addresses):
        raise ValueError("an address must end in the node's own peer id")


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


MAX_PLACEMENT_MOVES = 64
"""Moves in one placement. Nodes move a few times an hour; further moves are in later placements."""
MAX_REPORTED_PEERS = 16
MAX_LISTED_EVIDENCE = 4
"""Accused nodes in one notice."""
MAX_EVIDENCE_BYTES = 8192
"""A sealed notice. Two seals of a session of some forty rows take it all."""
EVIDENCE_MAX_TTL_S = 86_400.0
MAX_EPOCH = 2**48
MAX_MAGNITUDE = 1e9

FailureKind = Literal["refused", "stalled", "lost", "wrong", "slow"]

_Name = Annotated[str, Field(pattern=r"^[a-z0-9_.:-]{1,40}$")]
_Gain = Annotated[float, Field(ge=-1, le=1e6)]
_Seconds = Annotated[float, Field(ge=0, le=MAX_MAGNITUDE)]
_Rate = Annotated[float, Field(ge=0, le=MAX_MAGNITUDE)]
_Number = Annotated[float, Field(ge=-MAX_MAGNITUDE, le=MAX_MAGNITUDE)]


class Notice(Statement):
    """Base class of all kinds of notices."""

    model_config = STRICT

    model_id: Text = Field(min_length=1, max_length=256)
    peer_id: str = Field(max_length=128)
    epoch: int = Field(default=0, ge=0, lt=MAX_EPOCH)
    seq: int = Field(ge=0, lt=2**53)
    issued_at: Time
    expires_at: Time

    @property
    def order(self) -> tuple[int, int]:
        return self.epoch, self.seq

    @model_validator(mode="after")
    def _check_life(self) -> Self:
        most = self.bounds.max_ttl_s
        if not 0 < self.expires_at - self.issued_at <= most:
            raise ValueError(f"a {self.bounds.name} lives at most {most:g} s")
        # Epochs rise at most once a second, so that no signer can exhaust the numbers.
        if self.epoch > self.issued_at:
            raise ValueError("an epoch of the far future")
        return self


class Lease(Notice):
    """Claim of the right to orchestrate a model.

    `role` "leading": the signer orchestrates in `epoch`; "ready": it is a candidate.
    """

    bounds: ClassVar = StatementBounds("lease", 1024, 120.0, 0.0, 64)

    role: Literal["leading", "ready"]


class AnnouncedMove(BaseModel):
    """Move of `peer` from the span `was` to `to`; `gain` is the saved share of the swarm's cost."""

    model_config = STRICT

    peer: Peer
    was: Pair
    to: Pair
    gain: _Gain

    @model_validator(mode="after")
    def _check_spans(self) -> Self:
        for start, end in (self.was, self.to):
            if not 0 <= start <= end <= 10_000:
                raise ValueError(f"{start}:{end} is no span")
        if self.to[0] == self.to[1]:
            raise ValueError("the span to move to is empty")
        return self

    @property
    def span(self) -> Span:
        return Span(*self.to)

    @property
    def previous_span(self) -> Span:
        return Span(*self.was)


class TunedExponents(BaseModel):
    """Exponents and weights of the greedy rule, and weights of the default cost of sessions.

    The signer tuned them to this swarm; clients believe them within bounds (`routing/tuner.py`).
    `version` rises with every change, `at` is the time of the last one, and `why` says what it
    gained.
    """

    model_config = STRICT

    version: int = Field(ge=1, lt=2**31)
    at: Time
    values: Annotated[dict[_Name, _Number], max_items(16)]
    why: Text = Field(max_length=128)


class PlacementNotice(Notice):
    """Moves that the orchestrator of `epoch` asks for, and the reasons for them.

    `based_on` is the digest of the snapshot that was planned from, `gain` the share of the swarm's
    cost that all moves together save, `repairs` the number of unserved blocks that get a holder,
    and `schema_name` the precomputed schema that suits the snapshot
    (`routing/placement/schemas.py`). A placement without moves publishes `exponents` that differ
    from the defaults.
    """

    bounds: ClassVar = StatementBounds("placement", 8192, 600.0, 0.0, 32)

    num_blocks: int = Field(ge=1, le=10_000)
    based_on: str = Field(pattern=r"^[0-9a-f]{0,64}$")
    moves: Annotated[tuple[AnnouncedMove, ...], max_items(MAX_PLACEMENT_MOVES)]
    gain: _Gain
    repairs: int = Field(default=0, ge=0, le=10_000)
    latency_before_s: _Seconds | None = None
    latency_after_s: _Seconds | None = None
    steps_per_s_before: _Rate | None = None
    steps_per_s_after: _Rate | None = None
    strategy: _Name
    parameters: Annotated[dict[_Name, _Number], max_items(16)] = Field(default_factory=dict)
    """Parameters of the policy that decides moves: the gain required, and in which time."""
    exponents: TunedExponents | None = None
    schema_name: Annotated[Text, Field(max_length=64)] | None = None
    trigger: _Name
    reason: Text = Field(max_length=256)

    @property
    def name(self) -> str:
        """Short name in logs and in `nesa-node explain`."""
        return f"{self.epoch}.{self.seq}@{self.peer_id[-8:]}"

    @model_validator(mode="after")
    def _check_moves(self) -> Self:
        if len({move.peer for move in self.moves}) < len(self.moves):
            raise ValueError("a peer is moved twice")
        if any(max(move.to[1], move.was[1]) > self.num_blocks for move in self.moves):
            raise ValueError(f"a span is not within {self.num_blocks} blocks")
        return self


class ReportedFailure(BaseModel):
    """Failures of `peer`: `count` of one kind, the last one at `at` by the reporter's clock."""

    model_config = STRICT

    peer: Peer
    kind: FailureKind
    count: int = Field(ge=1, le=1000)
    at: Time


class FailureReport(Notice):
    """Recent failures of peers, as its signer has observed them."""

    bounds: ClassVar = StatementBounds("report", 2560, 300.0, 10.0, 128)

    failures: Annotated[
        tuple[ReportedFailure, ...], max_items(MAX_REPORTED_PEERS), Field(min_length=1)
    ]

    @model_validator(mode="after")
    def _check_failures(self) -> Self:
        if len({failure.peer for failure in self.failures}) < len(self.failures):
            raise ValueError("a peer is accused twice")
        if any(failure.peer == self.peer_id for failure in self.failures):
            raise ValueError("a peer accuses itself")
        if any(failure.at > self.issued_at for failure in self.failures):
            raise ValueError("a failure is yet to come")
        return self


class SignedSeal(BaseModel):
    """The bytes of a seal, as its node signed them (`swarm/protocol/seal_messages.py`)."""

    model_config = STRICT

    statement: Annotated[bytes, Field(min_length=1, max_length=MAX_STATEMENT_BYTES)]
    signature: Annotated[bytes, Field(min_length=64, max_length=64)]


class ListedContradiction(BaseModel):
    """Two seals that `accused` signed and that cannot both be true."""

    model_config = STRICT

    accused: Peer
    seals: Annotated[tuple[SignedSeal, ...], max_items(2), Field(min_length=2)]


class EvidenceNotice(Notice):
    """What its signer has, or has seen, against nodes of a model."""

    bounds: ClassVar = StatementBounds("evidence", MAX_EVIDENCE_BYTES, EVIDENCE_MAX_TTL_S, 0.0, 64)

    contradictions: Annotated[
        tuple[ListedContradiction, ...], max_items(MAX_LISTED_EVIDENCE), Field(min_length=1)
    ]

    @model_validator(mode="after")
    def _check_accused(self) -> Self:
        accused = {each.accused for each in self.contradictions}
        if len(accused) < len(self.contradictions):
            raise ValueError("a node is accused twice")
        if self.peer_id in accused:
            raise ValueError("a peer accuses itself")
        return self


def notice_key(kind: type[Notice], model_id: ModelId) -> str:
    return f"nesa/1/{kind.bounds.name}/{model_id}"
