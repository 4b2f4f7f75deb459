"""Embeddings of texts: the mean of the last hidden states of a prefill, normalized to length 1.

T packed tokens, L tokens of one row, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nesa_node.client.model.activity import RunningSession
from nesa_node.client.model.causal_lm import DistributedModelForCausalLM
from nesa_node.client.model.inference_session import InferenceSession
from nesa_node.client.model.loop_thread import Interrupt
from nesa_node.core.errors import ContextLengthError

MAX_SESSION_ROWS = 16
"""Limit on the rows of one session."""
MAX_SESSION_TOKENS = 4096
"""Limit on the cache of one session, in tokens of all rows, unless a single text is longer."""
MAX_STEP_TOKENS = 512
"""Limit on the tokens of one step, of all rows together: all their outputs come back at once."""


def group_by_length(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Group texts of similar length into sessions; yield the indices of each group."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        if batch and (
            len(batch) == MAX_SESSION_ROWS or lengths[index] * (len(batch) + 1) > MAX_SESSION_TOKENS
        ):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


@torch.inference_mode()
def embed(
    model: DistributedModelForCausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    running: RunningSession,
    interrupt: Interrupt,
) -> list[Tensor]:
    """Embedding of each text: [D], float32, on the CPU. Blocks.

    It is the mean over the text's tokens of transformers' `last_hidden_state`, after the final
    norm, divided by its Euclidean length. Raises `ContextLengthError` for a text that is too long,
    `ValueError` for one without tokens, and as sessions do.
    """
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"text {index} has no tokens")
        if len(prompt) > model.context_length:
            raise ContextLengthError(
                f"text {index} has {len(prompt)} tokens, the model holds {model.context_length}"
            )
    found: dict[int, Tensor] = {}
    for batch in group_by_length([len(prompt) for prompt in prompts]):
        rows = [torch.tensor(prompts[index]) for index in batch]
        longest = max(map(len, rows))
        with model.inference_session(longest, len(rows), interrupt=interrupt) as session:
            running.mark_opened(session)
            for index, sum_D in zip(batch, _sum_hidden_states(session, rows), strict=True):
                # The sum and the mean are equal after normalization.
                found[index] = torch.nn.functional.normalize(sum_D, dim=0).float().cpu()
    return [found[index] for index in range(len(prompts))]


def _sum_hidden_states(session: InferenceSession, rows: Sequence[Tensor]) -> list[Tensor]:
    """Sum of each row's hidden states over its tokens: [D], float64, on the CPU."""
    width = max(MAX_STEP_TOKENS // len(rows), 1)
    size = session.ends.hidden_size
    sums = [torch.zeros(size, dtype=torch.float64) for _ in rows]
    for start in range(0, max(map(len, rows)), width):
        pieces = [ids_L[start : start + width] for ids_L in rows]
        hidden_TD = session.ends.final_norm(session.feed(pieces, want="all"))
        parts = torch.split(hidden_TD, [len(piece) for piece in pieces])
        for row, part_LD in enumerate(parts):
            sums[row] += part_LD.sum(0, dtype=torch.float64).cpu()
    return sums
