"""A node that announces a span that it never comes to serve."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from nesa_node.cli.services.local_swarm import LOOPBACK
from nesa_node.client.model.loop_thread import LoopThread
from nesa_node.core.ids import PeerId, Span
from nesa_node.swarm.node import open_swarm
from nesa_node.swarm.p2p.identity import Identity
from tests.swarm.record_fields import make_status


@contextmanager
def joining(addresses: Sequence[str], span: Span) -> Iterator[PeerId]:
    """A node that says that it loads `span`, and does so for ever."""
    loop = LoopThread("joining")

    @asynccontextmanager
    async def announced() -> AsyncIterator[PeerId]:
        with tempfile.TemporaryDirectory() as folder:
            identity = Identity.ephemeral(Path(folder))
            async with open_swarm(
                identity, host_maddrs=(LOOPBACK,), initial_peers=addresses
            ) as swarm:
                (known, *_) = await swarm.directory.fetch_all()
                status = make_status(
                    model_id=known.model_id,
                    model_name=known.model_name,
                    num_blocks=known.num_blocks,
                    span=(span.start, span.end),
                    state="joining",
                )
                await swarm.directory.publish(status)
                yield identity.peer_id

    held = loop.hold(announced())
    try:
        yield held.value
    finally:
        held.release()
        loop.close()
