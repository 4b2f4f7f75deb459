"""One session made of sessions over consecutive spans: some of the client, some of the swarm.

T packed tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import torch

from nesa_node.client.sessions import BlockSession, RowSlice, SwarmConnection, Want
from nesa_node.core.span import Span
from nesa_node.routing.chains import Hop


class LayeredSession(BlockSession):
    """Steps go through `layers` in order; their lengths are always equal between steps."""

    def __init__(self, layers: Sequence[BlockSession]) -> None:
        if not layers:
            raise ValueError("a session needs at least one layer")
        self._layers = tuple(layers)

    @property
    def rows(self) -> int:
        return self._layers[0].rows

    @property
    def lengths(self) -> tuple[int, ...]:
        return self._layers[0].lengths

    @property
    def max_tokens(self) -> int:
        return min(layer.max_tokens for layer in self._layers)

    @property
    def hops(self) -> tuple[Hop, ...]:
        return tuple(hop for layer in self._layers for hop in layer.hops)

    async def step(
        self, hidden_TD: torch.Tensor, rows: Sequence[RowSlice], *, want: Want = "all"
    ) -> torch.Tensor:
        # Later layers attend to every token, so only the last one may leave some out.
        for layer in self._layers[:-1]:
            hidden_TD = await layer.step(hidden_TD, rows)
        return await self._layers[-1].step(hidden_TD, rows, want=want)

    async def rollback(self, lengths: Sequence[int]) -> None:
        for layer in self._layers:
            await layer.rollback(lengths)

    async def reorder(self, sources: Sequence[int]) -> None:
        for layer in self._layers:
            await layer.reorder(sources)

    async def close(self) -> None:
        for layer in self._layers:
            await layer.close()


@asynccontextmanager
async def open_layers(
    layers: Sequence[tuple[SwarmConnection, Span]], *, rows: int, max_tokens: int
) -> AsyncIterator[BlockSession]:
    """A session over consecutive spans, each from its own connection; empty spans are skipped.

    Raises what the connections raise; those already opened are left then.
    """
    async with AsyncExitStack() as stack:
        sessions = [
            await stack.enter_async_context(
                connection.open_session(span, rows=rows, max_tokens=max_tokens)
            )
            for connection, span in layers
            if len(span)
        ]
        yield sessions[0] if len(sessions) == 1 else LayeredSession(sessions)
