"""Openings that a node checks: which convict, and how many it takes.

L tokens of a row, D hidden.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from nesa_node.core.errors import BusyError
from nesa_node.core.ids import ModelId, PeerId, Span
from nesa_node.engine.model.blocks import ModelBlocks, RowChunk
from nesa_node.engine.model.loading import load_blocks
from nesa_node.engine.weights.checkpoint import Checkpoint, open_folder
from nesa_node.server.evidence import opening_server
from nesa_node.server.evidence.opening_server import (
    MAX_CHECKS_PER_HOUR,
    CheckLimits,
    OpenedWork,
    OpeningServer,
    is_wrong_work,
)
from nesa_node.swarm.openings import OpenedRow, make_opening
from nesa_node.swarm.p2p.identity import Identity, Membership
from nesa_node.swarm.protocol.messages import Busy, Computation, ErrorMessage
from nesa_node.swarm.protocol.seal_messages import (
    Opening,
    OpeningOffer,
    OpeningTaken,
    OpeningWanted,
    SealRequest,
)
from nesa_node.verification.comparison import Threshold
from tests.e2e.liars import calibrate_tiny_models
from tests.engine.tiny_models import BLOCKS, HIDDEN
from tests.server.bench import Wire
from tests.swarm.test_openings import SECRET, session

SPAN = Span(1, 3)
TOKENS = 24
MODEL = ModelId("tiny@0")


@pytest.fixture(scope="module")
def checkpoint(tiny: Callable[[str], Path]) -> Checkpoint:
    return open_folder(tiny("llama"))


@pytest.fixture(scope="module")
def blocks(checkpoint: Checkpoint) -> ModelBlocks:
    return load_blocks(checkpoint, SPAN, dtype=torch.float32, device="cpu")


def run(blocks: ModelBlocks, inputs_LD: torch.Tensor, chunks: int) -> torch.Tensor:
    """Outputs of an honest node that got its inputs in chunks of so many tokens."""
    reservation = blocks.new_pool(64).reserve(2)
    table = reservation.new_table()
    table.reserve(len(inputs_LD))
    parts = torch.split(inputs_LD, chunks)
    outputs = [blocks.forward(part, [RowChunk(table, len(part), None)]) for part in parts]
    reservation.close()
    return torch.cat(outputs)


def work_of(inputs_LD: torch.Tensor, outputs_LD: torch.Tensor, **changes: Any) -> OpenedWork:
    computation = Computation(
        **{"dtype": "float32", "quantization": "none", "backend": "cpu"} | changes
    )
    row = OpenedRow(0, inputs_LD, tuple(range(len(inputs_LD))), outputs_LD)
    return OpenedWork(PeerId("accused"), SPAN, computation, [row])


def is_wrong(checkpoint: Checkpoint, work: OpenedWork) -> bool:
    return is_wrong_work(checkpoint, work, threading.Event())


LIES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "times 1.05": lambda inputs, outputs: 1.05 * outputs,
    "inputs": lambda inputs, outputs: inputs,
    "noise of 1 %": lambda inputs, outputs: outputs * (1 + 0.01 * torch.randn_like(outputs)),
    "the token before": lambda inputs, outputs: outputs.roll(1, 0),
    "zeros": lambda inputs, outputs: torch.zeros_like(outputs),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_evident(
    checkpoint: Checkpoint, blocks: ModelBlocks, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    calibrate_tiny_models(monkeypatch)
    inputs_LD = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    wrong_LD = LIES[lie](inputs_LD, run(blocks, inputs_LD, 5))
    assert is_wrong(checkpoint, work_of(inputs_LD, wrong_LD))
    # Not where a kind has no bounds, nor of too few tokens.
    assert not is_wrong(checkpoint, work_of(inputs_LD, wrong_LD, backend="NVIDIA H200"))
    assert not is_wrong(checkpoint, work_of(inputs_LD[:12], wrong_LD[:12]))


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e4])
@pytest.mark.parametrize("chunks", [1, 2, 5, TOKENS])
def test_honest_outputs_are_not_whatever_their_inputs(
    checkpoint: Checkpoint,
    blocks: ModelBlocks,
    monkeypatch: pytest.MonkeyPatch,
    scale: float,
    chunks: int,
) -> None:
    calibrate_tiny_models(monkeypatch)
    inputs_LD = scale * torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2))
    assert not is_wrong(checkpoint, work_of(inputs_LD, run(blocks, inputs_LD, chunks)))


def _cancelling(blocks: ModelBlocks) -> torch.Tensor:
    """Inputs of which the outputs almost vanish, so that rounding is nearly all that is left."""
    inputs_LD = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(3))
    for _ in range(200):
        outputs_LD = run(blocks, inputs_LD, TOKENS)
        inputs_LD = inputs_LD - 0.5 * outputs_LD
    return inputs_LD


def test_inputs_chosen_to_make_honest_machines_differ_convict_none(
    checkpoint: Checkpoint, blocks: ModelBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With bounds that honest outputs exceed, the two computations' own difference decides."""
    calibrate_tiny_models(monkeypatch)
    tight = Threshold(1e-12, 1e-12, 1e-12, 1)
    monkeypatch.setattr(opening_server, "find_threshold", lambda *_: tight)
    for inputs_LD in (_cancelling(blocks), torch.randn(TOKENS, HIDDEN)):
        for chunks in (2, 3, 5):
            honest_LD = run(blocks, inputs_LD, chunks)
            assert not is_wrong(checkpoint, work_of(inputs_LD, honest_LD))
        assert is_wrong(checkpoint, work_of(inputs_LD, 1.05 * honest_LD))


def test_few_openings_are_checked_whatever_many_identities_send() -> None:
    now = 0.0
    limits = CheckLimits(lambda: now)
    names = [PeerId(f"peer-{number}") for number in range(50)]
    for name in names[:20]:
        limits.admit(name)
        with pytest.raises(BusyError):
            limits.admit(name)
    for name in names[20 : 20 + MAX_CHECKS_PER_HOUR]:
        limits.admit(name)
        limits.begin()
    with pytest.raises(BusyError):
        limits.admit(names[40])
    now = 3601.0
    limits.admit(names[0])


class Bench:
    """A node that takes openings over streams in memory."""

    def __init__(self, checkpoint: Checkpoint, folder: Path) -> None:
        self.accused = Identity.ephemeral(folder)
        self.own = Identity.ephemeral(folder)
        self.wrong: list[tuple[str, str]] = []
        swarm = SimpleNamespace(
            identity=self.own, notices=SimpleNamespace(membership=Membership(None))
        )
        self.server = OpeningServer(
            cast(Any, swarm),
            MODEL,
            checkpoint,
            find_span=lambda: Span(0, BLOCKS),
            find_addresses=lambda: {self.accused.peer_id: ()},
            report_wrong=lambda peer, reason: self.wrong.append((peer, reason)),
        )

    def offer(self, **changes: Any) -> OpeningOffer:
        fields = {"model": MODEL, "accused": self.accused.peer_id, "blocks": (1, 3)}
        return OpeningOffer(**fields | changes)

    async def ask(self, peer: str, *messages: Any) -> list[Any]:
        """What the node answers to a stream's messages."""
        wire, answers = Wire(peer), []
        for message in messages:
            wire.say(*message if isinstance(message, tuple) else (message,))
        await self.server.handle(wire.peer, cast(Any, wire), None)
        await wire.close()
        while (got := await wire._to_peer.get()) is not None:
            answers.append(got[0])
        return answers

    def opening(self, inputs_LD: torch.Tensor, outputs_LD: torch.Tensor) -> tuple[Opening, bytes]:
        seal, rows = session(
            self.accused, values=(inputs_LD, outputs_LD), rows=1, blocks=(SPAN.start, SPAN.end)
        )
        return make_opening(seal, SECRET, rows)


@pytest.fixture
def bench(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(opening_server, "Stream", lambda peer, reader, writer: reader)
    calibrate_tiny_models(monkeypatch)
    return Bench(checkpoint, tmp_path)


@pytest.mark.parametrize("factor", [1.0, 1.05])
async def test_a_node_reports_what_it_has_computed_to_be_wrong(
    bench: Bench, blocks: ModelBlocks, factor: float
) -> None:
    inputs_LD = torch.randn(TOKENS, HIDDEN)
    opening = bench.opening(inputs_LD, factor * run(blocks, inputs_LD, 5))
    answers = await bench.ask("client", bench.offer(), opening)
    assert [type(each) for each in answers] == [OpeningWanted, OpeningTaken]
    (busy,) = await bench.ask("another", bench.offer())
    assert isinstance(busy, Busy)
    await bench.server._tasks.join()
    assert [peer for peer, _ in bench.wrong] == [bench.accused.peer_id] * (factor != 1.0)
    await bench.server.close()


async def test_offers_that_cannot_be_checked_are_refused(bench: Bench) -> None:
    stranger = "12D3KooWStranger"
    for number, (offer, code) in enumerate(
        (
            (SealRequest(), "unexpected"),
            (bench.offer(model="other@0"), "wrong_model"),
            (bench.offer(membership=b"x" * 32), "not_a_member"),
            (bench.offer(blocks=(1, BLOCKS + 1)), "wrong_blocks"),
            (bench.offer(accused=stranger), "not_checkable"),
            (bench.offer(accused=bench.own.peer_id), "not_checkable"),
        )
    ):
        (answer,) = await bench.ask(f"client-{number}", offer)
        assert isinstance(answer, ErrorMessage)
        assert answer.code == code
    (answer,) = await bench.ask(bench.accused.peer_id, bench.offer())
    assert answer.code == "not_checkable"
    # What is no opening is not counted as checked.
    inputs_LD = torch.randn(TOKENS, HIDDEN)
    opening, payload = bench.opening(inputs_LD, inputs_LD)
    broken = payload[:-1] + bytes([payload[-1] ^ 1])
    for number in range(2 * MAX_CHECKS_PER_HOUR):
        answers = await bench.ask(f"client-{10 + number}", bench.offer(), (opening, broken))
        assert answers[-1].code == "not_opened"
    for name, answer in (("client-10", Busy), ("client-9", OpeningWanted)):
        answers = await bench.ask(name, bench.offer(), (opening, payload))
        assert isinstance(answers[0], answer)
    await bench.server._tasks.join()
    assert len(bench.wrong) == 1
    await bench.server.close()
