"""Life of a daemon: join the swarm, serve one span after another, leave in order."""

from __future__ import annotations

import asyncio
import random
import resource
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from functools import partial
from typing import Any

from nesa_node.core.errors import BootstrapError, PeerUnreachableError
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.core.logging import get_logger
from nesa_node.core.metrics import MetricRegistry
from nesa_node.core.settings.declaration import gib_to_bytes, secret_text
from nesa_node.core.settings.models import NodeConfig, OrchestratorConfig, PeerConfig
from nesa_node.engine.model.machine_figures import find_roofline
from nesa_node.engine.weights.adapter_files import find_linear_layers
from nesa_node.engine.weights.hub import ADAPTERS_FOLDER
from nesa_node.privacy.native_ring import make_ring
from nesa_node.privacy.parameters import RingParameters
from nesa_node.server.adapters.adapter_server import AdapterServer
from nesa_node.server.adapters.store import AdapterStore
from nesa_node.server.attestation.attestation_server import AttestationServer
from nesa_node.server.attestation.quote_sources import QuoteSource, make_quote_source
from nesa_node.server.evidence.opening_server import OpeningServer
from nesa_node.server.graphs.graph_model import GraphModel, adopt_plan
from nesa_node.server.graphs.graph_span import open_graph_span
from nesa_node.server.node.announcer import Announcer, NodeFacts
from nesa_node.server.node.invitation import (
    check_ready_file,
    print_invitation,
    ready_file,
    ready_file_fields,
    register_known_swarm,
    warn_of_other_copies,
)
from nesa_node.server.node.metrics import (
    daemon_source,
    model_source,
    node_source,
    refresh_directory,
)
from nesa_node.server.node.move_limiter import MoveLimiter, fill_holes
from nesa_node.server.node.node_model import DecoderModel, NodeModel
from nesa_node.server.node.served_span import ServedSpan, open_span
from nesa_node.server.node.shutdown import Shutdown, stop_on_stdin_end, stop_signals
from nesa_node.server.node.span_choice import open_node_model
from nesa_node.server.node.span_runner import SpanRunner
from nesa_node.server.orchestrator.launch import (
    OnHistory,
    find_model,
    make_placement_filter,
    orchestrate,
    run_follower,
)
from nesa_node.server.private.encoded_blocks import SCHEMES, PrivateBlocks
from nesa_node.server.private.private_server import PrivateServer
from nesa_node.server.scheduler.batch import open_executor
from nesa_node.server.scheduler.scheduler import open_scheduler
from nesa_node.server.session.message_loop import RefusalLog
from nesa_node.swarm.evidence import EvidenceExchange, Proof
from nesa_node.swarm.node import Swarm, open_swarm, probe_rtts
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.swarm.p2p.tasks import running_in_background
from nesa_node.swarm.protocol.adapter_messages import ADAPTER_PROTOCOL
from nesa_node.swarm.protocol.attest_messages import ATTEST_PROTOCOL
from nesa_node.swarm.protocol.graph_messages import GRAPH_PROTOCOL
from nesa_node.swarm.protocol.messages import PROTOCOL
from nesa_node.swarm.protocol.private_messages import PRIVATE_PROTOCOL
from nesa_node.swarm.protocol.seal_messages import EVIDENCE_PROTOCOL
from nesa_node.topology.roofline import Roofline

log = get_logger(__name__)

WITHDRAW_TIMEOUT_S = 5.0
MAX_FILES = 1 << 16
JOIN_RETRY_S = 1.0
"""Interval between attempts to reach initial peers."""
JOIN_LOG_INTERVAL_S = 10.0
"""Interval between log lines about those attempts."""

SideTask = Callable[[Sequence[str]], Coroutine[Any, Any, None]]
"""Coroutine that runs beside a node, called with the node's addresses."""


async def run_bootstrap(
    config: PeerConfig, *, metric_sources: MetricRegistry | None = None
) -> None:
    """Be a member of the DHT until SIGTERM or SIGINT. Raises `SwarmError` and `ConfigError`.

    `metric_sources` collects metric sources, here and below.
    """
    check_ready_file(config.ready_file)
    sources = metric_sources or MetricRegistry()
    with stop_signals() as stopping, suppress(StoppedError):
        async with join_swarm(config, stopping) as swarm:
            with (
                ready_file(config.ready_file, ready_file_fields(swarm)),
                sources.registered(daemon_source(swarm, "bootstrap", sources.version)),
            ):
                log.info("bootstrap_ready", addresses=swarm.transport.addresses)
                print_invitation(config, swarm)
                await Shutdown(stopping, swarm.transport).wait()


async def run_orchestrator(
    config: OrchestratorConfig,
    on_history: OnHistory | None = None,
    *,
    metric_sources: MetricRegistry | None = None,
) -> None:
    """Plan for a swarm until SIGTERM or SIGINT. Raises `SwarmError` and `ConfigError`.

    `on_history` is called with the history as soon as there is one.
    """
    check_ready_file(config.ready_file)
    sources = metric_sources or MetricRegistry()
    with stop_signals() as stopping, suppress(StoppedError):
        async with join_swarm(config, stopping) as swarm:

            async def plan() -> None:
                model_id = await find_model(swarm, config.model)
                with sources.registered(model_source(swarm, model_id)):
                    await orchestrate(
                        config, swarm, model_id, on_history=on_history, metric_sources=sources
                    )

            with (
                ready_file(config.ready_file, ready_file_fields(swarm)),
                sources.registered(daemon_source(swarm, "orchestrator", sources.version)),
            ):
                await Shutdown(stopping, swarm.transport).run_until_shutdown(plan())


async def run_node(
    config: NodeConfig,
    on_history: OnHistory | None = None,
    *,
    metric_sources: MetricRegistry | None = None,
    side_task: SideTask | None = None,
    while_stdin: bool = False,
) -> None:
    """Serve a span of a model until SIGTERM or SIGINT, then drain, withdraw and return.

    With `while_stdin` the end of standard input ends it, too.

    `on_history` is called with the history of an orchestrator in this process. `side_task` runs
    while the node can be reached at the addresses given to it. Raises as `serve_node` does.
    """
    with (
        stop_signals() as stopping,
        stop_on_stdin_end(stopping) if while_stdin else nullcontext(),
        suppress(StoppedError),
    ):
        await serve_node(
            config,
            stopping,
            on_history=on_history,
            metric_sources=metric_sources,
            side_task=side_task,
        )


async def serve_node(
    config: NodeConfig,
    stopping: asyncio.Event,
    move_limiter: MoveLimiter | None = None,
    on_history: OnHistory | None = None,
    *,
    metric_sources: MetricRegistry | None = None,
    side_task: SideTask | None = None,
) -> None:
    """Serve a span of a model until `stopping` is set, and other spans as `move_limiter` grants
    requests.

    Without `move_limiter` only this node's own rules request moves. Raises `ConfigError`,
    `ModelError`, `ResourceError` and `SwarmError`.
    """
    check_ready_file(config.ready_file)
    quotes = await asyncio.to_thread(
        make_quote_source, config.attestation, config.attestation_command
    )
    served = await asyncio.to_thread(open_node_model, config)
    if quotes is not None:
        served.checkpoint.read_digests = {}
    # Checked before joining, so that an impossible request fails at once.
    blocks = await asyncio.to_thread(served.count_blocks, config)
    async with (
        join_swarm(config, stopping) as swarm,
        open_executor() as executor,
        open_scheduler(executor) as scheduler,
    ):
        if isinstance(served, GraphModel):
            served = await adopt_plan(config, served, swarm)
            blocks = await asyncio.to_thread(served.count_blocks, config)
        move_limiter = move_limiter or make_move_limiter(config)
        roofline = await asyncio.to_thread(_find_roofline, config, served)
        refusals = RefusalLog()
        adapters = None
        opening: Callable[[Span], AbstractAsyncContextManager[ServedSpan]]
        if isinstance(served, GraphModel):
            opening = partial(open_graph_span, config, served, swarm, scheduler, refusals=refusals)
        else:
            adapters = _make_adapter_server(config, served, swarm, refusals)
            opening = partial(
                open_span, config, served, swarm, scheduler, adapters=adapters, refusals=refusals
            )
        runner = SpanRunner(
            config=config,
            served=served,
            swarm=swarm,
            scheduler=scheduler,
            announcer=_make_announcer(config, served, blocks, swarm, move_limiter, roofline),
            move_limiter=move_limiter,
            shutdown=Shutdown(stopping, swarm.transport),
            open_span=opening,
            protocol=PROTOCOL if adapters is not None else GRAPH_PROTOCOL,
            refusals=refusals,
        )
        swarm.directory.set_num_blocks(served.model_id, served.num_blocks)
        addresses, sources = swarm.transport.addresses, metric_sources or MetricRegistry()
        async with AsyncExitStack() as stack:
            services = _services(runner, blocks, on_history, metric_sources)
            if adapters is not None:
                services += await stack.enter_async_context(
                    _decoder_services(runner, adapters, quotes)
                )
            stack.enter_context(register_known_swarm(config, addresses, served.model_id))
            side_tasks = [] if side_task is None else [side_task(addresses)]
            await stack.enter_async_context(running_in_background(*side_tasks))
            try:
                with sources.registered(
                    daemon_source(swarm, "node", sources.version),
                    model_source(swarm, served.model_id, served.num_blocks),
                    node_source(runner),
                ):
                    async with running_in_background(*services):
                        await runner.run()
            finally:
                await _withdraw(swarm)


@asynccontextmanager
async def _decoder_services(
    runner: SpanRunner, adapters: AdapterServer, quotes: QuoteSource | None
) -> AsyncIterator[list[Coroutine[Any, Any, None]]]:
    """Serve what clients of a language model ask for beside sessions; yields what is to run."""
    config, swarm, served = runner.config, runner.swarm, runner.served
    allow, deny = frozenset(config.allow_peers), frozenset(config.deny_peers)
    await swarm.transport.serve(ADAPTER_PROTOCOL, adapters.handle)
    attestation = AttestationServer(
        swarm,
        served.model_id,
        quotes,
        runner.find_served_weights,
        allow=allow,
        deny=deny,
        refusals=runner.refusals,
    )
    await swarm.transport.serve(ATTEST_PROTOCOL, attestation.handle)
    openings = OpeningServer(
        swarm,
        served.model_id,
        served.checkpoint,
        find_span=runner.find_served_span,
        find_addresses=partial(swarm.directory.addresses, served.model_id, served.num_blocks),
        report_wrong=partial(_report_wrong, swarm, served.model_id),
        allow=allow,
        deny=deny,
        refusals=runner.refusals,
    )
    await swarm.transport.serve(EVIDENCE_PROTOCOL, openings.handle)
    evidence = EvidenceExchange(swarm, served.model_id, served.num_blocks)
    encoding = []
    if (blocks_type := SCHEMES.get(config.private)) is not None:
        private = await asyncio.to_thread(_make_private_server, runner, blocks_type)
        runner.announcer.private_schemes = private.schemes
        await swarm.transport.serve(PRIVATE_PROTOCOL, private.handle)
        encoding = [private.run()]
    try:
        yield [
            *encoding,
            adapters.run(),
            evidence.run(partial(_act_on_proof, swarm, served.model_id)),
        ]
    finally:
        await openings.close()


def _make_private_server(runner: SpanRunner, blocks_type: type[PrivateBlocks]) -> PrivateServer:
    config, served = runner.config, runner.served
    limit = config.private_cache_gib
    return PrivateServer(
        runner.swarm,
        served.model_id,
        served.checkpoint,
        blocks_type,
        # On one thread: products are made of parts that take less than threads take to meet.
        make_ring(RingParameters()),
        runner.find_served_span,
        folder=config.cache_dir,
        max_bytes=None if limit is None else int(limit * 2**30),
        allow=frozenset(config.allow_peers),
        deny=frozenset(config.deny_peers),
        refusals=runner.refusals,
    )


class StoppedError(Exception):
    """The daemon was stopped before it joined."""


@asynccontextmanager
async def join_swarm(config: PeerConfig, stopping: asyncio.Event) -> AsyncIterator[Swarm]:
    """Join the swarm, retrying for `join_timeout_s` while no initial peer answers: machines of a
    swarm that start together do not listen at the same moment.

    Raises `StoppedError`, `BootstrapError` and the other errors of `open_swarm`.
    """
    _raise_file_limit()
    identity = Identity.load_or_create(config.identity_path)
    told_at = time.monotonic()
    deadline = told_at + config.join_timeout_s
    async with AsyncExitStack() as stack:
        async with _cancelled_by(stopping):
            while True:
                try:
                    swarm = await stack.enter_async_context(_open_swarm(config, identity))
                    break
                except BootstrapError as error:
                    now = time.monotonic()
                    if now >= deadline:
                        raise
                    if now >= told_at:
                        told_at = now + JOIN_LOG_INTERVAL_S
                        still_s = round(deadline - now)
                        log.warning("initial_peers_awaited", still_s=still_s, reason=str(error))
                await asyncio.sleep(JOIN_RETRY_S)
            await swarm.transport.refresh_addresses()
        log.info("swarm_joined", peer_id=identity.peer_id, addresses=swarm.transport.addresses)
        yield swarm


@asynccontextmanager
async def _cancelled_by(stopping: asyncio.Event) -> AsyncIterator[None]:
    """Cancel the body as soon as `stopping` is set, then raise `StoppedError`."""
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
            raise StoppedError from None
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


def _raise_file_limit() -> None:
    """Raise the file limit: each stream is an open file, and the usual 1,024 are few for a node."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if most == resource.RLIM_INFINITY else min(most, MAX_FILES)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _find_roofline(config: NodeConfig, served: NodeModel) -> Roofline | None:
    if isinstance(served, GraphModel):
        return None
    return find_roofline(
        served.checkpoint,
        dtype=served.dtype,
        quant_type=served.quant_type,
        device=served.device,
        folder=config.cache_dir,
    )


def _make_announcer(
    config: NodeConfig,
    served: NodeModel,
    max_blocks: int,
    swarm: Swarm,
    move_limiter: MoveLimiter,
    roofline: Roofline | None,
) -> Announcer:
    facts = NodeFacts(
        model_id=served.model_id,
        model_name=served.checkpoint.name,
        num_blocks=served.num_blocks,
        context_length=served.context_length,
        dtype=served.dtype,
        quant_type=served.quant_type,
        cache_dtype=served.cache_dtype,
        device=served.device,
        public_name=config.public_name,
        max_blocks=max_blocks,
        location=config.location,
        roofline=roofline,
        operator=config.operator,
    )
    return Announcer(
        swarm.directory,
        facts,
        swarm.link_speeds.sent_bytes,
        lambda: swarm.rtts.nearest_links(swarm.link_speeds),
        is_movable=lambda: move_limiter.refusal is None,
    )


def _make_adapter_server(
    config: NodeConfig, served: DecoderModel, swarm: Swarm, refusals: RefusalLog
) -> AdapterServer:
    checkpoint, own = served.checkpoint, swarm.identity.peer_id

    def find_addresses() -> dict[PeerId, tuple[str, ...]]:
        known = swarm.directory.addresses(served.model_id, served.num_blocks)
        return {peer: addresses for peer, addresses in known.items() if peer != own}

    folder, membership = config.cache_dir / ADAPTERS_FOLDER, swarm.notices.membership
    if membership.is_private:
        # Daemons of other swarms share the cache, and must not serve a private one's adapters.
        folder /= f"private-{membership.tag(b'adapter-store').hex()[:32]}"
    return AdapterServer(
        swarm,
        served.model_id,
        AdapterStore(folder, gib_to_bytes(config.adapter_store_gib) or 0),
        find_layers=partial(find_linear_layers, checkpoint),
        find_addresses=find_addresses,
        authors=frozenset(config.adapter_authors),
        allow=frozenset(config.allow_peers),
        deny=frozenset(config.deny_peers),
        refusals=refusals,
    )


def _services(
    runner: SpanRunner,
    max_blocks: int,
    on_history: OnHistory | None,
    metric_sources: MetricRegistry | None,
) -> list[Coroutine[Any, Any, None]]:
    """What runs beside the span runner."""
    config, swarm, served = runner.config, runner.swarm, runner.served
    peer_id, num_blocks = PeerId(swarm.identity.peer_id), served.num_blocks
    of_model = (served.model_id, num_blocks)
    placement_filter = make_placement_filter(
        config, peer_id, num_blocks=num_blocks, max_blocks=max_blocks
    )
    services = [
        runner.announcer.run(),
        probe_rtts(swarm, *of_model, random.Random(peer_id), ping_interval_s=config.ping_every_s),
        warn_of_other_copies(swarm.directory, served.model_id),
    ]
    if not runner.move_limiter.pinned:
        services += [
            fill_holes(
                partial(swarm.directory.fetch, *of_model),
                peer_id,
                runner.move_limiter,
                every_s=config.rebalance_every_s,
                rng=random.Random(),
            ),
            run_follower(
                config,
                swarm,
                served.model_id,
                placement_filter,
                runner.move_limiter,
                num_blocks=num_blocks,
            ),
        ]
    if config.orchestrator:
        services.append(
            orchestrate(
                config,
                swarm,
                served.model_id,
                distrusted=placement_filter.distrusted,
                on_history=on_history,
                metric_sources=metric_sources,
            )
        )
    if metric_sources is not None:
        services.append(refresh_directory(swarm.directory, *of_model))
    return services


def _act_on_proof(swarm: Swarm, model_id: ModelId, found: Proof) -> None:
    """Warn clients, also those that read no evidence, or this node's operator."""
    if found.accused == swarm.identity.peer_id:
        log.error(
            "evidence_against_this_node",
            reason=found.reason,
            hint="its own seals contradict each other: check the machine's memory, and that no "
            "other program signs with this node's identity",
        )
    else:
        _report_wrong(swarm, model_id, found.accused, found.reason)


def _report_wrong(swarm: Swarm, model_id: ModelId, accused: PeerId, reason: str) -> None:
    """Report a node in this one's name, which has checked evidence against it."""
    log.error("evidence_holds", peer=accused, reason=reason)
    swarm.failure_reporter.record_failure(model_id, accused, "wrong")


def make_move_limiter(config: NodeConfig) -> MoveLimiter:
    """A move limiter with the operator's limits."""
    return MoveLimiter(
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
