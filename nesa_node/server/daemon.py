"""Life of a daemon: join the swarm, serve one span after another, leave in order."""

from __future__ import annotations

import asyncio
import random
import resource
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

from nesa_node.core.config import NodeConfig, OrchestratorConfig, PeerConfig, secret_text
from nesa_node.core.errors import BootstrapError, PeerUnreachableError
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.core.metrics import Sources
from nesa_node.server.announcer import Announcer, NodeFacts
from nesa_node.server.ending import Ending, stop_signals
from nesa_node.server.executor import open_executor
from nesa_node.server.invitation import known_here, print_invitation, warn_of_other_copies
from nesa_node.server.metrics import about, about_model, about_node, keep_looking
from nesa_node.server.moves import Moves
from nesa_node.server.orchestrate import (
    Show,
    find_model,
    follow_placements,
    obedience_of,
    orchestrate,
)
from nesa_node.server.placement import count_blocks, look
from nesa_node.server.ready_file import check_ready_file, ready_facts, ready_file
from nesa_node.server.rebalance import rebalance
from nesa_node.server.scheduler import Scheduler, open_scheduler
from nesa_node.server.served import Served, open_served
from nesa_node.server.spans import Spans
from nesa_node.swarm.identity import Identity
from nesa_node.swarm.measuring import keep_measuring
from nesa_node.swarm.node import Swarm, open_swarm

log = get_logger(__name__)

WITHDRAW_TIMEOUT_S = 5.0
MAX_FILES = 1 << 16
JOIN_RETRY_S = 1.0
"""Interval between attempts to reach initial peers."""
JOIN_TOLD_EVERY_S = 10.0
"""Interval between log lines about those attempts."""

Beside = Callable[[Sequence[str]], Coroutine[Any, Any, None]]
"""Coroutine that runs beside a node, called with the node's addresses."""


async def run_bootstrap(config: PeerConfig, *, told: Sources | None = None) -> None:
    """Be a member of the DHT until SIGTERM or SIGINT. Raises `SwarmError` and `ConfigError`.

    `told` collects metric sources, here and below.
    """
    check_ready_file(config.ready_file)
    sources = told or Sources()
    with stop_signals() as stopping, suppress(_StoppedError):
        async with _joined(config, stopping) as swarm:
            with (
                ready_file(config.ready_file, ready_facts(swarm)),
                sources.adding(about(swarm, "bootstrap", sources.version)),
            ):
                log.info("bootstrap_ready", addresses=swarm.transport.addresses)
                print_invitation(config, swarm)
                await Ending(stopping, swarm).wait()


async def run_orchestrator(
    config: OrchestratorConfig, show: Show | None = None, *, told: Sources | None = None
) -> None:
    """Plan for a swarm until SIGTERM or SIGINT. Raises `SwarmError` and `ConfigError`.

    `show` is called with the history as soon as there is one.
    """
    check_ready_file(config.ready_file)
    sources = told or Sources()
    with stop_signals() as stopping, suppress(_StoppedError):
        async with _joined(config, stopping) as swarm:

            async def plan() -> None:
                model_id = await find_model(swarm, config.model)
                with sources.adding(about_model(swarm, model_id)):
                    await orchestrate(config, swarm, model_id, show=show, told=sources)

            with (
                ready_file(config.ready_file, ready_facts(swarm)),
                sources.adding(about(swarm, "orchestrator", sources.version)),
            ):
                await Ending(stopping, swarm).unless(plan())


async def run_node(
    config: NodeConfig,
    show: Show | None = None,
    *,
    told: Sources | None = None,
    beside: Beside | None = None,
) -> None:
    """Serve a span of a model until SIGTERM or SIGINT, then drain, withdraw and return.

    `show` is called with the history of an orchestrator in this process. `beside` runs while the
    node can be reached at the addresses given to it. Raises as `serve_node` does.
    """
    with stop_signals() as stopping, suppress(_StoppedError):
        await serve_node(config, stopping, show=show, told=told, beside=beside)


async def serve_node(
    config: NodeConfig,
    stopping: asyncio.Event,
    moves: Moves | None = None,
    show: Show | None = None,
    *,
    told: Sources | None = None,
    beside: Beside | None = None,
) -> None:
    """Serve a span of a model until `stopping` is set, and other spans as `moves` grants requests.

    Without `moves` only this node's own rules request moves. Raises `ConfigError`, `ModelError`,
    `ResourceError` and `SwarmError`.
    """
    check_ready_file(config.ready_file)
    served = await asyncio.to_thread(open_served, config)
    # Checked before joining, so that an impossible request fails at once.
    blocks = await asyncio.to_thread(count_blocks, config, served)
    async with (
        _joined(config, stopping) as swarm,
        open_executor() as executor,
        open_scheduler(executor) as scheduler,
    ):
        facts = _node_facts(config, served, blocks)
        moves = moves or moves_of(config)
        with known_here(config, swarm.transport.addresses, served.model_id):
            async with _running(beside, swarm):
                await _serve(config, served, facts, swarm, scheduler, stopping, moves, show, told)


class _StoppedError(Exception):
    """The daemon was stopped before it joined."""


@asynccontextmanager
async def _joined(config: PeerConfig, stopping: asyncio.Event) -> AsyncIterator[Swarm]:
    """Join the swarm, retrying for `join_timeout_s` while no initial peer answers: machines of a
    swarm that start together do not listen at the same moment.

    Raises `_StoppedError`, `BootstrapError` and the other errors of `open_swarm`.
    """
    _allow_many_files()
    identity = Identity.load_or_create(config.identity_path)
    told_at = time.monotonic()
    deadline = told_at + config.join_timeout_s
    async with AsyncExitStack() as stack:
        async with _ended_by(stopping):
            while True:
                try:
                    swarm = await stack.enter_async_context(_open_swarm(config, identity))
                    break
                except BootstrapError as error:
                    now = time.monotonic()
                    if now >= deadline:
                        raise
                    if now >= told_at:
                        told_at = now + JOIN_TOLD_EVERY_S
                        still_s = round(deadline - now)
                        log.warning("initial_peers_awaited", still_s=still_s, reason=str(error))
                await asyncio.sleep(JOIN_RETRY_S)
            await swarm.transport.refresh_addresses()
        log.info("swarm_joined", peer_id=identity.peer_id, addresses=swarm.transport.addresses)
        yield swarm


@asynccontextmanager
async def _ended_by(stopping: asyncio.Event) -> AsyncIterator[None]:
    """Cancel the body as soon as `stopping` is set, then raise `_StoppedError`."""
    at_once = asyncio.get_running_loop().time()

    async def watch() -> None:
        await stopping.wait()
        limit.reschedule(at_once)

    try:
        async with asyncio.timeout(None) as limit:
            watching = asyncio.create_task(watch())
            try:
                yield
            finally:
                watching.cancel()
    except TimeoutError:
        if limit.expired():
            raise _StoppedError from None
        raise


def _open_swarm(config: PeerConfig, identity: Identity) -> AbstractAsyncContextManager[Swarm]:
    return open_swarm(
        identity,
        host_maddrs=config.host_maddrs,
        announce_maddrs=config.announce_maddrs,
        initial_peers=config.initial_peers,
        nat_port_map=config.nat_port_map,
        auto_nat=config.auto_nat,
        relay=config.relay,
        swarm_key=secret_text(config.swarm_key),
        record_ttl_s=config.record_ttl_s,
    )


def _allow_many_files() -> None:
    """Raise the file limit: each stream is an open file, and the usual 1,024 are few for a node."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if most == resource.RLIM_INFINITY else min(most, MAX_FILES)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


async def _serve(
    config: NodeConfig,
    served: Served,
    facts: NodeFacts,
    swarm: Swarm,
    scheduler: Scheduler,
    stopping: asyncio.Event,
    moves: Moves,
    show: Show | None,
    told: Sources | None,
) -> None:
    announcer = Announcer(
        swarm.directory,
        facts,
        swarm.speeds.sent_bytes,
        lambda: swarm.distances.measured(swarm.speeds),
    )
    announcer.movable = lambda: moves.refusal is None
    spans = Spans(
        config=config,
        served=served,
        swarm=swarm,
        scheduler=scheduler,
        announcer=announcer,
        moves=moves,
        ending=Ending(stopping, swarm),
    )
    peer_id = PeerId(swarm.identity.peer_id)
    measuring = keep_measuring(
        swarm,
        served.model_id,
        facts.num_blocks,
        random.Random(peer_id),
        ping_every_s=config.ping_every_s,
    )
    swarm.directory.know_blocks(served.model_id, facts.num_blocks)
    background = [asyncio.create_task(announcer.run()), asyncio.create_task(measuring)]
    looking = warn_of_other_copies(swarm.directory, served.model_id)
    background.append(asyncio.create_task(looking))
    obedience = obedience_of(
        config, peer_id, num_blocks=facts.num_blocks, max_blocks=facts.max_blocks
    )
    if not moves.pinned:
        watching = rebalance(
            partial(look, served, swarm),
            peer_id,
            moves,
            every_s=config.rebalance_every_s,
            rng=random.Random(),
        )
        background.append(asyncio.create_task(watching))
        following = follow_placements(
            config, swarm, served.model_id, obedience, moves, num_blocks=facts.num_blocks
        )
        background.append(asyncio.create_task(following))
    if config.orchestrator:
        planning = orchestrate(
            config, swarm, served.model_id, liars=obedience.liars, show=show, told=told
        )
        background.append(asyncio.create_task(planning))
    of_model = (swarm, served.model_id, facts.num_blocks)
    if told is not None:
        background.append(asyncio.create_task(keep_looking(*of_model)))
    sources = told or Sources()
    try:
        with sources.adding(
            about(swarm, "node", sources.version), about_model(*of_model), about_node(spans)
        ):
            await spans.run()
    finally:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await _withdraw(swarm)


@asynccontextmanager
async def _running(beside: Beside | None, swarm: Swarm) -> AsyncIterator[None]:
    if beside is None:
        yield
        return
    running = asyncio.create_task(beside(swarm.transport.addresses))
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def moves_of(config: NodeConfig) -> Moves:
    """A move limiter with the operator's limits."""
    return Moves(
        per_hour=config.max_moves_per_hour,
        pause_s=config.move_pause_s,
        pinned=config.block_indices is not None,
    )


async def _withdraw(swarm: Swarm) -> None:
    try:
        async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
            await swarm.directory.withdraw()
    except TimeoutError:
        log.warning("record_not_withdrawn", reason="no DHT member answered; the record will expire")
    except PeerUnreachableError as error:
        # Raised by this node's own p2pd. The error that ended the daemon is reported instead.
        log.warning("record_not_withdrawn", reason=str(error))


def _node_facts(config: NodeConfig, served: Served, max_blocks: int) -> NodeFacts:
    return NodeFacts(
        model_id=served.model_id,
        model_name=served.checkpoint.name,
        num_blocks=served.checkpoint.num_blocks,
        context_length=served.checkpoint.context_length,
        dtype=served.dtype,
        quant_type=served.quant_type,
        device=served.device,
        public_name=config.public_name,
        max_blocks=max_blocks,
        location=config.location,
    )
