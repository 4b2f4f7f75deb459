"""The steps that a session was given: checked, in order, applied once.

T packed tokens, D hidden.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nesa_node.compression import tensors
from nesa_node.core.errors import ProtocolError
from nesa_node.swarm.messages import Step


@dataclass(frozen=True, slots=True)
class Queued:
    message: Step
    hidden_TD: torch.Tensor
    digest: bytes


class Inbox:
    """Decides about each step without doing any I/O.

    `expected[row]` is the position that the row's next token must have: what the cache holds plus
    what is queued.
    """

    def __init__(
        self, *, session: bytes, rows: int, max_tokens: int, hidden_size: int, dtype: str
    ) -> None:
        self.epoch = 0
        self.expected = [0] * rows
        self.queue: deque[Queued] = deque()
        self._session = session
        self._max_tokens = max_tokens
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._last: tuple[int, bytes] = (-1, b"")

    @property
    def max_step_bytes(self) -> int:
        """The largest tensor that one step of this session can carry."""
        itemsize = tensors.DTYPES[self._dtype].itemsize
        return len(self.expected) * self._max_tokens * self._hidden_size * itemsize

    def accept(self, step: Step, payload: bytearray) -> bool:
        """Queue a step; False for one of an older epoch and for the repetition of the newest one.

        Raises `ProtocolError`; whatever was refused changed nothing.
        """
        if step.session != self._session:
            raise ProtocolError("unknown_session", "the step names another session")
        if step.epoch < self.epoch:
            return False
        if step.epoch > self.epoch:
            raise ProtocolError(
                "future_epoch", f"epoch {step.epoch} has not begun; it is {self.epoch}"
            )
        digest = _digest(step, payload)
        if self._is_repeated(step, digest):
            return False
        self._check_rows(step)
        total = sum(part.count for part in step.rows)
        if step.tensor.dtype != self._dtype or step.tensor.shape != (total, self._hidden_size):
            raise ProtocolError(
                "bad_tensor",
                f"expected {self._dtype}[{total}, {self._hidden_size}], "
                f"got {step.tensor.dtype}{list(step.tensor.shape)}",
            )
        hidden_TD = tensors.decode(step.tensor, payload, max_bytes=self.max_step_bytes)
        for part in step.rows:
            self.expected[part.row] += part.count
        self._last = (step.step, digest)
        self.queue.append(Queued(step, hidden_TD, digest))
        return True

    def begin_epoch(self, epoch: int, lengths: Sequence[int]) -> None:
        """Drop what is queued and expect each row to go on at `lengths[row]`.

        Raises `ProtocolError` for an epoch that is not newer and for lengths that were never
        reached; nothing has changed then.
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
        self.queue.clear()
        # A step that the new epoch undid may come again under its old number.
        self._last = (-1, b"")

    @property
    def last_step(self) -> int:
        return self._last[0]

    def take(self, max_tokens: int) -> list[Queued]:
        """Remove the longest run of queued steps of at most `max_tokens` tokens, at least one."""
        taken: list[Queued] = []
        tokens = 0
        while self.queue:
            tokens += len(self.queue[0].hidden_TD)
            if taken and tokens > max_tokens:
                break
            taken.append(self.queue.popleft())
        return taken

    def _is_repeated(self, step: Step, digest: bytes) -> bool:
        last_step, last_digest = self._last
        if step.step > last_step:
            return False
        if step.step < last_step:
            raise ProtocolError("stale_step", f"step {step.step} came after step {last_step}")
        if digest != last_digest:
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
                    f"row {part.row} goes on at {self.expected[part.row]}, not {part.position}",
                )
            if part.position + part.count > self._max_tokens:
                raise ProtocolError(
                    "cache_full",
                    f"row {part.row} would hold {part.position + part.count} tokens; "
                    f"{self._max_tokens} were promised",
                )


def _digest(step: Step, payload: bytearray) -> bytes:
    """Of everything that makes two steps the same: the tokens' places and their bytes."""
    digest = hashlib.blake2b(payload, digest_size=16)
    digest.update(repr([(p.row, p.position, p.count) for p in step.rows]).encode())
    digest.update(repr((step.tensor, step.want)).encode())
    return digest.digest()
