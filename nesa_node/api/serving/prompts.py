"""Tokenization and checks of prompts, given as text or as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nesa_node.api.bodies.splitting import light, split
from nesa_node.web.problem import Problem

if TYPE_CHECKING:
    from nesa_node.api.serving.served_model import ServedModel


async def all_tokens_of(
    model: ServedModel, prompts: Sequence[str | list[int]], param: str
) -> list[tuple[int, ...]]:
    """Tokens of each prompt, at least one. Raises `Problem` as `checked_prompt` does.

    The total size decides about a thread: many short prompts take as long as one long prompt.
    """
    return await light(
        sum(map(len, prompts)),
        lambda: [_tokens_of(model, prompt, param) for prompt in prompts],
        takes_memory=any(isinstance(prompt, str) for prompt in prompts),
    )


def _tokens_of(model: ServedModel, prompt: str | list[int], param: str) -> tuple[int, ...]:
    if isinstance(prompt, str):
        most = model.context_length
        prompt = split(model.tokenizer, prompt, special=True, most=most, param=param)
        if not prompt and model.tokenizer.bos_token_id is not None:
            prompt = [model.tokenizer.bos_token_id]
    return checked_prompt(model, prompt, param)


def checked_prompt(model: ServedModel, prompt: Sequence[int], param: str) -> tuple[int, ...]:
    """Prompt with at least one token, all in the model's vocabulary. Raises `Problem` otherwise.

    Chat templates may return an empty text, and tokenizers tokens that the model lacks.
    """
    if not prompt:
        raise Problem(400, f"{param}: it has no tokens", code="invalid_value", param=param)
    if max(prompt) >= model.vocab_size:
        raise Problem(
            400,
            f"{param}: the model has no token {max(prompt)}, its last is {model.vocab_size - 1}",
            code="invalid_value",
            param=param,
        )
    return tuple(prompt)
