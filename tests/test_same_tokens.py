"""The criterion for equal tokens excuses near ties and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.engine.tiny_models import prompt_ids, reference, save_tiny_model
from tests.same_tokens import (
    Ledger,
    ReferenceRun,
    assert_same_as,
    assert_same_tokens,
    run_reference,
)

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    model: PreTrainedModel = reference(save_tiny_model("llama", tmp_path_factory.mktemp("llama")))
    return model


@pytest.fixture
def run(alone: PreTrainedModel) -> ReferenceRun:
    return run_reference(alone, torch.tensor([prompt_ids(9)]), **GREEDY)


def changed(run: ReferenceRun, step: int, token: int) -> torch.Tensor:
    sequences = run.sequences_BL.clone()
    sequences[0, run.prompt_columns + step] = token
    return sequences


def tied(run: ReferenceRun, step: int, token: int, gap: float) -> ReferenceRun:
    """The same run, but with `token` only `gap` x max|logit| behind the one it chose."""
    logits = [part.clone() for part in run.logits]
    logits[step][0, token] = logits[step].max() - gap * logits[step].abs().max()
    return replace(run, logits=logits, scores=logits)


def test_equal_tokens_need_no_excuse(run: ReferenceRun, alone: PreTrainedModel) -> None:
    ledger = Ledger()
    assert_same_as(run, run.sequences_BL, ledger=ledger)
    assert_same_tokens(alone, run.sequences_BL, run.input_ids_BL, ledger=ledger, **GREEDY)
    assert (ledger.compared, ledger.excuses) == (24, [])


def test_another_token_is_an_error(run: ReferenceRun) -> None:
    other = (int(run.sequences_BL[0, -3]) + 1) % 320
    with pytest.raises(AssertionError, match="new token 9"):
        assert_same_as(run, changed(run, 9, other), ledger=Ledger())


def test_a_near_tie_is_excused_once_and_printed(
    run: ReferenceRun, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = Ledger()
    other = (run.new_tokens()[4] + 1) % 320
    close = tied(run, 4, other, 0.5e-5)
    assert_same_as(close, changed(run, 4, other), ledger=ledger)
    assert "excused: row 0, new token 4" in capsys.readouterr().out
    assert ledger.compared == 5
    with pytest.raises(AssertionError, match="2 excuses in 10 tokens"):
        assert_same_as(close, changed(run, 4, other), ledger=ledger)


def test_what_is_just_not_close_enough_is_an_error(run: ReferenceRun) -> None:
    other = (run.new_tokens()[4] + 1) % 320
    with pytest.raises(AssertionError, match="only"):
        assert_same_as(tied(run, 4, other, 1.5e-5), changed(run, 4, other), ledger=Ledger())


def test_a_third_token_is_an_error_however_close_the_second_is(run: ReferenceRun) -> None:
    second, third = (run.new_tokens()[4] + 1) % 320, (run.new_tokens()[4] + 2) % 320
    with pytest.raises(AssertionError, match="only"):
        assert_same_as(tied(run, 4, second, 1e-6), changed(run, 4, third), ledger=Ledger())


def test_missing_tokens_and_a_changed_prompt_are_errors(run: ReferenceRun) -> None:
    with pytest.raises(AssertionError, match="20 columns"):
        assert_same_as(run, run.sequences_BL[:, :-1], ledger=Ledger())
    with pytest.raises(AssertionError, match="prompt"):
        assert_same_as(run, changed(run, -2, 1), ledger=Ledger())


def test_sampling_is_reproduced_and_excused_at_its_own_boundary(alone: PreTrainedModel) -> None:
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.4, "top_k": 30}
    run = run_reference(
        alone, torch.tensor([prompt_ids(9)] * 2), seed=5, max_new_tokens=10, **options
    )
    assert run.rng_states is not None
    with torch.random.fork_rng():
        torch.set_rng_state(run.rng_states[6])
        variates = torch.empty_like(run.scores[6]).exponential_()
    keys = run.scores[6][0] - variates[0].log()
    first, second = keys.topk(2).indices.tolist()
    assert first == int(run.sequences_BL[0, run.prompt_columns + 6])
    with pytest.raises(AssertionError, match="only"):
        assert_same_as(run, changed(run, 6, second), ledger=Ledger())
    scores = [part.clone() for part in run.scores]
    scores[6][0, second] += (keys[first] - keys[second]) - 1e-6
    assert_same_as(replace(run, scores=scores), changed(run, 6, second), ledger=Ledger())


def test_a_mixture_is_excused_where_its_router_is_undecided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = reference(save_tiny_model("mixtral", tmp_path))
    run = run_reference(alone, torch.tensor([prompt_ids(9)]), **GREEDY)
    other = (run.new_tokens()[4] + 1) % 320
    with pytest.raises(AssertionError, match="only"):
        assert_same_as(run, changed(run, 4, other), ledger=Ledger())
    ledger = Ledger()
    monkeypatch.setattr("tests.same_tokens._router_gaps", lambda *_: [(0.1, 1e-5), (1e-6, 1e-5)])
    assert_same_as(run, changed(run, 4, other), ledger=ledger)
    assert "router 1" in ledger.excuses[0]
