"""Openings of seals: read only where the seal is of their values, and binds the node to them.

T packed tokens, L tokens of a row, D hidden.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from nesa_node.compression import tensors
from nesa_node.core.errors import ProtocolError
from nesa_node.swarm.openings import OpenedRow, make_opening, read_opening
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.swarm.protocol.messages import RowSlice
from nesa_node.swarm.protocol.seal_messages import Opening, Seal, sealed_rows
from nesa_node.verification.seal_tree import SessionSeals
from tests.swarm.seals import make_seal

HIDDEN = 8
SECRET = b"k" * 32
replace = msgspec.structs.replace


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return Identity.ephemeral(tmp_path_factory.mktemp("node"))


def as_bytes(values: torch.Tensor) -> memoryview:
    return memoryview(tensors.encode(values.contiguous())[1]).cast("B")


def session(
    node: Identity,
    *,
    seed: int = 0,
    rows: int = 3,
    absent: int = 0,
    values: tuple[torch.Tensor, torch.Tensor] | None = None,
    **changes: Any,
) -> tuple[Seal, list[OpenedRow]]:
    """A node's seal of rows of 9 tokens, of which the outputs of some went nowhere. Of the first
    row the node did not see the first `absent` inputs. `values` are inputs and outputs.
    """
    generator = torch.Generator().manual_seed(seed)
    seals, opened = SessionSeals(SECRET, rows), []
    for row in range(rows):
        drawn = (torch.randn(9, HIDDEN, generator=generator) for _ in range(2))
        inputs_LD, outputs_LD = drawn if values is None else values
        length = len(inputs_LD)
        positions = (1, 4, 5, 6, 8) if row else tuple(range(length))
        first = absent if row == 0 else 0
        seals.add_inputs(row, first, as_bytes(inputs_LD[first:]), length - first)
        for position in positions:
            seals.add_outputs(row, position, as_bytes(outputs_LD[position]), 1)
        opened.append(OpenedRow(row, inputs_LD, positions, outputs_LD[list(positions)]))
    stated = {"rows": sealed_rows(seals.roots()), "is_exact": True, **changes}
    return make_seal(node, **stated), opened


def opening_of(node: Identity, rows: int = 3) -> tuple[Seal, bytes, list[OpenedRow]]:
    """What makes an opening."""
    seal, opened = session(node, rows=rows)
    return seal, SECRET, opened


@pytest.mark.parametrize("picked", [[0, 1, 2], [2], [1, 0]])
def test_an_opening_is_read_as_it_was_sealed(node: Identity, picked: list[int]) -> None:
    """All rows, or some: of the rest nothing is said."""
    seal, rows = session(node)
    rows = [rows[row] for row in picked]
    opening, payload = make_opening(seal, SECRET, rows)
    stated, read = read_opening(opening, payload, node.peer_id, HIDDEN)
    assert stated.node == node.peer_id
    for row, again in zip(rows, read, strict=True):
        assert (row.row, row.positions) == (again.row, again.positions)
        assert torch.equal(row.inputs_LD, again.inputs_LD)
        assert torch.equal(row.outputs_PD, again.outputs_PD)


def _other_session(seal: Seal, node: Identity) -> tuple[Seal, list[OpenedRow]]:
    return seal, session(node, seed=1)[1]


def _without_inputs(seal: Seal, node: Identity) -> tuple[Seal, list[OpenedRow]]:
    return seal, [
        OpenedRow(row.row, row.inputs_LD[:8], row.positions[:4], row.outputs_PD[:4])
        for row in session(node)[1]
    ]


def _wrong_output(seal: Seal, node: Identity) -> tuple[Seal, list[OpenedRow]]:
    rows = session(node)[1]
    rows[1].outputs_PD[0, 0] += 1e-6
    return seal, rows


def _fewer_outputs(seal: Seal, node: Identity) -> tuple[Seal, list[OpenedRow]]:
    rows = session(node)[1]
    first = rows[0]
    rows[0] = OpenedRow(0, first.inputs_LD, first.positions[:-1], first.outputs_PD[:-1])
    return seal, rows


def _another_key(seal: Seal, node: Identity) -> tuple[Seal, list[OpenedRow]]:
    return replace(seal, signature=bytes(64)), session(node)[1]


def _reused_prefix(seal: Seal, node: Identity) -> tuple[Seal, list[OpenedRow]]:
    return session(node, absent=4)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (_other_session, "not_opened"),
        (_without_inputs, "not_checkable"),
        (_wrong_output, "not_opened"),
        (_fewer_outputs, "not_opened"),
        (_another_key, "bad_seal"),
        (_reused_prefix, "not_opened"),
        (lambda seal, node: session(node, is_exact=False), "not_checkable"),
        (lambda seal, node: session(node, adapter=b"a" * 32), "not_checkable"),
    ],
)
def test_what_an_honest_node_may_have_sealed_is_refused(
    node: Identity, change: Callable[[Seal, Identity], tuple[Seal, list[OpenedRow]]], code: str
) -> None:
    """Values of another session, a part of them, an adapter, lossy links, tokens of a cache."""
    seal, rows = change(session(node)[0], node)
    opening, payload = make_opening(seal, SECRET, rows)
    with pytest.raises(ProtocolError) as caught:
        read_opening(opening, payload, node.peer_id, HIDDEN)
    assert caught.value.code == code


def _relabelled(opening: Opening) -> Opening:
    """The same bytes as another dtype have the same leaves."""
    return replace(opening, tensor=replace(opening.tensor, dtype="float16"))


@pytest.mark.parametrize(
    "change",
    [
        _relabelled,
        lambda opening: replace(opening, inputs=opening.inputs[:2]),
        lambda opening: replace(opening, inputs=(*opening.inputs[:2], opening.inputs[0])),
        lambda opening: replace(opening, inputs=(*opening.inputs[:2], RowSlice(7, 0, 9))),
        lambda opening: replace(opening, inputs=(*opening.inputs[:2], RowSlice(2, 1, 9))),
        lambda opening: replace(opening, outputs=(RowSlice(0, 1, 9), *opening.outputs[1:])),
        lambda opening: replace(opening, outputs=tuple(reversed(opening.outputs))),
        lambda opening: replace(opening, outputs=(RowSlice(9, 0, 9), *opening.outputs[1:])),
        lambda opening: replace(
            opening, tensor=replace(opening.tensor, shape=(opening.tensor.shape[0] + 1, HIDDEN))
        ),
    ],
)
def test_malformed_openings_are_refused(
    node: Identity, change: Callable[[Opening], Opening]
) -> None:
    opening, payload = make_opening(*opening_of(node))
    with pytest.raises(ProtocolError) as caught:
        read_opening(change(opening), payload, node.peer_id, HIDDEN)
    assert caught.value.code in ("bad_opening", "bad_tensor", "not_opened")


def test_no_changed_bit_is_taken_for_what_was_sealed(node: Identity) -> None:
    opening, payload = make_opening(*opening_of(node))
    rng = random.Random(0)
    for _ in range(500):
        changed = bytearray(payload)
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        with pytest.raises(ProtocolError):
            read_opening(opening, changed, node.peer_id, HIDDEN)
    with pytest.raises(ProtocolError, match="other values"):
        read_opening(replace(opening, secret=b"l" * 32), payload, node.peer_id, HIDDEN)
