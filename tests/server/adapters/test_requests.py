"""Authors, nodes and users of adapters, each with its own p2pd."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from nesa_node.core.errors import AdapterError, ConfigError, RemoteError, SwarmError
from nesa_node.server.adapters.requests import AdapterClient
from nesa_node.swarm.adapter_transfer import AdapterPeer
from nesa_node.swarm.dht.adapter_notices import MAX_LISTED_ADAPTERS, AdapterNotice
from nesa_node.swarm.node import Swarm, open_swarm
from nesa_node.swarm.p2p.identity import Identity
from tests.engine.adapter_folders import lora_tensors, safetensors, write_adapter
from tests.server.adapters.nodes import MIB, MODEL, adapter_nodes
from tests.swarm.local_swarm import local_swarm


@asynccontextmanager
async def visiting(folder: Path, through: Swarm) -> AsyncIterator[Swarm]:
    """A client of the swarm, which leaves at the end."""
    async with open_swarm(
        Identity.ephemeral(folder), initial_peers=through.transport.addresses, listen=False
    ) as client:
        yield client


async def test_an_adapter_outlives_its_authors_visit(tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "My Adapter")
    author = Identity.ephemeral(tmp_path)
    async with adapter_nodes(tmp_path, 2) as (members, servers):
        async with visiting(tmp_path, members[0]) as client:
            publisher = await AdapterClient.open(client, "tiny", author)
            copies = await publisher.publish(
                source, description="polite answers", metrics={"eval_loss": 1.25}
            )
        assert set(copies.nodes) == {member.transport.peer_id for member in members}
        assert copies.refusals == {}
        async with visiting(tmp_path, members[1]) as client:
            reader = await AdapterClient.open(client, "tiny")
            (adapter,) = await reader.published()
            assert adapter == copies.adapter
            assert adapter.name == f"{author.peer_id}/my-adapter"
            assert adapter.listed.description == "polite answers"
            assert adapter.listed.metrics == {"eval_loss": 1.25}
            assert (adapter.listed.rank, adapter.listed.target_modules) == (4, ("q_proj",))
            output = tmp_path / "pulled"
            assert await reader.fetch(await reader.find("my-adapter"), output) == output
            with pytest.raises(ConfigError, match="exists"):
                await reader.fetch(adapter, output)
        weights = "adapter_model.safetensors"
        assert (output / weights).read_bytes() == (source / weights).read_bytes()
        held = servers[0].store.open(adapter.digest)
        for file in output.iterdir():
            assert file.read_bytes() == (held / file.name).read_bytes()
        assert b"/home/author" not in (output / "adapter_config.json").read_bytes()
        assert not [name for name in os.listdir(tmp_path) if name.startswith(".adapter-")]


async def test_removal_deletes_an_adapter_from_nodes_and_lists(tmp_path: Path) -> None:
    author = Identity.ephemeral(tmp_path)
    async with (
        adapter_nodes(tmp_path, 2) as (members, servers),
        visiting(tmp_path, members[0]) as visitor,
    ):
        client = await AdapterClient.open(visitor, MODEL, author)
        one = (await client.publish(write_adapter(tmp_path / "one", seed=1))).adapter
        two = (await client.publish(write_adapter(tmp_path / "two", seed=2))).adapter
        await client.remove("one")
        with pytest.raises(AdapterError, match="not published for this model by this identity"):
            await client.remove("one")
        assert [each.listed.name for each in await client.published()] == ["two"]
        for server in servers:
            await server.keep_notices()
            assert server.store.holds(one.digest)
            config = server.store.open(one.digest) / "adapter_config.json"
            os.utime(config, (1e9, 1e9))
            await server.keep_notices()
            assert not server.store.holds(one.digest)
            assert server.store.holds(two.digest)
        with pytest.raises(AdapterError, match="none of 2 nodes"):
            await client.fetch(one, tmp_path / "pulled")


async def test_a_node_announces_an_authors_notice_that_the_dht_has_lost(tmp_path: Path) -> None:
    author = Identity.ephemeral(tmp_path)
    async with (
        adapter_nodes(tmp_path, 1) as (members, servers),
        visiting(tmp_path, members[0]) as visitor,
    ):
        client = await AdapterClient.open(visitor, MODEL, author)
        copies = await client.publish(write_adapter(tmp_path / "one"))
    async with adapter_nodes(tmp_path, 2) as (members, servers):
        reader = await AdapterClient.open(members[1], MODEL)
        assert await reader.published() == ()
        await servers[0].keep_notices()
        assert await reader.published() == (copies.adapter,)


async def test_a_node_fetches_from_another_what_it_lacks(tmp_path: Path) -> None:
    author = Identity.ephemeral(tmp_path)
    async with (
        adapter_nodes(tmp_path, 2) as (members, servers),
        visiting(tmp_path, members[0]) as visitor,
    ):
        client = await AdapterClient.open(visitor, MODEL, author)
        client._nodes = {peer: client._nodes[peer] for peer in [members[0].transport.peer_id]}
        copies = await client.publish(write_adapter(tmp_path / "one"), name="polite")
        assert not servers[1].store.holds(copies.adapter.digest)
        await members[1].directory.fetch(MODEL, 30)
        found = await servers[1].find(f"{author.peer_id[-8:]}/polite")
        assert found == copies.adapter
        opened, again = await asyncio.gather(servers[1].open(found), servers[1].open(found))
        assert opened == again
        weights = opened / "adapter_model.safetensors"
        source = tmp_path / "one" / "adapter_model.safetensors"
        assert weights.read_bytes() == source.read_bytes()


async def test_a_name_that_two_authors_use_needs_its_author(tmp_path: Path) -> None:
    async with (
        adapter_nodes(tmp_path, 1) as (members, _),
        visiting(tmp_path, members[0]) as visitor,
    ):
        authors = [Identity.ephemeral(tmp_path) for _ in range(2)]
        for number, author in enumerate(authors):
            client = await AdapterClient.open(visitor, MODEL, author)
            folder = write_adapter(tmp_path / f"of-{number}", seed=number)
            await client.publish(folder, name="polite")
        with pytest.raises(AdapterError, match="several authors; give one of: "):
            await client.find("polite")
        with pytest.raises(AdapterError, match="at least the last 6 characters"):
            await client.find(f"{authors[0].peer_id[-5:]}/polite")
        with pytest.raises(AdapterError, match="no adapter 'rude'"):
            await client.find("rude")
        found = await client.find(f"{authors[0].peer_id[-6:]}/polite")
        assert found.author == authors[0].peer_id
        assert await client.find(found.digest) == found
        assert await client.find(f"…{authors[0].peer_id[-8:]}/polite") == found


async def test_a_node_that_stores_none_or_other_authors_says_so(tmp_path: Path) -> None:
    friend, stranger = Identity.ephemeral(tmp_path), Identity.ephemeral(tmp_path)
    folder = write_adapter(tmp_path / "one")
    async with (
        adapter_nodes(tmp_path, 1, authors=frozenset([friend.peer_id])) as (members, _),
        visiting(tmp_path, members[0]) as visitor,
    ):
        client = await AdapterClient.open(visitor, MODEL, stranger)
        with pytest.raises(SwarmError, match="stores no adapters of this author"):
            await client.publish(folder)
        assert await client.published() == ()
        client = await AdapterClient.open(visitor, MODEL, friend)
        assert len((await client.publish(folder)).nodes) == 1
    async with (
        adapter_nodes(tmp_path, 1, max_bytes=0) as (members, _),
        visiting(tmp_path, members[0]) as visitor,
    ):
        client = await AdapterClient.open(visitor, MODEL, friend)
        with pytest.raises(SwarmError, match="stores no adapters"):
            await client.publish(folder)


async def test_an_author_gets_a_quarter_of_the_store(tmp_path: Path) -> None:
    author, other = Identity.ephemeral(tmp_path), Identity.ephemeral(tmp_path)
    folders = [write_adapter(tmp_path / f"a{seed}", seed=seed) for seed in range(3)]
    size = sum(path.stat().st_size for path in folders[0].iterdir())
    async with (
        adapter_nodes(tmp_path, 1, max_bytes=7 * size) as (members, (server,)),
        visiting(tmp_path, members[0]) as visitor,
    ):
        client = await AdapterClient.open(visitor, MODEL, author)
        await client.publish(folders[0])
        with pytest.raises(SwarmError, match="bytes of one author"):
            await client.publish(folders[1])
        # The same one again is no second one.
        await client.publish(folders[0], description="again")
        client = await AdapterClient.open(visitor, MODEL, other)
        await client.publish(folders[2])
        assert len(server.store.held()) == 2


async def test_texts_and_numbers_out_of_bounds_are_refused_before_anything_is_sent(
    tmp_path: Path,
) -> None:
    folder = write_adapter(tmp_path / "one")
    author = Identity.ephemeral(tmp_path)
    async with (
        adapter_nodes(tmp_path, 1) as (members, (server,)),
        visiting(tmp_path, members[0]) as visitor,
    ):
        client = await AdapterClient.open(visitor, MODEL, author)
        for options, words in (
            ({"name": "../../etc"}, "--name"),
            ({"name": ".."}, "--name"),
            ({"name": "x" * 65}, "--name"),
            ({"description": "x" * 201}, "description"),
            ({"description": "a\x1b[2J"}, "description"),
            ({"metrics": {"eval_loss": float("nan")}}, "metrics"),
        ):
            with pytest.raises(ConfigError, match=words):
                await client.publish(folder, **options)
        assert server.store.held() == {}
        with pytest.raises(SwarmError, match="no node serves huge"):
            await AdapterClient.open(members[0], "huge", author)


async def test_a_seventeenth_adapter_is_refused(tmp_path: Path) -> None:
    author = Identity.ephemeral(tmp_path)
    folder = write_adapter(tmp_path / "one")
    async with (
        adapter_nodes(tmp_path, 1) as (members, _),
        visiting(tmp_path, members[0]) as visitor,
    ):
        client = await AdapterClient.open(visitor, MODEL, author)
        for number in range(MAX_LISTED_ADAPTERS):
            await client.publish(folder, name=f"name-{number}", description="d" * 200)
        with pytest.raises(ConfigError, match="16 adapters of this identity"):
            await client.publish(folder, name="one-more")
        (notice,) = await members[0].notices.fetch(AdapterNotice, MODEL)
        assert len(notice.adapters) == MAX_LISTED_ADAPTERS


async def test_private_swarms_serve_their_members_only(tmp_path: Path) -> None:
    author = Identity.ephemeral(tmp_path)
    key = "a long swarm key"
    async with adapter_nodes(tmp_path, 1, swarm_key=key) as (members, _):
        addresses = members[0].transport.addresses
        async with open_swarm(
            Identity.ephemeral(tmp_path), initial_peers=addresses, listen=False, swarm_key=key
        ) as member:
            inside = await AdapterClient.open(member, MODEL, author)
            copies = await inside.publish(write_adapter(tmp_path / "one"))
            assert len(copies.nodes) == 1
        async with local_swarm(tmp_path, 1) as (outsider,):
            stranger = AdapterPeer(outsider, MODEL)
            with pytest.raises(RemoteError, match="the swarm keys"):
                await stranger.query(members[0].transport.peer_id, addresses)


async def test_a_large_adapter_arrives_whole(tmp_path: Path) -> None:
    """Of several batches of chunks, with a last one that is not full."""
    author = Identity.ephemeral(tmp_path)
    layers = [f"model.layers.{index}.self_attn.q_proj" for index in range(4)]
    weights = safetensors(lora_tensors(*layers, rank=1024))
    assert len(weights) > MIB
    folder = write_adapter(tmp_path / "large", weights=weights, rank=1024)
    async with adapter_nodes(tmp_path, 1) as (members, _):
        async with visiting(tmp_path, members[0]) as client:
            publisher = await AdapterClient.open(client, MODEL, author)
            copies = await publisher.publish(folder)
            output = await publisher.fetch(copies.adapter, tmp_path / "pulled")
        assert (output / "adapter_model.safetensors").read_bytes() == weights
