"""What the sessions of this process do now, for whoever shows it. Never what they say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from nesa_node.core.ids import ModelId, PeerId
from nesa_node.routing.chains import Hop

SessionState = Literal["waiting", "prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionActivity:
    """One session; times are seconds since the epoch."""

    id: str
    model_id: ModelId
    state: SessionState
    """`waiting` for a chain or for room, then computing the prompt, then the answer."""
    hops: tuple[Hop, ...]
    began_at: float
    prompt_tokens: int
    generated_tokens: int
    tokens_per_s: float
    """Over the last seconds."""
    failovers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failover:
    """A session went on through others: `lost` left its chain, by failing or by leaving."""

    at: float
    session_id: str
    lost: tuple[PeerId, ...]
    took_ms: float


class Activity(Protocol):
    """Read at any time, from the event loop of whoever shows it."""

    def sessions(self) -> Sequence[SessionActivity]:
        """Those that are open, the oldest first."""
        ...

    def failovers(self) -> Sequence[Failover]:
        """The last ones, at most 200, the oldest first."""
        ...
