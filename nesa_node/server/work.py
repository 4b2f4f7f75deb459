"""Queue of one session in the scheduler: its page tables, waiting steps and outputs.

T packed tokens, D hidden.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from nesa_node.compression.hidden_states import HiddenStates
from nesa_node.core.errors import CacheFullError, ProtocolError
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.engine.blocks import Blocks
from nesa_node.engine.pages import PageTable
from nesa_node.server.batch import Pending, Share, take
from nesa_node.server.lane import Lane, is_decode
from nesa_node.swarm.messages import Step

log = get_logger(__name__)


class Work(Lane):
    """Queue of one session. Everything here runs on the event loop.

    The tables belong to the running iteration, if this session is in it; other code may change them
    only after `halt` and `idle`. Whatever else an iteration has to know of a session belongs here,
    such as the LoRA adapter by which `run_shares` would group the runs of one forward.
    """

    def __init__(
        self,
        tables: Sequence[PageTable],
        blocks: Blocks,
        *,
        client: PeerId,
        priority: int,
        dtype: torch.dtype,
        session: str = "",
        wake: Callable[[], None],
        run_here: Callable[[], bool],
    ) -> None:
        """`dtype` is the outputs' dtype.

        `wake` is called when there is something to run, unless `run_here` has already run it.
        """
        super().__init__(client=client, priority=priority, span=blocks.span)
        self.tables = tables
        self.blocks = blocks
        self.dtype = dtype
        self._session = session
        self._wake = wake
        self._run_here = run_here
        self._queue: deque[Pending] = deque()
        self._results: deque[tuple[Step, HiddenStates] | ProtocolError] = deque()
        self._come = asyncio.Event()
        """Set while there are results. After waiting for it, check again: another task may have
        taken them."""
        self._share: Share | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def backlog(self) -> int:
        """Steps that are not done, plus outputs that were not taken."""
        return len(self._queue) + len(self._results)

    def submit(self, step: Step, hidden: HiddenStates) -> None:
        """Queue a step [T, D]; its rows continue where the steps before it end.

        If the step runs inline, its output is ready on return but no waiter is woken: call
        `announce` or `take_output`.
        """
        self._queue.append(Pending(hidden, self.dtype, step=step, arrived=time.monotonic()))
        self._count()
        if not self._run_here():
            self._wake()

    @property
    def output_bytes(self) -> int | None:
        """Size of the next output in bytes; None without one."""
        result = self._results[0] if self._results else None
        return None if result is None or isinstance(result, ProtocolError) else result[1].nbytes

    def announce(self) -> None:
        """Wake the tasks that wait for outputs, if there are any outputs."""
        if self._results:
            self._come.set()

    async def wait_for_output(self) -> None:
        """Return when an output is ready and announced. Another task may take it first.

        Raises `ProtocolError` if the step could not be run; later steps were dropped.
        """
        while not self._results:
            await self._come.wait()
        if isinstance(self._results[0], ProtocolError):
            raise self._results[0]

    def take_output(self) -> tuple[Step, HiddenStates] | None:
        """Return the next finished step and its output [T, D]; None without one."""
        if self.output_bytes is None:
            return None
        result = self._results.popleft()
        assert not isinstance(result, ProtocolError)
        if not self._results:
            self._come.clear()
        return result

    def halt(self) -> None:
        """Drop all queued steps and outputs. Steps submitted later wait for `resume`."""
        self._share = None
        self._queue.clear()
        self._count()
        self._results.clear()
        self._come.clear()
        self.held = True

    async def idle(self) -> None:
        """Wait until no iteration uses the tables, even when cancelled. Call `halt` first."""
        cancelled: asyncio.CancelledError | None = None
        while not self._idle.is_set():
            try:
                await self._idle.wait()
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    def resume(self) -> None:
        self.held = False
        self._wake()

    def enter(self, tokens: int) -> Share:
        """Take `tokens` from the queue for an iteration."""
        share = self._share = take(self._queue, self.tables, tokens)
        self._idle.clear()
        return share

    def leave(self) -> None:
        """Mark the iteration as over, with or without success."""
        self._idle.set()

    def deliver(self, share: Share) -> None:
        """Store what an iteration completed, unless `halt` dropped it meanwhile. Does not wake
        waiters.
        """
        if self._share is not share:
            return
        if share.error is not None:
            self.fail(share.error)
            return
        for pending in share.done:
            self._queue.popleft()
            assert pending.output is not None
            self._results.append((pending.step, pending.output))
        self._count()

    def fail(self, error: Exception) -> None:
        """Drop all queued steps and let `wait_for_output` raise."""
        code = "cache_full" if isinstance(error, CacheFullError) else "not_computed"
        # Logged from the scheduler's task, which has no session bound. A full cache is not a bug.
        mistake = error if code == "not_computed" else None
        log.error(
            "step_failed", session=self._session, client=self.client, code=code, exc_info=mistake
        )
        text = str(error) if code == "cache_full" else f"this node failed: {type(error).__name__}"
        self._queue.clear()
        self._count()
        self.end(ProtocolError(code, text))

    def end(self, error: ProtocolError) -> None:
        """Let `wait_for_output` raise `error` after the outputs that are ready."""
        self._results.append(error)
        self.announce()

    def _count(self) -> None:
        self.tokens = sum(pending.left for pending in self._queue)
        if not self._queue:
            return
        head = self._queue[0]
        whole = len(self._queue) == 1 and not head.taken
        self.decoding = whole and is_decode([part.count for part in head.step.rows])
        self.since = head.arrived
