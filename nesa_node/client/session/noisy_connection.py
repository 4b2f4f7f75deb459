"""Sessions whose nodes get hidden states with noise (`--private noise:EPS,DELTA,CLIP`).

The noise is put in once, before the first block on a node. Nodes pass outputs on as they do
otherwise, and a lost node's replacement gets the same values again. Another session gets fresh
noise, also for a text that was sent before: nodes can average both. What counts then is the
epsilon of all that a connection sent, which is logged; a client's later connections add to it.

T packed tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

import torch

from nesa_node.client.routing.request import ConnectionOptions
from nesa_node.client.session.base import (
    BlockSession,
    DrawnAudits,
    Failover,
    NoisyVectors,
    RowSlice,
    SessionPrefix,
    SwarmConnection,
    Want,
)
from nesa_node.client.session.connection import RemoteConnection, open_connection
from nesa_node.core.ids import Span
from nesa_node.core.logging import get_logger
from nesa_node.core.metrics import MetricSample
from nesa_node.core.settings.noise_spec import NoiseSpec
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.privacy.noise.gaussian_mechanism import add_noise, find_sigma
from nesa_node.routing.chains import Hop
from nesa_node.swarm.adapter_catalog import PublishedAdapter
from nesa_node.verification.distributions import ComputeLogits

log = get_logger(__name__)


class NoisySession(BlockSession):
    """A session that puts noise into its inputs, and counts them also in `connection_sent`."""

    def __init__(
        self, session: BlockSession, noise: NoiseSpec, connection_sent: NoisyVectors
    ) -> None:
        self._session = session
        self._noise = noise
        self._connection_sent = connection_sent
        self._sigma = find_sigma(noise.epsilon, noise.delta, 2 * noise.clip)
        self._sent = NoisyVectors(noise)

    @property
    def rows(self) -> int:
        return self._session.rows

    @property
    def lengths(self) -> tuple[int, ...]:
        return self._session.lengths

    @property
    def max_tokens(self) -> int:
        return self._session.max_tokens

    @property
    def hops(self) -> tuple[Hop, ...]:
        return self._session.hops

    @property
    def codecs(self) -> tuple[str, ...]:
        return self._session.codecs

    @property
    def failovers(self) -> tuple[Failover, ...]:
        return self._session.failovers

    @property
    def session_id(self) -> bytes:
        return self._session.session_id

    @property
    def num_decoding(self) -> int:
        return self._session.num_decoding

    @property
    def drawn_audits(self) -> DrawnAudits:
        return self._session.drawn_audits

    @property
    def noisy_vectors(self) -> NoisyVectors:
        """Those sent so far, those that were rolled back included."""
        return self._sent

    async def step(
        self, hidden_TD: torch.Tensor, rows: Sequence[RowSlice], *, want: Want = "all"
    ) -> torch.Tensor:
        noisy_TD = add_noise(hidden_TD, self._noise.clip, self._sigma)
        self._sent.count += len(noisy_TD)
        self._connection_sent.count += len(noisy_TD)
        return await self._session.step(noisy_TD, rows, want=want)

    async def rollback(self, lengths: Sequence[int]) -> None:
        await self._session.rollback(lengths)

    async def reorder(self, sources: Sequence[int]) -> None:
        await self._session.reorder(sources)

    async def finish(self) -> None:
        await self._session.finish()

    async def close(self) -> None:
        await self._session.close()


class NoisyConnection(SwarmConnection):
    """`SwarmConnection` that puts noise into what nodes get."""

    def __init__(self, connection: RemoteConnection, noise: NoiseSpec) -> None:
        self._connection = connection
        self._noise = noise
        self._sent = NoisyVectors(noise)

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
        opening = self._connection.open_session(
            span, rows=rows, max_tokens=max_tokens, adapter=adapter
        )
        async with opening as session:
            noisy = NoisySession(session, self._noise, self._sent)
            try:
                yield noisy
            finally:
                log.info(
                    "noisy_session_closed",
                    tokens=noisy.noisy_vectors.count,
                    epsilon=round(noisy.noisy_vectors.epsilon, 2),
                    connection_tokens=self._sent.count,
                    connection_epsilon=round(self._sent.epsilon, 2),
                    delta=self._noise.delta,
                )

    async def find_adapter(self, text: str) -> PublishedAdapter:
        """See `RemoteConnection.find_adapter`."""
        return await self._connection.find_adapter(text)

    @property
    def is_lost(self) -> bool:
        return self._connection.is_lost

    def samples(self) -> Iterable[MetricSample]:
        return self._connection.samples()


@asynccontextmanager
async def open_noisy_connection(
    checkpoint: Checkpoint,
    options: ConnectionOptions,
    dtype: torch.dtype,
    head: ComputeLogits,
    noise: NoiseSpec,
) -> AsyncIterator[NoisyConnection]:
    """Join the swarm that serves `checkpoint`; nodes get noise. Raises as `open_connection`."""
    async with open_connection(checkpoint, options, dtype, head) as connection:
        yield NoisyConnection(connection, noise)
