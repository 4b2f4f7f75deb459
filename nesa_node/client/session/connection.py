"""A client's connection to the swarm: it opens sessions, and measures nodes by its own."""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from nesa_node.client.recovery.retry import OpenLimiter
from nesa_node.client.routing.planner import ChainPlanner
from nesa_node.client.routing.request import ConnectionOptions, RouteRequest
from nesa_node.client.session.base import SessionPrefix
from nesa_node.client.session.session import RemoteSession
from nesa_node.client.session.telemetry import SessionMetrics, audit_samples, session_samples
from nesa_node.client.training.announced_plan import AnnouncedPlan
from nesa_node.client.training.replica_group import ReplicaOptions
from nesa_node.client.training.training_chain import TrainingChain
from nesa_node.client.training.training_link import TrainingLimits
from nesa_node.client.training.training_nodes import TrainingNodes
from nesa_node.client.training.training_span import LocalTrainingSpan, SpanState
from nesa_node.client.verification.adapter_fetch import AdapterFetcher
from nesa_node.client.verification.attestor import Attestor
from nesa_node.client.verification.audit_history import AuditHistory
from nesa_node.client.verification.auditor import Auditor, SwarmEffects
from nesa_node.client.verification.node_recomputation import NodeRecomputation
from nesa_node.client.verification.redundant_session import RedundantSession
from nesa_node.client.verification.replicas import ReplicaOpener
from nesa_node.compression.tensors import DTYPE_NAMES
from nesa_node.core.decision_log import DecisionLog
from nesa_node.core.errors import AdapterError, ConfigError, NesaError
from nesa_node.core.ids import Span
from nesa_node.core.logging import get_logger
from nesa_node.core.metrics import MetricSample
from nesa_node.engine.training.training_spec import TrainingSpec
from nesa_node.engine.weights.checkpoint import Checkpoint, compute_model_id
from nesa_node.routing.chain_request import VISIT_OVERHEAD_S
from nesa_node.swarm.adapter_catalog import PublishedAdapter, find_published, list_published
from nesa_node.swarm.dht.adapter_notices import AdapterNotice
from nesa_node.swarm.dht.training_notices import SessionPlan
from nesa_node.swarm.evidence import EVIDENCE_INTERVAL_S, EvidenceExchange
from nesa_node.swarm.node import Swarm, open_swarm, swarm_samples
from nesa_node.swarm.openings import OpeningSender
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.swarm.p2p.link_measurements import ping
from nesa_node.swarm.p2p.tasks import TaskSet
from nesa_node.swarm.protocol.messages import RowSlice
from nesa_node.topology.snapshot import NodeState
from nesa_node.verification.attestation.policy import read_policy
from nesa_node.verification.distributions import ComputeLogits

log = get_logger(__name__)

PIPELINED_STEPS = 16
"""Steps sent without waiting for their outputs: the round trip is paid once, not for each step."""
SEQUENTIAL_STEPS = 6
"""Steps sent one after another. A node may batch pipelined steps, and a batch takes little longer
than one step where reading the weights dominates; single steps cannot be batched."""
_MEASURE_TIMEOUT_S = 20.0
ADAPTERS_FRESH_S = 60.0
"""Seconds for which names of adapters are looked up in what was read from the DHT."""


async def measure_speed(swarm: Swarm, node: NodeState, request: RouteRequest) -> float | None:
    """Measure how many tokens/s `node` decodes through its whole span; None if that fails.

    `request` is that of a session of the same model. The measuring session has one row and only
    this node. The step time is the larger of two: the faster of two rounds of `PIPELINED_STEPS`
    pipelined steps, less a round trip (but at least half of the round, which bounds the gain of a
    node that delays its pings to a factor of two), and the fastest of `SEQUENTIAL_STEPS` single
    steps, less a round trip and `VISIT_OVERHEAD_S`. Sends `4 * PIPELINED_STEPS + 2 *
    SEQUENTIAL_STEPS` hidden states over the wire.
    """
    alone = replace(
        request,
        span=node.span,
        rows=1,
        max_tokens=2 * PIPELINED_STEPS + SEQUENTIAL_STEPS,
        allowed_peers=frozenset({node.peer_id}),
        prefix=(),
        prompt_tokens=0,
        options=replace(
            request.options,
            replicate_cache=False,
            recovery_timeout_s=_MEASURE_TIMEOUT_S / 4,
            queue_timeout_s=_MEASURE_TIMEOUT_S / 4,
            step_timeout_s=_MEASURE_TIMEOUT_S / 4,
        ),
    )
    session = RemoteSession(swarm, alone, ChainPlanner(swarm), OpenLimiter(), rng=random.Random())

    async def time_steps(count: int) -> float:
        start = session.lengths[0]
        generator = torch.Generator().manual_seed(start)
        hidden_TD = torch.randn((count, request.hidden_size), generator=generator)
        started = time.perf_counter()
        await session.step(hidden_TD, [RowSlice(0, start, count)], chunk_tokens=1)
        return time.perf_counter() - started

    try:
        async with asyncio.timeout(_MEASURE_TIMEOUT_S):
            await session.open()
            rounds_s = [await time_steps(PIPELINED_STEPS) for _ in range(2)]
            singles_s = [await time_steps(1) for _ in range(SEQUENTIAL_STEPS)]
            rtt_ms = await ping(swarm.transport, node.peer_id, node.addresses)
    except (NesaError, TimeoutError) as error:
        log.info("speed_not_measured", peer=node.peer_id, reason=str(error))
        return None
    finally:
        await session.close()
    round_s, rtt_s = min(rounds_s), rtt_ms / 1000
    together_s = max(round_s - rtt_s, round_s / 2) / PIPELINED_STEPS
    return 1 / max(together_s, min(singles_s) - rtt_s - VISIT_OVERHEAD_S)


class RemoteConnection:
    """`SwarmConnection` over the network. All its sessions share what they learn about peers."""

    def __init__(
        self,
        swarm: Swarm,
        request: RouteRequest,
        num_blocks: int,
        auditor: Auditor | None = None,
        attestor: Attestor | None = None,
        head: ComputeLogits | None = None,
    ) -> None:
        """Sessions differ from `request` in span, rows, length and prefix only.

        `auditor` and `head` are needed where nodes check each other (`options.verify`).
        """
        swarm.directory.set_num_blocks(request.model_id, num_blocks)
        self.swarm = swarm
        self._request = request
        options = request.options
        self._planner = ChainPlanner(
            swarm,
            options.strategy,
            decisions=_decision_log(options),
            measure_speed=lambda node, request: measure_speed(swarm, node, request),
            barred=() if auditor is None else auditor.history.barred,
            distrust_s=None if auditor is None else auditor.history.distrust_s,
            require_attested=None if attestor is None else attestor.require,
        )
        self._auditor = auditor
        self._evidence = EvidenceExchange(swarm, request.model_id, num_blocks)
        self._evidence_read_at = -math.inf
        self._background = TaskSet()
        if auditor is not None:
            is_open = options.publish_evidence
            auditor.effects = SwarmEffects(
                avoid=self._planner.avoidance.record_failure,
                report_wrong=partial(
                    swarm.failure_reporter.record_failure, request.model_id, kind="wrong"
                ),
                publish_proof=self._evidence.publish,
                openings=OpeningSender(swarm, request.model_id, num_blocks) if is_open else None,
            )
            auditor.adapters = AdapterFetcher(
                swarm, request.model_id, num_blocks, self.find_adapter
            )
        may_ask = options.auditors == "nodes" or (options.auditors == "auto" and request.is_chain)
        if auditor is not None and may_ask:
            auditor.nodes = NodeRecomputation(swarm, request, self._planner)
            auditor.prefers_nodes = options.auditors == "nodes"
        self._open_limiter = OpenLimiter()
        self._adapters_read_at = -math.inf
        self.metrics = SessionMetrics()
        self._rng = random.Random()
        self._replicas: ReplicaOpener | None = None
        if options.verify != "none":
            assert auditor is not None
            assert head is not None
            self._replicas = ReplicaOpener(
                swarm, self._planner, auditor, options.verify, self.metrics, head
            )

    async def close(self) -> None:
        """Finish audits that were drawn, and end other tasks that belong to no session."""
        if self._auditor is not None:
            await self._auditor.close()
        await self._background.close()
        await self._planner.close()

    @asynccontextmanager
    async def open_session(
        self,
        span: Span,
        *,
        rows: int,
        max_tokens: int,
        prefix: SessionPrefix | None = None,
        adapter: bytes = b"",
    ) -> AsyncIterator[RemoteSession | RedundantSession]:
        """See `SwarmConnection.open_session`."""
        if prefix is not None and self._auditor is not None:
            prefix = replace(prefix, salt=self._auditor.history.derive_salt(prefix.salt))
        adapted = replace(self._request, adapter=adapter)
        model_id, precision = adapted.model_id, adapted.numerics_label
        request = replace(
            adapted,
            span=span,
            rows=rows,
            max_tokens=max_tokens,
            prefix=() if prefix is None else prefix.prompt_digests(model_id, precision),
            prompt_tokens=0 if prefix is None else sum(map(len, prefix.tokens)),
        )
        session = await self._new_session(request, prefix)
        self.metrics.open += 1
        try:
            await session.open()
            self._refresh_evidence()
            yield session
        finally:
            self.metrics.open -= 1
            await session.close()

    async def _new_session(
        self, request: RouteRequest, prefix: SessionPrefix | None
    ) -> RemoteSession | RedundantSession:
        if self._replicas is not None:
            return await self._replicas.new_session(request)
        return RemoteSession(
            self.swarm,
            request,
            self._planner,
            self._open_limiter,
            rng=self._rng,
            prefix=prefix,
            metrics=self.metrics,
            auditor=self._auditor,
        )

    def _refresh_evidence(self) -> None:
        """Read evidence against nodes in the background, now and then: no session waits."""
        now = time.monotonic()
        if self._auditor is not None and now >= self._evidence_read_at + EVIDENCE_INTERVAL_S:
            self._evidence_read_at = now
            self._background.start(self._bar_proven(self._auditor), name="evidence")

    async def _bar_proven(self, auditor: Auditor) -> None:
        try:
            for proof in await self._evidence.read():
                await auditor.bar_proven(proof)
        except (NesaError, OSError) as error:
            log.info("evidence_not_read", reason=str(error))

    async def find_adapter(self, text: str) -> PublishedAdapter:
        """The published adapter that `name`, `author/name` or a digest means.

        Raises `AdapterError`, and the `SwarmError`s of the DHT.
        """
        notices, model_id = self.swarm.notices, self._request.model_id
        if time.monotonic() - self._adapters_read_at < ADAPTERS_FRESH_S:
            with suppress(AdapterError):
                known = notices.known_notices(AdapterNotice, model_id)
                return find_published(list_published(known), text)
        found = await notices.fetch(AdapterNotice, model_id)
        self._adapters_read_at = time.monotonic()
        return find_published(list_published(found), text)

    @asynccontextmanager
    async def open_training(
        self,
        span: Span,
        *,
        spec: TrainingSpec,
        shapes: Mapping[str, tuple[int, ...]],
        limits: TrainingLimits,
        plan: SessionPlan,
        state: SpanState | None = None,
        replicas: ReplicaOptions,
        local: Sequence[LocalTrainingSpan] = (),
    ) -> AsyncIterator[TrainingChain]:
        """Open a chain of nodes that train adapters of `span`, and of `local` spans beside it.

        `shapes` are those of the adapters' parameters. Raises what `TrainingChain.open` raises.
        """
        request = replace(
            self._request,
            span=span,
            options=replace(self._request.options, routing="star", replicate_cache=False),
        )
        announced = AnnouncedPlan(self.swarm.notices, request.model_id, plan)
        nodes = TrainingNodes(
            self.swarm, request, self._planner, spec, shapes, limits, replicas, announced
        )
        chain = TrainingChain(request, nodes, limits, local)
        try:
            await chain.open(state)
            yield chain
        finally:
            await chain.close()

    @property
    def is_lost(self) -> bool:
        return self.swarm.transport.daemon_exited.is_set()

    def samples(self) -> Iterator[MetricSample]:
        yield from session_samples(self._request.model_id, self.metrics)
        if self._auditor is not None:
            yield from audit_samples(self._request.model_id, self._auditor.outcomes)
        yield from swarm_samples(self.swarm)


@asynccontextmanager
async def join_as_client(options: ConnectionOptions) -> AsyncIterator[Swarm]:
    """Join a swarm as `open_client_swarm` does. Raises `ConfigError` without initial peers."""
    if not options.initial_peers:
        raise ConfigError(
            "initial_peers is needed: the address of any member of the swarm, such as "
            'initial_peers=["192.0.2.7:31330"] (`nesa-node run` prints the one of a new swarm)'
        )
    async with open_client_swarm(options) as swarm:
        yield swarm


@asynccontextmanager
async def open_client_swarm(
    options: ConnectionOptions, *, asks_for_addresses: bool = True
) -> AsyncIterator[Swarm]:
    """Open a network without listening, by the identity of `options` or a new one.

    Without initial peers it is alone on its DHT. `asks_for_addresses` is as in `open_swarm`, whose
    `SwarmError`s are raised.
    """
    async with AsyncExitStack() as stack:
        if options.identity_path is not None:
            identity = Identity.load_or_create(options.identity_path)
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="nesa-client-"))
            identity = Identity.ephemeral(Path(folder))
        yield await stack.enter_async_context(
            open_swarm(
                identity,
                initial_peers=options.initial_peers,
                swarm_key=options.swarm_key,
                listen=False,
                asks_for_addresses=asks_for_addresses,
            )
        )


@asynccontextmanager
async def open_connection(
    checkpoint: Checkpoint,
    options: ConnectionOptions,
    dtype: torch.dtype,
    head: ComputeLogits | None = None,
) -> AsyncIterator[RemoteConnection]:
    """Join the swarm that serves `checkpoint`; hidden states are sent in `dtype`, that of `head`.

    `head` is needed for `options.verify`. Exits with an exception group of `SwarmError` if libp2p's
    daemon ends. Raises the `SwarmError`s of `open_swarm`, and `ConfigError` without initial peers.
    """
    policy = None
    if options.require_attestation is not None:
        policy = await asyncio.to_thread(read_policy, options.require_attestation)
    async with AsyncExitStack() as stack:
        swarm = await stack.enter_async_context(join_as_client(options))
        request = RouteRequest(
            model_id=await asyncio.to_thread(compute_model_id, checkpoint),
            span=Span(0, checkpoint.num_blocks),
            rows=1,
            max_tokens=1,
            hidden_size=int(checkpoint.config.hidden_size),
            dtype=DTYPE_NAMES[dtype],
            options=options,
            num_blocks=checkpoint.num_blocks,
        )
        auditor = Auditor(
            checkpoint,
            options.audit,
            AuditHistory(options.audits_path),
            rng=random.SystemRandom(),
            decisions=_decision_log(options),
            scheme=options.audit_scheme,
        )
        auditor.keep_session = options.keep_session
        attestor = None
        if policy is not None:
            attestor = Attestor(swarm, request.model_id, checkpoint, policy)
        connection = RemoteConnection(
            swarm, request, checkpoint.num_blocks, auditor, attestor, head
        )
        stack.push_async_callback(connection.close)
        async with asyncio.TaskGroup() as tasks:
            # Fails the context of a lost connection, so that the next session joins the swarm anew.
            watching = tasks.create_task(swarm.transport.wait_until_lost())
            yield connection
            watching.cancel()


def _decision_log(options: ConnectionOptions) -> DecisionLog | None:
    return None if options.decisions_path is None else DecisionLog(options.decisions_path)
