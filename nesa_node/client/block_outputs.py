"""Hidden states between blocks, computed by one short session per part of the model.

Nodes send only what the last block of a session returns, but a session may cover any part of a
node's span. Each part that ends at a wanted hidden state has a session of its own, closed before
the next one opens: a session never holds cache while another waits for it.

T packed tokens, D hidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence

import torch

from nesa_node.client.sessions import RowSlice, SwarmConnection
from nesa_node.core.span import Span

Selection = bool | int | Sequence[int] | None
"""`output_hidden_states` as in transformers: all, none, or those of the given indices."""


def selected_indices(asked: Selection, num_blocks: int) -> frozenset[int]:
    """Indices among `num_blocks + 1` hidden states that `asked` selects; empty if it is false.

    Index 0 is the first block's input, index i the output of block i - 1. Negative indices count
    from the end. Raises `ValueError` for an index out of range.
    """
    states = num_blocks + 1
    if not asked:
        return frozenset()
    if asked is True:
        return frozenset(range(states))
    indices = [asked] if isinstance(asked, int) else list(asked)
    if wrong := [index for index in indices if not -states <= index < states]:
        raise ValueError(
            f"output_hidden_states={asked}: there are {states} hidden states, none is {wrong[0]}; "
            f"use 0 to {num_blocks}, or True for all"
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
    for connection, span in _parts(layers, wanted):
        opening = connection.open_session(span, rows=rows, max_tokens=max_tokens)
        async with opening as session:
            hidden_TD = await session.step(hidden_TD, slices)
        states[span.end] = hidden_TD
    return states


def _parts(
    layers: Sequence[tuple[SwarmConnection, Span]], wanted: Collection[int]
) -> Iterator[tuple[SwarmConnection, Span]]:
    """Spans of `layers`, split at each wanted hidden state."""
    for connection, span in layers:
        inner = sorted(cut for cut in wanted if span.start < cut < span.end)
        for start, end in itertools.pairwise([span.start, *inner, span.end]):
            yield connection, Span(start, end)
