"""What an owner does with a deployment: place shards, change their ids and members, end it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from nesa_node.client.deployment.deployment_connection import SCHEME
from nesa_node.client.deployment.deployment_file import (
    Deployment,
    DeploymentFile,
    PlacedShard,
    Split,
    already_there,
)
from nesa_node.client.deployment.member_directory import (
    drop_left,
    drop_shard,
    new_shard_id,
    place_name,
)
from nesa_node.client.deployment.shard_requests import ShardRequests
from nesa_node.core.errors import (
    ConfigError,
    NesaError,
    PeerUnreachableError,
    ProtocolError,
)
from nesa_node.core.ids import ModelId, PeerId, Span, split_evenly
from nesa_node.engine.weights.checkpoint import Checkpoint
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.dial_addresses import resolve_peer_ids
from nesa_node.swarm.protocol.shard_messages import ShardHeld
from nesa_node.verification.comparison import ComputationKind, find_threshold

PUTS_AT_ONCE = 4
Report = Callable[[str], None]
"""Gets a line about each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentPlan:
    """What is to be placed where."""

    model: ModelId
    addresses: tuple[str, ...]
    """Of the members."""
    splits: int
    verifiers: int
    client_blocks: tuple[int, int]
    cache_tokens: int
    dtype: Literal["float32", "bfloat16", "float16"]
    identity_path: str | None = None

    def cut(self, num_blocks: int) -> list[Span]:
        """The spans of the splits. Raises `ConfigError`."""
        first, last = self.client_blocks
        if first < 1 or last < 1:
            raise ConfigError(
                f"--client-blocks {first},{last}: at least the first and the last block stay here, "
                "or a member would get embeddings, or what the head makes text of"
            )
        inner = num_blocks - first - last
        if inner < self.splits:
            raise ConfigError(
                f"{num_blocks} blocks, less {first} and {last} of this machine, are too few for "
                f"{self.splits} splits"
            )
        return [
            Span(first + span.start, first + span.end) for span in split_evenly(inner, self.splits)
        ]


async def deploy(
    plan: DeploymentPlan,
    checkpoint: Checkpoint,
    file: DeploymentFile,
    swarm: Swarm,
    report: Report,
) -> Deployment:
    """Send shards to members in random order, and write the file.

    Where a member takes none, a spare gets its shard. Raises `ConfigError` for a plan that is not
    possible and a file that is there already; the errors of a member, when no spare is left, after
    the shards that were sent are withdrawn.
    """
    spans = plan.cut(checkpoint.num_blocks)
    if plan.verifiers > 1:
        _require_bounds(plan, checkpoint, spans)
    if file.path.exists():
        raise already_there(file.path)
    members = await _find_members(plan.addresses)
    needed = plan.splits * plan.verifiers
    if len(members) < needed:
        raise ConfigError(
            f"{plan.splits} splits of {plan.verifiers} verifiers need {needed} members, and "
            f"{len(members)} were given: more --to, fewer --splits or --verifiers"
        )
    order = list(members)
    random.SystemRandom().shuffle(order)
    requests = ShardRequests(swarm, members)
    sent: list[PlacedShard] = []
    turns = asyncio.Semaphore(PUTS_AT_ONCE)

    async def place(span: Span) -> PlacedShard:
        while True:
            shard = PlacedShard(peer=order.pop(), id=new_shard_id())
            sent.append(shard)
            try:
                async with turns:
                    held, nbytes = await requests.put(
                        shard.peer, shard.id, checkpoint, span, plan.dtype, plan.cache_tokens
                    )
            except (PeerUnreachableError, ProtocolError) as error:
                report(f"{shard.peer} takes no shard: {error}")
                if not order:
                    raise
            else:
                report(_describe(shard.peer, span, held, nbytes))
                return shard

    places = [span for span in spans for _ in range(plan.verifiers)]
    try:
        async with asyncio.TaskGroup() as tasks:
            placing = [tasks.create_task(place(span)) for span in places]
        shards = [task.result() for task in placing]
        deployment = Deployment(
            model=plan.model,
            dtype=plan.dtype,
            cache_tokens=plan.cache_tokens,
            client_blocks=plan.client_blocks,
            members=members,
            identity_path=plan.identity_path,
            splits=tuple(
                Split(
                    blocks=(span.start, span.end),
                    shards=tuple(shards[at * plan.verifiers : (at + 1) * plan.verifiers]),
                )
                for at, span in enumerate(spans)
            ),
        )
        await asyncio.to_thread(file.create, deployment)
    except BaseException as error:
        await asyncio.gather(*(drop_shard(requests, shard) for shard in sent))
        if isinstance(error, BaseExceptionGroup):
            raise error.exceptions[0] from None
        raise
    return deployment


def _require_bounds(plan: DeploymentPlan, checkpoint: Checkpoint, spans: Sequence[Span]) -> None:
    """Members could not be compared without: an error before they are sent anything."""
    kind = ComputationKind(str(checkpoint.config.model_type), plan.dtype, "none", "cpu")
    for span in spans:
        if find_threshold(kind, len(span), SCHEME) is None:
            raise ConfigError(
                f"--verifiers {plan.verifiers}: no bound was fitted for how much honest members "
                f"differ over {len(span)} blocks of {kind.family} in {kind.dtype}: leave it "
                "out, or give --dtype float32 or bfloat16 of a Llama, and more --splits"
            )


async def rotate(file: DeploymentFile, swarm: Swarm, report: Report) -> None:
    """Give all shards new ids; open sessions go on. Lost members keep theirs."""
    for place, shard in _list_places(file.read()):
        requests = ShardRequests(swarm, file.read().members)
        with file.place_lock(place_name(*place)):
            if file.read().shard(*place) != shard:
                continue  # A client has replaced its member.
            new = PlacedShard(peer=shard.peer, id=new_shard_id())
            try:
                await requests.rename(shard.peer, shard.id, new.id)
            except NesaError as error:
                report(f"{shard.peer} keeps its id: {error}")
                continue
            _put_in_place(file, place, new)
        await drop_left(file, requests, shard.peer)
        report(f"{shard.peer} has a new id")


async def move(file: DeploymentFile, checkpoint: Checkpoint, swarm: Swarm, report: Report) -> None:
    """Send each shard to another member, a spare; the one before becomes one. Sessions go on there.

    Raises `ConfigError` without a spare.
    """
    listed = _list_places(file.read())
    random.SystemRandom().shuffle(listed)
    for place, shard in listed:
        with file.place_lock(place_name(*place)):
            deployment = file.read()
            if deployment.shard(*place) != shard:
                continue  # A client has replaced its member.
            if not deployment.spares:
                raise ConfigError(
                    f"all {len(deployment.members)} members hold a shard: moving needs a spare one"
                )
            requests = ShardRequests(swarm, deployment.members)
            span = deployment.splits[place[0]].span
            peer = random.SystemRandom().choice(deployment.spares)
            new = PlacedShard(peer=peer, id=new_shard_id())
            await drop_left(file, requests, new.peer)
            try:
                held, nbytes = await requests.put(
                    new.peer, new.id, checkpoint, span, deployment.dtype, deployment.cache_tokens
                )
            except (PeerUnreachableError, ProtocolError) as error:
                report(f"{new.peer} takes no shard: {error}")
                await drop_shard(requests, new)
                continue
            _put_in_place(file, place, new)
        report(_describe(new.peer, span, held, nbytes))
        await drop_left(file, requests, shard.peer)


async def withdraw(file: DeploymentFile, swarm: Swarm, report: Report) -> None:
    """Delete the file, and have all members forget their shards."""
    deployment = await asyncio.to_thread(file.take)
    requests = ShardRequests(swarm, deployment.members)
    for shard in (*deployment.shards, *deployment.left):
        if await drop_shard(requests, shard):
            report(f"{shard.peer} holds its shard no more")
        else:
            report(f"{shard.peer} did not answer: it drops what it holds after a day without use")


def _list_places(deployment: Deployment) -> list[tuple[tuple[int, int], PlacedShard]]:
    return [
        ((at, copy), shard)
        for at, split in enumerate(deployment.splits)
        for copy, shard in enumerate(split.shards)
    ]


def _put_in_place(file: DeploymentFile, place: tuple[int, int], new: PlacedShard) -> None:
    file.update(lambda deployment: deployment.with_shard(*place, new))


async def _find_members(addresses: Sequence[str]) -> dict[PeerId, tuple[str, ...]]:
    members: dict[PeerId, tuple[str, ...]] = {}
    for address in await resolve_peer_ids(addresses):
        peer = PeerId(address.rpartition("/p2p/")[2])
        members[peer] = (*members.get(peer, ()), address)
    return members


def _describe(peer: PeerId, span: Span, held: ShardHeld, nbytes: int) -> str:
    speed = f"{held.decode_tokens_per_s:.0f} tokens/s"
    return f"{peer} holds {len(span)} blocks, {nbytes >> 20} MiB, {speed}"
