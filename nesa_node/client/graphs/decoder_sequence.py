"""A decoder's tokens so far, and where the next request goes on from them.

B rows, T tokens.
"""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Sequence

from torch import Tensor

from nesa_node.core.errors import NesaError
from nesa_node.swarm.protocol.graph_messages import MAX_VALUES, GraphSequence


class SequenceLostError(NesaError):
    """What nodes kept of a sequence cannot be used: it has to begin again."""


class DecoderSequence:
    """Requests of one decoder over what its encoder made, each with more tokens than the last.

    Nodes keep what they computed for earlier tokens. Where one has lost it, the sequence begins
    again, with all tokens.
    """

    def __init__(self) -> None:
        self.values: dict[int, Tensor] = {}
        """Those of the graph that do not depend on tokens, from the first request on."""
        self.position = 0
        """Tokens of each row that nodes know already."""
        self.message = self._begin()
        self._rows: Sequence[tuple[Hashable, tuple[int, ...]]] = ()
        """Of the last request that was computed: each row's encoder input, and its tokens."""

    def go_on(self, tokens_BT: Tensor, sources_B: Sequence[Hashable]) -> None:
        """Prepare the request for these tokens: those from `position` on have to be sent.

        `sources_B` names what the encoder was given for each row. Rows may be other ones than the
        last time, as beams are: each goes on from one with the same source and beginning.
        """
        known = len(self._rows[0][1]) if self._rows else 0
        beginnings = [
            (source, tuple(tokens[:known]))
            for source, tokens in zip(sources_B, tokens_BT.tolist(), strict=True)
        ]
        rows = [_find(self._rows, each, index) for index, each in enumerate(beginnings)]
        if not 0 < known < tokens_BT.shape[1] or None in rows or len(rows) > MAX_VALUES:
            self.restart()
            return
        self.position = known
        is_same = len(rows) == len(self._rows) and rows == list(range(len(rows)))
        moved = () if is_same else tuple(row for row in rows if row is not None)
        self.message = GraphSequence(key=self.message.key, rows=moved)

    def restart(self) -> None:
        """Have the next request begin the sequence again."""
        self._rows, self.position, self.message = (), 0, self._begin()

    def record(self, tokens_BT: Tensor, sources_B: Sequence[Hashable]) -> None:
        """Note that all of these tokens were computed."""
        rows = zip(sources_B, map(tuple, tokens_BT.tolist()), strict=True)
        self._rows = list(rows)

    @staticmethod
    def _begin() -> GraphSequence:
        # A new name: a request of the old one may still be computed.
        return GraphSequence(key=secrets.token_bytes(16))


def _find(
    rows: Sequence[tuple[Hashable, tuple[int, ...]]],
    wanted: tuple[Hashable, tuple[int, ...]],
    likely: int,
) -> int | None:
    if likely < len(rows) and rows[likely] == wanted:
        return likely
    return next((index for index, row in enumerate(rows) if row == wanted), None)
