"""Which two seals no honest node signs, and that real ones never are such a pair."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nesa_node.compression import tensors
from nesa_node.compression.tensors import HiddenStates
from nesa_node.server.session.sealing import SessionSealer
from nesa_node.swarm.p2p.identity import Identity
from nesa_node.swarm.protocol.messages import VERSION, Computation, Open, RowSlice
from nesa_node.swarm.protocol.seal_messages import Seal, open_seal
from nesa_node.verification.evidence import SealedState, find_contradiction
from nesa_node.verification.seal_tree import RowRoots

ROWS = 2
_KINDS = ("step", "seal", "seal", "begin epoch", "cut", "fork")


def row(length: int, inputs: bytes = b"i", outputs: bytes = b"o") -> RowRoots:
    return RowRoots(length, inputs, outputs)


SEALED = SealedState(b"n", ("node", (0, 2)), 3, 2, 1, (row(5), row(7)))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"constants": ("node", (0, 3)), "number": 4}, "different nodes"),
        ({"rows": (row(5),), "number": 4}, "different nodes"),
        ({"epoch": 3}, "number 3 differ"),
        ({"rows": (row(5), row(8))}, "number 3 differ"),
        ({"number": 4, "epoch": 1, "cuts": 2}, "epochs 2 and 1"),
        ({"number": 2, "epoch": 3}, "epochs 3 and 2"),
        ({"number": 4, "cuts": None}, "not both count"),
        ({"number": 4, "cuts": 0}, "count 1 and 0 cuts"),
        ({"number": 4, "rows": (row(5), row(6))}, "7 and 6 tokens of row 1"),
        ({"number": 4, "rows": (row(5, inputs=b"j"), row(8))}, "5 tokens of row 0"),
        ({"number": 4, "rows": (row(6), row(7, outputs=b"p"))}, "7 tokens of row 1"),
        ({"number": 4, "epoch": 9, "rows": (row(5, outputs=b"p"), row(7))}, "5 tokens of row 0"),
        ({}, None),
        ({"nonce": b"m", "constants": (), "rows": ()}, None),
        ({"number": 4}, None),
        ({"number": 4, "epoch": 5}, None),
        ({"number": 4, "rows": (row(6, b"j", b"p"), row(7))}, None),
        ({"number": 4, "cuts": 2, "rows": (row(5, b"j"), row(0))}, None),
        ({"number": 2, "cuts": 0, "rows": (row(5, b"j"), row(70))}, None),
    ],
)
def test_two_seals_contradict_each_other_where_no_honest_node_signs_both(
    changes: dict[str, object], what: str | None
) -> None:
    other = replace(SEALED, **changes)  # type: ignore[arg-type]  # one field
    for pair in ((SEALED, other), (other, SEALED)):
        found = find_contradiction(*pair)
        assert (found is None) if what is None else (found is not None and what in found)


def test_seals_that_count_no_cuts_may_have_any_rows() -> None:
    older = replace(SEALED, cuts=None)
    assert find_contradiction(older, replace(older, number=4, rows=(row(1), row(7, b"j")))) is None
    assert find_contradiction(older, replace(older, rows=(row(1), row(7)))) is not None


class SealedSession:
    """A session's sealer, and what its node does: `begin epoch` comes some time before `cut`."""

    def __init__(self, identity: Identity) -> None:
        opened = Open(
            version=VERSION, model="tiny@0", session=bytes(16), secret=bytes(32), blocks=(0, 2),
            rows=ROWS, max_tokens=100, mode="star", dtype="float32", epoch=0, upstream=None,
        )  # fmt: skip
        computation = Computation(dtype="float32", quantization="none", backend="cpu")
        self._sealer = SessionSealer(identity, opened, computation)
        self._epoch = 0
        self._lengths = [0] * ROWS
        self._generator = torch.Generator().manual_seed(0)
        self.seals: list[Seal] = []

    async def do(self, kind: str, at: int, count: int) -> None:
        match kind:
            case "step":
                await self._step(at, count)
            case "seal":
                self.seals.append(self._sealer.make_seal(self._epoch))
            case "begin epoch":
                self._epoch += 1
            case "cut":
                self._lengths = [min(count, length) for length in self._lengths]
                self._sealer.truncate(self._lengths)
            case "fork":
                self._lengths = [self._lengths[at]] * ROWS
                self._sealer.reorder([at] * ROWS)

    async def _step(self, at: int, count: int) -> None:
        slices = (RowSlice(at, self._lengths[at], count),)
        came, went = (torch.randn(count, 4, generator=self._generator) for _ in range(2))
        await self._sealer.add_inputs(slices, HiddenStates.from_tensor(came))
        if count % 2:  # else its outputs go nowhere
            await self._sealer.add_outputs(slices, *tensors.encode(went))
        self._lengths[at] += count


async def test_no_two_seals_of_honest_sessions_contradict_each_other(tmp_path: Path) -> None:
    """Whatever their clients ask for, and whichever two an accuser takes."""
    identity, rng = Identity.ephemeral(tmp_path), random.Random(24)
    pairs: Counter[str] = Counter()
    for _ in range(40):
        sessions = [SealedSession(identity) for _ in range(2)]
        for session in sessions:
            for _ in range(40):
                await session.do(rng.choice(_KINDS), rng.randrange(ROWS), rng.randint(1, 4))
        signed = [seal for session in sessions for seal in session.seals]
        stated = [open_seal(seal, identity.peer_id).state for seal in signed]
        for one, other in itertools.combinations(stated, 2):
            assert find_contradiction(one, other) is None
            is_same = one.nonce == other.nonce
            pairs["of one session" if is_same else "mixed"] += 1
            # A rule by epochs alone would have had this honest node convicted.
            rolled_back = one.rows[0].length > other.rows[0].length
            pairs["of one epoch, shorter"] += is_same and one.epoch == other.epoch and rolled_back
    assert sum(pairs.values()) > 10_000
    assert min(pairs.values()) > 100, pairs
