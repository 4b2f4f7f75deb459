"""Log probabilities of tokens, before temperature and truncation, as OpenAI reports them.

T tokens, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nesa_node.api.decoding.job import Chosen, TokenChance

LEAST_LOGPROB = -9999.0
"""Substitute for minus infinity and NaN, which JSON does not have."""


def chosen_tokens(
    logits_TV: Tensor, token_ids: Sequence[int], top: int, data: Callable[[int], bytes]
) -> list[Chosen]:
    """`token_ids[t]` with its log probability by float32 `logits_TV[t]`, and the `top` likeliest.

    `data` returns a token's bytes. `logits_TV` is not modified.
    """
    total_T1 = torch.logsumexp(logits_TV, -1, keepdim=True)
    ids_T1 = torch.tensor(token_ids, device=logits_TV.device).unsqueeze(1)
    own_T = (logits_TV.gather(1, ids_T1) - total_T1).squeeze(1).tolist()
    if not top:
        rows: list[tuple[TokenChance, ...]] = [()] * len(token_ids)
    else:
        best_TK, ids_TK = logits_TV.topk(min(top, logits_TV.shape[1]))
        best_TK = best_TK - total_T1
        rows = [
            tuple(TokenChance(i, data(i), _clean(p)) for i, p in zip(ids, values, strict=True))
            for ids, values in zip(ids_TK.tolist(), best_TK.tolist(), strict=True)
        ]
    return [
        Chosen(token_id, data(token_id), _clean(logprob), likeliest)
        for token_id, logprob, likeliest in zip(token_ids, own_T, rows, strict=True)
    ]


def _clean(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB) if math.isfinite(logprob) else LEAST_LOGPROB
