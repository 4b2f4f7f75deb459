"""Sessions through nodes that multiply vectors which they cannot read; all else is computed in this
process.

A session is one of local blocks whose linear layers are asked for. Their weights pass once through
this process, for the checks of all products.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import NoReturn

import torch
from torch import nn

from nesa_node.client.model.layers import LocalSession
from nesa_node.client.private.encrypted_multiplier import EncryptedMultipliers
from nesa_node.client.private.mask_stock import MaskStock
from nesa_node.client.private.masked_multiplier import MaskedMultipliers
from nesa_node.client.private.private_nodes import PrivateNodes
from nesa_node.client.private.remote_linear import (
    TOKENS_AT_ONCE,
    Multipliers,
    RemoteLinear,
    RemoteProduct,
)
from nesa_node.client.routing.request import ConnectionOptions
from nesa_node.client.session.base import (
    BlockSession,
    RowSlice,
    SessionPrefix,
    SwarmConnection,
    Want,
)
from nesa_node.client.session.connection import join_as_client
from nesa_node.client.verification.attestor import Attestor
from nesa_node.client.verification.audit_history import AuditHistory
from nesa_node.core.errors import UnsupportedFeatureError
from nesa_node.core.ids import Span
from nesa_node.core.metrics import MetricSample
from nesa_node.core.settings.choices import PrivateScheme
from nesa_node.core.wait_tracking import track_wait, untracked
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.model.loading import load_blocks_without_linear_layers
from nesa_node.engine.weights.checkpoint import Checkpoint, compute_model_id
from nesa_node.engine.weights.skeleton import Skeleton
from nesa_node.privacy.native_ring import make_ring
from nesa_node.privacy.parameters import RingParameters
from nesa_node.privacy.products import LinearProduct, list_products
from nesa_node.routing.chains import Hop
from nesa_node.swarm.node import Swarm, swarm_samples
from nesa_node.verification.attestation.policy import AttestationPolicy, read_policy


class PrivateSession(LocalSession):
    """A session of blocks of this process, whose linear layers are on nodes."""

    def __init__(
        self,
        blocks: ModelBlocks,
        products: int,
        nodes: PrivateNodes,
        worker: ThreadPoolExecutor,
        *,
        rows: int,
        max_tokens: int,
        computing: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`products` is how many each token needs."""
        super().__init__([blocks], worker, rows=rows, max_tokens=max_tokens)
        self._nodes = nodes
        self._computing = computing
        self._products = products

    async def step(
        self, hidden_TD: torch.Tensor, rows: Sequence[RowSlice], *, want: Want = "all"
    ) -> torch.Tensor:
        requests = self._products * math.ceil(len(hidden_TD) / TOKENS_AT_ONCE)
        with self._nodes.reporting(requests), self._computing():
            return await super().step(hidden_TD, rows, want=want)

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
        self._history = AuditHistory(options.audits_path)
        self._multipliers: Multipliers = EncryptedMultipliers(self._ring.parameters)

    @asynccontextmanager
    async def making_masks(self) -> AsyncIterator[None]:
        """Hide vectors by masks; a stock of them is multiplied on streams of its own."""
        nodes = self._make_nodes("masks")
        stock = MaskStock(nodes, self._ring, self._options.stock, self._history.barred)
        self._multipliers = MaskedMultipliers(self._ring, stock)
        async with asyncio.TaskGroup() as tasks:
            with untracked():
                filling = tasks.create_task(stock.fill())
            try:
                yield
            finally:
                filling.cancel()
                await nodes.close()

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
        nodes = self._make_nodes(self._multipliers.scheme)
        worker = ThreadPoolExecutor(1, thread_name_prefix="nesa-private")
        try:
            await nodes.open(span)
            blocks, products = await asyncio.to_thread(self._load_blocks, span, nodes)
            session = PrivateSession(
                blocks,
                products,
                nodes,
                worker,
                rows=rows,
                max_tokens=max_tokens,
                computing=self._multipliers.computing,
            )
            try:
                yield session
            finally:
                await session.close()
        finally:
            await nodes.close()
            worker.shutdown(wait=False)

    def _make_nodes(self, scheme: PrivateScheme) -> PrivateNodes:
        return PrivateNodes(
            self._swarm,
            self._model_id,
            self._checkpoint.num_blocks,
            scheme,
            self._ring,
            self._options,
            self._attestor,
            self._history,
        )

    def _load_blocks(self, span: Span, nodes: PrivateNodes) -> tuple[ModelBlocks, int]:
        """Load blocks whose products `nodes` make, and count the products of a token.

        All weights are read once, for checks. Blocks the thread.
        """
        skeleton = Skeleton(self._checkpoint)
        listed = [
            (block, product)
            for block in range(span.start, span.end)
            for product in list_products(skeleton, Span(block, block + 1))
        ]
        _require_linear_layers_only(skeleton, span, [product for _, product in listed])
        products: dict[str, RemoteProduct] = {}
        with track_wait("weights to be read, for checks of products"):
            for block, each in listed:
                multiplier = self._multipliers.make(skeleton, each, block, nodes)
                products |= dict.fromkeys(each.paths, RemoteProduct(each, multiplier))

        def replace(path: str, layer: nn.Module) -> nn.Module:
            return RemoteLinear(path, products[path], layer._parameters.get("bias"))

        blocks = load_blocks_without_linear_layers(
            self._checkpoint, span, replace, dtype=self._dtype, device="cpu"
        )
        return blocks, len(listed)

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
        return [*swarm_samples(self._swarm), *self._multipliers.samples()]


def _no_adapters() -> UnsupportedFeatureError:
    return UnsupportedFeatureError(
        "private sessions use no adapters, whose products nodes would have to compute: leave out "
        "the adapter, or private"
    )


def _require_linear_layers_only(
    skeleton: Skeleton, span: Span, products: Sequence[LinearProduct]
) -> None:
    """Refuse blocks with other matrices, such as experts: which are asked would tell the text."""
    paths = {path for product in products for path in product.paths}
    for name in skeleton.block_names(span):
        parameter = skeleton.model.get_parameter(name)
        if name.removesuffix(".weight") not in paths and parameter.ndim > 1:
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
        making = connection.making_masks() if options.private == "masks" else nullcontext()
        async with making, asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(swarm.transport.wait_until_lost())
            yield connection
            watching.cancel()
