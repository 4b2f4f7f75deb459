"""The life of a daemon: join, take a span, load it, serve it, leave in order."""

from __future__ import annotations

import asyncio
import random
import resource
import signal
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from ipaddress import ip_address
from typing import Any

import torch
from pydantic import SecretStr

from nesa_node.core.choices import QuantType
from nesa_node.core.config import NodeConfig, OrchestratorConfig, PeerConfig
from nesa_node.core.errors import ConfigError, PeerUnreachableError, SwarmError
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.core.span import Span
from nesa_node.engine.blocks import Blocks
from nesa_node.engine.checkpoint import open_checkpoint
from nesa_node.engine.measure import measure_throughput
from nesa_node.engine.model_id import model_id
from nesa_node.engine.parts import load_blocks
from nesa_node.engine.progress import shown_progress
from nesa_node.server.admission import Admission, Limits
from nesa_node.server.announcer import DTYPE_NAMES, Announcer, Capacity, NodeFacts
from nesa_node.server.executor import open_executor
from nesa_node.server.orchestrate import find_model, orchestrate
from nesa_node.server.placement import Served, claim_span, count_blocks, count_cache_tokens
from nesa_node.server.ready_file import check_ready_file, ready_file
from nesa_node.server.scheduler import Scheduler, open_scheduler
from nesa_node.server.session_server import SessionServer
from nesa_node.swarm.identity import Identity
from nesa_node.swarm.measuring import keep_measuring
from nesa_node.swarm.messages import PROTOCOL
from nesa_node.swarm.node import Swarm, open_swarm

log = get_logger(__name__)

OUTBOX_BYTES_PER_CACHE_BYTE = 1.0
MIN_OUTBOX_BYTES = 256 << 20
WITHDRAW_TIMEOUT_S = 5.0
MAX_FILES = 1 << 16


async def run_bootstrap(config: PeerConfig) -> None:
    """Be a member of the DHT until SIGTERM or SIGINT. Raises `SwarmError` and `ConfigError`."""
    check_ready_file(config.ready_file)
    with stop_signals() as stopping:
        async with _joined(config) as swarm:
            facts = _facts(swarm)
            with ready_file(config.ready_file, facts):
                log.info("bootstrap_ready", addresses=swarm.transport.addresses)
                await _stop_or_loss(stopping, swarm)


async def run_orchestrator(config: OrchestratorConfig) -> None:
    """Plan for a swarm until SIGTERM or SIGINT. Raises `SwarmError` and `ConfigError`."""
    check_ready_file(config.ready_file)
    with stop_signals() as stopping:
        async with _joined(config) as swarm:

            async def plan() -> None:
                await orchestrate(config, swarm, await find_model(swarm, config.model))

            with ready_file(config.ready_file, _facts(swarm)):
                await _until_stopped(plan(), stopping, swarm)


async def run_node(config: NodeConfig) -> None:
    """Serve a span of a model until SIGTERM or SIGINT, then drain, withdraw and return.

    Raises as `serve_node` does.
    """
    with stop_signals() as stopping:
        await serve_node(config, stopping)


async def serve_node(config: NodeConfig, stopping: asyncio.Event) -> None:
    """Serve a span of a model until `stopping` is set.

    Raises `ConfigError`, `ModelError`, `ResourceError` and `SwarmError`.
    """
    check_ready_file(config.ready_file)
    served = await asyncio.to_thread(_open_model, config)
    # Before anybody hears of us: an impossible request should fail at once.
    blocks = await asyncio.to_thread(count_blocks, config, served)
    async with (
        _joined(config) as swarm,
        open_executor() as executor,
        open_scheduler(executor) as scheduler,
    ):
        facts = _node_facts(config, served, blocks)
        await _serve(config, served, facts, swarm, scheduler, stopping)


@contextmanager
def stop_signals() -> Iterator[asyncio.Event]:
    """An event that SIGTERM or SIGINT sets; a second one of them ends the process the hard way."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()

    def stop(number: signal.Signals) -> None:
        log.info("stopping", signal=number.name)
        stopping.set()
        loop.remove_signal_handler(number)

    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    try:
        yield stopping
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _open_model(config: NodeConfig) -> Served:
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    disk = None if config.max_disk_gib is None else int(config.max_disk_gib * (1 << 30))
    checkpoint = open_checkpoint(
        config.model,
        revision=config.revision,
        token=_secret(config.token),
        cache_dir=config.cache_dir,
        max_disk_bytes=disk,
    )
    return Served(
        checkpoint=checkpoint,
        model_id=model_id(checkpoint),
        dtype=checkpoint.resolve_dtype(config.torch_dtype),
        quant_type=config.quant_type,
        device=choose_device(config.device, config.quant_type),
    )


def choose_device(name: str, quant_type: QuantType) -> torch.device:
    """`auto` is the first GPU, or the CPU.

    Raises `ConfigError` for one that is not there, or cannot compute with such weights.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"--device {name}: {torch.cuda.device_count()} CUDA devices are here; use --device cpu"
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("--device mps: this machine or this torch has none; use --device cpu")
    if device.type == "mps" and quant_type != "none":
        raise ConfigError(f"--quant-type {quant_type} needs --device cpu or cuda")
    return device


@asynccontextmanager
async def _joined(config: PeerConfig) -> AsyncIterator[Swarm]:
    _allow_many_files()
    identity = Identity.load_or_create(config.identity_path)
    async with open_swarm(
        identity,
        host_maddrs=config.host_maddrs,
        announce_maddrs=config.announce_maddrs,
        initial_peers=config.initial_peers,
        nat_port_map=config.nat_port_map,
        auto_nat=config.auto_nat,
        relay=config.relay,
        swarm_key=_secret(config.swarm_key),
        record_ttl_s=config.record_ttl_s,
    ) as swarm:
        await swarm.transport.refresh_addresses()
        log.info("joined", peer_id=identity.peer_id, addresses=swarm.transport.addresses)
        yield swarm


def _allow_many_files() -> None:
    """Each stream is an open file here, and the usual 1,024 are few for a node."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if most == resource.RLIM_INFINITY else min(most, MAX_FILES)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


async def _serve(
    config: NodeConfig,
    served: Served,
    about: NodeFacts,
    swarm: Swarm,
    scheduler: Scheduler,
    stopping: asyncio.Event,
) -> None:
    announcer = Announcer(
        swarm.directory,
        about,
        swarm.speeds.sent_bytes,
        lambda: swarm.distances.measured(swarm.speeds),
    )
    background = [
        asyncio.create_task(announcer.run()),
        asyncio.create_task(
            keep_measuring(
                swarm,
                served.model_id,
                about.num_blocks,
                random.Random(swarm.identity.peer_id),
                ping_every_s=config.ping_every_s,
            )
        ),
    ]
    if config.orchestrator:
        background.append(asyncio.create_task(orchestrate(config, swarm, served.model_id)))
    try:
        loading = asyncio.create_task(_prepare(config, served, swarm, scheduler, announcer))
        stopped = asyncio.create_task(_stop_or_loss(stopping, swarm))
        await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            stopped.result()
            return
        stopped.cancel()
        blocks, server = loading.result()
        await announcer.announce("serving", blocks.span)
        facts = _facts(swarm, served, blocks.span)
        with ready_file(config.ready_file, facts):
            log.info(
                "serving",
                model=served.model_id,
                span=str(blocks.span),
                dtype=DTYPE_NAMES[served.dtype],
                quant_type=served.quant_type,
                weight_mib=blocks.weight_bytes >> 20,
                decode_tokens_per_s=round(announcer.throughput.decode_tokens_per_s, 1),
                cache_tokens=announcer.capacity().total_tokens,
            )
            print_invitation(config, swarm)
            await _stop_or_loss(stopping, swarm)
        await announcer.announce("draining", blocks.span)
        await server.drain(config.drain_timeout_s)
    finally:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await _withdraw(swarm)


async def _prepare(
    config: NodeConfig, served: Served, swarm: Swarm, scheduler: Scheduler, announcer: Announcer
) -> tuple[Blocks, SessionServer]:
    """Claim a span, load and measure it, and accept sessions."""
    rng = random.Random(swarm.identity.peer_id)
    span = await claim_span(config, served, swarm, announcer, rng=rng)

    def load() -> Blocks:
        with shown_progress() as progress:
            return load_blocks(
                served.checkpoint,
                span,
                dtype=served.dtype,
                device=served.device,
                quant_type=served.quant_type,
                progress=progress,
            )

    device = scheduler.executor
    blocks = await device.run(load)
    announcer.throughput = await device.run(lambda: measure_throughput(blocks))
    scheduler.expect(announcer.throughput, span)
    tokens = count_cache_tokens(config, blocks)
    pool = await device.run(lambda: blocks.new_pool(tokens))
    admission = Admission(_limits(config, blocks, tokens), pool)
    announcer.capacity = lambda: Capacity(
        total_tokens=admission.total_tokens,
        free_tokens=admission.free_tokens,
        load=scheduler.load,
    )
    server = SessionServer(
        swarm,
        served.model_id,
        blocks,
        scheduler,
        admission,
        swarm_key=_secret(config.swarm_key),
        step_timeout_s=config.step_timeout_s,
        idle_timeout_s=config.idle_timeout_s,
    )
    await swarm.transport.serve(PROTOCOL, server.handle)
    return blocks, server


def _limits(config: NodeConfig, blocks: Blocks, tokens: int) -> Limits:
    """The limits for a cache of `tokens`."""
    outbox = int(tokens * blocks.cache_bytes_per_token * OUTBOX_BYTES_PER_CACHE_BYTE)
    needed = tokens * blocks.hidden_size * 4
    # Nobody should be able to take all of it, but who comes alone can use the model's whole length.
    half = max(tokens // 2, min(tokens, blocks.context_length or tokens))
    return Limits(
        outbox_bytes=max(min(outbox, needed), MIN_OUTBOX_BYTES),
        sessions_per_peer=config.max_sessions_per_peer,
        cache_tokens_per_peer=config.max_cache_tokens_per_peer or half,
        allow=frozenset(config.allow_peers),
        deny=frozenset(config.deny_peers),
        trusted=frozenset(config.trusted_peers),
    )


async def _until_stopped(
    work: Coroutine[Any, Any, None], stopping: asyncio.Event, swarm: Swarm
) -> None:
    """Run `work`, which has no end, until asked to stop. Raises what it does, and `SwarmError`."""
    working = asyncio.create_task(work)
    stopped = asyncio.create_task(_stop_or_loss(stopping, swarm))
    tasks = (working, stopped)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled():
            task.result()


async def _stop_or_loss(stopping: asyncio.Event, swarm: Swarm) -> None:
    """Return when asked to stop. Raises `SwarmError` if libp2p's daemon is gone."""
    waits = [asyncio.create_task(event.wait()) for event in (stopping, swarm.transport.lost)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
    if swarm.transport.lost.is_set() and not stopping.is_set():
        raise SwarmError("libp2p's daemon (p2pd) has ended; restart this node")


async def _withdraw(swarm: Swarm) -> None:
    try:
        async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
            await swarm.directory.withdraw()
    except TimeoutError:
        log.warning("not_withdrawn", reason="nobody answered; the record will expire")
    except PeerUnreachableError as error:
        # Of our own p2pd. Whatever ended us is the thing to tell, not this.
        log.warning("not_withdrawn", reason=str(error))


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


def _facts(
    swarm: Swarm, served: Served | None = None, span: Span | None = None
) -> Mapping[str, object]:
    return {
        "peer_id": PeerId(swarm.identity.peer_id),
        "addresses": list(swarm.transport.addresses),
        "model": None if served is None else served.model_id,
        "span": None if span is None else [span.start, span.end],
        "dtype": None if served is None else DTYPE_NAMES[served.dtype],
        "quant_type": None if served is None else served.quant_type,
    }


def print_invitation(config: NodeConfig, swarm: Swarm) -> None:
    """Tell whoever started the first node how others join."""
    address = most_reachable(swarm.transport.addresses)
    if not config.initial_peers and address is not None:
        log.info("join_with", command=f"nesa-node run {config.model} --initial-peers {address}")


def most_reachable(addresses: Sequence[str]) -> str | None:
    """The address that most others can use: a public one before a LAN's before loopback."""

    def reach(address: str) -> int:
        _, protocol, host, *_ = address.split("/")
        if not protocol.startswith("ip"):
            return 4
        ip = ip_address(host)
        if ip.is_loopback or ip.is_link_local:
            return 0
        return (3 if ip.is_global else 2) if ip.version == 4 else 1

    return max(addresses, key=reach, default=None)


def _secret(value: SecretStr | None) -> str | None:
    return None if value is None else value.get_secret_value()
