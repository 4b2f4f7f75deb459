"""Sequence check of a session's steps: validated, in order, applied once.

T packed tokens, D hidden.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from functools import partial

from nesa_node.compression import tensors
from nesa_node.compression.tensors import HiddenStates
from nesa_node.core.errors import ProtocolError
from nesa_node.server.session.session_state import SessionState
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
    """Decides about each step of a session without any I/O."""

    def __init__(self, state: SessionState, grow_row: Callable[[int, int], None]) -> None:
        """`grow_row(have, want)` reserves more tokens for a row beyond those that it opened with.

        It raises `ProtocolError` where there is no room for `want` tokens.
        """
        opened = state.opened
        self._state = state
        self._session = opened.session
        self._row_capacity = [opened.max_tokens] * opened.rows
        self._hidden_size = state.blocks.hidden_size
        self._dtype = opened.dtype
        self._quality = opened.quality
        self._grow_row = grow_row
        itemsize = tensors.DTYPES[opened.dtype].itemsize
        self.max_step_bytes = opened.rows * opened.max_tokens * self._hidden_size * itemsize
        """The largest tensor that one step of this session can carry."""

    @property
    def last_step(self) -> int:
        last = self._state.last_accepted
        return -1 if last is None else last[0].step

    def needs_decoding(self, step: Step, content: bytes | bytearray) -> bool:
        """Whether a step needs decoding: False for an older epoch, for a repetition of the last
        step, and once a step failed.

        `content` is the payload, which must not change any more, or its digest. Raises
        `ProtocolError` for an invalid header: a few bytes may describe gigabytes, so a step is
        decoded only if the session has room for it. May reserve more for a row.
        """
        if step.session != self._session:
            raise ProtocolError("unknown_session", "the step names another session")
        epoch = self._state.epoch
        if step.epoch < epoch:
            return False
        if step.epoch > epoch:
            raise ProtocolError("future_epoch", f"epoch {step.epoch} has not begun; it is {epoch}")
        if self._state.queue.has_failed:
            return False
        check_codec_allowed(self._quality, step.tensor)
        total = sum(row_slice.count for row_slice in step.rows)
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

        The caller queues it at once. A refused step changes nothing but reserved room.
        """
        if not self.needs_decoding(step, content):
            return False
        self._state.last_accepted = (step, content)
        return True

    def reserve_reordered(self, sources: Sequence[int]) -> None:
        """Reserve room in each row for the tokens of row `sources[row]`. Raises `ProtocolError`."""
        for row, source in enumerate(sources):
            self._reserve_row(row, self._state.expected_position(source))

    def _reserve_row(self, row: int, tokens: int) -> None:
        if tokens > self._row_capacity[row]:
            self._grow_row(self._row_capacity[row], tokens)
            self._row_capacity[row] = tokens

    def _is_duplicate(self, step: Step, content: bytes | bytearray) -> bool:
        last = self._state.last_accepted
        if last is None or step.step > last[0].step:
            return False
        if step.step < last[0].step:
            raise ProtocolError("stale_step", f"step {step.step} came after {last[0].step}")
        if (step, content) != last:
            raise ProtocolError("step_conflict", f"step {step.step} came again with other bytes")
        return True

    def _check_rows(self, step: Step) -> None:
        seen: set[int] = set()
        for row_slice in step.rows:
            if row_slice.row >= len(self._row_capacity) or row_slice.row in seen:
                raise ProtocolError(
                    "bad_rows", f"row {row_slice.row} is repeated or does not exist"
                )
            seen.add(row_slice.row)
            expected = self._state.expected_position(row_slice.row)
            if row_slice.position != expected:
                raise ProtocolError(
                    "bad_position",
                    f"row {row_slice.row} continues at {expected}, not {row_slice.position}",
                )
        for row_slice in step.rows:
            self._reserve_row(row_slice.row, row_slice.position + row_slice.count)
