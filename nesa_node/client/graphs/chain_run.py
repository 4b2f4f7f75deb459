"""One request through the nodes of a chain, all of which are asked at once."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from nesa_node.client.graphs.chain_steps import ChainStep
from nesa_node.client.graphs.graph_link import GraphLink
from nesa_node.core.errors import RemoteError
from nesa_node.core.ids import PeerId, Span
from nesa_node.swarm.protocol.graph_messages import (
    CHAIN_VERSION,
    Exchange,
    SourceNode,
    TargetNode,
)
from nesa_node.swarm.protocol.messages import Downstream


class Ask(Protocol):
    """`GraphLink.run`, with a check of what comes back."""

    def __call__(
        self,
        link: GraphLink,
        span: Span,
        given: Mapping[int, Tensor],
        wanted: Iterable[int],
        *,
        exchange: Exchange,
        sent: asyncio.Event | None,
    ) -> Awaitable[dict[int, Tensor]]: ...


async def run_chain(
    steps: Sequence[ChainStep],
    find_link: Callable[[PeerId], Awaitable[GraphLink]],
    ask: Ask,
    values: Mapping[int, Tensor],
) -> dict[int, Tensor]:
    """The values that the nodes return, of `values` that the client knows.

    Nodes keep what comes before its request for some seconds alone: those that get values of other
    nodes are asked first. Raises as `find_link` and `ask` do.
    """
    links = await asyncio.gather(*(find_link(step.peer) for step in steps))
    for link in links:
        if link.version < CHAIN_VERSION:
            raise RemoteError("old_version", f"{link.peer} sends nothing to other nodes")
    keys = {(step.peer, peer): secrets.token_bytes(16) for step in steps for peer in step.targets}
    spans = {step.peer: (step.span.start, step.span.end) for step in steps}
    sent = {step.peer: asyncio.Event() for step in steps if step.sources}

    async def run(step: ChainStep, link: GraphLink) -> dict[int, Tensor]:
        exchange = Exchange(
            sources=tuple(
                SourceNode(peer, keys[peer, step.peer], tuple(indices))
                for peer, indices in step.sources.items()
            ),
            targets=tuple(
                TargetNode(Downstream(peer, spans[peer]), keys[step.peer, peer], tuple(indices))
                for peer, indices in step.targets.items()
            ),
            returned=tuple(step.returned),
        )
        if not step.sources:
            await asyncio.gather(*(each.wait() for each in sent.values()))
        given = {index: values[index] for index in step.given}
        own = sent.get(step.peer)
        return await ask(link, step.span, given, step.returned, exchange=exchange, sent=own)

    running = [
        asyncio.ensure_future(run(step, link)) for step, link in zip(steps, links, strict=True)
    ]
    try:
        made = await asyncio.gather(*running)
    finally:
        for each in running:
            each.cancel()
        await asyncio.wait(running)
    return {index: tensor for each in made for index, tensor in each.items()}
