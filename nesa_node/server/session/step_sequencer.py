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
from nesa_node.swarm.protocol.link_encoder import OFF_LOOP_BYTES, UNCOMPRESSED, check_codec_allowed
from nesa_node.swarm.protocol.messages import Step

MIN_THREADED_BYTES = 1 << 20
"""Payload size from which decoding takes milliseconds and runs in a thread."""


async def content_key(payload: bytearray) -> bytes | bytearray:
    """Identity of a payload: itself, or a digest of a large one."""
    if len(payload) < MIN_THREADED_BYTES:
        return payload
    return await asyncio.to_thread(_digest, payload)


async def decode_step(step: Step, payload: bytearray) -> HiddenStates:
    """Decode and validate the whole payload, in a thread if that takes milliseconds. The result
    keeps its memory.

    Raises `ProtocolError` for a payload of another size than described, and for NaN or infinite
    values.
    """
    if step.tensor.codec == UNCOMPRESSED:
        # The size of a plain payload is bounded already.
        most_bytes, is_quick = len(payload), len(payload) < MIN_THREADED_BYTES
    else:
        most_bytes = step.tensor.max_nbytes
        is_quick = most_bytes < OFF_LOOP_BYTES
    read = partial(HiddenStates.from_payload, step.tensor, payload, max_bytes=most_bytes)
    return read() if is_quick else await asyncio.to_thread(read)


def _digest(payload: bytearray) -> bytes:
    return hashlib.blake2b(payload, digest_size=16).digest()


class StepSequencer:
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
        grow_row: Callable[[int, int], None],
    ) -> None:
        """`grow_row(have, want)` reserves more tokens for a row beyond `max_tokens`.

        It raises `ProtocolError` where there is no room for `want` tokens.
        """
        self.epoch = 0
        self.expected_positions = [0] * rows
        self._session = session
        self._row_capacity = [max_tokens] * rows
        self._max_tokens = max_tokens
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._quality = quality
        self._grow_row = grow_row
        self._last_accepted: tuple[Step, bytes | bytearray] | None = None

    @property
    def max_step_bytes(self) -> int:
        """The largest tensor that one step of this session can carry."""
        itemsize = tensors.DTYPES[self._dtype].itemsize
        return len(self.expected_positions) * self._max_tokens * self._hidden_size * itemsize

    @property
    def last_step(self) -> int:
        return self._last_accepted[0].step if self._last_accepted is not None else -1

    def needs_decoding(self, step: Step, content: bytes | bytearray) -> bool:
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
        check_codec_allowed(self._quality, step.tensor)
        total = sum(part.count for part in step.rows)
        if step.tensor.dtype != self._dtype or step.tensor.shape != (total, self._hidden_size):
            raise ProtocolError(
                "bad_tensor",
                f"expected {self._dtype}[{total}, {self._hidden_size}], "
                f"got {step.tensor.dtype}{list(step.tensor.shape)}",
            )
        if self._is_duplicate(step, content):
            return False
        self._check_rows(step)
        return True

    def accept(self, step: Step, content: bytes | bytearray) -> bool:
        """Accept a decoded step; checks `needs_decoding` again, since the epoch may have changed.

        A refused step changes nothing but reserved room.
        """
        if not self.needs_decoding(step, content):
            return False
        for part in step.rows:
            self.expected_positions[part.row] += part.count
        self._last_accepted = (step, content)
        return True

    def reserve_reordered(self, sources: Sequence[int]) -> None:
        """Reserve room in each row for the tokens of row `sources[row]`. Raises `ProtocolError`."""
        for row, source in enumerate(sources):
            self._reserve_row(row, self.expected_positions[source])

    def begin_epoch(self, epoch: int, lengths: Sequence[int]) -> None:
        """Begin an epoch in which each row continues at `lengths[row]`.

        Raises `ProtocolError`, without any change, for an epoch that is not newer and for lengths
        that were never reached.
        """
        if epoch <= self.epoch:
            raise ProtocolError("stale_epoch", f"epoch {epoch} is not newer than {self.epoch}")
        if len(lengths) != len(self.expected_positions):
            raise ProtocolError(
                "bad_rows", f"{len(lengths)} lengths for {len(self.expected_positions)} rows"
            )
        if any(
            length > have for length, have in zip(lengths, self.expected_positions, strict=True)
        ):
            raise ProtocolError(
                "bad_position", f"asked to keep {list(lengths)} of {self.expected_positions} tokens"
            )
        self.epoch = epoch
        self.expected_positions = list(lengths)
        # A step that the new epoch rolled back may return under its old number.
        self._last_accepted = None

    def _reserve_row(self, row: int, tokens: int) -> None:
        if tokens > self._row_capacity[row]:
            self._grow_row(self._row_capacity[row], tokens)
            self._row_capacity[row] = tokens

    def _is_duplicate(self, step: Step, content: bytes | bytearray) -> bool:
        if self._last_accepted is None or step.step > self._last_accepted[0].step:
            return False
        if step.step < self._last_accepted[0].step:
            raise ProtocolError("stale_step", f"step {step.step} came after {self.last_step}")
        if (step, content) != self._last_accepted:
            raise ProtocolError("step_conflict", f"step {step.step} came again with other bytes")
        return True

    def _check_rows(self, step: Step) -> None:
        seen: set[int] = set()
        for part in step.rows:
            if part.row >= len(self.expected_positions) or part.row in seen:
                raise ProtocolError("bad_rows", f"row {part.row} is repeated or does not exist")
            seen.add(part.row)
            if part.position != self.expected_positions[part.row]:
                raise ProtocolError(
                    "bad_position",
                    f"row {part.row} continues at {self.expected_positions[part.row]}, "
                    f"not {part.position}",
                )
        for part in step.rows:
            self._reserve_row(part.row, part.position + part.count)
