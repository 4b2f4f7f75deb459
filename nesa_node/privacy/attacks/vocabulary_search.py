"""Recovery of tokens by trial: position after position, each token of the vocabulary is computed.

Attention is causal, so that a position's state depends on that token and on those before it, which
are known by then: a text of L tokens takes at most L V trials, not V^L. A secret rotation of the
states keeps their inner products (the Gram matrix), a secret permutation their sorted values: what
is compared is what stays. Known since Morris et al. 2023 (language model inversion) and Thomas et
al. 2025 ("Hidden No More", permuted states).

C candidates, D hidden, P positions that are known, S values of a signature, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

CANDIDATES_AT_ONCE = 256
MAX_RELATIVE_ERROR = 2e-5
"""Of the right token's signature in float32: other software, another processor."""

Signature = Callable[[Tensor, Tensor], Tensor]
"""Values [C, S] that a secret transform leaves, of states [C, D] that follow states [P, D]."""


class CandidateBlocks(Protocol):
    """The public model's first blocks, as the attacker runs them."""

    def states(self, prefix: Sequence[int], candidates: Tensor) -> Tensor:
        """States [C, D] of the position after `prefix`, one for each of `candidates` [C]."""
        ...

    def likely_tokens(self, prefix: Sequence[int]) -> Tensor:
        """All tokens [V] in the order in which they are tried, most likely first."""
        ...


def states_as_they_are(_: Tensor, states_CD: Tensor) -> Tensor:
    """The signature of plain states: they themselves."""
    return states_CD


def inner_products(known_PD: Tensor, states_CD: Tensor) -> Tensor:
    """What an orthogonal matrix leaves: the new row of the Gram matrix, [C, P + 1]."""
    return torch.cat([states_CD @ known_PD.T, (states_CD * states_CD).sum(1, keepdim=True)], 1)


def sorted_values(_: Tensor, states_CD: Tensor) -> Tensor:
    """What a permutation of the channels leaves: the values in order, [C, D]."""
    return states_CD.sort(1).values


@dataclass(frozen=True, slots=True)
class Match:
    """The best candidate of a position, and the relative error of its signature."""

    token: int
    error: float
    tried: int


def search_tokens(
    observed_LD: Tensor,
    blocks: CandidateBlocks,
    signature: Signature = states_as_they_are,
    *,
    known: Sequence[int] = (),
    most_candidates: int | None = None,
) -> Iterator[Match]:
    """Recover a text's tokens after the `known` ones from the states that a node received.

    A prompt in a chat template begins with known tokens; a Gram matrix needs one, since of a first
    position it has a single number. Computed in float64. The search of a position ends at the first
    signature within `MAX_RELATIVE_ERROR`, else with the nearest of all candidates (the first
    `most_candidates`, or the whole vocabulary).
    """
    observed_LD = observed_LD.double()
    prefix: list[int] = []
    own_PD = observed_LD.new_empty(0, observed_LD.shape[1])
    for position, observed_D in enumerate(observed_LD):
        if position < len(known):
            token = torch.tensor([known[position]])
            own_PD = torch.cat([own_PD, blocks.states(prefix, token).double()])
            prefix.append(known[position])
            continue
        wanted_1S = signature(observed_LD[:position], observed_D[None])
        match, own_D = _match_one(wanted_1S, prefix, own_PD, blocks, signature, most_candidates)
        prefix.append(match.token)
        own_PD = torch.cat([own_PD, own_D[None]])
        yield match


def _match_one(
    wanted_1S: Tensor,
    prefix: Sequence[int],
    own_PD: Tensor,
    blocks: CandidateBlocks,
    signature: Signature,
    most_candidates: int | None,
) -> tuple[Match, Tensor]:
    """The best candidate, and its state as the attacker computed it."""
    best, best_D, tried = None, None, 0
    # Values of a signature differ in size by orders of magnitude: each counts by its own.
    size_1S = wanted_1S.abs().clamp_min(wanted_1S.abs().mean())
    order_V = blocks.likely_tokens(prefix)[:most_candidates]
    for candidates in torch.split(order_V, CANDIDATES_AT_ONCE):
        states_CD = blocks.states(prefix, candidates).double()
        errors_C = ((signature(own_PD, states_CD) - wanted_1S) / size_1S).square().mean(1).sqrt()
        at = int(errors_C.argmin())
        tried += len(candidates)
        if best is None or float(errors_C[at]) < best.error:
            best, best_D = Match(int(candidates[at]), float(errors_C[at]), tried), states_CD[at]
        if best.error <= MAX_RELATIVE_ERROR:
            break
    assert best is not None
    assert best_D is not None
    return Match(best.token, best.error, tried), best_D
