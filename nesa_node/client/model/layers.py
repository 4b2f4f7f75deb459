"""Sessions made of several sessions over consecutive spans, in the client or the swarm.

T packed tokens, D hidden.

Hidden states between blocks, computed by one short session per part of the model.

Nodes send only what the last block of a session returns, but a session may cover any part of a
node's span. Each part that ends at a wanted hidden state has a session of its own, closed before
the next one opens: a session never holds cache while another waits for it.

T packed tokens, D hidden.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import torch

from nesa_node.client.session.base import BlockSession, Failover, RowSlice, SwarmConnection, Want
from nesa_node.client.session.prefix import SessionPrefix
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
    def failovers(self) -> tuple[Failover, ...]:
        return tuple(loss for layer in self._layers for loss in layer.failovers)

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
            its = _prefix_after(sessions, prefix) if prefix is not None and is_last else None
            opening = connection.open_session(span, rows=rows, max_tokens=max_tokens, prefix=its)
            sessions.append(await stack.enter_async_context(opening))
        yield sessions[0] if len(sessions) == 1 else LayeredSession(sessions)


def _prefix_after(sessions: Sequence[BlockSession], prefix: SessionPrefix) -> SessionPrefix:
    """`prefix` for a session that follows `sessions`: its inputs pass through those first."""
    # A copy: a session reachable from its own prefix would outlive its context.
    earlier = tuple(sessions)

    async def inputs(slices: Sequence[RowSlice]) -> torch.Tensor:
        hidden_TD = await prefix.compute_inputs(slices)
        for session in earlier:
            hidden_TD = await session.step(hidden_TD, slices)
        return hidden_TD

    return replace(prefix, compute_inputs=inputs)


HiddenStateSelection = bool | int | Sequence[int] | None
"""`output_hidden_states` as in transformers: all, none, or those of the given indices."""


def selected_indices(selection: HiddenStateSelection, num_blocks: int) -> frozenset[int]:
    """Indices among `num_blocks + 1` hidden states that `selection` selects; empty if it is false.

    Index 0 is the first block's input, index i the output of block i - 1. Negative indices count
    from the end. Raises `ValueError` for an index out of range.
    """
    states = num_blocks + 1
    if not selection:
        return frozenset()
    if selection is True:
        return frozenset(range(states))
    indices = [selection] if isinstance(selection, int) else list(selection)
    if wrong := [index for index in indices if not -states <= index < states]:
        raise ValueError(
            f"output_hidden_states={selection}: there are {states} hidden states, none is "
            f"{wrong[0]}; use 0 to {num_blocks}, or True for all"
        )
    return frozenset(index % states for index in indices)


async def run_block_outputs(
    layers: Sequence[tuple[SwarmConnection, Span]],
    hidden_TD: torch.Tensor,
    slices: Sequence[RowSlice],
    wanted: Collection[int],
) -> dict[int, torch.Tensor]:
    """Run whole texts through `layers`; return the `wanted` hidden states by index.

    `wanted` are indices as in `selected_indices`. The last block's output and index 0 are always
    among the results, each [T, D] in the dtype of `hidden_TD`. `slices` begin at position 0. Raises
    what `SwarmConnection.open_session` and `BlockSession.step` raise.
    """
    rows = max(part.row for part in slices) + 1
    max_tokens = max(part.count for part in slices)
    states = {0: hidden_TD}
    for connection, span in _split_at_wanted(layers, wanted):
        opening = connection.open_session(span, rows=rows, max_tokens=max_tokens)
        async with opening as session:
            hidden_TD = await session.step(hidden_TD, slices)
        states[span.end] = hidden_TD
    return states


def _split_at_wanted(
    layers: Sequence[tuple[SwarmConnection, Span]], wanted: Collection[int]
) -> Iterator[tuple[SwarmConnection, Span]]:
    """Spans of `layers`, split at each wanted hidden state."""
    for connection, span in layers:
        inner = sorted(cut for cut in wanted if span.start < cut < span.end)
        for start, end in itertools.pairwise([span.start, *inner, span.end]):
            yield connection, Span(start, end)
