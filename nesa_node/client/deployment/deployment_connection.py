"""Sessions of a private deployment: a star over members that know neither place nor order."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from nesa_node.client.deployment.deployment_file import Deployment, DeploymentFile
from nesa_node.client.deployment.member_directory import (
    MemberDirectory,
    MemberReporter,
    parse_place,
    place_name,
)
from nesa_node.client.recovery.retry import OpenLimiter
from nesa_node.client.routing.planner import ChainPlanner
from nesa_node.client.routing.request import ConnectionOptions, RouteRequest
from nesa_node.client.session.base import SessionPrefix, SwarmConnection
from nesa_node.client.session.connection import open_client_swarm
from nesa_node.client.session.session import RemoteSession
from nesa_node.client.session.telemetry import SessionMetrics, session_samples
from nesa_node.client.verification.redundant_session import RedundantSession
from nesa_node.client.verification.replica_selection import Replica, ReplicatedSpan
from nesa_node.client.verification.replicas import find_allowed
from nesa_node.compression.tensors import DTYPE_NAMES
from nesa_node.core.errors import (
    ConfigError,
    IdentityError,
    MissingBlocksError,
    UnsupportedFeatureError,
)
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.core.logging import get_logger
from nesa_node.core.metrics import MetricSample
from nesa_node.engine.weights.checkpoint import Checkpoint, compute_model_id
from nesa_node.swarm.node import Swarm, swarm_samples
from nesa_node.swarm.protocol.messages import RowSlice, Want
from nesa_node.verification.agreement import AgreementHistory, AgreementRule
from nesa_node.verification.comparison import Measure

log = get_logger(__name__)

SCHEME = "relative-l2"


def read_deployment(file: DeploymentFile, checkpoint: Checkpoint) -> Deployment:
    """The deployment of a model.

    Raises `ConfigError` for a file that is missing, unreadable, or of another model.
    """
    deployment = file.read()
    model_id = compute_model_id(checkpoint)
    if deployment.model != model_id:
        raise ConfigError(
            f"{file.path} is a deployment of {deployment.model}, and the model here is {model_id}"
        )
    return deployment


class DeploymentSession(RedundantSession):
    """Its errors of missing blocks are about the model's blocks."""

    explaining: Callable[[], AbstractContextManager[None]] = nullcontext

    async def open(self) -> None:
        """See `RedundantSession.open`."""
        with self.explaining():
            await super().open()

    async def step(
        self, hidden_TD: torch.Tensor, rows: Sequence[RowSlice], *, want: Want = "all"
    ) -> torch.Tensor:
        """See `RedundantSession.step`."""
        with self.explaining():
            return await super().step(hidden_TD, rows, want=want)


class DeploymentConnection(SwarmConnection):
    """`SwarmConnection` to the members of one deployment."""

    def __init__(
        self,
        swarm: Swarm,
        file: DeploymentFile,
        deployment: Deployment,
        checkpoint: Checkpoint,
        options: ConnectionOptions,
        dtype: torch.dtype,
    ) -> None:
        self._members = MemberDirectory(file, swarm, checkpoint)
        self._swarm = replace(
            swarm, directory=self._members, failure_reporter=MemberReporter(self._members)
        )
        self._deployment = deployment
        self._checkpoint = checkpoint
        self._request = RouteRequest(
            model_id=ModelId(""),
            span=deployment.span,
            rows=1,
            max_tokens=1,
            hidden_size=int(checkpoint.config.hidden_size),
            dtype=DTYPE_NAMES[dtype],
            options=replace(options, routing="star", replicate_cache=False),
        )
        self._planner = ChainPlanner(self._swarm)
        self._metrics = SessionMetrics()
        self._rule = AgreementRule(
            copies=deployment.verifiers, needed=deployment.verifiers // 2 + 1, scheme=SCHEME
        )

    async def close(self) -> None:
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
    ) -> AsyncIterator[DeploymentSession]:
        """See `SwarmConnection.open_session`. Members get no digests of prefixes."""
        if adapter:
            raise _unsupported("adapters, which members would have to be sent")
        if span != self._deployment.span:
            raise _unsupported(f"sessions of some of its blocks only ({span})")
        request = replace(self._request, rows=rows, max_tokens=max_tokens)
        places = _Places(
            self._deployment, self._members, self._swarm, request, self._planner, self._metrics
        )
        session = DeploymentSession(
            self._list_parts(),
            self._rule,
            new_session=places.open,
            new_history=self._new_history,
            report_outvoted=self._report_outvoted,
            rows=rows,
            max_tokens=max_tokens,
        )
        self._metrics.open += 1
        try:
            session.explaining = self._explaining
            await session.open()
            yield session
        finally:
            self._metrics.open -= 1
            await session.close()

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Have errors of missing blocks say which ones of the model, and why members have none."""
        try:
            yield
        except MissingBlocksError as error:
            if not (reasons := self._members.reasons):
                raise
            places = sorted(reasons)
            missing = [self._deployment.splits[parse_place(each)[0]].blocks for each in places]
            reason = "; ".join(
                f"no member computes blocks {start}:{end} ({reasons[place]})"
                for place, (start, end) in zip(places, missing, strict=True)
            )
            raise MissingBlocksError(missing, reason) from error

    def _list_parts(self) -> list[ReplicatedSpan]:
        """Of each split its places, and a name for each member that may come into one later."""
        later = [frozenset({PeerId(f"later {at}")}) for at in range(len(self._deployment.members))]
        return [
            ReplicatedSpan(
                split.span,
                (
                    *(
                        frozenset({PeerId(place_name(at, copy))})
                        for copy in range(self._rule.copies)
                    ),
                    *later,
                ),
            )
            for at, split in enumerate(self._deployment.splits)
        ]

    def _new_history(self, span: Span, session: RemoteSession) -> AgreementHistory:
        family = str(self._checkpoint.config.model_type)
        allowed = find_allowed(family, span, session, SCHEME, "this deployment")
        return AgreementHistory(Measure(SCHEME, secrets.token_bytes(32)), allowed)

    async def _report_outvoted(
        self, peers: Sequence[PeerId], span: Span, session: bytes, reason: str
    ) -> None:
        for peer in peers:
            log.warning("member_barred", peer=peer, blocks=str(span), reason=reason)
            await self._members.bar(peer, reason)

    async def find_adapter(self, text: str) -> NoReturn:
        """Raise `UnsupportedFeatureError`."""
        raise _unsupported("adapters, which members would have to be sent")

    def open_training(self, *_: object, **__: object) -> NoReturn:
        """Raise `UnsupportedFeatureError`."""
        raise _unsupported("fine-tuning")

    @property
    def is_lost(self) -> bool:
        return self._swarm.transport.daemon_exited.is_set()

    def samples(self) -> Iterator[MetricSample]:
        yield from session_samples(self._deployment.model, self._metrics)
        yield from swarm_samples(self._swarm)


class _Places:
    """Opens one session's sessions with members, each of one place of the deployment."""

    def __init__(
        self,
        deployment: Deployment,
        members: MemberDirectory,
        swarm: Swarm,
        request: RouteRequest,
        planner: ChainPlanner,
        metrics: SessionMetrics,
    ) -> None:
        self._deployment = deployment
        self._members = members
        self._metrics = metrics
        self._swarm = swarm
        self._request = request
        self._planner = planner
        self._open: dict[ModelId, RemoteSession] = {}

    def open(self, span: Span, replica: Replica) -> RemoteSession:
        """A session of the named place, or of one of `span` that has none any more."""
        (name,) = replica
        split = next(at for at, each in enumerate(self._deployment.splits) if each.span == span)
        places = [place_name(split, copy) for copy in range(self._deployment.verifiers)]
        place = ModelId(name)
        if place not in places:
            place = next(each for each in places if not self._is_used(each))
        request = replace(
            self._request,
            model_id=place,
            span=Span(0, len(span)),
            num_blocks=len(span),
            find_name=partial(self._members.find_name, place),
        )
        session = self._open[place] = RemoteSession(
            self._swarm,
            request,
            self._planner,
            OpenLimiter(),
            rng=random.Random(),
            metrics=self._metrics,
        )
        return session

    def _is_used(self, place: ModelId) -> bool:
        session = self._open.get(place)
        return session is not None and not session.is_closed


def _unsupported(what: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(f"a private deployment serves no {what}: leave out deployment")


@asynccontextmanager
async def open_deployment_connection(
    checkpoint: Checkpoint, options: ConnectionOptions, dtype: torch.dtype
) -> AsyncIterator[DeploymentConnection]:
    """Connect to the members of `options.deployment`; no DHT is joined.

    Raises `ConfigError` as `read_deployment` does, and what `open_transport` raises.
    """
    assert options.deployment is not None
    file = DeploymentFile(options.deployment)
    deployment = await asyncio.to_thread(read_deployment, file, checkpoint)
    addresses = [address for each in deployment.members.values() for address in each]
    if deployment.identity_path is not None:
        options = replace(options, identity_path=Path(deployment.identity_path))
    async with open_owner_swarm(options, addresses) as swarm:
        connection = DeploymentConnection(swarm, file, deployment, checkpoint, options, dtype)
        try:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(swarm.transport.wait_until_lost())
                yield connection
                watching.cancel()
        finally:
            await connection.close()


@asynccontextmanager
async def open_owner_swarm(
    options: ConnectionOptions, addresses: Sequence[str]
) -> AsyncIterator[Swarm]:
    """A network of members at these addresses, which the owner gave; it is alone on its DHT.

    Under the owner's key, or where that is in use under a new one, from which members with
    --allow-peers take no shard. Raises what `open_client_swarm` raises.
    """
    alone = replace(options, initial_peers=())
    async with AsyncExitStack() as stack:
        # A member that is asked for a lost one's address would learn of that.
        open_swarm = partial(open_client_swarm, asks_for_addresses=False)
        try:
            swarm = await stack.enter_async_context(open_swarm(alone))
        except IdentityError as error:
            log.info("owner_key_not_used", reason=str(error))
            without = replace(alone, identity_path=None)
            swarm = await stack.enter_async_context(open_swarm(without))
        swarm.transport.initial_peer_addresses = tuple(addresses)
        yield swarm
