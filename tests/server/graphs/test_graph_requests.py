"""What a client that breaks the rules gets of a node with pieces, which serves on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from nesa_node.client.graphs.graph_connection import GraphConnection
from nesa_node.client.graphs.remote_network import RemoteNetwork
from nesa_node.core.errors import NesaError, RemoteError
from nesa_node.core.ids import Span
from nesa_node.swarm.protocol.any_message import AnyMessage
from nesa_node.swarm.protocol.graph_messages import (
    GRAPH_PROTOCOL,
    GraphOpen,
    GraphOpened,
    GraphRun,
    PlanRequest,
    ValueMeta,
)
from nesa_node.swarm.protocol.messages import VERSION, ErrorMessage, Message
from nesa_node.swarm.protocol.stream import Stream
from tests.e2e.test_networks import inputs, save
from tests.swarms import in_process_swarm

pytestmark = pytest.mark.timeout(300)  # each node captures the network
PIECES = 4


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, RemoteNetwork]]:
    folder = tmp_path_factory.mktemp("hostile")
    model = save("BertForSequenceClassification", folder / "model")
    with (
        in_process_swarm(folder / "model", [Span(0, PIECES)], folder, pieces=PIECES) as addresses,
        RemoteNetwork.from_pretrained(folder / "model", initial_peers=addresses) as remote,
    ):
        assert len(remote.connection.plan.pieces) == PIECES
        yield model, remote


@torch.no_grad()
def serves_on(served: tuple[Any, RemoteNetwork]) -> bool:
    model, remote = served
    given = inputs(model, 2)
    return torch.allclose(model(**given).logits, remote(**given).logits, atol=1e-5)


def run_first(remote: RemoteNetwork, **changes: Any) -> dict[int, Tensor]:
    """Have the node run the first piece, with `changes` of the request."""
    connection = remote.connection
    network = connection.network
    ids = torch.full((2, 5), 3)
    values, sizes = network.bind(
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": ids * 0}
    )
    interface = network.find_interface(connection.plan.operations(Span(0, 1)))
    request: dict[str, Any] = {
        "span": Span(0, 1),
        "sizes": sizes,
        "values": {index: values[index] for index in interface.received},
        "output_bytes": 1 << 20,
    } | changes

    async def run() -> dict[int, Tensor]:
        await connection._plan_hops()
        (peer,) = {hop.peer_id for hop in connection._hops}
        link = await connection._find_link(peer)
        return await link.run(**request)

    return remote._loop.run(run())


@pytest.fixture
def connection(served: tuple[Any, RemoteNetwork]) -> GraphConnection:
    return served[1].connection


@pytest.mark.parametrize(
    ("changes", "code", "what"),
    [
        ({"span": Span(1, 1)}, "wrong_blocks", "not 1:1"),
        ({"span": Span(2, 9)}, "wrong_blocks", "has pieces 0:4"),
        ({"sizes": ()}, "bad_tensor", "0 sizes, of another graph"),
        ({"sizes": (5, 2, 3)}, "bad_tensor", "with these sizes it is"),
        ({"sizes": (0, 0, 0)}, "bad_tensor", "sizes must be 1 to"),
        ({"sizes": (1 << 30,) * 3}, "bad_tensor", "sizes must be 1 to"),
        ({"values": {}}, "bad_tensor", "use values"),
        ({"values": {999: torch.zeros(1)}}, "bad_tensor", "use values"),
    ],
)
def test_requests_that_break_the_rules(
    connection: GraphConnection,
    served: tuple[Any, RemoteNetwork],
    changes: dict[str, Any],
    code: str,
    what: str,
) -> None:
    _, remote = served
    assert run_first(remote)
    sizes = connection.network.captured.sizes.symbols
    if len(changes.get("sizes", ())) == 3:
        changes = {"sizes": changes["sizes"][: len(sizes)]}
    with pytest.raises(RemoteError, match=what) as caught:
        run_first(remote, **changes)
    assert caught.value.code == code
    assert serves_on(served)


def test_tokens_outside_the_vocabulary(
    connection: GraphConnection, served: tuple[Any, RemoteNetwork]
) -> None:
    _, remote = served
    for token in (10**9, -1):
        with pytest.raises(RemoteError, match="could not be computed") as caught:
            remote(input_ids=torch.full((1, 4), token))
        assert caught.value.code == "not_computed"
    assert serves_on(served)


def test_sizes_that_would_take_all_memory(
    connection: GraphConnection, served: tuple[Any, RemoteNetwork]
) -> None:
    """A few bytes cannot have the node make tensors of terabytes."""
    network = connection.network
    ids = torch.full((1, 400_000), 3)
    given = {"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids * 0}
    values, sizes = network.bind(given)
    span = Span(0, PIECES)
    interface = network.find_interface(connection.plan.operations(span))
    with pytest.raises(RemoteError, match="send a smaller batch") as caught:
        run_first(
            served[1],
            span=span,
            sizes=sizes,
            values={index: values[index] for index in interface.received},
        )
    assert caught.value.code == "too_large"
    assert serves_on(served)


@asynccontextmanager
async def stream_to(connection: GraphConnection) -> AsyncIterator[Stream]:
    swarm = connection._swarm
    hops = await connection._plan_hops()
    peer = hops[0].peer_id
    pipes = await swarm.transport.open_stream(peer, GRAPH_PROTOCOL, connection._addresses[peer])
    stream = Stream(peer, *pipes)
    try:
        yield stream
    finally:
        await stream.close()


async def ask(connection: GraphConnection, *messages: Message) -> AnyMessage:
    async with stream_to(connection) as stream:
        for message in messages:
            await stream.send(message)
        while True:
            answer, _ = await stream.receive(max_tensor_bytes=1 << 20)
            if not isinstance(answer, GraphOpened):
                return answer


def test_streams_that_begin_wrong(
    connection: GraphConnection, served: tuple[Any, RemoteNetwork]
) -> None:
    opened = GraphOpen(version=VERSION, model=connection._model_id)
    stranger = GraphOpen(version=VERSION, model=connection._model_id, membership=b"x")
    huge = ValueMeta(0, "float32", (1 << 20, 1 << 20))
    for messages, code in (
        ((PlanRequest(model="other@0.0"),), "wrong_model"),
        ((GraphOpen(version=VERSION, model="other"),), "wrong_model"),
        ((stranger,), "not_a_member"),
        ((GraphRun(request=0, blocks=(0, 1), sizes=(), values=()),), "unexpected"),
        ((opened, opened), "unexpected"),
        ((opened, GraphRun(request=0, blocks=(0, 1), sizes=(1,), values=(huge,))), "bad_tensor"),
    ):
        answer = served[1]._loop.run(ask(connection, *messages))
        assert isinstance(answer, ErrorMessage), answer
        assert answer.code == code
    assert serves_on(served)


def test_inputs_that_the_network_does_not_take(served: tuple[Any, RemoteNetwork]) -> None:
    _, remote = served
    ids = torch.full((2, 5), 3)
    for given, what in (
        ({"pixel_values": torch.zeros(1, 3, 8, 8)}, "takes input_ids, .* and not pixel_values"),
        ({"attention_mask": ids}, "needs input_ids"),
        ({"input_ids": ids, "attention_mask": ids[:1]}, "could not be computed"),
        ({"input_ids": ids[0]}, "captured for"),
    ):
        with pytest.raises(NesaError, match=what):
            remote(**given)
    assert serves_on(served)
