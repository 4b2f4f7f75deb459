"""Perplexity against transformers' own loss."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from nesa_node.core.errors import ConfigError, ContextLengthError
from nesa_node.evaluation.scoring import (
    BLOCK_TOKENS,
    Perplexity,
    ScoringQuery,
    measure_perplexity,
    score_queries,
    window_queries,
)
from tests.cli.tiny import VOCABULARY
from tests.evaluation.models import local_model, reference


def random_ids(count: int, *, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(0, VOCABULARY, (count,), generator=generator).tolist()
    return ids


def loss_of_transformers(model: Any, ids: list[int], *, context: int, stride: int) -> float:
    """The mean over windows that overlap, as transformers' guide to perplexity computes it.

    But for the last window, which is as long as the others.
    """
    total, scored, done = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + context, len(ids))
        window = torch.tensor([ids[max(0, end - context) : end]])
        labels = window.clone()
        labels[:, : -(end - done)] = -100
        with torch.no_grad():
            # The loss is the mean over labels that are predicted: all but the window's first.
            count = int((labels[:, 1:] != -100).sum())
            total += float(model(window, labels=labels).loss) * count
        scored += count
        done = end
        if end == len(ids):
            break
    assert scored == len(ids) - 1
    return total / scored


@pytest.mark.parametrize(("context", "stride"), [(128, 64), (100, 33), (64, 63), (400, 200)])
def test_perplexity_equals_the_loss_of_transformers(
    words_model: Path, context: int, stride: int
) -> None:
    ids = random_ids(300)
    with local_model(words_model) as model:
        ours = measure_perplexity(model, ids, context=context, stride=stride)
    theirs = loss_of_transformers(reference(words_model), ids, context=context, stride=stride)
    assert ours.tokens == 299
    assert ours.mean_nll == pytest.approx(theirs, rel=1e-5)
    assert ours.value == pytest.approx(math.exp(theirs), rel=1e-4)


@pytest.mark.parametrize("length", [2, 3, 64, 65, 100, 129, 1000])
@pytest.mark.parametrize(("context", "stride"), [(64, 32), (64, 1), (64, 63), (2, 1)])
def test_windows_score_every_token_but_the_first_once(
    length: int, context: int, stride: int
) -> None:
    ids = list(range(length))
    queries = window_queries(ids, context=context, stride=stride)
    scored = [token for query in queries for token in query.ids[-query.scored :]]
    assert scored == ids[1:]
    for query in queries:
        assert len(query.ids) <= context
        assert list(query.ids) == list(range(query.ids[0], query.ids[-1] + 1))
    for query in queries[1:]:
        assert query.scored <= stride
        assert len(query.ids) == context


@pytest.mark.parametrize("stride", [0, -1, 64, 100])
def test_a_stride_that_leaves_tokens_out_is_refused(stride: int) -> None:
    with pytest.raises(ConfigError, match="--stride"):
        window_queries([1, 2, 3], context=64, stride=stride)


def test_standard_error_is_that_of_the_blocks() -> None:
    first, second = torch.full((BLOCK_TOKENS,), 1.0), torch.full((BLOCK_TOKENS,), 2.0)
    perplexity = Perplexity.from_nll(torch.cat([first, second]).double())
    # Means 1 and 2: s = sqrt(1/2), over sqrt(2) blocks 1/2.
    assert perplexity.block_nll == (1.0, 2.0)
    assert perplexity.value == pytest.approx(math.exp(1.5))
    assert perplexity.standard_error == pytest.approx(math.exp(1.5) / 2)


def test_standard_error_covers_the_truth_as_often_as_it_should() -> None:
    generator = torch.Generator().manual_seed(0)
    inside = 0
    for _ in range(300):
        nll_N = 1 + torch.rand(2048, generator=generator, dtype=torch.float64)
        one = Perplexity.from_nll(nll_N)
        inside += abs(one.value - math.exp(1.5)) < 2 * one.standard_error
    assert 270 <= inside <= 297


def test_too_few_tokens_have_no_standard_error() -> None:
    with pytest.raises(ValueError, match="two blocks"):
        Perplexity.from_nll(torch.zeros(2 * BLOCK_TOKENS - 1))


def test_batches_change_nothing(words_model: Path) -> None:
    shared = random_ids(60)
    queries = [ScoringQuery([*shared, *random_ids(9, seed=seed)], 9) for seed in range(4)]
    queries += [ScoringQuery(random_ids(40, seed=9), 3), ScoringQuery(random_ids(2, seed=8), 1)]
    with local_model(words_model) as model:
        together = list(score_queries(model, queries))
        apart = [next(score_queries(model, [query])) for query in queries]
        pairs = list(score_queries(model, queries, batch_tokens=150))
    for one, two, three in zip(together, apart, pairs, strict=True):
        for other in (two, three):
            torch.testing.assert_close(
                one.log_likelihoods_S, other.log_likelihoods_S, rtol=1e-5, atol=1e-5
            )
        assert one.is_greedy == two.is_greedy == three.is_greedy


def test_a_shared_context_runs_once(words_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nesa_node.client.model.inference_session import InferenceSession

    sent = []
    finish = InferenceSession.finish

    def count(session: InferenceSession) -> None:
        sent.append(session.tokens_sent)
        finish(session)

    monkeypatch.setattr(InferenceSession, "finish", count)
    shared = random_ids(60)
    queries = [ScoringQuery([*shared, *random_ids(9, seed=seed)], 9) for seed in range(4)]
    with local_model(words_model) as model:
        list(score_queries(model, queries))
    assert sent == [59 + 4 * 9]


def test_greedy_says_whether_decoding_would_give_these_tokens(words_model: Path) -> None:
    prompt = random_ids(20)
    with local_model(words_model) as model:
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0].tolist()
        changed = [*ids[:-1], (ids[-1] + 1) % VOCABULARY]
        scores = list(score_queries(model, [ScoringQuery(ids, 6), ScoringQuery(changed, 6)]))
    assert [one.is_greedy for one in scores] == [True, False]
    assert scores[0].total > scores[1].total


def test_more_than_the_context_is_an_error(words_model: Path) -> None:
    with local_model(words_model) as model, pytest.raises(ContextLengthError):
        list(score_queries(model, [ScoringQuery(random_ids(600), 5)]))


@pytest.mark.parametrize(("length", "scored"), [(5, 5), (5, 0), (0, 0), (1, 1)])
def test_a_query_needs_something_before_what_it_scores(length: int, scored: int) -> None:
    with pytest.raises(ValueError, match="cannot score"):
        ScoringQuery(random_ids(length), scored)
