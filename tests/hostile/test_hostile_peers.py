"""Daemons under attack: they stay up, serve others, answer everything and keep nothing."""

from __future__ import annotations

import asyncio
import random
import re
import resource
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from nesa_node.cli.services.local_swarm import LocalNode
from nesa_node.core.ids import ModelId, Span
from nesa_node.swarm.node import Swarm, open_swarm
from nesa_node.swarm.p2p.identity import Identity
from tests.engine.tiny_models import BLOCKS, save_tiny_model
from tests.hostile import transfer_attacks
from tests.hostile.attacker import Attacker, Tally
from tests.hostile.bystander import Bystander, bystander
from tests.hostile.campaign import Attack, campaign, flood
from tests.hostile.daemons import (
    check_every_page_can_be_written,
    check_nothing_is_held,
    connect_to,
    facts_of,
)
from tests.hostile.frames import Facts
from tests.hostile.gauge import MIB, Gauge, settled
from tests.hostile.session_attacks import closed_politely
from tests.swarms import Daemons, daemons

SPANS = [Span(0, BLOCKS // 2), Span(BLOCKS // 2, BLOCKS)]
CACHE_TOKENS = 8192
FLAGS = (
    *("--attn-cache-tokens", str(CACHE_TOKENS), "--max-cache-tokens-per-peer", "3000"),
    *("--record-ttl-s", "3", "--log-format", "console"),
)
GROWTH = 16 * MIB
P2PD_GROWTH = 64 * MIB
"""Go's collector gives memory back late."""


@dataclass
class Scene:
    daemons: Daemons
    honest: Swarm
    attackers: Sequence[Swarm]
    targets: Sequence[Facts]
    bystander: Bystander

    def gauges(self) -> list[Gauge]:
        return [Gauge.of(node.process.pid) for node in self.daemons.nodes]


@asynccontextmanager
async def _scene(folder: Path) -> AsyncIterator[Scene]:
    model = save_tiny_model("llama", folder)
    async with AsyncExitStack() as stack:
        running = stack.enter_context(daemons(model, folder, *FLAGS))
        running.start_all(SPANS)
        swarms = [
            await stack.enter_async_context(
                open_swarm(
                    Identity.ephemeral(folder), initial_peers=running.addresses, listen=False
                )
            )
            for _ in range(4)
        ]
        targets = await facts_of(running.nodes, swarms[0])
        for swarm in swarms[1:]:
            await connect_to(targets, swarm)
        one = stack.enter_context(bystander(model, running.addresses))
        try:
            yield Scene(running, swarms[0], swarms[1:], targets, one)
        except BaseException:
            for node in running.nodes:
                print(node.peer_id, *running.log(node).splitlines()[-60:], sep="\n")
            raise
        one.stop()
        await _check_directory(swarms[0], targets, running.nodes)
        await check_nothing_is_held(swarms[0], targets)
        await check_every_page_can_be_written(swarms, targets, CACHE_TOKENS)
        for node in running.nodes:
            _check_log(running.log(node))


async def _check_directory(
    swarm: Swarm, targets: Sequence[Facts], nodes: Sequence[LocalNode]
) -> None:
    """An honest member reads of the daemons what they wrote, whoever else wrote what."""
    snapshot = await swarm.directory.fetch(ModelId(targets[0].model_id), BLOCKS)
    found = {state.peer_id: (state.span, state.addresses) for state in snapshot.nodes}
    assert found == {node.peer_id: (node.span, node.addresses) for node in nodes}


def _check_log(log: str) -> None:
    bad = [
        line
        for line in log.splitlines()
        if re.match("Traceback|  File ", line)
        or "stream_handler_failed" in line
        or "task_failed" in line
        or "[error" in line
    ]
    assert not bad, "\n".join(bad[:20])


@dataclass(frozen=True, slots=True)
class Plan:
    frames: int
    streams: int
    pings: int
    opens: int
    flooded_halves: int


FEW = Plan(frames=1000, streams=40, pings=2000, opens=40, flooded_halves=1)
MANY = Plan(frames=5000, streams=300, pings=50_000, opens=1000, flooded_halves=2)


async def _attack(folder: Path, plan: Plan, seed: int) -> None:
    tally = Tally()
    async with _scene(folder) as scene:
        processes = [node.process for node in scene.daemons.nodes]
        before = scene.gauges()
        measured = [before]
        started = time.monotonic()
        for half in range(2):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(
                    campaign(
                        scene.attackers[1:],
                        scene.targets,
                        scene.bystander.victim,
                        tally,
                        frames=plan.frames // 2,
                        seed=2 * seed + half,
                    )
                )
                if half < plan.flooded_halves:
                    tasks.create_task(
                        flood(
                            scene.attackers[0],
                            scene.targets,
                            tally,
                            seed=seed,
                            streams=plan.streams,
                            pings=plan.pings,
                            opens=plan.opens,
                            folder=folder,
                        )
                    )
            measured.append(
                [
                    settled(process.pid, gauge.files + 6, 15)
                    for process, gauge in zip(processes, before, strict=True)
                ]
            )
        took_s = time.monotonic() - started
        for target in scene.targets:
            attacker = Attacker(scene.attackers[0], target, random.Random(0), tally)
            await closed_politely(attacker)
        assert all(process.poll() is None for process in processes)
        print(
            f"{tally.frames} frames in {took_s:.0f} s; the bystander got "
            f"{scene.bystander.tokens} equal tokens, {scene.bystander.recoveries} recoveries"
        )
        for moment, gauges in zip(("before", "first half", "second half"), measured, strict=True):
            print(f"{moment}: " + "; ".join(map(str, gauges)))
        print(tally.summary())
    assert not tally.failures()
    assert tally.frames >= plan.frames
    assert scene.bystander.tokens > 0
    for start, first, second in zip(*measured, strict=True):
        assert second.rss - first.rss < GROWTH
        assert second.p2pd_rss - first.p2pd_rss < P2PD_GROWTH
        assert second.files <= start.files + 6
        assert second.threads <= start.threads + 1


@pytest.mark.timeout(120)
async def test_a_thousand_hostile_frames_are_answered_and_leave_nothing(tmp_path: Path) -> None:
    await _attack(tmp_path, FEW, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2])
async def test_five_thousand_hostile_frames_are_answered_and_leave_nothing(
    tmp_path: Path, seed: int
) -> None:
    await _attack(tmp_path, MANY, seed)


IN_TURN: dict[Attack, int] = {
    transfer_attacks.strange_donors: 16,
    transfer_attacks.hostile_donors: 54,
    transfer_attacks.rival_donors: 8,
    transfer_attacks.awaited_donors: 6,
    transfer_attacks.hostile_reorders: 5,
    transfer_attacks.hostile_hand_overs: 12,
    transfer_attacks.unwanted_outputs: 10,
}
"""How many frames each attack by or with a donor, a fork or a hand-over takes for all its cases."""


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_donors_forks_and_hand_overs_leave_a_bystander_alone(tmp_path: Path) -> None:
    tally = Tally()
    async with _scene(tmp_path) as scene:
        foreign = partial(transfer_attacks.foreign_transfers, victim=scene.bystander.victim)
        attacks: dict[Attack, int] = {**IN_TURN, foreign: 4}
        measured, before = [scene.gauges()], scene.bystander.tokens
        for turn in range(2):
            for attack, count in attacks.items():
                for target in scene.targets:
                    rng = random.Random(turn)
                    await attack(Attacker(scene.attackers[turn], target, rng, tally), count)
                assert all(node.process.poll() is None for node in scene.daemons.nodes)
            measured.append(scene.gauges())
        print(tally.summary())
    assert not tally.failures()
    assert scene.bystander.tokens > before
    for _, first, second in zip(*measured, strict=True):
        assert second.rss - first.rss < GROWTH
        assert second.threads <= first.threads + 1


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_streams_of_several_peers_leave_a_node_its_files(tmp_path: Path) -> None:
    """Else it could not announce itself any more, nor be reached by anybody."""
    model = save_tiny_model("llama", tmp_path)
    async with AsyncExitStack() as stack:
        running = stack.enter_context(daemons(model, tmp_path, *FLAGS))
        node = running.start(Span(0, BLOCKS))
        resource.prlimit(node.process.pid, resource.RLIMIT_NOFILE, (300, 300))
        honest, *others = [
            await stack.enter_async_context(
                open_swarm(Identity.ephemeral(tmp_path), initial_peers=node.addresses, listen=False)
            )
            for _ in range(3)
        ]
        [facts] = await facts_of([node], honest)
        async with AsyncExitStack() as streams:
            for swarm in others:
                attacker = Attacker(swarm, facts, random.Random(0), Tally())
                for _ in range(200):
                    await streams.enter_async_context(attacker.wire())
            assert Gauge.of(node.process.pid).files < 200
            await asyncio.sleep(4)  # a record's life is 3 s
            assert len(await honest.directory.fetch_all()) == 1
        await asyncio.sleep(1)
        await closed_politely(Attacker(honest, facts, random.Random(0), Tally()))
        _check_log(running.log(node))
