"""Notices: signed leases, placements and failure reports on the DHT.

Each kind has a DHT key per model, with one subkey per signer; `sealing.py` has the format. A
signer's later notice of a kind replaces its earlier one: `(epoch, seq)` and the expiry both rise.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, Field, model_validator

from nesa_node.core.ids import ModelId
from nesa_node.core.span import Span
from nesa_node.swarm.dht.sealing import (
    STRICT,
    Pair,
    Statement,
    StatementBounds,
    Text,
    Time,
    max_items,
)

MAX_PLACEMENT_MOVES = 64
"""Moves in one placement. Nodes move a few times an hour; further moves are in later placements."""
MAX_REPORTED_PEERS = 16
MAX_EPOCH = 2**48
MAX_MAGNITUDE = 1e9

FailureKind = Literal["refused", "stalled", "lost", "wrong", "slow"]

_Peer = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[1-9A-HJ-NP-Za-km-z]+$")]
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

    peer: _Peer
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
    """Exponents and term weights of the greedy routing rule, tuned by the signer to this swarm.

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

    peer: _Peer
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


NOTICE_KINDS: dict[str, type[Notice]] = {
    each.bounds.name: each for each in (Lease, PlacementNotice, FailureReport)
}


def notice_key(kind: type[Notice], model_id: ModelId) -> str:
    return f"nesa/1/{kind.bounds.name}/{model_id}"
