"""Every family in three spans against the whole model in transformers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nesa_node.engine.model.fused_decoder import FusedDecoder
from tests.engine.chained import Chain, Run, distance
from tests.engine.tiny_models import (
    FAMILIES,
    LEAST_DISTINCT,
    NEW_TOKENS,
    VARIANTS,
    greedy,
    prompt_ids,
    reference,
    save_tiny_model,
)

TOLERANCE = 1e-4
"""Of the greatest of the reference's logits; see CONTRIBUTING, "the same tokens"."""
VISIBLE = 100 * TOLERANCE
"""What a mistake must change at least, for the tolerance to catch it with a margin."""


@dataclass(frozen=True)
class Case:
    chain: Chain
    model: Any
    prompt: list[int]
    logits_LV: Tensor
    """The reference's, of the prompt."""
    new: list[int]
    """The reference's greedy tokens after the prompt."""


@cache
def _case(family: str, models_dir: Path) -> Case:
    folder = save_tiny_model(family, models_dir)
    model, prompt = reference(folder), prompt_ids(700)
    with torch.inference_mode():
        logits_LV = model(torch.tensor([prompt])).logits[0]
    return Case(Chain(folder), model, prompt, logits_LV, greedy(model, prompt, NEW_TOKENS))


@pytest.fixture(params=[*FAMILIES, *VARIANTS])
def case(request: pytest.FixtureRequest, models_dir: Path) -> Case:
    return _case(request.param, models_dir)


@pytest.fixture(params=[*FAMILIES])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_three_spans_decode_as_the_whole_model(case: Case) -> None:
    run = Run(case.chain)
    assert distance(run.step(case.prompt), case.logits_LV) <= TOLERANCE
    run = Run(case.chain)
    new = run.greedy(case.prompt, NEW_TOKENS)
    assert new == case.new
    assert len(set(new)) >= LEAST_DISTINCT


def test_decoded_logits_equal_those_of_one_forward(case: Case) -> None:
    run = Run(case.chain)
    run.step(case.prompt)
    logits_LV = torch.cat([run.step([token]) for token in case.new])
    with torch.inference_mode():
        expected = case.model(torch.tensor([case.prompt + case.new])).logits[0, len(case.prompt) :]
    assert distance(logits_LV, expected) <= TOLERANCE


def test_a_prompt_in_chunks_decodes_the_same(case: Case) -> None:
    assert Run(case.chain).greedy(case.prompt, NEW_TOKENS, chunk=193) == case.new


def test_a_rollback_is_undone_by_feeding_again(case: Case) -> None:
    run = Run(case.chain)
    run.greedy(case.prompt, 12)
    run.step(prompt_ids(9, seed=1))
    # Behind the window and chunk borders too.
    run.rollback(500)
    run.step(prompt_ids(3, seed=2))
    run.rollback(500)
    logits_LV = run.step(case.prompt[500:])
    assert distance(logits_LV, case.logits_LV[500:]) <= TOLERANCE
    new = [int(logits_LV[-1].argmax())]
    while len(new) < NEW_TOKENS:
        new.append(int(run.step(new[-1:])[-1].argmax()))
    assert new == case.new


def test_several_tokens_in_one_step_equal_one_at_a_time(case: Case) -> None:
    run = Run(case.chain)
    run.step(case.prompt)
    together_LV = torch.cat([run.step(case.new[:5]), run.step(case.new[5:12])])
    run.rollback(len(case.prompt))
    apart_LV = torch.cat([run.step([token]) for token in case.new[:12]])
    assert distance(together_LV, apart_LV) <= TOLERANCE


def test_sequences_in_turns_do_not_see_each_other(case: Case) -> None:
    first, second = Run(case.chain), Run(case.chain)
    other = prompt_ids(90, seed=3)
    first.step(case.prompt)
    alone_LV = second.step(other)
    logits = first.step(case.new[:1])
    second.rollback(40)
    assert distance(second.step(other[40:]), alone_LV[40:]) <= TOLERANCE
    fresh = Run(case.chain)
    fresh.step(case.prompt)
    assert torch.equal(logits, fresh.step(case.new[:1]))


def test_part_of_a_span_runs_alone(case: Case) -> None:
    first, second, third = case.chain.blocks
    parts = [blocks.select(type(blocks.span)(i, i + 1)) for blocks in (first, second, third)
             for i in (blocks.span.start, blocks.span.start + 1)]  # fmt: skip
    run = Run(case.chain, blocks=parts)
    assert distance(run.step(case.prompt), case.logits_LV) <= TOLERANCE


def test_a_dropped_block_is_caught(family: str, models_dir: Path) -> None:
    case = _case(family, models_dir)
    first, second, third = case.chain.blocks
    shorter = second.select(type(second.span)(second.span.start, second.span.end - 1))
    wrong = Run(case.chain, blocks=[first, shorter, third]).step(case.prompt)
    assert distance(wrong, case.logits_LV) > VISIBLE


def test_positions_shifted_by_one_are_caught(family: str, models_dir: Path) -> None:
    """All relative distances stay when everything moves, so one node is moved against its past."""
    case = _case(family, models_dir)
    run = Run(case.chain)
    run.step(case.prompt[:350])
    run.step([7])
    # The embedder's position comes from the client, the node's from its cache.
    run.rollback(350)
    run.length = 351
    for table in run.tables:
        table.length = 351
    wrong = run.step(case.prompt[350:])
    assert distance(wrong, case.logits_LV[350:]) > VISIBLE


def test_a_missing_position_code_is_caught(
    family: str, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = _case(family, models_dir)
    _remove_position_code(case.chain, monkeypatch)
    wrong = Run(case.chain).step(case.prompt)
    assert distance(wrong, case.logits_LV) > VISIBLE


def _remove_position_code(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    removed = 0
    positions = chain.embedder._positions
    if positions is not None:
        monkeypatch.setattr(positions, "weight", nn.Parameter(torch.zeros_like(positions.weight)))
        removed += 1
    for blocks in chain.blocks:
        if isinstance(blocks._decoder, FusedDecoder):
            # What was computed with the right frequencies must be computed again.
            monkeypatch.setattr(blocks._decoder.rotary_cache, "_tables", None)
        for name, module in blocks._decoder.named_modules():
            for buffer in [name for name in module._buffers if name.endswith("inv_freq")]:
                monkeypatch.setitem(
                    module._buffers, buffer, torch.zeros_like(module._buffers[buffer])
                )
                removed += 1
    if not removed:
        for path in ("bloom.modeling_bloom._get_alibi_slopes",):
            monkeypatch.setattr(f"transformers.models.{path}", _no_slopes)
    monkeypatch.setattr("transformers.models.falcon.modeling_falcon.build_alibi_tensor", _no_alibi)


def _no_slopes(heads: int, device: torch.device) -> Tensor:
    return torch.zeros(heads, device=device)


def _no_alibi(mask_BL: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask_BL.shape[0] * heads, 1, mask_BL.shape[1], dtype=dtype)
