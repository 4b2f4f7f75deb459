"""Seals of a node's sessions: the roots of what came and went, whatever way it travelled.

T packed tokens, D hidden.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import torch

from nesa_node.compression import tensors
from nesa_node.compression.tensors import HiddenStates
from nesa_node.core.errors import ProtocolError
from nesa_node.core.ids import Span
from nesa_node.engine.model.blocks import ModelBlocks
from nesa_node.engine.model.loading import load_blocks
from nesa_node.server.scheduler.session_queue import FinishedStep
from nesa_node.server.session.output_sender import OutputSender
from nesa_node.server.session.sealing import SessionSealer, describe_computation
from nesa_node.server.session.session_state import SessionState
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.swarm.protocol.messages import (
    VERSION,
    Computation,
    ErrorMessage,
    Linked,
    Open,
    Opened,
    Reordered,
    RolledBack,
    RowSlice,
)
from nesa_node.swarm.protocol.seal_messages import (
    Disclose,
    Seal,
    SealRequest,
    SealStatement,
    open_seal,
    sealed_rows,
    sign_seal,
)
from nesa_node.verification.evidence import find_contradiction
from nesa_node.verification.seal_tree import SessionSeals
from tests.engine.chained import open_local
from tests.engine.tiny_models import save_tiny_model
from tests.server.bench import Peer, open_node

Parts = list[tuple[int, int, torch.Tensor]]
"""Rows, positions and values [L, D]."""


def expected(peer: Peer, rows: int, inputs: Parts, outputs: Parts) -> SessionSeals:
    seals = SessionSeals(peer.secret, rows)
    for add, parts in ((seals.add_inputs, inputs), (seals.add_outputs, outputs)):
        for row, position, values_LD in parts:
            add(row, position, memoryview(tensors.encode(values_LD)[1]).cast("B"), len(values_LD))
    return seals


async def requested_seal(peer: Peer) -> SealStatement:
    peer.wire.say(SealRequest())
    while not (seal := await peer.wire.hear_a(Seal)).requested:
        pass
    return msgspec.msgpack.decode(seal.statement, type=SealStatement)


async def test_a_seal_is_of_what_came_and_went(blocks: ModelBlocks) -> None:
    async with open_node(blocks) as node:
        peer = node.peer()
        peer.open(rows=2)
        opened = await peer.wire.hear_a(Opened)
        peer.link()
        await peer.wire.hear_a(Linked)
        inputs, outputs = [], []
        for row, position, count, want in ((0, 0, 5, "last"), (1, 0, 3, "all"), (0, 5, 1, "all")):
            sent_TD = torch.randn(count, blocks.hidden_size)
            peer.step({row: count}, sent_TD, want=want)  # type: ignore[arg-type]
            _, output_TD = await peer.output()
            inputs.append((row, position, sent_TD))
            outputs.append((row, position + count - len(output_TD), output_TD))
        stated = await requested_seal(peer)
        assert stated.rows == sealed_rows(expected(peer, 2, inputs, outputs).roots())
        assert (stated.session, stated.nonce) == (peer.session, opened.nonce)
        assert (stated.is_exact, stated.adapter) == (True, b"")
        assert (
            stated.computation
            == opened.computation
            == Computation(dtype="float32", quantization="none", backend="cpu")
        )
        await peer.end()


def test_a_node_declares_what_its_cache_holds(models_dir: Path) -> None:
    """Behind the quantization: an older auditor does not know that, and judges nothing."""
    checkpoint = open_local(save_tiny_model("llama", models_dir))
    small = load_blocks(
        checkpoint, Span(1, 3), dtype=torch.float32, device="cpu", cache_dtype="int8"
    )
    declared = describe_computation(small, "nf4")
    assert declared == Computation("float32", "nf4+kv-int8", "cpu")
    assert (declared.weights, declared.cache_dtype) == ("nf4", "int8")
    plain = Computation("float32", "none", "cpu")
    assert (plain.weights, plain.cache_dtype) == ("none", "auto")


async def test_lossy_outputs_are_sealed_as_they_are_decoded(blocks: ModelBlocks) -> None:
    async with open_node(blocks) as node:
        peer = node.peer()
        await peer.begin(quality="int8@2:16:8", codecs=("int8@2",))
        meta, payload = tensors.encode(torch.randn(4, blocks.hidden_size), codec="int8@2:16:8")
        received_TD = tensors.decode(meta, payload, max_bytes=meta.max_nbytes)
        sent = peer.step({0: 4}, received_TD.clone(), codec="int8@2:16:8")
        assert sent.tensor.codec == "int8@2:16:8"
        output, output_TD = await peer.output()
        assert output.tensor.codec == "int8@2:16:8"
        stated = await requested_seal(peer)
        again, data = tensors.encode(received_TD, codec="int8@2:16:8")
        came_TD = tensors.decode(again, data, max_bytes=again.max_nbytes)
        seals = expected(peer, 1, [(0, 0, came_TD)], [(0, 0, output_TD)])
        assert stated.rows == sealed_rows(seals.roots())
        assert not stated.is_exact
        await peer.end()


@pytest.mark.parametrize("codec", ["none", "lossless", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_seal_says_whether_its_outputs_are_what_was_computed(
    tmp_path: Path, codec: str, dtype: Literal["float32", "bfloat16"]
) -> None:
    """Else a client could show a node's honest outputs as wrong ones."""
    opened = Open(
        version=VERSION, model="tiny@0", session=bytes(16), secret=bytes(32), blocks=(0, 2), rows=1,
        max_tokens=100, mode="star", dtype=dtype, epoch=0, upstream=None, adapter=b"a" * 32,
    )  # fmt: skip
    node = Identity.ephemeral(tmp_path)
    sealer = SessionSealer(node, opened, STATED.computation)
    values_TD = torch.randn(4, 64)
    rows = (RowSlice(0, 0, 4),)
    await sealer.add_inputs(rows, HiddenStates.from_tensor(values_TD))
    await sealer.add_outputs(rows, *tensors.encode(values_TD, codec=codec))
    stated = open_seal(sealer.make_seal(0), node.peer_id)
    assert stated.is_exact == (codec != "int8" and dtype == "float32")
    assert stated.adapter == b"a" * 32


async def test_rollbacks_and_forks_cut_and_copy_what_is_sealed(blocks: ModelBlocks) -> None:
    async with open_node(blocks) as node:
        peer = node.peer()
        await peer.begin(rows=2)
        first_TD, second_TD = (torch.randn(4, blocks.hidden_size) for _ in range(2))
        peer.step({0: 4}, first_TD)
        _, output_TD = await peer.output()
        peer.rollback([2, 0])
        await peer.wire.hear_a(RolledBack)
        peer.reorder([0, 0])
        await peer.wire.hear_a(Reordered)
        peer.step({1: 4}, second_TD)
        _, later_TD = await peer.output()
        inputs = [(0, 0, first_TD[:2]), (1, 0, first_TD[:2]), (1, 2, second_TD)]
        outputs = [(0, 0, output_TD[:2]), (1, 0, output_TD[:2]), (1, 2, later_TD)]
        stated = await requested_seal(peer)
        assert stated.rows == sealed_rows(expected(peer, 2, inputs, outputs).roots())
        await peer.end()


async def test_a_node_seals_every_thirty_two_tokens_unasked(blocks: ModelBlocks) -> None:
    async with open_node(blocks) as node:
        peer = node.peer()
        await peer.begin(max_tokens=100)
        numbers = []
        for tokens, is_due in ((20, False), (20, True), (30, False), (10, True)):
            peer.step({0: tokens})
            await peer.output()
            if is_due:
                seal = await peer.wire.hear_a(Seal)
                assert not seal.requested
                numbers.append(msgspec.msgpack.decode(seal.statement, type=SealStatement).number)
        assert numbers == [1, 2]
        await peer.end()


async def test_older_clients_hear_of_no_seals(blocks: ModelBlocks) -> None:
    async with open_node(blocks) as node:
        peer = node.peer()
        await peer.begin(version=(1, 6), max_tokens=100)
        peer.step({0: 40})
        await peer.output()
        peer.wire.say(SealRequest())
        message, _ = await peer.wire.hear()
        assert isinstance(message, ErrorMessage)
        assert (message.code, message.answers) == ("unexpected", "sealrequest")
        await peer.end()


async def test_what_is_not_kept_is_not_disclosed(blocks: ModelBlocks) -> None:
    """An exit hop keeps no outputs; and no client may ask more than four times."""
    async with open_node(blocks) as node:
        peer = node.peer()
        await peer.begin()
        peer.step({0: 3})
        await peer.output()
        for row, code in ((0, "not_kept"), (1, "bad_rows"), (0, "not_kept"), (0, "not_kept")):
            peer.wire.say(Disclose(rows=(RowSlice(row, 0, 3),)))
            assert (await peer.wire.hear_a(ErrorMessage)).code == code
        peer.wire.say(Disclose(rows=(RowSlice(0, 0, 3),)))
        refused = await peer.wire.hear_a(ErrorMessage)
        assert (refused.code, refused.fatal) == ("not_kept", False)
        assert "4 times" in refused.message
        await peer.end()


STATED = SealStatement(
    version=1,
    node="x",
    session=b"s" * 16,
    nonce=b"n" * 16,
    epoch=1,
    number=1,
    blocks=(0, 2),
    computation=Computation(dtype="float32", quantization="none", backend="cpu"),
    rows=sealed_rows(SessionSeals(b"k" * 32, 1).roots()),
)


def test_a_seal_is_its_signers_alone(tmp_path: Path) -> None:
    one, other = Identity.ephemeral(tmp_path), Identity.ephemeral(tmp_path)
    stated = msgspec.structs.replace(STATED, node=one.peer_id)
    seal = sign_seal(one, stated)
    assert open_seal(seal, one.peer_id) == stated
    stolen = sign_seal(other, stated)
    changed = msgspec.structs.replace(seal, statement=seal.statement[:-1] + b"?")
    for wrong, node in ((seal, other.peer_id), (stolen, other.peer_id), (changed, one.peer_id)):
        with pytest.raises(ProtocolError, match=r"signature|names"):
            open_seal(wrong, node)


@pytest.mark.parametrize("statement", [b"", b"\xc1", b"\x80", b"\xdd\xff\xff\xff\xff"])
def test_malformed_statements_are_refused(tmp_path: Path, statement: bytes) -> None:
    node = Identity.ephemeral(tmp_path)
    seal = Seal(statement=statement, signature=node.sign(b"nesa-node seal 1\0" + statement))
    with pytest.raises(ProtocolError, match="malformed"):
        open_seal(seal, node.peer_id)


async def test_a_seal_between_an_epoch_and_its_cut_contradicts_no_later_one(
    blocks: ModelBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that rolls back while a step is sent has its node sign two seals of one epoch that
    have other values of as many tokens: each says how often the rows were cut."""
    emit, begin_epoch, has_begun = OutputSender.emit, SessionState.begin_epoch, asyncio.Event()

    async def emit_late(sender: OutputSender, finished: FinishedStep) -> None:
        await emit(sender, finished)
        await has_begun.wait()

    def begin(state: SessionState, epoch: int, *args: Any) -> None:
        begin_epoch(state, epoch, *args)
        if state.lengths != (0,):
            has_begun.set()

    monkeypatch.setattr(SessionState, "begin_epoch", begin)
    monkeypatch.setattr(OutputSender, "emit", emit_late)
    async with open_node(blocks) as node:
        peer = node.peer()
        await peer.begin(max_tokens=100)
        peer.step({0: 32})
        await peer.output()
        peer.rollback([0])
        between = await peer.wire.hear_a(Seal)
        peer.step({0: 32})
        later = await peer.wire.hear_a(Seal)
        await peer.end()
    one, other = (
        msgspec.msgpack.decode(seal.statement, type=SealStatement) for seal in (between, later)
    )
    assert one.epoch == other.epoch
    assert one.rows[0].length == other.rows[0].length == 32
    assert one.rows != other.rows
    assert find_contradiction(one.state, other.state) is None
