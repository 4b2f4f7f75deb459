"""Sequence check of a session's steps: validated, in order, applied once.

T packed tokens, D hidden.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from functools import partial

from nesa_node.compression import tensors
from nesa_node.compression.hidden_states import HiddenStates
from nesa_node.core.errors import ProtocolError
from nesa_node.swarm.messages import Step
from nesa_node.swarm.wire import ASIDE_BYTES, PLAIN, check_allowed

LARGE_BYTES = 1 << 20
"""Payload size from which decoding takes milliseconds and runs in a thread."""


async def content_of(payload: bytearray) -> bytes | bytearray:
    """Identity of a payload: itself, or a digest of a large one."""
    if len(payload) < LARGE_BYTES:
        return payload
    return await asyncio.to_thread(_digest_of, payload)


async def examine(step: Step, payload: bytearray) -> HiddenStates:
    """Decode and validate the whole payload, in a thread if that takes milliseconds. The result
    keeps its memory.

    Raises `ProtocolError` for a payload of another size than described, and for NaN or infinite
    values.
    """
    if step.tensor.codec == PLAIN:
        # The size of a plain payload is bounded already.
        most_bytes, is_quick = len(payload), len(payload) < LARGE_BYTES
    else:
        most_bytes = step.tensor.most_nbytes
        is_quick = most_bytes < ASIDE_BYTES
    read = partial(HiddenStates.received, step.tensor, payload, max_bytes=most_bytes)
    return read() if is_quick else await asyncio.to_thread(read)


def _digest_of(payload: bytearray) -> bytes:
    return hashlib.blake2b(payload, digest_size=16).digest()


class Inbox:
    """Decides about each step without any I/O.

    `expected[row]` is the position that the row's next token must have: cached tokens plus queued
    ones.
    """

    def __init__(
        self,
        *,
        session: bytes,
        rows: int,
        max_tokens: int,
        hidden_size: int,
        dtype: str,
        quality: str,
        outgrow: Callable[[int, int], None],
    ) -> None:
        """`outgrow(have, want)` reserves more tokens for a row beyond `max_tokens`.

        It raises `ProtocolError` where there is no room for `want` tokens.
        """
        self.epoch = 0
        self.expected = [0] * rows
        self._session = session
        self._room = [max_tokens] * rows
        self._max_tokens = max_tokens
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._quality = quality
        self._outgrow = outgrow
        self._last: tuple[Step, bytes | bytearray] | None = None

    @property
    def max_step_bytes(self) -> int:
        """The largest tensor that one step of this session can carry."""
        itemsize = tensors.DTYPES[self._dtype].itemsize
        return len(self.expected) * self._max_tokens * self._hidden_size * itemsize

    @property
    def last_step(self) -> int:
        return self._last[0].step if self._last is not None else -1

    def wants(self, step: Step, content: bytes | bytearray) -> bool:
        """Whether a step needs decoding: False for an older epoch and for a repetition of the last
        step.

        `content` is the payload, which must not change any more, or its digest. Raises
        `ProtocolError` for an invalid header: a few bytes may describe gigabytes, so a step is
        decoded only if the session has room for it. May reserve more for a row.
        """
        if step.session != self._session:
            raise ProtocolError("unknown_session", "the step names another session")
        if step.epoch < self.epoch:
            return False
        if step.epoch > self.epoch:
            raise ProtocolError(
                "future_epoch", f"epoch {step.epoch} has not begun; it is {self.epoch}"
            )
        check_allowed(self._quality, step.tensor)
        total = sum(part.count for part in step.rows)
        if step.tensor.dtype != self._dtype or step.tensor.shape != (total, self._hidden_size):
            raise ProtocolError(
                "bad_tensor",
                f"expected {self._dtype}[{total}, {self._hidden_size}], "
                f"got {step.tensor.dtype}{list(step.tensor.shape)}",
            )
        if self._is_repeated(step, content):
            return False
        self._check_rows(step)
        return True

    def accept(self, step: Step, content: bytes | bytearray) -> bool:
        """Accept a decoded step; checks `wants` again, since the epoch may have changed.

        A refused step changes nothing but reserved room.
        """
        if not self.wants(step, content):
            return False
        for part in step.rows:
            self.expected[part.row] += part.count
        self._last = (step, content)
        return True

    def reorder(self, sources: Sequence[int]) -> None:
        """Reserve room in each row for the tokens of row `sources[row]`. Raises `ProtocolError`."""
        for row, source in enumerate(sources):
            self._make_room(row, self.expected[source])

    def begin_epoch(self, epoch: int, lengths: Sequence[int]) -> None:
        """Begin an epoch in which each row continues at `lengths[row]`.

        Raises `ProtocolError`, without any change, for an epoch that is not newer and for lengths
        that were never reached.
        """
        if epoch <= self.epoch:
            raise ProtocolError("stale_epoch", f"epoch {epoch} is not newer than {self.epoch}")
        if len(lengths) != len(self.expected):
            raise ProtocolError("bad_rows", f"{len(lengths)} lengths for {len(self.expected)} rows")
        if any(length > have for length, have in zip(lengths, self.expected, strict=True)):
            raise ProtocolError(
                "bad_position", f"asked to keep {list(lengths)} of {self.expected} tokens"
            )
        self.epoch = epoch
        self.expected = list(lengths)
        # A step that the new epoch rolled back may return under its old number.
        self._last = None

    def _make_room(self, row: int, tokens: int) -> None:
        if tokens > self._room[row]:
            self._outgrow(self._room[row], tokens)
            self._room[row] = tokens

    def _is_repeated(self, step: Step, content: bytes | bytearray) -> bool:
        if self._last is None or step.step > self._last[0].step:
            return False
        if step.step < self._last[0].step:
            raise ProtocolError("stale_step", f"step {step.step} came after {self.last_step}")
        if (step, content) != self._last:
            raise ProtocolError("step_conflict", f"step {step.step} came again with other bytes")
        return True

    def _check_rows(self, step: Step) -> None:
        seen: set[int] = set()
        for part in step.rows:
            if part.row >= len(self.expected) or part.row in seen:
                raise ProtocolError("bad_rows", f"row {part.row} is repeated or does not exist")
            seen.add(part.row)
            if part.position != self.expected[part.row]:
                raise ProtocolError(
                    "bad_position",
                    f"row {part.row} continues at {self.expected[part.row]}, not {part.position}",
                )
        for part in step.rows:
            self._make_room(part.row, part.position + part.count)
