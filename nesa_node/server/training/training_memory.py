"""Memory that a node promises to training sessions, beside its weights and its cache."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nesa_node.core.errors import BusyError, ProtocolError
from nesa_node.core.ids import PeerId
from nesa_node.core.lru_table import LruTable
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.training.adapted_blocks import count_adapter_values
from nesa_node.engine.training.kept_micro_batches import Keep, KeptRoom
from nesa_node.engine.training.training_spec import TrainingSpec
from nesa_node.engine.training.training_state import Partition

RETRY_AFTER_S = 5.0
ACTIVATION_VALUES = 48
"""Numbers of all activations of a block for one token that autograd keeps, in hidden sizes."""
PARAMETER_BYTES = 4
MASK_BYTES = 6
"""Bytes of a mask between each two tokens of one row, in which texts do not see each other: of
numbers, and while it is made of truth values."""
OPENING_PRICE = 10.0
MAX_OPENING_DEBT_S = 60.0
"""Six seconds of opens at once, and then a tenth of the time."""
MAX_OPENING_PEERS = 4096
PEER_SHARE = 2
"""One peer may have the whole promise divided by this: identities are free, so that this only keeps
one client from excluding the next by accident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingNeed:
    """Bytes that one session takes at most, by what it keeps of micro-batches."""

    adapter_bytes: int
    """Parameters, gradients and optimizer state, and a copy of the state that is sent."""
    running_bytes: int
    """Activations of the block that runs, its attention mask, and messages on the way."""
    kept_tokens: int
    """Of micro-batches between forward and backward, at most."""
    token_bytes: dict[Keep, int]

    def total_bytes(self, keep: Keep) -> int:
        kept_bytes = self.kept_tokens * self.token_bytes[keep]
        return self.adapter_bytes + self.running_bytes + kept_bytes


def _compute_share(blocks: ModelBlocks, partition: Partition) -> float:
    """Part of a span's adapters that one of its nodes updates, at most.

    Tensors are not divided: a part may exceed the mean by one, which is taken to be a block's.
    Adapters of few blocks have larger ones, but `count_adapter_values` counts those of all blocks.
    """
    if not partition.stage or partition.count == 1:
        return 1.0
    return min(1.0, 1 / partition.count + 1 / blocks.num_blocks)


def compute_need(
    blocks: ModelBlocks,
    spec: TrainingSpec,
    *,
    max_tokens: int,
    max_kept_tokens: int,
    partition: Partition,
) -> TrainingNeed:
    """Compute what a session needs that keeps up to `max_kept_tokens` tokens of micro-batches.

    Each micro-batch has up to `max_tokens` tokens.
    """
    hidden_bytes = blocks.hidden_size * blocks.dtype.itemsize
    share = _compute_share(blocks, partition)
    one_block = 1 / blocks.num_blocks
    moments = 2 if spec.optimizer.name == "adamw" else int(spec.optimizer.momentum > 0)
    grads = max(share, one_block) if partition.hands_over else 1.0
    # Beside its own parameters a node has those of the block that runs, and what it is lent.
    held = min(1.0, share + 2 * one_block) if partition.divides_parameters else 1.0
    copies = held + grads + share * moments + (held + share * moments)
    inputs_bytes = blocks.num_blocks * hidden_bytes
    activations_bytes = blocks.num_blocks * ACTIVATION_VALUES * hidden_bytes
    return TrainingNeed(
        adapter_bytes=math.ceil(count_adapter_values(blocks, spec) * PARAMETER_BYTES * copies),
        running_bytes=max_tokens * (ACTIVATION_VALUES + 4) * hidden_bytes
        + max_tokens * inputs_bytes
        + max_tokens * max_tokens * MASK_BYTES
        + max_kept_tokens * blocks.hidden_size * 4,
        kept_tokens=max_kept_tokens,
        token_bytes={
            "input": hidden_bytes,
            "inputs": inputs_bytes,
            "activations": activations_bytes,
        },
    )


class TrainingMemory:
    """Accounts the promise: each session's part is reserved when it opens."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._reserved: Counter[PeerId] = Counter()

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self._reserved.total()

    @contextmanager
    def reserve(self, peer: PeerId, need: TrainingNeed) -> Iterator[KeptRoom]:
        """Reserve a session's memory; the value is its room for micro-batches: as much as fits.

        Raises `ProtocolError("not_trained")` where the operator lends no memory,
        `ProtocolError("too_large")` for more than a peer may ever have, and `BusyError`.
        """
        if not self.total_bytes:
            raise ProtocolError("not_trained", "this node lends no memory to training")
        most = self.total_bytes // PEER_SHARE
        least = need.total_bytes("input")
        if least > most:
            raise ProtocolError(
                "too_large",
                f"this session takes {least >> 20} MiB, and this node gives a peer "
                f"{most >> 20} MiB for training: use fewer tokens in a micro-batch, or smaller "
                "adapters",
            )
        room = min(most - self._reserved[peer], self.free_bytes)
        nbytes = min(room, need.total_bytes("activations"))
        if nbytes < least:
            raise BusyError(f"no room for {least >> 20} MiB of training", RETRY_AFTER_S)
        self._reserved[peer] += nbytes
        kept_bytes = nbytes - need.adapter_bytes - need.running_bytes
        try:
            yield KeptRoom(kept_bytes, need.kept_tokens, need.token_bytes)
        finally:
            self._reserved[peer] -= nbytes
            if not self._reserved[peer]:
                del self._reserved[peer]


class OpeningBudget:
    """What each peer may take of this node's time to open sessions.

    An open costs `OPENING_PRICE` times the seconds that it took. A peer whose debt is above
    `MAX_OPENING_DEBT_S` waits.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._paid_at: LruTable[PeerId, float] = LruTable(MAX_OPENING_PEERS)

    def check(self, peer: PeerId) -> None:
        """Raise `BusyError` if `peer` has to wait."""
        debt_s = self._paid_at.get(peer, 0.0) - self._clock()
        if debt_s > MAX_OPENING_DEBT_S:
            raise BusyError(
                "this peer has opened training sessions too often", debt_s - MAX_OPENING_DEBT_S
            )

    def charge(self, peer: PeerId, seconds: float) -> None:
        """Count an open that took `seconds`."""
        since = max(self._paid_at.get(peer, 0.0), self._clock())
        self._paid_at.put(peer, since + OPENING_PRICE * seconds)
