"""What would be built for a request, and how fast it would be, without asking for it.

B blocks.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nesa_node.core.errors import NesaError, SwarmError
from nesa_node.core.ids import PeerId, Span
from nesa_node.core.settings.choices import PlacementGoal, PoolQuantType, WeightQuality
from nesa_node.core.settings.models import SharedConfig
from nesa_node.routing.placement.building import (
    BuildShortage,
    ModelShape,
    PlannedSpan,
    PoolMachine,
    missing_spans,
    plan_replica,
)
from nesa_node.server.pool.machines import may_be_held, pool_machine, read_pool_file
from nesa_node.server.pool.models import describe_model, open_pool_model
from nesa_node.server.pool.requests import read_pool
from nesa_node.server.pool.speeds import (
    PROMPT_TOKENS,
    TimedSpan,
    chain_s,
    fastest_chain,
    hop_s,
    time_span,
)
from nesa_node.swarm.dht.pool_notices import Offer
from nesa_node.swarm.node import Swarm
from nesa_node.topology.shape.failure_domains import declared_domains
from nesa_node.topology.snapshot import count_span_holders

MAX_PINGS = 64
PING_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """What `nesa-node swarm create` would ask for."""

    model: str
    replicas: int = 1
    quality: WeightQuality = "exact"
    goal: PlacementGoal = "latency"


@dataclass(frozen=True, slots=True)
class MachineLabel:
    """How a machine is shown: the name that its operator gave, and its device."""

    name: str
    device: str


@dataclass(frozen=True, slots=True)
class DryRunSpan:
    """A span that a machine would be assigned; `left_bytes` are free for models afterwards."""

    timed: TimedSpan
    quant_type: PoolQuantType
    size_bytes: int
    left_bytes: int


@dataclass(frozen=True, slots=True)
class DryRun:
    """Spans that would be assigned, and why a replica would lack some.

    `held` are those that machines hold already. `replicas` is the number of holders of the block
    with the fewest. Times are NaN where a block has no holder of known speed.
    """

    spans: tuple[DryRunSpan, ...]
    held: tuple[TimedSpan, ...]
    replicas: int
    shortage: str
    step_s: float
    first_token_s: float

    def as_json(self) -> dict[str, Any]:
        return {
            "replicas": self.replicas,
            "shortage": self.shortage,
            "tokens_per_s": None if math.isnan(self.step_s) else 1 / self.step_s,
            "first_token_s": None if math.isnan(self.first_token_s) else self.first_token_s,
            "prompt_tokens": PROMPT_TOKENS,
            "spans": [
                {
                    "machine": each.timed.peer,
                    "span": [each.timed.span.start, each.timed.span.end],
                    "quant_type": each.quant_type,
                    "size_bytes": each.size_bytes,
                    "left_bytes": each.left_bytes,
                    "step_s": each.timed.step_s,
                    "hop_s": each.timed.hop_s,
                    "head_s": each.timed.head_s,
                }
                for each in self.spans
            ],
            "held": [
                {"machine": each.peer, "span": [each.span.start, each.span.end]}
                for each in self.held
            ],
        }


def plan_swarm(
    shape: ModelShape,
    machines: Iterable[PoolMachine],
    wanted: Wanted,
    held: Sequence[tuple[TimedSpan, PoolMachine]] = (),
) -> DryRun:
    """Fill one replica after another, as the pool's orchestrator does, until machines lack room.

    `machines` do not hold the model yet; `held` are the spans of those that do.
    """
    free: dict[PeerId, PoolMachine] = {each.peer: each for each in machines}
    holders = [(each.span, machine) for each, machine in held]
    spans: list[DryRunSpan] = []
    shortage = ""
    for replica in range(1, wanted.replicas + 1):
        for hole in missing_spans(_count(holders, shape), replica):
            plan = plan_replica(
                shape,
                hole,
                list(free.values()),
                [machine.domains for span, machine in holders if span.overlaps(hole)],
                quality=wanted.quality,
                goal=wanted.goal,
            )
            if isinstance(plan, BuildShortage):
                shortage = f"it does not fit: {plan.advice}"
                shortage = f"replica {replica}: {shortage}" if replica > 1 else shortage
                break
            for each in plan.spans:
                machine = free.pop(each.peer)
                spans.append(_size_span(machine, shape, each))
                holders.append((each.span, machine))
        if shortage:
            break
    timed = tuple(each for each, _ in held)
    chain = fastest_chain((*timed, *(each.timed for each in spans)), shape.num_blocks)
    return DryRun(
        tuple(spans),
        timed,
        min(_count(holders, shape)),
        shortage,
        chain_s(chain),
        chain_s(chain, prefill=True),
    )


def _count(holders: Iterable[tuple[Span, PoolMachine]], shape: ModelShape) -> tuple[int, ...]:
    spans = [(span.start, span.end) for span, _ in holders]
    return count_span_holders(spans, shape.num_blocks)


def _size_span(machine: PoolMachine, shape: ModelShape, planned: PlannedSpan) -> DryRunSpan:
    size = shape.held_bytes(planned.span, planned.quant_type)
    timed = time_span(machine, shape, planned.span, planned.quant_type)
    return DryRunSpan(timed, planned.quant_type, size, machine.memory_bytes - size)


def plan_offers(
    offers: Sequence[Offer],
    wanted: Wanted,
    shapes: Mapping[str, ModelShape],
    rtts_ms: Mapping[PeerId, float],
) -> DryRun:
    """Plan with machines that have these offers; `shapes` are by a model's name."""
    model, shape = wanted.model, shapes[wanted.model]
    machines, held = [], []
    for offer in offers:
        holding = {each.model: each for each in offer.held if each.takes_memory}
        hop = hop_s(rtts_ms[offer.signer])
        machine = pool_machine(offer, model, shape, holding, shapes, hop_s=hop)
        if machine is not None:
            machines.append(machine)
        elif model in holding and may_be_held(holding[model], shape):
            figures = {kind: each.weight_figures() for kind, each in offer.figures.items()}
            domains = declared_domains(offer.addresses, offer.operator)
            holder = PoolMachine(offer.signer, 0, figures, hop_s=hop, domains=domains)
            each = holding[model]
            timed = time_span(holder, shape, each.blocks, each.quant_type)
            held.append((timed, holder))
    planned = plan_swarm(shape, machines, wanted, held)
    if machines or held:
        return planned
    reasons = {each.reason for offer in offers for each in offer.held if each.model == model}
    refused = f"all machines refuse: {'; '.join(sorted(filter(None, reasons)))}"
    nothing = f"none of {len(offers)} machines on offer may hold {model}"
    return replace(planned, shortage=refused if any(reasons) else nothing)


async def plan_on_pool(
    swarm: Swarm, config: SharedConfig, wanted: Wanted
) -> tuple[DryRun, dict[PeerId, MachineLabel]]:
    """Plan with the machines on offer, as the orchestrator that leads the pool would.

    Round trips are those from here, and speeds those that machines measured before they served.
    Raises `SwarmError` without machines, and as `open_pool_model` and `describe_model` do.
    """
    view = await read_pool(swarm.notices)
    leader = view.statuses[0].peer_id if view.statuses else None
    offers = [
        offer for offer in view.offers if not offer.obeys or leader is None or leader in offer.obeys
    ]
    if not offers:
        raise SwarmError("no machine is on offer; `nesa-node run` without a model offers one")
    held = {each.model for offer in offers for each in offer.held if each.takes_memory}
    shapes = {wanted.model: await asyncio.to_thread(_open_shape, wanted.model, config)}
    for name in held - {wanted.model}:
        with suppress(NesaError, OSError):  # a machine with an unknown model counts as full
            shapes[name] = await asyncio.to_thread(_open_shape, name, config)
    rtts_ms = await measure_rtts_ms(swarm, {offer.signer: offer.addresses for offer in offers})
    labels = {
        offer.signer: MachineLabel(offer.public_name or offer.peer_id[-8:], offer.device)
        for offer in offers
    }
    return plan_offers(offers, wanted, shapes, rtts_ms), labels


async def measure_rtts_ms(
    swarm: Swarm, addresses: Mapping[PeerId, Sequence[str]]
) -> dict[PeerId, float]:
    """Round trips from here in ms; NaN for peers that do not answer, and beyond `MAX_PINGS`."""
    few = dict(list(addresses.items())[:MAX_PINGS])
    await swarm.rtts.ping_all(swarm.transport, few, timeout_s=PING_TIMEOUT_S)
    return {peer: swarm.rtts.rtt_ms(peer) for peer in addresses}


def plan_with_file(
    path: Path, config: SharedConfig, wanted: Wanted
) -> tuple[DryRun, dict[PeerId, MachineLabel]]:
    """Plan with the machines that a file describes. Blocks the thread.

    Raises as `read_pool_file`, `open_pool_model` and `describe_model` do.
    """
    machines, devices = read_pool_file(path)
    shape = _open_shape(wanted.model, config)
    labels = {peer: MachineLabel(peer, device) for peer, device in devices.items()}
    return plan_swarm(shape, machines.values(), wanted), labels


def _open_shape(name: str, config: SharedConfig) -> ModelShape:
    return describe_model(open_pool_model(name, config))[0]
