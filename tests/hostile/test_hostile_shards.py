"""Mutated messages to a node that holds shards, beside the sessions of an honest owner."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from nesa_node.client.deployment.deployment_file import DeploymentFile
from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.core.ids import PeerId, Span
from nesa_node.engine.model.shard import hash_layout, make_shard_config
from nesa_node.engine.weights.checkpoint import open_folder
from nesa_node.engine.weights.skeleton import Skeleton
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.protocol.messages import Close, Ping
from nesa_node.swarm.protocol.shard_messages import (
    SHARD_PROTOCOL,
    ShardDrop,
    ShardHeld,
    ShardPart,
    ShardPut,
    ShardQuery,
    ShardRename,
    ShardWanted,
)
from tests.client.local_models import random_ids
from tests.deployments import place, shard_daemons
from tests.engine.tiny_models import reference
from tests.hostile.attacker import DEADLINE_S, HUNG_UP, Tally, Wire, answer_of, attackers
from tests.hostile.frames import message_frame, mutate
from tests.hostile.gauge import MIB, Gauge, settled
from tests.hostile.test_hostile_private import wait_for
from tests.same_tokens import assert_same_tokens

FEW = 300
MANY = pytest.param(5_000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])
ATTACKERS, AT_ONCE = 3, 2
GROWTH = 64 * MIB
REFUSALS = (
    "bad_frame", "bad_shard", "bad_tensor", "not_a_member", "unexpected", "unknown_shard",
    "shard_exists", "no_room", "busy", HUNG_UP, "closed",
)  # fmt: skip
HARMLESS = ("shardwanted", "shardheld")
"""A mutation may leave a request that is as good, such as another number of tokens."""

pytestmark = pytest.mark.timeout(600)


def frames(folder: Path, rng: random.Random) -> tuple[list[bytes], list[bytes]]:
    """What owners send until the first part, and other messages."""
    checkpoint = open_folder(folder)
    skeleton = Skeleton(checkpoint)
    put = ShardPut(
        shard=rng.randbytes(16).hex(),
        config=make_shard_config(checkpoint, Span(1, 2)),
        blocks=1,
        dtype="float32",
        layout=hash_layout(skeleton.decoder.layers[0]),
        cache_tokens=64,
    )
    part = ShardPart(nbytes=4096)
    query = ShardQuery(shard=put.shard)
    others = [
        message_frame(put, blocks=1 << 40),
        message_frame(put, blocks=2),
        message_frame(put, config=b"{" * 60_000),
        *(
            message_frame(put, config=put.config.replace(old, new))
            for old, new in (
                (b'"hidden_size":64', b'"hidden_size":640000000'),
                (b'"hidden_size":64', b'"hidden_size":0'),
                (b'"head_dim":32', b'"head_dim":4000000000'),
                (b'"num_key_value_heads":2', b'"num_key_value_heads":0'),
                (b'"hidden_act":"silu"', b'"hidden_act":"nope"'),
                (b'"intermediate_size":96', b'"intermediate_size":-1'),
            )
        ),
        message_frame(put, cache_tokens=1 << 24),
        message_frame(put, layout=bytes(32)),
        message_frame(put, shard="../../etc/passwd"),
        message_frame(part, bytes(4096), nbytes=1 << 62),
        message_frame(part, bytes(4095)),
        message_frame(query),
        message_frame(query, shard=""),
        message_frame(ShardRename(shard=put.shard, new=put.shard)),
        message_frame(ShardDrop(shard=put.shard)),
        message_frame(ShardWanted(nbytes=1)),
        message_frame(
            ShardHeld(
                prefill_tokens_per_s=1.0,
                decode_tokens_per_s=1.0,
                total_cache_tokens=1,
                free_cache_tokens=1,
            )
        ),
        message_frame(Close()),
        message_frame(Ping(nonce=1)),
    ]
    return [message_frame(put), message_frame(part, bytes(4096))], others


async def attack(
    swarms: Sequence[Swarm], peer: PeerId, folder: Path, tally: Tally, count: int
) -> None:
    rng = random.Random(1)
    left = count

    async def worker(swarm: Swarm) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            order, others = await asyncio.to_thread(frames, folder, rng)
            at = rng.choices((0, 1), weights=(3, 1))[0]
            pipes = await swarm.transport.open_stream(peer, SHARD_PROTOCOL, timeout_s=DEADLINE_S)
            wire = Wire(peer, *pipes)
            try:
                if at:
                    await wire.send(order[0])
                    await wire.receive()
                await wire.send(mutate(order[at], [*order, *others], rng))
                tally.note(f"message {at}", await answer_of(wire), (*REFUSALS, *HARMLESS))
            finally:
                await wire.stream.close()

    async with asyncio.TaskGroup() as workers:
        for swarm in swarms:
            for _ in range(AT_ONCE):
                workers.create_task(worker(swarm))


@contextmanager
def owner(folder: Path, file: DeploymentFile) -> Iterator[list[Any]]:
    """An honest owner's client, and what it generated; it ends with the context."""
    found: list[Any] = []
    over = threading.Event()
    prompt = random_ids(1, 5)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}

    def generate() -> None:
        with AutoDistributedModelForCausalLM.from_pretrained(
            folder, deployment=file.path, dtype=torch.float32
        ) as model:
            while not over.is_set():
                try:
                    tokens = model.generate(prompt, **options)
                    assert_same_tokens(reference(folder), tokens, prompt, **options)
                except BaseException as error:  # of a thread, which a test would not see
                    found.append(error)
                    return
                found.append(tokens)

    thread = threading.Thread(target=generate)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("count", [FEW, MANY])
async def test_a_member_refuses_mutated_messages_and_serves_on(
    tiny: Callable[[str], Path], tmp_path: Path, count: int
) -> None:
    folder, file = tiny("llama"), DeploymentFile(tmp_path / "deployment.json")
    with shard_daemons(tmp_path, 1) as (daemon,):
        await asyncio.to_thread(place, folder, [daemon.address], file, splits=1)
        pid = daemon.process.pid
        async with attackers(tmp_path, [daemon.address], ATTACKERS) as swarms:
            tally = Tally()
            with owner(folder, file) as found:
                await asyncio.to_thread(wait_for, found, 1)
                await attack(swarms, daemon.peer_id, folder, tally, count // 4)
                before = Gauge.of(pid)
                generated = len(found)
                await attack(swarms, daemon.peer_id, folder, tally, count - count // 4)
                await asyncio.to_thread(wait_for, found, generated + 1)
            errors = [each for each in found if isinstance(each, BaseException)]
            assert not errors, errors
        after = settled(pid, before.files, 30.0)
        print(tally.summary(), before, after, sep="\n")
        assert daemon.process.poll() is None
        assert tally.frames == count
        assert not tally.failures()
        assert after.rss - before.rss < GROWTH
        log = (daemon.folder / "log").read_text()
        assert not [line for line in log.splitlines() if "failed" in line or "Traceb" in line]
