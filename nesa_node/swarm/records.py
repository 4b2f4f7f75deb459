"""Node records: what a node announces about itself on the DHT, signed (`sealing.py`).

The signature covers the bytes as sent, so that fields added by a later minor version are preserved;
they are ignored here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, Self, TypeVar

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

from nesa_node.core.config import MAX_RECORD_TTL_S
from nesa_node.core.errors import RecordError
from nesa_node.core.ids import ModelId, PeerId, possible_names
from nesa_node.core.span import Span
from nesa_node.swarm.identity import Identity
from nesa_node.swarm.private import Membership
from nesa_node.swarm.sealing import (
    CLOCK_SKEW_S,
    RECORD_KIND,
    Kind,
    open_envelope,
    read_fields,
    seal_body,
)
from nesa_node.topology.packed import MAX_PACKED_BYTES, Measured, unpack_measured
from nesa_node.topology.snapshot import NodeState

MAX_RECORD_BYTES = 4096
MAX_ADDRESSES = 16

RECORD_MAJOR = 1
_KIND = Kind(RECORD_KIND, MAX_RECORD_BYTES)
_PUBLIC = Membership(None)


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be printable")
    return text


def at_most(length: int) -> BeforeValidator:
    """Validator of a list or dict with at most `length` items; MessagePack's lists become tuples.

    pydantic's own `max_length` counts only after it has validated all items and kept their errors.
    """

    def check(value: object) -> object:
        if isinstance(value, list | tuple | dict) and len(value) > length:
            raise ValueError(f"must have at most {length} items")
        return tuple(value) if isinstance(value, list) else value

    return BeforeValidator(check)


Text = Annotated[str, AfterValidator(_printable)]
Count = Annotated[int, Field(ge=0, lt=2**50)]
Rate = Annotated[float, Field(ge=0, le=1e8)]
Time = Annotated[float, Field(gt=0, lt=1e11)]
_Model = TypeVar("_Model", bound=BaseModel)
CodecText = Annotated[str, Field(pattern=r"^[a-z0-9:@]{1,32}$")]


def _unpackable(packed: bytes) -> bytes:
    unpack_measured(packed)
    return packed


PackedLinks = Annotated[bytes, Field(max_length=MAX_PACKED_BYTES), AfterValidator(_unpackable)]
Pair = Annotated[tuple[int, int], at_most(2)]


class NodeStatus(BaseModel):
    """Fields of a record that the node decides; `Directory.publish` completes and signs it.

    `state` is "joining" (loads its span), "serving" (accepts sessions), "draining" (finishes its
    sessions) or "withdrawn" (has left).
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)

    state: Literal["joining", "serving", "draining", "withdrawn"]
    model_id: Text = Field(min_length=1, max_length=256)
    model_name: Text = Field(min_length=1, max_length=256)
    num_blocks: int = Field(ge=1, le=10_000)
    span: Pair
    dtype: str = Field(pattern=r"^[a-z0-9_]{1,24}$")
    quantization: str = Field(default="none", pattern=r"^[a-z0-9_]{1,24}$")
    protocol_version: Annotated[
        tuple[Annotated[int, Field(ge=0, le=999)], Annotated[int, Field(ge=0, le=999)]],
        at_most(2),
    ]
    prefill_tokens_per_s: Rate = 0.0
    decode_tokens_per_s: Rate = 0.0
    free_cache_tokens: Count = 0
    total_cache_tokens: Count = 0
    gpu_memory_total_bytes: Count = 0
    gpu_memory_free_bytes: Count = 0
    cpu_memory_total_bytes: Count = 0
    cpu_memory_free_bytes: Count = 0
    load: float = Field(default=0.0, ge=0, le=1000)
    uptime_s: float = Field(default=0.0, ge=0, le=1e10)
    sessions: Count = 0
    """Open sessions."""
    tokens: Count = 0
    """Tokens computed since the node started."""
    context_length: int = Field(default=0, ge=0, lt=2**40)
    public_name: Annotated[Text, Field(max_length=64)] | None = None
    codecs: Annotated[tuple[CodecText, ...], at_most(32)] = ()
    """Codecs that the node decodes beside "none"."""
    sent_bytes: Annotated[dict[CodecText, Count], at_most(16)] = Field(default_factory=dict)
    """Bytes of hidden states sent since the node started, by codec."""
    movable: bool = False
    """Whether the node may move to other blocks, by its operator's settings and its own limits."""
    next_span: Pair | None = None
    """Span that a draining node moves to."""
    measured: PackedLinks = b""
    """Round trips and rates to peers, packed (`topology/packed.py`)."""
    max_blocks: int = Field(default=0, ge=0, le=10_000)
    """Blocks of the model that fit into the node's memory limit; 0 if unknown."""
    location: (
        Annotated[
            tuple[Annotated[float, Field(ge=-90, le=90)], Annotated[float, Field(ge=-180, le=180)]],
            at_most(2),
        ]
        | None
    ) = None
    """Latitude and longitude in degrees."""

    @model_validator(mode="after")
    def _check_span(self) -> Self:
        if not 0 <= self.span[0] < self.span[1] <= self.num_blocks:
            raise ValueError(f"span {self.span} is not within {self.num_blocks} blocks")
        if self.next_span and not 0 <= self.next_span[0] < self.next_span[1] <= self.num_blocks:
            raise ValueError(f"next span {self.next_span} is not within {self.num_blocks} blocks")
        return self


class NodeRecord(NodeStatus):
    """A complete record with all fields bounded; one returned by `unseal` has a valid signature."""

    peer_id: str = Field(max_length=128)
    seq: int = Field(ge=0, lt=2**53)
    issued_at: Time
    expires_at: Time
    addresses: Annotated[
        tuple[Annotated[str, Field(pattern=r"^/[!-~]{1,254}$")], ...], at_most(MAX_ADDRESSES)
    ] = ()

    @model_validator(mode="after")
    def _check_addresses(self) -> Self:
        suffix = f"/p2p/{self.peer_id}"
        if not all(address.endswith(suffix) for address in self.addresses):
            raise ValueError("an address must end in the node's own peer id")
        if not 0 < self.expires_at - self.issued_at <= MAX_RECORD_TTL_S:
            raise ValueError(f"a record lives at most {MAX_RECORD_TTL_S:g} s")
        return self

    def node_state(self) -> NodeState:
        """The fields that planners use."""
        shared = self.model_dump(include=_SHARED_FIELDS)
        return NodeState(peer_id=PeerId(self.peer_id), span=Span(*self.span), **shared)

    def measured_links(self) -> tuple[Measured, ...]:
        return unpack_measured(self.measured)


_SHARED_FIELDS = set(NodeState.__dataclass_fields__) - {"peer_id", "span"}


def seal(record: NodeRecord, identity: Identity, membership: Membership = _PUBLIC) -> bytes:
    """Sign `record`. Raises `RecordError` if it is too large or names another signer."""
    if record.peer_id != identity.peer_id:
        raise RecordError("foreign", f"cannot sign a record of {record.peer_id}")
    body = msgspec.msgpack.encode({"version": RECORD_MAJOR, **record.model_dump()})
    return seal_body(_KIND, body, identity, membership)


def unseal(data: bytes, *, now: float, membership: Membership = _PUBLIC) -> NodeRecord:
    """Verify and parse a record, valid at `now` (seconds since the epoch).

    Raises `RecordError` with one of the reasons oversized, malformed, foreign (not of this private
    swarm), signature, version, expired and future.
    """
    record = unseal_ageless(data, membership=membership)
    check_age(record, now)
    return record


def unseal_ageless(data: bytes, *, membership: Membership = _PUBLIC) -> NodeRecord:
    """Verify and parse a record regardless of its age, so that the result can be cached."""
    peer_id, body = open_envelope(_KIND, data, membership)
    record = _parse(body)
    if record.peer_id != peer_id:
        raise RecordError("signature", f"{peer_id} signed a record of {record.peer_id}")
    return record


def check_age(record: NodeRecord, now: float) -> None:
    """Raise `RecordError`: expired, or future (issued more than `CLOCK_SKEW_S` from now)."""
    if record.expires_at <= now:
        raise RecordError("expired", f"the record of {record.peer_id} has expired")
    if record.issued_at > now + CLOCK_SKEW_S:
        raise RecordError(
            "future",
            f"the record of {record.peer_id} was made {record.issued_at - now:.0f} s from now; "
            "one of the two clocks is wrong",
        )


def model_key(model_id: ModelId) -> str:
    """DHT key of the records of a model's nodes."""
    return f"nesa/1/model/{model_id}"


def of_model(records: Iterable[NodeRecord], wanted: str | None) -> Iterator[NodeRecord]:
    """Filter records by a model's name, folder or full id; all of them if `wanted` is None."""
    names = None if wanted is None else possible_names(wanted)
    for record in records:
        if names is None or record.model_id in names or record.model_name in names:
            yield record


def agreed_blocks(records: Iterable[NodeRecord]) -> int:
    """Number of blocks of a model that most of its records announce; 0 without records.

    Used when no checkpoint is open. Ties go to a number with a holder for each block, then to the
    smaller one: a false larger number leaves blocks without a holder.
    """
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for record in records:
        spans[record.num_blocks].append(record.span)

    def rank(num_blocks: int) -> tuple[int, bool, int]:
        end = 0
        for span in sorted(spans[num_blocks]):
            end = max(end, span[1]) if span[0] <= end else end
        return len(spans[num_blocks]), end == num_blocks, -num_blocks

    return max(spans, key=rank, default=0)


NODES_KEY = "nesa/1/nodes"
"""DHT key of the index of all nodes."""


def _parse(body: bytes) -> NodeRecord:
    return parse(NodeRecord, read_fields(_KIND, body, RECORD_MAJOR))


def parse(model: type[_Model], fields: dict[str, Any]) -> _Model:
    """Validate the fields of a signed statement. Raises `RecordError` (malformed)."""
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
