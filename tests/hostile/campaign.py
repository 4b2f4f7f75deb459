"""A whole attack: every kind of it, on every node, many at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nesa_node.swarm.node import Swarm
from tests.hostile import floods, openings, push_attacks, session_attacks, transfer_attacks
from tests.hostile.attacker import Attacker, Tally
from tests.hostile.forged_records import forged_records, sybils
from tests.hostile.frames import Facts
from tests.hostile.push_attacks import Victim

Attack = Callable[[Attacker, int], Coroutine[Any, Any, None]]

AT_ONCE = 8
PORTION = 20
"""Frames that one worker sends before it goes on to another kind."""

SHARES: dict[Attack, float] = {
    openings.random_first_bytes: 0.03,
    openings.impossible_first_frames: 0.03,
    openings.mutated_recordings: 0.10,
    openings.impossible_opens: 0.06,
    session_attacks.hostile_steps: 0.11,
    session_attacks.hostile_changes: 0.10,
    session_attacks.misplaced_and_mutated_in_session: 0.09,
    transfer_attacks.strange_donors: 0.03,
    transfer_attacks.hostile_donors: 0.08,
    transfer_attacks.rival_donors: 0.02,
    transfer_attacks.awaited_donors: 0.02,
    transfer_attacks.hostile_reorders: 0.02,
    transfer_attacks.hostile_hand_overs: 0.03,
    transfer_attacks.unwanted_outputs: 0.01,
    push_attacks.hostile_upstream: 0.06,
    push_attacks.pushes_that_outlive_their_session: 0.02,
    push_attacks.rival_pushes: 0.02,
    floods.half_closed_opens: 0.04,
    forged_records: 0.05,
}
"""Which part of the frames is spent on what; the rest goes into the bystander's chain."""


async def campaign(
    swarms: Sequence[Swarm],
    targets: Sequence[Facts],
    victim: Callable[[], Victim],
    tally: Tally,
    *,
    frames: int,
    seed: int,
) -> None:
    """About `frames` frames, the same for the same seed but for their order in time."""
    rng = random.Random(seed)
    rest = max(0.0, 1.0 - sum(SHARES.values()))
    shares: list[tuple[Attack, float]] = [
        *SHARES.items(),
        (partial(push_attacks.foreign_pushes, victim=victim), rest * 2 / 3),
        (partial(transfer_attacks.foreign_transfers, victim=victim), rest / 3),
    ]
    jobs = [
        (attack, min(PORTION, count - done), rng.randbytes(8))
        for attack, share in shares
        for count in [max(1, round(frames * share))]
        for done in range(0, count, PORTION)
    ]
    rng.shuffle(jobs)

    async def worker(number: int) -> None:
        while jobs:
            attack, count, job_seed = jobs.pop()
            job_rng = random.Random(job_seed)
            attacker = Attacker(
                swarms[number % len(swarms)], job_rng.choice(targets), job_rng, tally
            )
            await attack(attacker, count)

    async with asyncio.TaskGroup() as workers:
        for number in range(AT_ONCE):
            workers.create_task(worker(number))


async def flood(
    swarm: Swarm,
    targets: Sequence[Facts],
    tally: Tally,
    *,
    seed: int,
    streams: int,
    pings: int,
    opens: int,
    folder: Path,
) -> None:
    """What counts by number or by time, not by content; all kinds at once, on every node."""
    rng = random.Random(seed)
    kinds: dict[Attack, int] = {
        floods.unread_floods: pings,
        floods.slow_loris: 4,
        push_attacks.early_pushes: 6,
        partial(sybils, folder=folder): 10,
        floods.half_closed_opens: opens,
    }

    def attacker(target: Facts) -> Attacker:
        return Attacker(swarm, target, random.Random(rng.randbytes(8)), tally)

    async with asyncio.TaskGroup() as tasks:
        for target in targets:
            for attack, count in kinds.items():
                tasks.create_task(attack(attacker(target), count))
    for target in targets:
        await floods.too_many_streams(attacker(target), streams)
