"""Replay of a session's steps to nodes that join its chain.

T packed tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from nesa_node.client.routing.request import RouteRequest
from nesa_node.client.session.hop import OPEN_TIMEOUT_S, HopLink
from nesa_node.client.session.route import SessionRoute
from nesa_node.client.session.step_pipeline import PipelineStage, StepPipeline
from nesa_node.compression.tensors import HiddenStates
from nesa_node.core.ids import PeerId
from nesa_node.routing.chains import Hop
from nesa_node.swarm.protocol.replay_buffer import ReplayBuffer, SentStep


class StepReplay:
    """Keeps the inputs of the first hop, in a star those of every hop, by their first block."""

    def __init__(self, route: SessionRoute, request: RouteRequest, pipeline: StepPipeline) -> None:
        self._route = route
        self._is_chain = request.is_chain
        self._span = request.span
        self._pipeline = pipeline
        self._outboxes: dict[int, ReplayBuffer] = {request.span.start: ReplayBuffer()}

    def stages(self) -> list[PipelineStage]:
        """Pipeline stages for new steps, each of which records its inputs."""
        links = self._route.links
        if self._is_chain:
            return [PipelineStage(links[0], links[-1], links, self._outbox(links[0]))]
        stages: list[PipelineStage] = []
        for link in reversed(links):
            after = stages[0] if stages else None
            stages.insert(0, PipelineStage(link, link, [link], self._outbox(link), after))
        return stages

    def record_unsent(self, kept: SentStep) -> None:
        """Record a step that the first hop need not be sent, since it reused those tokens."""
        self._outboxes[self._span.start].append(kept)

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
        is_opening: bool = False,
        drop: frozenset[PeerId] = frozenset(),
        open_timeout_s: float = OPEN_TIMEOUT_S,
    ) -> None:
        """Rebuild the route; afterwards every node holds `lengths[row]` tokens of each row.

        With `is_opening` the route determines the lengths itself. No inputs beyond them may be
        recorded. Raises what `Route.rebuild` and sending raise.
        """
        await self._route.rebuild(
            lengths,
            is_opening=is_opening,
            drop=drop,
            needs_output=self._lacks_inputs_after,
            on_restart=self._forget_later_hops,
            open_timeout_s=open_timeout_s,
        )
        links = self._route.links
        for link in links if not self._is_chain else links[:1]:
            if link in self._route.held_tokens:
                await self._replay_to(link, self._route.held_tokens[link], lengths)
        # Inputs at blocks where no hop starts any more would have gaps if a hop starts there again.
        starts = {hop.span.start for hop in self._route.hops}
        self._outboxes = {start: kept for start, kept in self._outboxes.items() if start in starts}

    async def _replay_to(self, link: HopLink, held: Sequence[int], lengths: Sequence[int]) -> None:
        steps = self._outbox(link).iter_steps(held, lengths)
        if not self._is_chain and self._lacks_inputs_after(link.hop):
            await self._replay_for_outputs(link, [await step.materialize() for step in steps])
        else:
            for step in steps:
                await self._pipeline.resend_step(link, await step.materialize())

    async def _replay_for_outputs(self, link: HopLink, steps: Sequence[SentStep]) -> None:
        outbox, links = ReplayBuffer(), self._route.links
        following = links[links.index(link) + 1]

        def keep(kept: SentStep, output_TD: torch.Tensor) -> None:
            meta, payload = following.wire.encode(HiddenStates.from_tensor(output_TD))
            outbox.append(
                SentStep(kept.step, kept.rows, "all", meta, payload, self._pipeline.output_codecs)
            )

        # As a last hop it may have been asked for less than the next hop needs.
        whole = [replace(kept, want="all") for kept in steps]
        await self._pipeline.run_steps(whole, [PipelineStage(link, link, [link])], keep)
        self._outboxes[link.hop.span.end] = outbox

    def _forget_later_hops(self) -> None:
        """Keep only the first hop's inputs: those of later hops begin after the new start."""
        start = self._span.start
        self._outboxes = {start: self._outboxes[start]}

    def _lacks_inputs_after(self, hop: Hop) -> bool:
        """Whether the inputs of the blocks after `hop` are not recorded."""
        end = hop.span.end
        return end < self._span.end and end not in self._outboxes

    def _outbox(self, link: HopLink) -> ReplayBuffer:
        return self._outboxes.setdefault(link.hop.span.start, ReplayBuffer())
