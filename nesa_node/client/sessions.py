"""What the generation code asks of a running session and of the connection that opens one.

T packed tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import torch

from nesa_node.client.losses import Loss
from nesa_node.client.prefix import SessionPrefix
from nesa_node.core.metrics import Sample
from nesa_node.core.span import Span
from nesa_node.routing.chains import Hop
from nesa_node.swarm.messages import RowSlice, Want

__all__ = ["BlockSession", "Connect", "RowSlice", "SwarmConnection", "Want"]


class BlockSession(Protocol):
    """The KV caches of `rows` sequences in a span of blocks, wherever those blocks run.

    One call at a time; the caller waits for a step before it asks for the next one or rolls back.
    """

    @property
    def rows(self) -> int: ...

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens that each row's cache holds."""
        ...

    @property
    def max_tokens(self) -> int:
        """Tokens that every hop has promised to hold per row."""
        ...

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The chain as it is now; it changes when a node is replaced."""
        ...

    @property
    def codecs(self) -> tuple[str, ...]:
        """How the last step's hidden states travelled, stream by stream; empty without streams."""
        ...

    @property
    def losses(self) -> tuple[Loss, ...]:
        """Nodes that it had to go on without, the last ones."""
        return ()

    async def step(
        self, hidden_TD: torch.Tensor, rows: Sequence[RowSlice], *, want: Want = "all"
    ) -> torch.Tensor:
        """Run packed tokens through the span, after those the caches hold.

        `hidden_TD` holds the slices one after another in the order of `rows` (T is the sum of their
        counts, each row at most once) and is not modified. Each slice's `position` must equal its
        row's length; rows not named stay as they are. Returns [T, D], or with `want="last"` only
        the last token of each slice, [len(rows), D], in the dtype of `hidden_TD`.
        Raises `CacheFullError` beyond `max_tokens`, before anything is sent.
        """
        ...

    async def rollback(self, lengths: Sequence[int]) -> None:
        """Forget each row's tokens beyond `lengths[row]`; none may be longer than it is."""
        ...

    async def reorder(self, sources: Sequence[int]) -> None:
        """Let each row go on as a copy of row `sources[row]`, as beam search needs it."""
        ...

    async def close(self) -> None:
        """Release what every hop holds. May be called twice."""
        ...


class SwarmConnection(Protocol):
    """A member of the swarm that opens sessions. Used inside one event loop."""

    def open_session(
        self, span: Span, *, rows: int, max_tokens: int, prefix: SessionPrefix | None = None
    ) -> AbstractAsyncContextManager[BlockSession]:
        """A session over the blocks of `span` that holds up to `max_tokens` in each of `rows` rows.

        With a `prefix` its rows may begin with some of those tokens, as `lengths` then says.
        Entering raises `ContextLengthError` where no route promises that many tokens per row and
        `MissingBlocksError` where some blocks stay without a node. Leaving closes the session. It
        is entered and left by one task; steps may come from others, one at a time. A step that is
        cancelled leaves the session unusable: it can only be left.
        """
        ...

    @property
    def is_lost(self) -> bool:
        """Whether the swarm has to be joined anew before another session. For any thread."""
        return False

    def samples(self) -> Iterable[Sample]:
        """What there is to tell Prometheus: a `Source` for any thread."""
        return ()


Connect = Callable[[], AbstractAsyncContextManager[SwarmConnection]]
"""How to join the swarm. One task enters and leaves it; sessions are left before."""
