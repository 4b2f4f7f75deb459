"""What is done to the swarm, and what must come of it: one row each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from benchmarks.regions.swarm import Look, Regions
from benchmarks.regions.traffic import per_second
from benchmarks.regions.world import (
    BOSS,
    CLIENTS,
    LIAR,
    MORE_JITTER,
    SECOND_BOSS,
    STRANGER,
    shake,
    true_request,
    true_snapshot,
)
from benchmarks.swarms import open_local
from nesa_node.core.errors import SwarmError
from nesa_node.core.ids import PeerId, Span
from nesa_node.routing.chain_request import build_problem, step_time
from nesa_node.routing.chains import Hop, hops_to_visits
from nesa_node.routing.search.exact import solve_latency

NEAR = 1.05
CHAINS = 5
SETTLE_S = 300.0
STRATEGY = "exact-latency"
BOAST, SLOW_S = 100.0, 0.1
LIAR_FOUND_S = 120.0


def settle(regions: Regions) -> dict[str, Any]:
    """Wait until every pair is measured; then compare the clients' chains with the best ones."""
    began = time.monotonic()
    wait_until(lambda: regions.look().unmeasured == 0, SETTLE_S, "pairs stay unmeasured")
    settled_s = time.monotonic() - began
    # The records that tell the last pairs are there; clients guess no more.
    found = [
        compare(regions, client, chain)
        for _ in range(CHAINS)
        for client, talker in regions.clients.items()
        for chain in [talker.ask("chain", strategy=STRATEGY)]
    ]
    ratios = [one["ratio"] for one in found]
    return {
        "phase": "settle",
        "settled_s": settled_s,
        "chains": len(found),
        "ratio_median": median(ratios),
        "ratio_worst": max(ratios),
        "best_ms": median(one["best_ms"] for one in found),
        "passed": max(ratios) <= NEAR,
        "runs": found,
    }


def compare(regions: Regions, client: str, chain: Sequence[tuple[str, int, int]]) -> dict[str, Any]:
    """A chain's time by the emulator's matrix and the nodes' own speeds, against the shortest."""
    site_of = regions.site_of()
    snapshot = true_snapshot(regions.look().snapshot, regions.wan, site_of)
    checkpoint_bytes = float(hidden_size(regions) * regions.options.torch_dtype.itemsize)
    request = true_request(snapshot, regions.wan, client, site_of, hidden_bytes=checkpoint_bytes)
    problem = build_problem(snapshot, request)
    hops = [Hop(PeerId(peer), Span(start, end)) for peer, start, end in chain]
    best = solve_latency(problem)
    cost_s = step_time(problem, hops_to_visits(problem, request.span, hops)).total_s
    return {
        "client": client,
        "chain": [f"{site_of[hop.peer_id]} {hop.span}" for hop in hops],
        "best": [f"{site_of[problem.peers[v.node]]} {v.start}:{v.end}" for v in best.chain],
        "cost_ms": cost_s * 1000,
        "best_ms": best.cost_s * 1000,
        "ratio": cost_s / best.cost_s,
    }


def hidden_size(regions: Regions) -> int:
    return int(open_local(regions.model).config.get_text_config().hidden_size)


def jitter(regions: Regions, seconds: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Nothing but jitter for a while: a row, and what each node carried meanwhile."""
    before, moves = spans(regions.look()), len(regions.moves())
    decided = len(regions.decisions(BOSS))
    shake(regions.wan, MORE_JITTER)
    try:
        rates = per_second(regions, seconds)
    finally:
        shake(regions.wan, 1 / MORE_JITTER)
    decisions = regions.decisions(BOSS)[decided:]
    placements = [one["reason"] for one in decisions if one["published"]]
    moved = regions.moves()[moves:]
    row = {
        "phase": "jitter",
        "seconds": seconds,
        "placements": len(placements),
        "moves": len(moved),
        "passed": not placements and not moved and spans(regions.look()) == before,
        "runs": [{"moves": moved, "decisions": [one["reason"] for one in decisions]}],
    }
    return row, {"rates": rates, "packed_bytes": regions.look().packed_bytes}


def stranger(regions: Regions) -> dict[str, Any]:
    """An orchestrator that nobody allows wants all nodes in one place."""
    look, moves = regions.look(), len(regions.moves())
    listen = f"/ip4/{regions.wan.address(STRANGER)}/tcp/0"
    attacker = regions.join(STRANGER, "benchmarks.regions.stranger", listen=listen)
    told = attacker.ask(
        "lie",
        model_id=look.snapshot.model_id,
        num_blocks=look.snapshot.num_blocks,
        nodes=[(n.peer_id, n.span.start, n.span.end) for n in look.snapshot.nodes],
        boss=regions.peer(BOSS),
    )
    time.sleep(5 * regions.pace.follow_every_s)
    refused: dict[str, int] = {}
    for site in regions.world.nodes:
        for event in regions.events(site, "placement_refused"):
            if event["signer"] in told["signers"]:
                refused[event["reason"]] = refused.get(event["reason"], 0) + 1
    ignoring = sum(
        event["peer"] == told["signers"][0]
        for site in regions.world.nodes
        for event in regions.events(site, "orchestrator_distrusted")
    )
    moved, now = regions.moves()[moves:], regions.look()
    leads = {regions.peer(BOSS), regions.peer(SECOND_BOSS)} & now.leading.keys()
    return {
        "phase": "hostile orchestrator",
        "forged_kept": told["kept"],
        "forged_offered": told["asked"],
        "refused": refused,
        "nodes_ignoring": ignoring,
        "moves": len(moved),
        "passed": not told["kept"]
        and not moved
        and bool(leads)
        and spans(now) == spans(look)
        and sum(refused.values()) > 0,
        "runs": [{"moves": moved, "leading": dict(now.leading)}],
    }


def liar(regions: Regions) -> dict[str, Any]:
    """A slow node that claims to be a hundred times as fast, next to a client."""
    moves, client = len(regions.moves()), regions.clients[CLIENTS[0]]
    decided = len(regions.decisions(BOSS))
    whole = Span(0, regions.world.num_blocks)
    regions.start_node(LIAR, whole, "--boast", str(BOAST), "--slow", str(SLOW_S))
    regions.wait_ready(LIAR)
    peer = regions.peer(LIAR)
    wait_until(
        lambda: regions.look().snapshot.find_node(peer) is not None, 60.0, "the liar is not seen"
    )
    try:
        believed = _uses(client, peer)
        began = time.monotonic()
        client.ask(
            "begin",
            sessions=[(STRATEGY, regions.options.seed + 99)],
            prompt_tokens=regions.options.prompt_tokens,
            new_tokens=600,
        )
        left_s = None
        while believed and left_s is None and time.monotonic() < began + LIAR_FOUND_S:
            time.sleep(1.0)
            (now,) = client.ask("peers")
            if now and peer not in now:
                left_s = time.monotonic() - began
        (session,) = client.ask("end")
        later = [_uses(client, peer) for _ in range(CHAINS)]
        time.sleep(3 * regions.pace.orchestrate_every_s)
        believed_still = sum(later)
        moved = regions.moves()[moves:]
    finally:
        regions.stop(LIAR)
    return {
        "phase": "liar",
        "believed_at_first": believed,
        "left_s": left_s,
        "chains_through_it_later": believed_still,
        "sessions_failed": len(session["failures"]),
        "moves": len(moved),
        "passed": not moved
        and not believed_still
        and not session["failures"]
        and (left_s is not None or not believed),
        "runs": [
            {
                "moves": moved,
                "failures": session["failures"],
                "decisions": [one["reason"] for one in regions.decisions(BOSS)[decided:]],
            }
        ],
    }


def _uses(client: Any, peer: PeerId) -> bool:
    return any(hop[0] == peer for hop in client.ask("chain", strategy=STRATEGY))


def spans(look: Look) -> dict[PeerId, Span]:
    """What each node holds or will hold."""
    everyone = (*look.snapshot.nodes, *look.snapshot.joining)
    return {node.peer_id: node.span for node in everyone}


def wait_until(happened: Callable[[], bool], timeout_s: float, otherwise: str) -> float:
    """How long it took. Raises `SwarmError` with `otherwise`."""
    began = time.monotonic()
    while not happened():
        if time.monotonic() > began + timeout_s:
            raise SwarmError(f"{otherwise}, after {timeout_s:.0f} s")
        time.sleep(1.0)
    return time.monotonic() - began
