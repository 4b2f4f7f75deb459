"""JSON views of nodes, models, sessions and events for viewers of the page.

Names are untrusted input: the page must show them as text. Views contain no addresses, and no text
of prompts or responses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nesa_node.client.model.activity import SessionActivity
from nesa_node.core.ids import PeerId
from nesa_node.core.wait_tracking import WaitStatus
from nesa_node.dashboard.events import DashboardEvent
from nesa_node.dashboard.models import ModelSummary
from nesa_node.dashboard.node_tracker import TrackedNode

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


def node_entry(sighting: TrackedNode) -> dict[str, Any]:
    """View of a node. Times are seconds since the epoch; after `expires_at` it counts as lost."""
    record = sighting.record
    gpu = record.gpu_memory_total_bytes
    return {
        "name": record.public_name,
        "model": record.model_id,
        "state": _node_state_word(sighting),
        "last_state": record.state,
        "span": list(record.span),
        "next_span": list(record.next_span) if record.next_span else None,
        "device": "GPU" if gpu else "CPU",
        "memory_bytes": gpu or record.cpu_memory_total_bytes,
        "memory_free_bytes": record.gpu_memory_free_bytes if gpu else record.cpu_memory_free_bytes,
        "dtype": record.dtype,
        "quantization": record.quantization,
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
    }


def model_entry(model: ModelSummary, order: int, number: int) -> dict[str, Any]:
    """View of a model; `order` is its rank by nodes, from 0, `number` its key in `series`."""
    return {
        "name": model.name,
        "order": order,
        "number": number,
        "num_blocks": model.num_blocks,
        "runs": [list(run) for run in model.runs],
        "nodes": model.nodes,
        "serving": model.serving,
        "failing": model.failing,
        "lost": model.lost,
        "tokens_per_s": _round_to_3_digits(model.tokens_per_s),
        "sessions": round(model.sessions, 1),
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


def _node_state_word(sighting: TrackedNode) -> str:
    if sighting.lost_at is not None:
        return "lost"
    return sighting.record.state if sighting.failing_since is None else "failing"


def _wait_entry(wait: WaitStatus) -> dict[str, Any]:
    return {
        "what": wait.what,
        "blocks": [[span.start, span.end] for span in wait.blocks],
        "peers": list(wait.peers[:MAX_SHOWN_WAIT_PEERS]),
        "since": round(wait.since, 1),
        "limit_s": wait.limit_s and round(wait.limit_s),
    }


def event_entries(events: Mapping[int, DashboardEvent]) -> dict[str, Any]:
    return {str(number): _event_entry(event) for number, event in events.items()}


def _event_entry(event: DashboardEvent) -> dict[str, Any]:
    return {
        "at": round(event.at, 1),
        "kind": event.kind,
        "text": event.text,
        "model": event.model,
        "peer": event.peer,
        "name": event.name,
    }


def _round_to_3_digits(value: float) -> float:
    """Round to three significant digits: noise beyond them would be sent again and again."""
    return float(f"{value:.3g}")
