"""A machine of the pool: it offers itself, and holds what is assigned, within its limits."""

from __future__ import annotations

import asyncio
import math
import os
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from nesa_node.core.errors import NesaError, SwarmError
from nesa_node.core.ids import PeerId
from nesa_node.core.logging import get_logger
from nesa_node.core.metrics import MetricRegistry
from nesa_node.core.settings.models import NodeConfig
from nesa_node.engine.model.devices import choose_device, free_memory_bytes
from nesa_node.engine.model.gpu_use import watch_other_programs
from nesa_node.server.node.daemon import StoppedError, join_swarm
from nesa_node.server.node.invitation import (
    check_ready_file,
    print_invitation,
    ready_file,
    ready_file_fields,
    register_known_swarm,
)
from nesa_node.server.node.metrics import daemon_source
from nesa_node.server.node.shutdown import Shutdown, stop_signals
from nesa_node.server.pool.builder import run_builder
from nesa_node.server.pool.child import ChildNode
from nesa_node.server.pool.figures import DeviceFigures
from nesa_node.server.pool.models import locate_model
from nesa_node.server.pool.terms import OperatorTerms
from nesa_node.swarm.dht.pool_notices import (
    POOL,
    AssignedSpan,
    HeldModel,
    MachineAssignment,
    Offer,
    assignment_topic,
)
from nesa_node.swarm.dht.sealing import MAX_ADDRESSES, Lease
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.tasks import TaskSet, running_in_background

log = get_logger(__name__)

CHECK_INTERVAL_S = 2.0
"""Interval at which the offer is compared with the machine's state."""
OFFER_TTL_S = 60.0
RENEW_OFFER_S = 20.0
FOLLOW_INTERVAL_S = 4.0
RETRY_FAILED_S = 60.0
"""Pause before a failed model is tried again, doubled each time."""
MIN_NEWS_BYTES = 256 << 20
"""Change of free memory that is announced at once."""


async def run_pool_member(
    config: NodeConfig, *, metric_sources: MetricRegistry | None = None
) -> None:
    """Offer this machine until SIGTERM or SIGINT; then stop what it holds, and withdraw.

    With `config.orchestrator` it also builds the swarms that are asked for. Raises `SwarmError` and
    `ConfigError`.
    """
    check_ready_file(config.ready_file)
    device = choose_device(config.device)
    watch = None if config.pool_gpu_share is None else watch_other_programs(device)
    terms = OperatorTerms(config, watch)
    with stop_signals() as stopping:
        figures = DeviceFigures(device, config.threads, config.cache_dir)
        measuring = asyncio.create_task(figures.measure_first())
        try:
            async with join_swarm(config, stopping) as swarm:
                member = PoolMember(config, swarm, device, figures, terms)
                await _serve(config, swarm, member, stopping, metric_sources)
        except StoppedError:
            return
        finally:
            measuring.cancel()
            await asyncio.gather(measuring, return_exceptions=True)


async def _serve(
    config: NodeConfig,
    swarm: Swarm,
    member: PoolMember,
    stopping: asyncio.Event,
    metric_sources: MetricRegistry | None,
) -> None:
    addresses, sources = swarm.transport.addresses, metric_sources or MetricRegistry()
    services = [member.publish_offers(), member.follow_assignments(), member.keep_figures()]
    if config.orchestrator:
        services.append(run_builder(config, swarm, metric_sources=metric_sources))
    with (
        register_known_swarm(config, addresses, POOL),
        ready_file(config.ready_file, ready_file_fields(swarm)),
        sources.registered(daemon_source(swarm, "pool member", sources.version)),
    ):
        print_invitation(config, swarm)
        log.info("machine_offered", device=member.device_name, memory_mib=member.memory_mib)
        try:
            async with running_in_background(*services):
                await Shutdown(stopping, swarm.transport).wait()
        finally:
            await member.close()


class PoolMember:
    """Publishes the offer, and starts and stops nodes as assignments and limits say."""

    def __init__(
        self,
        config: NodeConfig,
        swarm: Swarm,
        device: torch.device,
        figures: DeviceFigures,
        terms: OperatorTerms,
    ) -> None:
        self._config = config
        self._swarm = swarm
        self._device = device
        self._figures = figures
        self._terms = terms
        self._away_reason = terms.find_absence()
        self.device_name, self._device_count = describe_device(device)
        self._total_bytes = int(total_memory_bytes(device) * config.pool_memory_share)
        self._children: dict[str, ChildNode] = {}
        self._running = TaskSet()
        self._cancel: dict[str, asyncio.Event] = {}
        self._refusals: dict[str, HeldModel] = {}
        self._failures: dict[str, int] = {}
        self._retry_at: dict[str, float] = {}
        self._followed: tuple[PeerId, tuple[int, int]] | None = None
        self._assigned: tuple[AssignedSpan, ...] = ()

    @property
    def memory_mib(self) -> int:
        return self._total_bytes >> 20

    async def publish_offers(self) -> None:
        """Publish the offer when it has news, and well before it expires, until cancelled."""
        await self._figures.wait()
        published: object = None
        published_at = -math.inf
        while True:
            fields = self._offer_fields()
            news = _comparable(fields)
            if news != published or time.monotonic() - published_at >= RENEW_OFFER_S:
                try:
                    await self._swarm.notices.publish(Offer, POOL, ttl_s=OFFER_TTL_S, **fields)
                    published, published_at = news, time.monotonic()
                except (SwarmError, OSError) as error:
                    log.warning("offer_not_published", reason=str(error))
            await asyncio.sleep(CHECK_INTERVAL_S)

    async def keep_figures(self) -> None:
        """Measure the device again while it holds nothing, if it was busy at first."""
        await self._figures.measure_until_complete(lambda: not self._children)

    def _offer_fields(self) -> dict[str, Any]:
        disk = shutil.disk_usage(_existing_parent(self._config.cache_dir)).free
        held = [child.held() for child in self._children.values()]
        held += [each for name, each in self._refusals.items() if name not in self._children]
        return {
            "device": self.device_name,
            "device_type": self._device.type,
            "device_count": self._device_count,
            "cpu_threads": self._config.threads or os.cpu_count() or 1,
            "memory_total_bytes": self._total_bytes,
            "memory_free_bytes": self._free_bytes(),
            "disk_free_bytes": min(disk, int(self._config.pool_disk_gib * 2**30)),
            "figures": self._figures.kinds,
            "obeys": self._obeyed(),
            "public_name": self._config.public_name,
            "operator": self._config.operator,
            "addresses": self._swarm.transport.addresses[:MAX_ADDRESSES],
            "held": tuple(held[:8]),
            **self._terms.offer_fields(),
            "away_reason": self._away_reason,
            **({"models": ()} if self._away_reason else {}),
        }

    def _free_bytes(self) -> int:
        """Free memory of the device, within the operator's share."""
        return min(self._total_bytes, free_memory_bytes(self._device))

    def _obeyed(self) -> tuple[PeerId, ...]:
        own = (self._swarm.identity.peer_id,) if self._config.orchestrator else ()
        return (*self._config.allow_orchestrators, *own)

    async def follow_assignments(self) -> None:
        """Read assignments to this machine and follow an obeyed signer's, until cancelled."""
        rng = random.Random(self._swarm.identity.peer_id)
        self._swarm.notices.pin_signers(self._obeyed())
        while True:
            try:
                await self._follow_once()
            except (SwarmError, OSError) as error:
                log.warning("assignments_not_read", reason=str(error))
            except Exception:  # a bug: one bad assignment must not stop this loop
                log.exception("assignments_not_followed")
            await asyncio.sleep(FOLLOW_INTERVAL_S * rng.uniform(0.8, 1.2))

    async def _follow_once(self) -> None:
        self._away_reason = await asyncio.to_thread(self._terms.find_absence)
        if self._away_reason:  # also where no member of the DHT answers
            await self._apply(())
        assignment = await self._find_assignment()
        if assignment is not None:
            self._assigned = assignment.spans
        if not self._away_reason:
            await self._apply(self._assigned)

    async def _find_assignment(self) -> MachineAssignment | None:
        """The newest assignment of an obeyed signer: of the listed ones, else of the pool's leader.

        An older one stays in force: a machine keeps what it holds while its orchestrator is away.
        """
        own = self._swarm.identity.peer_id
        notices = self._swarm.notices
        found = await notices.fetch(MachineAssignment, assignment_topic(own))
        obeyed = self._obeyed()
        if not obeyed:
            leases = [
                lease for lease in await notices.fetch(Lease, POOL) if lease.role == "leading"
            ]
            leader = max(leases, key=lambda lease: (lease.epoch, lease.peer_id), default=None)
            obeyed = () if leader is None else (leader.signer,)
        allowed = [each for each in found if each.signer in obeyed]
        newest = max(allowed, key=lambda each: (each.order, each.signer), default=None)
        if newest is None or (newest.signer, newest.order) == self._followed:
            return None
        self._followed = newest.signer, newest.order
        return newest

    async def _apply(self, spans: Sequence[AssignedSpan]) -> None:
        """Stop what is no longer assigned, start what is, refuse what is not allowed."""
        wanted = {span.model: span for span in spans}
        for name, child in list(self._children.items()):
            span = wanted.get(name)
            if span is None or span.quant_type != child.assigned.quant_type:
                if not self._cancel[name].is_set():
                    log.info("assigned_model_released", model=name)
                self._cancel[name].set()
        self._refusals = {name: each for name, each in self._refusals.items() if name in wanted}
        for name, span in wanted.items():
            if name in self._children or time.monotonic() < self._retry_at.get(name, 0.0):
                continue
            refusal = self._terms.find_refusal(span)
            if refusal is not None:
                self._refuse(span, refusal)
                continue
            await self._start(span)

    def _refuse(self, span: AssignedSpan, reason: str) -> None:
        if self._refusals.get(span.model) is None or self._refusals[span.model].reason != reason:
            log.warning("assignment_refused", model=span.model, reason=reason)
        self._refusals[span.model] = HeldModel(
            model=span.model,
            state="refused",
            span=span.span,
            quant_type=span.quant_type,
            reason=reason[:240],
        )

    async def _start(self, span: AssignedSpan) -> None:
        try:
            model = await asyncio.to_thread(locate_model, span.model, self._config.cache_dir)
            await asyncio.to_thread(self._terms.check_model, span)
        except (NesaError, OSError) as error:
            self._refuse(span, str(error))
            self._retry_at[span.model] = time.monotonic() + RETRY_FAILED_S
            return
        self._terms.count_load()
        self._refusals.pop(span.model, None)
        peers = (*self._swarm.transport.addresses, *self._config.initial_peers)
        child = ChildNode(span, model, self._config, peers)
        self._children[span.model], self._cancel[span.model] = child, asyncio.Event()
        log.info(
            "assigned_model_started", model=span.model, span=str(span.blocks), quant=span.quant_type
        )
        self._running.start(self._run(span, child), name=f"node of {span.model}")

    async def _run(self, span: AssignedSpan, child: ChildNode) -> None:
        """Run a node until it ends or is released; one that failed is tried again later."""
        name = span.model
        running = asyncio.create_task(child.run())
        released = asyncio.create_task(self._cancel[name].wait())
        try:
            await asyncio.wait({running, released}, return_when=asyncio.FIRST_COMPLETED)
            if not self._cancel[name].is_set():
                await running
                failures = self._failures[name] = self._failures.get(name, 0) + 1
                self._retry_at[name] = time.monotonic() + RETRY_FAILED_S * 2 ** min(failures - 1, 6)
                held = child.held()
                self._refusals[name] = held
        finally:
            for task in (running, released):
                task.cancel()
            await asyncio.gather(running, released, return_exceptions=True)
            del self._children[name], self._cancel[name]

    async def close(self) -> None:
        """Stop all nodes, wait for their end, and withdraw the offer."""
        # Not cancelled: a node that is being stopped would be left behind.
        for released in self._cancel.values():
            released.set()
        await self._running.join()
        try:
            async with asyncio.timeout(5.0):
                fields = self._offer_fields() | {"models": ()}
                await self._swarm.notices.publish(Offer, POOL, ttl_s=0.5, **fields)
        except (TimeoutError, SwarmError, OSError) as error:
            log.warning("offer_not_withdrawn", reason=str(error) or "no DHT member answered")


def describe_device(device: torch.device) -> tuple[str, int]:
    """Name and number of the devices."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device), torch.cuda.device_count()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else device.type
    return "".join(char for char in name if char.isprintable())[:64], 1


def total_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    # A container's limit, if it is lower, bounds what is free.
    return int(min(psutil.virtual_memory().total, free_memory_bytes("cpu") + _used_bytes()))


def _used_bytes() -> int:
    return int(psutil.virtual_memory().used)


def _existing_parent(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _comparable(fields: Mapping[str, object]) -> object:
    """What orchestrators plan with, rounded: equal offers need not be published again."""
    free = fields["memory_free_bytes"]
    assert isinstance(free, int)
    kept = {k: v for k, v in fields.items() if k not in ("disk_free_bytes", "memory_free_bytes")}
    return kept, free // MIN_NEWS_BYTES
