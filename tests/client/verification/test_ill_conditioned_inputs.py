"""Inputs made so that honest machines differ have audits blame none.

L tokens of a row, D hidden.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from nesa_node.client.verification.audit_history import AuditHistory
from nesa_node.client.verification.auditor import Auditor
from nesa_node.client.verification.session_audit import HopWork, NotAuditedError, RowWork
from nesa_node.core.ids import PeerId, Span
from nesa_node.engine.weights.checkpoint import open_folder
from nesa_node.swarm.protocol.messages import Computation
from nesa_node.verification import comparison
from nesa_node.verification.comparison import ComputationKind, Threshold
from tests.engine.tiny_models import BLOCKS, HIDDEN, reference

ALLOWED = Threshold(1e-6, 1e-6, 1e-6, 1, (1e-6,) * 3)
"""Five times what ordinary inputs of the tiny model give rise to."""
STEPS = 60


@pytest.fixture(autouse=True)
def _bounds_are_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = ComputationKind("llama", "float32", "none", "cpu")
    monkeypatch.setattr(comparison, "_load_thresholds", lambda _: {kind: {BLOCKS: ALLOWED}})


def run_layers(model: Any, inputs_LD: torch.Tensor) -> torch.Tensor:
    """Outputs [L, D] of all blocks by transformers, in the model's dtype."""
    dtype = next(model.parameters()).dtype
    positions_1L = torch.arange(len(inputs_LD))[None]
    hidden_1LD = inputs_LD[None].to(dtype)
    turned = model.rotary_emb(hidden_1LD, positions_1L)
    for layer in model.layers:
        hidden_1LD = layer(hidden_1LD, position_embeddings=turned, position_ids=positions_1L)
    return hidden_1LD[0]


def cancelling_inputs(model: Any, tokens: int, seed: int) -> torch.Tensor:
    """Inputs [L, D] of which the blocks leave little: what was rounded is large beside that."""
    generator = torch.Generator().manual_seed(seed)
    inputs_LD = torch.randn((tokens, HIDDEN), generator=generator).requires_grad_()
    optimizer = torch.optim.Adam([inputs_LD], lr=0.05)
    for _ in range(STEPS):
        outputs_LD = run_layers(model, inputs_LD)
        loss = (outputs_LD.norm(dim=1) / inputs_LD.norm(dim=1)).log().mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return inputs_LD.detach()


def judge(folder: Path, inputs_LD: torch.Tensor, outputs_LD: torch.Tensor) -> tuple[str, float]:
    """The outcome at a client that has `folder`, and the error as a multiple of what is allowed."""
    row = RowWork(inputs_LD[:0], inputs_LD, tuple(range(len(inputs_LD))), outputs_LD)
    work = HopWork(
        peer=PeerId("peer"),
        span=Span(0, BLOCKS),
        session=b"",
        first_block=0,
        computation=Computation("float32", "none", "cpu"),
        codec="none",
        rows=(row,),
        is_own=True,
    )
    auditor = Auditor(open_folder(folder), 1.0, AuditHistory(None), rng=random.Random(0))
    try:
        found, _ = auditor._compare(work, None)
    except NotAuditedError:
        return "not audited", math.inf
    return found.outcome, found.of_allowed or 0.0


@pytest.mark.parametrize("tokens", [1, 20])
def test_a_machine_that_rounds_otherwise_is_not_blamed(
    tiny: Callable[[str], Path], tokens: int
) -> None:
    """Of one token, a prefill and a decode step are one computation, which differs by nothing."""
    folder = tiny("llama")
    model = reference(folder).model
    exact_model = deepcopy(model).double()
    found = []
    for seed in range(2):
        inputs_LD = cancelling_inputs(model, tokens, seed)
        exact_LD = run_layers(exact_model, inputs_LD).float().detach()
        found.append(judge(folder, inputs_LD, exact_LD))
        # A lie is a lie with such inputs, too.
        assert judge(folder, inputs_LD, 1.01 * exact_LD)[0] == "failed"
    assert {outcome for outcome, _ in found} <= {"passed", "not audited"}
    assert max(of_allowed for _, of_allowed in found) > 1


@pytest.mark.parametrize(
    ("narrower", "outcome"), [(0.2, "passed"), (1, "passed"), (5, "passed"), (50, "not audited")]
)
def test_bounds_of_another_model_are_no_fault(
    tiny: Callable[[str], Path], narrower: float, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of the same family may have larger errors than the one that bounds are fitted to."""
    kind = ComputationKind("llama", "float32", "none", "cpu")
    allowed = Threshold(*(1e-6 / narrower,) * 3, 1, (1e-6 / narrower,) * 3)
    monkeypatch.setattr(comparison, "_load_thresholds", lambda _: {kind: {BLOCKS: allowed}})
    folder = tiny("llama")
    model = reference(folder).model
    inputs_LD = torch.randn((60, HIDDEN), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        exact_LD = run_layers(deepcopy(model).double(), inputs_LD).float()
    found, of_allowed = judge(folder, inputs_LD, exact_LD)
    assert found == outcome
    assert (of_allowed > 1) == (narrower >= 1)
    assert judge(folder, inputs_LD, exact_LD * (1 + 1e-3 * inputs_LD.sign()))[0] == "failed"
