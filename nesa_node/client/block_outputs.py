"""Hidden states between blocks, which nodes do not send: one short session after another.

A node sends what the last block of a session returns, and a session may cover any part of the
node's span. So each part of the model that ends where a hidden state is wanted has a session of its
own. It is closed before the next one opens, so that no session holds room while it waits for room.
T packed tokens, D hidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence

import torch

from nesa_node.client.sessions import RowSlice, SwarmConnection
from nesa_node.core.span import Span

Selection = bool | int | Sequence[int] | None
"""`output_hidden_states` as transformers has it: all, none, or those of these indices."""


def selected_indices(asked: Selection, num_blocks: int) -> frozenset[int]:
    """Which of `num_blocks + 1` hidden states `asked` wants; none where it is false.

    0 is the first block's input, i what block i - 1 returned. Negative ones count from the end.
    Raises `ValueError` for an index that there is not.
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
    """Run whole texts through `layers`; what enters the first block and leaves those `wanted`.

    `wanted` are indices as those of `selected_indices`; what leaves the last block is always among
    the results, each [T, D] in the dtype of `hidden_TD`. `slices` begin at position 0. Raises as
    `SwarmConnection.open_session` and `BlockSession.step` do.
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
    """The layers, cut where a hidden state is wanted."""
    for connection, span in layers:
        inner = sorted(cut for cut in wanted if span.start < cut < span.end)
        for start, end in itertools.pairwise([span.start, *inner, span.end]):
            yield connection, Span(start, end)
