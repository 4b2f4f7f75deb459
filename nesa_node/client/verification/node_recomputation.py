"""Recomputation of a hop's work at other nodes, in ordinary star sessions, which tell it nothing.

L tokens of a row, D hidden.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from nesa_node.client.recovery.retry import OpenLimiter
from nesa_node.client.routing.planner import ChainPlanner
from nesa_node.client.routing.request import RouteRequest
from nesa_node.client.session.session import RemoteSession
from nesa_node.client.verification.session_audit import HopWork, NotAuditedError
from nesa_node.compression.codecs import EXACT
from nesa_node.core.ids import PeerId, Span
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.protocol.messages import Computation, RowSlice

STEP_TIMEOUT_S = 30.0


class NodeRecomputation:
    """Runs blocks at nodes that the caller chooses, for audits of one connection."""

    def __init__(self, swarm: Swarm, request: RouteRequest, planner: ChainPlanner) -> None:
        self._swarm = swarm
        self._request = request
        self._planner = planner

    async def find_holders(self, work: HopWork) -> list[PeerId]:
        """Other nodes that hold all blocks of `work`, of its kind of weights, in random order."""
        snapshot = await self._planner.snapshots.fetch(self._request)
        declared = work.computation
        holders = [
            node.peer_id
            for node in snapshot.nodes
            if node.span.covers(work.span)
            and node.peer_id != work.peer
            and node.peer_id not in self._planner.barred
            and node.kind == (declared.dtype, declared.weights, declared.cache_dtype)
        ]
        random.SystemRandom().shuffle(holders)
        return holders

    async def run(
        self,
        peer: PeerId,
        span: Span,
        inputs: Sequence[torch.Tensor],
        computation: Computation,
        adapter: bytes = b"",
        *,
        by_token: bool = False,
    ) -> list[torch.Tensor]:
        """Outputs [L, D] of `span` with an adapter at `peer`, for each row of `inputs` [L, D].

        In one step, or `by_token`, which rounds otherwise.

        Raises `NotAuditedError` for a node that declares another kind of computation, and what
        opening a session and its steps raise.
        """
        options = replace(
            self._request.options,
            routing="star",
            quality=EXACT,
            replicate_cache=False,
            step_timeout_s=STEP_TIMEOUT_S,
            recovery_timeout_s=STEP_TIMEOUT_S / 2,
            queue_timeout_s=STEP_TIMEOUT_S / 2,
        )
        request = replace(
            self._request,
            span=span,
            rows=len(inputs),
            max_tokens=max(map(len, inputs)),
            adapter=adapter,
            allowed_peers=frozenset({peer}),
            prefix=(),
            prompt_tokens=0,
            options=options,
        )
        session = RemoteSession(
            self._swarm, request, self._planner, OpenLimiter(), rng=random.Random()
        )
        rows = [RowSlice(row, 0, len(row_LD)) for row, row_LD in enumerate(inputs)]
        try:
            await session.open()
            if session.declared_computations != (computation,):
                raise NotAuditedError(f"{peer} computes in another way than its record says")
            chunk_tokens = 1 if by_token else None
            outputs_TD = await session.step(
                torch.cat(list(inputs)), rows, chunk_tokens=chunk_tokens
            )
        finally:
            await session.close()
        return list(torch.split(outputs_TD, [len(row_LD) for row_LD in inputs]))
