"""Every family generates through three nodes what transformers generates alone.

B rows, L columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.core.ids import Span
from nesa_node.core.settings.choices import RouteName
from nesa_node.engine.model.blocks import ModelBlocks, RowChunk
from tests.client.local_models import left_padded, random_ids
from tests.e2e.joining import ROUTES, both_routes
from tests.engine.tiny_models import (
    BLOCKS,
    FAMILIES,
    LEAST_DISTINCT,
    NEW_TOKENS,
    prompt_ids,
    reference,
)
from tests.same_tokens import Ledger, ReferenceRun, assert_same_as, run_reference
from tests.swarms import daemons, in_process_swarm, thirds

TOLERANCE = 1e-4
"""Of the greatest of the reference's logits; see CONTRIBUTING, "the same tokens"."""


def _long_prompt() -> tuple[Tensor, Tensor]:
    ids_BL = torch.tensor([prompt_ids(700)])
    # Without a mask, transformers takes the token 0 for padding.
    return ids_BL, torch.ones_like(ids_BL)


PROMPTS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "long": _long_prompt,
    "padded batch": lambda: left_padded([5, 17, 11]),
}
OPTIONS: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}


@dataclass
class Case:
    """A family's model alone, and as clients of its swarm see it by each kind of route."""

    alone: PreTrainedModel
    models: dict[RouteName, DistributedModelForCausalLM]
    _runs: dict[str, ReferenceRun] = field(default_factory=dict)

    def run_alone(self, prompt: str) -> ReferenceRun:
        if prompt not in self._runs:
            self._runs[prompt] = run_reference(self.alone, *PROMPTS[prompt](), **OPTIONS)
        return self._runs[prompt]

    def assert_equal(self, prompt: str, route: RouteName) -> Tensor:
        ids_BL, mask_BL = PROMPTS[prompt]()
        ours_BL: Tensor = self.models[route].generate(ids_BL, attention_mask=mask_BL, **OPTIONS)
        assert_same_as(self.run_alone(prompt), ours_BL)
        return ours_BL[:, ids_BL.shape[1] :]

    def assert_logits_equal(self, route: RouteName) -> None:
        ids_BL = random_ids(2, 90)
        forward: Any = self.alone.__call__
        with torch.no_grad():
            theirs = forward(ids_BL).logits
        ours = self.models[route](ids_BL).logits
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max()


@contextmanager
def _case(folder: Path, addresses: Sequence[str]) -> Iterator[Case]:
    with both_routes(folder, addresses) as models:
        for model in models.values():
            with model.inference_session(max_length=1) as session:
                assert [hop.span for hop in session.hops] == thirds(BLOCKS)
        yield Case(reference(folder), models)


EVERY_FAMILY = [
    # What sets these apart from `falcon` is the engine's concern, and tested there.
    pytest.param(family, marks=[pytest.mark.slow] if family.startswith("falcon_") else [])
    for family in sorted(FAMILIES)
]


@pytest.fixture(scope="module", params=EVERY_FAMILY)
def case(
    request: pytest.FixtureRequest,
    tiny: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Case]:
    folder = tiny(request.param)
    with (
        in_process_swarm(folder, thirds(BLOCKS), tmp_path_factory.mktemp("swarm")) as addresses,
        _case(folder, addresses) as case,
    ):
        yield case


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_equal_those_of_transformers(
    case: Case, prompt: str, route: RouteName
) -> None:
    new_BL = case.assert_equal(prompt, route)
    assert new_BL.shape[1] == NEW_TOKENS
    if len(new_BL) == 1:
        assert len(set(new_BL[0].tolist())) >= LEAST_DISTINCT


@pytest.mark.parametrize("route", ROUTES)
def test_logits_are_within_1e_4(case: Case, route: RouteName) -> None:
    case.assert_logits_equal(route)


FORWARD = ModelBlocks._forward


def _without_its_last_block(
    blocks: ModelBlocks, hidden_TD: Tensor, runs: Sequence[RowChunk]
) -> Tensor:
    return FORWARD(blocks.select(Span(blocks.span.start, blocks.span.end - 1)), hidden_TD, runs)


def _one_position_late(blocks: ModelBlocks, hidden_TD: Tensor, runs: Sequence[RowChunk]) -> Tensor:
    start = 0
    for run in runs:
        if not run.table.length:
            run.table.reserve(run.count + 1)
            FORWARD(blocks, hidden_TD[start : start + 1], [RowChunk(run.table, 1)])
        run.table.reserve(run.table.length + run.count)
        start += run.count
    return FORWARD(blocks, hidden_TD, runs)


@pytest.mark.parametrize("mistake", [_without_its_last_block, _one_position_late])
def test_a_mistake_of_the_middle_node_is_caught(
    case: Case,
    mistake: Callable[[ModelBlocks, Tensor, Sequence[RowChunk]], Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Missing position codes are caught by the engine's tests, with the same tolerance."""
    middle = thirds(BLOCKS)[1]

    def forward(blocks: ModelBlocks, hidden_TD: Tensor, runs: Sequence[RowChunk]) -> Tensor:
        run = mistake if blocks.span == middle else FORWARD
        return run(blocks, hidden_TD, runs)

    monkeypatch.setattr(ModelBlocks, "_forward", forward)
    # Machine code runs whole spans: a block left out before would read memory never written.
    monkeypatch.setattr(ModelBlocks, "_compiled_decoder_for", lambda *_: None)
    for route in ROUTES:
        with pytest.raises(AssertionError):
            case.assert_logits_equal(route)
    if mistake is _without_its_last_block:
        ids_BL, mask_BL = PROMPTS["padded batch"]()
        few = OPTIONS | {"max_new_tokens": 8}
        ours_BL = case.models["chain"].generate(ids_BL, attention_mask=mask_BL, **few)
        with pytest.raises(AssertionError, match="is excused"):
            assert_same_as(case.run_alone("padded batch"), ours_BL, ledger=Ledger())


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_separate_daemons_give_the_same_tokens(
    family: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny(family)
    with daemons(folder, tmp_path) as nodes:
        nodes.start_all(thirds(BLOCKS))
        with _case(folder, nodes.addresses) as case:
            for route in ROUTES:
                for prompt in PROMPTS:
                    case.assert_equal(prompt, route)
                case.assert_logits_equal(route)
