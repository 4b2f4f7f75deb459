"""Log-likelihoods of tokens, computed through a session; the basis of all measures.

S scored tokens of a row, T of all rows, R of one chunk of logits, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nesa_node.client.causal_lm import DistributedModelForCausalLM
from nesa_node.client.ends import Ends

BATCH_TOKENS = 2048
"""Most tokens of a batch over all its rows, unless a single row has more."""
LOGIT_ROWS = 256
"""Tokens per chunk of logits, which bounds memory: a vocabulary has 50,000 entries and more."""


@dataclass(frozen=True, slots=True)
class Query:
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
    def rest(self) -> Sequence[int]:
        """Tokens whose outputs predict the scored ones; the last token is never fed."""
        return self.ids[-self.scored - 1 : -1]


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of one query; `log_likelihoods_S` in nats, float64, on the CPU."""

    log_likelihoods_S: Tensor
    greedy: bool
    """Whether greedy decoding would give exactly these tokens."""

    @property
    def total(self) -> float:
        return float(self.log_likelihoods_S.sum())


def score(
    model: DistributedModelForCausalLM,
    queries: Sequence[Query],
    *,
    batch_tokens: int = BATCH_TOKENS,
) -> Iterator[Scores]:
    """Score `queries` in order, in batches of at most `batch_tokens`.

    Queries of a batch that share a prefix run it once, if it is long enough to be worth a copy.
    Logits are normalised in float32. Raises as sessions do, `ContextLengthError` first.
    """
    batch: list[Query] = []
    for query in queries:
        if batch and sum(len(one.ids) for one in (*batch, query)) > batch_tokens:
            yield from _score_batch(model, batch)
            batch = []
        batch.append(query)
    if batch:
        yield from _score_batch(model, batch)


@torch.inference_mode()
def _score_batch(model: DistributedModelForCausalLM, queries: Sequence[Query]) -> list[Scores]:
    longest = max(len(query.ids) for query in queries) - 1
    with model.inference_session(longest, len(queries)) as session:
        if len({tuple(query.prefix) for query in queries}) < len(queries):
            session.feed([_ids(query.prefix) for query in queries], "last")
            hidden_TD = session.feed([_ids(query.rest) for query in queries])
        else:
            fed = [_ids(query.ids[:-1]) for query in queries]
            outputs = torch.split(session.feed(fed), [len(row) for row in fed])
            hidden_TD = torch.cat(
                [rows_LD[-query.scored :] for rows_LD, query in zip(outputs, queries, strict=True)]
            )
        targets_T = torch.cat([_ids(query.ids[-query.scored :]) for query in queries])
        likelihoods_T, greedy_T = _likelihoods(session.ends, hidden_TD, targets_T)
    counts = [query.scored for query in queries]
    return [
        Scores(likelihoods_S, bool(greedy_S.all()))
        for likelihoods_S, greedy_S in zip(
            torch.split(likelihoods_T, counts), torch.split(greedy_T, counts), strict=True
        )
    ]


def _likelihoods(ends: Ends, hidden_TD: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """Log-likelihood of each target after its hidden state, [T], and whether it is the argmax."""
    likelihoods, greedy = [], []
    for start in range(0, len(targets_T), LOGIT_ROWS):
        rows_RD = hidden_TD[start : start + LOGIT_ROWS]
        targets_R = targets_T[start : start + LOGIT_ROWS]
        logits_RV = ends.head(rows_RD).float()
        targets_R = targets_R.to(logits_RV.device)
        chosen_R = logits_RV.gather(1, targets_R[:, None])[:, 0]
        likelihoods.append((chosen_R - logits_RV.logsumexp(1)).double().cpu())
        greedy.append((logits_RV.argmax(1) == targets_R).cpu())
    return torch.cat(likelihoods), torch.cat(greedy)


def _ids(tokens: Sequence[int]) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64)
