"""A decoder's tokens so far, and where the next request goes on from them.

B rows, T tokens.
"""

from __future__ import annotations

import hashlib
import operator
import secrets
from collections.abc import Sequence

import torch
from torch import Tensor

from nesa_node.core.errors import NesaError
from nesa_node.routing.chains import Hop
from nesa_node.swarm.protocol.graph_messages import MAX_VALUES, GraphSequence

_Tokens = tuple[int, ...]
MAX_LOST = 2
"""Losses in a row after which nodes are not asked to keep the sequence any more."""


class SequenceLostError(NesaError):
    """What nodes kept of a sequence cannot be used: it has to begin again."""


class DecoderSequence:
    """Requests of one decoder over what its encoder made, each with more tokens than the last.

    Nodes keep what they computed for earlier tokens. Where one has lost it, the sequence begins
    again, with all tokens; where that helps nothing, each request has all tokens.
    """

    def __init__(self) -> None:
        self.values: dict[int, Tensor] = {}
        """Those of the graph that do not depend on tokens, from the first request on."""
        self.position = 0
        """Tokens of each row that nodes know already."""
        self.message: GraphSequence | None = None
        """What nodes are told of the sequence. None: that they keep nothing."""
        self.hops: tuple[Hop, ...] = ()
        """The nodes that keep it."""
        self._inputs: Sequence[Tensor] = ()
        self._sources_B: Sequence[bytes] = ()
        """For each row a name of what the encoder was given."""
        self._rows: Sequence[_Tokens] = ()
        """Of the last request that was computed, each row's tokens."""
        self._num_lost = 0
        """In a row, without a request in between that went on."""

    def go_on(self, tokens_BT: Tensor, inputs: Sequence[Tensor]) -> None:
        """Prepare the request for these tokens: those from `position` on have to be sent.

        `inputs` [B, ...] are the encoder's. Rows may be other ones than the last time, as beams
        are: each goes on from one with the same beginning and inputs.
        """
        self._read_sources(inputs, len(tokens_BT))
        known = len(self._rows[0]) if self._rows else 0
        beginnings = [tuple(tokens[:known]) for tokens in tokens_BT.tolist()]
        rows = [self._find_row(index, each) for index, each in enumerate(beginnings)]
        if not 0 < known < tokens_BT.shape[1] or None in rows:
            self.restart()
            return
        assert self.message is not None
        self.position = known
        is_same = rows == list(range(len(rows)))
        moved = () if is_same else tuple(row for row in rows if row is not None)
        self.message = GraphSequence(key=self.message.key, rows=moved)

    def restart(self) -> None:
        """Have the next request begin the sequence again."""
        self._rows, self.position = (), 0
        is_kept = self._num_lost < MAX_LOST and len(self._sources_B) <= MAX_VALUES
        # A new name: a request of the old one may still be computed.
        self.message = GraphSequence(key=secrets.token_bytes(16)) if is_kept else None

    def record(self, tokens_BT: Tensor) -> None:
        """Note that all of these tokens were computed."""
        if self.position:
            self._num_lost = 0
        self._rows = () if self.message is None else [*map(tuple, tokens_BT.tolist())]

    def record_loss(self) -> None:
        """Note that nodes do not know the sequence any more, and begin it again."""
        self._num_lost += 1
        self.restart()

    def _read_sources(self, inputs: Sequence[Tensor], count: int) -> None:
        """Name the rows' inputs. What was made of other ones is of no use any more."""
        if len(inputs) == len(self._inputs) and all(map(operator.is_, inputs, self._inputs)):
            return
        sources_B = [_name(inputs, row) for row in range(count)]
        if sources_B != self._sources_B:
            self.values, self._rows = {}, ()
        self._inputs, self._sources_B = inputs, sources_B

    def _find_row(self, likely: int, beginning: _Tokens) -> int | None:
        """The row of the last request that row `likely` of this one can go on from."""
        same = [row for row, tokens in enumerate(self._rows) if tokens == beginning]
        same = [row for row in same if self._sources_B[row] == self._sources_B[likely]]
        return likely if likely in same else next(iter(same), None)


def _name(inputs: Sequence[Tensor], row: int) -> bytes:
    made = hashlib.sha256()
    for each in inputs:
        made.update(each[row].flatten().view(torch.uint8).numpy().tobytes())
    return made.digest()
