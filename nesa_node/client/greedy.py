"""Stop condition of greedy decoding, where it depends on token ids and lengths only.

V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
)


@dataclass(frozen=True, slots=True)
class Ending:
    """Stop after `most` tokens, or at one of `stops`, which are banned from the first `least`
    tokens.
    """

    most: int
    least: int = 0
    stops: frozenset[int] = frozenset()

    def banned(self, number: int) -> frozenset[int]:
        """Ids that generated token `number`, counted from 0, must not have."""
        return self.stops if number < self.least else frozenset()

    def ends_with(self, token: int, number: int) -> bool:
        """Whether `token`, generated token `number` counted from 0, is the last."""
        return number + 1 >= self.most or token in self.stops


def find_ending(
    config: GenerationConfig,
    processors: Iterable[LogitsProcessor],
    criteria: Iterable[StoppingCriteria],
    prompt_columns: int,
) -> Ending | None:
    """The stop condition of plain greedy search; None if `generate` is asked for anything else."""
    if config.do_sample or config.return_dict_in_generate or config.is_assistant:
        return None
    most: list[int] = []
    least: list[int] = [0]
    stops: list[frozenset[int]] = []
    for one in criteria:
        # Exact types: subclasses may behave differently.
        if type(one) is MaxLengthCriteria:
            most.append(one.max_length - prompt_columns)
        elif type(one) is EosTokenCriteria:
            stops.append(_ids(one.eos_token_id))
        else:
            return None
    for processor in processors:
        if type(processor) is MinLengthLogitsProcessor:
            least.append(processor.min_length - prompt_columns)
        elif type(processor) is MinNewTokensLengthLogitsProcessor:
            least.append(
                processor.min_new_tokens + processor.prompt_length_to_skip - prompt_columns
            )
        else:
            return None
        stops.append(_ids(processor.eos_token_id))
    if not most or len(set(stops)) > 1:
        return None
    return Ending(min(most), max(least), stops[0] if stops else frozenset())


def likeliest(scores_V: torch.Tensor, banned: frozenset[int]) -> int:
    """Index of the largest score that is not banned."""
    token = int(scores_V.argmax())
    if token not in banned:
        return token
    scores_V = scores_V.clone()
    scores_V[sorted(banned)] = -torch.inf
    return int(scores_V.argmax())


def _ids(tokens: torch.Tensor) -> frozenset[int]:
    return frozenset(tokens.flatten().tolist())
