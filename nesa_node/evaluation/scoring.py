"""Log-likelihoods of tokens, computed through a session; perplexity; paired significance tests.

Items are easy or hard for both runs alike, so that the differences of paired tests are far less
uncertain than the two results.

S scored tokens of a row, T of all rows, R of one chunk of logits, D hidden, V vocabulary, N scored
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.client.model.head import EmbeddingAndHead
from nesa_node.core.errors import ConfigError, ContextLengthError

MAX_BATCH_TOKENS = 2048
"""Most tokens of a batch over all its rows, unless a single row has more."""
MAX_LOGIT_ROWS = 256
"""Tokens per chunk of logits, which bounds memory: a vocabulary has 50,000 entries and more."""


@dataclass(frozen=True, slots=True)
class ScoringQuery:
    """A query for the likelihood of the last `scored` of `ids`, given those before.

    Raises `ValueError` unless 0 < `scored` < len(`ids`).
    """

    ids: Sequence[int]
    scored: int

    def __post_init__(self) -> None:
        if not 0 < self.scored < len(self.ids):
            raise ValueError(f"cannot score {self.scored} of {len(self.ids)} tokens")

    @property
    def prefix(self) -> Sequence[int]:
        """Tokens fed before the first one whose output is used."""
        return self.ids[: -self.scored - 1]

    @property
    def scored_inputs(self) -> Sequence[int]:
        """Tokens whose outputs predict the scored ones; the last token is never fed."""
        return self.ids[-self.scored - 1 : -1]


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores of one query; `log_likelihoods_S` in nats, float64, on the CPU."""

    log_likelihoods_S: Tensor
    is_greedy: bool
    """Whether greedy decoding would give exactly these tokens."""

    @property
    def total(self) -> float:
        return float(self.log_likelihoods_S.sum())


def score_queries(
    model: DistributedModelForCausalLM,
    queries: Sequence[ScoringQuery],
    *,
    batch_tokens: int = MAX_BATCH_TOKENS,
) -> Iterator[TokenScores]:
    """Score `queries` in order, in batches of at most `batch_tokens`.

    Queries of a batch that share a prefix run it once, if it is long enough to be worth a copy.
    Logits are normalised in float32. Raises as sessions do, `ContextLengthError` first.
    """
    batch: list[ScoringQuery] = []
    for query in queries:
        if batch and sum(len(one.ids) for one in (*batch, query)) > batch_tokens:
            yield from _score_batch(model, batch)
            batch = []
        batch.append(query)
    if batch:
        yield from _score_batch(model, batch)


@torch.inference_mode()
def _score_batch(
    model: DistributedModelForCausalLM, queries: Sequence[ScoringQuery]
) -> list[TokenScores]:
    longest = max(len(query.ids) for query in queries) - 1
    with model.inference_session(longest, len(queries)) as session:
        if len({tuple(query.prefix) for query in queries}) < len(queries):
            session.feed([_ids(query.prefix) for query in queries], "last")
            hidden_TD = session.feed([_ids(query.scored_inputs) for query in queries])
        else:
            fed = [_ids(query.ids[:-1]) for query in queries]
            outputs = torch.split(session.feed(fed), [len(row) for row in fed])
            hidden_TD = torch.cat(
                [rows_LD[-query.scored :] for rows_LD, query in zip(outputs, queries, strict=True)]
            )
        targets_T = torch.cat([_ids(query.ids[-query.scored :]) for query in queries])
        likelihoods_T, greedy_T = _log_likelihoods(session.ends, hidden_TD, targets_T)
    counts = [query.scored for query in queries]
    return [
        TokenScores(likelihoods_S, bool(greedy_S.all()))
        for likelihoods_S, greedy_S in zip(
            torch.split(likelihoods_T, counts), torch.split(greedy_T, counts), strict=True
        )
    ]


def _log_likelihoods(
    ends: EmbeddingAndHead, hidden_TD: Tensor, targets_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-likelihood of each target after its hidden state, [T], and whether it is the argmax."""
    likelihoods, greedy = [], []
    for start in range(0, len(targets_T), MAX_LOGIT_ROWS):
        rows_RD = hidden_TD[start : start + MAX_LOGIT_ROWS]
        targets_R = targets_T[start : start + MAX_LOGIT_ROWS]
        logits_RV = ends.head(rows_RD).float()
        targets_R = targets_R.to(logits_RV.device)
        chosen_R = logits_RV.gather(1, targets_R[:, None])[:, 0]
        likelihoods.append((chosen_R - logits_RV.logsumexp(1)).double().cpu())
        greedy.append((logits_RV.argmax(1) == targets_R).cpu())
    return torch.cat(likelihoods), torch.cat(greedy)


def _ids(tokens: Sequence[int]) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64)


_MAX_CHARS_PER_TOKEN = 16
"""Characters tokenized per wanted token; the whole text is tokenized if that gives too few."""


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The token ids of `text`, with the tokenizer's own prefix (Llama 3: a bos token) once."""
    # `verbose=False` suppresses the warning about texts longer than the model's context.
    begun = bool(tokenizer.bos_token) and text.startswith(str(tokenizer.bos_token))
    encoded: Any = tokenizer(text, add_special_tokens=not begun, verbose=False)
    return list(encoded["input_ids"])


def first_tokens(tokenizer: PreTrainedTokenizerBase, text: str, count: int) -> list[int]:
    """The first `count` tokens of `text`, or all if it has fewer."""
    ids = encode_text(tokenizer, text[: count * _MAX_CHARS_PER_TOKEN])
    if len(ids) < count:
        ids = encode_text(tokenizer, text)
    return ids[:count]


def encode_pair(
    tokenizer: PreTrainedTokenizerBase, context: str, continuation: str, *, max_tokens: int
) -> ScoringQuery:
    """A query that scores `continuation` after `context`, tokenized as one text.

    As in lm-evaluation-harness, white space at the end of the context belongs to the continuation,
    and the continuation's tokens are those beyond the number of tokens of the context alone. An
    empty context is one beginning-of-text token (end-of-text if the model has none). Texts beyond
    `max_tokens` are truncated on the left; the last token is not fed and not counted. Raises
    `ContextLengthError` if the continuation alone exceeds `max_tokens`.
    """
    if context.strip():
        kept = context.rstrip()
        ids = encode_text(tokenizer, context + continuation)
        scored = len(ids) - len(encode_text(tokenizer, kept))
    else:
        encoded: Any = tokenizer(context + continuation, add_special_tokens=False, verbose=False)
        ids = [prefix_token(tokenizer), *encoded["input_ids"]]
        scored = len(ids) - 1
    if scored > max_tokens:
        raise ContextLengthError(f"{scored} tokens to score; the model holds {max_tokens}")
    # A token may span context and continuation; at least the last token is scored.
    return ScoringQuery(ids[-max_tokens - 1 :], max(scored, 1))


def prefix_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token before a text without context: bos, else eos, else 0."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if isinstance(token, int):
            return token
    return 0


@dataclass(frozen=True, slots=True)
class PairedMean:
    """Mean of the differences, its standard error, and the two-sided p-value of a paired t-test."""

    mean: float
    standard_error: float
    p_value: float


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean of at least two values and its standard error s / sqrt(n); else `ValueError`."""
    count = len(values)
    if count < 2:
        raise ValueError("a standard error needs at least two values")
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, math.sqrt(variance / count)


def paired_t(values: Sequence[float], baseline: Sequence[float]) -> PairedMean:
    """Paired t-test of the same items in two runs; identical runs have p = 1."""
    mean, error = mean_and_error([a - b for a, b in zip(values, baseline, strict=True)])
    if error == 0:
        return PairedMean(mean, 0.0, 1.0 if mean == 0 else 0.0)
    return PairedMean(mean, error, student_t(mean / error, len(values) - 1))


def student_t(t: float, degrees: int) -> float:
    """P(|T| >= |t|) of Student's t-distribution with `degrees` of freedom."""
    from scipy.special import stdtr

    return 2 * float(stdtr(degrees, -abs(t)))


def mcnemar(right: Sequence[bool], baseline: Sequence[bool]) -> float:
    """McNemar's exact test: the two-sided p-value for correct and wrong answers of two runs.

    Of n items that only one run has correct, k go to the run with fewer; under the null hypothesis
    each is a fair coin flip: p = min(1, 2 sum_{i <= k} C(n, i) / 2^n).
    """
    pairs = list(zip(right, baseline, strict=True))
    gained = sum(mine and not other for mine, other in pairs)
    lost = sum(other and not mine for mine, other in pairs)
    count = gained + lost
    tail = sum(math.comb(count, index) for index in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / (1 << count))


BLOCK_TOKENS = 64
"""Tokens per block for the standard error: losses of neighbouring tokens are correlated, those of
such blocks hardly."""
MIN_TOKENS = 2 * BLOCK_TOKENS + 1


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp(m) of the mean negative log-likelihood m over all scored tokens.

    Standard error: the tokens are cut into consecutive blocks of about `BLOCK_TOKENS`; with s the
    standard deviation of the k block means, the error of m is s / sqrt(k), and that of exp(m) is
    exp(m) s / sqrt(k) (delta method). It refers to other texts of this kind and length, and is too
    small if blocks are correlated.
    """

    tokens: int
    block_nll: tuple[float, ...]
    mean_nll: float

    @classmethod
    def from_nll(cls, nll_N: Tensor) -> Perplexity:
        """From negative log-likelihoods [N] in text order; `ValueError` below two blocks."""
        tokens = len(nll_N)
        blocks = tokens // BLOCK_TOKENS
        if blocks < 2:
            raise ValueError(f"{tokens} tokens are fewer than two blocks of {BLOCK_TOKENS}")
        cuts = [tokens * block // blocks for block in range(blocks + 1)]
        means = tuple(float(nll_N[start:end].mean()) for start, end in pairwise(cuts))
        return cls(tokens, means, float(nll_N.mean()))

    @property
    def value(self) -> float:
        return math.exp(self.mean_nll)

    @property
    def standard_error(self) -> float:
        return self.value * mean_and_error(self.block_nll)[1]


def window_queries(ids: Sequence[int], *, context: int, stride: int) -> list[ScoringQuery]:
    """Cut `ids` into overlapping windows of `context` tokens, `stride` apart.

    The first window scores all its tokens but the first, which has no context; each later window
    its last `stride` (the last one possibly fewer), given at least `context - stride` tokens.
    Raises `ConfigError` for a stride that skips tokens.
    """
    if not 1 <= stride < context:
        raise ConfigError(f"--stride {stride} must be at least 1 and below --context {context}")
    queries, done = [], 1
    while done < len(ids):
        end = min(context if done == 1 else done + stride, len(ids))
        queries.append(ScoringQuery(ids[max(0, end - context) : end], end - done))
        done = end
    return queries


def measure_perplexity(
    model: DistributedModelForCausalLM, ids: Sequence[int], *, context: int, stride: int
) -> Perplexity:
    """Perplexity of at least `MIN_TOKENS` ids; raises as `window_queries`, `score_queries` do."""
    scores = score_queries(model, window_queries(ids, context=context, stride=stride))
    return Perplexity.from_nll(-torch.cat([one.log_likelihoods_S for one in scores]))


def rolling_queries(ids: Sequence[int], *, prefix_token: int, context: int) -> list[ScoringQuery]:
    """Queries that score each of `ids` once in disjoint windows, as lm-evaluation-harness does.

    The first window begins with the token `prefix_token`; each later one with the last token before
    it. The last window is extended to the left, so that it too feeds `context` tokens.
    """
    told = [prefix_token, *ids]
    queries, done = [], 1
    while done < len(told):
        end = min(done + context, len(told))
        queries.append(ScoringQuery(told[max(0, end - context - 1) : end], end - done))
        done = end
    return queries
