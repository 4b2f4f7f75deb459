"""State of a session by row, and the sequence check of its steps: validated, in order, once.

It has pages, queued steps, epoch, prefix keys and stored outputs. Pages are shared by sessions of
one peer, or of any trusted peer if this one is trusted. Other peers can neither find them nor leave
pages to be found.

T packed tokens, D hidden.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from nesa_node.compression import tensors
from nesa_node.compression.codecs import UNCOMPRESSED
from nesa_node.compression.tensors import HiddenStates
from nesa_node.core.errors import ProtocolError
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.engine.cache.pages import PAGE_TOKENS, CacheReservation
from nesa_node.engine.cache.prefix_index import PrefixKey
from nesa_node.server.scheduler.session_queue import SessionQueue
from nesa_node.server.session.admission import AdmissionLimits
from nesa_node.server.session.sealing import SessionSealer
from nesa_node.swarm.protocol.link_encoder import (
    OFF_LOOP_BYTES,
    check_codec_allowed,
    normalize_via,
)
from nesa_node.swarm.protocol.messages import MAX_PREFIX_DIGESTS, PREFIX_TOKENS, Open, Prefix, Step
from nesa_node.swarm.protocol.replay_buffer import ReplayBuffer, SentStep

log = get_logger(__name__)

assert PAGE_TOKENS == PREFIX_TOKENS, "a digest names what one page ends with"

TRUSTED_SCOPE = PeerId("")
"""Scope shared by all trusted peers; no peer id is empty."""


class SessionState:
    """Owner of what a session holds by row; it alone begins epochs, truncates and reorders.

    The client names its tokens by digests only. A false digest harms only peers in the same scope.
    """

    def __init__(
        self,
        opened: Open,
        client: PeerId,
        queue: SessionQueue,
        reservation: CacheReservation,
        limits: AdmissionLimits,
        sealer: SessionSealer,
    ) -> None:
        """Let the queue's empty tables begin with matching cached pages."""
        self.opened = opened
        self.queue = queue
        self.tables = queue.tables
        self.blocks = queue.blocks
        self.epoch = opened.epoch
        self.last_accepted: tuple[Step, bytes | bytearray] | None = None
        """Last step of this epoch, with its content."""
        self.replay_buffer = ReplayBuffer()
        self.sealer = sealer
        self.emit_from: Sequence[int] = [0] * opened.rows
        """By row, the first position whose output the receiver lacks."""
        self._epoch_lengths: Sequence[int] | None = None
        """Lengths with which the epoch begins; None once the tables have them."""
        self._reservation = reservation
        self._scope = TRUSTED_SCOPE if client in limits.trusted else client
        # A successor receives its pages from the donor.
        prefix = opened.prefix if opened.donor is None else ()
        pages = opened.max_tokens // PAGE_TOKENS
        self._prefix_keys = [keys[:pages] for keys in self._keys_of(prefix)]
        self._published_pages = [0] * opened.rows
        for table, keys in zip(self.tables, self._prefix_keys, strict=True):
            table.reuse_prefix(keys)
        if reused := sum(self.lengths):
            log.info("prefix_reused", tokens=reused)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Cached tokens by row."""
        return tuple(table.length for table in self.tables)

    @property
    def expected_positions(self) -> tuple[int, ...]:
        """By row, the position that its next token must have: cached tokens plus queued ones."""
        return tuple(map(self.expected_position, range(len(self.tables))))

    def expected_position(self, row: int) -> int:
        lengths = self._epoch_lengths
        length = self.tables[row].length if lengths is None else lengths[row]
        return self.queue.end_positions.get(row, length)

    def begin_epoch(
        self, epoch: int, lengths: Sequence[int], sources: Sequence[int] | None = None
    ) -> None:
        """Begin an epoch in which each row continues at `lengths[row]`, or as a copy of row
        `sources[row]`; queued steps are dropped.

        Call `truncate` or `reorder` next, once no iteration uses the tables. Raises
        `ProtocolError`, without any change, for an epoch that is not newer and for lengths that
        were never reached.
        """
        if epoch <= self.epoch:
            raise ProtocolError("stale_epoch", f"epoch {epoch} is not newer than {self.epoch}")
        expected = self.expected_positions
        if len(lengths) != len(expected):
            raise ProtocolError("bad_rows", f"{len(lengths)} lengths for {len(expected)} rows")
        if any(length > have for length, have in zip(lengths, expected, strict=True)):
            raise ProtocolError(
                "bad_position", f"asked to keep {list(lengths)} of {list(expected)} tokens"
            )
        self.epoch = epoch
        # A step that the new epoch rolled back may return under its old number.
        self.last_accepted = None
        self.queue.clear_and_pause()
        self._epoch_lengths = lengths if sources is None else [lengths[row] for row in sources]

    def require_held(self, lengths: Sequence[int]) -> None:
        """Raises `ProtocolError`, and drops queued steps, if the tables hold fewer tokens."""
        if any(length > have for have, length in zip(self.lengths, lengths, strict=True)):
            self.queue.clear_and_pause()
            self._epoch_lengths = None
            raise ProtocolError(
                "bad_position", f"asked to keep {list(lengths)} of {list(self.lengths)} tokens"
            )

    def truncate(self, lengths: Sequence[int], *, as_announced: bool = False) -> None:
        """Drop tokens from `lengths` on, with their stored outputs, which will be sent anew.

        Prefix keys stay only if the tokens that follow are `as_announced`.
        """
        for table, length in zip(self.tables, lengths, strict=True):
            table.truncate(min(table.length, length))
        self._epoch_lengths = None
        if not as_announced:
            self._prefix_keys = [
                keys[: length // PAGE_TOKENS]
                for keys, length in zip(self._prefix_keys, lengths, strict=True)
            ]
            self._published_pages = [
                min(done, len(keys))
                for done, keys in zip(self._published_pages, self._prefix_keys, strict=True)
            ]
        self.replay_buffer.truncate(lengths)
        self.sealer.truncate(lengths)
        self.emit_from = [min(pair) for pair in zip(self.emit_from, lengths, strict=True)]

    def reorder(self, sources: Sequence[int]) -> None:
        """Let each row continue as a copy of row `sources[row]`."""
        self._reservation.reorder(self.tables, sources)
        self._epoch_lengths = None
        self._prefix_keys = [self._prefix_keys[source] for source in sources]
        self._published_pages = [self._published_pages[source] for source in sources]
        self.replay_buffer.reorder(sources)
        self.sealer.reorder(sources)
        self.emit_from = [self.emit_from[source] for source in sources]

    def store_output(self, sent_step: SentStep) -> None:
        """Store an output that the donor of this session kept.

        Raises `ProtocolError` in a star, where nodes keep no outputs.
        """
        if self.opened.mode == "star":
            raise ProtocolError("unexpected", "a star's nodes keep no outputs")
        via = normalize_via(self.opened.quality, sent_step.via)
        self.replay_buffer.append(replace(sent_step, via=via))

    def publish_prefix(self) -> None:
        """Publish the full pages of the announced prefixes that the rows have computed."""
        for row, (table, keys) in enumerate(zip(self.tables, self._prefix_keys, strict=True)):
            full = min(len(keys), table.length // PAGE_TOKENS)
            if full > self._published_pages[row]:
                table.publish_prefix(keys)
                self._published_pages[row] = full

    def publish_prefix_as(self, prefix: Prefix) -> None:
        """Publish the rows' pages under the digests of `prefix`.

        Raises `ProtocolError`.
        """
        check_prefix(prefix, len(self.tables))
        for table, keys in zip(self.tables, self._keys_of(prefix), strict=True):
            table.publish_prefix(keys)

    def _keys_of(self, prefix: Prefix) -> list[list[PrefixKey]]:
        rows: list[list[PrefixKey]] = [
            [(self._scope, self.opened.blocks, digest) for digest in digests] for digests in prefix
        ]
        return rows + [[] for _ in range(len(self.tables) - len(rows))]


def check_prefix(prefix: Prefix, rows: int) -> None:
    """Raises `ProtocolError("bad_prefix")` for more digests than a session of `rows` may name."""
    if len(prefix) > rows:
        raise ProtocolError("bad_prefix", f"prefixes of {len(prefix)} rows, there are {rows}")
    digests = sum(map(len, prefix))
    if digests > MAX_PREFIX_DIGESTS:
        raise ProtocolError(
            "bad_prefix", f"{digests} digests; at most {MAX_PREFIX_DIGESTS} are read"
        )


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
