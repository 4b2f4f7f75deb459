"""Load without pause leaves a swarm as it was: memory, pages, and the tokens of every session."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from nesa_node.cli.services.local_swarm import LocalNode
from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.core.settings.choices import RouteName
from nesa_node.swarm.node import Swarm, open_swarm
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.swarm.protocol.messages import RowSlice
from tests.client.local_models import random_ids
from tests.engine.tiny_models import BLOCKS
from tests.faults.runs import generate
from tests.hostile.attacker import Attacker, Tally
from tests.hostile.daemons import (
    check_every_page_can_be_written,
    check_nothing_is_held,
    connect_to,
    facts_of,
)
from tests.hostile.frames import Facts
from tests.same_tokens import ReferenceRun, assert_same_as, run_reference
from tests.swarms import daemons, thirds

DURATION_S = float(os.environ.get("ENDURANCE_S", "1800"))
SAMPLES = 100
FIFTHS = 5
MIB = 1 << 20
GROWTH_BYTES, GROWTH_PART = 8 * MIB, 0.03
"""From the third fifth's median to the last's. Allocators and Go's collector let USS wander by a
few MiB without end; what is lost with each session or step adds up to more: half an hour of load is
some fifteen thousand sessions, so that 8 MiB are less than 1.5 kB of each of the last 6,000.
`ENDURANCE_S` makes it shorter, to a minute or two: on a busy machine Go's heap fills until the
second fifth of these."""

CACHE_TOKENS = 8192
FLAGS = (
    *("--attn-cache-tokens", str(CACHE_TOKENS), "--max-cache-tokens-per-peer", str(CACHE_TOKENS)),
    *("--record-ttl-s", "6", "--log-format", "console"),
)
ROUTES: tuple[RouteName, ...] = ("chain", "chain", "star")
NEW_TOKENS, ROWS, LENGTH = 20, 3, 160
SOURCES = ([0, 0, 2], [2, 1, 0], [1, 1, 1])


class Prompts:
    """Texts, and how transformers alone goes on from them: computed once, compared each time."""

    def __init__(self, alone: PreTrainedModel) -> None:
        def run(ids_BL: Tensor) -> ReferenceRun:
            mask_BL = torch.ones_like(ids_BL)
            options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
            return run_reference(alone, ids_BL, mask_BL, **options)

        firsts = [random_ids(1, columns, seed=columns) for columns in (5, 33, 64, 100)]
        self.texts = [run(ids_BL) for ids_BL in firsts]
        others = [
            torch.cat([ids_BL[:, : ids_BL.shape[1] // 2], random_ids(1, 17, seed=77)], 1)
            for ids_BL in firsts
        ]
        self.turns = list(zip(self.texts, [run(ids_BL) for ids_BL in others], strict=True))
        self.batch_BL = random_ids(ROWS, 40, seed=5)
        self.forks = [(sources, run(self.batch_BL[sources])) for sources in SOURCES]


class _Enough(Exception):
    """What a user does who has seen enough."""


@dataclass
class _StopAfter(BaseStreamer):
    tokens: int

    def put(self, value: Tensor) -> None:
        self.tokens -= 1
        if self.tokens < 0:
            raise _Enough

    def end(self) -> None:
        pass


class Client:
    """Does one thing after another with sessions of its own, and compares all tokens."""

    def __init__(
        self, model: DistributedModelForCausalLM, prompts: Prompts, rng: random.Random
    ) -> None:
        self.done: Counter[str] = Counter()
        self._model = model
        self._prompts = prompts
        self._rng = rng

    def work(self, stopping: threading.Event) -> None:
        """Until `stopping`, which it sets itself if anything is wrong. Raises what was."""
        acts = (self.generate, self.roll_back, self.fork, self.cancel)
        try:
            while not stopping.is_set():
                act = self._rng.choice(acts)
                act()
                self.done[act.__name__] += 1
        finally:
            stopping.set()

    def generate(self) -> None:
        run = self._rng.choice(self._prompts.texts)
        with self._model.inference_session(LENGTH) as session:
            ids_BL = run.input_ids_BL
            assert_same_as(run, generate(self._model, ids_BL, session, new_tokens=NEW_TOKENS))

    def roll_back(self) -> None:
        """Another text in the same session, which keeps what both begin with."""
        first, second = self._rng.choice(self._prompts.turns)
        with self._model.inference_session(LENGTH) as session:
            session.step(first.input_ids_BL)
            session.rollback([self._rng.randint(0, first.prompt_columns)])
            for run in (second, first):
                ids_BL = run.input_ids_BL
                assert_same_as(run, generate(self._model, ids_BL, session, new_tokens=NEW_TOKENS))

    def fork(self) -> None:
        sources, run = self._rng.choice(self._prompts.forks)
        with self._model.inference_session(LENGTH, ROWS) as session:
            session.step(self._prompts.batch_BL)
            session.reorder(sources)
            ids_BL = run.input_ids_BL
            assert_same_as(run, generate(self._model, ids_BL, session, new_tokens=NEW_TOKENS))

    def cancel(self) -> None:
        ids_BL = self._rng.choice(self._prompts.texts).input_ids_BL
        streamer = _StopAfter(self._rng.randint(1, NEW_TOKENS - 2))
        with self._model.inference_session(LENGTH) as session, pytest.raises(_Enough):
            generate(self._model, ids_BL, session, new_tokens=NEW_TOKENS, streamer=streamer)


async def _disconnect(
    attackers: Sequence[Attacker], stopping: threading.Event, rng: random.Random
) -> int:
    """Clients that go without a word, in the middle of prefills and of steps."""
    gone = 0
    try:
        while not stopping.is_set():
            async with rng.choice(attackers).session(rows=1, max_tokens=500) as session:
                await session.link(lengths=(0,), emit_from=(0,))
                count = rng.choice([1, 20, 500])
                await session.wire.send(session.step(count=count, rows=(RowSlice(0, 0, count),)))
                await asyncio.sleep(rng.uniform(0, 0.05))
            gone += 1
            await asyncio.sleep(rng.uniform(0, 0.3))
    finally:
        stopping.set()
    return gone


class Memory:
    """Bytes that only a daemon, or its p2pd, has (USS), over time."""

    def __init__(self, nodes: Sequence[LocalNode]) -> None:
        self._processes: dict[str, psutil.Process] = {}
        for node in nodes:
            process = psutil.Process(node.process.pid)
            [p2pd] = [child for child in process.children() if "p2pd" in child.name()]
            self._processes |= {node.name: process, f"{node.name}'s p2pd": p2pd}
        self._samples: dict[str, list[int]] = {name: [] for name in self._processes}

    async def sample(self, stopping: threading.Event) -> None:
        for _ in range(SAMPLES):
            if stopping.is_set():
                return
            for name, process in self._processes.items():
                self._samples[name].append(process.memory_full_info().uss)
            await asyncio.sleep(DURATION_S / SAMPLES)

    def check(self) -> None:
        """After two fifths, in which caches fill, it does not grow any more."""
        found = {}
        for name, samples in self._samples.items():
            fifth = len(samples) // FIFTHS
            assert fifth > 1, f"the load ended after {len(samples)} samples"
            medians = [
                statistics.median(samples[n * fifth : (n + 1) * fifth]) for n in range(FIFTHS)
            ]
            print(name, *(f"{median / MIB:.1f}" for median in medians), "MiB")
            if medians[-1] - medians[2] > max(GROWTH_BYTES, GROWTH_PART * medians[2]):
                found[name] = [round(sample / MIB, 1) for sample in samples]
        assert not found, f"memory grows: {found}"


async def _load(
    models: Sequence[DistributedModelForCausalLM],
    attackers: Sequence[Attacker],
    prompts: Prompts,
    memory: Memory,
) -> None:
    """For as long as there are samples to take. Raises what went wrong for anybody."""
    stopping = threading.Event()
    clients = [Client(model, prompts, random.Random(n)) for n, model in enumerate(models)]
    working = [asyncio.to_thread(client.work, stopping) for client in clients]
    goers = asyncio.create_task(_disconnect(attackers, stopping, random.Random(9)))

    async def watch() -> None:
        try:
            await memory.sample(stopping)
        finally:
            stopping.set()

    results = await asyncio.gather(*working, goers, watch(), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    done = sum((client.done for client in clients), Counter())
    assert set(done) == {"generate", "roll_back", "fork", "cancel"}
    print(f"{dict(done)} sessions with equal tokens, {goers.result()} that went without a word")


@dataclass(frozen=True, slots=True)
class Scene:
    swarms: Sequence[Swarm]
    targets: Sequence[Facts]

    def attackers(self) -> list[Attacker]:
        return [
            Attacker(swarm, target, random.Random(number), Tally())
            for number, swarm in enumerate(self.swarms)
            for target in self.targets
        ]

    async def fill(self) -> None:
        """Every page is free, and can be written. Afterwards all of the pool's memory is taken."""
        await check_nothing_is_held(self.swarms[0], self.targets)
        await check_every_page_can_be_written(self.swarms, self.targets, CACHE_TOKENS)


async def _scene(stack: AsyncExitStack, nodes: Sequence[LocalNode], folder: Path) -> Scene:
    swarms = [
        await stack.enter_async_context(
            open_swarm(Identity.ephemeral(folder), initial_peers=nodes[0].addresses, listen=False)
        )
        for _ in range(4)
    ]
    targets = await facts_of(nodes, swarms[0])
    for swarm in swarms:
        await connect_to(targets, swarm)
    return Scene(swarms, targets)


@pytest.mark.slow
@pytest.mark.timeout(DURATION_S + 300)
async def test_memory_stays_flat_under_load(
    alone: PreTrainedModel, tiny_llama: Path, tmp_path: Path
) -> None:
    prompts = Prompts(alone)
    with ExitStack() as stack:
        running = stack.enter_context(daemons(tiny_llama, tmp_path, *FLAGS))
        nodes = running.start_all(thirds(BLOCKS))
        async with AsyncExitStack() as peers:
            scene = await _scene(peers, running.nodes, tmp_path)
            await scene.fill()
            models = [
                stack.enter_context(
                    AutoDistributedModelForCausalLM.from_pretrained(
                        tiny_llama,
                        initial_peers=running.addresses,
                        routing=routing,
                        dtype=torch.float32,
                    )
                )
                for routing in ROUTES
            ]
            memory = Memory(nodes)
            started = time.monotonic()
            await _load(models, scene.attackers(), prompts, memory)
            print(f"{time.monotonic() - started:.0f} s")
            await scene.fill()
        assert all(node.process.poll() is None for node in nodes)
        memory.check()
