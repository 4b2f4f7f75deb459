"""The steps that a session was given: checked, in order, applied once.

T packed tokens, D hidden.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nesa_node.compression import tensors
from nesa_node.compression.hidden_states import HiddenStates
from nesa_node.compression.tensors import TensorMeta
from nesa_node.core.errors import ProtocolError
from nesa_node.swarm.messages import Step
from nesa_node.swarm.wire import ASIDE_BYTES, PLAIN, check_allowed

LARGE_BYTES = 1 << 20
"""A payload from which on `examine` takes milliseconds: not for the event loop."""


def is_quick(meta: TensorMeta, payload: bytearray) -> bool:
    """Whether `examine` may run on the event loop."""
    if meta.codec == PLAIN:
        return len(payload) < LARGE_BYTES
    return meta.most_nbytes < ASIDE_BYTES


@dataclass(frozen=True, slots=True)
class Examined:
    """What is to be known of a step's bytes."""

    content: bytes | bytearray
    """The same for the same bytes: themselves, or a digest of many. Not to be changed."""
    hidden: HiddenStates


def examine(step: Step, payload: bytearray) -> Examined:
    """Read all of the payload; may run in any thread. The result keeps its memory.

    Raises `ProtocolError` for a payload of another size than described, and for NaN or infinite
    values.
    """
    # What came of a plain tensor is bounded already.
    plain = step.tensor.codec == PLAIN
    most_bytes = len(payload) if plain else step.tensor.most_nbytes
    hidden = HiddenStates.received(step.tensor, payload, max_bytes=most_bytes)
    if len(payload) < LARGE_BYTES:
        return Examined(payload, hidden)
    return Examined(hashlib.blake2b(payload, digest_size=16).digest(), hidden)


class Inbox:
    """Decides about each step without doing any I/O.

    `expected[row]` is the position that the row's next token must have: what the cache holds plus
    what is queued.
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
        """`outgrow(have, want)` is asked when a row outgrows `max_tokens`, and what it got then.

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

    def wants(self, step: Step) -> bool:
        """Whether a step is worth examining: False for one of an older epoch.

        Raises `ProtocolError` for what its header alone makes wrong.
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
        return True

    def accept(self, step: Step, examined: Examined) -> bool:
        """Take a step; False for one of an older epoch and for the repetition of the newest one.

        Raises `ProtocolError`; whatever was refused changed nothing. `wants` must have said yes, an
        epoch may have begun since.
        """
        if step.epoch < self.epoch or self._is_repeated(step, examined.content):
            return False
        self._check_rows(step)
        for part in step.rows:
            self._make_room(part.row, part.position + part.count)
        for part in step.rows:
            self.expected[part.row] += part.count
        self._last = (step, examined.content)
        return True

    def reorder(self, sources: Sequence[int]) -> None:
        """Have room in each row for what row `sources[row]` holds. Raises `ProtocolError`."""
        for row, source in enumerate(sources):
            self._make_room(row, self.expected[source])

    def begin_epoch(self, epoch: int, lengths: Sequence[int]) -> None:
        """Expect each row to go on at `lengths[row]`.

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
        # A step that the new epoch undid may come again under its old number.
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
                    f"row {part.row} goes on at {self.expected[part.row]}, not {part.position}",
                )
