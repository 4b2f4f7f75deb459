"""The nodes of a private session: keys are sent to them, if any, and products come back.

Nodes keep keys of rotations alone: where one is lost, another gets them and the product again.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager
from typing import Any, TypeVar

from nesa_node.client.private.private_link import PrivateLink, SessionKeys, open_private_link
from nesa_node.client.routing.request import ConnectionOptions
from nesa_node.client.verification.attestor import Attestor
from nesa_node.client.verification.audit_history import AuditHistory
from nesa_node.core.errors import (
    AttestationError,
    BusyError,
    FrameError,
    MissingBlocksError,
    NesaError,
    PeerUnreachableError,
    ProtocolError,
    RemoteError,
    StreamClosedError,
)
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.core.logging import get_logger
from nesa_node.core.settings.choices import PrivateScheme
from nesa_node.core.wait_tracking import ActiveWait, track_wait
from nesa_node.privacy.ring import Ring
from nesa_node.privacy.secret_key import SecretKey
from nesa_node.routing.chains import Hop
from nesa_node.swarm.node import Swarm

log = get_logger(__name__)

T = TypeVar("T")

RETRY_S = 1.0
"""Between looks for a node that serves a block."""
MAX_FAILURES = 3
"""Of a node with one request, after which the session asks it no more."""
ASK_LOST_AGAIN_S = 5.0
"""Until a node that could not be reached is asked again."""


class PrivateNodes:
    """The nodes of one session: for each block one that multiplies with its weights."""

    def __init__(
        self,
        swarm: Swarm,
        model_id: ModelId,
        num_blocks: int,
        scheme: PrivateScheme,
        ring: Ring,
        options: ConnectionOptions,
        attestor: Attestor | None,
        history: AuditHistory,
    ) -> None:
        """Nodes that `history` bars are not asked; it learns which multiply wrongly."""
        self._loop = asyncio.get_running_loop()
        self._swarm = swarm
        self._model_id = model_id
        self._num_blocks = num_blocks
        self._scheme: PrivateScheme = scheme
        self._ring = ring
        self._keys = SessionKeys(ring)
        self._options = options
        self._attestor = attestor
        self._history = history
        self._links: dict[PeerId, tuple[PrivateLink, AsyncExitStack]] = {}
        self._refused: dict[PeerId, str] = {}
        """Why these nodes are not asked in this session, beside those that are barred."""
        self._lost: dict[PeerId, tuple[float, str]] = {}
        """When and why nodes could not be reached, which are asked again after a pause."""
        self._busy: dict[PeerId, BusyError] = {}
        """What nodes with the block that is looked for said, which may be asked again."""
        self._opening = asyncio.Lock()
        self._running: set[Future[Any]] = set()
        self._is_closed = False
        self._lost_nbytes = 0
        """Sent to nodes, and received from them, that were left."""
        self._step: _StepProgress | None = None

    @contextmanager
    def reporting(self, products: int) -> Iterator[None]:
        """Report the progress of a step with so many products, as a wait."""
        peers = [hop.peer_id for hop in self.hops]
        with track_wait("plain layers, and products of nodes", peers=peers) as wait:
            self._step = _StepProgress(wait, products, self._nbytes())
            try:
                yield
            finally:
                self._step = None

    def _nbytes(self) -> int:
        return self._lost_nbytes + sum(link.nbytes for link, _ in self._links.values())

    @property
    def hops(self) -> tuple[Hop, ...]:
        links = sorted((link for link, _ in self._links.values()), key=lambda each: each.span.start)
        return tuple(Hop(link.peer, link.span) for link in links)

    async def open(self, span: Span) -> None:
        """Find nodes for all blocks of `span`. Raises as `ask` does."""
        block = span.start
        while block < span.end:
            block = (await self._find_link(block)).span.end

    @property
    def secret(self) -> SecretKey:
        return self._keys.secret

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the session's loop, from another thread; closing cancels it."""
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._running.add(running)
        try:
            self._require_open()
            return running.result()
        finally:
            running.cancel()
            self._running.discard(running)

    async def ask(
        self, block: int, work: Callable[[PrivateLink], Awaitable[T]]
    ) -> tuple[PeerId, T]:
        """What `work` gets of a node with `block`, or of another one where that is lost, refuses,
        or answers something else than was asked. What is told of that to nodes does not depend on
        secret keys.

        Raises `MissingBlocksError` or `BusyError` where no node serves the block any more.
        """
        failures: Counter[PeerId] = Counter()
        while True:
            link = await self._find_link(block)
            try:
                result = await work(link)
                if self._step is not None:
                    self._step.advance(block, self._num_blocks, self._nbytes())
                return link.peer, result
            except (PeerUnreachableError, ProtocolError) as error:
                self._require_open()
                log.info("private_node_lost", peer=link.peer, reason=str(error))
                self._note_failure(link.peer, error, has_answered=link.has_answered)
                failures[link.peer] += 1
                if failures[link.peer] >= MAX_FAILURES:
                    self._refused[link.peer] = str(error)
                await self._drop(link.peer)

    async def reject(self, peer: PeerId, reason: str) -> None:
        """Leave a node whose answer was wrong: no later session asks it, and none of this one's
        gets anything under this session's key any more.
        """
        log.warning("private_product_wrong", peer=peer, reason=reason)
        await asyncio.to_thread(self._history.bar, peer, reason)
        async with self._opening:
            for each in list(self._links):
                await self._drop(each)
            self._keys = await asyncio.to_thread(SessionKeys, self._ring)

    def _note_failure(self, peer: PeerId, error: NesaError, *, has_answered: bool) -> None:
        is_leaving = isinstance(error, RemoteError) and error.code in ("draining", "idle_timeout")
        if is_leaving and has_answered:
            return  # the stream is opened again at once, but not again and again
        if is_leaving or isinstance(error, PeerUnreachableError | FrameError):
            self._lost[peer] = time.monotonic(), str(error)
        else:
            self._refused[peer] = str(error)

    async def _find_link(self, block: int) -> PrivateLink:
        async with self._opening:
            self._require_open()
            if (link := self._held_link(block)) is not None:
                return link
            with track_wait("nodes of private sessions to answer"):
                return await self._open_link(block)

    def _held_link(self, block: int) -> PrivateLink | None:
        links = (link for link, _ in self._links.values() if self._may_ask(link.peer))
        return next((each for each in links if each.span.start <= block < each.span.end), None)

    async def _open_link(self, block: int) -> PrivateLink:
        started = time.monotonic()
        while True:
            options = self._options
            wait_s = options.queue_timeout_s if self._busy else options.recovery_timeout_s
            if (link := await self._try_open(block, started + wait_s)) is not None:
                return link
            if time.monotonic() > started + wait_s:
                raise self._describe_failure(block)
            await asyncio.sleep(RETRY_S)
            self._require_open()

    def _describe_failure(self, block: int) -> NesaError:
        if self._busy:
            return next(iter(self._busy.values()))
        lost = {peer: reason for peer, (_, reason) in self._lost.items()}
        refused = self._history.barred | self._refused | lost
        said = [f"{peer}: {reason}" for peer, reason in refused.items()]
        needed = (
            f"no node serves private sessions with block {block} (`nesa-node run --private "
            f"{self._scheme}`)"
        )
        return MissingBlocksError([(block, block + 1)], "; ".join([needed, *said]))

    async def _try_open(self, block: int, deadline: float) -> PrivateLink | None:
        """Open a link to a node with `block`, the one with most blocks behind it first."""
        await self._swarm.directory.fetch(self._model_id, self._num_blocks)
        snapshot = self._swarm.directory.snapshot(self._model_id, self._num_blocks)
        nodes = [
            node
            for node in snapshot.nodes
            if self._scheme in node.private_schemes
            and node.span.start <= block < node.span.end
            and self._may_ask(node.peer_id)
        ]
        self._busy.clear()
        for node in sorted(nodes, key=lambda each: -each.span.end):
            if time.monotonic() > deadline:
                return None
            stack = AsyncExitStack()
            try:
                if self._attestor is not None:
                    await self._attestor.require(node.peer_id, node.span, node.addresses)
                link = await stack.enter_async_context(
                    open_private_link(
                        self._swarm,
                        self._model_id,
                        node.peer_id,
                        node.addresses,
                        self._scheme,
                        self._keys,
                        block,
                    )
                )
            except BusyError as error:
                self._busy[node.peer_id] = error
            except (PeerUnreachableError, ProtocolError, AttestationError) as error:
                self._note_failure(node.peer_id, error, has_answered=False)
            else:
                self._links[node.peer_id] = link, stack
                if self._is_closed:
                    await self._drop(node.peer_id)
                    self._require_open()
                return link
        return None

    def _may_ask(self, peer: PeerId) -> bool:
        lost_at, _ = self._lost.get(peer, (-math.inf, ""))
        if peer in self._refused or peer in self._history.barred:
            return False
        return time.monotonic() > lost_at + ASK_LOST_AGAIN_S

    def _require_open(self) -> None:
        if self._is_closed:
            raise StreamClosedError("the session is closed")

    async def _drop(self, peer: PeerId) -> None:
        if (held := self._links.pop(peer, None)) is not None:
            self._lost_nbytes += held[0].nbytes
            await held[1].aclose()

    async def close(self) -> None:
        self._is_closed = True
        for running in list(self._running):
            running.cancel()
        for peer in list(self._links):
            await self._drop(peer)


class _StepProgress:
    """Which block a step is at, what it sent and received, and how long the rest may take."""

    def __init__(self, wait: ActiveWait, products: int, nbytes: int) -> None:
        self._wait = wait
        self._products = products
        self._nbytes = nbytes
        self._started = time.monotonic()
        self._made = 0

    def advance(self, block: int, num_blocks: int, nbytes: int) -> None:
        self._made += 1
        taken_s = time.monotonic() - self._started
        left_s = taken_s * max(self._products / self._made - 1, 0.0)
        mib = (nbytes - self._nbytes) / 2**20
        self._wait.progress = (
            f"block {block + 1} of {num_blocks}, {mib:.1f} MiB, about {left_s:.0f} s left"
        )


class BlockNodes:
    """A session's nodes with one block, asked from the thread that computes."""

    def __init__(self, nodes: PrivateNodes, block: int) -> None:
        self._nodes = nodes
        self._block = block

    @property
    def secret(self) -> SecretKey:
        """The key of what is asked from now on."""
        return self._nodes.secret

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """See `PrivateNodes.run`."""
        return self._nodes.run(work)

    def ask(self, work: Callable[[PrivateLink], Awaitable[T]]) -> tuple[PeerId, T]:
        """See `PrivateNodes.ask`."""
        return self._nodes.run(self._nodes.ask(self._block, work))

    def reject(self, peer: PeerId, reason: str) -> None:
        """See `PrivateNodes.reject`."""
        self._nodes.run(self._nodes.reject(peer, reason))
