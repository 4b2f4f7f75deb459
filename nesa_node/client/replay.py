"""Replay of a session's steps to nodes that join its chain.

T packed tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from nesa_node.client.flow import Flow, Stage
from nesa_node.client.hop import OPEN_TIMEOUT_S, HopLink
from nesa_node.client.request import RouteRequest
from nesa_node.client.route import Route
from nesa_node.compression.hidden_states import HiddenStates
from nesa_node.core.ids import PeerId
from nesa_node.routing.chains import Hop
from nesa_node.swarm.outbox import Kept, Outbox


class Replay:
    """Keeps the inputs of the first hop, in a star those of every hop, by their first block."""

    def __init__(self, route: Route, request: RouteRequest, flow: Flow) -> None:
        self._route = route
        self._request = request
        self._flow = flow
        self._outboxes: dict[int, Outbox] = {request.span.start: Outbox()}

    def stages(self) -> list[Stage]:
        """Pipeline stages for new steps, each of which records its inputs."""
        links = self._route.links
        if self._request.mode == "chain":
            return [Stage(links[0], links[-1], links, self._outbox(links[0]))]
        stages: list[Stage] = []
        for link in reversed(links):
            after = stages[0] if stages else None
            stages.insert(0, Stage(link, link, [link], self._outbox(link), after))
        return stages

    def note(self, kept: Kept) -> None:
        """Record a step that the first hop need not be sent, since it reused those tokens."""
        self._outboxes[self._request.span.start].append(kept)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget every token at or beyond `lengths[row]`."""
        for outbox in self._outboxes.values():
            outbox.truncate(lengths)

    def reorder(self, sources: Sequence[int]) -> None:
        """Let each row have the inputs of row `sources[row]`."""
        for outbox in self._outboxes.values():
            outbox.reorder(sources)

    async def rebuild(
        self,
        lengths: Sequence[int],
        *,
        begins: bool = False,
        drop: frozenset[PeerId] = frozenset(),
        open_timeout_s: float = OPEN_TIMEOUT_S,
    ) -> None:
        """Rebuild the route; afterwards every node holds `lengths[row]` tokens of each row.

        With `begins` the route determines the lengths itself. No inputs beyond them may be
        recorded. Raises what `Route.rebuild` and sending raise.
        """
        await self._route.rebuild(
            lengths,
            begins=begins,
            drop=drop,
            needs_output=self._lacks_next,
            on_return=self._forget_later_hops,
            open_timeout_s=open_timeout_s,
        )
        links = self._route.links
        for link in links if self._request.mode == "star" else links[:1]:
            if link in self._route.held:
                await self._replay(link, self._route.held[link], lengths)
        # Inputs at blocks where no hop starts any more would have gaps if a hop starts there again.
        starts = {hop.span.start for hop in self._route.hops}
        self._outboxes = {start: kept for start, kept in self._outboxes.items() if start in starts}

    async def _replay(self, link: HopLink, held: Sequence[int], lengths: Sequence[int]) -> None:
        steps = self._outbox(link).since(held, lengths)
        if self._request.mode == "star" and self._lacks_next(link.hop):
            await self._replay_for_outputs(link, [await step.copied() for step in steps])
        else:
            for step in steps:
                await self._flow.send_again(link, await step.copied())

    async def _replay_for_outputs(self, link: HopLink, steps: Sequence[Kept]) -> None:
        outbox = Outbox()

        def keep(kept: Kept, output_TD: torch.Tensor) -> None:
            meta, payload = self._after(link).wire.encode(HiddenStates.of(output_TD))
            outbox.append(Kept(kept.step, kept.rows, "all", meta, payload, self._flow.via))

        # As a last hop it may have been asked for less than the next hop needs.
        whole = [replace(kept, want="all") for kept in steps]
        await self._flow.run(whole, [Stage(link, link, [link])], keep)
        self._outboxes[link.hop.span.end] = outbox

    def _forget_later_hops(self) -> None:
        """Keep only the first hop's inputs: those of later hops begin after the new start."""
        start = self._request.span.start
        self._outboxes = {start: self._outboxes[start]}

    def _lacks_next(self, hop: Hop) -> bool:
        """Whether the inputs of the blocks after `hop` are not recorded."""
        end = hop.span.end
        return end < self._request.span.end and end not in self._outboxes

    def _after(self, link: HopLink) -> HopLink:
        links = self._route.links
        return links[links.index(link) + 1]

    def _outbox(self, link: HopLink) -> Outbox:
        return self._outboxes.setdefault(link.hop.span.start, Outbox())
