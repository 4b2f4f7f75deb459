"""A session's place in the schedule: its tables, the steps that wait, the outputs.

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
    """Everything here runs on the event loop.

    The tables belong to the iteration that runs, if this session is in it, and to others only after
    `halt` and `idle`. Whatever else an iteration has to know of a session belongs here: which
    adapter (LoRA) it uses, say, by which `run_shares` would then group the runs of one forward.
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
        """`dtype` is that of the outputs.

        `wake` is called when there is something to run, unless `run_here` has run it.
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
        """Set while there are results. Whoever waits may still find that another task took them."""
        self._share: Share | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def backlog(self) -> int:
        """Steps that are not done, and outputs that nobody has taken."""
        return len(self._queue) + len(self._results)

    def submit(self, step: Step, hidden: HiddenStates) -> None:
        """Run a step [T, D] after those before it; its rows go on where the tables then end.

        Where it was run at once its output is there afterwards, and nobody is told: `announce` it,
        or take it.
        """
        self._queue.append(Pending(hidden, self.dtype, step=step, arrived=time.monotonic()))
        self._count()
        if not self._run_here():
            self._wake()

    @property
    def output_bytes(self) -> int | None:
        """The size of the next output; None where there is none."""
        result = self._results[0] if self._results else None
        return None if result is None or isinstance(result, ProtocolError) else result[1].nbytes

    def announce(self) -> None:
        """Wake whoever waits for outputs, if there are any."""
        if self._results:
            self._come.set()

    async def wait_for_output(self) -> None:
        """Return when a step is done, once it is announced. Another task may take it first.

        Raises `ProtocolError` if it could not be run; what came after it is forgotten.
        """
        while not self._results:
            await self._come.wait()
        if isinstance(self._results[0], ProtocolError):
            raise self._results[0]

    def take_output(self) -> tuple[Step, HiddenStates] | None:
        """The next step that is done: it and its output [T, D]; None without one."""
        if self.output_bytes is None:
            return None
        result = self._results.popleft()
        assert not isinstance(result, ProtocolError)
        if not self._results:
            self._come.clear()
        return result

    def halt(self) -> None:
        """Forget what was submitted and computed. What is submitted from now on waits."""
        self._share = None
        self._queue.clear()
        self._count()
        self._results.clear()
        self._come.clear()
        self.held = True

    async def idle(self) -> None:
        """Return, also if cancelled, when no iteration uses the tables. Halt before."""
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
        """Take part in an iteration, with `tokens`."""
        share = self._share = take(self._queue, self.tables, tokens)
        self._idle.clear()
        return share

    def leave(self) -> None:
        """The iteration is over, however it ended."""
        self._idle.set()

    def deliver(self, share: Share) -> None:
        """Hand on what an iteration completed, unless it was forgotten meanwhile: `announce` it."""
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
        """Forget what waits and let `result` raise."""
        code = "cache_full" if isinstance(error, CacheFullError) else "not_computed"
        # In the scheduler's task, which is no session's. A full cache is no mistake of ours.
        mistake = error if code == "not_computed" else None
        log.error(
            "step_failed", session=self._session, client=self.client, code=code, exc_info=mistake
        )
        text = str(error) if code == "cache_full" else f"this node failed: {type(error).__name__}"
        self._queue.clear()
        self._count()
        self.end(ProtocolError(code, text))

    def end(self, error: ProtocolError) -> None:
        """Let whoever waits for outputs raise `error` after those that are there."""
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
