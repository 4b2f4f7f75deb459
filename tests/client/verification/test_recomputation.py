"""A hop's work computed again: tokens for which routers were undecided are not judged.

L tokens of a row, D hidden, E experts.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nesa_node.client.verification.audit_history import AuditHistory
from nesa_node.client.verification.auditor import Auditor
from nesa_node.client.verification.recomputation import Recomputation, recompute
from nesa_node.client.verification.session_audit import HopWork, NotAuditedError, RowWork
from nesa_node.core.ids import PeerId, Span
from nesa_node.engine.weights.checkpoint import open_folder
from nesa_node.swarm.protocol.messages import Computation
from nesa_node.verification import comparison
from nesa_node.verification.comparison import ComputationKind, Measure, Threshold, compare_rows
from tests.engine.chained import Chain, distance, forward, new_row
from tests.engine.layouts import rewritten
from tests.engine.tiny_models import BLOCKS, HIDDEN, reference, save_tiny_model

TOKENS = 60
TIED_BLOCK = 2
ALLOWED = Threshold(1e-4, 1e-4, 1e-4, 1, (1e-4,) * 3)
RELATIVE = Measure("relative-l2", b"")


@pytest.fixture
def mixtral(tiny: Callable[[str], Path]) -> Path:
    return tiny("mixtral")


def with_equal_experts(folder: Path, target: Path, block: int, *, exchanged: bool) -> Path:
    """A model whose router cannot tell expert 0 from expert 1 in a block.

    With `exchanged` experts it is the same model, but chooses the other one where only one fits.
    """

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        prefix = f"model.layers.{block}.block_sparse_moe."
        gate_ED = tensors[prefix + "gate.weight"].clone()
        gate_ED[1] = gate_ED[0]
        changed = dict(tensors)
        changed[prefix + "gate.weight"] = gate_ED
        if exchanged:
            for part in ("w1", "w2", "w3"):
                pair = [f"{prefix}experts.{expert}.{part}.weight" for expert in (0, 1)]
                changed[pair[0]], changed[pair[1]] = tensors[pair[1]], tensors[pair[0]]
        return changed

    return rewritten(folder, target, change)


def work_on(folder: Path, inputs_LD: torch.Tensor, **changes: Any) -> HopWork:
    """All blocks' work on `inputs_LD`, computed with the weights of `folder`."""
    positions = tuple(range(len(inputs_LD)))
    work = HopWork(
        peer=PeerId("peer"),
        span=Span(0, BLOCKS),
        session=b"",
        first_block=0,
        computation=Computation("float32", "none", "cpu"),
        codec="none",
        rows=(RowWork(inputs_LD[:0], inputs_LD, positions, inputs_LD),),
        is_own=True,
        **changes,
    )
    outputs_LD = recompute(open_folder(folder), work).outputs[0]
    object.__setattr__(work.rows[0], "outputs_PD", outputs_LD)
    return work


def embedded(folder: Path, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [1, L], and the first block's inputs [L, D]."""
    model = reference(folder)
    generator = torch.Generator().manual_seed(seed)
    ids_1L = torch.randint(0, model.config.vocab_size, (1, TOKENS), generator=generator)
    return ids_1L, model.get_input_embeddings()(ids_1L)[0].detach()


@torch.no_grad()
def tied_tokens(folder: Path, ids_1L: torch.Tensor, block: int) -> torch.Tensor:
    """Of each token, by transformers, whether one of two equal experts is taken: [L]."""
    logits_LE = reference(folder)(ids_1L, output_router_logits=True).router_logits[block]
    assert torch.equal(logits_LE[:, 0], logits_LE[:, 1])
    best_LE = logits_LE.topk(3).values
    tied_L: torch.Tensor = best_LE[:, 1] - best_LE[:, 2] < 1e-5 * logits_LE.abs().amax(1)
    return tied_L


def audit(folder: Path, work: HopWork) -> tuple[str, int]:
    """The outcome at a client that has `folder`, and how many tokens are excused."""
    auditor = Auditor(open_folder(folder), 1.0, AuditHistory(None), rng=random.Random(0))
    found, excused = auditor._compare(work, None)
    return found.outcome, excused


@pytest.fixture(autouse=True)
def _mixtures_are_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = ComputationKind("mixtral", "float32", "none", "cpu")
    monkeypatch.setattr(comparison, "_load_thresholds", lambda _: {kind: {BLOCKS: ALLOWED}})


def test_routers_that_are_sure_excuse_nothing(mixtral: Path) -> None:
    _, inputs_LD = embedded(mixtral, 0)
    work = work_on(mixtral, inputs_LD)
    assert audit(mixtral, work) == ("passed", 0)
    work.rows[0].outputs_PD[9] *= 1.05
    assert audit(mixtral, work) == ("failed", 0)


@pytest.mark.parametrize("by_token", [False, True])
def test_ties_excuse_their_tokens_and_those_that_attend_to_them(
    mixtral: Path, tmp_path: Path, by_token: bool
) -> None:
    for block in (TIED_BLOCK, BLOCKS - 1):
        folder = with_equal_experts(mixtral, tmp_path / f"{block}", block, exchanged=False)
        ids_1L, inputs_LD = embedded(folder, 0)
        tied_L = tied_tokens(folder, ids_1L, block)
        assert 0 < tied_L.sum() < TOKENS
        found = recompute(open_folder(folder), work_on(folder, inputs_LD), by_token=by_token)
        if block < BLOCKS - 1:
            tied_L = tied_L.cumsum(0) > 0
        assert torch.equal(found.undecided[0], tied_L)


def test_a_router_that_chooses_the_other_of_two_equal_experts_is_no_lie(
    mixtral: Path, tmp_path: Path
) -> None:
    """Only tokens before the first tie count, and there a lie is found."""
    last = BLOCKS - 1
    ours, theirs = (
        with_equal_experts(mixtral, tmp_path / f"{exchanged}", last, exchanged=exchanged)
        for exchanged in (False, True)
    )
    ids_1L, inputs_LD = embedded(ours, 0)
    work = work_on(theirs, inputs_LD)
    expected = recompute(open_folder(ours), work).outputs
    given = [work.rows[0].outputs_PD]
    assert compare_rows(given, expected, ALLOWED, RELATIVE).outcome == "failed"
    tied_L = tied_tokens(ours, ids_1L, last)
    assert audit(ours, work) == ("passed", int(tied_L.sum()))
    honest = int((~tied_L).nonzero()[-1])
    work.rows[0].outputs_PD[honest] *= 1.05
    assert audit(ours, work) == ("failed", int(tied_L.sum()))


def test_ties_in_a_reused_prefix_excuse_what_attends_to_it(mixtral: Path, tmp_path: Path) -> None:
    folder = with_equal_experts(mixtral, tmp_path / "equal", 0, exchanged=False)
    ids_1L, inputs_LD = embedded(folder, 0)
    tied_L = tied_tokens(folder, ids_1L, 0)
    prefix = int(tied_L.nonzero()[0]) + 1
    checkpoint = open_folder(folder)
    rows = (RowWork(inputs_LD[:prefix], inputs_LD[prefix:], (prefix,), inputs_LD[:1]),)
    work = HopWork(
        PeerId("peer"), Span(1, BLOCKS), b"", 0, Computation("float32", "none", "cpu"), "none",
        rows, is_own=False,
    )  # fmt: skip
    assert recompute(checkpoint, work).undecided[0].tolist() == [True]


def test_a_row_without_a_judged_token_is_left_out_and_nothing_is_not_audited() -> None:
    values_LD = torch.ones(3, HIDDEN)
    some, all_of_them = torch.tensor([False, True, False]), torch.ones(3, dtype=torch.bool)
    found = Recomputation([values_LD] * 2, [all_of_them, some])
    assert [[len(row_LD) for row_LD in rows] for rows in found.judged(found.outputs)] == [[2]]
    with pytest.raises(NotAuditedError, match="undecided"):
        Recomputation([values_LD], [all_of_them]).judged([values_LD])


def test_a_cache_in_8_bits_is_computed_again_as_one_and_judged_by_no_bounds(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    _, inputs_LD = embedded(folder, 0)
    work = work_on(folder, inputs_LD)
    small = replace(work, computation=Computation("float32", "none+kv-int8", "cpu"))
    outputs_LD = recompute(open_folder(folder), small).outputs[0]
    [blocks] = Chain(folder, spans=[Span(0, BLOCKS)], cache_dtype="int8").blocks
    expected_LD = forward(blocks, inputs_LD, new_row(blocks))
    assert distance(outputs_LD, expected_LD) <= 1e-4
    assert distance(outputs_LD, work.rows[0].outputs_PD) > 1e-3
    assert audit(folder, small) == ("uncalibrated", 0)
    later = replace(work, computation=Computation("float32", "none+kv-int4", "cpu"))
    with pytest.raises(NotAuditedError, match=r"none\+kv-int4"):
        recompute(open_folder(folder), later)
