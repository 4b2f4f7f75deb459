"""Opens sessions whose blocks several nodes or chains compute, for one connection."""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from nesa_node.client.recovery.retry import OpenLimiter
from nesa_node.client.routing.node_selection import is_too_coarse
from nesa_node.client.routing.planner import ChainPlanner
from nesa_node.client.routing.request import RouteRequest
from nesa_node.client.session.session import RemoteSession
from nesa_node.client.session.telemetry import SessionMetrics
from nesa_node.client.verification.auditor import Auditor
from nesa_node.client.verification.redundant_session import RedundantSession
from nesa_node.client.verification.replica_selection import (
    Replica,
    ReplicatedSpan,
    choose_chains,
    choose_replicas,
)
from nesa_node.core.errors import MissingBlocksError, UnsupportedFeatureError
from nesa_node.core.ids import PeerId, Span
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.protocol.messages import Computation
from nesa_node.topology.snapshot import NodeState
from nesa_node.verification.agreement import RULES, AgreementHistory, AgreementRule
from nesa_node.verification.comparison import (
    ComputationKind,
    Measure,
    Threshold,
    find_threshold,
)
from nesa_node.verification.distributions import ComputeLogits, DistributionMeasure

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
        head: ComputeLogits,
    ) -> None:
        """`head` is what the client makes next tokens with, of the last block's output."""
        self._swarm = swarm
        self._planner = planner
        self._auditor = auditor
        self._name = rule
        self._rule = RULES[rule]
        self._metrics = metrics
        self._head = head
        self._outvoted: set[PeerId] = set()

    async def new_session(self, request: RouteRequest) -> RedundantSession:
        """Choose nodes for `request`.

        Raises `MissingBlocksError` where too few hold its blocks, and `UnsupportedFeatureError`
        where distributions are to be compared of blocks that are not the model's last.
        """
        if self._rule.of_chains and request.span.end != request.num_blocks:
            raise UnsupportedFeatureError(
                f"verify={self._name!r} compares next-token distributions, which blocks "
                f"{request.span} of {request.num_blocks} do not give: keep none of the last blocks "
                "here (client_blocks), ask for no output_hidden_states, or use verify='2of3'"
            )
        snapshot = await self._planner.snapshots.fetch(request)
        nodes = [
            node
            for node in snapshot.nodes
            if not is_too_coarse(node, request) and node.peer_id not in self._planner.barred
        ]

        def new_session(span: Span, replica: Replica) -> RemoteSession:
            return RemoteSession(
                self._swarm,
                _alone(request, span, replica, self._rule),
                self._planner,
                OpenLimiter(),
                rng=random.Random(),
                metrics=self._metrics,
                auditor=self._auditor,
            )

        return RedundantSession(
            self._choose_parts(nodes, request.span),
            self._rule,
            new_session=new_session,
            new_history=partial(self._new_history, request.dtype),
            report_outvoted=self._report_outvoted,
            rows=request.rows,
            max_tokens=request.max_tokens,
        )

    def _choose_parts(self, nodes: Sequence[NodeState], span: Span) -> list[ReplicatedSpan]:
        if not self._rule.of_chains:
            return choose_replicas(nodes, span, self._rule.copies, avoided=self._outvoted)
        try:
            return [choose_chains(nodes, span, self._rule.fewest, avoided=self._outvoted)]
        except MissingBlocksError:
            # Most nodes of a chain that was outvoted are honest.
            return [choose_chains(nodes, span, self._rule.fewest)]

    def _new_history(self, dtype: str, span: Span, session: RemoteSession) -> AgreementHistory:
        """How outputs are compared that arrive in `dtype`, which is the head's, too."""
        allowed = find_allowed(
            self._auditor.family, span, session, self._rule.scheme, f"verify={self._name!r}"
        )
        if not self._rule.of_chains:
            return AgreementHistory(Measure(self._rule.scheme, secrets.token_bytes(32)), allowed)
        if any(each is None or each.dtype != dtype for each in session.declared_computations):
            raise UnsupportedFeatureError(
                f"verify={self._name!r} has bounds for heads in the nodes' dtype, and this one is "
                f"in {dtype}: give the nodes' as dtype (--torch-dtype)"
            )
        return AgreementHistory(DistributionMeasure(self._head), allowed)

    async def _report_outvoted(
        self, peers: Sequence[PeerId], span: Span, session: bytes, reason: str
    ) -> None:
        # Not barred: the majority may be one operator's.
        self._outvoted.update(peers)
        await self._auditor.record_outvoted(peers, span, session, self._name, reason)


def _alone(
    request: RouteRequest, span: Span, replica: Replica, rule: AgreementRule
) -> RouteRequest:
    """The request of a session of `span` at `replica`."""
    options = replace(
        request.options,
        routing=request.options.routing if rule.of_chains else "star",
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


def find_allowed(
    family: str, span: Span, session: RemoteSession, scheme: str, what: str
) -> Threshold:
    """How much honest nodes differ over `span`, that compute as the nodes of `session` declare.

    Raises `UnsupportedFeatureError`, which names `what` compares them, where that is not known.
    """
    kinds: set[Computation | None] = set(session.declared_computations)
    declared = kinds.pop()
    if declared is None:
        raise UnsupportedFeatureError(
            f"the nodes of blocks {span} do not declare what they compute with, as versions "
            f"before 1.7: {what} cannot compare them"
        )
    if kinds:
        raise UnsupportedFeatureError(
            f"the nodes of a chain over blocks {span} do not all compute with the same: "
            f"{what} has no bounds for that"
        )
    kind = ComputationKind(
        family, declared.dtype, declared.quantization, declared.backend, session.codec
    )
    allowed = find_threshold(kind, len(span), scheme)
    if allowed is None:
        raise UnsupportedFeatureError(
            f"no bound was fitted for how much honest nodes differ over {len(span)} blocks of "
            f"{kind.family} in {kind.dtype}, quantization {kind.quantization}, on "
            f"{kind.backend}: {what} cannot compare them"
        )
    return allowed
