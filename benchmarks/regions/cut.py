"""A region is cut off while sessions generate, and comes back."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.churn import is_close_call
from benchmarks.events import longest_wait
from benchmarks.generation import generate
from benchmarks.models import load_local, random_prompt
from benchmarks.regions.phases import STRATEGY, wait_until
from benchmarks.regions.swarm import Regions
from benchmarks.regions.world import BOSS, CLIENTS, LOST, REGIONS, SECOND_BOSS, region
from nesa_node.core.ids import PeerId

KINDS = (STRATEGY, "random")
"""One session each at every client. Chains at random cross regions; the best ones need not."""
CROSSING_S = 60.0
RESTORED_S = 600.0
HEALED_S = 300.0


def cut(regions: Regions) -> dict[str, Any]:
    moves = len(regions.moves())
    begin(regions)
    lost = {regions.peer(site) for site in regions.world.nodes if region(site) == LOST}
    crossing: dict[str, list[bool]] = {}

    def is_crossing() -> bool:
        """One and the same session in two looks: it is well under way."""
        before = dict(crossing)
        for client, talker in regions.clients.items():
            crossing[client] = [bool(lost.intersection(each)) for each in talker.ask("peers")]
        return any(
            all(pair)
            for client, now in crossing.items()
            for pair in zip(now, before.get(client, []), strict=False)
        )

    wait_until(is_crossing, CROSSING_S, f"no session goes through region {LOST}")
    kept = [name for name in REGIONS if name != LOST]
    at, clock = time.perf_counter(), time.monotonic()
    regions.wan.partition(regions.world.in_regions(*kept), regions.world.in_regions(LOST))
    restored_s = wait_until(lambda: is_full(regions, kept), RESTORED_S, "replicas stay missing")
    epochs = both_lead(regions)
    cut_s = time.monotonic() - clock
    regions.wan.heal()
    healed = time.monotonic()
    wait_until(lambda: is_whole(regions), HEALED_S, "the regions do not find each other again")
    healed_s = time.monotonic() - healed
    before = len(regions.moves())
    time.sleep(2 * regions.pace.orchestrate_every_s)
    afterwards = regions.moves()[before:]
    leading = regions.look().leading
    found = end(regions)
    texts = compare(regions, found)
    waits = [
        wait
        for client, sessions in found.items()
        for crossed, session in zip(crossing[client], sessions, strict=True)
        if crossed
        for times in session["times"]
        if (wait := longest_wait(times, at, at + 1.0)) is not None
    ]
    failures = [f for sessions in found.values() for one in sessions for f in one["failures"]]
    highest = max(epochs.values())
    return {
        "phase": "region lost",
        "sessions": len(KINDS) * len(CLIENTS),
        "sessions_crossing": len(waits),
        "rerouted_s": max(waits, default=None),
        "restored_s": restored_s,
        "cut_s": cut_s,
        "healed_s": healed_s,
        "moves": len(regions.moves()) - moves,
        "moves_after": len(afterwards),
        "sessions_failed": len(failures),
        **texts,
        "epochs": epochs,
        "leads_after": {regions.site_of()[PeerId(peer)]: e for peer, e in leading.items()},
        "passed": bool(waits)
        and not failures
        and not texts["texts_that_differ"]
        and len(leading) == 1
        and max(leading.values()) == highest
        and not afterwards,
        "runs": [{"failures": failures, "moves": regions.moves()[moves:], "rerouted_s": waits}],
    }


def begin(regions: Regions) -> None:
    for number, talker in enumerate(regions.clients.values()):
        talker.ask(
            "begin",
            sessions=[
                (kind, regions.options.seed + len(KINDS) * number + each)
                for each, kind in enumerate(KINDS)
            ],
            prompt_tokens=regions.options.prompt_tokens,
            new_tokens=regions.options.new_tokens,
        )


def end(regions: Regions) -> dict[str, list[dict[str, Any]]]:
    return {client: talker.ask("end") for client, talker in regions.clients.items()}


def is_full(regions: Regions, kept: list[str]) -> bool:
    """Whether nodes of those regions serve every block as often as it is wanted."""
    site_of = regions.site_of()
    snapshot = regions.look().snapshot
    gone = [n.peer_id for n in snapshot.nodes if region(site_of[n.peer_id]) not in kept]
    return min(snapshot.without_peers(*gone).coverage()) >= regions.world.replicas


def both_lead(regions: Regions) -> dict[str, int]:
    """Wait until each side has a leader of its own: their epochs."""
    epochs: dict[str, int] = {}

    def lead() -> bool:
        for site, observer in ((BOSS, "a"), (SECOND_BOSS, LOST)):
            leading = regions.look(observer).leading
            if regions.peer(site) in leading:
                epochs[site] = leading[regions.peer(site)]
        return len(epochs) == 2

    wait_until(lead, 6 * regions.pace.lease_ttl_s, "one side has no orchestrator")
    return epochs


def is_whole(regions: Regions) -> bool:
    """Whether both sides see every node, and one and the same orchestrator."""
    looks = [regions.look(name) for name in ("a", LOST)]
    count = len(regions.world.nodes)
    leaders = {tuple(look.leading.items()) for look in looks}
    return all(len(look.snapshot.nodes) == count for look in looks) and (
        len(leaders) == 1 and all(len(look.leading) == 1 for look in looks)
    )


def compare(regions: Regions, found: dict[str, list[dict[str, Any]]]) -> dict[str, int]:
    """Every text against that of local transformers (`CONTRIBUTING.md`, "the same tokens")."""
    options = regions.options
    local = load_local(regions.model, options)
    texts = {"texts": 0, "tokens": 0, "texts_that_differ": 0, "texts_excused": 0}
    for number, sessions in enumerate(found.values()):
        for each, session in enumerate(sessions):
            seed = options.seed + len(KINDS) * number + each
            prompt = random_prompt(local, options.prompt_tokens, seed)
            expected = generate(local, prompt, options.new_tokens).tokens
            for tokens in map(tuple, session["tokens"]):
                texts["texts"] += 1
                texts["tokens"] += len(tokens)
                if tokens != expected:
                    close = is_close_call(local, prompt[0].tolist(), expected, tokens)
                    texts["texts_excused" if close else "texts_that_differ"] += 1
    return texts
