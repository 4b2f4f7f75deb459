"""JSON views of nodes, models, sessions and events for viewers of the page.

Names are untrusted input: the page must show them as text. Views contain no addresses, and no text
of prompts or responses.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from nesa_node.client.model.activity import SessionActivity
from nesa_node.client.verification.audit_history import AuditHistory
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.core.wait_tracking import WaitStatus
from nesa_node.dashboard.node_tracker import DashboardEvent, EventKind, TrackedNode
from nesa_node.sharding.graph_plan import GraphPlan, PieceWork
from nesa_node.swarm.dht.pool_notices import Offer, PoolStatus
from nesa_node.swarm.dht.records import majority_num_blocks

MAX_MODELS = 32
MAX_MACHINES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """Summary of one model. `runs` are (start, end, holders), cut where the holders change.

    `tokens_per_s` and `sessions` are estimates: the sum of the nodes' counts, each weighted by its
    share of the blocks, since a token or session passes each block once. `lost` counts nodes with
    an expired record, `failing` announced nodes that do not work, which count as no holders.
    """

    model_id: ModelId
    name: str
    num_blocks: int
    runs: tuple[tuple[int, int, int], ...]
    nodes: int
    serving: int
    failing: int
    lost: int
    tokens_per_s: float
    sessions: float

    @property
    def holes(self) -> tuple[Span, ...]:
        return tuple(Span(start, end) for start, end, holders in self.runs if not holders)


def summarize_models(nodes: Mapping[PeerId, TrackedNode]) -> list[ModelSummary]:
    """Summarize the models with the most present nodes, at most `MAX_MODELS`."""
    groups: dict[ModelId, list[TrackedNode]] = defaultdict(list)
    for sighting in nodes.values():
        groups[ModelId(sighting.record.model_id)].append(sighting)
    alive = {
        model: sum(sighting.lost_at is None for sighting in group)
        for model, group in groups.items()
    }
    chosen = sorted(groups, key=lambda model: (-alive[model], model))[:MAX_MODELS]
    return [_summarize_model(model, groups[model]) for model in chosen]


def _summarize_model(model: ModelId, group: list[TrackedNode]) -> ModelSummary:
    there = [sighting for sighting in group if sighting.lost_at is None]
    records = [sighting.record for sighting in there or group]
    num_blocks = majority_num_blocks(records)
    names = Counter(record.model_name for record in records)
    agreed = [sighting for sighting in there if sighting.record.num_blocks == num_blocks]
    serving = [
        sighting
        for sighting in agreed
        if sighting.record.state == "serving" and sighting.failing_since is None
    ]

    def weighed(values: Iterable[tuple[float, tuple[int, int]]]) -> float:
        return sum(value * (end - start) for value, (start, end) in values) / num_blocks

    return ModelSummary(
        model_id=model,
        name=max(names, key=lambda name: (names[name], name)),
        num_blocks=num_blocks,
        runs=coverage_runs((sighting.record.span for sighting in serving), num_blocks),
        nodes=len(there),
        serving=len(serving),
        failing=sum(sighting.failing_since is not None for sighting in there),
        lost=len(group) - len(there),
        tokens_per_s=weighed((each.tokens_per_s, each.record.span) for each in agreed),
        sessions=weighed((each.record.sessions, each.record.span) for each in agreed),
    )


def coverage_runs(
    spans: Iterable[tuple[int, int]], num_blocks: int
) -> tuple[tuple[int, int, int], ...]:
    """Runs of blocks with an equal number of `spans`; at most twice as many as spans, plus one."""
    steps: Counter[int] = Counter({0: 0, num_blocks: 0})
    for start, end in spans:
        steps[start] += 1
        steps[end] -= 1
    cuts = sorted(at for at in steps if 0 <= at <= num_blocks)
    runs: list[tuple[int, int, int]] = []
    holders = 0
    for start, end in itertools.pairwise(cuts):
        holders += steps[start]
        if runs and runs[-1][2] == holders:
            runs[-1] = (runs[-1][0], end, holders)
        else:
            runs.append((start, end, holders))
    return tuple(runs)


def pool_entries(
    offers: Iterable[Offer], statuses: Iterable[PoolStatus]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Views of wanted swarms by model, of the newest status that names it, and of machines."""
    swarms: dict[str, Any] = {}
    for status in sorted(statuses, key=lambda each: each.issued_at):
        swarms |= {each.model: each.model_dump(mode="json") for each in status.swarms}
    machines = sorted(offers, key=lambda each: each.peer_id)[:MAX_MACHINES]
    return swarms, {offer.peer_id: _machine_entry(offer) for offer in machines}


def _machine_entry(offer: Offer) -> dict[str, Any]:
    states = [each.state for each in offer.held]
    busy = next((s for s in ("failed", "refused", "leaving", "loading") if s in states), "holding")
    free = "free" if offer.models else "away"
    return {
        "name": offer.public_name,
        "state": busy if states else free,
        "away_reason": offer.away_reason,
        "device": offer.device,
        "memory_total_bytes": offer.memory_total_bytes,
        "memory_free_bytes": offer.memory_free_bytes,
        "held": [
            each.model_dump(mode="json", include={"model", "span", "state", "reason"})
            for each in offer.held
        ],
    }


class HoleTracker:
    """Reports when blocks lose their last holder, and when all blocks have one again."""

    def __init__(self) -> None:
        self._holes: dict[ModelId, tuple[Span, ...]] = {}

    def update_models(self, models: Iterable[ModelSummary], now: float) -> list[DashboardEvent]:
        """Events for changed holes; holes of a new model are no event, since it may be starting."""
        events: list[DashboardEvent] = []
        seen: dict[ModelId, tuple[Span, ...]] = {}
        for model in models:
            seen[model.model_id] = model.holes
            before = self._holes.get(model.model_id, model.holes)
            if model.holes == before:
                continue
            kind: EventKind = "hole" if model.holes else "healed"
            words = f"Every block of {model.name} has a holder"
            if model.holes:
                spans = ", ".join(str(hole) for hole in model.holes[:5])
                words = f"Blocks {spans} of {model.name} have no holder"
            events.append(DashboardEvent(at=now, kind=kind, text=words, model=model.model_id))
        self._holes = seen
        return events


MAX_SHOWN_NODES = 400
MAX_SHOWN_LOST_NODES = 100
MAX_SHOWN_WAIT_PEERS = 8


def choose_shown_nodes(nodes: Mapping[PeerId, TrackedNode]) -> dict[PeerId, TrackedNode]:
    """At most `MAX_SHOWN_NODES` nodes: the oldest, and of the lost ones the latest."""
    lost = [peer for peer, sighting in nodes.items() if sighting.lost_at is not None]
    lost.sort(key=lambda peer: -(nodes[peer].lost_at or 0))
    there = [peer for peer, sighting in nodes.items() if sighting.lost_at is None]
    lost = lost[:MAX_SHOWN_LOST_NODES]
    return {peer: nodes[peer] for peer in (*there[: MAX_SHOWN_NODES - len(lost)], *lost)}


def node_entry(sighting: TrackedNode, audits: AuditHistory) -> dict[str, Any]:
    """View of a node. Times are seconds since the epoch; after `expires_at` it counts as lost."""
    record = sighting.record
    peer = PeerId(record.peer_id)
    gpu = record.gpu_memory_total_bytes
    state: str = record.state if sighting.failing_since is None else "failing"
    if sighting.lost_at is not None:
        state = "lost"
    return {
        "name": record.public_name,
        "model": record.model_id,
        "state": state,
        "last_state": record.state,
        "span": list(record.span),
        "next_span": list(record.next_span) if record.next_span else None,
        "device": "GPU" if gpu else "CPU",
        "memory_bytes": gpu or record.cpu_memory_total_bytes,
        "memory_free_bytes": record.gpu_memory_free_bytes if gpu else record.cpu_memory_free_bytes,
        "dtype": record.dtype,
        "quantization": record.quantization,
        "cache_dtype": record.cache_dtype,
        "load": round(record.load, 3),
        "sessions": record.sessions,
        "tokens_per_s": _round_to_3_digits(sighting.tokens_per_s),
        "decode_tokens_per_s": _round_to_3_digits(record.decode_tokens_per_s),
        "prefill_tokens_per_s": _round_to_3_digits(record.prefill_tokens_per_s),
        "free_cache_tokens": record.free_cache_tokens,
        "total_cache_tokens": record.total_cache_tokens,
        "started_at": round(record.issued_at - record.uptime_s),
        "issued_at": round(record.issued_at, 1),
        "expires_at": round(record.expires_at, 1),
        "lost_at": sighting.lost_at,
        "failing_since": None if sighting.failing_since is None else round(sighting.failing_since),
        "movable": record.movable,
        "passed_audits": audits.passed.get(peer, 0),
        "barred_for": audits.barred.get(peer),
    }


def model_entry(model: ModelSummary, order: int, number: int) -> dict[str, Any]:
    """View of a model; `order` is its rank by nodes, from 0, `number` its key in `series`."""
    entry = asdict(model) | {
        "order": order,
        "number": number,
        "tokens_per_s": _round_to_3_digits(model.tokens_per_s),
        "sessions": round(model.sessions, 1),
    }
    del entry["model_id"]
    return entry


def plan_entry(plan: GraphPlan) -> dict[str, Any]:
    """Pieces as [operations, FLOP, bytes of weights, bytes received, bytes sent]."""
    nothing = PieceWork(0, 0, 0, 0)
    return {
        "dtype": plan.dtype,
        "batch": plan.batch,
        "tokens": plan.tokens,
        "image_size": plan.image_size,
        "pieces": [
            [len(operations), *map(_round_to_3_digits, msgspec.structs.astuple(work))]
            for operations, work in zip(
                plan.pieces, itertools.chain(plan.work, itertools.repeat(nothing)), strict=False
            )
        ],
    }


def session_entry(session: SessionActivity) -> dict[str, Any]:
    return {
        "model": session.model_id,
        "state": session.state if session.ended_at is None else "ended",
        "hops": [[hop.peer_id, hop.span.start, hop.span.end] for hop in session.hops],
        "began_at": round(session.began_at, 2),
        "ended_at": session.ended_at,
        "prompt_tokens": session.prompt_tokens,
        "generated_tokens": session.generated_tokens,
        "tokens_per_s": _round_to_3_digits(session.tokens_per_s),
        "failovers": session.failovers,
        "waits_for": None if session.waits_for is None else _wait_entry(session.waits_for),
    }


def _wait_entry(wait: WaitStatus) -> dict[str, Any]:
    return {
        "what": wait.what,
        "blocks": [[span.start, span.end] for span in wait.blocks],
        "peers": list(wait.peers[:MAX_SHOWN_WAIT_PEERS]),
        "since": round(wait.since, 1),
        "limit_s": wait.limit_s and round(wait.limit_s),
    }


def event_entries(events: Mapping[int, DashboardEvent]) -> dict[str, Any]:
    return {
        str(number): asdict(event) | {"at": round(event.at, 1)} for number, event in events.items()
    }


def _round_to_3_digits(value: float) -> float:
    """Round to three significant digits: noise beyond them would be sent again and again."""
    return float(f"{value:.3g}")
