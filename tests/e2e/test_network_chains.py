"""Nodes of a network that send values to each other, and what happens where they do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nesa_node.client.graphs.remote_network import RemoteNetwork
from nesa_node.core.errors import ProtocolError
from nesa_node.core.ids import split_evenly
from nesa_node.core.settings.choices import RouteName
from nesa_node.server.graphs import graph_server
from nesa_node.server.graphs.graph_server import GraphServer
from nesa_node.server.graphs.piece_neighbours import PieceNeighbours
from nesa_node.swarm.protocol.graph_messages import MAX_RUNNING
from tests.e2e.test_networks import PIECES, inputs, save
from tests.swarms import in_process_swarm

pytestmark = pytest.mark.timeout(300)  # each node captures the network
SPANS = split_evenly(PIECES, 3)


class Network:
    """A model, its nodes and their addresses."""

    def __init__(self, model: Any, folder: Path, addresses: tuple[str, ...]) -> None:
        self.model = model
        self.folder = folder
        self.addresses = addresses
        self.servers: list[GraphServer] = []

    def open(self, routing: RouteName = "chain") -> RemoteNetwork:
        return RemoteNetwork.from_pretrained(
            self.folder, initial_peers=self.addresses, routing=routing
        )

    @torch.no_grad()
    def is_right(self, remote: RemoteNetwork) -> bool:
        given = inputs(self.model, 2)
        expected: Tensor = self.model(**given).logits_per_image
        return torch.allclose(expected, remote(**given).logits_per_image, atol=1e-5)

    @property
    def neighbours(self) -> list[int]:
        return [len(server._neighbours._links) for server in self.servers]

    @property
    def is_idle(self) -> bool:
        return not any(
            server._running
            or server._room.held_bytes
            or server._values_room.held_bytes
            or len(server._awaited)
            for server in self.servers
        )


async def wait_for(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  # nodes have no event for it
            await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Two towers: the last pieces use values of the first ones."""
    folder = tmp_path_factory.mktemp("chain")
    model = save("CLIPModel", folder / "model")
    servers: list[GraphServer] = []
    make = GraphServer.__init__

    def remember(self: GraphServer, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        servers.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphServer, "__init__", remember)
        options = {"pieces": PIECES, "image_size": 32}
        with in_process_swarm(folder / "model", SPANS, folder, **options) as addresses:
            found = Network(model, folder / "model", addresses)
            found.servers = servers
            yield found


def test_no_node_of_a_star_sees_another(network: Network) -> None:
    with network.open("star") as remote:
        assert network.is_right(remote)
    assert network.neighbours == [0, 0, 0]


def test_nodes_of_a_chain_send_values_to_each_other(network: Network) -> None:
    with network.open() as remote:
        assert network.is_right(remote)
        assert not remote.connection._star_until
    first, second, last = network.neighbours
    assert first
    assert second
    assert not last


def test_a_node_that_reaches_no_other_is_not_blamed(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> None:
        raise ProtocolError("downstream_lost", "this node could not reach the next one")

    monkeypatch.setattr(PieceNeighbours, "send", fail)
    with network.open() as remote:
        assert network.is_right(remote)
        connection = remote.connection
        assert connection._star_until
        assert [hop.span for hop in connection._hops] == list(SPANS)
        assert network.is_right(remote)


def test_nodes_of_an_older_version_get_requests_in_a_star(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_server, "VERSION", (1, 7))
    before = network.neighbours
    with network.open() as remote:
        assert network.is_right(remote)
        assert remote.connection._star_until
    assert network.neighbours == before


@pytest.mark.parametrize("count", [1, MAX_RUNNING])
def test_cancelled_requests_leave_nothing_on_nodes(
    network: Network, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """The last node waits for values that never come, with as many requests as it reads."""
    deliver = PieceNeighbours.send
    lost = []

    async def lose(self: PieceNeighbours, *args: Any) -> None:
        lost.append(args)

    monkeypatch.setattr(PieceNeighbours, "send", lose)
    with network.open() as remote:
        connection = remote.connection
        given = inputs(network.model, 2)
        given["attention_mask"] = torch.ones_like(given["input_ids"])

        async def run_and_cancel() -> None:
            running = [asyncio.ensure_future(connection.run(given)) for _ in range(count)]
            last = network.servers[-1]
            await wait_for(lambda: bool(lost) and last._running == count)
            for each in running:
                each.cancel()
            await asyncio.wait(running)
            await wait_for(lambda: network.is_idle)

        remote._loop.run(run_and_cancel())
        monkeypatch.setattr(PieceNeighbours, "send", deliver)
        assert network.is_right(remote)
        assert not connection._star_until
