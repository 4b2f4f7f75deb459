"""Protocols of sessions and of connections that open them.

T packed tokens, D hidden.

Replacements of nodes in a running session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from nesa_node.client.session.prefix import SessionPrefix
from nesa_node.core.ids import PeerId
from nesa_node.core.metrics import MetricSample
from nesa_node.core.span import Span
from nesa_node.routing.chains import Hop
from nesa_node.swarm.protocol.messages import RowSlice, Want

MAX_SESSION_FAILOVERS = 20
"""Most records kept of one session, the newest."""


@dataclass(frozen=True, slots=True)
class Failover:
    """Replacement of the nodes `lost`, complete at `at` (Unix time) after `took_ms`."""

    at: float
    lost: tuple[PeerId, ...]
    took_ms: float


__all__ = ["BlockSession", "Connect", "RowSlice", "SwarmConnection", "Want"]


class BlockSession(Protocol):
    """KV caches of `rows` sequences in a span of blocks.

    One call at a time: a step ends before the next call.
    """

    @property
    def rows(self) -> int: ...

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens that each row's cache holds."""
        ...

    @property
    def max_tokens(self) -> int:
        """Tokens per row that every hop has reserved."""
        ...

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The current chain; it changes when a node is replaced."""
        ...

    @property
    def codecs(self) -> tuple[str, ...]:
        """Codec of the last step's hidden states on each stream; empty without streams."""
        ...

    @property
    def failovers(self) -> tuple[Failover, ...]:
        """The last replacements of nodes."""
        return ()

    async def step(
        self, hidden_TD: torch.Tensor, rows: Sequence[RowSlice], *, want: Want = "all"
    ) -> torch.Tensor:
        """Run packed tokens through the span, after those that the caches hold.

        `hidden_TD` holds the slices in the order of `rows` (T is the sum of their counts, each row
        at most once) and is not modified. Each slice's `position` must equal its row's length;
        other rows are unchanged. Returns [T, D], with `want="last"` only the last token of each
        slice, [len(rows), D], and with `want="none"` [0, D], in the dtype of `hidden_TD`. Raises
        `CacheFullError` beyond `max_tokens`, before anything is sent.
        """
        ...

    async def rollback(self, lengths: Sequence[int]) -> None:
        """Remove each row's tokens beyond `lengths[row]`, which must not exceed its length."""
        ...

    async def reorder(self, sources: Sequence[int]) -> None:
        """Let each row continue as a copy of row `sources[row]`, for beam search."""
        ...

    async def close(self) -> None:
        """Release the caches on every hop. Idempotent."""
        ...


class SwarmConnection(Protocol):
    """Membership in the swarm that opens sessions. For one event loop."""

    def open_session(
        self, span: Span, *, rows: int, max_tokens: int, prefix: SessionPrefix | None = None
    ) -> AbstractAsyncContextManager[BlockSession]:
        """Open a session over the blocks of `span` for up to `max_tokens` tokens in each of `rows`
        rows.

        With a `prefix` its rows may start with some of those tokens, see `lengths`. Entering raises
        `ContextLengthError` where no route can hold that many tokens per row and
        `MissingBlocksError` where blocks stay without a node. Leaving closes the session. One task
        enters and leaves it; steps may come from other tasks, one at a time. After a cancelled step
        the session can only be left.
        """
        ...

    @property
    def is_lost(self) -> bool:
        """Whether the swarm must be joined again before the next session. Thread-safe."""
        return False

    def samples(self) -> Iterable[MetricSample]:
        """Prometheus samples of the connection. Thread-safe."""
        return ()


Connect = Callable[[], AbstractAsyncContextManager[SwarmConnection]]
"""Joins the swarm. One task enters and leaves it, the latter after all sessions."""
