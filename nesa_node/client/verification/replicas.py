"""Opens sessions whose blocks several nodes compute, for one connection."""

from __future__ import annotations

import random
import secrets
from dataclasses import replace

from nesa_node.client.recovery.retry import OpenLimiter
from nesa_node.client.routing.node_selection import is_too_coarse
from nesa_node.client.routing.planner import ChainPlanner
from nesa_node.client.routing.request import RouteRequest
from nesa_node.client.session.session import RemoteSession
from nesa_node.client.session.telemetry import SessionMetrics
from nesa_node.client.verification.auditor import Auditor
from nesa_node.client.verification.redundant_session import RedundantSession
from nesa_node.client.verification.replica_selection import Replica, choose_replicas
from nesa_node.core.errors import UnsupportedFeatureError
from nesa_node.core.ids import PeerId, Span
from nesa_node.swarm.node import Swarm
from nesa_node.verification.agreement import RULES, AgreementHistory
from nesa_node.verification.comparison import Measure, find_threshold

REPLICA_TIMEOUT_S = 10.0
"""Seconds for a replica to answer again, or to have free cache: another one takes its place."""


class ReplicaOpener:
    """Opens `RedundantSession`s by a rule of `RULES`. It avoids nodes that were outvoted before."""

    def __init__(
        self,
        swarm: Swarm,
        planner: ChainPlanner,
        auditor: Auditor,
        rule: str,
        metrics: SessionMetrics,
    ) -> None:
        self._swarm = swarm
        self._planner = planner
        self._auditor = auditor
        self._name = rule
        self._rule = RULES[rule]
        self._metrics = metrics
        self._outvoted: set[PeerId] = set()

    async def new_session(self, request: RouteRequest) -> RedundantSession:
        """Choose nodes for `request`. Raises `MissingBlocksError` where too few hold its blocks."""
        snapshot = await self._planner.snapshots.fetch(request)
        parts = choose_replicas(
            [node for node in snapshot.nodes if not is_too_coarse(node, request)],
            request.span,
            self._rule.copies,
            avoided=self._outvoted.union(self._planner.barred),
        )

        def new_session(span: Span, replica: Replica) -> RemoteSession:
            return RemoteSession(
                self._swarm,
                _alone(request, span, replica),
                self._planner,
                OpenLimiter(),
                rng=random.Random(),
                metrics=self._metrics,
                auditor=self._auditor,
            )

        return RedundantSession(
            parts,
            self._rule,
            new_session=new_session,
            new_history=self._new_history,
            report_outvoted=self._report_outvoted,
            rows=request.rows,
            max_tokens=request.max_tokens,
        )

    def _new_history(self, span: Span, session: RemoteSession) -> AgreementHistory:
        [declared] = session.declared_computations
        if declared is None:
            raise UnsupportedFeatureError(
                f"the nodes of blocks {span} do not declare what they compute with, as versions "
                f"before 1.7: verify={self._name!r} cannot compare them"
            )
        kind = self._auditor.kind_of(declared, session.codec)
        allowed = find_threshold(kind, len(span), self._rule.scheme)
        if allowed is None:
            raise UnsupportedFeatureError(
                f"no bound was fitted for how much honest nodes differ over {len(span)} blocks of "
                f"{kind.family} in {kind.dtype}, quantization {kind.quantization}, on "
                f"{kind.backend}: verify={self._name!r} cannot compare them"
            )
        return AgreementHistory(Measure(self._rule.scheme, secrets.token_bytes(32)), allowed)

    async def _report_outvoted(self, session: RemoteSession, reason: str) -> None:
        # Not barred: the majority may be one operator's.
        [hop] = session.hops
        self._outvoted.add(hop.peer_id)
        await self._auditor.record_outvoted(hop, session.session_id, self._name, reason)


def _alone(request: RouteRequest, span: Span, replica: Replica) -> RouteRequest:
    """The request of a session of `span` at `replica`."""
    options = replace(
        request.options,
        routing="star",
        replicate_cache=False,
        recovery_timeout_s=min(request.options.recovery_timeout_s, REPLICA_TIMEOUT_S),
        queue_timeout_s=min(request.options.queue_timeout_s, REPLICA_TIMEOUT_S),
    )
    return replace(
        request,
        span=span,
        allowed_peers=replica,
        prefix=(),
        prompt_tokens=0,
        options=options,
    )
