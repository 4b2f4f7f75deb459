"""Sampling of the next token of one choice, and log probabilities of tokens.

T tokens, V vocabulary, K tokens: candidates, adjusted or likeliest ones.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nesa_node.api.generation.job import CandidateToken, SamplingParams, SequenceToken

_INITIAL_CAPACITY = 64


class SharedLogitsState:
    """State that the choices of a job share, since a prompt may be long.

    The prompt's tokens, if the repetition penalty needs them, and the biases.
    """

    def __init__(self, sampling: SamplingParams, prompt: Sequence[int]) -> None:
        self.sampling = sampling
        self.prompt_tokens = frozenset(prompt if sampling.repetition_penalty != 1 else ())
        self.prompt_ids_K = torch.tensor(tuple(self.prompt_tokens), dtype=torch.int64)
        self.biased_ids_K = torch.tensor(tuple(sampling.logit_bias), dtype=torch.int64)
        self.biases_K = torch.tensor(tuple(sampling.logit_bias.values()), dtype=torch.float32)


class LogitsProcessor:
    """Penalties of one choice, of which the repetition penalty counts the prompt, and biases."""

    def __init__(self, shared: SharedLogitsState) -> None:
        self._shared = shared
        self._repetition_penalty = shared.sampling.repetition_penalty
        self._presence_penalty = shared.sampling.presence_penalty
        self._frequency_penalty = shared.sampling.frequency_penalty
        self._counts: Counter[int] = Counter()
        self._repeated = _TokenValues()
        self._added_values = _TokenValues()

    def apply(self, logits_V: Tensor) -> Tensor:
        """Adjusted copy of `logits_V`, on its device."""
        logits_V, device = logits_V.clone(), logits_V.device
        answered_K, _ = self._repeated.entries(device)
        for ids_K in (self._shared.prompt_ids_K.to(device), answered_K):
            scores_K = logits_V[ids_K]
            logits_V[ids_K] = torch.where(
                scores_K < 0,
                scores_K * self._repetition_penalty,
                scores_K / self._repetition_penalty,
            )
        ids_K, values_K = self._added_values.entries(device)
        # These values include the biases of their tokens.
        moved_K = logits_V[ids_K] + values_K
        logits_V[self._shared.biased_ids_K.to(device)] += self._shared.biases_K.to(device)
        logits_V[ids_K] = moved_K
        return logits_V

    def append_token(self, token_id: int) -> None:
        """Add the answer's next token to the counts."""
        if self._repetition_penalty != 1 and token_id not in self._shared.prompt_tokens:
            self._repeated.add(token_id, 0.0)
        if self._presence_penalty or self._frequency_penalty:
            first = token_id not in self._counts
            self._counts[token_id] += 1
            if first:
                self._added_values.add(
                    token_id, self._shared.sampling.logit_bias.get(token_id, 0.0)
                )
            self._added_values.add(
                token_id, -self._frequency_penalty - (self._presence_penalty if first else 0.0)
            )


class _TokenValues:
    """Map from token ids to float32 values, as tensors that double when they are full.

    Room for the longest answer is not allocated in advance, since few answers are that long.
    """

    def __init__(self) -> None:
        self._indices: dict[int, int] = {}
        self._ids = torch.zeros(_INITIAL_CAPACITY, dtype=torch.int64)
        self._values = torch.zeros(_INITIAL_CAPACITY)

    def add(self, token_id: int, value: float) -> None:
        place = self._indices.setdefault(token_id, len(self._indices))
        if place == len(self._ids):
            self._ids = torch.cat((self._ids, torch.zeros_like(self._ids)))
            self._values = torch.cat((self._values, torch.zeros_like(self._values)))
        self._ids[place] = token_id
        self._values[place] += value

    def entries(self, device: torch.device) -> tuple[Tensor, Tensor]:
        count = len(self._indices)
        return self._ids[:count].to(device), self._values[:count].to(device)


MIN_SAMPLING_TEMPERATURE = 1e-5
"""Temperature below which the argmax is taken."""
_TOP_K_SIZES = (512, 8192)
"""Sizes of top-k tried for top-p before the whole vocabulary, which takes milliseconds to sort."""


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """A sampled token, and what it was sampled from: adjusted logits and a number in [0, 1)."""

    token_id: int
    logits_V: Tensor
    """After penalties and biases; -inf where the grammar allows no token."""
    uniform: float | None
    """None: greedy."""


class Sampler:
    """Sampler of one choice: inverse transform sampling, with one random number per token.

    The same seed, index and logits give the same tokens. `index` is the choice's index in its job.
    """

    def __init__(self, shared: SharedLogitsState, index: int) -> None:
        sampling = shared.sampling
        self._sampling = sampling
        self._is_greedy = sampling.temperature < MIN_SAMPLING_TEMPERATURE
        is_adjusted = (
            sampling.repetition_penalty != 1
            or sampling.presence_penalty
            or sampling.frequency_penalty
            or sampling.logit_bias
        )
        self._processor = LogitsProcessor(shared) if is_adjusted else None
        seed = None if sampling.seed is None else f"{sampling.seed} {index}"
        self._random = random.Random(seed)

    @property
    def is_argmax(self) -> bool:
        """Whether each token is the argmax of the logits, independently of earlier tokens."""
        return self._is_greedy and self._processor is None

    def choose(self, logits_V: Tensor, allowed_V: Tensor | None = None) -> int:
        """Sample a token of the mask `allowed_V` from float32 logits, which are not modified."""
        chosen = self.draw(logits_V, allowed_V).token_id
        self.append_token(chosen)
        return chosen

    def draw(self, logits_V: Tensor, allowed_V: Tensor | None = None) -> Draw:
        """As `choose`, but the answer goes on with the token that is appended then."""
        if self._processor is not None:
            logits_V = self._processor.apply(logits_V)
        if allowed_V is not None:
            logits_V = logits_V.masked_fill(~allowed_V, -math.inf)
        best = int(logits_V.argmax())
        if self._is_greedy:
            return Draw(best, logits_V, None)
        uniform = self._random.random()
        return Draw(self._invert(logits_V, best, uniform), logits_V, uniform)

    def append_token(self, token_id: int) -> None:
        """Add the answer's next token to what penalties count."""
        if self._processor is not None:
            self._processor.append_token(token_id)

    def _invert(self, logits_V: Tensor, best: int, uniform: float) -> int:
        # Relative to the largest logit, so that low temperatures do not overflow.
        scores_V = (logits_V - logits_V[best]) / self._sampling.temperature
        ids_K, scores_K = self._candidates(scores_V)
        # float64: float32 would lose the tail of a large vocabulary.
        cumulated_K = scores_K.exp().cumsum(0, dtype=torch.float64)
        drawn = uniform * float(cumulated_K[-1])
        at = int(torch.searchsorted(cumulated_K, drawn, right=True))
        if not math.isfinite(drawn) or at >= len(cumulated_K):
            return best
        return at if ids_K is None else int(ids_K[at])

    def _candidates(self, scores_V: Tensor) -> tuple[Tensor | None, Tensor]:
        """Candidate ids and scores after top-k, top-p and min-p; ids None: all of V, in order."""
        sampling = self._sampling
        top_k = min(sampling.top_k, len(scores_V))
        if not top_k and sampling.top_p >= 1:
            if sampling.min_p > 0:
                scores_V = scores_V.masked_fill(scores_V < math.log(sampling.min_p), -math.inf)
            return None, scores_V
        if top_k:
            scores_K, ids_K = scores_V.topk(top_k)
            weights_K = scores_K.exp()
            total = weights_K.sum()
        else:
            scores_K, ids_K, weights_K, total = _top_p_candidates(scores_V, sampling.top_p)
        if sampling.top_p < 1:
            before_K = weights_K.cumsum(0) - weights_K
            kept = max(int((before_K < sampling.top_p * total).sum()), 1)
            scores_K, ids_K = scores_K[:kept], ids_K[:kept]
        if sampling.min_p > 0:
            kept = max(int((scores_K >= math.log(sampling.min_p)).sum()), 1)
            scores_K, ids_K = scores_K[:kept], ids_K[:kept]
        return ids_K, scores_K


def _top_p_candidates(scores_V: Tensor, top_p: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores, ids and weights of enough top tokens to cover `top_p` of the weight; total weight."""
    total = scores_V.exp().sum()
    for count in (*(few for few in _TOP_K_SIZES if few < len(scores_V)), len(scores_V)):
        scores_K, ids_K = scores_V.topk(count)
        weights_K = scores_K.exp()
        if float(weights_K.sum()) >= top_p * float(total):
            break
    return scores_K, ids_K, weights_K, total


def tokens_with_logprobs(
    logits_TV: Tensor,
    token_ids: Sequence[int],
    num_candidates: int,
    token_bytes: Callable[[int], bytes],
) -> list[SequenceToken]:
    """`token_ids[t]` with its log probability by float32 `logits_TV[t]`, and likely tokens.

    These are the `num_candidates` likeliest. `token_bytes` returns a token's bytes. `logits_TV` is
    not modified.
    """
    total_T1 = torch.logsumexp(logits_TV, -1, keepdim=True)
    ids_T1 = torch.tensor(token_ids, device=logits_TV.device).unsqueeze(1)
    own_T = (logits_TV.gather(1, ids_T1) - total_T1).squeeze(1).tolist()
    if not num_candidates:
        rows: list[tuple[CandidateToken, ...]] = [()] * len(token_ids)
    else:
        best_TK, ids_TK = logits_TV.topk(min(num_candidates, logits_TV.shape[1]))
        best_TK = best_TK - total_T1
        rows = [
            tuple(CandidateToken(i, token_bytes(i), p) for i, p in zip(ids, values, strict=True))
            for ids, values in zip(ids_TK.tolist(), best_TK.tolist(), strict=True)
        ]
    return [
        SequenceToken(token_id, token_bytes(token_id), logprob, likeliest)
        for token_id, logprob, likeliest in zip(token_ids, own_T, rows, strict=True)
    ]
