"""Private deployments: tokens, members that die, lie or are searched, and changes under way."""

from __future__ import annotations

import asyncio
import random
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any

import psutil
import pytest
import torch

from nesa_node.client.deployment.deployment_file import Deployment, DeploymentFile
from nesa_node.client.deployment.operations import move, rotate, withdraw
from nesa_node.client.deployment.shard_requests import ShardRequests
from nesa_node.client.model.auto import AutoDistributedModelForCausalLM
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.core.errors import (
    ConfigError,
    MissingBlocksError,
    NesaError,
    RemoteError,
    UnsupportedFeatureError,
)
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.model.shard import ShardLoader
from nesa_node.engine.weights.hub import open_checkpoint
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.hivemind_imports import PeerID
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.swarm.protocol.messages import PROTOCOL
from tests.client.local_models import random_ids
from tests.deployments import (
    ShardDaemon,
    place,
    run_as_owner,
    shard_daemons,
    shard_members,
)
from tests.engine.tiny_models import BLOCKS, HIDDEN, VOCABULARY, reference
from tests.first_is_fast import first_is_fast
from tests.hostile.attacker import Wire, describe
from tests.hostile.frames import Facts, message_frame, open_message
from tests.same_tokens import assert_same_tokens

pytestmark = pytest.mark.timeout(300)

OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(scope="module")
def llama(tiny: Callable[[str], Path]) -> Path:
    return tiny("llama")


@pytest.fixture
def file(tmp_path: Path) -> DeploymentFile:
    return DeploymentFile(tmp_path / "deployments" / "secret.json")


def deployed_model(
    folder: Path, file: DeploymentFile, **options: Any
) -> DistributedModelForCausalLM:
    return AutoDistributedModelForCausalLM.from_pretrained(
        folder, deployment=file.path, dtype=torch.float32, **options
    )


@pytest.mark.parametrize("family", first_is_fast("llama", "qwen3", "bloom", "gemma2", "mixtral"))
def test_tokens_are_those_of_transformers(
    family: str, tiny: Callable[[str], Path], tmp_path: Path, file: DeploymentFile
) -> None:
    folder, prompt = tiny(family), random_ids(2, 6)
    with shard_members(tmp_path, 2) as members:
        place(folder, members, file)
        with deployed_model(folder, file) as model:
            assert_same_tokens(
                reference(folder), model.generate(prompt, **OPTIONS), prompt, **OPTIONS
            )
            with model.inference_session(max_length=20, batch_size=2) as session:
                logits = session.step(prompt)
                assert [hop.span.start for hop in session.hops] == [0, 1, 3, 5]
                session.rollback([2, 2])
                again = session.step(prompt[:, 2:])
    with torch.inference_mode():
        whole = reference(folder)(prompt).logits
    assert torch.allclose(logits, whole, atol=1e-4)
    assert torch.allclose(again, whole[:, 2:], atol=1e-4)


def test_only_the_owner_reads_the_file(llama: Path, tmp_path: Path, file: DeploymentFile) -> None:
    with shard_members(tmp_path, 3) as members:
        deployment = place(llama, members, file, splits=3)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    ids = [shard.id for split in deployment.splits for shard in split.shards]
    assert len({*ids}) == 3
    assert [split.blocks for split in deployment.splits] == [(1, 2), (2, 3), (3, 5)]
    assert file.read() == deployment


def altered(
    finish: Callable[[ShardLoader], ModelBlocks], by: float = 1.5
) -> Callable[[ShardLoader], ModelBlocks]:
    """`finish` of which the first one changes what its blocks compute."""
    made = 0

    def alter(loader: ShardLoader) -> ModelBlocks:
        nonlocal made
        made += 1
        if made == 1:
            for layer in getattr(loader._decoder, loader._model.family.layers_name):
                layer.mlp.down_proj.weight.mul_(by)
        return finish(loader)

    return alter


def test_a_member_that_is_outvoted_is_replaced_and_barred(
    llama: Path, tmp_path: Path, file: DeploymentFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShardLoader, "finish", altered(ShardLoader.finish))
    prompt = random_ids(1, 6)
    with shard_members(tmp_path, 5) as members:
        before = place(llama, members, file, splits=1, verifiers=3)
        assert len(before.spares) == 2
        with deployed_model(llama, file) as model:
            for _ in range(2):
                tokens = model.generate(prompt, **OPTIONS)
                assert_same_tokens(reference(llama), tokens, prompt, **OPTIONS)
    after = file.read()
    (liar,) = after.barred
    assert liar in {shard.peer for shard in before.splits[0].shards}
    assert liar not in {shard.peer for shard in after.splits[0].shards}
    assert len({shard.peer for shard in after.splits[0].shards}) == 3


async def refusals(deployment: Deployment, swarm: Swarm) -> list[str]:
    """How members refuse the ids of a deployment, all of them."""
    requests = ShardRequests(swarm, deployment.members)
    codes = []
    for shard in deployment.shards:
        with pytest.raises(RemoteError) as refused:
            await requests.query(shard.peer, shard.id)
        codes.append(refused.value.code)
    return codes


def test_ids_and_members_change_under_a_session(
    llama: Path, tmp_path: Path, file: DeploymentFile
) -> None:
    prompt = random_ids(1, 6)
    checkpoint = open_checkpoint(str(llama), cache_dir=tmp_path)
    reports: list[str] = []
    with shard_members(tmp_path, 3) as members:
        before = place(llama, members, file)
        with (
            deployed_model(llama, file) as model,
            model.inference_session(max_length=20) as session,
        ):
            logits = [session.step(prompt[:, :2])]
            run_as_owner(members, lambda swarm: rotate(file, swarm, reports.append))
            rotated = file.read()
            assert run_as_owner(members, partial(refusals, before)) == ["unknown_shard"] * 2
            logits.append(session.step(prompt[:, 2:4]))
            run_as_owner(members, lambda swarm: move(file, checkpoint, swarm, reports.append))
            moved = file.read()
            logits.append(session.step(prompt[:, 4:]))
            assert [hop.peer_id for hop in session.hops[1:-1]] == [
                split.shards[0].peer for split in moved.splits
            ]
            with model.inference_session(max_length=20) as another:
                assert another.step(prompt).shape == (1, 6, VOCABULARY)
        assert run_as_owner(members, partial(refusals, rotated)) == ["unknown_shard"] * 2
    for old, new in zip(before.splits, rotated.splits, strict=True):
        assert old.shards[0].peer == new.shards[0].peer
        assert old.shards[0].id != new.shards[0].id
    for old, new in zip(rotated.splits, moved.splits, strict=True):
        assert old.shards[0].peer != new.shards[0].peer
    with torch.inference_mode():
        whole = reference(llama)(prompt).logits
    assert torch.allclose(torch.cat(logits, 1), whole, atol=1e-4)


def test_a_withdrawn_deployment_leaves_nothing(
    llama: Path, tmp_path: Path, file: DeploymentFile
) -> None:
    with shard_members(tmp_path, 2, shards_gib=0.002) as members:
        place(llama, members, file, cache_tokens=1024)
        run_as_owner(members, lambda swarm: withdraw(file, swarm, lambda _: None))
        assert list(file.path.parent.iterdir()) == []
        place(llama, members, file, cache_tokens=1024)  # there is room again
        with pytest.raises(ConfigError, match="--withdraw"):
            place(llama, members, file)


def test_what_members_refuse_is_told(
    llama: Path, tiny: Callable[[str], Path], tmp_path: Path, file: DeploymentFile
) -> None:
    (tmp_path / "other").mkdir()
    with (
        shard_members(tmp_path, 2, shards_gib=0.001) as members,
        shard_members(
            tmp_path / "other",
            1,
            allow_peers=("12D3KooWJvKvZ1EHKxvrF7AY4kLvDbk7gcCm1guBmFCkL5hCdAcX",),
        ) as closed,
    ):
        with pytest.raises(RemoteError, match="left for shards"):
            place(llama, members, file)
        with pytest.raises(RemoteError, match="does not serve this peer"):
            place(llama, closed, file, splits=1)
        with pytest.raises(ConfigError, match="2 splits of 3 verifiers need 6 members"):
            place(llama, members, file, verifiers=3)
        with pytest.raises(ConfigError, match="too few"):
            place(llama, members, file, splits=BLOCKS)
        with pytest.raises(ConfigError, match="no bound was fitted"):
            place(tiny("qwen3"), members, file, splits=1, verifiers=2)
        with pytest.raises(ConfigError, match="first and the last"):
            place(llama, members, file, client_blocks=(0, 1))
    assert not file.path.exists()


def test_a_file_that_is_not_of_this_model_is_refused(
    llama: Path, tiny: Callable[[str], Path], tmp_path: Path, file: DeploymentFile
) -> None:
    with pytest.raises(ConfigError, match="there is no deployment"):
        deployed_model(llama, file)
    with shard_members(tmp_path, 2) as members:
        place(llama, members, file)
    with pytest.raises(ConfigError, match="is a deployment of llama"):
        deployed_model(tiny("qwen3"), file)
    with pytest.raises(ConfigError, match="leaves"):
        deployed_model(llama, file, client_blocks=(2, 2))
    with pytest.raises(ConfigError, match="leave out"):
        deployed_model(llama, file, verify="2of3")
    file.path.write_text("{}")
    with pytest.raises(ConfigError, match="is no deployment"):
        deployed_model(llama, file)


def test_adapters_and_lost_members_without_a_spare_are_refused(
    llama: Path, tmp_path: Path, file: DeploymentFile
) -> None:
    with shard_members(tmp_path, 2) as members:
        place(llama, members, file)
        with (
            deployed_model(llama, file, adapter="author/name") as model,
            pytest.raises(UnsupportedFeatureError, match="adapters"),
        ):
            model.generate(random_ids(1, 4), **OPTIONS)
    with (
        deployed_model(llama, file, recovery_timeout_s=2) as model,
        pytest.raises(MissingBlocksError),
    ):
        model.generate(random_ids(1, 4), **OPTIONS)


def test_nothing_of_it_is_on_a_dht(llama: Path, tmp_path: Path, file: DeploymentFile) -> None:
    with (
        shard_daemons(tmp_path, 3) as first,
        shard_daemons(tmp_path / "joined", 1, "--initial-peers", first[0].address) as more,
    ):
        daemons = [*first, *more]
        place(llama, [each.address for each in daemons], file, splits=4)
        with deployed_model(llama, file) as model:
            model.generate(random_ids(1, 4), **OPTIONS)

        async def look(swarm: Swarm) -> int:
            return len(await swarm.directory.fetch_all())

        for each in daemons:
            assert run_in_swarm_of(each, look) == 0


def run_in_swarm_of(daemon: ShardDaemon, work: Any) -> Any:
    from nesa_node.client.routing.request import ConnectionOptions
    from nesa_node.client.session.connection import join_as_client

    async def run() -> Any:
        async with join_as_client(ConnectionOptions(initial_peers=(daemon.address,))) as swarm:
            return await work(swarm)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ShardDaemon]]:
    with shard_daemons(tmp_path_factory.mktemp("daemons"), 4) as found:
        yield found


def memory_of(pid: int) -> Iterator[bytes]:
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb") as memory:
        for line in maps:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if "r" not in line.split()[1] or "[v" in line:
                continue
            try:
                memory.seek(start)
                yield memory.read(end - start)
            except (OSError, ValueError):
                continue


NAMES = [
    re.compile(pattern)
    for pattern in (rb"layers\.\d+\.[\w.]*weight", rb"embed_tokens\.weight", rb"lm_head\.weight")
]
"""One by one: a search for a literal beginning is many times as fast."""


def names_in_memory(daemon: ShardDaemon) -> set[bytes]:
    return {
        name
        for part in memory_of(daemon.process.pid)
        for names in NAMES
        for name in names.findall(part)
    }


@pytest.mark.slow
def test_no_name_and_no_place_is_on_a_members_disk_or_in_its_memory(
    llama: Path, daemons: list[ShardDaemon], file: DeploymentFile
) -> None:
    before = [names_in_memory(each) for each in daemons]
    deployment = place(llama, [each.address for each in daemons], file, splits=4)
    with deployed_model(llama, file) as model:
        model.generate(random_ids(1, 4), **OPTIONS)
    secrets = [deployment.model.encode(), llama.name.encode(), str(file.path).encode()]
    weights = open_checkpoint(str(llama), cache_dir=llama)
    for each, known in zip(daemons, before, strict=True):
        own = {s.id for split in deployment.splits for s in split.shards if s.peer == each.peer_id}
        foreign = [
            text.encode()
            for split in deployment.splits
            for shard in split.shards
            if shard.id not in own
            for text in (shard.id, shard.peer)
        ]
        assert names_in_memory(each) <= known
        held = False
        (block,) = (
            split.blocks[0] for split in deployment.splits if split.shards[0].peer == each.peer_id
        )
        row = weights.read(f"model.layers.{block}.self_attn.q_proj.weight")[0]
        sample = row.float().numpy().tobytes()
        for part in memory_of(each.process.pid):
            held |= sample in part
            for secret in (*secrets, *foreign):
                assert secret not in part, secret
        assert held, "the search itself is broken"
        for path in (*each.folder.rglob("*"), *each.temporary.rglob("*")):
            if path.is_file():
                data = path.read_bytes()
                assert not any(names.search(data) for names in NAMES), path
                assert not any(secret in data for secret in (*secrets, *foreign)), path
                assert sample not in data, path
    run_as_owner(
        [each.address for each in daemons], lambda swarm: withdraw(file, swarm, lambda _: None)
    )


def searched(pid: int) -> Iterator[bytes]:
    """Memory of a member's process, and of its libp2p daemon."""
    for each in (pid, *(child.pid for child in psutil.Process(pid).children())):
        yield from memory_of(each)


@pytest.mark.slow
def test_members_do_not_learn_of_each_other_when_one_dies(
    llama: Path, tmp_path: Path, file: DeploymentFile
) -> None:
    with shard_daemons(tmp_path, 3) as daemons:
        place(llama, [each.address for each in daemons], file)
        with deployed_model(llama, file) as model:
            model.generate(random_ids(1, 6), **OPTIONS)
            holding = {split.shards[0].peer for split in file.read().splits}
            dead = next(each for each in daemons if each.peer_id in holding)
            dead.kill()
            for _ in range(2):
                model.generate(random_ids(1, 6), **OPTIONS)
        run_as_owner([each.address for each in daemons], lambda swarm: leave(file, swarm))
        living = [each for each in daemons if each is not dead]
        for each in living:
            own, *rest = [each, *(other for other in daemons if other is not each)]
            assert any(key_of(own) in part for part in searched(own.process.pid))
            for other in rest:
                found = sum(part.count(key_of(other)) for part in searched(own.process.pid))
                assert not found, f"{found} times the key of {other.peer_id}"


async def leave(file: DeploymentFile, swarm: Swarm) -> None:
    """Ask all members, also those that are lost."""
    await rotate(file, swarm, lambda _: None)
    await withdraw(file, swarm, lambda _: None)


def key_of(daemon: ShardDaemon) -> bytes:
    """The public key, which is the last part of a peer id of Ed25519."""
    return bytes(PeerID.from_base58(daemon.peer_id).to_bytes()[-32:])


@contextmanager
def stopped(daemons: list[ShardDaemon]) -> Iterator[None]:
    """Processes that do not run, as a network that carries nothing."""
    processes = [psutil.Process(each.process.pid) for each in daemons]
    processes += [child for each in processes for child in each.children()]
    for each in processes:
        each.suspend()
    try:
        yield
    finally:
        for each in processes:
            each.resume()


@pytest.mark.slow
def test_the_owner_being_offline_changes_nothing(
    llama: Path, tmp_path: Path, file: DeploymentFile
) -> None:
    prompt = random_ids(1, 6)
    with shard_daemons(tmp_path, 3) as daemons:
        before = place(llama, [each.address for each in daemons], file)
        with (
            deployed_model(llama, file, recovery_timeout_s=1) as model,
            stopped(daemons),
            pytest.raises(MissingBlocksError, match="no member computes blocks 1:3"),
        ):
            model.generate(prompt, **OPTIONS)
        assert file.read() == before
        with deployed_model(llama, file) as model:
            tokens = model.generate(prompt, **OPTIONS)
        assert_same_tokens(reference(llama), tokens, prompt, **OPTIONS)
        assert file.read() == before


def test_a_member_that_answers_and_computes_nothing_right_is_replaced(
    llama: Path, tmp_path: Path, file: DeploymentFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShardLoader, "finish", altered(ShardLoader.finish, by=float("nan")))
    prompt = random_ids(1, 6)
    with shard_members(tmp_path, 2) as members:
        before = place(llama, members, file, splits=1)
        with deployed_model(llama, file) as model:
            tokens = model.generate(prompt, **OPTIONS)
        assert_same_tokens(reference(llama), tokens, prompt, **OPTIONS)
    assert file.read().shards[0].peer != before.shards[0].peer


def test_a_withdrawn_deployment_is_not_sent_again_for_a_session(
    llama: Path, tmp_path: Path, file: DeploymentFile
) -> None:
    with shard_members(tmp_path, 3) as members:
        deployment = place(llama, members, file)
        with (
            deployed_model(llama, file, recovery_timeout_s=1) as model,
            model.inference_session(max_length=20) as session,
        ):
            session.step(random_ids(1, 2))
            run_as_owner(members, lambda swarm: withdraw(file, swarm, lambda _: None))

            def go_on() -> None:
                for _ in range(10):
                    session.step(random_ids(1, 1))
                    time.sleep(1)

            with pytest.raises(NesaError):
                go_on()
        assert run_as_owner(members, partial(refusals, deployment)) == ["unknown_shard"] * 2
    assert not file.path.exists()


def test_members_with_allow_peers_serve_their_owner(
    llama: Path, tmp_path: Path, file: DeploymentFile
) -> None:
    identity = Identity.load_or_create(tmp_path / "owner.key")
    prompt = random_ids(1, 6)
    with shard_members(tmp_path, 1, allow_peers=(identity.peer_id,)) as members:
        place(llama, members, file, splits=1, identity_path=identity.path)
        with deployed_model(llama, file) as model:
            tokens = model.generate(prompt, **OPTIONS)
    assert_same_tokens(reference(llama), tokens, prompt, **OPTIONS)


def kill_one_at_any_moment(
    llama: Path, tmp_path: Path, file: DeploymentFile, kills: int, seed: int
) -> None:
    """Each time the killed member is started again, and is a spare."""
    rng = random.Random(seed)
    prompt = random_ids(1, 6)
    options = OPTIONS | {"max_new_tokens": 60, "min_new_tokens": 60}
    with shard_daemons(tmp_path, 4) as daemons:
        place(llama, [each.address for each in daemons], file)
        with deployed_model(llama, file, step_timeout_s=5) as model:
            began = time.monotonic()
            tokens = model.generate(prompt, **options)
            took_s = time.monotonic() - began
            for _ in range(kills):
                holding = {split.shards[0].peer for split in file.read().splits}
                target = rng.choice([each for each in daemons if each.peer_id in holding])
                timer = Timer(rng.uniform(0, took_s), target.kill)
                timer.start()
                tokens = model.generate(prompt, **options)
                timer.join()
                assert_same_tokens(reference(llama), tokens, prompt, **options)
                model.generate(prompt, **OPTIONS)  # a member that died after the last token
                assert target.peer_id not in {split.shards[0].peer for split in file.read().splits}
                daemons[daemons.index(target)] = target.restart()


def test_a_killed_member_is_replaced_by_a_spare(
    llama: Path, tmp_path: Path, file: DeploymentFile
) -> None:
    kill_one_at_any_moment(llama, tmp_path, file, kills=2, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_of_twenty_kills_are_survived(
    llama: Path, tmp_path: Path, file: DeploymentFile
) -> None:
    kill_one_at_any_moment(llama, tmp_path, file, kills=20, seed=2)


def test_a_member_that_was_started_again_gets_its_shard_again(
    llama: Path, tmp_path: Path, file: DeploymentFile
) -> None:
    prompt = random_ids(1, 6)
    with shard_daemons(tmp_path, 1) as daemons:
        place(llama, [daemons[0].address], file, splits=1)
        daemons[0].kill()
        daemons[0] = daemons[0].restart()
        with deployed_model(llama, file) as model:
            tokens = model.generate(prompt, **OPTIONS)
    assert_same_tokens(reference(llama), tokens, prompt, **OPTIONS)


def test_members_serve_stars_only(llama: Path, tmp_path: Path, file: DeploymentFile) -> None:
    with shard_members(tmp_path, 1) as members:
        deployment = place(llama, members, file, splits=1)
        (shard,) = deployment.splits[0].shards

        async def open_session(swarm: Swarm, mode: str) -> str:
            facts = Facts(shard.peer, tuple(members), shard.id, (0, 4), HIDDEN, (2, 32))
            pipes = await swarm.transport.open_stream(shard.peer, PROTOCOL, members)
            wire = Wire(shard.peer, *pipes)
            try:
                await wire.send(message_frame(open_message(facts, random.Random(1), mode=mode)))
                message = await wire.receive()
                assert message is not None
                return describe(message)
            finally:
                await wire.stream.close()

        for mode, expected in (("star", "opened"), ("chain", "not_star")):
            assert run_as_owner(members, lambda swarm, m=mode: open_session(swarm, m)) == expected
