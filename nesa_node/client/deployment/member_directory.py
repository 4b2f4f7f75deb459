"""Members of a deployment in place of the nodes on a DHT.

A session's model is a place in the deployment there, such as "0.1": replica 1 of split 0. Which
member holds it changes; where one is lost, a spare gets the shard from here.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from nesa_node.client.deployment.deployment_file import Deployment, DeploymentFile, PlacedShard
from nesa_node.client.deployment.shard_requests import ShardRequests
from nesa_node.core.errors import (
    BusyError,
    NesaError,
    PeerUnreachableError,
    ProtocolError,
    RemoteError,
)
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.core.logging import get_logger
from nesa_node.core.wait_tracking import track_wait
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.swarm.dht.records import NodeRecord
from nesa_node.swarm.dht.sealing import FailureKind
from nesa_node.swarm.directory import Directory
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.protocol.shard_messages import ShardHeld
from nesa_node.swarm.reputation import FailureReporter
from nesa_node.topology.links.matrix import MeasuredLink
from nesa_node.topology.snapshot import NodeState, Snapshot

log = get_logger(__name__)

MAX_FAILURES = 3
FAILURE_S = 600.0
"""So many failures in sessions of a member that answers, in such a time; then a spare gets its
shard."""
BUSY_RETRIES = 20


def new_shard_id() -> str:
    """128 random bits."""
    return secrets.token_hex(16)


def place_name(split: int, replica: int) -> ModelId:
    return ModelId(f"{split}.{replica}")


@dataclass(frozen=True, slots=True)
class _Found:
    shard: PlacedShard
    node: NodeState


class MemberDirectory(Directory):
    """What sessions ask of a `Directory`, answered by the deployment's file and its members.

    Nothing is looked up or published anywhere.
    """

    def __init__(self, file: DeploymentFile, swarm: Swarm, checkpoint: Checkpoint) -> None:
        # Not Directory's: there are no records.
        self._file = file
        self._swarm = swarm
        self._checkpoint = checkpoint
        self._found: dict[ModelId, _Found] = {}
        self._locks: dict[ModelId, asyncio.Lock] = {}
        self.reasons: dict[ModelId, str] = {}
        """Why places have no member."""
        self._has_failed: set[tuple[ModelId, PeerId]] = set()
        """Members that failed in sessions of a place since they were asked."""
        self._failed_at: defaultdict[tuple[ModelId, PeerId], list[float]] = defaultdict(list)
        """When members had failed that answered then."""

    def find_name(self, place: ModelId, peer: PeerId) -> ModelId:
        """The id by which a member knows a place's shard.

        Raises `PeerUnreachableError` where another one has it by now.
        """
        found = self._found.get(place)
        if found is None or found.shard.peer != peer:
            raise PeerUnreachableError(f"{peer} holds this shard no more")
        return ModelId(found.shard.id)

    async def fetch(
        self, model_id: ModelId, num_blocks: int | None = None, *, reports: bool = True
    ) -> Snapshot:
        """Ask the member of a place; a spare gets its shard where it holds it no more."""
        async with self._locks.setdefault(model_id, asyncio.Lock()):
            found = await self._find(model_id)
            if found is None:
                self._found.pop(model_id, None)
            else:
                self._found[model_id] = found
                self.reasons.pop(model_id, None)
        return self.snapshot(model_id)

    async def _find(self, place: ModelId) -> _Found | None:
        deployment = await asyncio.to_thread(self._file.read)
        shard = deployment.shard(*parse_place(place))
        if (reason := self._bar_reason(deployment, place, shard.peer)) is None:
            try:
                found = await self._ask(deployment, place, shard)
            except (PeerUnreachableError, ProtocolError) as error:
                self._has_failed.discard((place, shard.peer))
                reason = str(error)
            else:
                self._note_answer(place, shard.peer)
                if (reason := self._bar_reason(deployment, place, shard.peer)) is None:
                    return found
        if place not in self.reasons:  # Sessions look again and again.
            log.warning("member_lost", peer=shard.peer, reason=reason)
        self.reasons[place] = f"{shard.peer}: {reason}"
        # One client of the owner at a time: the next one finds what this one did.
        lock = self._file.place_lock(place)
        await asyncio.to_thread(lock.acquire)
        try:
            return await self._replace(place, shard)
        finally:
            lock.release()

    def _bar_reason(self, deployment: Deployment, place: ModelId, peer: PeerId) -> str | None:
        since = time.monotonic() - FAILURE_S
        if sum(at > since for at in self._failed_at[place, peer]) >= MAX_FAILURES:
            return "it answers, and sessions fail there"
        return deployment.barred.get(peer)

    def note_failure(self, place: ModelId, peer: PeerId) -> None:
        """Note that a session failed at a member."""
        self._has_failed.add((place, peer))

    def _note_answer(self, place: ModelId, peer: PeerId) -> None:
        if (place, peer) in self._has_failed:
            self._has_failed.discard((place, peer))
            self._failed_at[place, peer].append(time.monotonic())

    async def _ask(self, deployment: Deployment, place: ModelId, shard: PlacedShard) -> _Found:
        requests = ShardRequests(self._swarm, deployment.members)
        held = await requests.query(shard.peer, shard.id)
        return _Found(shard, _describe(deployment, place, shard, held))

    async def _replace(self, place: ModelId, lost: PlacedShard) -> _Found | None:
        """Send the shard to a member that was started again, or to the first spare that takes it.

        The file names a member once it has its shard.
        """
        deployment = await asyncio.to_thread(self._file.read)
        current = deployment.shard(*parse_place(place))
        if current != lost:  # Another client replaced it.
            return await self._ask(deployment, place, current)
        candidates = deployment.spares
        if self._bar_reason(deployment, place, lost.peer) is None:
            candidates = (lost.peer, *candidates)
        for peer in candidates:
            if self._bar_reason(deployment, place, peer) is not None:
                continue
            try:
                return await self._send(deployment, place, lost, peer)
            except (PeerUnreachableError, ProtocolError) as error:
                log.info("spare_not_usable", peer=peer, reason=str(error))
                if peer != lost.peer:
                    self.reasons[place] += f"; {peer}: {error}"
        log.info("no_spare_left", blocks=str(deployment.splits[parse_place(place)[0]].span))
        self.reasons[place] += "; no spare is left"
        return None

    async def _send(
        self, deployment: Deployment, place: ModelId, lost: PlacedShard, peer: PeerId
    ) -> _Found:
        requests = ShardRequests(self._swarm, deployment.members)
        # Where it holds the shard all the same, it was busy, or could not be reached for a moment.
        if peer == lost.peer and (held := await self._query_patiently(requests, lost)) is not None:
            return _Found(lost, _describe(deployment, place, lost, held))
        await drop_left(self._file, requests, peer)
        new = PlacedShard(peer=peer, id=new_shard_id())
        span = deployment.splits[parse_place(place)[0]].span
        with track_wait("a member to get a shard", blocks=(span,), peers=(peer,)):
            held, _ = await requests.put(
                peer,
                new.id,
                self._checkpoint,
                span,
                deployment.dtype,
                deployment.cache_tokens,
            )
        changed = await asyncio.to_thread(
            self._file.update, lambda now: now.with_shard(*parse_place(place), new)
        )
        await drop_left(self._file, requests, lost.peer)
        return _Found(new, _describe(changed, place, new, held))

    async def _query_patiently(
        self, requests: ShardRequests, shard: PlacedShard
    ) -> ShardHeld | None:
        """None where the member holds no such shard."""
        for _ in range(BUSY_RETRIES):
            try:
                return await requests.query(shard.peer, shard.id)
            except BusyError as error:
                await asyncio.sleep(error.retry_after_s)
            except RemoteError as error:
                if error.code == "unknown_shard":
                    return None
                raise
        raise PeerUnreachableError(f"{shard.peer} is busy")

    async def bar(self, peer: PeerId, reason: str) -> None:
        """Use a member no more, if it holds a shard now."""
        places = [each for each, found in self._found.items() if found.shard.peer == peer]
        if not places:
            return
        await asyncio.to_thread(self._file.update, lambda now: now.with_barred(peer, reason))
        for place in places:
            self._found.pop(place, None)

    def set_num_blocks(self, model_id: ModelId, num_blocks: int) -> None:
        """Nothing: the deployment has no other number."""

    async def fetch_one(self, model_id: ModelId, *, members: int = 1) -> None:
        """Nothing: `fetch` asks the one member that there is."""

    async def try_fetch_one(self, model_id: ModelId) -> bool:
        """Whether the place's member was found before."""
        return model_id in self._found

    def snapshot(self, model_id: ModelId, num_blocks: int | None = None) -> Snapshot:
        """The place's member, if it was found."""
        found = self._found.get(model_id)
        nodes = () if found is None else (found.node,)
        blocks = num_blocks or (0 if found is None else found.node.span.end)
        return Snapshot(model_id, blocks, nodes, time.time())

    def record(self, peer: PeerId) -> NodeRecord | None:
        """None: members publish no records."""
        return None

    def addresses(self, model_id: ModelId, num_blocks: int) -> dict[PeerId, tuple[str, ...]]:
        return {node.peer_id: node.addresses for node in self.snapshot(model_id).nodes}

    def blames(self, model_id: ModelId) -> Mapping[PeerId, float]:
        """Nothing: no reports are read."""
        return {}

    def speed_doubts(self, model_id: ModelId) -> Mapping[PeerId, float]:
        """Nothing: no reports are read."""
        return {}

    def measured_links(self, snapshot: Snapshot) -> dict[PeerId, tuple[MeasuredLink, ...]]:
        """Nothing: members do not know each other."""
        return {node.peer_id: () for node in snapshot.nodes}

    async def fetch_all(self) -> list[NodeRecord]:
        """Nothing: members publish no records."""
        return []


class MemberReporter(FailureReporter):
    """Counts failures of members for a `MemberDirectory`; none is published."""

    def __init__(self, directory: MemberDirectory) -> None:
        # Not FailureReporter's: there are no reports.
        self._directory = directory

    def record_failure(self, model_id: ModelId, peer: PeerId, kind: FailureKind) -> None:
        """Count a failure of `peer` in the place `model_id`."""
        if kind != "slow":
            self._directory.note_failure(model_id, peer)


async def drop_left(file: DeploymentFile, requests: ShardRequests, peer: PeerId) -> None:
    """Have a member drop shards of earlier, if it answers."""
    for shard in (await asyncio.to_thread(file.read)).left:
        if shard.peer == peer and await drop_shard(requests, shard):
            await asyncio.to_thread(file.update, partial(_forget, shard))


async def drop_shard(requests: ShardRequests, shard: PlacedShard) -> bool:
    """Have a member drop a shard. Whether it says that it holds it no more."""
    try:
        await requests.drop(shard.peer, shard.id)
    except NesaError as error:
        if isinstance(error, RemoteError) and error.code == "unknown_shard":
            return True
        log.info("shard_not_dropped", peer=shard.peer, reason=str(error))
        return False
    return True


def _forget(shard: PlacedShard, deployment: Deployment) -> Deployment:
    return deployment.without_left(shard)


def parse_place(name: ModelId) -> tuple[int, int]:
    """Split and replica of what `place_name` made."""
    split, replica = map(int, name.split("."))
    return split, replica


def _describe(
    deployment: Deployment, place: ModelId, shard: PlacedShard, held: ShardHeld
) -> NodeState:
    return NodeState(
        shard.peer,
        Span(0, len(deployment.splits[parse_place(place)[0]].span)),
        dtype=deployment.dtype,
        prefill_tokens_per_s=held.prefill_tokens_per_s,
        decode_tokens_per_s=held.decode_tokens_per_s,
        free_cache_tokens=held.free_cache_tokens,
        total_cache_tokens=held.total_cache_tokens,
        addresses=deployment.members[shard.peer],
    )
