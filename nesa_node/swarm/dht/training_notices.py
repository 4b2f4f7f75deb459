"""Notices about training: the plans of a client's sessions, on which its nodes agree with it."""

from __future__ import annotations

import hashlib
from typing import Annotated, ClassVar

import msgspec
from pydantic import BaseModel, Field

from nesa_node.swarm.dht.sealing import STRICT, Count, Notice, StatementBounds, Text, max_items

MAX_LISTED_PLANS = 8
TRAINING_TTL_S = 3600.0

_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_PREFIX = b"nesa-node plan 1\0"


class SessionPlan(BaseModel):
    """What a fine-tuning session is: the same for all its nodes, from the first step to the last.

    Loss, labels and data stay with the client, which names them.
    """

    model_config = STRICT

    session: str = Field(pattern=r"^[0-9a-f]{32}$")
    """Random: two sessions are told apart."""
    spec: _Digest
    """SHA-256 of `train_open.spec`: shape and initial values of the adapters, the optimizer."""
    objective: Text = Field(default="", max_length=64)
    data: Text = Field(default="", max_length=64)
    """Digest of the order of micro-batches; empty where the client did not say."""
    max_tokens: Count
    """Of a micro-batch, with padding."""
    checkpoint_every: Count
    """Steps between two points to which the session returns when a node is lost."""
    replicas: int = Field(ge=1, le=64)
    """Nodes of each span, at most."""
    zero_stage: int = Field(ge=0, le=3)
    average_every: Count
    """Steps between two averagings of replicas; 1: they are synchronous."""

    @property
    def digest(self) -> bytes:
        """SHA-256 of `nesa-node plan 1`, a zero byte, and the plan as in the notice."""
        return hashlib.sha256(_PREFIX + msgspec.msgpack.encode(self.model_dump())).digest()


class TrainingNotice(Notice):
    """All sessions of its signer that train a model."""

    bounds: ClassVar = StatementBounds("training", 8192, TRAINING_TTL_S, 0.0, 64)

    plans: Annotated[tuple[SessionPlan, ...], max_items(MAX_LISTED_PLANS)] = ()

    def find_plan(self, digest: bytes) -> SessionPlan | None:
        return next((each for each in self.plans if each.digest == digest), None)
