"""Sessions through nodes that multiply encrypted vectors; all else is computed in this process.

A session is one of local blocks whose linear layers are asked for. Nodes keep keys of rotations
alone: where one is lost, another gets them and the product again.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import NoReturn

import torch
from torch import nn

from nesa_node.client.model.layers import LocalSession
from nesa_node.client.private.encrypted_linear import EncryptedLinear, EncryptedProduct
from nesa_node.client.private.private_link import (
    Answer,
    PrivateLink,
    SessionKeys,
    open_private_link,
)
from nesa_node.client.routing.request import ConnectionOptions
from nesa_node.client.session.base import BlockSession, SessionPrefix, SwarmConnection
from nesa_node.client.session.connection import join_as_client
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
    UnsupportedFeatureError,
)
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.core.logging import get_logger
from nesa_node.core.metrics import MetricSample
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.model.loading import load_blocks_without_linear_layers
from nesa_node.engine.weights.checkpoint import Checkpoint, compute_model_id
from nesa_node.engine.weights.skeleton import Skeleton
from nesa_node.privacy.ciphertext import FreshCiphertext
from nesa_node.privacy.layout import ProductLayout
from nesa_node.privacy.native_ring import make_ring
from nesa_node.privacy.parameters import RingParameters
from nesa_node.privacy.products import list_products
from nesa_node.routing.chains import Hop
from nesa_node.swarm.node import Swarm, swarm_samples
from nesa_node.verification.attestation.policy import AttestationPolicy, read_policy

log = get_logger(__name__)

RETRY_S = 1.0
"""Between looks for a node that serves a block."""
ASK_LOST_AGAIN_S = 5.0
"""Until a node that could not be reached is asked again."""


class PrivateNodes:
    """The nodes of one session: for each block one that multiplies with its weights."""

    def __init__(
        self,
        swarm: Swarm,
        model_id: ModelId,
        num_blocks: int,
        keys: SessionKeys,
        options: ConnectionOptions,
        attestor: Attestor | None,
        barred: Mapping[PeerId, str],
    ) -> None:
        """`barred` are nodes that are not asked, and why."""
        self._swarm = swarm
        self._model_id = model_id
        self._num_blocks = num_blocks
        self._keys = keys
        self._options = options
        self._attestor = attestor
        self._links: dict[PeerId, tuple[PrivateLink, AsyncExitStack]] = {}
        self._refused: dict[PeerId, str] = dict(barred)
        """Why these nodes are not asked in this session."""
        self._lost: dict[PeerId, tuple[float, str]] = {}
        """When and why nodes could not be reached, which are asked again after a pause."""
        self._busy: dict[PeerId, BusyError] = {}
        """What nodes with the block that is looked for said, which may be asked again."""
        self._opening = asyncio.Lock()
        self._asking: set[Future[Sequence[Answer]]] = set()
        self._is_closed = False

    @property
    def hops(self) -> tuple[Hop, ...]:
        links = sorted((link for link, _ in self._links.values()), key=lambda each: each.span.start)
        return tuple(Hop(link.peer, link.span) for link in links)

    async def open(self, span: Span) -> None:
        """Find nodes for all blocks of `span`. Raises as `multiply` does."""
        block = span.start
        while block < span.end:
            block = (await self._find_link(block)).span.end

    def ask(
        self,
        loop: asyncio.AbstractEventLoop,
        block: int,
        path: str,
        layout: ProductLayout,
        tokens: Sequence[Sequence[FreshCiphertext]],
    ) -> Sequence[Answer]:
        """`multiply` in `loop`, from another thread; closing cancels it."""
        self._require_open()
        asking = asyncio.run_coroutine_threadsafe(self.multiply(block, path, layout, tokens), loop)
        self._asking.add(asking)
        try:
            return asking.result()
        finally:
            self._asking.discard(asking)

    async def multiply(
        self,
        block: int,
        path: str,
        layout: ProductLayout,
        tokens: Sequence[Sequence[FreshCiphertext]],
    ) -> Sequence[Answer]:
        """Have a node multiply, and another one where that is lost or refuses.

        Raises `MissingBlocksError` or `BusyError` where no node serves the block any more, and
        `ProtocolError` for a node that answers something else than a product.
        """
        while True:
            link = await self._find_link(block)
            try:
                return await link.multiply(path, layout, tokens)
            except (PeerUnreachableError, FrameError, RemoteError) as error:
                self._require_open()
                log.info("private_node_lost", peer=link.peer, reason=str(error))
                self._note_failure(link.peer, error)
                await self._drop(link.peer)

    def _note_failure(self, peer: PeerId, error: NesaError) -> None:
        if isinstance(error, RemoteError) and error.code in ("draining", "idle_timeout"):
            return
        if isinstance(error, PeerUnreachableError | FrameError):
            self._lost[peer] = time.monotonic(), str(error)
        else:
            self._refused[peer] = str(error)

    async def _find_link(self, block: int) -> PrivateLink:
        started = time.monotonic()
        async with self._opening:
            while True:
                self._require_open()
                for link, _ in self._links.values():
                    if link.span.start <= block < link.span.end:
                        return link
                options = self._options
                wait_s = options.queue_timeout_s if self._busy else options.recovery_timeout_s
                if await self._try_open(block, started + wait_s):
                    continue
                if time.monotonic() > started + wait_s:
                    raise self._describe_failure(block)
                await asyncio.sleep(RETRY_S)

    def _describe_failure(self, block: int) -> NesaError:
        if self._busy:
            return next(iter(self._busy.values()))
        lost = {peer: reason for peer, (_, reason) in self._lost.items()}
        said = [f"{peer}: {reason}" for peer, reason in (self._refused | lost).items()]
        needed = "no node with it serves private sessions (`nesa-node run --private ckks`)"
        return MissingBlocksError([(block, block + 1)], "; ".join([needed, *said]))

    async def _try_open(self, block: int, deadline: float) -> bool:
        """Open a link to a node with `block`, the one with most blocks behind it first."""
        await self._swarm.directory.fetch(self._model_id, self._num_blocks)
        snapshot = self._swarm.directory.snapshot(self._model_id, self._num_blocks)
        nodes = [
            node
            for node in snapshot.nodes
            if node.span.start <= block < node.span.end and self._may_ask(node.peer_id)
        ]
        self._busy.clear()
        for node in sorted(nodes, key=lambda each: -each.span.end):
            if time.monotonic() > deadline:
                return False
            stack = AsyncExitStack()
            try:
                if self._attestor is not None:
                    await self._attestor.require(node.peer_id, node.span, node.addresses)
                link = await stack.enter_async_context(
                    open_private_link(
                        self._swarm, self._model_id, node.peer_id, node.addresses, self._keys, block
                    )
                )
            except BusyError as error:
                self._busy[node.peer_id] = error
            except (PeerUnreachableError, ProtocolError, AttestationError) as error:
                self._note_failure(node.peer_id, error)
            else:
                self._links[node.peer_id] = link, stack
                if self._is_closed:
                    await self._drop(node.peer_id)
                return True
        return False

    def _may_ask(self, peer: PeerId) -> bool:
        lost_at, _ = self._lost.get(peer, (-math.inf, ""))
        return peer not in self._refused and time.monotonic() > lost_at + ASK_LOST_AGAIN_S

    def _require_open(self) -> None:
        if self._is_closed:
            raise StreamClosedError("the session is closed")

    async def _drop(self, peer: PeerId) -> None:
        if (held := self._links.pop(peer, None)) is not None:
            await held[1].aclose()

    async def close(self) -> None:
        self._is_closed = True
        for asking in list(self._asking):
            asking.cancel()
        for peer in list(self._links):
            await self._drop(peer)


class PrivateSession(LocalSession):
    """A session of blocks of this process, whose linear layers are on nodes."""

    def __init__(
        self,
        blocks: ModelBlocks,
        nodes: PrivateNodes,
        worker: ThreadPoolExecutor,
        *,
        rows: int,
        max_tokens: int,
    ) -> None:
        super().__init__([blocks], worker, rows=rows, max_tokens=max_tokens)
        self._nodes = nodes

    @property
    def hops(self) -> tuple[Hop, ...]:
        return self._nodes.hops


class PrivateConnection(SwarmConnection):
    """`SwarmConnection` whose nodes see no hidden states."""

    def __init__(
        self,
        swarm: Swarm,
        checkpoint: Checkpoint,
        options: ConnectionOptions,
        dtype: torch.dtype,
        policy: AttestationPolicy | None,
    ) -> None:
        """With a `policy` only nodes are asked whose hardware proves what it demands."""
        self._swarm = swarm
        self._checkpoint = checkpoint
        self._options = options
        self._dtype = dtype
        self._model_id = compute_model_id(checkpoint)
        swarm.directory.set_num_blocks(self._model_id, checkpoint.num_blocks)
        self._ring = make_ring(RingParameters())
        self._attestor = None
        if policy is not None:
            self._attestor = Attestor(swarm, self._model_id, checkpoint, policy)
        self._barred = AuditHistory(options.audits_path).barred

    @asynccontextmanager
    async def open_session(
        self,
        span: Span,
        *,
        rows: int,
        max_tokens: int,
        prefix: SessionPrefix | None = None,
        adapter: bytes = b"",
    ) -> AsyncIterator[BlockSession]:
        """See `SwarmConnection.open_session`. Nodes get no digests of prefixes."""
        if adapter:
            raise _no_adapters()
        keys = await asyncio.to_thread(SessionKeys, self._ring)
        nodes = PrivateNodes(
            self._swarm,
            self._model_id,
            self._checkpoint.num_blocks,
            keys,
            self._options,
            self._attestor,
            self._barred,
        )
        worker = ThreadPoolExecutor(1, thread_name_prefix="nesa-private")
        try:
            await nodes.open(span)
            blocks = await asyncio.to_thread(
                _load_blocks,
                self._checkpoint,
                span,
                self._dtype,
                keys,
                nodes,
                asyncio.get_running_loop(),
            )
            session = PrivateSession(blocks, nodes, worker, rows=rows, max_tokens=max_tokens)
            try:
                yield session
            finally:
                await session.close()
        finally:
            await nodes.close()
            worker.shutdown(wait=False)

    async def find_adapter(self, text: str) -> NoReturn:
        """Raise `UnsupportedFeatureError`."""
        raise _no_adapters()

    def open_training(self, *_: object, **__: object) -> NoReturn:
        """Raise `UnsupportedFeatureError`."""
        raise UnsupportedFeatureError(
            "fine-tuning needs nodes that see hidden states: leave out private"
        )

    @property
    def is_lost(self) -> bool:
        return self._swarm.transport.daemon_exited.is_set()

    def samples(self) -> Iterable[MetricSample]:
        return swarm_samples(self._swarm)


def _no_adapters() -> UnsupportedFeatureError:
    return UnsupportedFeatureError(
        "private sessions use no adapters, whose products nodes would have to compute: leave out "
        "the adapter, or private"
    )


def _load_blocks(
    checkpoint: Checkpoint,
    span: Span,
    dtype: torch.dtype,
    keys: SessionKeys,
    nodes: PrivateNodes,
    loop: asyncio.AbstractEventLoop,
) -> ModelBlocks:
    """Load blocks whose products `nodes` make, asked in `loop` from another thread."""
    skeleton = Skeleton(checkpoint)
    products: dict[str, EncryptedProduct] = {}
    for index in range(span.start, span.end):
        ask = partial(nodes.ask, loop, index)
        for each in list_products(skeleton, Span(index, index + 1)):
            product = EncryptedProduct(each, keys.ring, keys.secret, ask)
            products |= dict.fromkeys(each.paths, product)
    _require_linear_layers_only(skeleton, span, products)

    def replace(path: str, layer: nn.Module) -> nn.Module:
        return EncryptedLinear(path, products[path], layer._parameters.get("bias"))

    return load_blocks_without_linear_layers(checkpoint, span, replace, dtype=dtype, device="cpu")


def _require_linear_layers_only(
    skeleton: Skeleton, span: Span, products: Mapping[str, EncryptedProduct]
) -> None:
    """Refuse blocks with other matrices, such as experts: which are asked would tell the text."""
    for name in skeleton.block_names(span):
        parameter = skeleton.model.get_parameter(name)
        if name.removesuffix(".weight") not in products and parameter.ndim > 1:
            raise UnsupportedFeatureError(
                f"private sessions compute linear layers, and {name} of this model is none"
            )


@asynccontextmanager
async def open_private_connection(
    checkpoint: Checkpoint, options: ConnectionOptions, dtype: torch.dtype
) -> AsyncIterator[PrivateConnection]:
    """Join the swarm that serves `checkpoint`, for sessions whose nodes see no hidden states.

    Raises as `open_connection` does.
    """
    policy = None
    if options.require_attestation is not None:
        policy = await asyncio.to_thread(read_policy, options.require_attestation)
    async with join_as_client(options) as swarm:
        connection = await asyncio.to_thread(
            PrivateConnection, swarm, checkpoint, options, dtype, policy
        )
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(swarm.transport.wait_until_lost())
            yield connection
            watching.cancel()
