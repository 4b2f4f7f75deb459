"""Sessions made of several sessions over consecutive spans, in the client or the swarm.

T packed tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import torch

from nesa_node.client.losses import Loss
from nesa_node.client.prefix import SessionPrefix
from nesa_node.client.sessions import BlockSession, RowSlice, SwarmConnection, Want
from nesa_node.core.span import Span
from nesa_node.routing.chains import Hop


class LayeredSession(BlockSession):
    """Session over `layers`, which steps pass in order. Layers have equal lengths between steps."""

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

    @property
    def codecs(self) -> tuple[str, ...]:
        return tuple(codec for layer in self._layers for codec in layer.codecs)

    @property
    def losses(self) -> tuple[Loss, ...]:
        return tuple(loss for layer in self._layers for loss in layer.losses)

    async def step(
        self, hidden_TD: torch.Tensor, rows: Sequence[RowSlice], *, want: Want = "all"
    ) -> torch.Tensor:
        # Later layers attend to every token: only the last one may omit outputs.
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
    layers: Sequence[tuple[SwarmConnection, Span]],
    *,
    rows: int,
    max_tokens: int,
    prefix: SessionPrefix | None = None,
) -> AsyncIterator[BlockSession]:
    """Open one session over consecutive spans, each by its own connection; empty spans are skipped.

    Raises what the connections raise, after closing what was opened. Only the last layer can reuse
    a `prefix`, since a later layer would lack the reused tokens' outputs; the layers before it
    compute the prefix.
    """
    layers = [(connection, span) for connection, span in layers if len(span)]
    sessions: list[BlockSession] = []
    async with AsyncExitStack() as stack:
        for connection, span in layers:
            is_last = len(sessions) == len(layers) - 1
            its = _after(sessions, prefix) if prefix is not None and is_last else None
            opening = connection.open_session(span, rows=rows, max_tokens=max_tokens, prefix=its)
            sessions.append(await stack.enter_async_context(opening))
        yield sessions[0] if len(sessions) == 1 else LayeredSession(sessions)


def _after(sessions: Sequence[BlockSession], prefix: SessionPrefix) -> SessionPrefix:
    """`prefix` for a session that follows `sessions`: its inputs pass through those first."""
    # A copy: a session reachable from its own prefix would outlive its context.
    earlier = tuple(sessions)

    async def inputs(slices: Sequence[RowSlice]) -> torch.Tensor:
        hidden_TD = await prefix.inputs(slices)
        for session in earlier:
            hidden_TD = await session.step(hidden_TD, slices)
        return hidden_TD

    return replace(prefix, inputs=inputs)
