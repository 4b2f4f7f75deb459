"""What peers can ask of a node that attests, over real streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from nesa_node.core.ids import ModelId, Span
from nesa_node.server.attestation.attestation_server import (
    MAX_WAITING_PER_PEER,
    AttestationServer,
)
from nesa_node.server.attestation.quote_sources import QuoteSource
from nesa_node.swarm.node import Swarm
from nesa_node.swarm.p2p.identity import adapter_proof, public_key_bytes
from nesa_node.swarm.protocol.any_message import AnyMessage
from nesa_node.swarm.protocol.attest_messages import ATTEST_PROTOCOL, Attest, Attested
from nesa_node.swarm.protocol.messages import Busy, ErrorMessage, Message, Ping
from nesa_node.swarm.protocol.stream import Stream
from nesa_node.verification.attestation.binding import report_data
from nesa_node.verification.attestation.check import check_attestation
from nesa_node.verification.attestation.policy import AttestationPolicy
from nesa_node.verification.attestation.quotes import Quote
from tests.swarm.local_swarm import local_swarm
from tests.verification.attestation.made_quotes import AT, MEASUREMENT, snp_quote, snp_root

MODEL = ModelId("tiny@0")
NONCE, ROOT = b"n" * 32, b"w" * 32


class MadeSource(QuoteSource):
    """Signs by a test's root, once `ready` is set; `sizes` makes it sign larger reports."""

    def __init__(self, *, size: int = 0) -> None:
        self.ready = asyncio.Event()
        self.ready.set()
        self._size = size

    async def quotes(self, report_data: bytes) -> tuple[Quote, ...]:
        await self.ready.wait()
        quote = snp_quote(report_data)
        return (quote,) * 4 if not self._size else (Quote("nvidia", bytes(self._size)),) * 4


@asynccontextmanager
async def attesting(
    folder: Path, source: QuoteSource | None, **options: Any
) -> AsyncIterator[tuple[Swarm, Swarm]]:
    """A node that attests, and a peer of it."""
    served: tuple[Span, bytes] | None = options.pop("served", (Span(1, 3), ROOT))
    swarm_key = options.pop("swarm_key", None)
    async with local_swarm(folder, 2, swarm_key=swarm_key) as (node, peer):
        server = AttestationServer(node, MODEL, source, lambda: served, **options)
        await node.transport.serve(ATTEST_PROTOCOL, server.handle)
        yield node, peer


async def ask(node: Swarm, peer: Swarm, message: Message | None = None) -> AnyMessage:
    pipes = await peer.transport.open_stream(
        node.identity.peer_id, ATTEST_PROTOCOL, node.transport.addresses
    )
    stream = Stream(node.identity.peer_id, *pipes)
    try:
        await stream.send(message or Attest(model=MODEL, nonce=NONCE))
        answer, _ = await stream.receive()
        return answer
    finally:
        await stream.close()


async def test_quote_is_about_the_node_the_nonce_and_the_weights(tmp_path: Path) -> None:
    rule = {"measurements": {"measurement": [MEASUREMENT.hex()]}, "roots": snp_root().pem}
    policy = AttestationPolicy.model_validate({"accept": [{"snp": rule}]})
    async with attesting(tmp_path, MadeSource()) as (node, peer):
        answer = await ask(node, peer)
        assert isinstance(answer, Attested)
        assert (answer.blocks, answer.weights_root) == ((1, 3), ROOT)
        key = public_key_bytes(node.identity.peer_id)
    quotes = [part.to_quote() for part in answer.quotes]
    (found,) = check_attestation(quotes, key, NONCE, ROOT, policy, AT)
    assert found.report_data == report_data(key, NONCE, ROOT)


@pytest.mark.parametrize(
    ("options", "message", "code"),
    [
        ({"source": None}, None, "no_attestation"),
        ({"source": MadeSource(size=32 * 1024)}, None, "no_attestation"),
        ({}, Attest(model="other@0", nonce=NONCE), "wrong_model"),
        ({}, Ping(nonce=1), "unexpected"),
        ({"deny": True}, None, "not_allowed"),
    ],
)
async def test_refusals_name_the_reason(
    tmp_path: Path, options: dict[str, Any], message: Message | None, code: str
) -> None:
    source = options.get("source", MadeSource())
    async with attesting(tmp_path, source) as (node, peer):
        if "deny" in options:
            server = AttestationServer(
                node, MODEL, source, lambda: None, deny=frozenset({peer.identity.peer_id})
            )
            await node.transport.serve(ATTEST_PROTOCOL, server.handle)
        answer = await ask(node, peer, message)
    assert isinstance(answer, ErrorMessage)
    assert answer.code == code


async def test_members_of_a_private_swarm_prove_it(tmp_path: Path) -> None:
    async with attesting(tmp_path, MadeSource(), swarm_key="k" * 32) as (node, peer):
        stranger = await ask(node, peer)
        proof = adapter_proof(peer.notices.membership, peer.identity.peer_id, node.identity.peer_id)
        member = await ask(node, peer, Attest(model=MODEL, membership=proof, nonce=NONCE))
    assert isinstance(stranger, ErrorMessage)
    assert stranger.code == "not_a_member"
    assert isinstance(member, Attested)


async def test_node_between_two_spans_is_busy(tmp_path: Path) -> None:
    async with attesting(tmp_path, MadeSource(), served=None) as (node, peer):
        assert isinstance(await ask(node, peer), Busy)


async def test_one_peer_cannot_take_all_turns(tmp_path: Path) -> None:
    source = MadeSource()
    source.ready.clear()
    async with attesting(tmp_path, source) as (node, peer), asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(ask(node, peer)) for _ in range(MAX_WAITING_PER_PEER + 1)]
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert [type(each.result()) for each in done] == [Busy]
        source.ready.set()
    assert [type(each.result()) for each in waiting].count(Attested) == MAX_WAITING_PER_PEER
